"""The published vectors, checked as another implementation would: with nothing of this project.

Only msgpack, base58, numpy and an Ed25519 library are used here, after the words of ``docs/protocol.md``.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path
from typing import Any

import base58
import msgpack
import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

DOCS = Path(__file__).resolve().parents[2] / "docs"
VECTORS: dict[str, Any] = json.loads((DOCS / "protocol-vectors.json").read_text(encoding="utf-8"))
SWARM = bytes.fromhex(VECTORS["manifest"]["swarm_id"])


def packed(values: list[Any]) -> bytes:
    return bytes(msgpack.packb(values))


def signed_by(peer: str, context: str, data: bytes, signature: bytes) -> None:
    """Raises if the signature is not the peer's."""
    public = base58.b58decode(peer)[6:]
    Ed25519PublicKey.from_public_bytes(public).verify(signature, b"sentinel:" + context.encode() + b"\0" + data)


def test_the_document_and_the_vectors_are_up_to_date() -> None:
    from scripts.protocol_doc import PATH, VECTORS, document, vectors_text

    text = PATH.read_text(encoding="utf-8")
    assert document(text) == text
    assert vectors_text() == VECTORS.read_text(encoding="utf-8")


def test_every_method_is_in_the_document() -> None:
    from protocol.messages import Method
    from scripts.protocol_doc import CALLS

    assert set(CALLS) == set(Method)


def test_every_field_of_a_record_is_in_the_document() -> None:
    from dataclasses import fields

    from protocol.records import Accusation, Claim, Verdict

    rows = dict(
        line.removeprefix("| ").split(" | ", 1)
        for line in (DOCS / "protocol.md").read_text(encoding="utf-8").splitlines()
        if line.startswith(("| claim |", "| accusation |", "| verdict |"))
    )
    for record in (Claim, Accusation, Verdict):
        told = rows[record.__name__.lower()]
        assert [field.name for field in fields(record) if f"`{field.name}`" not in told] == []


@pytest.mark.parametrize("identity", VECTORS["identities"])
def test_identities(identity: dict[str, str]) -> None:
    seed, public = bytes.fromhex(identity["seed"]), bytes.fromhex(identity["public_key"])
    assert Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw() == public
    assert base58.b58encode(bytes.fromhex("002408011220") + public).decode() == identity["peer_id"]
    assert bytes.fromhex(identity["key_file"]) == bytes.fromhex("08011240") + seed + public


def test_a_signature() -> None:
    case = VECTORS["signature"]
    signed = b"sentinel:" + case["context"].encode() + b"\0" + bytes.fromhex(case["data"])
    assert signed.hex() == case["signed_bytes"]
    key = Ed25519PrivateKey.from_private_bytes(bytes.fromhex(case["seed"]))
    assert key.sign(signed).hex() == case["signature"]


def test_the_manifest_and_an_invite() -> None:
    data = bytes.fromhex(VECTORS["manifest"]["bytes"])
    assert hashlib.sha256(data).digest() == SWARM
    values = msgpack.unpackb(data)
    assert list(values) == sorted(values) and values["name"] == "golden"
    assert msgpack.packb(values) == data
    scheme, _, rest = VECTORS["invite"].partition("://")
    swarm, _, addresses = rest.partition("/")
    assert (scheme, swarm) == ("sentinel", SWARM.hex())
    assert [address.split("/")[-1] for address in addresses.split(",")] == [
        identity["peer_id"] for identity in VECTORS["identities"][:2]
    ]


def test_frames() -> None:
    found = {}
    for case in VECTORS["frames"]:
        frame = bytes.fromhex(case["frame"])
        magic, version, kind, head_bytes, body_bytes = struct.unpack_from(">2sBBIQ", frame)
        assert (magic, version, kind) == (b"SW", 1, case["kind"])
        assert len(frame) == 16 + head_bytes + body_bytes
        found[case["name"]] = msgpack.unpackb(frame[16 : 16 + head_bytes]), frame[16 + head_bytes :]
    assert found["hello"][0]["swarm"] == SWARM and found["hello"][0]["version"] == 1
    assert found["request without a body"][0] == {
        "id": 3,
        "method": "end",
        "step": 41,
        "loss": 1.5,
        "microbatches": 8,
    }
    assert found["reply with a body"] == ({"id": 4}, bytes(range(8)))
    assert found["refusal"][0]["kind"] == "busy"


