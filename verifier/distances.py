"""How far a tensor lies from what this boundary usually carries: the four distances of SENTINEL.

A boundary tensor ``[batch, tokens, d]`` is first reduced (phi) to two small things:

* ``mean`` ``[n]``: its mean over batch and tokens, so n = d. The content of a microbatch changes with
  every step, so a baseline per token position mostly holds text, and a baseline per batch row means
  nothing at all; what stays from one microbatch to the next is the mean of each feature. The two
  others can be had all the same (``Axes``), flattened: the paper's text at hand does not say which it uses.
* ``quantiles`` ``[Q, K]``: the cloud of its tokens, projected on K fixed unit directions and
  described by Q quantiles each. The mean is blind to noise that averages out, the cloud is not.

Both are linear enough to be averaged over microbatches and over steps, so a baseline is itself a
``Reduction`` and needs a few kilobytes, whatever the size of the tensors, if it is a mean over tokens.

Knows nothing of fences, peers or steps. Everything is float32 on the CPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verifier.config import Axes

DEFAULT_DIRECTIONS = 8
"""K. The distance is a mean over directions and quantiles: 8 directions bring its sampling error below the
honest spread, and sorting them is the largest part of the cost of a judgement."""

DEFAULT_QUANTILES = 33
"""Q. Mid-point quantiles (1.5 % to 98.5 %): the extremes of a heavy-tailed cloud are too noisy to compare."""

TINY = 1e-30
"""Keeps divisions defined for an all-zero baseline; far below any magnitude that training produces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduction:
    """phi of one tensor, or the running mean of many: ``mean`` [n] and ``quantiles`` [Q, K], float32.

    n is d, T * d or B * T * d, as the axes have it; the mean is flat, since no distance needs to know.
    """

    mean: Tensor
    quantiles: Tensor

    def is_finite(self) -> bool:
        """Whether every entry is a finite number."""
        return bool(torch.isfinite(self.mean).all()) and bool(torch.isfinite(self.quantiles).all())

    def scaled(self, factor: float) -> Reduction:
        """Every entry times ``factor``."""
        return Reduction(mean=self.mean * factor, quantiles=self.quantiles * factor)

    def plus(self, other: Reduction) -> Reduction:
        """The sum, entry by entry."""
        return Reduction(mean=self.mean + other.mean, quantiles=self.quantiles + other.quantiles)


def unit_directions(width: int, *, seed: int, count: int = DEFAULT_DIRECTIONS) -> Tensor:
    """``count`` random unit vectors as columns, [width, count] float32, the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    vectors = torch.randn(width, count, generator=generator)
    return vectors.div_(torch.linalg.vector_norm(vectors, dim=0, keepdim=True))


def reduce(
    tensor: Tensor, directions: Tensor, *, quantiles: int = DEFAULT_QUANTILES, axes: Axes = "tokens"
) -> Reduction:
    """phi(tensor). ``tensor`` is [..., T, d] with at least one token, ``directions`` [d, K]."""
    cloud = tensor.detach().reshape(-1, tensor.shape[-1]).float()
    # [K, N], so that each sort runs over contiguous memory.
    ordered = torch.mm(directions.t(), cloud.t()).sort(dim=1).values
    last = cloud.shape[0] - 1
    positions = ((torch.arange(quantiles) + 0.5) / quantiles * cloud.shape[0] - 0.5).clamp(0, last)
    lower = positions.long()
    upper = (lower + 1).clamp(max=last)
    picked = torch.lerp(ordered[:, lower], ordered[:, upper], positions - lower)
    return Reduction(mean=_mean(cloud, tensor.shape, axes), quantiles=picked.t())


def mean_absolute(value: Reduction, baseline: Reduction) -> float:
    """L1: mean over entries of the absolute difference of the means. Unit: that of the tensor."""
    return float((value.mean - baseline.mean).abs().mean())


def normalised_l2(value: Reduction, baseline: Reduction) -> float:
    """L2: Euclidean distance of the means over the norm of the baseline's mean. No unit.

    The baseline cloud's spread joins the norm in quadrature. For activations it hardly counts; the mean of
    a gradient can come so close to zero by chance that the quotient would explode for an honest one. A mean
    with an entry for each token has a norm far above the spread of one direction; it needs no such help.
    """
    scale = math.hypot(float(baseline.mean.norm()), _spread(baseline))
    return float((value.mean - baseline.mean).norm()) / max(scale, TINY)


def sign_flip_ratio(value: Reduction, baseline: Reduction) -> float:
    """Share of entries, in [0, 1], whose mean has another sign than the baseline's."""
    return float((value.mean.sign() != baseline.mean.sign()).float().mean())


def sliced_wasserstein(value: Reduction, baseline: Reduction) -> float:
    """Mean 1-D Wasserstein-1 distance over the directions, in units of the baseline cloud's own spread.

    The unit makes the level independent of the growth of activations and the decay of gradients.
    """
    return float((value.quantiles - baseline.quantiles).abs().mean()) / max(_spread(baseline), TINY)


def _mean(cloud: Tensor, shape: torch.Size, axes: Axes) -> Tensor:
    """Of the tokens [N, d] of a tensor [..., T, d]: [d], [T * d] or [N * d], sharing no memory with it."""
    if axes == "none":
        return cloud.flatten().clone()
    if axes == "sequences":
        return cloud.reshape(-1, *shape[-2:]).mean(dim=0).flatten()
    return cloud.mean(dim=0)


def _spread(baseline: Reduction) -> float:
    """Mean absolute deviation of the projected cloud: the typical size of a token along one direction."""
    return float((baseline.quantiles - baseline.quantiles.mean(dim=0, keepdim=True)).abs().mean())
