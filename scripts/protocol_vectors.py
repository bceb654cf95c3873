"""Golden byte vectors of the protocol: everything that two implementations have to spell alike.

``vectors()`` makes them with the project's own code from fixed keys and values. They are kept in
``docs/protocol-vectors.json``, so that another implementation can be checked without running this one.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from node.rounds import aggregate_digest
from node.wiring import assign_microbatches, shuffled, wire
from protocol import fields
from protocol.admissions import Admission, sign_admission
from protocol.framing import FrameKind, encode_head
from protocol.hops import body_digest, sign_hop, sign_tokens, sketch_key
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.manifest import Manifest
from protocol.messages import End, Hello, Method, RequestHead
from protocol.parts import PartClaim, PartSigner
from protocol.receipts import sign_draw, sign_receipt, sign_vote, statement_digest
from protocol.records import (
    Accusation,
    Claim,
    NodeState,
    Record,
    Verdict,
    record_key,
    record_subkey,
    sign_accusation,
    sign_claim,
    sign_verdict,
)
from protocol.tensors import WireDtype, encode_tensor
from verifier.quorum import jury
from verifier.reduction import WIDTH, projections
from verifier.sketch import sketch

TIME = 1_750_000_000.0
"""Unix seconds; every record expires a little later."""
STEP, MICROBATCH = 41, 7
SEEDS = [bytes([number]) * 32 for number in range(1, 7)]
PEERS = [Identity(seed) for seed in SEEDS]
ONE, TWO, THREE, FOUR = PEERS[:4]
SKETCH_SIZE = 16


def vectors() -> dict[str, Any]:
    """All vectors by topic; bytes are hex."""
    manifest = Manifest.from_mapping({"name": "golden"})
    swarm = bytes.fromhex(manifest.swarm_id)
    return {
        "identities": [_identity(peer) for peer in PEERS],
        "signature": _signature(),
        "manifest": {"bytes": manifest.to_bytes().hex(), "swarm_id": manifest.swarm_id},
        "invite": str(Invite(manifest.swarm_id, (_address(ONE, 31330), _address(TWO, 31331)))),
        "frames": _frames(swarm),
        "tensors": _tensors(),
        "sketch": _sketch(swarm),
        "statements": _statements(swarm),
        "records": _records(swarm),
        "admission": _admission(swarm),
        "wiring": _wiring(swarm),
        "jury": _jury(swarm),
        "aggregate_digest": _aggregate(),
        "part": _part(swarm),
        "projections": _projections(),
    }


def _address(peer: Identity, port: int) -> str:
    return f"/ip4/203.0.113.7/tcp/{port}/p2p/{peer.peer_id}"


def _identity(peer: Identity) -> dict[str, str]:
    return {
        "seed": peer.seed.hex(),
        "public_key": peer.public_key.hex(),
        "peer_id": peer.peer_id,
        "key_file": peer.file_bytes().hex(),
    }


def _signature() -> dict[str, str]:
    data = b"some data"
    return {
        "seed": ONE.seed.hex(),
        "context": "example",
        "data": data.hex(),
        "signed_bytes": (b"sentinel:example\0" + data).hex(),
        "signature": ONE.sign("example", data).hex(),
    }


def _frames(swarm: bytes) -> list[dict[str, Any]]:
    hello = fields.encode(Hello(version=1, swarm=swarm, agent="example/1", time=TIME))
    end = {
        **fields.encode(End(step=STEP, loss=1.5, microbatches=8)),
        **fields.encode(RequestHead(id=3, method=Method.END.value)),
    }
    body = bytes(range(8))
    part = {"id": 4, "method": Method.CHUNK.value, "step": STEP, "index": 0}
    cases: list[tuple[str, FrameKind, dict[str, Any], bytes]] = [
        ("hello", FrameKind.HELLO, hello, b""),
        ("request without a body", FrameKind.REQUEST, end, b""),
        ("request", FrameKind.REQUEST, part, b""),
        ("reply with a body", FrameKind.REPLY, {"id": 4}, body),
        ("refusal", FrameKind.ERROR, {"id": 4, "kind": "busy", "message": "too many rounds are open"}, b""),
        ("ping", FrameKind.PING, {"id": 0}, b""),
    ]
    return [
        {"name": name, "kind": kind.value, "frame": (encode_head(kind, head, len(body)) + body).hex()}
        for name, kind, head, body in cases
    ]


def _tensors() -> dict[str, Any]:
    values = [((index * 37) % 64 - 31) / 8 for index in range(70)]  # exact in each of the dtypes but int8
    tensor = torch.tensor(values)
    return {
        "values": values,
        "bodies": {dtype.value: b"".join(encode_tensor(tensor, dtype)).hex() for dtype in WireDtype},
    }


def _sketch(swarm: bytes) -> dict[str, Any]:
    rows = [[((row * 5 + column * 3) % 11 - 5) / 4 for column in range(8)] for row in range(6)]
    key = sketch_key(swarm, STEP)
    return {
        "tensor": rows,
        "key": key.hex(),
        "size": SKETCH_SIZE,
        "sketch": [round(value, 3) for value in sketch(torch.tensor(rows), key=key, size=SKETCH_SIZE).tolist()],
    }


def _statements(swarm: bytes) -> dict[str, Any]:
    tokens = b"".join(token.to_bytes(4, "little") for token in (5, 17, 255))
    digests = [hashlib.sha256(word).digest() for word in (b"received", b"sent", b"got", b"returned", b"parameters")]
    received, sent, got, returned, parameters = digests
    hop = sign_hop(
        ONE,
        swarm,
        stage=1,
        step=STEP,
        microbatch=MICROBATCH,
        direction="activation",
        digest=sent,
        sketch=bytes(8),
        source=received,
    )
    receipt = sign_receipt(
        ONE,
        swarm,
        stage=1,
        step=STEP,
        microbatch=MICROBATCH,
        received=received,
        sent=sent,
        got=got,
        returned=returned,
        parameters=parameters,
    )
    subject = statement_digest(receipt)
    return {
        "tokens": {
            "body": tokens.hex(),
            "body_digest": body_digest((tokens,)).hex(),
            "step": STEP,
            "microbatch": MICROBATCH,
            "signature": sign_tokens(ONE, swarm, step=STEP, microbatch=MICROBATCH, tokens=tokens).hex(),
        },
        "hop": hop.hex(),
        "receipt": receipt.hex(),
        "draw": {"by": TWO.peer_id, "subject": subject.hex(), "signature": sign_draw(TWO, swarm, subject).hex()},
        "vote": {
            "by": THREE.peer_id,
            "subject": subject.hex(),
            "accused": ONE.peer_id,
            "guilty": True,
            "signature": sign_vote(THREE, swarm, subject=subject, accused=ONE.peer_id, guilty=True).hex(),
        },
    }


def _records(swarm: bytes) -> list[dict[str, str]]:
    claim = Claim(
        swarm=swarm,
        peer=ONE.peer_id,
        stage=1,
        addresses=(_address(ONE, 31330),),
        capacity=2.5,
        state=NodeState.TRAINING,
        step=STEP,
        digest=hashlib.sha256(b"parameters").digest(),
        active_from=40,
        generation=1_749_990_000_000_000,
        sequence=3,
        expires=TIME + 30.0,
        label="attic",
        agent="example/1",
    )
    accusation = Accusation(
        swarm=swarm,
        accuser=TWO.peer_id,
        accuser_stage=0,
        accused=ONE.peer_id,
        accused_stage=1,
        kind="strikes",
        reason="sign_flip",
        step=STEP,
        evidence=hashlib.sha256(b"evidence").digest(),
        expires=TIME + 3600.0,
    )
    subject = hashlib.sha256(b"statement").digest()
    verdict = Verdict(
        swarm=swarm,
        writer=TWO.peer_id,
        accused=ONE.peer_id,
        accused_stage=1,
        reason="gradient",
        step=STEP,
        subject=subject,
        draw=sign_draw(TWO, swarm, subject),
        votes=tuple(
            (juror.peer_id, sign_vote(juror, swarm, subject=subject, accused=ONE.peer_id, guilty=True))
            for juror in (THREE, FOUR)
        ),
        expires=TIME + 3600.0,
    )
    signed: list[tuple[Record, bytes]] = [
        (claim, sign_claim(ONE, claim)),
        (accusation, sign_accusation(TWO, accusation)),
        (verdict, sign_verdict(TWO, verdict)),
    ]
    return [
        {
            "name": type(record).__name__.lower(),
            "key": record_key(record),
            "subkey": record_subkey(record),
            "bytes": data.hex(),
        }
        for record, data in signed
    ]


def _admission(swarm: bytes) -> dict[str, str]:
    admission = Admission(swarm=swarm, peer=TWO.peer_id, serial=3, issued=TIME, expires=TIME + 30 * 86_400.0)
    return {"by": ONE.peer_id, "bytes": sign_admission(ONE, admission).hex()}


def _wiring(swarm: bytes) -> dict[str, Any]:
    names = [peer.peer_id for peer in PEERS]
    upstream, downstream = dict.fromkeys(names[:3], 1 / 3), {names[3]: 0.5, names[4]: 0.25, names[5]: 0.25}
    wires = wire(swarm, STEP, 0, upstream, downstream)
    return {
        "step": STEP,
        "stage": 0,
        "upstream": upstream,
        "downstream": downstream,
        "order_upstream": shuffled(swarm, STEP, 0, list(upstream)),
        "order_downstream": shuffled(swarm, STEP, 1, list(downstream)),
        "wires": {peer: [[one.peer, round(one.share, 9)] for one in found] for peer, found in wires.items()},
        "microbatches_of_8": assign_microbatches(swarm, STEP, 8, upstream),
    }


def _jury(swarm: bytes) -> dict[str, Any]:
    names = [peer.peer_id for peer in PEERS]
    draw = sign_draw(TWO, swarm, hashlib.sha256(b"statement").digest())
    return {
        "draw": draw.hex(),
        "accused": names[0],
        "replicas": names[:5],
        "jury": list(jury(draw=draw, accused=names[0], replicas=names[:5])),
    }


def _aggregate() -> dict[str, Any]:
    values = [0.5, -1.25, 3.0]
    body = encode_tensor(torch.tensor(values), WireDtype.FP32)[0]
    return {"values": values, "microbatches": 16, "digest": aggregate_digest(body, 16).hex()}


def _part(swarm: bytes) -> dict[str, Any]:
    values = [0.5, -1.25, 3.0]
    members = (ONE.peer_id, TWO.peer_id)
    claim = PartClaim(step=STEP, attempt=1, members=members, owner=TWO.peer_id, microbatches=4)
    signature = PartSigner(ONE, swarm).sign(claim, encode_tensor(torch.tensor(values), WireDtype.FP32))
    about = {"step": STEP, "attempt": 1, "members": list(members), "owner": TWO.peer_id, "microbatches": 4}
    return {"signer": ONE.peer_id, **about, "values": values, "signature": signature.hex()}


def _projections() -> dict[str, Any]:
    key = hashlib.sha256(b"key").digest()
    vector = torch.arange(3.0 * WIDTH + 5.0).remainder(7.0)
    found = projections(vector, 2, key=key)
    digest = hashlib.sha256(b"".join(encode_tensor(found, WireDtype.FP32))).hexdigest()
    return {
        "vector": f"entry i is i mod 7, for {len(vector)} entries",
        "members": 2,
        "key": key.hex(),
        "width": found.shape[1],
        "first": found[:, :4].tolist(),
        "sha256": digest,
    }
