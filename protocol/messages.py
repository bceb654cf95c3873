"""What nodes say to each other: one frozen dataclass a message, one table of methods.

A request names a method; its head carries the message and its body, if any, raw tensor
bytes. Nothing here knows what a node does with a message.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from protocol.fields import MAX_STEP, binary, flag, integer, mapping, number, optional, sequence, text

PROTOCOL_VERSION = 1

CONTROL_PROTOCOL = "/sentinel-swarm/control/1"
TENSOR_PROTOCOL = "/sentinel-swarm/tensor/1"

MAX_PEER_ID_CHARS = 64
MAX_MICROBATCHES = 4096
MAX_REPLICAS = 256
MAX_RECORDS = 512
MAX_RECORD_BYTES = 4096
MAX_ADMISSION_BYTES = 512
"""Twice what one takes now."""
MAX_ADMISSIONS = 256
"""In one message: half of what the head of a frame may hold."""
MAX_SERIAL = 2**63 - 1
MAX_SKETCH_BYTES = 16 * 1024
MAX_HOP_BYTES = MAX_SKETCH_BYTES + 1024
MAX_RECEIPT_BYTES = 1024
MAX_BOUNDARY_DIMENSIONS = 3
MAX_OFFERED_CHECKPOINTS = 64
MAX_CHECKPOINT_PART_BYTES = 1 << 18
"""It travels on the control stream, where heartbeats must not wait long behind it."""
MAX_CHUNKS = 4096
"""Of a snapshot: so many hashes fit the head of one frame."""


class StreamKind(StrEnum):
    """Which of the two streams to a peer carries a message."""

    TENSOR = "tensor"
    CONTROL = "control"


class Method(StrEnum):
    """Every request that a node answers."""

    MANIFEST = "manifest"
    VIEW = "view"
    STATUS = "status"
    DIAL_BACK = "dial_back"
    PUSH = "push"
    ADMISSIONS = "admissions"
    END = "end"
    SHARE_DONE = "share_done"
    ROUND_JOIN = "round_join"
    ROUND_COMMIT = "round_commit"
    TRAIN = "train"
    ROUND_PROJECTION = "round_projection"
    ROUND_PARTS = "round_parts"
    PART = "part"
    AGGREGATE = "aggregate"
    STATE = "state"
    SNAPSHOT = "snapshot"
    CHUNK = "chunk"
    RELEASE = "release"
    CLEARED = "cleared"
    AUDIT = "audit"
    EVIDENCE = "evidence"
    PARAMETERS = "parameters"
    BASELINE = "baseline"
    CHECKPOINTS = "checkpoints"
    CHECKPOINT_PART = "checkpoint_part"


_BULKY = frozenset(
    {
        *(Method.TRAIN, Method.PART, Method.AGGREGATE, Method.CHUNK, Method.ROUND_PROJECTION, Method.ROUND_PARTS),
        *(Method.AUDIT, Method.EVIDENCE, Method.PARAMETERS, Method.BASELINE),
    }
)

STREAM_OF: dict[Method, StreamKind] = {
    method: StreamKind.TENSOR if method in _BULKY else StreamKind.CONTROL for method in Method
}

PUBLIC_METHODS = frozenset(
    {Method.MANIFEST, Method.VIEW, Method.STATUS, Method.PUSH, Method.DIAL_BACK, Method.ADMISSIONS}
)
"""What a peer without a claim, or without an admission where one is needed, may ask: enough to join, to look, and to
announce a claim."""

MODEL_METHODS = frozenset({Method.CHECKPOINTS, Method.CHECKPOINT_PART})
"""What a peer without a claim may ask as well, in an invited swarm only with an admission: enough to take the model
out."""


def _peer(**keywords: object) -> object:
    return text(MAX_PEER_ID_CHARS, **keywords)


def _step(**keywords: object) -> object:
    return integer(0, MAX_STEP, **keywords)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """First frame of each side: who speaks what, for which swarm, at what time."""

    version: int = integer(0, 2**31)
    swarm: bytes = binary(32)
    agent: str = text(64)
    time: float = number(0, 1e12)
    """Unix seconds of the sender; the receiver estimates the clock offset from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DialBack:
    """Can you reach me at this TCP port of the address that I ask from? Show the token there."""

    port: int = integer(1, 65535)
    token: bytes = binary(16)