def test_tensors() -> None:
    values = np.array(VECTORS["tensors"]["values"], dtype=np.float32)
    bodies = {name: bytes.fromhex(body) for name, body in VECTORS["tensors"]["bodies"].items()}
    assert bodies["fp32"] == values.astype("<f4").tobytes()
    assert bodies["bf16"] == (values.view(np.uint32) >> 16).astype("<u2").tobytes()  # these values need no rounding
    blocks = -(-len(values) // 64)
    scales = np.frombuffer(bodies["int8"], "<f4", blocks)
    numbers = np.frombuffer(bodies["int8"], "i1", offset=4 * blocks)
    whole = np.repeat(scales, 64)[: len(values)]
    assert np.abs(numbers * whole - values).max() <= scales.max() / 2 + 1e-6
    assert [np.abs(values[64 * block : 64 * block + 64]).max() / 127 for block in range(blocks)] == pytest.approx(
        scales.tolist()
    )


def test_a_sketch() -> None:
    case = VECTORS["sketch"]
    key = bytes.fromhex(case["key"])
    assert key == hashlib.sha256(b"sentinel:sketch" + SWARM + (41).to_bytes(8, "big")).digest()
    cloud = np.array(case["tensor"])
    tokens, width = cloud.shape
    for _ in range(2):
        cloud = cloud - cloud.mean(axis=0)
        lengths = np.linalg.norm(cloud, axis=1)
        median = np.sort(lengths)[(tokens - 1) // 2]
        cloud = cloud * np.minimum(1, median / lengths)[:, None]
    count = tokens * width
    digest = hashlib.shake_256(key + tokens.to_bytes(8, "big") + width.to_bytes(8, "big")).digest(-(-count // 8))
    bits = np.unpackbits(np.frombuffer(digest, np.uint8), bitorder="little")[:count].reshape(tokens, width)
    row = width
    while math.gcd(row, case["size"]) != 1:
        row += 1
    laid = np.zeros((tokens, row))
    laid[:, :width] = cloud * (bits.astype(float) * 2 - 1)
    flat = laid.ravel()
    flat = np.pad(flat, (0, -len(flat) % case["size"]))
    assert flat.reshape(-1, case["size"]).sum(axis=0) == pytest.approx(case["sketch"], abs=1e-3)


def test_statements() -> None:
    told = VECTORS["statements"]
    one = VECTORS["identities"][0]["peer_id"]
    tokens = bytes.fromhex(told["tokens"]["body"])
    digest = hashlib.sha256(tokens).digest()
    assert digest.hex() == told["tokens"]["body_digest"]
    about = packed([SWARM, told["tokens"]["step"], told["tokens"]["microbatch"], digest])
    signed_by(one, "tokens", about, bytes.fromhex(told["tokens"]["signature"]))
    orders = {
        "hop": ("peer", "stage", "step", "microbatch", "direction", "digest", "source", "sketch"),
        "receipt": (*("peer", "stage", "step", "microbatch", "received", "sent", "got", "returned", "parameters"),),
    }
    for name, order in orders.items():
        data = bytes.fromhex(told[name])
        values = msgpack.unpackb(data)
        assert list(values) == sorted(values) and set(values) == {*order, "signature"}
        signed_by(one, name, packed([SWARM, *(values[field] for field in order)]), values["signature"])
    subject = hashlib.sha256(bytes.fromhex(told["receipt"])).digest()
    draw, vote = told["draw"], told["vote"]
    assert subject.hex() == draw["subject"] == vote["subject"]
    signed_by(draw["by"], "draw", packed([SWARM, subject]), bytes.fromhex(draw["signature"]))
    voted = packed([SWARM, subject, vote["accused"], vote["guilty"]])
    signed_by(vote["by"], "vote", voted, bytes.fromhex(vote["signature"]))


@pytest.mark.parametrize("case", VECTORS["records"], ids=lambda case: case["name"])
def test_records(case: dict[str, str]) -> None:
    data = bytes.fromhex(case["bytes"])
    kind, payload, signature = msgpack.unpackb(data)
    assert packed([kind, payload, signature]) == data
    signed_by(case["subkey"], f"record/{kind}", payload, signature)
    values = msgpack.unpackb(payload)
    assert list(values) == sorted(values) and values["swarm"] == SWARM
    writer = {"claim": "peer", "accusation": "accuser", "verdict": "writer"}[case["name"]]
    assert values[writer] == case["subkey"]
    about = values["stage"] if case["name"] == "claim" else values["accused"]
    assert case["key"] == f"sentinel/{SWARM.hex()}/{case['name']}/{about}"
    for juror, vote in values.get("votes", ()):
        signed_by(juror, "vote", packed([SWARM, values["subject"], values["accused"], True]), vote)
    if "draw" in values:
        signed_by(values["writer"], "draw", packed([SWARM, values["subject"]]), values["draw"])


def test_an_admission() -> None:
    case = VECTORS["admission"]
    payload, signature = msgpack.unpackb(bytes.fromhex(case["bytes"]))
    signed_by(case["by"], "admission", payload, signature)
    values = msgpack.unpackb(payload)
    assert list(values) == ["expires", "issued", "peer", "revoked", "serial", "swarm"]
    assert values["swarm"] == SWARM and values["peer"] == VECTORS["identities"][1]["peer_id"]


def order(stage: int, peers: list[str]) -> list[str]:
    seed = b"sentinel:wiring" + SWARM + (41).to_bytes(8, "big") + stage.to_bytes(4, "big")
    return sorted(peers, key=lambda peer: hashlib.sha256(seed + peer.encode()).digest())


def test_the_wiring() -> None:
    case = VECTORS["wiring"]
    above, below = order(0, list(case["upstream"])), order(1, list(case["downstream"]))
    assert (above, below) == (case["order_upstream"], case["order_downstream"])

    def laid(peers: list[str], shares: dict[str, float]) -> dict[str, tuple[float, float]]:
        ends = np.cumsum([shares[peer] for peer in peers])
        return {peer: (end - shares[peer], end) for peer, end in zip(peers, ends.tolist(), strict=True)}

    pieces, targets = laid(above, case["upstream"]), laid(below, case["downstream"])
    for peer, (start, end) in pieces.items():
        overlaps = [(target, min(end, stop) - max(start, begin)) for target, (begin, stop) in targets.items()]
        wanted = {target: length / (end - start) for target, length in overlaps if length > 1e-6}
        assert dict(case["wires"][peer]) == pytest.approx(wanted, abs=1e-6)
    numbers = [number for peer in above for number in case["microbatches_of_8"][peer]]
    assert numbers == list(range(8))


def test_the_jury() -> None:
    case = VECTORS["jury"]
    draw = bytes.fromhex(case["draw"])
    siblings = [peer for peer in case["replicas"] if peer != case["accused"]]
    drawn = sorted(siblings, key=lambda peer: hashlib.sha256(b"sentinel:jury" + draw + peer.encode()).digest())
    assert drawn == case["jury"]


def test_the_digest_of_an_aggregate() -> None:
    case = VECTORS["aggregate_digest"]
    mean = struct.pack(f"<{len(case['values'])}f", *case["values"])
    assert hashlib.sha256(case["microbatches"].to_bytes(8, "big") + mean).hexdigest() == case["digest"]


def test_the_signature_of_a_part() -> None:
    case = VECTORS["part"]
    body = struct.pack(f"<{len(case['values'])}f", *case["values"])
    about = [case["step"], case["attempt"], case["members"], case["owner"], case["microbatches"]]
    data = packed([SWARM, *about, hashlib.sha256(body).digest()])
    signed_by(case["signer"], "part", data, bytes.fromhex(case["signature"]))


def test_projections_of_slices() -> None:
    case = VECTORS["projections"]
    vector, members, width = np.arange(3.0 * 1024 + 5) % 7, case["members"], case["width"]
    found = np.zeros((members, width))
    packed_signs = hashlib.shake_256(bytes.fromhex(case["key"])).digest(len(vector))
    signs = np.unpackbits(np.frombuffer(packed_signs, dtype=np.uint8), bitorder="little") * 2.0 - 1.0
    for index, value in enumerate(vector):
        place = index // members
        found[index % members, place % width] += signs[place] * value
    assert found[:, :4].tolist() == case["first"]
    assert hashlib.sha256(found.astype("<f4").tobytes()).hexdigest() == case["sha256"]
