"""A joiner hears every aggregate that is committed while it fetches the state, or learns that it has lost the pace."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from node.averaging import Committed
from node.backlog import OPEN_REQUESTS, Backlog, BacklogLimits
from node.donors import LostPaceError, NoDonorError
from protocol.errors import LocalError

LENGTH = 10
PATIENCE = 20.0


def committed(step: int) -> Committed:
    return Committed(step=step, mean=torch.full((LENGTH,), float(step)), digest=bytes(32), microbatches=1)


class Siblings:
    """Who commit steps, and keep only some of the aggregates."""

    def __init__(self) -> None:
        self.step: int | None = 3
        """The one that they are in; None once they are gone."""
        self.kept: set[int] = set()
        self.asked: list[int] = []
        self.keep_open = True
        """Whether they let a request wait for its step."""
        self.changed = asyncio.Event()

    async def fetch(self, step: int) -> Committed:
        self.asked.append(step)
        while step not in self.kept:
            if self.step is None or self.step > step or not self.keep_open:
                raise LocalError(f"the aggregate of step {step} could not be fetched")
            await self.changed.wait()
        return committed(step)

    async def reached(self) -> int | None:
        return self.step

    def commit(self, *, keep: int = 1) -> None:
        assert self.step is not None
        self.kept.add(self.step)
        self.step += 1
        self.kept = {step for step in self.kept if step >= self.step - keep}
        self.notify()

    def notify(self) -> None:
        event, self.changed = self.changed, asyncio.Event()
        event.set()


@pytest.fixture
def siblings() -> Siblings:
    """In step 3, with nothing committed yet."""
    return Siblings()


@pytest.fixture
async def backlog(siblings: Siblings, no_tasks_left: None) -> AsyncIterator[Backlog]:
    """It holds up to four aggregates."""
    made = Backlog(
        fetch=siblings.fetch,
        reached=siblings.reached,
        limits=BacklogLimits(size=4 * 4 * LENGTH, pause=0.001),
    )
    yield made
    await made.close()


async def settle() -> None:
    """Let everything happen that can."""
    for _ in range(20):
        await asyncio.sleep(0)


async def take(backlog: Backlog, step: int) -> Committed:
    async with asyncio.timeout(PATIENCE):
        return await backlog.take(step)


async def test_what_is_committed_while_nobody_looks_is_there_afterwards(siblings: Siblings, backlog: Backlog) -> None:
    backlog.start(3)
    for _ in range(4):
        await settle()
        siblings.commit()  # of which they keep only the last
    await settle()
    assert [backlog.holds(step) for step in range(3, 9)] == [True, True, True, True, False, False]
    for step in range(3, 7):
        assert (await take(backlog, step)).step == step
    assert siblings.asked == [3, 4, 5, 6, 7, 8]


async def test_few_requests_are_open(siblings: Siblings, backlog: Backlog) -> None:
    backlog.start(3)
    await settle()
    assert siblings.asked == [3, 4] and len(siblings.asked) == OPEN_REQUESTS


async def test_an_aggregate_that_is_not_there_yet_is_waited_for(siblings: Siblings, backlog: Backlog) -> None:
    backlog.start(3)
    taking = asyncio.create_task(take(backlog, 3))
    await settle()
    assert not taking.done()
    siblings.commit()
    assert (await taking).step == 3


async def test_a_step_that_takes_longer_than_siblings_wait_is_asked_for_again(
    siblings: Siblings, backlog: Backlog
) -> None:
    siblings.keep_open = False
    backlog.start(3)
    taking = asyncio.create_task(take(backlog, 3))
    async with asyncio.timeout(PATIENCE):
        while siblings.asked.count(3) < 10:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)
    assert not taking.done()
    siblings.commit()
    assert (await taking).step == 3


async def test_an_aggregate_that_nobody_keeps_any_more_is_an_error_that_says_so(
    siblings: Siblings, backlog: Backlog
) -> None:
    siblings.step = 9
    backlog.start(3)
    with pytest.raises(LostPaceError, match=r"siblings are in step 9 and no longer keep the aggregate of step [34]"):
        async with asyncio.timeout(PATIENCE):
            await backlog.lost()
    with pytest.raises(LostPaceError):
        await take(backlog, 3)


async def test_siblings_that_are_gone_are_an_error_that_says_so(siblings: Siblings, backlog: Backlog) -> None:
    siblings.step = None
    backlog.start(3)
    with pytest.raises(NoDonorError, match="no sibling answers any more"):
        await take(backlog, 3)


async def test_more_than_a_node_can_hold_is_an_error_that_says_what_helps(siblings: Siblings, backlog: Backlog) -> None:
    backlog.start(3)
    lost = asyncio.create_task(backlog.lost())
    for _ in range(5):
        await settle()
        assert not lost.done()
        siblings.commit()
    with pytest.raises(LostPaceError, match=r"5 steps passed .* a faster connection or a stage with fewer parameters"):
        async with asyncio.timeout(PATIENCE):
            await lost
    await settle()
    assert max(siblings.asked) <= 8, "and no more is asked for"


async def test_whoever_applies_as_quickly_as_others_commit_can_go_on_for_ever(
    siblings: Siblings, backlog: Backlog
) -> None:
    backlog.start(3)
    for step in range(3, 40):
        await settle()
        siblings.commit()
        assert (await take(backlog, step)).step == step


async def test_no_aggregate_is_asked_for_beyond_the_last_one_that_is_needed(
    siblings: Siblings, backlog: Backlog
) -> None:
    backlog.start(3)
    await settle()
    backlog.stop_before(6)
    for step in range(3, 6):
        siblings.commit()
        await take(backlog, step)
        await settle()
    siblings.commit()
    await settle()
    assert siblings.asked == [3, 4, 5]


async def test_after_close_nobody_waits_any_more(siblings: Siblings, backlog: Backlog) -> None:
    backlog.start(3)
    taking = asyncio.create_task(take(backlog, 3))
    await settle()
    await backlog.close()
    with pytest.raises(NoDonorError, match="listens no longer"):
        await taking
