"""The aggregates that the siblings commit while a joiner fetches their state, for it to apply afterwards.

Siblings keep few of them, one if they are large, so the joiner asks for each before there is one and holds it itself.
Two requests are open at a time: each gets its aggregate as soon as the step is committed, even if the one before is
still on its way.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from node.averaging import Committed
from node.donors import LostPaceError, NoDonorError
from protocol.errors import SentinelError

log = logging.getLogger(__name__)

OPEN_REQUESTS = 2
"""One for the step that is under way, and one for the next."""
TRIES = 3
"""For an aggregate that most siblings are past: one of them may have been unreachable for a moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BacklogLimits:
    """How far a joiner may fall behind."""

    size: int
    """Bytes of aggregates that wait to be applied. A node whose link carries its share of the averaging, which is
    more than one aggregate in a step, needs three steps at most for a state, which is as large as three aggregates."""
    pause: float = 0.5
    """Seconds before a request that failed is made again."""


class Backlog:
    """Aggregates from one step on. Use ``start``, ``take`` step by step, and ``close``."""

    def __init__(
        self,
        *,
        fetch: Callable[[int], Awaitable[Committed]],
        reached: Callable[[], Awaitable[int | None]],
        limits: BacklogLimits,
    ) -> None:
        """``fetch(step)`` gets an aggregate, waiting for it if the step is under way; ``reached()`` tells which step
        most siblings are in, None if nobody answers."""
        self._fetch = fetch
        self._reached = reached
        self._limits = limits
        self._asking: dict[int, asyncio.Task[Committed]] = {}
        self._arrived: dict[int, Committed] = {}
        self._next = 0
        self._end: int | None = None
        self._error: BaseException | None = None
        self._changed = asyncio.Event()

    def start(self, step: int) -> None:
        """Listen from this step on."""
        self._next = step
        self._ask()

    def stop_before(self, step: int) -> None:
        """Ask for no aggregate of this step or of a later one, unless that has been done already."""
        self._end = max(step, self._next)

    def holds(self, step: int) -> bool:
        """Whether the aggregate of a step is here."""
        return step in self._arrived

    async def take(self, step: int) -> Committed:
        """The aggregate of a step, which is then no longer held; waits for it.

        Raises:
            StateError: it cannot be had any more.
        """
        while step not in self._arrived:
            self._raise()
            await self._changed.wait()
        committed = self._arrived.pop(step)
        self._ask()
        return committed

    async def lost(self) -> None:
        """Wait until an aggregate cannot be had, for ever if all goes well.

        Raises:
            StateError: it happened.
        """
        while True:
            self._raise()
            await self._changed.wait()

    async def close(self) -> None:
        """Stop listening."""
        self._error = self._error or NoDonorError("this node listens no longer")
        asking = list(self._asking.values())
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
        self._arrived.clear()
        self._notify()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _ask(self) -> None:
        """Keep requests open, as long as there is room for what they bring."""
        held = sum(committed.mean.nbytes for committed in self._arrived.values())
        if held > self._limits.size:
            self._fail(
                LostPaceError(
                    f"{len(self._arrived)} steps passed while the state was fetched, more than this node can hold: "
                    "a faster connection or a stage with fewer parameters is needed"
                )
            )
        while self._error is None and len(self._asking) < OPEN_REQUESTS and self._next != self._end:
            task = asyncio.get_running_loop().create_task(self._get(self._next))
            self._asking[self._next] = task
            task.add_done_callback(lambda task, step=self._next: self._got(step, task))  # type: ignore[misc]
            self._next += 1

    def _got(self, step: int, task: asyncio.Task[Committed]) -> None:
        del self._asking[step]
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._fail(error)
        else:
            self._arrived[step] = task.result()
            self._ask()
        self._notify()

    async def _get(self, step: int) -> Committed:
        tries = 0
        while True:
            try:
                return await self._fetch(step)
            except SentinelError as error:
                log.debug("%s", error)
            reached = await self._reached()
            # Else the step is still under way, and takes longer than a sibling keeps a request open.
            if reached is None or reached > step:
                tries += 1
            if tries >= TRIES:
                raise _gone(step, reached)
            await asyncio.sleep(self._limits.pause)

    def _fail(self, error: BaseException) -> None:
        self._error = self._error or error

    def _notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()


def _gone(step: int, reached: int | None) -> SentinelError:
    if reached is None:
        return NoDonorError("no sibling answers any more; waiting for one")
    return LostPaceError(f"the siblings are in step {reached} and no longer keep the aggregate of step {step}")
