"""AdamW on a stage's flat vector, and the learning rate.

Siblings apply the same aggregate and have to end with the same bits, on whatever processor and with however
many threads. So every operation on the vectors is a single addition, product, quotient or root per element,
each of which IEEE 754 rounds in one way only: no fused operations, which some processors round once and others
twice.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from node.model import ParameterSlot

if TYPE_CHECKING:
    from protocol.manifest_sections import TrainingSection

_CHUNK = 1 << 20
"""Elements updated at once; bounds the memory of intermediate values, and changes no bits."""
_LANES = 1 << 16
"""Partial sums of the norm. Part of the definition: another number gives another rounding."""


def learning_rate(step: int, training: TrainingSection) -> float:
    """Learning rate of a step (from 0): a line up to the peak, then half a cosine down, then constant."""
    if step < training.warmup_steps:
        return training.learning_rate * (step + 1) / training.warmup_steps
    progress = min(1.0, (step - training.warmup_steps) / training.decay_steps)
    height = 0.5 * (1.0 + math.cos(math.pi * progress))
    return training.learning_rate * (training.min_lr_ratio + (1.0 - training.min_lr_ratio) * height)


def stable_norm(vector: Tensor) -> float:
    """Euclidean norm of a float32 [P], summed in float64 in an order that is the same everywhere.

    Element i goes to lane i mod 65536, each lane adds up from the front, and the lanes are folded in half
    until one is left. Infinite or not a number where an element is.
    """
    lanes = torch.zeros(_LANES, dtype=torch.float64, device=vector.device)
    for start in range(0, vector.numel(), _LANES):
        part = vector[start : start + _LANES].double()
        lanes[: part.numel()] += part * part
    while lanes.numel() > 1:
        half = lanes.numel() // 2
        lanes = lanes[:half] + lanes[half:]
    return math.sqrt(float(lanes)) if math.isfinite(float(lanes)) else float(lanes)


class StepOptimizer:
    """AdamW with clipping by the stage's norm. Matrices (also embeddings) decay; norm weights do not."""

    def __init__(self, layout: Sequence[ParameterSlot], training: TrainingSection) -> None:
        self._layout = tuple(layout)
        self._training = training
        self._length = sum(slot.numel for slot in self._layout)
        self._mean = torch.zeros(self._length)
        self._square = torch.zeros(self._length)
        self._updates = 0

    @torch.no_grad()
    def apply(self, parameters: Tensor, mean_gradient: Tensor, step: int) -> float:
        """Update ``parameters`` (float32 [P], any device) in place by the averaged gradient (float32 [P]).

        Returns the gradient's norm before clipping. If that is not finite, nothing changes; since siblings
        have the same aggregate, they all skip the step.

        Raises:
            ValueError: a vector of another length or dtype.
        """
        for vector in (parameters, mean_gradient):
            if vector.shape != (self._length,) or vector.dtype != torch.float32:
                raise ValueError(f"not float32 [{self._length}]: {vector.dtype} {list(vector.shape)}")
        norm = stable_norm(mean_gradient)
        if not math.isfinite(norm):
            return norm
        self._move(parameters.device)
        training = self._training
        clip = training.clip_norm / norm if norm > training.clip_norm else 1.0
        rate = learning_rate(step, training)
        self._updates += 1
        # Factors, not divisors: on some devices torch divides by a number by multiplying with its inverse.
        step_size = rate / (1.0 - training.beta1**self._updates)
        root_scale = 1.0 / math.sqrt(1.0 - training.beta2**self._updates)
        for part, is_matrix in self._parts():
            gradient = mean_gradient[part].to(parameters.device) * clip
            mean, square, values = self._mean[part], self._square[part], parameters[part]
            mean.mul_(training.beta1)
            mean.add_(gradient * (1.0 - training.beta1))
            square.mul_(training.beta2)
            square.add_(gradient * gradient * (1.0 - training.beta2))
            # In float64, since some math libraries approximate the float32 root; rounded back it is exact.
            denominator = square.double().sqrt_().float().mul_(root_scale).add_(training.eps)
            if is_matrix:
                values.mul_(1.0 - rate * training.weight_decay)
            values.sub_((mean / denominator).mul_(step_size))
        return norm

    def state(self) -> dict[str, Tensor]:
        """On the CPU: ``exp_avg`` and ``exp_avg_sq``, float32 [P], and ``step``, int64 [1], the updates so far.

        The vectors may share memory with the optimizer's own: copy them to keep them.
        """
        return {
            "exp_avg": self._mean.cpu(),
            "exp_avg_sq": self._square.cpu(),
            "step": torch.tensor([self._updates]),
        }

    def load(self, state: dict[str, Tensor]) -> None:
        """Continue from what ``state`` gave. Copies.

        Raises:
            ValueError: a missing name, a wrong shape or dtype, or values that no optimizer can have.
        """
        mean, square, updates = (_checked(state, name, self._expected(name)) for name in _NAMES)
        if int(updates) < 0 or bool((square < 0).any()):
            raise ValueError("an optimizer state holds negative squares or a negative step")
        self._mean, self._square = mean.clone(), square.clone()
        self._updates = int(updates)

    def _expected(self, name: str) -> tuple[torch.dtype, int]:
        return (torch.int64, 1) if name == "step" else (torch.float32, self._length)

    def _move(self, device: torch.device) -> None:
        if self._mean.device != device:
            self._mean, self._square = self._mean.to(device), self._square.to(device)

    def _parts(self) -> Iterator[tuple[slice, bool]]:
        """The whole vector in slices, each within one parameter, and whether that is a matrix."""
        for slot in self._layout:
            end = slot.offset + slot.numel
            for start in range(slot.offset, end, _CHUNK):
                yield slice(start, min(start + _CHUNK, end)), len(slot.shape) >= 2


_NAMES = ("exp_avg", "exp_avg_sq", "step")


def _checked(state: dict[str, Tensor], name: str, expected: tuple[torch.dtype, int]) -> Tensor:
    if name not in state:
        raise ValueError(f"an optimizer state has no {name}")
    tensor, (dtype, length) = state[name], expected
    if tensor.dtype != dtype or tensor.shape != (length,):
        raise ValueError(f"{name} of an optimizer state is not {dtype} [{length}]")
    return tensor.detach()
