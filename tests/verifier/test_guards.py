"""Guards: one breach each, and nothing else."""

import math

import pytest
import torch
from torch import Tensor

from verifier.guards import check_tensor
from verifier.verdicts import Reason

SHAPE = (2, 3, 4)


def check(tensor: Tensor) -> Reason | float:
    return check_tensor(tensor, shape=SHAPE, dtype=torch.float32)


def test_an_ordinary_tensor_passes_with_its_root_mean_square() -> None:
    assert check(torch.ones(SHAPE)) == pytest.approx(1.0)
    assert check(torch.tensor([3.0, 4.0] * 12).view(SHAPE)) == pytest.approx(math.sqrt(12.5))


@pytest.mark.parametrize("shape", [(2, 3, 5), (6, 4), (24,), (2, 3, 4, 1)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    assert check(torch.ones(shape)) is Reason.SHAPE


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int32])
def test_another_dtype_is_refused(dtype: torch.dtype) -> None:
    assert check(torch.ones(SHAPE, dtype=dtype)) is Reason.DTYPE


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_single_non_finite_entry_is_refused(value: float) -> None:
    tensor = torch.ones(SHAPE)
    tensor[1, 2, 3] = value
    assert check(tensor) is Reason.NON_FINITE


def test_the_largest_finite_numbers_are_finite() -> None:
    largest = torch.finfo(torch.float32).max
    assert check(torch.full(SHAPE, largest)) == pytest.approx(largest)


def test_a_tensor_without_entries_has_no_size() -> None:
    assert check_tensor(torch.empty(0, 3), shape=(0, 3), dtype=torch.float32) == 0.0
