"""Who of a stage may go on when its replicas have lost each other."""

from __future__ import annotations

import asyncio
from collections.abc import Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.averaging import OutOfSyncError
from node.survivors import Witnesses, outnumbered
from protocol.errors import PeerGoneError
from tests.node.siblings import OLD, Stage, gradients

NAMES = st.sets(st.sampled_from("abcdefgh"), min_size=1)


@given(here=NAMES, there=NAMES)
def test_of_two_sides_that_know_each_other_exactly_one_goes_on(here: set[str], there: set[str]) -> None:
    there = there - here
    if there:
        assert outnumbered(here, there) != outnumbered(there, here)
    else:
        assert not outnumbered(here, there)


@given(sides=st.lists(st.sampled_from("012"), min_size=2, max_size=8))
def test_of_three_sides_at_most_one_goes_on(sides: list[str]) -> None:
    groups = [{f"p{place}" for place, side in enumerate(sides) if side == name} for name in "012"]
    groups = [group for group in groups if group]
    everybody = set().union(*groups)
    assert sum(not outnumbered(group, everybody - group) for group in groups) <= 1


def witnesses(answers: dict[str, Collection[str] | Exception], *, needed: bool = True) -> Witnesses:
    async def ask(peer: str) -> Collection[str]:
        answer = answers[peer]
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Witnesses(neighbours=lambda: list(answers), ask=ask, needed=needed)


@pytest.mark.parametrize(
    ("answers", "alive"),
    [
        ({"n1": {"x", "a"}, "n2": {"x"}, "n3": set()}, {"x"}),
        ({"n1": {"x"}, "n2": set()}, set()),  # no majority
        ({"n1": PeerGoneError("gone"), "n2": {"x"}}, {"x"}),
        ({"n1": PeerGoneError("gone")}, None),
        ({}, None),
    ],
)
async def test_most_neighbours_decide_who_is_there(
    answers: dict[str, Collection[str] | Exception], alive: set[str] | None
) -> None:
    assert await witnesses(answers).alive({"x", "y"}) == alive


async def test_a_stage_without_neighbours_asks_nobody() -> None:
    assert await witnesses({}, needed=False).alive({"x"}) == set()


async def test_a_fault_of_the_node_itself_is_not_taken_for_silence() -> None:
    with pytest.raises(ZeroDivisionError):
        await witnesses({"n1": ZeroDivisionError()}).alive({"x"})


# in a round -----------------------------------------------------------------------------


class Neighbourhood:
    """What the neighbouring stages would say, and what a sibling says of its waiting."""

    def __init__(self, stage: Stage) -> None:
        self.known: Collection[str] | None = ()
        self.past = False
        self.told: list[str] = []
        self.waits = asyncio.Event()
        for member in stage.members:
            member.averager._alive = self.alive
            member.averager._check_present = self.check_present
            member.averager._tell = self.tell

    async def alive(self, lost: Collection[str]) -> Collection[str] | None:
        return None if self.known is None else set(self.known) & set(lost)

    def check_present(self, step: int) -> None:
        if self.past:
            raise OutOfSyncError("the others went on")

    def tell(self, text: str) -> None:
        self.told.append(text)
        self.waits.set()


async def after_one_step(names: str) -> tuple[Stage, Neighbourhood]:
    stage = Stage()
    members = stage.siblings(names)
    near = Neighbourhood(stage)
    await asyncio.gather(*(member.run(part) for member, part in zip(members, gradients(len(members)), strict=True)))
    return stage, near


def cut(stage: Stage, name: str) -> None:
    """The named sibling and the others see each other vanish."""
    for member in stage.members:
        if member.name == name:
            member.gone |= stage.roster - {name}
        else:
            member.gone.add(name)
        member.notify()


async def test_whoever_is_cut_off_waits_and_the_others_go_on() -> None:
    stage, near = await after_one_step("abc")
    try:
        near.known = "abc"
        cut(stage, "c")
        a, b, c = stage.members
        parts = gradients(3)
        waiting = stage.spawn(c.run(parts[2], step=1, parameters=OLD))
        first, second = await asyncio.gather(a.run(parts[0], step=1), b.run(parts[1], step=1))
        assert first.digest == second.digest and first.microbatches == 2
        async with asyncio.timeout(10):
            await near.waits.wait()
        assert "a" in near.told[0] and "neighbouring stages know them" in near.told[0]
        assert not waiting.done()
        near.past = True
        with pytest.raises(OutOfSyncError, match="went on"):
            await waiting
    finally:
        await stage.close()


async def test_the_last_one_goes_on_alone_once_the_neighbours_know_the_others_dead() -> None:
    stage, near = await after_one_step("ab")
    try:
        near.known = None
        cut(stage, "b")
        alone = stage.spawn(stage.members[1].run(gradients(1)[0], step=1))
        async with asyncio.timeout(10):
            await near.waits.wait()
        assert "no neighbour can be asked" in near.told[0] and not alone.done()
        near.known = ()
        stage.members[1].notify()
        assert (await alone).microbatches == 1
    finally:
        await stage.close()


async def test_of_two_that_lost_each_other_one_goes_on() -> None:
    stage, near = await after_one_step("ab")
    try:
        near.known = "ab"
        cut(stage, "b")
        a, b = stage.members
        other = stage.spawn(b.run(gradients(1)[0], step=1))
        assert (await a.run(gradients(1)[0], step=1)).microbatches == 1
        async with asyncio.timeout(10):
            await near.waits.wait()
        assert not other.done()
    finally:
        await stage.close()


async def test_siblings_that_find_each_other_again_average_together() -> None:
    stage, near = await after_one_step("ab")
    try:
        near.known = None
        cut(stage, "b")
        a, b = stage.members
        rounds = [stage.spawn(member.run(part, step=1)) for member, part in zip((a, b), gradients(2), strict=True)]
        async with asyncio.timeout(10):
            await near.waits.wait()
        for member in (a, b):
            member.gone.clear()
            member.notify()
        first, second = await asyncio.gather(*rounds)
        assert first.digest == second.digest and first.microbatches == 2
    finally:
        await stage.close()


async def test_what_was_agreed_before_this_process_was_stopped_is_asked_for_again() -> None:
    """The others gave the attempt up and committed one without it, and their old word is still in its buffers."""
    stage = Stage()
    a, b, c = stage.siblings("abc")
    try:
        slept = iter([True, False])
        c.averager._slept_since = lambda moment: next(slept)
        parts = gradients(3)
        first, second, third = await asyncio.gather(
            *(member.run(part) for member, part in zip((a, b, c), parts, strict=True))
        )
        # Here the others did commit, so the answer is what was agreed; what counts is that they were asked.
        assert first.digest == second.digest == third.digest
        assert third.fetched and not first.fetched
        assert c.averager.rounds_failed == 1
    finally:
        await stage.close()
