"""Chunks come from several donors at once; those that die, stall or lie cost no more than what they still owed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from node.download import Download, DownloadLimits, FalseChunkError
from protocol.errors import RefusedError, SentinelError
from protocol.fields import decode
from protocol.messages import Chunk, Method, Snapshot, SnapshotAnswer
from protocol.transports.base import Request, Response
from tests.node.donating import CHUNK_BYTES, LAYOUT, PATIENCE, QUICK, Donor, Giving, make_state

ALL = list(range(LAYOUT.chunks))
PATIENT = replace(QUICK, chunk=PATIENCE, late=PATIENCE)
"""Limits under which nobody is dropped for being slow."""


@pytest.fixture
async def giving(no_tasks_left: None) -> AsyncIterator[Giving]:
    """A stage without replicas, and a joiner."""
    made = Giving()
    yield made
    await made.close()


class Trial:
    """A download, and what became of its donors."""

    def __init__(self, giving: Giving, answer: SnapshotAnswer, limits: DownloadLimits) -> None:
        self.dropped: dict[str, SentinelError] = {}
        self.download = Download(giving.transport, answer, LAYOUT, limits=limits, on_dropped=self.dropped.__setitem__)

    async def run(self, *donors: Donor) -> Trial:
        async with asyncio.timeout(PATIENCE):
            await self.download.run([donor.name for donor in donors])
        return self

    def assert_complete(self, step: int = 5) -> None:
        """All bits are those of the honest state."""
        assert self.download.complete and self.download.meter.done == LAYOUT.size
        image = LAYOUT.image()
        LAYOUT.pack(make_state(step), image)
        assert torch.equal(self.download.image, image)


async def prepared(giving: Giving, *donors: Donor, limits: DownloadLimits = QUICK) -> Trial:
    """All donors have frozen step 5."""
    for donor in donors:
        response = await giving.transport.call(donor.name, Method.SNAPSHOT, Snapshot(step=5), timeout=PATIENCE)
    return Trial(giving, decode(SnapshotAnswer, response.head), limits)


def index_of(request: Request) -> int:
    return decode(Chunk, request.head).index


async def test_one_donor_gives_every_chunk_once(giving: Giving) -> None:
    donor = giving.donor("a")
    trial = await (await prepared(giving, donor)).run(donor)
    trial.assert_complete()
    assert giving.served() == ALL and not trial.dropped


async def test_two_donors_share_the_work(giving: Giving) -> None:
    donors = giving.stage("ab")
    trial = await (await prepared(giving, *donors, limits=PATIENT)).run(*donors)
    trial.assert_complete()
    assert giving.served() == ALL
    assert min(len(donor.served) for donor in donors) > LAYOUT.chunks // 4


async def test_a_quicker_donor_gives_more(giving: Giving) -> None:
    quick, slow = giving.stage("ab")
    trial = await prepared(giving, quick, slow, limits=PATIENT)

    def turn() -> bool:
        """Three for one, until nothing is left for the quick one."""
        return len(quick.served) >= 3 * (len(slow.served) + 1) or not trial.download._missing

    slow.on(Method.CHUNK, _after(turn, slow))
    (await trial.run(quick, slow)).assert_complete()
    assert len(quick.served) > len(slow.served) > 0
    assert giving.served() == ALL


async def test_no_more_is_under_way_than_allowed(giving: Giving) -> None:
    donor = giving.donor("a")
    trial = await prepared(giving, donor, limits=replace(PATIENT, requests_each=3))
    now, most = 0, 0

    async def count(request: Request) -> Response:
        nonlocal now, most
        now, most = now + 1, max(most, now + 1)
        await asyncio.sleep(0)
        now -= 1
        return await donor.count(request)

    donor.on(Method.CHUNK, count)
    (await trial.run(donor)).assert_complete()
    assert most <= 3


# donors that fail ------------------------------------------------------------------------


async def test_when_a_donor_dies_the_other_takes_over_and_nothing_that_came_is_fetched_again(giving: Giving) -> None:
    dying, other = giving.stage("ab")
    trial = await prepared(giving, dying, other, limits=PATIENT)
    dying.on(Method.CHUNK, _mortal(dying, trial, after=3))
    other.on(Method.CHUNK, _after(lambda: dying.name in trial.dropped, other))
    (await trial.run(dying, other)).assert_complete()
    assert len(dying.served) == 3 and giving.served() == ALL
    assert list(trial.dropped) == ["a"] and not isinstance(trial.dropped["a"], FalseChunkError)


async def test_when_all_have_died_what_came_is_kept_for_the_next_one(giving: Giving) -> None:
    first, second = giving.stage("ab")
    trial = await prepared(giving, first, second)
    first.on(Method.CHUNK, _mortal(first, trial, after=4))
    await trial.run(first)
    assert not trial.download.complete and trial.download.donors == 0
    assert trial.download.meter.done == 4 * CHUNK_BYTES
    (await trial.run(second)).assert_complete()
    assert giving.served() == ALL


@pytest.mark.parametrize(
    "change",
    [
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:-1],
        lambda data: b"",
        lambda data: data[: len(data) // 2] * 2,
    ],
    ids=["one bit", "a byte short", "empty", "other bytes"],
)
async def test_a_donor_that_lies_in_one_chunk_is_dropped_and_the_chunk_comes_from_the_other(
    giving: Giving, change: Any
) -> None:
    liar, honest = giving.stage("ab")
    trial = await prepared(giving, liar, honest, limits=PATIENT)

    async def lie(request: Request) -> Response:
        response = await liar.server._serve_chunk(request)
        return Response(body=(change(bytes(response.data)),))

    liar.on(Method.CHUNK, lie)
    honest.on(Method.CHUNK, _after(lambda: liar.name in trial.dropped, honest))
    (await trial.run(liar, honest)).assert_complete()
    assert isinstance(trial.dropped["a"], FalseChunkError)
    assert honest.served and sorted(honest.served) == ALL


async def test_a_chunk_that_is_too_large_is_not_even_received(giving: Giving) -> None:
    liar, honest = giving.stage("ab")
    trial = await prepared(giving, liar, honest)

    async def lie(request: Request) -> Response:
        return Response(body=(bytes(CHUNK_BYTES + 1),))

    liar.on(Method.CHUNK, lie)
    (await trial.run(liar, honest)).assert_complete()
    assert list(trial.dropped) == ["a"]
    assert ("a", "frame") in giving.blame.kinds


async def test_a_donor_that_is_late_does_not_hold_up_the_end(giving: Giving) -> None:
    late, other = giving.stage("ab")
    trial = await prepared(giving, late, other, limits=replace(QUICK, chunk=PATIENCE))

    async def never(request: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    late.on(Method.CHUNK, never)
    (await trial.run(late, other)).assert_complete()
    assert not trial.dropped, "what it owed came from the other"
    assert sorted(other.served) == ALL


async def test_a_donor_that_stalls_is_dropped(giving: Giving) -> None:
    donor = giving.donor("a")
    trial = await prepared(giving, donor, limits=replace(QUICK, chunk=0.1))

    async def never(request: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    donor.on(Method.CHUNK, never)
    await trial.run(donor)
    assert list(trial.dropped) == ["a"] and not trial.download.complete
    donor.on(Method.CHUNK, donor.count)
    (await trial.run(donor)).assert_complete()


async def test_a_donor_that_no_longer_keeps_the_snapshot_is_dropped(giving: Giving) -> None:
    gone, other = giving.stage("ab")
    trial = await prepared(giving, gone, other)
    gone.server.withhold()
    (await trial.run(gone, other)).assert_complete()
    assert isinstance(trial.dropped["a"], RefusedError)


# donors that are busy --------------------------------------------------------------------


async def test_a_busy_donor_is_asked_again(giving: Giving) -> None:
    donor = giving.donor("a")
    trial = await prepared(giving, donor)
    refused = 0

    async def busy(request: Request) -> Response:
        nonlocal refused
        if refused < 5:
            refused += 1
            raise RefusedError("enough chunks are on their way", kind="busy")
        return await donor.count(request)

    donor.on(Method.CHUNK, busy)
    (await trial.run(donor)).assert_complete()
    assert refused == 5 and not trial.dropped and giving.served() == ALL


async def test_what_a_busy_donor_refused_comes_from_the_other(giving: Giving) -> None:
    busy, other = giving.stage("ab")
    trial = await prepared(giving, busy, other, limits=replace(QUICK, turn=PATIENCE))

    async def refuse(request: Request) -> Response:
        raise RefusedError("enough chunks are on their way", kind="busy")

    busy.on(Method.CHUNK, refuse)
    (await trial.run(busy, other)).assert_complete()
    assert not trial.dropped and sorted(other.served) == ALL


async def test_a_donor_that_is_busy_for_ever_is_dropped_and_the_wait_is_told(giving: Giving) -> None:
    donor = giving.donor("a")
    trial = await prepared(giving, donor, limits=replace(QUICK, turn=0.1))
    waiting: list[int] = []

    async def refuse(request: Request) -> Response:
        waiting.append(trial.download.busy)
        raise RefusedError("enough chunks are on their way", kind="busy")

    donor.on(Method.CHUNK, refuse)
    await trial.run(donor)
    assert list(trial.dropped) == ["a"] and not trial.download.complete
    assert waiting[0] == 0 and waiting[-1] == 1


async def test_what_goes_wrong_here_is_nobody_elses_fault(giving: Giving) -> None:
    donor = giving.donor("a")
    trial = await prepared(giving, donor)

    def fail(index: int, data: object) -> None:
        raise MemoryError("this machine is full")

    trial.download._keep = fail  # type: ignore[method-assign]
    with pytest.raises(BaseExceptionGroup) as caught:
        await trial.run(donor)
    assert caught.group_contains(MemoryError)
    assert not trial.dropped


def _mortal(donor: Donor, trial: Trial, *, after: int) -> Any:
    """Serve so many chunks, and die when they have been checked."""

    async def serve(request: Request) -> Response:
        if len(donor.served) < after:
            return await donor.count(request)
        while trial.download.meter.done < after * CHUNK_BYTES:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
        donor.die()
        raise AssertionError("nobody hears it")

    return serve


def _after(condition: Any, donor: Donor) -> Any:
    """Serve once the condition holds: the other donor has then been seen through."""

    async def serve(request: Request) -> Response:
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.005)
        return await donor.count(request)

    return serve
