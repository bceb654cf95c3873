"""What reads bytes of strangers, or of a file that a crash or a person may have damaged, as targets of a fuzzer.

Each target takes any bytes. It returns, or raises the errors that its decoder promises; anything else is a finding, and
so is a broken promise about what was read: that it reads back the same once it is written again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgpack
import torch

from node import contribution, verdicts
from node.checkpoints import checkpoint_name, peek, read_checkpoint, read_parameters
from node.evidence import open_input, open_passed_on
from node.observing.reports import read_outline, read_report
from node.state_folder import StateFolder
from protocol import messages
from protocol.admissions import Roll, open_admission, peek_admission
from protocol.errors import (
    AddressError,
    FrameError,
    InviteError,
    LocalError,
    ManifestError,
    MessageError,
    RecordError,
    TensorError,
)
from protocol.fields import decode, encode
from protocol.framing import DISCARD, Frame, FrameReader, decode_head
from protocol.hops import check_tokens, open_hop, read_hop
from protocol.identity import Identity, is_peer_id, public_key_of, verify
from protocol.invite import parse_invite, parse_multiaddr
from protocol.manifest import Manifest
from protocol.packing import pack, unpack
from protocol.receipts import check_draw, check_input_receipt, check_receipt, check_vote, open_receipt
from protocol.records import parse_record, record_key
from protocol.tensors import WireDtype, decode_tensor, encode_tensor
from tests.fuzz import seeds
from verifier.baselines import Reduction, pack_reduction, unpack_reduction

BODY_LIMIT = 1 << 16
MESSAGES: tuple[type[Any], ...] = tuple(
    kind
    for _, kind in sorted(vars(messages).items())
    if isinstance(kind, type)
    and dataclasses.is_dataclass(kind)
    and all("check" in field.metadata for field in dataclasses.fields(kind))
)
SHAPES: tuple[tuple[int, ...], ...] = ((0,), (1,), (3, 5), (2, 4, 8), (130,))
LIKE = Reduction(mean=torch.zeros(3), quantiles=torch.zeros(2, 3))


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One way in."""

    reads: tuple[Callable[..., object], ...]
    """The decoders that it reaches."""
    run: Callable[[bytes], object]
    refuses: tuple[type[Exception], ...]
    """The errors that are no finding."""
    seeds: Callable[[], Sequence[bytes]]

    def try_out(self, data: bytes) -> bool:
        """Whether the bytes were taken; raises for a finding alone."""
        try:
            self.run(data)
        except self.refuses:
            return False
        return True

    def attempt(self, data: bytes) -> None:
        """The same, with nothing to return."""
        self.try_out(data)


def _head(data: bytes) -> None:
    head = decode_head(data)
    assert decode_head(msgpack.packb(dict(head))) == head or "nan" in repr(head)


def _frames(data: bytes) -> None:
    """The frames of a stream are the same however it is cut; the first two bytes say where."""
    first, second = data[:1], data[2:]
    cut = first[0] % (len(second) + 1) if first else 0
    whole, parts = (_read(pieces) for pieces in ([second], [second[:cut], second[cut:]]))
    assert repr(whole) == repr(parts)
    if isinstance(whole[-1] if whole else None, FrameError):
        raise whole[-1]  # type: ignore[misc]


def _read(pieces: Sequence[bytes]) -> list[Frame | FrameError]:
    reader = FrameReader(lambda kind, head: DISCARD if head.get("step") == 4 else BODY_LIMIT)
    found: list[Frame | FrameError] = []
    try:
        for piece in pieces:
            found += reader.feed(piece)
    except FrameError as error:
        # Frames that one piece completed before the error are lost with it, so only the error is compared.
        return [error]
    return found


def _message(data: bytes) -> None:
    """The first byte says which message the head is to be read as."""
    if not data:
        return
    kind = MESSAGES[data[0] % len(MESSAGES)]
    message = decode(kind, decode_head(data[1:]))
    assert repr(decode(kind, encode(message))) == repr(message)


def _messages() -> list[bytes]:
    example = {"step": 3, "attempt": 1, "members": [seeds.SELF.peer_id], "microbatches": 2, "digest": bytes(32)}
    example |= {"parameters": bytes(32), "id": 1, "method": "part", "records": [b"r"], "microbatch": 4}
    return [bytes([index]) + msgpack.packb(example) for index in range(len(MESSAGES))]


def _tensor(data: bytes) -> None:
    """The first two bytes say which dtype and shape are expected."""
    if len(data) < 2:
        return
    dtype, shape = list(WireDtype)[data[0] % len(WireDtype)], SHAPES[data[1] % len(SHAPES)]
    tensor = decode_tensor(data[2:], dtype=dtype.value, shape=shape, expected_dtype=dtype, expected_shape=shape)
    assert tuple(tensor.shape) == shape and tensor.dtype is torch.float32
    if dtype is not WireDtype.INT8 and torch.isfinite(tensor).all():
        assert b"".join(encode_tensor(tensor, dtype)) == data[2:]


