"""The adversary drill: a node that cheats on purpose, so that people can see the checker work.

Only where the manifest allows drills. Nothing here hides: a drill is named in the claim, the
log, the metrics and /status of the node that plays it.
"""

from __future__ import annotations

import hashlib
from collections import deque
from dataclasses import dataclass

import torch

from node.drill_names import Attack, check_drill_name
from verifier.verdicts import Direction

SCALE_FACTOR = 10.0
DELAY_MICROBATCHES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """Which attack, on which direction, from which step on."""

    attack: Attack
    directions: frozenset[Direction]
    from_step: int

    @property
    def name(self) -> str:
        """As on the command line."""
        if len(self.directions) == 2:
            return f"both-{self.attack}"
        return f"gradient-{self.attack}" if Direction.GRADIENT in self.directions else str(self.attack)


def parse_drill(text: str, from_step: int) -> DrillPlan:
    """Read ``ATTACK``, ``gradient-ATTACK`` or ``both-ATTACK``.

    Raises:
        SettingsError: names the attacks that there are.
    """
    prefix, attack = check_drill_name(text)
    directions = {
        "": frozenset({Direction.ACTIVATION}),
        "gradient-": frozenset({Direction.GRADIENT}),
        "both-": frozenset(Direction),
    }[prefix]
    return DrillPlan(attack=attack, directions=directions, from_step=from_step)


class Drill:
    """Applies a plan to the tensors that this node sends. Runs in the compute thread."""

    def __init__(self, plan: DrillPlan, *, seed: bytes) -> None:
        self.plan = plan
        self.first_attack_step: int | None = None
        number = int.from_bytes(hashlib.sha256(b"sentinel:drill" + seed).digest()[:8], "big") >> 1
        self._generator = torch.Generator().manual_seed(number)
        self._past: dict[Direction, deque[torch.Tensor]] = {
            direction: deque(maxlen=DELAY_MICROBATCHES) for direction in Direction
        }

    def apply(self, tensor: torch.Tensor, direction: Direction, step: int) -> torch.Tensor:
        """The tensor to send instead, float32 of the same shape."""
        if direction not in self.plan.directions:
            return tensor
        past = self._past[direction]
        if self.plan.attack is Attack.DELAY:
            past.append(tensor.clone())
        if step < self.plan.from_step:
            return tensor
        if self.first_attack_step is None:
            self.first_attack_step = step
        return self._attacked(tensor, past)

    def _attacked(self, x: torch.Tensor, past: deque[torch.Tensor]) -> torch.Tensor:
        attack = self.plan.attack
        if attack is Attack.CONSTANT:
            return torch.zeros_like(x)
        if attack is Attack.SCALE:
            return SCALE_FACTOR * x
        if attack is Attack.SIGN_FLIP:
            return -x
        if attack is Attack.BIAS:
            return x + x.std()
        if attack is Attack.DELAY:
            return past[0]
        normal = torch.randn(x.shape, generator=self._generator)
        if attack is Attack.RANDOM:
            return x.mean() + x.std() * normal
        if attack is Attack.NOISE:
            return x + x.std() * normal
        return torch.where(normal > 0, x, -x)
