"""Reduction and distances."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from verifier import distances as d
from verifier.config import AXES, Axes

Distance = Callable[[d.Reduction, d.Reduction], float]

WIDTH = 16
DIRECTIONS = d.unit_directions(WIDTH, seed=3)
ALL = (d.mean_absolute, d.normalised_l2, d.sign_flip_ratio, d.sliced_wasserstein)


def cloud(seed: int, *, shape: tuple[int, ...] = (2, 40, WIDTH)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def reduced(tensor: torch.Tensor) -> d.Reduction:
    return d.reduce(tensor, DIRECTIONS)


def test_directions_are_unit_vectors_and_repeatable() -> None:
    assert torch.allclose(DIRECTIONS.norm(dim=0), torch.ones(d.DEFAULT_DIRECTIONS))
    assert torch.equal(DIRECTIONS, d.unit_directions(WIDTH, seed=3))
    assert not torch.equal(DIRECTIONS, d.unit_directions(WIDTH, seed=4))


def test_a_reduction_has_the_documented_shapes() -> None:
    value = reduced(cloud(0))
    assert value.mean.shape == (WIDTH,)
    assert value.quantiles.shape == (d.DEFAULT_QUANTILES, d.DEFAULT_DIRECTIONS)
    assert (value.quantiles.diff(dim=0) >= 0).all()


def test_the_order_of_tokens_is_irrelevant() -> None:
    tensor = cloud(1, shape=(1, 30, WIDTH))
    assert torch.allclose(reduced(tensor).quantiles, reduced(tensor.flip(1)).quantiles, atol=1e-5)


def test_a_single_token_is_its_own_quantiles() -> None:
    token = cloud(2, shape=(1, 1, WIDTH))
    expected = (token.reshape(1, -1) @ DIRECTIONS).expand(d.DEFAULT_QUANTILES, -1)
    assert torch.allclose(reduced(token).quantiles, expected, atol=1e-6)


@pytest.mark.parametrize("axes", AXES)
def test_the_axes_name_what_the_mean_is_over(axes: Axes) -> None:
    tensor = cloud(14)
    value = d.reduce(tensor, DIRECTIONS, axes=axes)
    expected = {"tokens": tensor.mean(dim=(0, 1)), "sequences": tensor.mean(dim=0), "none": tensor}[axes]
    assert value.mean.shape == (expected.numel(),)
    assert torch.allclose(value.mean, expected.flatten(), atol=1e-6)
    assert torch.equal(value.quantiles, reduced(tensor).quantiles)
    assert value.is_finite()


@pytest.mark.parametrize("axes", AXES)
def test_a_reduction_shares_no_memory_with_its_tensor(axes: Axes) -> None:
    tensor = cloud(15, shape=(1, 40, WIDTH))
    before = d.reduce(tensor, DIRECTIONS, axes=axes).mean
    kept = before.clone()
    tensor.zero_()
    assert torch.equal(before, kept)


@pytest.mark.parametrize("axes", AXES)
@pytest.mark.parametrize("distance", ALL)
def test_every_distance_takes_every_reduction(distance: Distance, axes: Axes) -> None:
    one, other = (d.reduce(cloud(seed), DIRECTIONS, axes=axes) for seed in (16, 17))
    assert distance(one, one) == 0.0
    assert distance(d.reduce(-cloud(17), DIRECTIONS, axes=axes), one) > distance(other, one) >= 0.0


def test_half_precision_is_reduced_in_single_precision() -> None:
    assert reduced(cloud(3).bfloat16()).mean.dtype is torch.float32


@pytest.mark.parametrize("distance", ALL)
def test_a_tensor_has_no_distance_to_itself(distance: object) -> None:
    value = reduced(cloud(4))
    assert distance(value, value) == 0.0  # type: ignore[operator]


def test_a_shift_is_measured_exactly() -> None:
    baseline = reduced(cloud(5))
    shifted = reduced(cloud(5) + 2.0)
    assert d.mean_absolute(shifted, baseline) == pytest.approx(2.0, rel=1e-5)
    largest = 2.0 * WIDTH**0.5 / float(baseline.mean.norm())
    assert largest * 0.5 < d.normalised_l2(shifted, baseline) < largest


def test_a_baseline_whose_mean_vanishes_by_chance_does_not_explode_the_distance() -> None:
    centred = cloud(12) - cloud(12).mean(dim=(0, 1))
    assert d.normalised_l2(reduced(cloud(13) - 0.5), reduced(centred)) < 2.0


def test_a_flip_changes_every_sign() -> None:
    assert d.sign_flip_ratio(reduced(-cloud(6)), reduced(cloud(6))) == 1.0


def test_noise_that_averages_out_is_seen_in_the_cloud() -> None:
    tensor = cloud(7, shape=(8, 128, WIDTH))
    noisy = tensor + 2.0 * torch.randn(tensor.shape, generator=torch.Generator().manual_seed(8))
    value, baseline = reduced(noisy), reduced(tensor)
    assert d.mean_absolute(value, baseline) < 0.1
    assert d.sliced_wasserstein(value, baseline) > 0.5


def test_an_all_zero_baseline_divides_by_nothing() -> None:
    zero = reduced(torch.zeros(1, 4, WIDTH))
    for distance in ALL:
        assert torch.isfinite(torch.tensor(distance(reduced(cloud(9)), zero)))


@given(seed=st.integers(0, 1000), factor=st.floats(1e-3, 1e3))
def test_relative_distances_ignore_the_common_scale(seed: int, factor: float) -> None:
    value, baseline = cloud(seed), cloud(seed + 1)
    for distance in (d.normalised_l2, d.sliced_wasserstein, d.sign_flip_ratio):
        plain = distance(reduced(value), reduced(baseline))
        scaled = distance(reduced(value * factor), reduced(baseline * factor))
        assert scaled == pytest.approx(plain, rel=1e-3)


def test_reductions_average_and_know_when_they_are_broken() -> None:
    a, b = reduced(cloud(10)), reduced(cloud(11))
    middle = a.plus(b).scaled(0.5)
    assert torch.allclose(middle.mean, (a.mean + b.mean) / 2)
    assert torch.allclose(middle.quantiles, (a.quantiles + b.quantiles) / 2)
    assert middle.is_finite()
    assert not d.Reduction(mean=a.mean / 0.0, quantiles=a.quantiles).is_finite()
    assert not d.Reduction(mean=a.mean, quantiles=a.quantiles * float("nan")).is_finite()