def _tensors() -> list[bytes]:
    return [
        bytes([dtype, shape]) + b"".join(encode_tensor(torch.ones(SHAPES[shape]), list(WireDtype)[dtype]))
        for dtype in range(len(WireDtype))
        for shape in range(len(SHAPES))
    ]


def _record(data: bytes) -> None:
    record = parse_record(data, swarm=seeds.SWARM, now=seeds.NOW)
    assert record_key(record)


def _admission(data: bytes) -> None:
    with contextlib.suppress(RecordError):
        peek_admission(data)
    admission = open_admission(data, swarm=seeds.SWARM, coordinator=seeds.SELF.peer_id, now=seeds.NOW)
    roll = Roll(swarm=seeds.SWARM, coordinator=seeds.SELF.peer_id)
    assert roll.take(data, seeds.NOW) and roll.of(admission.peer) == admission


def _receipt(data: bytes) -> None:
    of = open_receipt(seeds.receipt(), seeds.SWARM)
    with contextlib.suppress(MessageError):
        check_input_receipt(data, seeds.SWARM, of=of)
    got = open_receipt(data, seeds.SWARM)
    check_receipt(
        data,
        seeds.SWARM,
        peer=got.peer,
        stage=got.stage,
        step=got.step,
        microbatch=got.microbatch,
        received=got.received,
        returned=got.returned,
    )


def _hop(data: bytes) -> None:
    hop = read_hop(data, seeds.SWARM, sketch_bytes=seeds.SKETCH_BYTES)
    assert hop == open_hop(
        data,
        seeds.SWARM,
        stage=hop.stage,
        step=hop.step,
        microbatch=hop.microbatch,
        direction=hop.direction,
        sketch_bytes=seeds.SKETCH_BYTES,
    )


def _evidence(data: bytes) -> None:
    """A body, and the statement that comes with it."""
    body, statement = data[:64], data[64:]
    with contextlib.suppress(MessageError):
        open_input(
            messages.EvidenceAnswer(input_hop=statement[: messages.MAX_HOP_BYTES]),
            body[:32],
            seeds.SWARM,
            stage=1,
            step=9,
            microbatch=4,
            source=hashlib.sha256(seeds.ACTIVATION).digest(),
            sketch_bytes=seeds.SKETCH_BYTES,
        )
    answer = messages.EvidenceAnswer(input_receipt=statement[: messages.MAX_RECEIPT_BYTES])
    of = open_receipt(seeds.receipt(), seeds.SWARM)
    open_passed_on(answer, body, seeds.SWARM, of=of, activation_bytes=len(seeds.ACTIVATION))


def _invite(data: bytes) -> None:
    invite = parse_invite(data.decode("utf-8", "surrogateescape"))
    assert parse_invite(str(invite)) == invite


def _address(data: bytes) -> None:
    text = data.decode("utf-8", "surrogateescape")
    with contextlib.suppress(AddressError):
        listening = parse_multiaddr(text, need_peer=False)
        assert parse_multiaddr(listening.text, need_peer=False) == listening
    address = parse_multiaddr(text)
    assert parse_multiaddr(address.text) == address


def _manifest(data: bytes) -> None:
    with contextlib.suppress(MessageError):
        read_outline(data, hashlib.sha256(data).digest())
    manifest = Manifest.from_bytes(data)
    assert manifest.to_bytes() == data and manifest.swarm_id == hashlib.sha256(data).hexdigest()


def _toml(data: bytes) -> None:
    manifest = Manifest.from_toml(data.decode("utf-8", "replace"))
    assert Manifest.from_bytes(manifest.to_bytes()) == manifest


def _status(data: bytes) -> None:
    with contextlib.suppress(ValueError, RecursionError):
        status = json.loads(data)
        if isinstance(status, dict):
            assert read_report(status) is not None


def _unpacked(data: bytes) -> None:
    value = unpack(data)
    if "nan" not in repr(value) and _plain(value):
        assert unpack(pack(value)) == value


