"""Every message survives the wire, and every field of every message is checked."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest

from protocol import messages
from protocol.errors import (
    FrameError,
    MessageError,
    ProtocolVersionError,
    RefusedError,
    SwarmMismatchError,
)
from protocol.fields import MAX_STEP, decode, encode
from protocol.framing import FrameKind, FrameReader, decode_head, encode_head
from protocol.messages import (
    MAX_MICROBATCHES,
    MAX_RECEIPT_BYTES,
    MAX_REPLICAS,
    MAX_SKETCH_BYTES,
    PUBLIC_METHODS,
    STREAM_OF,
    Method,
    StreamKind,
)
from protocol.refusals import remote_error

PEER = "12D3KooW" + "x" * 44
D32, S64 = bytes(range(32)), bytes(range(64))

EXAMPLES: list[Any] = [
    messages.Hello(version=1, swarm=D32, agent="sentinel/1", time=1_750_000_000.5),
    messages.RequestHead(id=2**62, method="train"),
    messages.ErrorHead(id=-1, kind="frame", message="a frame announces a body"),
    messages.TensorHead(dtype="bf16", shape=(4, 128, 64)),
    messages.Hop(
        peer=PEER,
        stage=1,
        step=MAX_STEP,
        microbatch=7,
        direction="activation",
        digest=D32,
        source=D32,
        sketch=bytes(MAX_SKETCH_BYTES),
        signature=S64,
    ),
    messages.Train(
        step=3,
        microbatch=7,
        attempt=1,
        origin=PEER,
        origin_signature=S64,
        tokens_bytes=512,
        dtype="bf16",
        shape=(4, 128, 64),
        hop=b"hop",
        input_hop=None,
    ),
    messages.Train(
        step=3,
        microbatch=7,
        attempt=1,
        origin=PEER,
        origin_signature=S64,
        tokens_bytes=512,
        dtype="bf16",
        shape=(4, 128, 64),
        hop=b"hop",
        input_hop=b"earlier",
    ),
    messages.Receipt(
        peer=PEER,
        stage=1,
        step=MAX_STEP,
        microbatch=7,
        received=D32,
        sent=D32,
        got=D32,
        returned=D32,
        parameters=D32,
        signature=S64,
    ),
    messages.Receipt(
        peer=PEER,
        stage=2,
        step=3,
        microbatch=7,
        received=D32,
        sent=b"",
        got=b"",
        returned=D32,
        parameters=D32,
        signature=S64,
    ),
    messages.Trained(
        loss=5.5,
        dtype="fp32",
        shape=(2, 2),
        hop=b"h",
        input_hop=b"below",
        receipt=bytes(MAX_RECEIPT_BYTES),
        input_receipt=bytes(MAX_RECEIPT_BYTES),
        outlier=True,
    ),
    messages.Trained(loss=5.5, dtype="fp32", shape=(2, 2), hop=b"h", input_hop=None, receipt=b"receipt"),
    messages.Cleared(step=3, microbatch=7, hops=(b"one", b"two")),
    messages.End(step=3, loss=1.5, microbatches=8),
    messages.EndAnswer(parameters=D32),
    messages.EndAnswer(),
    messages.Audit(statement=b"receipt", draw=S64, origin=PEER, origin_signature=S64, tokens_bytes=512),
    messages.Audit(statement=bytes(messages.MAX_HOP_BYTES), draw=S64),
    messages.AuditAnswer(guilty=True, reason="gradient", signature=S64),
    messages.AuditAnswer(guilty=False, reason="", signature=S64),
    messages.Evidence(step=3, microbatch=7, returned=D32),
    messages.EvidenceAnswer(input_receipt=b"receipt"),
    messages.Parameters(digest=D32),
    messages.Baseline(step=3),
    messages.ShareDone(
        step=3,
        round=1,
        losses=tuple((index, index / 8) for index in range(MAX_MICROBATCHES)),
        failed=(5, 6),
    ),
    messages.DialBack(port=31330, token=bytes(16)),
    messages.DialBackAnswer(host="192.0.2.7", reached=True),
    messages.ShareAnswer(finished=True),
    messages.RoundJoin(step=3, attempt=0, members=(PEER,) * MAX_REPLICAS, microbatches=4, parameters=D32),
    messages.RoundCommit(step=3, attempt=0, digest=D32),
    messages.RoundAnswer(committed=False),
    messages.RoundAnswer(committed=True, digest=D32),
    messages.Part(step=3, attempt=0, members=(PEER,), microbatches=4, signature=bytes(64)),
    messages.PartAnswer(coefficients=(0.25, 0.75)),
    messages.RoundProjection(step=3, attempt=0, members=(PEER,), key=bytes(32)),
    messages.RoundParts(step=3, attempt=0, members=(PEER,)),
    messages.RoundPartsAnswer(microbatches=(4, 3), signatures=(bytes(64), bytes(64))),
    messages.Aggregate(step=3),
    messages.AggregateAnswer(digest=D32, microbatches=16, present=4),
    messages.CheckpointQuery(stage=2),
    messages.CheckpointOffers(steps=(50, 100), sizes=(1, 1 << 40), parameters=(D32, D32)),
    messages.CheckpointPart(stage=2, step=50, offset=1 << 20, length=messages.MAX_CHECKPOINT_PART_BYTES),
    messages.StateQuery(),
    messages.StateQuery(step=3),
    messages.StateStatus(step=3),
    messages.StateStatus(step=3, frozen=2, parameters=D32),
    messages.Snapshot(step=3),
    messages.SnapshotAnswer(step=3, size=2**40, parameters=D32, chunk_bytes=1 << 20, chunks=(D32,) * 4096),
    messages.Chunk(step=3, index=4),
    messages.Release(step=3),
    messages.Push(records=(b"one", b"two")),
    messages.Admissions(news=(bytes(messages.MAX_ADMISSION_BYTES),), after=0, digest=D32),
    messages.Admissions(),
    messages.AdmissionsAnswer(admissions=(b"one", b"two"), more=True, digest=D32),
    messages.AdmissionsAnswer(admissions=(), more=False),
    messages.Empty(),
]
FIELDS = [(example, entry.name) for example in EXAMPLES for entry in dataclasses.fields(example)]


def name_of(value: Any) -> str:
    return value if isinstance(value, str) else type(value).__name__


def test_every_message_has_an_example() -> None:
    defined = {value for value in vars(messages).values() if dataclasses.is_dataclass(value)}
    assert {type(example) for example in EXAMPLES} == defined


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_a_message_survives_the_head_of_a_frame(example: Any) -> None:
    head = {**encode(example), "id": 1, "method": "x"} if not hasattr(example, "id") else encode(example)
    (frame,) = FrameReader(lambda kind, head: 0).feed(encode_head(FrameKind.REQUEST, head, 0))
    assert decode(type(example), frame.head) == example


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_unknown_fields_are_ignored(example: Any) -> None:
    assert decode(type(example), encode(example) | {"from_the_future": [{"a": 1}]}) == example


@pytest.mark.parametrize(("example", "name"), FIELDS, ids=name_of)
@pytest.mark.parametrize("wrong", [{"a": 1}, 2**63, -2, "x" * 400, "\n", [[[]]]], ids=ascii)
def test_every_field_refuses_the_wrong_type_and_range(example: Any, name: str, wrong: Any) -> None:
    values = decode_head(msgpack.packb(encode(example) | {name: wrong}))
    number = isinstance(getattr(example, name), float) and isinstance(wrong, int) and name != "time"
    if number:  # a loss may be any finite number
        assert getattr(decode(type(example), values), name) == wrong
        return
    with pytest.raises(MessageError, match=rf"^{type(example).__name__}\.{name} ") as caught:
        decode(type(example), values)
    assert caught.value.kind == "message"


@pytest.mark.parametrize(("example", "name"), FIELDS, ids=name_of)
def test_every_field_without_default_has_to_be_there(example: Any, name: str) -> None:
    values = encode(example)
    del values[name]
    entry = next(entry for entry in dataclasses.fields(example) if entry.name == name)
    if entry.default is not dataclasses.MISSING:
        assert getattr(decode(type(example), values), name) == entry.default
        return
    with pytest.raises(MessageError, match=f"lacks the field {name}$"):
        decode(type(example), values)


def test_every_method_has_a_stream_and_strangers_use_only_the_control_stream() -> None:
    assert set(STREAM_OF) == set(Method)
    assert all(STREAM_OF[method] is StreamKind.CONTROL for method in PUBLIC_METHODS)
    assert STREAM_OF[Method.TRAIN] is StreamKind.TENSOR and STREAM_OF[Method.END] is StreamKind.CONTROL
    for method in (Method.AUDIT, Method.EVIDENCE, Method.PARAMETERS, Method.BASELINE):
        assert STREAM_OF[method] is StreamKind.TENSOR  # they carry tensors


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("version", ProtocolVersionError),
        ("swarm", SwarmMismatchError),
        ("frame", FrameError),
        ("message", MessageError),
        ("not_admitted", RefusedError),
        ("anything else", RefusedError),
    ],
)
def test_the_word_of_an_error_frame_becomes_a_typed_error(kind: str, error: type[Exception]) -> None:
    made = remote_error(kind, "why")
    assert type(made) is error
    assert (made.kind, str(made)) == (kind, "why")
