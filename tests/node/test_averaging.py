"""Siblings average over a real (in-memory) transport: all hold the same bits, whoever dies, lies or comes late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch

from node import averaging
from node.averaging import MAX_ATTEMPTS, Committed, Contribution, OutOfSyncError
from node.rounds import aggregate_digest, slice_length, strides
from protocol.errors import LocalError, MessageError, RefusedError
from protocol.fields import decode
from protocol.messages import (
    Aggregate,
    AggregateAnswer,
    Method,
    Part,
    RoundAnswer,
    RoundCommit,
    RoundJoin,
    RoundParts,
    RoundProjection,
)
from protocol.tensors import WireDtype, decode_tensor, encode_tensor
from tests.node.siblings import HOP_SECONDS, LENGTH, NEW, OLD, PATIENCE, Stage, gradients


def assert_mean(committed: Sequence[Committed], sums: Sequence[torch.Tensor], counts: Sequence[int]) -> None:
    """All hold the same bits, and these are the mean over the microbatches."""
    first = committed[0]
    for other in committed:
        assert torch.equal(first.mean.view(torch.int32), other.mean.view(torch.int32))
        assert (other.digest, other.microbatches) == (first.digest, sum(counts))
    exact = torch.zeros(len(first.mean), dtype=torch.float64)
    for part, count in zip(sums, counts, strict=True):
        exact += part.double() * (count > 0)
    torch.testing.assert_close(first.mean.double(), exact / max(1, sum(counts)), rtol=1e-5, atol=1e-6)
    assert first.digest == aggregate_digest(encode_tensor(first.mean, WireDtype.FP32)[0], sum(counts))


@pytest.fixture
async def stage(no_tasks_left: None) -> AsyncIterator[Stage]:
    """An empty stage."""
    made = Stage()
    yield made
    await made.close()


# all is well -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 3, LENGTH])
@pytest.mark.parametrize("names", ["a", "ab", "abc", "abcd"])
async def test_all_members_hold_the_same_mean_step_after_step(stage: Stage, names: str, length: int) -> None:
    members = stage.siblings(names, length=length)
    for step in range(3):
        counts = [(step + index) % 4 + 1 for index in range(len(members))]
        sums = gradients(len(members), length)
        committed = await asyncio.gather(
            *(
                member.run(gradient, count, step=step)
                for member, gradient, count in zip(members, sums, counts, strict=True)
            )
        )
        assert_mean(committed, sums, counts)
        assert all(entry.step == step for entry in committed)
    assert all(member.averager.rounds_failed == 0 and not member.stalled for member in members)


@pytest.mark.parametrize("counts", [(0, 3, 2), (0, 0, 1), (0, 0, 0)])
async def test_a_member_without_microbatches_adds_nothing(stage: Stage, counts: tuple[int, ...]) -> None:
    members = stage.siblings("abc")
    sums = gradients(3)
    committed = await asyncio.gather(
        *(member.run(part, count) for member, part, count in zip(members, sums, counts, strict=True))
    )
    assert_mean(committed, sums, counts)


async def test_members_that_come_one_after_another_wait_for_each_other(stage: Stage) -> None:
    members = stage.siblings("abc")
    sums = gradients(3)
    running = []
    for member, part in zip(members, sums, strict=True):
        running.append(stage.spawn(member.run(part)))
        await asyncio.sleep(HOP_SECONDS / 8)
    assert_mean(await asyncio.gather(*running), sums, (1, 1, 1))


async def test_a_member_that_was_not_ready_to_hear_of_the_round_hears_of_it_again(stage: Stage) -> None:
    stage.hop_seconds = 100 * PATIENCE  # nobody waits for the other in vain, and nobody is told so by a timeout
    one, two, three = stage.sibling("a"), stage.sibling("b"), stage.sibling("c", ready=False)
    sums = gradients(3)
    running = [stage.spawn(one.run(sums[0])), stage.spawn(two.run(sums[1]))]
    async with asyncio.timeout(PATIENCE):
        await asyncio.gather(one.blame.unheard.wait(), two.blame.unheard.wait())
    three.get_ready()
    committed = await asyncio.gather(*running, three.run(sums[2]))
    assert_mean(committed, sums, (1, 1, 1))
    assert one.averager.rounds_failed == 0


async def test_a_member_may_be_a_step_ahead_of_the_others(stage: Stage) -> None:
    one, two = stage.siblings("ab")
    sums = gradients(2)
    await asyncio.gather(
        one.run(sums[0]), two.averager.run(Contribution(step=0, gradient=sums[1], microbatches=1, parameters=OLD))
    )
    # b has agreed but not applied yet, so it still stands at step 0.
    ahead = stage.spawn(one.run(sums[0], step=1))
    await asyncio.sleep(0.05)
    assert_mean(await asyncio.gather(ahead, two.run(sums[1], step=1)), sums, (1, 1))


# deaths ----------------------------------------------------------------------------------


async def test_a_member_that_never_comes_is_left_out_and_reported(stage: Stage) -> None:
    one, two = stage.siblings("ab")
    stage.roster.add("dead")  # its lease still runs, and nobody is there
    sums = gradients(2)
    committed = await asyncio.gather(one.run(sums[0]), two.run(sums[1]))
    assert_mean(committed, sums, (1, 1))
    assert one.stalled == ["dead"] or two.stalled == ["dead"]


async def test_a_member_that_answers_but_never_joins_is_left_out(stage: Stage) -> None:
    one, two = stage.siblings("ab")
    stage.puppet("mute")
    sums = gradients(2)
    assert_mean(await asyncio.gather(one.run(sums[0]), two.run(sums[1])), sums, (1, 1))
    assert "mute" in one.stalled + two.stalled


async def test_a_member_that_joins_and_then_does_nothing_is_left_out_of_the_next_attempts(stage: Stage) -> None:
    one, two = stage.siblings("ab")
    stuck = stage.puppet("c")  # and keeps its lease and its connections
    sums = gradients(2)
    running = [stage.spawn(one.run(sums[0])), stage.spawn(two.run(sums[1]))]
    await stuck.hears(RoundJoin)
    await stuck.join("ab", ("a", "b", "c"))
    assert_mean(await asyncio.gather(*running), sums, (1, 1))
    assert "c" in one.stalled + two.stalled
    assert "a" not in two.stalled and "b" not in one.stalled


async def test_a_member_that_tells_everybody_something_else_is_left_out(stage: Stage) -> None:
    one, two = stage.siblings("ab")
    liar = stage.puppet("c")
    sums = gradients(2)
    running = [stage.spawn(one.run(sums[0])), stage.spawn(two.run(sums[1]))]
    await liar.hears(RoundJoin)
    await liar.join("a", ("a", "c"))
    await liar.join("b", ("b", "c"))
    assert_mean(await asyncio.gather(*running), sums, (1, 1))
    assert "c" in one.stalled + two.stalled
    assert "a" not in two.stalled and "b" not in one.stalled


async def test_a_member_that_one_sibling_cannot_see_does_not_hold_the_round_up(stage: Stage) -> None:
    members = stage.siblings("abc")
    members[0].gone.add("c")  # a has lost c, while b has not
    sums = gradients(3)
    committed = await asyncio.gather(*(member.run(part) for member, part in zip(members, sums, strict=True)))
    assert committed[0].digest == committed[1].digest
    assert all(not member.stalled for member in members)


async def test_a_member_whose_lease_ends_during_the_join_is_left_out_at_once(stage: Stage) -> None:
    one, two = stage.siblings("ab")
    mute = stage.puppet("mute")
    sums = gradients(2)
    running = [stage.spawn(one.run(sums[0])), stage.spawn(two.run(sums[1]))]
    await mute.hears(RoundJoin)
    stage.unlist("mute")
    assert_mean(await asyncio.gather(*running), sums, (1, 1))
    assert one.stalled == two.stalled == []


@pytest.mark.parametrize("moment", ["joined", "parts_sent", "committing"])
async def test_a_member_that_dies_costs_an_attempt_and_no_divergence(stage: Stage, moment: str) -> None:
    stage.hop_seconds = 100 * PATIENCE  # whoever waits for what can no longer come does not get there
    one, two = stage.siblings("ab")
    doomed = stage.puppet("c")
    members = ("a", "b", "c")
    sums = gradients(3)
    doomed.slice = (sums[0] + sums[1] + sums[2])[strides(3)[2]] / 3 if moment == "committing" else None
    running = [stage.spawn(one.run(sums[0])), stage.spawn(two.run(sums[1]))]
    await doomed.hears(RoundJoin)
    await doomed.join("ab", members)
    await doomed.hears(Part)
    if moment != "joined":
        parts = doomed.send_parts(members, sums[2])
        if moment == "committing":
            await asyncio.gather(*parts.values())
            await doomed.hears(RoundCommit)
        else:
            await doomed.hears(Part)
    doomed.die()
    committed = await asyncio.gather(*running)
    assert_mean(committed, sums[:2], (1, 1))
    assert one.averager.rounds_failed > 0 and two.averager.rounds_failed > 0


async def test_a_commit_that_reached_only_one_sibling_is_fetched_by_the_other(stage: Stage) -> None:
    one, two = stage.siblings("ab")
    third = stage.puppet("c")
    members = ("a", "b", "c")
    sums = gradients(3)
    third.slice = (sums[0] + sums[1] + sums[2])[strides(3)[2]] / 3
    running = [stage.spawn(one.run(sums[0])), stage.spawn(two.run(sums[1]))]
    await third.hears(RoundJoin)
    await third.join("ab", members)
    await asyncio.gather(*third.send_parts(members, sums[2]).values())
    commit = await third.hears(RoundCommit)
    await third.say("a", Method.ROUND_COMMIT, commit)  # and dies before it tells b
    done = await running[0]
    third.die()
    assert_mean([done, await running[1]], sums, (1, 1, 1))


# coming late -----------------------------------------------------------------------------


async def test_a_late_member_takes_what_the_others_have_committed(stage: Stage) -> None:
    one, two = stage.siblings("ab")
    sums = gradients(3)
    committed = list(await asyncio.gather(one.run(sums[0]), two.run(sums[1])))
    late = stage.sibling("c")
    committed.append(await late.run(sums[2]))
    assert_mean(committed, sums[:2], (1, 1))


async def test_a_member_that_is_some_steps_behind_catches_up_from_the_log(stage: Stage) -> None:
    (one,) = stage.siblings("a")
    sums = gradients(6)
    committed = [await one.run(sums[step], step + 1, step=step) for step in range(5)]
    late = stage.sibling("b")
    for step in range(5):
        fetched = await late.averager.fetch(step, ["a"])
        assert torch.equal(fetched.mean, committed[step].mean)
        assert (fetched.digest, fetched.present) == (committed[step].digest, 5)
        assert fetched.microbatches == step + 1
    with pytest.raises(LocalError, match="not committed yet"):
        await late.averager.fetch(5, ["a"])


async def test_a_fetch_waits_for_a_step_that_is_under_way(stage: Stage) -> None:
    (one,) = stage.siblings("a")
    late = stage.sibling("b", listed=False)
    stage.guests.add("b")
    fetching = stage.spawn(late.averager.fetch(0, ["nobody", "a"]))
    await asyncio.sleep(0.05)
    committed = await one.run(gradients(1)[0])
    assert torch.equal((await fetching).mean, committed.mean)


async def test_what_is_too_old_is_no_longer_there(stage: Stage) -> None:
    (one,) = stage.siblings("a")
    stage.guests.add("b")
    late = stage.sibling("b", listed=False)
    for step in range(averaging.MAX_LOGGED_STEPS + 2):
        await one.run(gradients(1)[0], step=step)
    assert len(one.averager._log) == averaging.MAX_LOGGED_STEPS
    with pytest.raises(LocalError, match="no longer in the log"):
        await late.averager.fetch(0, ["a"])
    await late.averager.fetch(2, ["a"])


async def test_the_log_is_bounded_in_bytes(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(averaging, "MAX_LOGGED_BYTES", 3 * 4 * LENGTH)
    (one,) = stage.siblings("a")
    for step in range(6):
        await one.run(gradients(1)[0], step=step)
    assert list(one.averager._log) == [3, 4, 5]


async def test_a_member_that_is_too_far_behind_does_not_go_on_alone(stage: Stage) -> None:
    one, two = stage.siblings("ab")
    sums = gradients(2)
    for step in range(averaging.MAX_LOGGED_STEPS + 2):
        await asyncio.gather(one.run(sums[0], step=step), two.run(sums[1], step=step))
    late = stage.sibling("c")
    with pytest.raises(OutOfSyncError, match="past step 0"):
        await late.run(sums[0])


# other parameters ------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["abx", "axb", "xab", "bxa"])
@pytest.mark.parametrize("odd", [bytes(32), NEW], ids=["smaller", "larger"])
async def test_a_member_with_other_parameters_is_left_out(stage: Stage, order: str, odd: bytes) -> None:
    members = {name: stage.sibling(name) for name in "abx"}
    sums = dict(zip("abx", gradients(3), strict=True))
    running: dict[str, asyncio.Task[Committed]] = {}
    for name in order:
        running[name] = stage.spawn(members[name].run(sums[name], parameters=odd if name == "x" else OLD))
        await asyncio.sleep(0.02)
    with pytest.raises(OutOfSyncError):
        await running["x"]
    stage.unlist("x")
    assert_mean([await running["a"], await running["b"]], [sums["a"], sums["b"]], (1, 1))


@pytest.mark.parametrize("order", ["ab", "ba"])
async def test_of_two_members_that_differ_exactly_one_stays(stage: Stage, order: str) -> None:
    members = {name: stage.sibling(name) for name in "ab"}
    parameters = {"a": NEW, "b": OLD}
    sums = dict(zip("ab", gradients(2), strict=True))
    running: dict[str, asyncio.Task[Committed]] = {}
    for name in order:
        running[name] = stage.spawn(members[name].run(sums[name], parameters=parameters[name]))
        await asyncio.sleep(0.02)
    with pytest.raises(OutOfSyncError):
        await running["a"]
    stage.unlist("a")
    assert_mean([await running["b"]], [sums["b"]], (1,))


async def test_one_liar_cannot_make_the_honest_majority_doubt_itself(stage: Stage) -> None:
    one, two = stage.siblings("ab")
    liar = stage.puppet("c")
    sums = gradients(2)
    await liar.join("ab", ("a", "b", "c"), parameters=bytes(32))  # before anybody else has spoken
    running = [stage.spawn(one.run(sums[0]))]
    await asyncio.sleep(0.05)
    running.append(stage.spawn(two.run(sums[1])))
    assert_mean(await asyncio.gather(*running), sums, (1, 1))


# lies ------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
async def test_a_part_that_is_not_finite_is_refused_and_its_sender_reported(stage: Stage, bad: float) -> None:
    one, two = stage.siblings("ab")
    liar = stage.puppet("c")
    members = ("a", "b", "c")
    sums = gradients(2)
    running = [stage.spawn(one.run(sums[0])), stage.spawn(two.run(sums[1]))]
    await liar.hears(RoundJoin)
    await liar.join("ab", members)
    await liar.hears(Part)
    parts = liar.send_parts(members, torch.full((LENGTH,), bad))
    for task in parts.values():
        with pytest.raises(RefusedError) as caught:
            await task
        assert caught.value.kind == "non_finite"
    assert ("c", "non_finite") in one.blame.kinds and ("c", "non_finite") in two.blame.kinds
    stage.unlist("c")  # which is what the guard does with such a report
    liar.die()
    assert_mean(await asyncio.gather(*running), sums, (1, 1))


@pytest.mark.parametrize("slice_", [torch.full((50,), float("nan")), torch.zeros(7)], ids=["nan", "short"])
async def test_a_reduced_slice_that_is_not_finite_or_too_short_is_never_committed(
    stage: Stage, slice_: torch.Tensor
) -> None:
    (one,) = stage.siblings("a")
    liar = stage.puppet("b")
    (gradient,) = gradients(1)
    liar.slice = slice_
    running = stage.spawn(one.run(gradient))
    await liar.hears(RoundJoin)
    await liar.join("a", ("a", "b"))
    part = liar.send_parts(("a", "b"), gradient)["a"]
    await part
    await liar.hears(RoundJoin, attempt=1)
    assert ("b", "non_finite") in one.blame.kinds or ("b", "size") in one.blame.kinds
    stage.unlist("b")
    assert_mean([await running], [gradient], (1,))


async def test_one_sibling_cannot_talk_the_others_into_an_aggregate_of_its_own(stage: Stage) -> None:
    one, two = stage.siblings("ab")
    liar = stage.puppet("c")
    poison = torch.full((LENGTH,), 1e6)
    digest = aggregate_digest(encode_tensor(poison, WireDtype.FP32)[0], 9)
    liar.aggregate = AggregateAnswer(digest=digest, microbatches=9, present=1), poison
    liar.on_join = lambda peer, message: RoundAnswer(committed=True, digest=digest)
    sums = gradients(2)
    assert_mean(await asyncio.gather(one.run(sums[0]), two.run(sums[1])), sums, (1, 1))


async def test_a_sibling_that_boasts_of_a_commit_and_cannot_show_it_stops_nobody(stage: Stage) -> None:
    (one,) = stage.siblings("a")
    liar = stage.puppet("b")
    liar.on_join = lambda peer, message: RoundAnswer(committed=True, digest=bytes(32))
    (gradient,) = gradients(1)
    assert_mean([await one.run(gradient)], [gradient], (1,))
    assert one.stalled == ["b"]


async def test_an_aggregate_that_is_not_what_was_asked_for_is_not_taken(stage: Stage) -> None:
    (one,) = stage.siblings("a")
    liar, honest = stage.puppet("b"), stage.sibling("c", listed=False)
    stage.guests.add("a")
    mean = torch.ones(LENGTH)
    digest = aggregate_digest(encode_tensor(mean, WireDtype.FP32)[0], 2)
    honest.averager.remember(Committed(step=0, mean=mean, digest=digest, microbatches=2))
    stage.roster.add("c")
    for answer, body in (
        (AggregateAnswer(digest=digest, microbatches=2, present=1), torch.zeros(LENGTH)),
        (AggregateAnswer(digest=digest, microbatches=3, present=1), mean),
        (AggregateAnswer(digest=bytes(32), microbatches=2, present=1), mean),
        (AggregateAnswer(digest=digest, microbatches=2, present=1), mean[:-1]),
    ):
        liar.aggregate = answer, body
        with pytest.raises(LocalError, match="could not be fetched"):
            await one.averager.fetch(0, ["b"], want=digest)
        fetched = await one.averager.fetch(0, ["b", "c"], want=digest)
        assert torch.equal(fetched.mean, mean)
    with pytest.raises(LocalError, match="nobody to ask"):
        await one.averager.fetch(0, [])


async def test_outsiders_have_no_vote_in_a_commit(stage: Stage) -> None:
    one, two = stage.siblings("ab")
    outsiders = [stage.puppet(name, listed=False) for name in "xyz"]
    for outsider in outsiders:
        for peer in "ab":
            await outsider.say(peer, Method.ROUND_COMMIT, RoundCommit(step=0, attempt=0, digest=bytes(32)))
    sums = gradients(2)
    assert_mean(await asyncio.gather(one.run(sums[0]), two.run(sums[1])), sums, (1, 1))
    assert one.averager.rounds_failed == two.averager.rounds_failed == 0


async def test_opening_many_rounds_keeps_nobody_from_averaging(stage: Stage) -> None:
    one, two = stage.siblings("ab")
    flood = stage.puppet("x", listed=False)
    refused = 0
    for attempt in range(MAX_ATTEMPTS * 2):
        for members in (("a", "x"), ("a", "b", "x"), ("a", "x", "y")):
            length = slice_length(LENGTH, strides(len(members))[0])
            stage.spawn(flood.send_part("a", members, torch.zeros(length), attempt, step=1))
    await asyncio.sleep(0.1)
    for task in list(stage.tasks):
        if task.done() and isinstance(error := task.exception(), RefusedError):
            refused += error.kind == "busy"
    assert refused > 0
    sums = gradients(2)
    assert_mean(await asyncio.gather(one.run(sums[0]), two.run(sums[1])), sums, (1, 1))
    assert one.averager.rounds_failed == two.averager.rounds_failed == 0
    assert len(one.averager._butterfly._gatherings) <= 2 * MAX_ATTEMPTS


@pytest.mark.parametrize("attempt", [2 * MAX_ATTEMPTS, 1024])
async def test_an_absurd_attempt_drags_nobody_along(stage: Stage, attempt: int) -> None:
    one, two = stage.siblings("ab")
    liar = stage.puppet("c")
    sums = gradients(2)
    try:
        await liar.join("ab", ("a", "b", "c"), attempt=attempt)
    except RefusedError as error:
        assert error.kind == "attempt"
    assert_mean(await asyncio.gather(one.run(sums[0]), two.run(sums[1])), sums, (1, 1))


# requests that are out of place ----------------------------------------------------------

JOIN: dict[str, Any] = {"attempt": 0, "members": ("a", "x"), "microbatches": 1, "parameters": OLD}


@pytest.mark.parametrize(("step", "kind"), [(2, "too_old"), (5, "wrong_step"), (2**40, "wrong_step")])
async def test_rounds_of_other_steps_are_refused(stage: Stage, step: int, kind: str) -> None:
    (one,) = stage.siblings("a")
    asking = stage.puppet("x", listed=False)
    one.averager.stand_at(3)
    about: dict[str, Any] = {"step": step, "attempt": 0, "members": ("a", "x")}
    for method, message in (
        (Method.ROUND_JOIN, RoundJoin(step=step, **JOIN)),
        (Method.ROUND_COMMIT, RoundCommit(step=step, attempt=0, digest=bytes(32))),
        (Method.ROUND_PROJECTION, RoundProjection(key=bytes(32), **about)),
        (Method.ROUND_PARTS, RoundParts(**about)),
    ):
        with pytest.raises(RefusedError) as caught:
            await asking.say("a", method, message)
        assert caught.value.kind == kind
    with pytest.raises(RefusedError) as caught:
        await asking.send_part("a", ("a", "x"), torch.zeros(51), step=step)
    assert caught.value.kind == kind
    with pytest.raises(RefusedError) as caught:
        await asking.say("a", Method.AGGREGATE, Aggregate(step=step))
    assert caught.value.kind == ("too_old" if step < 3 else "not_yet")
    assert not one.averager._announced and not one.averager._commits and not one.averager._butterfly._gatherings


async def test_the_present_step_and_the_next_may_be_prepared(stage: Stage) -> None:
    (one,) = stage.siblings("a")
    asking = stage.puppet("x", listed=False)
    one.averager.stand_at(3)
    for step in (3, 4):
        response = await asking.say("a", Method.ROUND_JOIN, RoundJoin(step=step, **JOIN))
        assert decode(RoundAnswer, response.head) == RoundAnswer(committed=False)


async def test_parts_out_of_place_are_refused(stage: Stage) -> None:
    stage.siblings("a")
    asking = stage.puppet("x", listed=False)

    async def refusal(members: tuple[str, ...], size: int) -> str:
        with pytest.raises((RefusedError, MessageError)) as caught:
            await asking.send_part("a", members, torch.zeros(size))
        return caught.value.kind

    assert await refusal(("a", "b"), 51) == "round"  # not of the sender
    assert await refusal(("b", "x"), 51) == "round"  # not of the receiver
    assert await refusal((), 51) == "round"
    assert await refusal(("a", "x"), 50) == "size"
    unsigned = Part(step=0, attempt=0, members=("a", "x"), microbatches=1, signature=bytes(64))
    with pytest.raises(RefusedError, match="not signed"):
        await asking.say("a", Method.PART, unsigned, torch.zeros(51))
    first = stage.spawn(refusal(("a", "x"), 51))
    await asyncio.sleep(0.01)
    assert await refusal(("a", "x"), 51) == "repeated"
    assert await first == "incomplete"  # nobody else came


async def test_a_peer_without_a_claim_on_the_stage_is_not_admitted(stage: Stage) -> None:
    (one,) = stage.siblings("a")
    stranger = stage.puppet("x", listed=False)
    stage.guests.clear()
    for method, message in (
        (Method.ROUND_JOIN, RoundJoin(step=0, **JOIN)),
        (Method.ROUND_COMMIT, RoundCommit(step=0, attempt=0, digest=bytes(32))),
        (Method.PART, Part(step=0, attempt=0, members=("a", "x"), microbatches=1, signature=bytes(64))),
        (Method.ROUND_PROJECTION, RoundProjection(step=0, attempt=0, members=("a", "x"), key=bytes(32))),
        (Method.ROUND_PARTS, RoundParts(step=0, attempt=0, members=("a", "x"))),
        (Method.AGGREGATE, Aggregate(step=0)),
    ):
        with pytest.raises(RefusedError) as caught:
            await stranger.say("a", method, message)
        assert caught.value.kind == "not_admitted"
    assert not one.averager._announced


async def test_without_any_agreement_the_node_gives_up_and_says_so(stage: Stage) -> None:
    (one,) = stage.siblings("a")
    liar = stage.puppet("b")
    (gradient,) = gradients(1)
    liar.slice = gradient[strides(2)[1]]
    running = stage.spawn(one.run(gradient))

    async def disagree() -> None:
        for attempt in range(MAX_ATTEMPTS):
            await liar.hears(RoundJoin, attempt=attempt)
            await liar.join("a", ("a", "b"), attempt=attempt)
            await liar.send_parts(("a", "b"), gradient, attempt)["a"]
            await liar.hears(RoundCommit)
            await liar.say("a", Method.ROUND_COMMIT, RoundCommit(step=0, attempt=attempt, digest=bytes(32)))

    stage.spawn(disagree())
    with pytest.raises(LocalError, match="could not agree"):
        await running
    assert one.averager.rounds_failed == MAX_ATTEMPTS


async def test_an_answer_carries_the_reduced_slice(stage: Stage) -> None:
    (one,) = stage.siblings("a")
    other = stage.puppet("b")
    sums = gradients(2)
    mine, others = strides(2)
    length = slice_length(LENGTH, mine)
    other.slice = ((sums[0] + sums[1]) / 2)[others]
    running = stage.spawn(one.run(sums[0]))
    await other.hears(RoundJoin)
    await other.join("a", ("a", "b"))
    response = await other.send_parts(("a", "b"), sums[1])["a"]
    commit = await other.hears(RoundCommit)
    await other.say("a", Method.ROUND_COMMIT, commit)
    committed = await running
    shape = (length,)
    got = decode_tensor(response.data, dtype="fp32", shape=shape, expected_dtype=WireDtype.FP32, expected_shape=shape)
    assert torch.equal(got, committed.mean[mine])
    assert_mean([committed], sums, (1, 1))
