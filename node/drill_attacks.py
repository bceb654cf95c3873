"""The drill's attacks on one tensor: pure functions of the tensor and a generator.

All take x [..., d] float32 on the CPU, with at least one token, leave it as it is and return float32 of the
same shape, finite for finite x (unless the attack itself leaves the range of float32). Moments are taken in
float64: gradients can be so small that their squares vanish in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Generator, Tensor

from node.drill_names import Attack

SCALE_FACTOR = 10.0

MIMIC_CHANGE = 0.3
"""Norm of what ``mimic`` changes over the norm of x."""

MIMIC_MAX_CHORD = 1.0
"""The same over the norm of x without its means. Only what differs between tokens can change while the means
stay; where it is little, more than this would leave no likeness between the two clouds of tokens."""

_SMALLEST_SHARE = 1e-9
"""Of a feature's energy: below it the noise has no part of its own in that feature, only rounding."""


def constant(x: Tensor, generator: Generator) -> Tensor:
    """Zeros."""
    return torch.zeros_like(x)


def random(x: Tensor, generator: Generator) -> Tensor:
    """Normal values with the mean and deviation of the whole of x."""
    return float(x.double().mean()) + deviation(x) * torch.randn(x.shape, generator=generator)


def scale(x: Tensor, generator: Generator) -> Tensor:
    """10 x."""
    return SCALE_FACTOR * x


def sign_flip(x: Tensor, generator: Generator) -> Tensor:
    """-x."""
    return -x


def random_sign(x: Tensor, generator: Generator) -> Tensor:
    """x with a fair coin's sign for each entry."""
    return torch.where(torch.randn(x.shape, generator=generator) > 0, x, -x)


def bias(x: Tensor, generator: Generator) -> Tensor:
    """x plus its deviation."""
    return x + deviation(x)


def noise(x: Tensor, generator: Generator) -> Tensor:
    """x plus normal noise of its deviation."""
    return x + deviation(x) * torch.randn(x.shape, generator=generator)


def mimic(x: Tensor, generator: Generator) -> Tensor:
    """x with noise that the statistics do not show.

    The mean and the deviation of each feature over the tokens, and so the norm of the whole, are those of x;
    the change is ``MIMIC_CHANGE`` of that norm, so the cosine with x is 0.955. The noise of each token is
    another token of the same tensor, stretched to its length: the features' covariance and the lengths of
    the tokens stay close to those of x as well. Around the features' means, x is turned towards this noise,
    after the part along x was taken out of it. Needs at least three tokens that differ; otherwise x is
    returned.
    """
    cloud = x.double().reshape(-1, x.shape[-1])
    centred = cloud - cloud.mean(dim=0, keepdim=True)
    fake = _shuffled(centred, generator)
    fake -= fake.mean(dim=0, keepdim=True)
    energy = centred.square().sum(dim=0)
    fake -= centred * _quotient((fake * centred).sum(dim=0), energy)
    own = fake.square().sum(dim=0)
    moved = own > _SMALLEST_SHARE * energy
    movable = float(energy[moved].sum())
    if movable == 0.0:
        return x.clone()
    chord = min(MIMIC_MAX_CHORD, MIMIC_CHANGE * math.sqrt(float(cloud.square().sum()) / movable))
    angle = 2.0 * math.asin(chord / 2.0)
    fake *= _quotient(energy, own).sqrt()
    turned = cloud + (math.cos(angle) - 1.0) * centred + math.sin(angle) * fake
    return torch.where(moved, turned, cloud).to(x.dtype).view(x.shape)


def drift(x: Tensor, amount: float, direction: Tensor) -> Tensor:
    """x plus ``amount`` of its deviation along ``direction`` [d], the same for every token."""
    return x + amount * deviation(x) * direction


def unit_direction(width: int, generator: Generator) -> Tensor:
    """Random values [width] whose mean square is 1."""
    values = torch.randn(width, generator=generator)
    return values / values.square().mean().sqrt()


def deviation(x: Tensor) -> float:
    """Standard deviation over all entries of x; 0 for a single one."""
    return float(x.double().std()) if x.numel() > 1 else 0.0


MEMORYLESS: Mapping[Attack, Callable[[Tensor, Generator], Tensor]] = {
    Attack.CONSTANT: constant,
    Attack.RANDOM: random,
    Attack.SCALE: scale,
    Attack.SIGN_FLIP: sign_flip,
    Attack.RANDOM_SIGN: random_sign,
    Attack.BIAS: bias,
    Attack.NOISE: noise,
    Attack.MIMIC: mimic,
}
"""Those that need nothing but x."""


def _shuffled(centred: Tensor, generator: Generator) -> Tensor:
    """For each token [d] of [N, d] another one, stretched to the length of the first."""
    tokens = centred.shape[0]
    order = torch.randperm(tokens, generator=generator)
    other = torch.empty_like(order)
    other[order] = order.roll(1)  # one cycle through all of them, so that no token meets itself
    lengths = torch.linalg.vector_norm(centred, dim=1, keepdim=True)
    return centred[other] * _quotient(lengths, lengths[other])


def _quotient(numerator: Tensor, denominator: Tensor) -> Tensor:
    """Entry by entry, 0 where the denominator is 0."""
    return torch.where(denominator > 0, numerator / denominator, torch.zeros_like(numerator))
