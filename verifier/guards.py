"""Facts about one tensor that need no history: shape, dtype, finite."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from verifier.verdicts import Reason


def check_tensor(tensor: Tensor, *, shape: Sequence[int], dtype: torch.dtype) -> Reason | float:
    """The first guard that ``tensor`` breaks, or else the root mean square of its entries.

    One pass over the data serves both: a float64 norm is infinite or NaN exactly when some entry is (the square of
    the largest float32 is 1e77, far inside float64; summed in float32 it would overflow for finite tensors).
    """
    if tuple(tensor.shape) != tuple(shape):
        return Reason.SHAPE
    if tensor.dtype != dtype:
        return Reason.DTYPE
    norm = float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
    if not math.isfinite(norm):
        return Reason.NON_FINITE
    return norm / math.sqrt(max(1, tensor.numel()))
