"""Robust averaging over in-memory transports: a few liars among the siblings change little, and nobody diverges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.averaging import Committed
from node.rounds import plausible_gram, strides, whole_gram
from protocol.errors import MessageError, RefusedError
from protocol.messages import Gram, Method, RoundCommit, RoundJoin
from tests.node.siblings import LENGTH, PATIENCE, Sibling, Stage
from verifier.aggregation import capped_weights, coefficients, combine, partial_gram


@pytest.fixture
async def stage(no_tasks_left: None) -> AsyncIterator[Stage]:
    """An empty stage whose members average robustly."""
    made = Stage(robust=True)
    yield made
    await made.close()


def noisy(count: int, *, noise: float = 0.5, length: int = LENGTH) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """A gradient, and as many estimates of it."""
    generator = torch.Generator().manual_seed(7)
    signal = torch.randn(length, generator=generator)
    return signal, [signal + noise * torch.randn(length, generator=generator) for _ in range(count)]


async def average(
    members: Sequence[Sibling], means: Sequence[torch.Tensor], counts: Sequence[int], *, step: int = 0
) -> torch.Tensor:
    """Everybody's gradient sums in, the aggregate that all agree on out."""
    committed: list[Committed] = await asyncio.gather(
        *(
            member.run(mean * count, count, step=step)
            for member, mean, count in zip(members, means, counts, strict=True)
        )
    )
    assert len({entry.digest for entry in committed}) == 1
    assert all(torch.equal(entry.mean, committed[0].mean) for entry in committed)
    return committed[0].mean


@pytest.mark.parametrize("names", ["abcd", "abcdefgh"])
async def test_the_aggregate_of_slices_is_that_of_whole_vectors(stage: Stage, names: str) -> None:
    members = stage.siblings(names)
    _, means = noisy(len(names))
    counts = [1 + index % 3 for index in range(len(names))]
    aggregate = await average(members, means, counts)
    whole = torch.stack(means)
    gram = whole_gram([partial_gram(whole[:, cut].contiguous()) for cut in strides(len(names))])
    expected = combine(whole, coefficients(gram, capped_weights(counts)))
    torch.testing.assert_close(aggregate, expected, rtol=1e-4, atol=1e-5)
    assert all(member.averager.rounds_failed == 0 and not member.stalled for member in members)


async def test_step_after_step_without_leftovers(stage: Stage) -> None:
    members = stage.siblings("abcd")
    for step in range(3):
        await average(members, noisy(4)[1], [1] * 4, step=step)
    assert all(not member.averager._butterfly._gatherings for member in members)


@pytest.mark.parametrize("scale", [-1.0, 1000.0, -1000.0, 0.0])
@pytest.mark.parametrize("names", ["abc", "abcdefgh"])
async def test_a_minority_of_liars_changes_little(stage: Stage, names: str, scale: float) -> None:
    members = stage.siblings(names)
    signal, means = noisy(len(names))
    liars = 1 if len(names) == 3 else 3
    for index in range(liars):
        means[index] = scale * means[index]
    aggregate = await average(members, means, [2] * len(names))
    retained = float(aggregate @ signal / (signal @ signal))
    assert 0.6 < retained < 1.4


@pytest.mark.parametrize("counts", [(0, 1, 1, 1), (0, 0, 2, 3), (0, 0, 0, 0), (0, 1, 2, 1, 1)])
async def test_a_member_that_trained_nothing_has_no_say(stage: Stage, counts: tuple[int, ...]) -> None:
    members = stage.siblings("abcde"[: len(counts)])
    signal, means = noisy(len(counts), noise=0.1)
    means = [mean if count else torch.zeros(LENGTH) for mean, count in zip(means, counts, strict=True)]
    aggregate = await average(members, means, counts)
    expected = signal if any(counts) else torch.zeros(LENGTH)
    torch.testing.assert_close(aggregate, expected, rtol=0, atol=0.35)


async def test_boasting_of_many_microbatches_buys_little(stage: Stage) -> None:
    members = stage.siblings("abcdefgh")
    signal, means = noisy(8)
    means[0] = -means[0]
    aggregate = await average(members, means, [4000, *[1] * 7])
    assert float(aggregate @ signal / (signal @ signal)) > 0.6


