"""Robust averaging over in-memory transports: a few liars among the siblings change little, and nobody diverges."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import pytest
import torch

from node.averaging import Committed
from node.rounds import strides
from tests.node.siblings import LENGTH, Sibling, Stage
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
async def test_each_slice_is_what_most_agree_on(stage: Stage, names: str) -> None:
    members = stage.siblings(names)
    _, means = noisy(len(names))
    counts = [1 + index % 3 for index in range(len(names))]
    aggregate = await average(members, means, counts)
    whole = torch.stack(means)
    expected = torch.empty(LENGTH)
    for cut in strides(len(names)):
        parts = whole[:, cut].contiguous()
        expected[cut] = combine(parts, coefficients(partial_gram(parts), capped_weights(counts)))
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


@pytest.mark.parametrize("scale", [-1.0, 1000.0, -1000.0, 0.0, -3.0])
@pytest.mark.parametrize("poisoned", [1, 3])
async def test_who_lies_in_some_slices_only_gains_nothing(stage: Stage, poisoned: int, scale: float) -> None:
    """Honest in most slices, and in league in the others, where their owners may be as well."""
    members = stage.siblings("abcdefgh")
    signal, means = noisy(8)
    entries = torch.zeros(LENGTH, dtype=torch.bool)
    for cut in strides(8)[:poisoned]:
        entries[cut] = True
    for index in range(3):
        means[index] = torch.where(entries, scale * means[index], means[index])
    aggregate = await average(members, means, [2] * 8)
    for some in (entries, ~entries):
        retained = float(aggregate[some] @ signal[some] / (signal[some] @ signal[some]))
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