def _plain(value: object) -> bool:
    """Whether it is made of what ``pack`` writes."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_plain, value))
    return value is None or isinstance(value, str | bytes | int | float | bool)


def _signatures(data: bytes) -> None:
    """Three pieces of 64 bytes: as a peer id, a signature, and what is signed."""
    peer, signature, signed = data[:64].decode("latin-1").rstrip("\0"), data[64:128], data[128:]
    for check in (
        verify(peer, "fuzz", signed, signature),
        check_draw(peer, seeds.SWARM, signature, signed),
        check_vote(peer, seeds.SWARM, signature, subject=signed, accused=peer, guilty=True),
        check_tokens(peer, seeds.SWARM, signature, step=1, microbatch=2, tokens=signed),
    ):
        assert check is False or is_peer_id(peer)
    assert is_peer_id(peer) or peer != seeds.SELF.peer_id
    public_key_of(peer)


def _baseline(data: bytes) -> None:
    assert pack_reduction(unpack_reduction(data, like=LIKE)) == data


def _checkpoint(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        path = Path(folder) / checkpoint_name(0, 4)
        path.write_bytes(data)
        with contextlib.suppress(LocalError):
            peek(path)
        checkpoint, state = read_checkpoint(path)
        assert (checkpoint.stage, checkpoint.step) == (0, 4) == (0, state.step)
        assert torch.equal(read_parameters(path)[1], state.parameters)


def _peers(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=_memory()) as parent:
        folder = StateFolder(Path(parent))
        folder.peers_path.write_bytes(data)
        assert all(parse_multiaddr(address).text == address for address in folder.load_peers())


def _key(data: bytes) -> None:
    with tempfile.TemporaryDirectory(dir=_memory()) as folder:
        path = Path(folder) / "identity.key"
        path.touch(mode=0o600)
        path.write_bytes(data)
        assert Identity.load(path).peer_id


def _memory() -> str | None:
    """Where files cost no disk."""
    return "/dev/shm" if Path("/dev/shm").is_dir() else None


TARGETS: Mapping[str, Target] = {
    "head": Target(
        reads=(decode_head,), run=_head, refuses=(FrameError,), seeds=lambda: [msgpack.packb({"step": 1, "x": [b"1"]})]
    ),
    "frames": Target(
        reads=(FrameReader.feed,),
        run=_frames,
        refuses=(FrameError,),
        seeds=lambda: [b"\x09\0" + data for data in seeds.frames()],
    ),
    "message": Target(reads=(decode,), run=_message, refuses=(FrameError, MessageError), seeds=_messages),
    "tensor": Target(reads=(decode_tensor,), run=_tensor, refuses=(TensorError,), seeds=_tensors),
    "record": Target(reads=(parse_record,), run=_record, refuses=(RecordError,), seeds=seeds.records),
    "admission": Target(
        reads=(open_admission, peek_admission),
        run=_admission,
        refuses=(RecordError,),
        seeds=lambda: [seeds.admission()],
    ),
    "receipt": Target(
        reads=(open_receipt, check_receipt, check_input_receipt),
        run=_receipt,
        refuses=(MessageError,),
        seeds=lambda: [seeds.receipt(), seeds.receipt_below()],
    ),
    "hop": Target(reads=(read_hop, open_hop), run=_hop, refuses=(MessageError,), seeds=lambda: [seeds.hop()]),
    "evidence": Target(
        reads=(open_passed_on, open_input),
        run=_evidence,
        refuses=(MessageError,),
        seeds=lambda: [
            seeds.ACTIVATION + seeds.GRADIENT + seeds.receipt_below(),
            seeds.ACTIVATION + seeds.GRADIENT + seeds.hop(),
        ],
    ),
    "invite": Target(
        reads=(parse_invite,),
        run=_invite,
        refuses=(InviteError, AddressError),
        seeds=lambda: [f"sentinel://{seeds.SWARM.hex()}{seeds.ADDRESS}".encode()],
    ),
    "address": Target(
        reads=(parse_multiaddr,), run=_address, refuses=(AddressError,), seeds=lambda: [seeds.ADDRESS.encode()]
    ),
    "manifest": Target(
        reads=(Manifest.from_bytes, read_outline),
        run=_manifest,
        refuses=(ManifestError,),
        seeds=lambda: [seeds.MANIFEST.to_bytes()],
    ),
    "toml": Target(
        reads=(Manifest.from_toml,),
        run=_toml,
        refuses=(ManifestError,),
        seeds=lambda: [b'name = "a"\n[stages]\nlayers_per_stage = [1, 1]\n[model]\nlayers = 2\n'],
    ),
    "status": Target(reads=(read_report,), run=_status, refuses=(), seeds=lambda: [seeds.status()]),
    "msgpack": Target(
        reads=(unpack,), run=_unpacked, refuses=(ValueError,), seeds=lambda: [pack({"a": [1, 2.5, b"c", None]})]
    ),
    "signatures": Target(
        reads=(verify, check_draw, check_vote, check_tokens, public_key_of),
        run=_signatures,
        refuses=(AddressError,),
        seeds=lambda: [seeds.SELF.peer_id.encode().ljust(64, b"\0") + bytes(64) + b"signed"],
    ),
    "baseline": Target(
        reads=(unpack_reduction,), run=_baseline, refuses=(ValueError,), seeds=lambda: [pack_reduction(LIKE)]
    ),
    "checkpoint": Target(
        reads=(read_checkpoint, read_parameters, peek),
        run=_checkpoint,
        refuses=(LocalError,),
        seeds=lambda: [seeds.checkpoint()],
    ),
    "verdicts": Target(
        reads=(verdicts.parse_verdicts,),
        run=lambda data: verdicts.parse_verdicts(data, seeds.SWARM.hex()),
        refuses=(verdicts.VerdictsError, verdicts.ForeignVerdictsError),
        seeds=lambda: [seeds.saved()[0]],
    ),
    "contributions": Target(
        reads=(contribution.parse,), run=contribution.parse, refuses=(ValueError,), seeds=lambda: [seeds.saved()[1]]
    ),
    "peers": Target(
        reads=(StateFolder.load_peers,),
        run=_peers,
        refuses=(),
        seeds=lambda: [json.dumps({"peers": [seeds.ADDRESS]}).encode()],
    ),
    "key": Target(reads=(Identity.load,), run=_key, refuses=(LocalError,), seeds=lambda: [seeds.SELF.file_bytes()]),
}
