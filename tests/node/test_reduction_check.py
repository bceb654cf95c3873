"""Owners of slices that answer something false, and members that tell of other parts than they sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence

import pytest
import torch

from node.averaging import Committed
from node.rounds import strides
from protocol.errors import RefusedError
from protocol.fields import decode, encode
from protocol.messages import Method, Part, PartAnswer, RoundParts, RoundPartsAnswer, RoundProjection
from protocol.tensors import WireDtype, encode_tensor
from protocol.transports.base import Request, Response, Route
from tests.node.siblings import HOP_SECONDS, LENGTH, Sibling, Stage
from verifier.reduction import projections
from verifier.verdicts import Reason


@pytest.fixture
async def stage(no_tasks_left: None) -> AsyncIterator[Stage]:
    """An empty stage whose members average robustly."""
    made = Stage(robust=True)
    yield made
    await made.close()


def noisy(count: int, noise: float = 0.5) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A gradient, and as many estimates of it."""
    generator = torch.Generator().manual_seed(7)
    signal = torch.randn(LENGTH, generator=generator)
    return signal, [signal + noise * torch.randn(LENGTH, generator=generator) for _ in range(count)]


async def average(members: Sequence[Sibling], sums: Sequence[torch.Tensor], *, step: int = 0) -> list[Committed]:
    """What each member commits; those that are left out of the stage's round are not waited for."""
    return list(
        await asyncio.gather(*(member.run(part, step=step) for member, part in zip(members, sums, strict=True)))
    )


