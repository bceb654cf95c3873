"""What a replica gives to those who join its stage: its state, frozen between two steps, in hashed chunks.

Nothing changes the state while a step is under way, so a donor can freeze that of its present step at any time, and
all donors that are asked for the same step hold the same bits. A donor keeps one frozen state at most, for as long as
a joiner uses it, and serves a few chunks at a time: training goes first.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import torch

from node.device import available_memory_bytes
from node.snapshot import Layout, StageState
from protocol.errors import RefusedError
from protocol.fields import decode, encode
from protocol.messages import Chunk, Method, Release, Snapshot, SnapshotAnswer, StateQuery, StateStatus
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport

DIGESTS_KEPT = 64
"""Steps whose parameter digests are remembered; whoever is further behind takes a newer snapshot."""
MAX_AHEAD = 3
"""A joiner may ask for a step that comes so soon; for one further off it would keep a request open for nothing."""

Freeze = Callable[[Callable[[StageState], None]], Awaitable[tuple[int, bytes]]]
"""Runs its argument in a thread, on the live state, while no step can change it; returns step and digest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DonorLimits:
    """What joiners may cost a donor. Seconds, unless a name says otherwise."""

    lease: float = 60.0
    """How long a joiner that asks for nothing still counts as using the snapshot."""
    hold: float = 900.0
    """How long a snapshot is kept for joiners who keep on asking, before others may have another."""
    boundary: float = 40.0
    """How long a request waits for its step."""
    freezing_share: float = 0.05
    """Of a donor's time: after a freeze of one second, the next begins 20 seconds later at the earliest."""
    chunks: int = 8
    """Chunks on their way to all joiners together."""
    chunks_each: int = 4
    """Of these, to one joiner."""
    spare_memory: float = 0.25
    """Of the state's size: what must be free beyond it, or else the donor refuses to hold a copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frozen:
    answer: SnapshotAnswer
    image: torch.Tensor
    since: float


class StateServer:
    """Serves this node's state to its siblings."""

    def __init__(
        self,
        transport: Transport,
        *,
        layout: Layout,
        freeze: Freeze,
        digest: bytes,
        is_sibling: Callable[[str], bool],
        limits: DonorLimits | None = None,
        clock: Callable[[], float] = time.monotonic,
        memory: Callable[[], int] = lambda: available_memory_bytes(torch.device("cpu")),
    ) -> None:
        """``digest`` is that of the parameters before step 0; ``memory`` tells how many bytes are free."""
        self._freeze = freeze
        self._limits = limits or DonorLimits()
        self._clock = clock
        self._memory = memory
        self._layout = layout
        self._step: int | None = 0
        self._digests: dict[int, bytes] = {0: digest}
        self._moved = asyncio.Event()
        self._freezing = asyncio.Lock()
        self._may_freeze_at = 0.0
        self._frozen: _Frozen | None = None
        self._users: dict[str, float] = {}
        """Who uses the frozen state, and when each last asked for something."""
        self._sending: Counter[str] = Counter()
        for method, handler in (
            (Method.STATE, self._serve_state),
            (Method.SNAPSHOT, self._serve_snapshot),
            (Method.CHUNK, self._serve_chunk),
            (Method.RELEASE, self._serve_release),
        ):
            transport.serve(method, Route(handler=handler, admits=is_sibling))

    # what the trainer tells ----------------------------------------------------------

    def stands_at(self, step: int, digest: bytes) -> None:
        """This node is in ``step``; ``digest`` is that of its parameters now."""
        self._step = step
        self._digests[step] = digest
        while len(self._digests) > DIGESTS_KEPT:
            del self._digests[next(iter(self._digests))]
        if self._frozen is not None and not self._in_use():
            self._forget()
        self._wake()

    def withhold(self) -> None:
        """Give nothing until ``stands_at`` is called: this node's own state is in doubt, or about to be replaced."""
        self._step = None
        self._digests.clear()
        self._forget()
        self._wake()

    def _wake(self) -> None:
        event, self._moved = self._moved, asyncio.Event()
        event.set()

    # answering -----------------------------------------------------------------------

    async def _serve_state(self, request: Request) -> Response:
        asked = decode(StateQuery, request.head).step
        if self._step is None:
            raise _nothing_to_give()
        frozen = self._frozen.answer.step if self._frozen is not None and self._in_use() else None
        parameters = b"" if asked is None else self._digests.get(asked, b"")
        return Response(head=encode(StateStatus(step=self._step, frozen=frozen, parameters=parameters)))

    async def _serve_snapshot(self, request: Request) -> Response:
        step = decode(Snapshot, request.head).step
        if self._kept(step) is None:
            await self._reach(step)
        async with self._freezing:
            frozen = self._kept(step)
            if frozen is None:
                self._check_may_freeze(step)
                frozen = self._frozen = await self._take()
            self._users[request.peer] = self._clock()
        if frozen.answer.step != step:  # the step ended in between
            raise RefusedError(f"step {step} is over; the state of step {frozen.answer.step} is kept", kind="too_old")
        return Response(head=encode(frozen.answer))

    async def _serve_chunk(self, request: Request) -> Response:
        message = decode(Chunk, request.head)
        frozen = self._kept(message.step)
        if frozen is None:
            raise RefusedError(f"the snapshot of step {message.step} is no longer kept", kind="too_old")
        if message.index >= len(frozen.answer.chunks):
            raise RefusedError("there is no such chunk", kind="range")
        self._users[request.peer] = self._clock()
        start = message.index * frozen.answer.chunk_bytes
        return Response(body=(self._lend(frozen.image, start, start + frozen.answer.chunk_bytes, request.peer),))

    async def _serve_release(self, request: Request) -> Response:
        frozen = self._kept(decode(Release, request.head).step)
        if frozen is not None and self._users.pop(request.peer, None) is not None and not self._users:
            self._forget()
        return Response()

    # freezing ------------------------------------------------------------------------

    async def _reach(self, step: int) -> None:
        """Wait until this node is in a step.

        Raises:
            RefusedError: it is past it, or far from it, or has nothing to give.
        """
        try:
            async with asyncio.timeout(self._limits.boundary):
                while self._step is not None and step - MAX_AHEAD <= self._step < step:
                    await self._moved.wait()
        except TimeoutError:
            raise RefusedError(f"step {step} has not begun yet", kind="not_yet") from None
        if self._step is None:
            raise _nothing_to_give()
        if self._step < step:
            raise RefusedError(f"step {step} is far off; this is step {self._step}", kind="wrong_step")

    def _check_may_freeze(self, step: int) -> None:
        now = self._clock()
        if self._step != step:
            raise RefusedError(f"step {step} is over; this is step {self._step}", kind="too_old")
        if self._frozen is not None and self._in_use():
            raise RefusedError(f"this node keeps the state of step {self._frozen.answer.step} for others", kind="busy")
        if now < self._may_freeze_at:
            raise RefusedError(f"the next snapshot can be had in {self._may_freeze_at - now:.0f} s", kind="busy")

    async def _take(self) -> _Frozen:
        """Freeze the present state."""
        self._forget()  # before there is memory for the next one
        started = self._clock()
        try:
            image = await asyncio.to_thread(self._allocate)
            step, parameters = await self._freeze(lambda state: self._layout.pack(state, image))
            answer = await asyncio.to_thread(lambda: self._layout.describe(image, step=step, parameters=parameters))
        finally:  # also when nobody waits for it any more: a joiner must not make this node freeze all the time
            now = self._clock()
            self._may_freeze_at = now + (now - started) / self._limits.freezing_share
        return _Frozen(answer=answer, image=image, since=now)

    def _allocate(self) -> torch.Tensor:
        size = self._layout.size
        if self._memory() < size * (1 + self._limits.spare_memory):
            raise RefusedError(f"there is no memory here for a copy of {size >> 20} MiB", kind="unavailable")
        return self._layout.image()

    def _kept(self, step: int) -> _Frozen | None:
        return self._frozen if self._frozen is not None and self._frozen.answer.step == step else None

    def _in_use(self) -> bool:
        """Whether a joiner still needs the frozen state."""
        now = self._clock()
        self._users = {peer: asked for peer, asked in self._users.items() if now - asked <= self._limits.lease}
        return bool(self._users) and self._frozen is not None and now - self._frozen.since <= self._limits.hold

    def _forget(self) -> None:
        self._frozen = None
        self._users.clear()

    # sending -------------------------------------------------------------------------

    def _lend(self, image: torch.Tensor, start: int, end: int, peer: str) -> memoryview:
        """A view of a chunk, which counts against the limits until it has been sent.

        Raises:
            RefusedError: enough is on its way.
        """
        if self._sending.total() >= self._limits.chunks or self._sending[peer] >= self._limits.chunks_each:
            raise RefusedError("enough chunks are on their way; ask again in a moment", kind="busy")
        chunk = image.numpy()[start:end]
        self._sending[peer] += 1
        # Whoever sends it holds it until it is written; nothing else tells when that is.
        weakref.finalize(chunk, self._sent, peer).atexit = False
        return chunk.data

    def _sent(self, peer: str) -> None:
        self._sending[peer] -= 1
        if not self._sending[peer]:
            del self._sending[peer]


def _nothing_to_give() -> RefusedError:
    return RefusedError("this node is fetching its own state; ask another", kind="unavailable")
