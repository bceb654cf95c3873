"""One microbatch and one step, as a node sees them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from node.boundary import Incoming
from node.guard import Judged
from node.wiring import Dealer
from protocol.errors import MessageError, RefusedError
from protocol.framing import Buffer


class UnfinishedError(RefusedError):
    """No replica of the next stage completed the microbatch."""

    default_kind = "unfinished"


MAX_RUNS = 8
"""Times that a caller may have one node compute the same microbatch in a step. A failure far down makes every stage
above it try its replicas in turn; without a limit the tries multiply from stage to stage."""


@dataclass(slots=True)
class Step:
    """What this node knows of the step that it is in."""

    number: int
    parameters: bytes
    """Digest of this node's parameters during the step; goes into its receipts."""
    dealer: Dealer
    started: float = field(default_factory=time.monotonic)
    serving: int = 0
    closed: bool = False
    seen: dict[tuple[str, int], set[tuple[int, int]]] = field(default_factory=dict)
    """(caller, microbatch) -> the attempts that came, each with the generation of its caller's claim."""
    attempts: dict[int, int] = field(default_factory=dict)
    """Microbatch -> calls made for it so far, over all its arrivals here."""
    losses: dict[int, float] = field(default_factory=dict)

    def arrives(self, caller: str, microbatch: int, attempt: int, generation: int = 0) -> None:
        """Note that a caller has sent a microbatch.

        ``generation`` is that of its claim: a node that was killed and starts again in the same step counts its
        attempts anew, and does not repeat itself.

        Raises:
            MessageError: kind "repeated"; the very same message came before.
            RefusedError: kind "exhausted"; it has come too often.
        """
        attempts = self.seen.setdefault((caller, microbatch), set())
        if (generation, attempt) in attempts:
            raise MessageError("a microbatch came twice in the same attempt", kind="repeated")
        if len(attempts) >= MAX_RUNS:
            raise RefusedError(f"microbatch {microbatch} came {MAX_RUNS} times, which is enough", kind="exhausted")
        attempts.add((generation, attempt))

    def next_attempt(self, microbatch: int) -> int:
        """The number of the next call for a microbatch. A node may see one again after its caller had to
        start anew, and must not then look as if it repeated itself."""
        attempt = self.attempts.get(microbatch, 0)
        self.attempts[microbatch] = attempt + 1
        return attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One microbatch as it passes through this node."""

    microbatch: int
    tokens: bytes
    """int32 little endian [B, T + 1]: inputs and, shifted by one, labels."""
    origin: str
    origin_signature: bytes
    input_hop: bytes | None
    """The hop of the activation that this node received; None at stage 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A gradient that came back and was accepted."""

    loss: float
    incoming: Incoming
    judged: Judged
    peer: str
    body: Buffer
    """The gradient as it travelled."""
    receipt: bytes
    """The packed receipt of who returned it."""
    outlier: bool
    """Whether the microbatch was flagged further down and then cleared."""
