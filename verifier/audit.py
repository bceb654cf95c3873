"""When to have work computed again, and when two computations of it are the same. Pure.

An audit exposes what no statistic can: flipped gradients, lazy work, noise that copies the statistics. A
replica with the same parameters computes a microbatch again from the same bytes, and what it gets may differ
from what was sent by rounding only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

TOLERANCE: Mapping[str, float] = {"fp32": 2e-3, "bf16": 5e-2, "int8": 6e-2}
"""Largest relative difference of two honest computations, by the wire's dtype. Both start from the same encoded
bytes, and what is compared has been encoded once. With fp32 on the wire every node computes in float32, and
differs by the order of its additions (below 1e-5 over 1 to 4 threads). With the others a GPU may multiply in
bfloat16, which differs from float32 by about 1 % a stage; the encoding adds 0.2 % (bf16) or 0.7 % (int8)."""

TOKEN_FACTOR = 4.0
"""A single token may differ this many times more than the whole tensor: rounding is not spread evenly."""

NEAR_FENCE = 0.7
"""Share of its fence from which a tensor is suspicious, though not flagged."""


def difference(recomputed: Tensor, sent: Tensor) -> float:
    """How far what was sent [..., d] is from what should have been; 1 is about the size of the tensor itself.

    The larger of the relative L2 difference of the whole, and a quarter of that of the worst token, relative to
    a typical token: an attack on few tokens would drown in the whole. Infinite if anything is not finite.
    """
    if recomputed.shape != sent.shape:
        return float("inf")
    right = recomputed.detach().reshape(-1, recomputed.shape[-1]).double()
    error = (sent.detach().reshape(right.shape).double() - right).norm(dim=1)
    lengths = right.norm(dim=1)
    scale = float(lengths.square().mean().sqrt())
    whole = float(error.square().mean().sqrt())
    worst = float((error / lengths.clamp_min(max(scale, 1e-30))).max()) / TOKEN_FACTOR if len(error) else 0.0
    if not torch.isfinite(error).all() or not torch.isfinite(lengths).all():
        return float("inf")
    return max(whole / scale if scale > 0 else (0.0 if whole == 0 else float("inf")), worst)


def audit_chance(*, rate: float, suspicion: float, suspect: bool, score: float) -> float:
    """The chance in [0, 1] that a microbatch is audited.

    Args:
        rate: the base rate.
        suspicion: the factor for those who have not earned trust, and for tensors near their fence.
        suspect: whether the peer has not earned trust, or has strikes.
        score: the tensor's largest statistic over its fence; above 1 it was flagged and is audited for certain.
    """
    if rate <= 0.0:
        return 0.0
    if score > 1.0:
        return 1.0
    return min(1.0, rate * (suspicion if suspect or score >= NEAR_FENCE else 1.0))
