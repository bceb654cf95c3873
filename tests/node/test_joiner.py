"""A joiner gets the state that most of its stage holds, whatever some donors do, or says why it cannot."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from node.averaging import Committed
from node.backlog import Backlog, BacklogLimits
from node.digest import parameter_digest
from node.donors import DisagreementError, DonorsBusyError, LostPaceError, NoDonorError
from node.joiner import Joiner
from node.snapshot import StageState
from node.statesync import DonorLimits
from protocol.errors import LocalError, MessageError
from protocol.fields import encode
from protocol.messages import Method, Snapshot, StateStatus
from protocol.transports.base import Request, Response
from tests.node.donating import (
    CHUNK_BYTES,
    JOINER,
    LAYOUT,
    LIMITS,
    PATIENCE,
    QUICK,
    Donor,
    Giving,
    make_state,
    same_bits,
)

ALL = list(range(LAYOUT.chunks))


@pytest.fixture
async def giving(no_tasks_left: None) -> AsyncIterator[Giving]:
    """A stage without replicas, and a joiner."""
    made = Giving()
    yield made
    await made.close()


class Quiet:
    """Siblings that commit nothing for now."""

    def __init__(self, *, gone: bool = False) -> None:
        self.gone = gone
        self.started: list[int] = []

    async def fetch(self, step: int) -> Committed:
        self.started.append(step)
        if self.gone:
            raise LocalError("no longer in the log")
        await asyncio.Event().wait()
        raise AssertionError

    async def reached(self) -> int | None:
        return 100


async def fetch(joiner: Joiner, quiet: Quiet | None = None) -> StageState:
    quiet = quiet or Quiet()
    limits = BacklogLimits(size=1 << 20, pause=0.001)
    backlog = Backlog(fetch=quiet.fetch, reached=quiet.reached, limits=limits)
    try:
        async with asyncio.timeout(PATIENCE):
            return await joiner.fetch(backlog)
    finally:
        await backlog.close()


# all is well -----------------------------------------------------------------------------


@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcdefgh"])
async def test_the_state_arrives_to_the_bit_and_every_chunk_travels_once(giving: Giving, names: str) -> None:
    donors = giving.stage(names)
    state = await fetch(giving.joiner())
    assert same_bits(state, make_state(5))
    assert giving.served() == ALL
    assert sum(bool(donor.served) for donor in donors) == min(3, len(names))
    assert sum(donor.frozen for donor in donors) == min(3, len(names)), "nobody else had to make a copy"
    assert all(donor.server._frozen is None for donor in donors), "and those are let go of"
    assert not giving.false and not giving.blame.kinds


async def test_aggregates_are_listened_for_from_the_snapshot_on(giving: Giving) -> None:
    giving.stage("ab", step=7)
    quiet = Quiet()
    state = await fetch(giving.joiner(), quiet)
    assert state.step == 7 and quiet.started == [7, 8]


async def test_a_sibling_that_has_not_heard_of_the_joiner_is_told(giving: Giving) -> None:
    giving.stage("a")
    giving.strangers.add(JOINER)
    assert same_bits(await fetch(giving.joiner()), make_state(5))
    assert giving.introduced == ["a"]


async def test_donors_between_two_steps_give_the_later_one(giving: Giving) -> None:
    giving.donor("a", step=6)
    behind = giving.donor("b", step=5)
    fetching = asyncio.create_task(fetch(giving.joiner()))
    while not any("step 6" in text for text in giving.told):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    behind.reach(6)
    assert same_bits(await fetching, make_state(6))
    assert giving.served() == ALL


async def test_donors_that_move_on_while_they_are_asked_are_led(giving: Giving) -> None:
    donors = giving.stage("ab")
    describe = {donor.name: donor.server._serve_snapshot for donor in donors}
    moved: set[str] = set()

    def restless(donor: Donor) -> Any:
        async def serve(request: Request) -> Response:
            if donor.name not in moved:
                moved.add(donor.name)
                donor.reach(6)
            return await describe[donor.name](request)

        return serve

    for donor in donors:
        donor.on(Method.SNAPSHOT, restless(donor))
    fetching = asyncio.create_task(fetch(giving.joiner()))
    while not any("step 7" in text for text in giving.told):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    for donor in donors:
        donor.reach(7)
    assert same_bits(await fetching, make_state(7))


async def test_progress_is_told_in_words(giving: Giving) -> None:
    giving.stage("ab")
    await fetch(giving.joiner())
    assert giving.told[0] == "asking 2 siblings for the state before step 5"
    assert giving.told[1].startswith("downloading the stage's state: 0 of 11 KiB from 2 siblings")


# donors that fail ------------------------------------------------------------------------


def dies_after(donor: Donor, chunks: int) -> Any:
    async def serve(request: Request) -> Response:
        if len(donor.served) >= chunks:
            donor.die()
            raise AssertionError("nobody hears it")
        return await donor.count(request)

    return serve


async def test_a_donor_that_dies_costs_only_what_it_had_on_its_way(giving: Giving) -> None:
    dying, _ = giving.stage("ab")
    dying.on(Method.CHUNK, dies_after(dying, 2))
    assert same_bits(await fetch(giving.joiner()), make_state(5))
    assert len(giving.served()) <= LAYOUT.chunks + QUICK.requests_each
    assert not giving.false


async def test_after_all_donors_have_died_another_with_the_same_snapshot_gives_the_rest(giving: Giving) -> None:
    first = giving.donor("a")
    first.on(Method.CHUNK, dies_after(first, 4))
    fetching = asyncio.create_task(fetch(giving.joiner()))
    while not any("all donors are gone" in text for text in giving.told):  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    second = giving.donor("b")
    await giving.transport.call("b", Method.SNAPSHOT, Snapshot(step=5), timeout=PATIENCE)  # as for another joiner
    second.reach(6)
    assert same_bits(await fetching, make_state(5))
    assert len(giving.served()) <= LAYOUT.chunks + QUICK.requests_each


async def test_a_donor_whose_connection_broke_is_found_again(giving: Giving) -> None:
    donor = giving.donor("a")
    broken = False

    async def serve(request: Request) -> Response:
        nonlocal broken
        if not broken and len(donor.served) == 4:
            broken = True
            donor.transport.drop_links(JOINER)
        return await donor.count(request)

    donor.on(Method.CHUNK, serve)
    assert same_bits(await fetch(giving.joiner()), make_state(5))
    assert broken and donor.frozen == 1


async def test_if_no_other_donor_appears_it_is_told_how_far_it_came(giving: Giving) -> None:
    donor = giving.donor("a")
    donor.on(Method.CHUNK, dies_after(donor, 6))
    with pytest.raises(NoDonorError, match=r"all donors left when \d\d % were here"):
        await fetch(giving.joiner(replace(LIMITS, resume=0.1)))


async def test_a_donor_that_stalls_is_replaced(giving: Giving) -> None:
    stalling, _ = giving.stage("ab")

    stalling.on(Method.CHUNK, never)
    assert same_bits(await fetch(giving.joiner()), make_state(5))


async def test_a_donor_that_describes_and_gives_nothing_is_not_taken_for_another_one(giving: Giving) -> None:
    donor = giving.donor("a")
    asked = 0

    async def refuse(request: Request) -> Response:
        nonlocal asked
        asked += 1
        raise LocalError("this one is broken")

    donor.on(Method.CHUNK, refuse)
    joiner = giving.joiner(replace(LIMITS, resume=0.1))
    with pytest.raises(NoDonorError, match="all donors left when 0 % were here"):
        await fetch(joiner)
    assert asked <= QUICK.requests_each and joiner._avoid == {"a"}


@pytest.mark.parametrize("method", [Method.STATE, Method.SNAPSHOT])
async def test_a_sibling_that_does_not_answer_is_not_waited_for_long(giving: Giving, method: Method) -> None:
    silent, *_ = giving.stage("abc")

    async def never(request: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    silent.on(method, never)
    assert same_bits(await fetch(giving.joiner(replace(LIMITS, describe=PATIENCE))), make_state(5))


# donors that lie -------------------------------------------------------------------------


async def test_a_donor_that_lies_in_one_chunk_is_reported_and_comes_last_the_next_time(giving: Giving) -> None:
    liar, honest = giving.stage("ab")

    async def lie(request: Request) -> Response:
        response = await liar.server._serve_chunk(request)
        return Response(body=(bytes(len(response.data)),))

    liar.on(Method.CHUNK, lie)

    async def patient(request: Request) -> Response:
        while not giving.false:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        return await honest.count(request)

    honest.on(Method.CHUNK, patient)
    joiner = giving.joiner()
    assert same_bits(await fetch(joiner), make_state(5))
    assert [peer for peer, _ in giving.false] == ["a"]
    assert joiner._avoid == {"a"}


async def test_the_description_that_most_donors_give_counts(giving: Giving) -> None:
    liar = giving.donor("a")
    giving.stage("bc")
    liar.state.optimizer["exp_avg_sq"][3] *= 1e6  # the parameters are those of the others
    joiner = giving.joiner()
    assert same_bits(await fetch(joiner), make_state(5))
    assert liar.served == [] and joiner._avoid == {"a"}
    assert not giving.false, "it may have lost its way without knowing"


async def test_two_donors_with_other_parameters_do_not_outvote_the_stage(giving: Giving) -> None:
    for name in "ab":
        giving.donor(name, seed=1)
    giving.stage("cdefg")
    for seed in range(6):
        try:
            state = await fetch(giving.joiner(seed=seed))
        except DisagreementError:
            continue  # both liars and nobody else had been drawn, or they and one that was late
        assert same_bits(state, make_state(5))
    assert all(not giving.donors[name].served for name in "ab")


async def test_what_siblings_claimed_counts_if_they_say_nothing_now(giving: Giving) -> None:
    giving.donor("liar", seed=1)
    honest = parameter_digest(make_state(5).parameters)
    giving.claims = {"b": honest, "c": honest}
    with pytest.raises(DisagreementError, match="not those of most siblings"):
        await fetch(giving.joiner())


@pytest.mark.parametrize("change", [{"size": LAYOUT.size + 8}, {"chunk_bytes": 2 * CHUNK_BYTES}, {"step": 4}])
async def test_a_description_of_the_wrong_size_is_refused(giving: Giving, change: dict[str, Any]) -> None:
    liar = giving.donor("a")
    describe = liar.server._serve_snapshot

    async def lie(request: Request) -> Response:
        return Response(head={**(await describe(request)).head, **change})

    liar.on(Method.SNAPSHOT, lie)
    with pytest.raises(NoDonorError, match="a snapshot of"):
        await fetch(giving.joiner())
    assert giving.blame.kinds == [("a", "snapshot")]
    giving.stage("b")
    assert same_bits(await fetch(giving.joiner()), make_state(5))


async def test_parameters_that_do_not_have_their_digest_are_the_fault_of_all_who_described_them(giving: Giving) -> None:
    for donor in giving.stage("ab"):
        donor.state.parameters[0] += 1.0  # after the digest was taken
        donor.freeze = _claims(donor, make_state(5))  # type: ignore[method-assign]
        donor.server._freeze = donor.freeze
    with pytest.raises(MessageError, match="do not have the digest"):
        await fetch(giving.joiner())
    assert sorted(peer for peer, _ in giving.false) == ["a", "b"]


async def test_values_that_are_not_finite_are_refused(giving: Giving) -> None:
    donor = giving.donor("a")
    donor.state.optimizer["exp_avg"][0] = torch.nan
    with pytest.raises(MessageError, match="not finite"):
        await fetch(giving.joiner())


async def test_one_that_boasts_of_its_step_does_not_keep_the_joiner_waiting(giving: Giving) -> None:
    liar = giving.donor("liar")
    giving.stage("abc")

    async def boast(request: Request) -> Response:
        return Response(head=encode(StateStatus(step=2**40)))

    liar.on(Method.STATE, boast)
    fetching = asyncio.create_task(fetch(giving.joiner()))
    while not giving.told:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    for name in "abc":
        giving.donors[name].reach(6)
    assert (await fetching).step == 6


def _claims(donor: Donor, other: StageState) -> Any:
    async def freeze(copy: Any) -> tuple[int, bytes]:
        copy(donor.state)
        return donor.state.step, parameter_digest(other.parameters)

    return freeze


# when it cannot be done ------------------------------------------------------------------


async def test_without_any_sibling_it_says_what_it_waits_for(giving: Giving) -> None:
    with pytest.raises(NoDonorError, match="waiting for one that answers"):
        await fetch(giving.joiner())


async def test_when_all_are_busy_it_waits_for_its_turn(giving: Giving) -> None:
    for donor in giving.stage("ab"):
        donor.server._may_freeze_at = float("inf")
    with pytest.raises(DonorsBusyError, match="waiting for a turn"):
        await fetch(giving.joiner())


async def never(request: Request) -> Response:
    await asyncio.Event().wait()
    raise AssertionError


async def test_when_all_keep_an_old_snapshot_for_another_that_one_is_tried(giving: Giving) -> None:
    donors = giving.stage("ab")
    for donor in donors:
        await giving.transport.call(donor.name, Method.SNAPSHOT, Snapshot(step=5), timeout=PATIENCE)
        donor.server._users["another"] = donor.server._users[JOINER]
        donor.reach(9)
    assert same_bits(await fetch(giving.joiner()), make_state(5))
    assert all(donor.frozen == 1 for donor in donors)
    for donor in donors:
        donor.on(Method.CHUNK, never)
    patient = replace(LIMITS, download=replace(QUICK, chunk=PATIENCE))
    with pytest.raises(LostPaceError, match=r"no longer keep the aggregate of step [56]"):
        await fetch(giving.joiner(patient), Quiet(gone=True))
    assert all(donor.server._users.keys() == {"another"} for donor in donors)


async def test_an_aggregate_that_was_missed_ends_the_download_at_once(giving: Giving) -> None:
    donor = giving.donor("a")

    async def never(request: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError

    donor.on(Method.CHUNK, never)
    patient = replace(LIMITS, download=replace(QUICK, chunk=PATIENCE))
    with pytest.raises(LostPaceError):
        await fetch(giving.joiner(patient), Quiet(gone=True))
    assert donor.server._frozen is None, "the donor has been told"


async def test_a_download_that_trickles_comes_to_an_end(giving: Giving) -> None:
    donor = giving.donor("a")

    async def trickle(request: Request) -> Response:
        await asyncio.sleep(0.05)
        return await donor.count(request)

    donor.on(Method.CHUNK, trickle)
    slow = replace(LIMITS, download=replace(QUICK, grace=0.1, least_rate=1e9))
    joiner = giving.joiner(slow)
    with pytest.raises(LostPaceError, match="a faster connection is needed"):
        await fetch(joiner)
    assert joiner._avoid == {"a"}


async def test_a_donor_without_memory_says_so(giving: Giving) -> None:
    giving.donor("a", memory=lambda: 0)
    with pytest.raises(NoDonorError, match="no memory here for a copy"):
        await fetch(giving.joiner())


async def test_a_step_that_does_not_come_in_time_is_told(giving: Giving) -> None:
    giving.donor("a", step=6)
    stuck = giving.donor("b", limits=DonorLimits(boundary=0.05))
    giving.donors["a"].on(Method.SNAPSHOT, stuck.server._serve_snapshot)
    with pytest.raises(NoDonorError, match="step 6 has not begun yet"):
        await fetch(giving.joiner())


# the arrival -----------------------------------------------------------------------------


async def test_on_arrival_the_parameters_are_compared_with_the_siblings(giving: Giving) -> None:
    giving.stage("abc")
    joiner = giving.joiner()
    state = await fetch(joiner)
    digest = parameter_digest(state.parameters)
    assert await joiner.check(5, digest) == 5
    with pytest.raises(DisagreementError, match="not those of its siblings"):
        await joiner.check(5, bytes(32))
    assert joiner._avoid == {"a", "b", "c"}, "others are asked the next time"


async def test_siblings_that_are_not_there_yet_or_gone_contradict_nobody(giving: Giving) -> None:
    giving.stage("abc")
    assert await giving.joiner().check(6, bytes(32)) == 5
    giving.listed.clear()
    assert await giving.joiner().check(6, bytes(32)) is None
