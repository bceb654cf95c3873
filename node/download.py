"""The chunks of one agreed snapshot, from several donors at once.

Each donor has a few requests under way, all of which take the next chunk that is missing: a quicker donor so gives
more. What a donor gives is checked against the agreed hash. One that fails or lies is dropped, and what it owed goes
back to be fetched elsewhere; one that is late does not hold up the end, since its chunks are then asked for elsewhere
as well. What has been checked is kept, whatever becomes of the donors.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import torch

from node.progress import Meter
from node.snapshot import Layout
from protocol.errors import MessageError, RefusedError, SentinelError
from protocol.framing import Buffer
from protocol.messages import Chunk, Method, SnapshotAnswer
from protocol.transports.sessions import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadLimits:
    """Seconds, unless a name says otherwise."""

    requests_each: int = 2
    """Under way to each donor, so that it need not wait for the next one; fewer than it allows."""
    chunk: float = 60.0
    """For one chunk. What a donor sends to this node besides, an aggregate for one, goes through the same stream."""
    late: float = 5.0
    """After which an idle donor is asked for the same chunk."""
    pause: float = 0.2
    """Before a busy donor is asked again; doubled each time."""
    longest_pause: float = 5.0
    turn: float = 120.0
    """How long a donor may be busy all the time."""
    least_rate: float = 1 << 20
    """Bytes a second. Averaging moves as many bytes in two steps as a state has, so a slower node could not keep up."""
    grace: float = 60.0
    """For a download of any size, besides the time at the least rate."""


class FalseChunkError(MessageError):
    """A donor gave other bytes than it has described."""


@dataclass(slots=True)
class _Donor:
    peer: str
    busy_since: float | None = None


@dataclass(slots=True)
class _Pending:
    """A chunk that is being fetched."""

    since: float
    donors: set[str] = field(default_factory=set)


class Download:
    """One snapshot on its way. ``run`` may be called again with other donors of the same snapshot."""

    def __init__(
        self,
        transport: Transport,
        answer: SnapshotAnswer,
        layout: Layout,
        *,
        limits: DownloadLimits,
        on_dropped: Callable[[str, SentinelError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``on_dropped(peer, error)``: a MessageError if the donor lied."""
        self.answer = answer
        self.image = torch.empty(layout.size, dtype=torch.uint8)
        self.meter = Meter(total=layout.size, started=clock())
        self._transport = transport
        self._layout = layout
        self._limits = limits
        self._on_dropped = on_dropped
        self._clock = clock
        self._missing = deque(range(layout.chunks))
        self._pending: dict[int, _Pending] = {}
        self._donors: dict[str, _Donor] = {}
        self._changed = asyncio.Event()

    @property
    def complete(self) -> bool:
        """Whether every chunk is here and checked."""
        return not self._missing and not self._pending

    @property
    def longest(self) -> float:
        """Seconds that the whole of it may take."""
        return self._limits.grace + self._layout.size / self._limits.least_rate

    @property
    def donors(self) -> int:
        """Who gives now."""
        return len(self._donors)

    @property
    def busy(self) -> int:
        """How many of them have asked this node to wait for its turn."""
        return sum(donor.busy_since is not None for donor in self._donors.values())

    async def run(self, donors: Collection[str]) -> None:
        """Fetch what is missing; returns when all is here or the last of these donors has been dropped."""
        self._donors = {peer: _Donor(peer) for peer in donors}
        loop = asyncio.get_running_loop()
        fetching = [loop.create_task(self._fetch_from(donor)) for donor in self._donors.values()]
        try:
            while not self.complete and self._donors:
                await self._changed.wait()
        finally:
            for task in fetching:  # of late donors, whose chunks others have given
                task.cancel()
            ended = await asyncio.gather(*fetching, return_exceptions=True)
        for error in ended:
            if isinstance(error, Exception):  # what donors do wrong has been dealt with; this went wrong here
                raise error

    async def _fetch_from(self, donor: _Donor) -> None:
        """Keep a donor at work until it fails or there is nothing left to do."""
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._limits.requests_each):
                    group.create_task(self._work(donor))
        except* SentinelError as errors:
            self._on_dropped(donor.peer, _first(errors))
        finally:
            self._donors.pop(donor.peer, None)
            self._notify()

    async def _work(self, donor: _Donor) -> None:
        pause = self._limits.pause
        while not self.complete:
            index = self._take(donor.peer)
            if index is None:
                await self._change(self._limits.late)
                continue
            try:
                await self._fetch(donor.peer, index)
                donor.busy_since, pause = None, self._limits.pause
                continue
            except RefusedError as error:
                self._note_busy(donor, error)
            finally:
                self._give_back(donor.peer, index)
            await asyncio.sleep(pause)
            pause = min(2 * pause, self._limits.longest_pause)

    async def _fetch(self, peer: str, index: int) -> None:
        message = Chunk(step=self.answer.step, index=index)
        response = await self._transport.call(
            peer, Method.CHUNK, message, timeout=self._limits.chunk, reply_limit=self._layout.chunk_bytes
        )
        await asyncio.to_thread(self._keep, index, response.data)
        if self._pending.pop(index, None) is not None:  # else another donor was quicker
            bounds = self._layout.bounds(index)
            self.meter.add(bounds.stop - bounds.start, self._clock())
            self._notify()

    def _keep(self, index: int, data: Buffer) -> None:
        """Check a chunk and put it into its place; in a thread."""
        bounds = self._layout.bounds(index)
        if len(data) != bounds.stop - bounds.start:
            raise FalseChunkError(f"chunk {index} of a snapshot has {len(data)} bytes", kind="snapshot")
        if hashlib.sha256(data).digest() != self.answer.chunks[index]:
            raise FalseChunkError(f"chunk {index} of a snapshot is not what most donors hold", kind="snapshot")
        self.image[bounds].copy_(torch.frombuffer(data, dtype=torch.uint8))

    # which chunk next ----------------------------------------------------------------

    def _take(self, peer: str) -> int | None:
        """The next chunk to ask a donor for: one that is missing, or one that another donor is late with."""
        now = self._clock()
        if self._missing:
            index = self._missing.popleft()
            self._pending[index] = _Pending(since=now, donors={peer})
            return index
        for index, pending in self._pending.items():
            if now - pending.since >= self._limits.late and peer not in pending.donors:
                pending.donors.add(peer)
                return index
        return None

    def _give_back(self, peer: str, index: int) -> None:
        """A request for a chunk has ended; if the chunk has not come from anywhere, it is missing again."""
        pending = self._pending.get(index)
        if pending is None:
            return
        pending.donors.discard(peer)
        if not pending.donors:
            del self._pending[index]
            self._missing.appendleft(index)
            self._notify()

    def _note_busy(self, donor: _Donor, error: RefusedError) -> None:
        """Let a donor off that only asks for patience, and not for ever; raises the error otherwise."""
        now = self._clock()
        if donor.busy_since is None:
            donor.busy_since = now
        if error.kind != "busy" or now - donor.busy_since > self._limits.turn:
            raise error

    # waiting -------------------------------------------------------------------------

    def _notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    async def _change(self, seconds: float) -> None:
        """Wait until something changes, but not for longer than this."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


def _first(errors: ExceptionGroup[SentinelError]) -> SentinelError:
    """One of the errors of a group; what a donor did wrong rather than what followed from it."""
    found = list(_flat(errors))
    return next((error for error in found if isinstance(error, FalseChunkError)), found[0])


def _flat(errors: ExceptionGroup[SentinelError]) -> Iterator[SentinelError]:
    for error in errors.exceptions:
        if isinstance(error, ExceptionGroup):
            yield from _flat(error)
        else:
            yield error
