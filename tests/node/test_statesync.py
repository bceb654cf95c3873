"""A donor freezes one state at a time, at the step that was asked for, and serves no more than it can bear."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from node.digest import parameter_digest
from node.statesync import DIGESTS_KEPT, MAX_AHEAD, DonorLimits
from protocol.errors import LocalError, RefusedError
from protocol.fields import decode
from protocol.messages import Chunk, Method, Release, Snapshot, SnapshotAnswer, StateQuery, StateStatus
from protocol.transports.base import Request, Response
from protocol.transports.memory import MemoryTransport
from protocol.transports.sessions import SessionOptions
from tests.node.donating import CHUNK_BYTES, JOINER, LAYOUT, PATIENCE, Donor, Giving, make_state

FREE = 1e6
"""A share of its time that lets a donor freeze as often as it is asked."""


class Clock:
    """Time that the test moves on."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def giving(no_tasks_left: None) -> AsyncIterator[Giving]:
    """A stage without replicas, and a joiner."""
    made = Giving()
    yield made
    await made.close()


async def ask(giving: Giving, donor: Donor, method: Method, message: Any, **options: Any) -> Response:
    return await giving.transport.call(donor.name, method, message, timeout=PATIENCE, **options)


async def describe(giving: Giving, donor: Donor, step: int) -> SnapshotAnswer:
    return decode(SnapshotAnswer, (await ask(giving, donor, Method.SNAPSHOT, Snapshot(step=step))).head)


async def status(giving: Giving, donor: Donor, step: int | None = None) -> StateStatus:
    return decode(StateStatus, (await ask(giving, donor, Method.STATE, StateQuery(step=step))).head)


async def refusal(giving: Giving, donor: Donor, method: Method, message: Any) -> str:
    with pytest.raises(RefusedError) as caught:
        await ask(giving, donor, method, message)
    return caught.value.kind


def other_joiner(giving: Giving, name: str) -> Giving:
    """The same stage as another joiner sees it."""
    other = object.__new__(Giving)
    other.__dict__.update(giving.__dict__)
    other.transport = MemoryTransport(giving.network, name, options=SessionOptions(swarm=bytes(32)))
    return other


# which state -----------------------------------------------------------------------------


async def test_donors_of_one_step_describe_the_same_snapshot(giving: Giving) -> None:
    one, two = giving.stage("ab", step=5)
    first = await describe(giving, one, 5)
    assert first == await describe(giving, two, 5)
    assert first.parameters == parameter_digest(make_state(5).parameters)
    assert (first.size, first.chunk_bytes) == (LAYOUT.size, CHUNK_BYTES)


async def test_a_donor_waits_for_the_end_of_its_step(giving: Giving) -> None:
    donor = giving.donor("a", step=5)
    asked = asyncio.create_task(describe(giving, donor, 6))
    await status(giving, donor)  # a message later, and still nothing is frozen
    assert not asked.done() and donor.frozen == 0
    donor.reach(6)
    assert (await asked).parameters == parameter_digest(make_state(6).parameters)


async def test_a_step_that_is_over_or_far_off_is_refused(giving: Giving) -> None:
    donor = giving.donor("a", step=5)
    assert await refusal(giving, donor, Method.SNAPSHOT, Snapshot(step=4)) == "too_old"
    assert await refusal(giving, donor, Method.SNAPSHOT, Snapshot(step=5 + MAX_AHEAD + 1)) == "wrong_step"
    assert donor.frozen == 0


async def test_a_step_that_does_not_come_is_not_waited_for_for_ever(giving: Giving) -> None:
    donor = giving.donor("a", step=5, limits=DonorLimits(boundary=0.05))
    assert await refusal(giving, donor, Method.SNAPSHOT, Snapshot(step=6)) == "not_yet"


async def test_a_step_that_ends_while_it_is_frozen_is_refused_and_the_next_one_kept(giving: Giving) -> None:
    donor = giving.donor("a", step=5)
    await donor.between_steps.acquire()  # an update is under way
    asked = asyncio.create_task(refusal(giving, donor, Method.SNAPSHOT, Snapshot(step=5)))
    await status(giving, donor)
    donor.reach(6)
    donor.between_steps.release()
    assert await asked == "too_old"
    assert (await status(giving, donor)).frozen == 6
    await describe(giving, donor, 6)
    assert donor.frozen == 1


