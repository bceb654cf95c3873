"""The reduction of a slice has fixed bits, and projections tell a false one from a right one."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier.aggregation import agreement, capped_weights
from verifier.reduction import (
    RULE_TOLERANCE,
    WIDTH,
    Doubt,
    Reduced,
    doubt,
    fits,
    projection_width,
    projections,
    reduce_parts,
)

KEY = bytes(range(32))
GOLDEN = [[-13.0, 4.0], [-4.0, 4.0]]


def estimates(count: int, length: int, *, noise: float = 1.0, seed: int = 0) -> list[torch.Tensor]:
    """Estimates of the same gradient."""
    generator = torch.Generator().manual_seed(seed)
    signal = torch.randn(length, generator=generator)
    return [signal + noise * torch.randn(length, generator=generator) for _ in range(count)]


def look(
    parts: list[torch.Tensor],
    counts: list[int],
    answered: Reduced,
    *,
    robust: bool = True,
    told: list[torch.Tensor] | None = None,
) -> Doubt | None:
    """What others see of a slice; ``told``: what its members say that their parts are."""
    width = projection_width(len(parts[0]), 1)
    members = torch.stack([projections(part, 1, key=KEY)[0] for part in told or parts])
    answer = projections(answered.mean, 1, key=KEY)[0]
    assert members.shape == (len(parts), width)
    return doubt(answer, members, counts, answered.coefficients, robust=robust)


# reducing ------------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 99), st.integers(0, 9)), min_size=1, max_size=6),
    st.integers(0, 40),
    st.booleans(),
)
def test_the_reduction_has_fixed_bits_and_changes_no_part(
    members: list[tuple[int, int]], length: int, robust: bool
) -> None:
    parts = [torch.randn(length, generator=torch.Generator().manual_seed(seed)) * count for seed, count in members]
    counts = [count for _, count in members]
    kept = [part.clone() for part in parts]
    reduced = reduce_parts(parts, counts, robust=robust)
    again = reduce_parts(parts, counts, robust=robust)
    assert torch.equal(reduced.mean, again.mean) and reduced.coefficients == again.coefficients
    assert all(torch.equal(part, before) for part, before in zip(parts, kept, strict=True))
    assert len(reduced.coefficients) == len(members)
    assert all(0.0 <= coefficient <= 1.0 for coefficient in reduced.coefficients)
    if not robust or sum(count > 0 for count in counts) < 3:
        exact = sum(
            (part.double() for part, count in zip(parts, counts, strict=True) if count), torch.zeros(length).double()
        )
        torch.testing.assert_close(reduced.mean.double(), exact / max(1, sum(counts)), rtol=1e-4, atol=1e-5)


def test_three_members_or_more_are_combined_by_agreement() -> None:
    parts, counts = estimates(4, 100), [1, 2, 3, 1]
    means = torch.stack([part / count for part, count in zip(parts, counts, strict=True)])
    assert torch.equal(reduce_parts(parts, counts, robust=True).mean, agreement(means, capped_weights(counts)))


def test_a_member_without_microbatches_adds_nothing() -> None:
    parts = [torch.tensor([6.0]), torch.tensor([1e30])]
    assert reduce_parts(parts, [3, 0], robust=True) == Reduced(mean=torch.tensor([2.0]), coefficients=(1.0, 0.0))
    nothing = reduce_parts(parts, [0, 0], robust=True)
    assert nothing.mean.tolist() == [0.0] and nothing.coefficients == (0.0, 0.0)


def test_parts_and_counts_have_to_match() -> None:
    with pytest.raises(ValueError, match="1 counts for 2 members"):
        reduce_parts([torch.zeros(1)] * 2, [1], robust=False)
    with pytest.raises(ValueError, match="1 coefficients for 2 members"):
        doubt(torch.zeros(1), torch.zeros(2, 1), [1, 1], (0.5,), robust=False)


# projections ---------------------------------------------------------------------------------


def test_projections_never_change_between_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verifier.reduction.WIDTH", 2)
    assert projections(torch.arange(1.0, 10.0), 2, key=KEY).tolist() == GOLDEN


@pytest.mark.parametrize("members", [1, 3, 8])
@pytest.mark.parametrize("length", [1, 2, 7, 100, 1 + 8 * WIDTH, 600 * WIDTH + 5])
def test_each_slice_is_projected_like_a_vector_of_its_own(members: int, length: int) -> None:
    vector = torch.randn(length, generator=torch.Generator().manual_seed(1))
    found = projections(vector, members, key=KEY)
    assert found.shape == (members, projection_width(length, members)) and found.dtype is torch.float32
    for place in range(members):
        own = vector[place::members].contiguous()
        assert fits(found[place], own, key=KEY)
        if len(own):
            assert not fits(found[place], own + own.abs().max() + 1, key=KEY)


def test_a_short_slice_is_only_given_other_signs() -> None:
    vector = torch.arange(1.0, 9.0)
    assert projections(vector, 2, key=KEY).abs().tolist() == [[1.0, 3.0, 5.0, 7.0], [2.0, 4.0, 6.0, 8.0]]


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), factor=st.floats(-10, 10), length=st.integers(1, 5000))
def test_projections_are_linear(seed: int, factor: float, length: int) -> None:
    one, other = estimates(2, length, seed=seed)
    both = projections(one + factor * other, 1, key=KEY)
    apart = projections(one, 1, key=KEY) + factor * projections(other, 1, key=KEY)
    torch.testing.assert_close(both, apart, rtol=1e-4, atol=1e-3)


def test_projections_keep_inner_products_and_hide_no_difference() -> None:
    one, other = estimates(2, 200_000)
    cosine = torch.nn.functional.cosine_similarity
    true = float(cosine(one, other, dim=0))
    told = [
        float(cosine(*(projections(each, 1, key=bytes([k]) * 32)[0] for each in (one, other)), dim=0))
        for k in range(20)
    ]
    assert all(abs(found - true) < 5 / math.sqrt(WIDTH) for found in told)
    assert abs(sum(told) / len(told) - true) < 2 / math.sqrt(WIDTH)
    # What is zero with the signs of one key is not with those of another.
    hidden = torch.zeros(2 * WIDTH)
    signs = projections(torch.cat([torch.ones(WIDTH), torch.zeros(WIDTH)]), 1, key=KEY)[0]
    later = projections(torch.cat([torch.zeros(WIDTH), torch.ones(WIDTH)]), 1, key=KEY)[0]
    hidden[:WIDTH], hidden[WIDTH:] = signs, -later
    assert not projections(hidden, 1, key=KEY).any()
    assert float(projections(hidden, 1, key=bytes(32)).norm()) > 10


def test_what_float32_cannot_hold_stays_finite() -> None:
    vector = torch.full((3 * WIDTH,), 3e38)
    assert bool(projections(vector, 1, key=KEY).isfinite().all())


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes, got 5"):
        projections(torch.zeros(4), 1, key=b"short")


# doubts --------------------------------------------------------------------------------------

ROUNDS = [([1, 1], 1), ([2, 1, 3], 1), ([1] * 8, 0), ([0, 1, 2, 1, 1], 0)]


@pytest.mark.parametrize("length", [10, 3 * WIDTH, 50_000])
@pytest.mark.parametrize(("counts", "liars"), ROUNDS)
@pytest.mark.parametrize("robust", [True, False])
def test_nobody_doubts_an_honest_owner(length: int, counts: list[int], liars: int, robust: bool) -> None:
    for noise in (0.1, 1.0, 3.0):
        parts = [part * count for part, count in zip(estimates(len(counts), length, noise=noise), counts, strict=True)]
        for index in range(liars):
            parts[index] = -100 * parts[index]
        assert look(parts, counts, reduce_parts(parts, counts, robust=robust), robust=robust) is None


def test_nobody_doubts_zeros_where_nobody_has_trained_anything() -> None:
    parts, counts = [torch.zeros(20)] * 3, [0, 0, 0]
    assert look(parts, counts, reduce_parts(parts, counts, robust=True)) is None


@pytest.mark.parametrize("length", [10, 50_000])
@pytest.mark.parametrize("factor", [-1000.0, -1.0, 0.0, 0.99, 1.001, 10.0])
def test_another_answer_than_the_sum_is_doubted(length: int, factor: float) -> None:
    parts, counts = estimates(5, length), [1] * 5
    right = reduce_parts(parts, counts, robust=True)
    false = Reduced(mean=factor * right.mean, coefficients=right.coefficients)
    assert look(parts, counts, false) is Doubt.SUM


def test_another_answer_in_few_entries_is_doubted() -> None:
    parts, counts = estimates(5, 50_000), [1] * 5
    right = reduce_parts(parts, counts, robust=True)
    mean = right.mean.clone()
    mean[17] += 5.0
    assert look(parts, counts, Reduced(mean=mean, coefficients=right.coefficients)) is Doubt.SUM


@pytest.mark.parametrize("chosen", [0, 4])
def test_who_counts_one_member_alone_is_doubted(chosen: int) -> None:
    """Member 4 sends the gradient turned round, and the owner is its friend."""
    parts, counts = estimates(5, 50_000, noise=2.0), [1] * 5
    parts[4] = -parts[4]
    alone = tuple(float(index == chosen) for index in range(5))
    assert look(parts, counts, Reduced(mean=parts[chosen].clone(), coefficients=alone)) is Doubt.RULE


@pytest.mark.parametrize("coefficients", [(0.0,) * 5, (0.5,) * 5, (1.0, -1.0, 0.0, 0.0, 0.0)])
def test_sums_of_impossible_coefficients_are_doubted(coefficients: tuple[float, ...]) -> None:
    parts, counts = estimates(5, 1000), [1] * 5
    total = torch.tensor(coefficients) @ torch.stack(parts)
    assert look(parts, counts, Reduced(mean=total, coefficients=coefficients)) is not None


def test_a_friend_who_tells_of_another_part_than_it_sent_does_not_help_a_false_owner() -> None:
    """The owner adds something large, and the friend says that its part was so large."""
    parts, counts = estimates(5, 20_000), [1] * 5
    right = reduce_parts(parts, counts, robust=True)
    extra = 30.0 * torch.randn(20_000, generator=torch.Generator().manual_seed(5))
    told = [*parts[:4], parts[4] + extra / right.coefficients[4]]
    false = Reduced(mean=right.mean + extra, coefficients=right.coefficients)
    assert look(parts, counts, false) is Doubt.SUM
    assert look(parts, counts, false, told=told) is Doubt.RULE


def test_the_tolerance_is_far_from_a_flipped_sign() -> None:
    assert RULE_TOLERANCE < 1.0
