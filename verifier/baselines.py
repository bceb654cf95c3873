"""A baseline that siblings agree on. Pure.

Each replica of a stage builds its baselines from what its own neighbours send it, and the wiring of a few steps
can put one of them behind a cheat that shifts its baseline a little at a time. Siblings receive the same kind of
tensors from the same boundary. So at the end of a step each sends its baselines to the others and takes the
median, coordinate by coordinate, as its reference: fewer than half of them, whatever they send, cannot move a
coordinate beyond what the honest ones hold.

The siblings' projections must be drawn from the same seed, else their quantiles describe different directions and
a median over them describes nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verifier.distances import Reduction

MIN_BASELINES = 3
"""Fewest baselines with a median worth the name. Between two it would be the mean, which one liar moves anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedBaseline:
    """The reference that siblings have in common, and whose baseline it had to do without."""

    reduction: Reduction
    ignored: tuple[int, ...]
    """Positions in ``others`` of those of another shape or dtype, or with entries that are not finite. An honest
    sibling sends no such thing, so the caller may strike."""


def median_reduction(own: Reduction, others: Sequence[Reduction]) -> SharedBaseline:
    """The coordinate-wise median over ``own`` and the siblings' baselines; with fewer than three in all, ``own``.

    Of an even number it is the middle of the two in the middle. Raises ValueError if ``own`` is not finite.
    """
    if not own.is_finite():
        raise ValueError("the own baseline has entries that are not finite")
    ignored = tuple(position for position, other in enumerate(others) if not _fits(other, own))
    usable = [own, *(other for position, other in enumerate(others) if position not in ignored)]
    if len(usable) < MIN_BASELINES:
        return SharedBaseline(reduction=own, ignored=ignored)
    median = Reduction(
        mean=_median([each.mean for each in usable]), quantiles=_median([each.quantiles for each in usable])
    )
    return SharedBaseline(reduction=median, ignored=ignored)


def pack_reduction(reduction: Reduction) -> bytes:
    """The mean, then the quantiles row by row, as little-endian float32: 4 * (d + Q * K) bytes.

    Raises ValueError if an entry is not finite, since no receiver would take it.
    """
    if not reduction.is_finite():
        raise ValueError("a baseline with entries that are not finite cannot be sent")
    values = [*reduction.mean.tolist(), *reduction.quantiles.flatten().tolist()]
    return struct.pack(f"<{len(values)}f", *values)


def unpack_reduction(data: bytes, *, like: Reduction) -> Reduction:
    """Read what ``pack_reduction`` wrote, in the shapes of ``like``.

    Raises ValueError, before anything is allocated, unless the size is exactly right; and if an entry is not finite.
    """
    width, count = like.mean.numel(), like.mean.numel() + like.quantiles.numel()
    if len(data) != 4 * count:
        raise ValueError(f"a baseline of this boundary has {4 * count} bytes, got {len(data)}")
    values = torch.tensor(struct.unpack(f"<{count}f", data), dtype=torch.float32)
    reduction = Reduction(mean=values[:width].view_as(like.mean), quantiles=values[width:].view_as(like.quantiles))
    if not reduction.is_finite():
        raise ValueError("the baseline has entries that are not finite")
    return reduction


def _fits(other: Reduction, own: Reduction) -> bool:
    return (
        other.mean.shape == own.mean.shape
        and other.quantiles.shape == own.quantiles.shape
        and other.mean.dtype == own.mean.dtype
        and other.quantiles.dtype == own.quantiles.dtype
        and other.is_finite()
    )


def _median(tensors: Sequence[Tensor]) -> Tensor:
    """The median of each entry. ``torch.median`` would take the lower of the two in the middle."""
    ordered = torch.stack(list(tensors)).sort(dim=0).values
    low, high = ordered[(len(tensors) - 1) // 2], ordered[len(tensors) // 2]
    # Halved before they are added: two honest but large numbers must not overflow. Halving the smallest ones
    # rounds, so the result is held between the two.
    return torch.minimum(torch.maximum(low * 0.5 + high * 0.5, low), high)