async def test_status_tells_step_snapshot_and_earlier_digests(giving: Giving) -> None:
    donor = giving.donor("a", step=5)
    assert await status(giving, donor) == StateStatus(step=5)
    await describe(giving, donor, 5)
    donor.reach(6)
    assert await status(giving, donor, 5) == StateStatus(
        step=6, frozen=5, parameters=parameter_digest(make_state(5).parameters)
    )
    assert (await status(giving, donor, 3)).parameters == b"", "it has not been there"
    for step in range(7, 7 + DIGESTS_KEPT):
        donor.reach(step)
    assert (await status(giving, donor, 6)).parameters == b"", "so far back it does not remember"
    assert (await status(giving, donor, 7)).parameters != b""


async def test_a_donor_whose_own_state_is_in_doubt_gives_nothing(giving: Giving) -> None:
    donor = giving.donor("a", step=5)
    await describe(giving, donor, 5)
    waiting = asyncio.create_task(refusal(giving, donor, Method.SNAPSHOT, Snapshot(step=6)))
    await status(giving, donor)
    donor.server.withhold()
    assert await waiting == "unavailable"
    assert await refusal(giving, donor, Method.STATE, StateQuery()) == "unavailable"
    assert await refusal(giving, donor, Method.SNAPSHOT, Snapshot(step=5)) == "unavailable"
    assert await refusal(giving, donor, Method.CHUNK, Chunk(step=5, index=0)) == "too_old"
    donor.reach(9)
    assert (await describe(giving, donor, 9)).step == 9


async def test_strangers_get_nothing(giving: Giving) -> None:
    donor = giving.donor("a", step=5)
    giving.strangers.add(JOINER)
    for method, message in (
        (Method.STATE, StateQuery()),
        (Method.SNAPSHOT, Snapshot(step=5)),
        (Method.CHUNK, Chunk(step=5, index=0)),
        (Method.RELEASE, Release(step=5)),
    ):
        assert await refusal(giving, donor, method, message) == "not_admitted"


# chunks ----------------------------------------------------------------------------------


async def test_the_chunks_are_the_bytes_of_the_frozen_state(giving: Giving) -> None:
    donor = giving.donor("a", step=5)
    answer = await describe(giving, donor, 5)
    donor.state.parameters.zero_()  # as training would
    donor.reach(6)
    data = bytearray()
    for index in range(len(answer.chunks)):
        chunk = await ask(giving, donor, Method.CHUNK, Chunk(step=5, index=index), reply_limit=CHUNK_BYTES)
        data += chunk.data
    image = LAYOUT.image()
    LAYOUT.pack(make_state(5), image)
    assert bytes(data) == image.numpy().tobytes()


async def test_chunks_that_do_not_exist_are_refused(giving: Giving) -> None:
    donor = giving.donor("a", step=5)
    assert await refusal(giving, donor, Method.CHUNK, Chunk(step=5, index=0)) == "too_old"
    await describe(giving, donor, 5)
    assert await refusal(giving, donor, Method.CHUNK, Chunk(step=5, index=LAYOUT.chunks)) == "range"
    assert await refusal(giving, donor, Method.CHUNK, Chunk(step=6, index=0)) == "too_old"


async def test_few_chunks_are_on_their_way_at_a_time_and_fewer_to_one_joiner(giving: Giving) -> None:
    donor = giving.donor("a", step=5, limits=DonorLimits(chunks=3, chunks_each=2))
    await describe(giving, donor, 5)
    requests = [Request(peer=peer, method=Method.CHUNK, head={"step": 5, "index": 0}) for peer in ("one", "one", "two")]
    held = [await donor.server._serve_chunk(request) for request in requests]
    for peer in ("one", "three"):  # the first has enough, and together they have enough
        with pytest.raises(RefusedError) as caught:
            await donor.server._serve_chunk(Request(peer=peer, method=Method.CHUNK, head={"step": 5, "index": 0}))
        assert caught.value.kind == "busy"
    del caught
    held.pop(0)  # as when it has been sent
    gc.collect()
    held.append(await donor.server._serve_chunk(requests[0]))
    held.clear()
    gc.collect()
    assert donor.server._sending.total() == 0


async def test_a_chunk_is_not_copied_to_be_sent(giving: Giving) -> None:
    donor = giving.donor("a", step=5)
    await describe(giving, donor, 5)
    response = await donor.server._serve_chunk(Request(peer="x", method=Method.CHUNK, head={"step": 5, "index": 1}))
    assert donor.server._frozen is not None
    donor.server._frozen.image[CHUNK_BYTES] ^= 0xFF
    image = LAYOUT.image()
    LAYOUT.pack(make_state(5), image)
    assert response.data[0] == int(image[CHUNK_BYTES]) ^ 0xFF


# one snapshot at a time ------------------------------------------------------------------