def lie(member: Sibling, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Answer with something else for the slice that it owns."""
    member.averager._butterfly._falsify = lambda mean, step: change(mean)


def assert_agreed(committed: Sequence[Committed], signal: torch.Tensor) -> None:
    assert len({each.digest for each in committed}) == 1
    assert 0.6 < float(committed[0].mean @ signal / (signal @ signal)) < 1.4


FALSE = {
    "turned round": lambda mean: -mean,
    "a thousand times": lambda mean: 1000 * mean,
    "nothing": torch.zeros_like,
    "slightly more": lambda mean: 1.01 * mean,
    "one entry": lambda mean: mean + 3.0 * (torch.arange(len(mean)) == 2),
}


@pytest.mark.parametrize("names", ["abc", "abcdefgh"])
@pytest.mark.parametrize("change", FALSE.values(), ids=FALSE)
async def test_an_owner_that_answers_something_false_is_left_out_before_anything_is_committed(
    stage: Stage, names: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    *honest, liar = stage.siblings(names)
    signal, sums = noisy(len(names))
    lie(liar, change)
    stage.spawn(liar.run(sums[-1]))
    committed = await average(honest, sums[:-1])
    assert_agreed(committed, signal)
    assert all(each.microbatches == len(honest) and not each.fetched for each in committed)
    for member in honest:
        assert member.false == [(liar.name, Reason.REDUCTION)]
        assert member.examined == [("sum", "false")]
        assert member.averager.rounds_failed == 1
    # In the next step it is left out from the beginning.
    committed = await average(honest, sums[:-1], step=1)
    assert_agreed(committed, signal)
    assert all(member.averager.rounds_failed == 1 and not member.stalled for member in honest)


async def test_of_two_siblings_each_goes_on_alone(stage: Stage) -> None:
    honest, liar = stage.siblings("ab")
    _, sums = noisy(2)
    lie(liar, torch.neg)
    stage.spawn(liar.run(sums[1]))
    committed = await honest.run(sums[0])
    assert torch.equal(committed.mean, sums[0]) and honest.false == [("b", Reason.REDUCTION)]


@pytest.mark.parametrize("names", ["abc", "abcdef"])
async def test_who_alone_is_lied_to_goes_along_with_the_others(stage: Stage, names: str) -> None:
    """Else a liar could split a member off its stage."""
    *honest, liar = stage.siblings(names)
    victim = honest[0]
    signal, sums = noisy(len(names))
    serve = liar.averager._butterfly._serve_part

    async def lie_to_one(request: Request) -> Response:
        response = await serve(request)
        if request.peer != victim.name:
            return response
        mean = torch.frombuffer(bytearray(response.body[0]), dtype=torch.float32)
        return Response(head=response.head, body=encode_tensor(-mean, WireDtype.FP32))

    liar.transport.serve(Method.PART, Route(handler=lie_to_one, body_limit=1 << 20))
    for step in range(2):
        committed = await average([*honest, liar], sums, step=step)
        assert_agreed(committed, signal)
    assert {peer for peer, _ in victim.false} == {liar.name}
    assert all(not member.false for member in honest[1:])
    assert all(not member.stalled for member in honest)


async def test_coefficients_of_the_owners_choice_are_found_out(stage: Stage) -> None:
    """The liar counts itself alone in the slice that it owns, and says so."""
    *honest, liar = stage.siblings("abcde")
    signal, sums = noisy(5, noise=0.1)
    sums[-1] = -sums[-1]
    own = (-sums[-1])[strides(5)[4]].neg().contiguous()
    serve = liar.averager._butterfly._serve_part

    async def count_itself(request: Request) -> Response:
        await serve(request)
        return Response(
            head=encode(PartAnswer(coefficients=(0.0, 0.0, 0.0, 0.0, 1.0))), body=encode_tensor(own, WireDtype.FP32)
        )

    liar.transport.serve(Method.PART, Route(handler=count_itself, body_limit=1 << 20))
    stage.spawn(liar.run(sums[-1]))
    assert_agreed(await average(honest, sums[:-1]), signal)
    assert all(member.false == [("e", Reason.REDUCTION)] for member in honest)
    assert all(member.examined == [("rule", "false")] for member in honest)


@pytest.mark.parametrize("shown", ["nothing", "other parts"])
async def test_an_owner_that_does_not_show_the_parts_is_left_out_of_the_step(stage: Stage, shown: str) -> None:
    *honest, liar = stage.siblings("abcd")
    signal, sums = noisy(4)
    lie(liar, torch.neg)
    serve = liar.averager._butterfly._serve_parts

    async def show(request: Request) -> Response:
        if shown == "nothing":
            raise RefusedError("no", kind="busy")
        response = await serve(request)
        turned = [-torch.frombuffer(bytearray(buffer), dtype=torch.float32) for buffer in response.body]
        return Response(
            head=response.head, body=[buffer for part in turned for buffer in encode_tensor(part, WireDtype.FP32)]
        )

    liar.transport.serve(Method.ROUND_PARTS, Route(handler=show))
    stage.spawn(liar.run(sums[-1]))
    assert_agreed(await average(honest, sums[:-1]), signal)
    for member in honest:
        assert member.stalled == ["d"] and not member.false
        assert member.examined == [("sum", "not_shown")]


async def test_a_member_that_tells_of_another_part_than_it_sent_harms_nobody_but_itself(stage: Stage) -> None:
    *honest, liar = stage.siblings("abcd")
    signal, sums = noisy(4)
    serve = liar.averager._check._serve_projection

    async def tell(request: Request) -> Response:
        await serve(request)
        message = decode(RoundProjection, request.head)
        false = projections(5 * sums[-1], len(message.members), key=message.key)
        return Response(body=encode_tensor(false, WireDtype.FP32))

    liar.transport.serve(Method.ROUND_PROJECTION, Route(handler=tell))
    assert_agreed(await average([*honest, liar], sums), signal)
    for member in honest:
        assert set(member.false) == {("d", Reason.EQUIVOCATION)}
        assert set(member.examined) == {("sum", "right")}  # two other owners were doubted, and right
        assert member.averager.rounds_failed == 0


async def test_a_member_that_tells_each_of_another_number_of_microbatches_is_left_out(stage: Stage) -> None:
    *honest, liar = stage.siblings("abcd")
    signal, sums = noisy(4)
    signed = liar.averager._butterfly._signed

    async def boast(part: torch.Tensor, key: object, owner: str, microbatches: int) -> object:
        return await signed(part, key, owner, 3 if owner == "a" else microbatches)  # type: ignore[arg-type]

    liar.averager._butterfly._signed = boast  # type: ignore[method-assign, assignment]
    stage.spawn(liar.run(sums[-1]))
    assert_agreed(await average(honest, sums[:-1]), signal)
    # The owner of the slice where it counts otherwise is right, and not blamed.
    assert all({peer for peer, _ in member.false} <= {"d"} for member in honest)
    assert any(member.false == [("d", Reason.EQUIVOCATION)] for member in honest)


async def test_a_member_that_tells_nothing_is_left_out_of_the_step(stage: Stage) -> None:
    *honest, mute = stage.siblings("abcd")
    signal, sums = noisy(4)

    async def never(request: Request) -> Response:
        await asyncio.Event().wait()
        raise AssertionError("never")

    mute.transport.serve(Method.ROUND_PROJECTION, Route(handler=never))
    stage.spawn(mute.run(sums[-1]))
    assert_agreed(await average(honest, sums[:-1]), signal)
    assert all(member.stalled == ["d"] and not member.false for member in honest)


async def test_honest_parts_are_looked_at_now_and_then(stage: Stage) -> None:
    stage.chance = 1.0
    members = stage.siblings("abcd")
    signal, sums = noisy(4)
    assert_agreed(await average(members, sums), signal)
    assert all(member.examined == [("chance", "right")] for member in members)
    assert all(not member.false and not member.averager.rounds_failed for member in members)


@pytest.mark.parametrize(("mode", "seen"), [("observe", [("d", Reason.REDUCTION)]), ("off", [])])
async def test_without_enforcement_nothing_changes(mode: str, seen: list[tuple[str, Reason]]) -> None:
    stage = Stage(robust=True, mode=mode)
    *honest, liar = members = stage.siblings("abcd")
    _, sums = noisy(4)
    lie(liar, torch.neg)
    try:
        committed = await average(members, sums)
    finally:
        await stage.close()
    assert all(member.false == seen and not member.averager.rounds_failed for member in honest)
    assert len({each.digest for each in committed[:-1]}) == 1 and committed[0].microbatches == 4


async def test_projections_are_told_once(stage: Stage) -> None:
    stage.hop_seconds = 20 * HOP_SECONDS
    one, two = stage.siblings("ab")
    asking = stage.puppet("x", listed=False)
    _, sums = noisy(2)
    about = RoundProjection(step=0, attempt=0, members=("a", "x"), key=bytes(32))
    with pytest.raises(RefusedError, match="no gradient of that step"):
        await asking.say("a", Method.ROUND_PROJECTION, about)
    stage.spawn(one.run(sums[0]))
    await asyncio.sleep(0)  # until it has begun; b keeps it waiting
    response = await asking.say("a", Method.ROUND_PROJECTION, about)
    assert bytes(response.data) == bytes(encode_tensor(projections(sums[0], 2, key=bytes(32)), WireDtype.FP32)[0])
    with pytest.raises(RefusedError, match="twice"):
        await asking.say("a", Method.ROUND_PROJECTION, about)
    with pytest.raises(RefusedError, match="without asker"):
        others = RoundProjection(step=0, attempt=0, members=("a", "b"), key=bytes(32))
        await asking.say("a", Method.ROUND_PROJECTION, others)
    await two.run(sums[1])


async def test_parts_are_shown_once_and_all_of_them(stage: Stage) -> None:
    one, two = stage.siblings("ab")
    asking, silent = stage.puppet("x"), stage.puppet("y")
    _, sums = noisy(4)
    members = ("a", "b", "x", "y")
    shown = RoundParts(step=0, attempt=0, members=members)
    with pytest.raises(RefusedError, match="not here"):
        await asking.say("a", Method.ROUND_PARTS, shown)
    running = [stage.spawn(one.run(sums[0])), stage.spawn(two.run(sums[1]))]
    for puppet in (asking, silent):
        await puppet.join("ab", members)
    sent = asking.send_parts(members, sums[2])
    await asking.hears(Part)
    with pytest.raises(RefusedError, match="not all of them"):
        await asking.say("a", Method.ROUND_PARTS, shown)
    silent.send_parts(members, sums[3])
    await sent["a"]
    answer = decode(RoundPartsAnswer, (await asking.say("a", Method.ROUND_PARTS, shown)).head)
    assert answer.microbatches == (1, 1, 1, 1) and len(set(answer.signatures)) == 4
    with pytest.raises(RefusedError, match="twice"):
        await asking.say("a", Method.ROUND_PARTS, shown)
    stage.unlist("x")
    stage.unlist("y")
    await asyncio.gather(*running)