@dataclass(frozen=True, slots=True, kw_only=True)
class DialBackAnswer:
    """Where I dialled, and whether somebody listened."""

    host: str = text(45)
    reached: bool = flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestHead:
    """What precedes a message in the head of a REQUEST frame."""

    id: int = integer(0, 2**62)
    method: str = text(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorHead:
    """The head of an ERROR frame; ``id`` is -1 when no request is meant."""

    id: int = integer(-1, 2**62)
    kind: str = text(40)
    message: str = text(300)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorHead:
    """How to read the body of a message as one tensor."""

    dtype: str = text(8)
    shape: tuple[int, ...] = sequence(integer(1, 1 << 24), MAX_BOUNDARY_DIMENSIONS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hop:
    """A signed statement: "in this microbatch, this is what I sent".

    A receiver shows it to the next stage, which can so relate what a peer sends to what that
    peer received. ``sketch`` is float32 little endian; ``digest`` is SHA-256 of the body, and ``source`` that of
    what its peer had received in this direction (empty where it received nothing).
    """

    peer: str = _peer()  # type: ignore[assignment]
    stage: int = integer(0, 1024)
    step: int = _step()  # type: ignore[assignment]
    microbatch: int = integer(0, MAX_MICROBATCHES)
    direction: str = text(12)
    digest: bytes = binary(32)
    source: bytes = binary(0, 32)
    sketch: bytes = binary(longest=MAX_SKETCH_BYTES)
    signature: bytes = binary(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """A signed statement: "this is what I made of a microbatch". All digests are SHA-256 of message bodies.

    ``received`` activation -> ``sent`` activation -> ``got`` gradient -> ``returned`` gradient, with ``parameters``
    as the digest of the parameters. The last stage sends and gets nothing: both are empty.
    """

    peer: str = _peer()  # type: ignore[assignment]
    stage: int = integer(0, 1024)
    step: int = _step()  # type: ignore[assignment]
    microbatch: int = integer(0, MAX_MICROBATCHES)
    received: bytes = binary(32)
    sent: bytes = binary(0, 32)
    got: bytes = binary(0, 32)
    returned: bytes = binary(32)
    parameters: bytes = binary(32)
    signature: bytes = binary(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Train:
    """Run forward and backward of one microbatch; the body is tokens, then the activation.

    ``hop`` describes the activation of this message, ``input_hop`` the activation that its
    sender had received (nothing at stage 1, whose sender received tokens).
    """

    step: int = _step()  # type: ignore[assignment]
    microbatch: int = integer(0, MAX_MICROBATCHES)
    attempt: int = integer(0, MAX_MICROBATCHES)
    """Counts what its sender has sent of this microbatch in this step, so that a repetition shows."""
    origin: str = _peer()  # type: ignore[assignment]
    origin_signature: bytes = binary(64)
    tokens_bytes: int = integer(1, 1 << 24)
    dtype: str = text(8)
    shape: tuple[int, ...] = sequence(integer(1, 1 << 24), MAX_BOUNDARY_DIMENSIONS)
    hop: bytes = binary(longest=MAX_HOP_BYTES)
    input_hop: bytes | None = optional(binary(longest=MAX_HOP_BYTES))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The answer to Train; the body is the gradient of the loss by the activation received."""

    loss: float = number()
    dtype: str = text(8)
    shape: tuple[int, ...] = sequence(integer(1, 1 << 24), MAX_BOUNDARY_DIMENSIONS)
    hop: bytes = binary(longest=MAX_HOP_BYTES)
    input_hop: bytes | None = optional(binary(longest=MAX_HOP_BYTES))
    receipt: bytes = binary(longest=MAX_RECEIPT_BYTES)
    """The sender's own, packed."""
    input_receipt: bytes | None = optional(binary(longest=MAX_RECEIPT_BYTES))
    """That of the stage below, which finished the microbatch for the sender; nothing from the last stage."""
    outlier: bool = flag(default=False)
    """Whether the microbatch was flagged on its way and then cleared: several replicas of a stage had
    computed the same, so its content is unusual and nobody is to blame."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cleared:
    """To siblings: these replicas of a stage sent me the same tensor, so what was flagged is the content.

    ``hops`` are the signed hops of the flagged tensors, which the receiver checks for itself.
    """

    step: int = _step()  # type: ignore[assignment]
    microbatch: int = integer(0, MAX_MICROBATCHES)
    hops: tuple[bytes, ...] = sequence(binary(longest=MAX_HOP_BYTES), 16)


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """No more work of this step comes from me. Losses are those of the whole step."""

    step: int = _step()  # type: ignore[assignment]
    loss: float = number()
    microbatches: int = integer(0, MAX_MICROBATCHES)


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAnswer:
    """The answer to End: the digest of my parameters in that step, if I have begun it."""

    parameters: bytes = binary(0, 32, default=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """To a drawn juror: compute this microbatch again and say whether the one who signed for it cheated.

    ``statement`` is the packed receipt of the accused, or the packed hop of an activation that it sent. The body
    holds the tensors as they travelled. With a receipt: input activation and returned gradient, then, of the last
    stage, the tokens. With a hop: the sent activation, then, of the first stage, the tokens.
    """

    statement: bytes = binary(longest=MAX_HOP_BYTES)
    draw: bytes = binary(64)
    """The asking peer's signature over the statement; its hash draws the jury."""
    origin: str = text(MAX_PEER_ID_CHARS, default="")
    origin_signature: bytes = binary(0, 64, default=b"")
    tokens_bytes: int = integer(0, 1 << 24, default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditAnswer:
    """A juror's vote; ``signature`` is over the statement's digest, the accused and the vote."""

    guilty: bool = flag()
    reason: str = text(16)
    """What differed: activation, gradient, tokens or withheld; empty if nothing did."""
    signature: bytes = binary(64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Show what went with a tensor of yours, by its digest: one of the two.

    ``returned``: a gradient; what you sent on for it, and what came back. ``sent``: an activation; what you had
    received for it.
    """

    step: int = _step()  # type: ignore[assignment]
    microbatch: int = integer(0, MAX_MICROBATCHES)
    returned: bytes = binary(0, 32, default=b"")
    sent: bytes = binary(0, 32, default=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvidenceAnswer:
    """The body is what was asked for, as it travelled: activation sent and gradient got, or activation received."""

    input_receipt: bytes = binary(longest=MAX_RECEIPT_BYTES, default=b"")
    """The packed receipt of the stage below, with a gradient."""
    input_hop: bytes = binary(longest=MAX_HOP_BYTES, default=b"")
    """The packed hop of the stage above, with an activation."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameters:
    """Give me your stage's parameters of this digest, for an audit; float32 little endian in the answer's body."""

    digest: bytes = binary(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """To siblings: what my checker has learnt after this step, activations then gradients; packed in the body."""

    step: int = _step()  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareDone:
    """A stage-0 replica tells its siblings which microbatches it has trained, with losses."""

    step: int = _step()  # type: ignore[assignment]
    round: int = integer(0, 64)
    losses: tuple[tuple[int, float], ...] = mapping(integer(0, MAX_MICROBATCHES), number(), MAX_MICROBATCHES)
    failed: tuple[int, ...] = sequence(integer(0, MAX_MICROBATCHES), MAX_MICROBATCHES)


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareAnswer:
    """The answer to ShareDone; ``finished`` if this sibling has already seen the whole step covered."""

    finished: bool = flag()


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundJoin:
    """I am ready to average this step with these members."""

    step: int = _step()  # type: ignore[assignment]
    attempt: int = integer(0, 1024)
    members: tuple[str, ...] = sequence(text(MAX_PEER_ID_CHARS), MAX_REPLICAS)
    microbatches: int = integer(0, MAX_MICROBATCHES)
    parameters: bytes = binary(32)
    """Digest of my parameters before this step: only equals may average."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundCommit:
    """The aggregate that I hold for this attempt has this digest."""

    step: int = _step()  # type: ignore[assignment]
    attempt: int = integer(0, 1024)
    digest: bytes = binary(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundAnswer:
    """The answer to RoundJoin and RoundCommit; ``committed`` if I have already applied the step."""

    committed: bool = flag()
    digest: bytes = binary(0, 32, default=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """My slice of the gradient, for its owner to reduce; float32 little endian in the body.

    The answer's body is the reduced slice.
    """

    step: int = _step()  # type: ignore[assignment]
    attempt: int = integer(0, 1024)
    members: tuple[str, ...] = sequence(text(MAX_PEER_ID_CHARS), MAX_REPLICAS)
    microbatches: int = integer(0, MAX_MICROBATCHES)
    signature: bytes = binary(64)
    """Mine over the part, for this round and owner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartAnswer:
    """The reduced slice is the body: the sum of coefficient times mean gradient over the members."""

    coefficients: tuple[float, ...] = sequence(number(0.0, 1.0), MAX_REPLICAS)
    """One for each member, in their order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundProjection:
    """Project each slice of your gradient sum with the signs of this key; answered once for each round."""

    step: int = _step()  # type: ignore[assignment]
    attempt: int = integer(0, 1024)
    members: tuple[str, ...] = sequence(text(MAX_PEER_ID_CHARS), MAX_REPLICAS)
    key: bytes = binary(32)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundParts:
    """Show me the parts of the slice that you have reduced; answered once for each round."""

    step: int = _step()  # type: ignore[assignment]
    attempt: int = integer(0, 1024)
    members: tuple[str, ...] = sequence(text(MAX_PEER_ID_CHARS), MAX_REPLICAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundPartsAnswer:
    """The parts are the body, in the order of the members, as each sent and signed it."""

    microbatches: tuple[int, ...] = sequence(integer(0, MAX_MICROBATCHES), MAX_REPLICAS)
    signatures: tuple[bytes, ...] = sequence(binary(64), MAX_REPLICAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """Give me the committed aggregate of this step; waits if the step is under way."""

    step: int = _step()  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregateAnswer:
    """The aggregate (mean gradient, float32 little endian) is the body."""

    digest: bytes = binary(32)
    microbatches: int = integer(0, MAX_MICROBATCHES * MAX_REPLICAS)
    present: int = _step()  # type: ignore[assignment]
    """The step that the answering sibling is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateQuery:
    """To a sibling: how far are you, which state do you keep for joiners, and what were your parameters at ``step``?"""

    step: int | None = optional(_step())


@dataclass(frozen=True, slots=True, kw_only=True)
class StateStatus:
    """The answer to StateQuery."""

    step: int = _step()  # type: ignore[assignment]
    """The step that I am in: so many have been applied."""
    frozen: int | None = optional(_step())
    """The step of the snapshot that I keep for somebody now."""
    parameters: bytes = binary(0, 32, default=b"")
    """Digest of my parameters before the step that was asked for; empty if I do not know it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Freeze your state before ``step`` for me, once you are there; the answer says what there is to fetch."""

    step: int = _step()  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotAnswer:
    """A frozen state: the raw bytes of optimizer and parameters, whose layout both sides know."""

    step: int = _step()  # type: ignore[assignment]
    size: int = integer(1, 1 << 40)
    parameters: bytes = binary(32)
    chunk_bytes: int = integer(1, 1 << 30)
    chunks: tuple[bytes, ...] = sequence(binary(32), MAX_CHUNKS)
    """SHA-256 of each chunk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Chunk ``index`` of the snapshot of ``step``; the body of the answer."""

    step: int = _step()  # type: ignore[assignment]
    index: int = integer(0, MAX_CHUNKS - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """I need your snapshot of ``step`` no longer."""

    step: int = _step()  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointQuery:
    """Which checkpoints of this stage do you have on disk, of your own or as copies?"""

    stage: int = integer(0, 1024)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointOffers:
    """The answer to CheckpointQuery: step, size of the file in bytes and digest of the parameters of each."""

    steps: tuple[int, ...] = sequence(_step(), MAX_OFFERED_CHECKPOINTS)
    sizes: tuple[int, ...] = sequence(integer(1, 1 << 40), MAX_OFFERED_CHECKPOINTS)
    parameters: tuple[bytes, ...] = sequence(binary(32), MAX_OFFERED_CHECKPOINTS)


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointPart:
    """Bytes of a checkpoint's file from ``offset`` on; the body of the answer."""

    stage: int = integer(0, 1024)
    step: int = _step()  # type: ignore[assignment]
    offset: int = integer(0, 1 << 40)
    length: int = integer(1, MAX_CHECKPOINT_PART_BYTES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Push:
    """Signed records that I know: claims and accusations."""

    records: tuple[bytes, ...] = sequence(binary(longest=MAX_RECORD_BYTES), MAX_RECORDS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Admissions:
    """Signed admissions that are news, and a question for others: those with a serial above ``after``.

    Whoever is not admitted itself is told of itself only. Whoever knows the same already (``digest``) is told nothing.
    """

    news: tuple[bytes, ...] = sequence(binary(longest=MAX_ADMISSION_BYTES), MAX_ADMISSIONS, default=())
    after: int = integer(0, MAX_SERIAL, default=MAX_SERIAL)
    digest: bytes = binary(0, 32, default=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionsAnswer:
    """The asker's own admission, then those that it asked for, by serial; ``more`` if there are further ones.

    ``digest`` is of all that I know, for those whom I admit.
    """

    admissions: tuple[bytes, ...] = sequence(binary(longest=MAX_ADMISSION_BYTES), MAX_ADMISSIONS)
    more: bool = flag()
    digest: bytes = binary(0, 32, default=b"")


@dataclass(frozen=True, slots=True, kw_only=True)
class Empty:
    """A message without content."""
