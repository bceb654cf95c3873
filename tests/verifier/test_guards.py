"""Guards: one breach each, and nothing else."""

import math

import pytest
import torch
from torch import Tensor

from verifier.guards import check_tensor
from verifier.verdicts import Reason

SHAPE = (2, 3, 4)


def check(tensor: Tensor, norm_bound: float = 10.0) -> Reason | None:
    return check_tensor(tensor, shape=SHAPE, dtype=torch.float32, norm_bound=norm_bound)


def test_an_ordinary_tensor_passes() -> None:
    assert check(torch.ones(SHAPE)) is None


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


def test_the_bound_is_on_the_root_mean_square() -> None:
    assert check(torch.full(SHAPE, 10.0)) is None
    assert check(torch.full(SHAPE, 10.1)) is Reason.NORM


def test_the_largest_finite_numbers_are_too_large_but_finite() -> None:
    assert check(torch.full(SHAPE, torch.finfo(torch.float32).max)) is Reason.NORM