@pytest.mark.parametrize("lie", ["nothing", "nan", "lopsided", "huge", "opposed"])
async def test_a_lie_about_inner_products_changes_little(stage: Stage, lie: str) -> None:
    names = ("a", "b", "c", "d")
    honest = stage.siblings("abc")
    liar = stage.puppet("d")
    signal, means = noisy(4, noise=0.1)
    running = [stage.spawn(member.run(mean)) for member, mean in zip(honest, means, strict=False)]
    cut = strides(4)[3]
    liar.slice = signal[cut]
    await liar.hears(RoundJoin)
    await liar.join("abc", names)
    parts = liar.send_parts(names, means[3])
    gram = partial_gram(torch.stack(means)[:, cut])
    if lie == "nan":
        gram[0, 1] = gram[1, 0] = float("nan")
    elif lie == "lopsided":
        gram[0, 1] += 1.0
    elif lie == "huge":
        gram *= 1e12
    elif lie == "opposed":  # as if the others had nothing in common, and the liar all with each
        gram = -1e6 * torch.ones(4, 4, dtype=torch.float64)
        gram[3], gram[:, 3] = 1e6, 1e6
        gram.fill_diagonal_(1e6)
    if lie != "nothing":
        message = Gram(step=0, attempt=0, members=names)
        body = (memoryview(gram.view(-1).numpy()).cast("B"),)
        for peer in "abc":
            await liar.transport.call(peer, Method.GRAM, message, body, timeout=5.0)
    commit = await liar.hears(RoundCommit)
    for peer in "abc":
        await liar.say(peer, Method.ROUND_COMMIT, commit)
    await asyncio.gather(*parts.values())
    committed = await asyncio.gather(*running)
    assert len({entry.digest for entry in committed}) == 1
    assert all(member.averager.rounds_failed == 0 for member in honest)  # with the liar in it
    torch.testing.assert_close(committed[0].mean, signal, rtol=0, atol=0.35)
    blamed = [member for member in honest if ("d", "gram") in member.blame.kinds]
    assert len(blamed) == (3 if lie in ("nan", "lopsided") else 0)


async def test_without_the_word_of_most_owners_nothing_is_reduced(stage: Stage) -> None:
    one = stage.sibling("a")
    silent = [stage.puppet(name) for name in "bcd"]
    _, means = noisy(4)
    running = stage.spawn(one.run(means[0]))
    for puppet in silent:
        await puppet.hears(RoundJoin)
        await puppet.join("a", ("a", "b", "c", "d"))
    answers = [
        puppet.send_parts(("a", "b", "c", "d"), mean)["a"] for puppet, mean in zip(silent, means[1:], strict=True)
    ]
    for answer in answers:
        with pytest.raises(RefusedError) as caught:
            await answer
        assert caught.value.kind == "incomplete"
    running.cancel()


async def test_the_word_of_a_member_that_dies_is_not_waited_for(stage: Stage) -> None:
    stage.hop_seconds = 100 * PATIENCE
    one, two = stage.siblings("ab")
    doomed = stage.puppet("c")
    members = ("a", "b", "c")
    signal, means = noisy(3)
    doomed.slice = signal[strides(3)[2]]
    running = [stage.spawn(one.run(means[0])), stage.spawn(two.run(means[1]))]
    await doomed.hears(RoundJoin)
    await doomed.join("ab", members)
    doomed.send_parts(members, means[2])
    await doomed.hears(Gram)  # both siblings have all parts, and now wait for what c says of its slice
    doomed.die()
    first, second = await asyncio.gather(*running)
    assert torch.equal(first.mean, second.mean)
    assert first.microbatches == 2


async def test_inner_products_out_of_place_are_refused(stage: Stage) -> None:
    stage.siblings("a")
    asking = stage.puppet("x", listed=False)

    async def refusal(members: tuple[str, ...], size: int) -> str:
        message = Gram(step=0, attempt=0, members=members)
        with pytest.raises((RefusedError, MessageError)) as caught:
            await asking.transport.call("a", Method.GRAM, message, (bytes(8 * size * size),), timeout=5.0)
        return caught.value.kind

    assert await refusal(("a", "b"), 2) == "round"  # not of the sender
    assert await refusal(("b", "x"), 2) == "round"  # not of the receiver
    assert await refusal(("a", "x"), 3) == "size"
    message = Gram(step=0, attempt=0, members=("a", "x"))
    await asking.transport.call("a", Method.GRAM, message, (bytes(32),), timeout=5.0)
    assert await refusal(("a", "x"), 2) == "repeated"


VECTORS = st.lists(st.lists(st.floats(-1e3, 1e3, width=32), min_size=5, max_size=5), min_size=1, max_size=6)


@given(VECTORS)
def test_true_inner_products_are_plausible(vectors: list[list[float]]) -> None:
    gram = partial_gram(torch.tensor(vectors))
    assert plausible_gram(gram)
    for wrong in (float("nan"), float("inf"), -1.0):
        changed = gram.clone()
        changed[0, 0] = wrong
        assert not plausible_gram(changed)


@given(members=st.integers(3, 9), seed=st.integers(0, 99), data=st.data())
def test_a_minority_of_owners_moves_no_inner_product_beyond_the_honest_ones(
    members: int, seed: int, data: st.DataObject
) -> None:
    vectors = torch.randn(members, 1000, generator=torch.Generator().manual_seed(seed))
    grams = [partial_gram(vectors[:, cut].contiguous()) for cut in strides(members)]
    liars = data.draw(st.sets(st.integers(0, members - 1), max_size=(members - 1) // 2))
    honest = torch.stack([gram for index, gram in enumerate(grams) if index not in liars])
    for index in liars:
        grams[index] = torch.full_like(grams[index], data.draw(st.sampled_from([-1e30, 0.0, 1e30])))
    found = whole_gram(grams) / members
    rounding = 1e-9 * honest.abs().amax()
    assert bool((honest.amin(dim=0) - rounding <= found).all())
    assert bool((found <= honest.amax(dim=0) + rounding).all())
