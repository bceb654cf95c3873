"""What this node received, sent on and got back, kept for a while so that its work can be computed again.

Whoever audits a node needs what passed between it and the stage below. Each node keeps that for the present
step and the one before, within a limit of bytes; of the present step nothing is ever dropped, for a node that
cannot show its evidence in time counts as one that hides it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.errors import MessageError
from protocol.framing import Buffer
from protocol.hops import body_digest, open_hop
from protocol.messages import EvidenceAnswer, Hop, Receipt
from protocol.receipts import check_input_receipt
from verifier.verdicts import Direction

KEPT_BYTES = 256 << 20
"""For steps that are over. The present step is bounded by the work that a node takes on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """One microbatch between this stage and the next, as it travelled."""

    sent: Sequence[Buffer]
    got: Buffer
    input_receipt: bytes
    """The packed receipt of the replica below."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return sum(memoryview(buffer).nbytes for buffer in self.sent) + memoryview(self.got).nbytes


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptInput:
    """What came from the stage above, as it travelled."""

    received: Buffer
    input_hop: bytes
    """Its packed hop."""

    @property
    def nbytes(self) -> int:
        """Its size."""
        return memoryview(self.received).nbytes


class EvidenceStore:
    """Evidence by step, microbatch and digest: of the gradient that was returned, or the activation that was sent."""

    def __init__(self, *, keep: bool, limit: int = KEPT_BYTES) -> None:
        """``keep``: false where nobody audits."""
        self._keep = keep
        self._limit = limit
        self._kept: OrderedDict[tuple[int, int, bytes], Kept | KeptInput] = OrderedDict()
        self._bytes = 0

    def add(self, step: int, microbatch: int, digest: bytes, kept: Kept | KeptInput) -> None:
        """Keep the evidence for a tensor of this digest."""
        key = (step, microbatch, digest)
        if not self._keep or key in self._kept:
            return
        self._kept[key] = kept
        self._bytes += kept.nbytes
        while self._bytes > self._limit:
            oldest = next(iter(self._kept))
            if oldest[0] >= step:
                break
            self._drop(oldest)

    def find(self, step: int, microbatch: int, digest: bytes) -> Kept | KeptInput | None:
        """The evidence, if it is still kept."""
        return self._kept.get((step, microbatch, digest))

    def forget_before(self, step: int) -> None:
        """Let go of what is older than a step."""
        for key in [key for key in self._kept if key[0] < step]:
            self._drop(key)

    def _drop(self, key: tuple[int, int, bytes]) -> None:
        self._bytes -= self._kept.pop(key).nbytes


def open_passed_on(
    answer: EvidenceAnswer, body: Buffer, swarm: bytes, *, of: Receipt, activation_bytes: int
) -> tuple[Receipt, Buffer, Buffer]:
    """Read what was sent on and got back for a receipt: that of the stage below, and the two tensors.

    Raises:
        MessageError: kind "receipt"; it is not what the accused signed for.
    """
    below = check_input_receipt(answer.input_receipt, swarm, of=of)
    view = memoryview(body)
    sent, got = view[:activation_bytes], view[activation_bytes:]
    if body_digest((sent,)) != of.sent or body_digest((got,)) != of.got:
        raise MessageError("the evidence is not what the accused signed for", kind="receipt")
    return below, sent, got


def open_input(
    answer: EvidenceAnswer,
    body: Buffer,
    swarm: bytes,
    *,
    stage: int,
    step: int,
    microbatch: int,
    source: bytes,
    sketch_bytes: int,
) -> Hop:
    """Read what a replica of ``stage`` received for an activation made from ``source``: the hop of the stage above.

    Raises:
        MessageError: kind "sketch" or "receipt"; it is not what the accused signed for.
    """
    above = open_hop(
        answer.input_hop,
        swarm,
        stage=stage - 1,
        step=step,
        microbatch=microbatch,
        direction=Direction.ACTIVATION.value,
        sketch_bytes=sketch_bytes,
    )
    if above.digest != source or body_digest((body,)) != source:
        raise MessageError("the evidence is not what the accused signed for", kind="receipt")
    return above
