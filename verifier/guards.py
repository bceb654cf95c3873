"""Facts about one tensor that need no history: shape, dtype, finite, bounded."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from verifier.verdicts import Reason


def check_tensor(tensor: Tensor, *, shape: Sequence[int], dtype: torch.dtype, norm_bound: float) -> Reason | None:
    """The first guard that ``tensor`` breaks, or None.

    ``norm_bound`` bounds the root mean square of the entries. One pass over the data serves two guards: a
    float64 norm is infinite or NaN exactly when some entry is (the square of the largest float32 is 1e77,
    far inside float64; summed in float32 it would overflow for finite tensors).
    """
    if tuple(tensor.shape) != tuple(shape):
        return Reason.SHAPE
    if tensor.dtype != dtype:
        return Reason.DTYPE
    norm = float(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64))
    if not math.isfinite(norm):
        return Reason.NON_FINITE
    if norm > norm_bound * math.sqrt(tensor.numel()):
        return Reason.NORM
    return None
