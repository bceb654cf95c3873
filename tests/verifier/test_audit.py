"""Two honest computations differ by rounding only, anything else shows; and how often work is computed again."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from verifier.audit import NEAR_FENCE, TOKEN_FACTOR, TOLERANCE, audit_chance, difference

SHAPE = (2, 16, 32)
STRICTEST, WIDEST = min(TOLERANCE.values()), max(TOLERANCE.values())

seeds = st.integers(0, 2**32 - 1)
sizes = st.floats(1e-6, 1e6)


def tensor(seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# the difference ---------------------------------------------------------------------------------


@given(seeds, st.sampled_from([(1, 1), (5, 3), SHAPE, (7,)]), sizes)
def test_equal_tensors_do_not_differ(seed: int, shape: tuple[int, ...], size: float) -> None:
    x = size * tensor(seed, shape)
    assert difference(x, x.clone()) == 0.0


def test_zeros_are_equal_to_zeros_and_infinitely_far_from_all_else() -> None:
    zeros, nearly = torch.zeros(SHAPE), torch.zeros(SHAPE)
    nearly[1, 3, 5] = 1e-30
    assert difference(zeros, zeros.clone()) == 0.0
    assert difference(zeros, nearly) == math.inf
    assert difference(zeros, tensor()) == math.inf


def test_nothing_sent_differs_by_the_size_of_the_tensor_itself() -> None:
    assert difference(tensor(), torch.zeros(SHAPE)) == pytest.approx(1.0)


def test_empty_tensors_raise_nothing() -> None:
    assert difference(torch.empty(0, 4), torch.empty(0, 4)) >= 0.0


@given(seeds, sizes, st.floats(-3.0, 3.0).filter(lambda amount: abs(amount) > 1e-3))
def test_it_does_not_depend_on_the_scale(seed: int, size: float, amount: float) -> None:
    x, error = tensor(seed).double(), tensor(seed + 1).double()
    expected = difference(x, x + amount * error)
    assert expected > 0
    assert difference(size * x, size * (x + amount * error)) == pytest.approx(expected, rel=1e-9)


@given(seeds, st.floats(0.01, 10.0))
def test_it_grows_with_the_error(seed: int, amount: float) -> None:
    x, error = tensor(seed), tensor(seed + 1)
    assert difference(x, x + 2 * amount * error) > difference(x, x + amount * error)
    scaled = difference(x, (1 + amount) * x)
    assert scaled >= amount * (1 - 1e-4)  # the whole tells all of it


@given(seeds, st.integers(0, 2**32 - 1))
def test_the_order_of_the_tokens_and_the_sign_of_all_do_not_matter(seed: int, shuffle: int) -> None:
    x, y = tensor(seed, (32, 8)), tensor(seed + 1, (32, 8))
    order = torch.randperm(32, generator=torch.Generator().manual_seed(shuffle))
    assert difference(x[order], y[order]) == pytest.approx(difference(x, y), rel=1e-12)
    assert difference(-x, -y) == difference(x, y)
    assert difference(x.view(4, 8, 8), y.view(4, 8, 8)) == difference(x, y)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["recomputed", "sent", "both"])
def test_what_is_not_finite_is_infinitely_far_away(bad: float, where: str) -> None:
    x, y = tensor(), tensor()
    if where != "sent":
        x[0, 0, 0] = bad
    if where != "recomputed":
        y[0, 0, 0] = bad
    assert difference(x, y) == math.inf


@pytest.mark.parametrize("shape", [(2, 16, 31), (16, 2, 32), (1, 16, 32), (32, 32), (2 * 16 * 32,)])
def test_another_shape_is_infinitely_far_away(shape: tuple[int, ...]) -> None:
    assert difference(tensor(), torch.zeros(shape)) == math.inf
    assert difference(torch.zeros(shape), tensor()) == math.inf


@given(seeds, st.integers(0, 1), st.integers(0, 2047))
def test_a_single_corrupted_token_is_seen(seed: int, sequence: int, position: int) -> None:
    # In a large tensor, where it would drown in the whole.
    x = tensor(seed, (2, 2048, 16))
    for spoiled in (-x[sequence, position], torch.zeros(16), tensor(seed + 1, (16,))):
        y = x.clone()
        y[sequence, position] = spoiled
        drowned = float((x - y).norm() / x.norm())
        assert drowned < WIDEST < difference(x, y)


def test_a_token_may_differ_more_than_the_whole() -> None:
    x = torch.ones(1, 1000, 4)
    y = x.clone()
    y[0, 17] *= 1 + TOKEN_FACTOR * STRICTEST * 0.9
    assert difference(x, y) == pytest.approx(0.9 * STRICTEST, rel=1e-4)
    y[0, 17] = 1 + TOKEN_FACTOR * STRICTEST * 1.1
    assert difference(x, y) > STRICTEST


def test_a_small_token_may_differ_as_much_as_a_typical_one() -> None:
    x = torch.ones(1, 100, 4)
    x[0, 17] = 1e-6  # its own rounding follows from sums of the size of the others
    y = x.clone()
    y[0, 17] *= 2
    assert difference(x, y) < 1e-5


@given(seeds)
def test_the_dtype_of_what_is_compared_does_not_matter(seed: int) -> None:
    x = tensor(seed).bfloat16()
    assert difference(x, x.float()) == 0.0
    x, y = tensor(seed).requires_grad_(), tensor(seed + 1).double().transpose(0, 1).contiguous().transpose(0, 1)
    assert difference(x, y) > 1


def test_tiny_and_huge_tensors_are_compared_alike() -> None:
    # Gradients are so small that their squares vanish in float32, and what explodes is still finite.
    x, y = tensor(), tensor() + 0.1 * tensor(1)
    expected = difference(x, y)
    for size in (1e-35, 1e-25, 1e25, 1e37):
        assert difference(size * x, size * y) == pytest.approx(expected, rel=1e-3)


def test_the_order_of_additions_hardly_differs() -> None:
    layers = [tensor(seed, (256, 256)) / 16 for seed in range(4)]

    def network(threads: int, order: Tensor) -> tuple[Tensor, Tensor]:
        torch.set_num_threads(threads)
        try:
            received = tensor(9, (4, 128, 256)).requires_grad_()
            value = received
            for layer in layers:
                value = functional.silu(value[..., order] @ layer[order])
            (gradient,) = torch.autograd.grad(value, received, tensor(10, (4, 128, 256)))
            return value.detach(), gradient
        finally:
            torch.set_num_threads(1)

    plain, shuffled = torch.arange(256), torch.randperm(256, generator=torch.Generator().manual_seed(1))
    one = network(1, plain)
    for threads, order in ((2, plain), (1, shuffled), (2, shuffled)):
        for mine, other in zip(one, network(threads, order), strict=True):
            assert difference(mine, other) < STRICTEST / 100
    assert not torch.equal(one[0], network(1, shuffled)[0])  # it does differ


# how often --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "suspicion", "suspect", "score", "chance"),
    [
        (0.0, 16.0, True, math.inf, 0.0),  # no audits at all
        (-1.0, 16.0, True, 2.0, 0.0),
        (1 / 64, 16.0, False, 0.0, 1 / 64),
        (1 / 64, 16.0, False, NEAR_FENCE - 0.01, 1 / 64),
        (1 / 64, 16.0, False, NEAR_FENCE, 1 / 4),
        (1 / 64, 16.0, False, 1.0, 1 / 4),
        (1 / 64, 16.0, False, 1.01, 1.0),  # flagged
        (1 / 64, 16.0, False, math.inf, 1.0),
        (1 / 64, 16.0, True, 0.0, 1 / 4),
        (1 / 64, 16.0, True, 0.9, 1 / 4),  # not twice
        (1 / 64, 1.0, True, 0.9, 1 / 64),
        (1 / 2, 16.0, True, 0.0, 1.0),
        (1.0, 16.0, False, 0.0, 1.0),
    ],
)
def test_the_chance_of_an_audit(rate: float, suspicion: float, suspect: bool, score: float, chance: float) -> None:
    assert audit_chance(rate=rate, suspicion=suspicion, suspect=suspect, score=score) == chance


@given(
    rate=st.floats(0.0, 1.0),
    suspicion=st.floats(1.0, 1e4),
    suspect=st.booleans(),
    score=st.floats(0.0, allow_nan=False),
)
def test_a_chance_is_a_chance_and_suspicion_only_raises_it(
    rate: float, suspicion: float, suspect: bool, score: float
) -> None:
    chance = audit_chance(rate=rate, suspicion=suspicion, suspect=suspect, score=score)
    assert 0.0 <= chance <= 1.0
    assert chance >= audit_chance(rate=rate, suspicion=suspicion, suspect=False, score=0.0) == rate