async def test_joiners_share_a_snapshot_and_the_last_one_lets_it_go(giving: Giving) -> None:
    donor = giving.donor("a", step=5)
    other = other_joiner(giving, "other")
    await describe(giving, donor, 5)
    donor.reach(6)
    await describe(other, donor, 5)
    assert donor.frozen == 1
    assert await refusal(other, donor, Method.SNAPSHOT, Snapshot(step=6)) == "busy"
    await ask(giving, donor, Method.RELEASE, Release(step=5))
    assert (await status(giving, donor)).frozen == 5
    await ask(other, donor, Method.RELEASE, Release(step=5))
    assert (await status(giving, donor)).frozen is None
    assert donor.server._frozen is None, "the memory is free"
    await ask(other, donor, Method.RELEASE, Release(step=5))  # again, which means nothing
    await describe(other, donor, 6)
    await other.transport.close()


async def test_a_joiner_that_asks_for_nothing_any_more_does_not_keep_the_snapshot(giving: Giving) -> None:
    clock = Clock()
    donor = giving.donor("a", step=5, clock=clock, limits=DonorLimits(lease=60, freezing_share=FREE))
    await describe(giving, donor, 5)
    donor.reach(6)
    clock.now += 59
    await ask(giving, donor, Method.CHUNK, Chunk(step=5, index=0), reply_limit=CHUNK_BYTES)
    clock.now += 59
    assert (await status(giving, donor)).frozen == 5
    clock.now += 2
    assert (await status(giving, donor)).frozen is None
    donor.reach(7)
    assert donor.server._frozen is None
    assert (await describe(giving, donor, 7)).step == 7


async def test_a_joiner_that_never_stops_asking_does_not_keep_others_out_for_ever(giving: Giving) -> None:
    clock = Clock()
    donor = giving.donor("a", step=5, clock=clock, limits=DonorLimits(lease=60, hold=900, freezing_share=FREE))
    other = other_joiner(giving, "other")
    await describe(giving, donor, 5)
    for _ in range(18):
        clock.now += 50
        await describe(giving, donor, 5)
    donor.reach(6)
    assert await refusal(other, donor, Method.SNAPSHOT, Snapshot(step=6)) == "busy"
    clock.now += 50
    assert (await describe(other, donor, 6)).step == 6
    await other.transport.close()


async def test_freezing_takes_a_small_share_of_a_donors_time(giving: Giving) -> None:
    clock = Clock()
    donor = giving.donor("a", step=5, clock=clock, limits=DonorLimits(freezing_share=0.05))
    freeze = donor.freeze

    async def slow(copy: Any) -> tuple[int, bytes]:
        clock.now += 2.0
        return await freeze(copy)

    donor.server._freeze = slow
    await describe(giving, donor, 5)
    await ask(giving, donor, Method.RELEASE, Release(step=5))
    clock.now += 39.0
    assert await refusal(giving, donor, Method.SNAPSHOT, Snapshot(step=5)) == "busy"
    clock.now += 2.0
    await describe(giving, donor, 5)


async def test_a_freeze_that_nobody_waited_for_counts_as_well(giving: Giving) -> None:
    clock = Clock()
    donor = giving.donor("a", step=5, clock=clock, limits=DonorLimits(freezing_share=0.05))
    begun = asyncio.Event()

    async def stuck(copy: Any) -> tuple[int, bytes]:
        clock.now += 1.0
        begun.set()
        await asyncio.Event().wait()
        raise AssertionError

    donor.server._freeze = stuck
    asked = asyncio.create_task(describe(giving, donor, 5))
    async with asyncio.timeout(PATIENCE):
        await begun.wait()
    asked.cancel()
    await asyncio.gather(asked, return_exceptions=True)
    donor.server._freeze = donor.freeze
    assert await refusal(giving, donor, Method.SNAPSHOT, Snapshot(step=5)) == "busy"


async def test_a_freeze_that_failed_is_no_snapshot(giving: Giving) -> None:
    donor = giving.donor("a", step=5)

    async def fail(copy: Any) -> tuple[int, bytes]:
        raise LocalError("the disk is on fire")

    donor.server._freeze = fail
    assert await refusal(giving, donor, Method.SNAPSHOT, Snapshot(step=5)) == "unavailable"
    donor.server._freeze = donor.freeze
    await describe(giving, donor, 5)


async def test_a_donor_without_memory_for_a_copy_refuses(giving: Giving) -> None:
    donor = giving.donor("a", step=5, memory=lambda: LAYOUT.size)
    assert await refusal(giving, donor, Method.SNAPSHOT, Snapshot(step=5)) == "unavailable"
    assert donor.frozen == 0
