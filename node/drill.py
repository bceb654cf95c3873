"""The adversary drill: a node that cheats on purpose, so that people can see the checker work.

Only where the manifest allows drills. Nothing here hides: a drill is named in the claim, the
log, the metrics and /status of the node that plays it.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from node import drill_attacks
from node.drill_names import CONDUCT_ATTACKS, Attack, check_drill_name
from verifier.verdicts import Direction

DELAY_MICROBATCHES = 4

DRIFT_PER_STEP = 0.01
"""Growth of the drift in each step, in standard deviations of the tensor."""

DRIFT_LIMIT = 1.0

INTERMITTENT_SHARE = 0.25
"""Of the microbatches, those that are falsified."""

INJECT_EVERY_STEPS = 3

INJECT_NORM = 0.05
"""Norm of the injected vector over that of the parameters when it was first injected."""

INJECT_CHUNK = 1 << 20
"""Entries drawn at a time: the vector would need as much memory as the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrillPlan:
    """Which attack, on which directions (none for conduct), from which step on."""

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
    """Read ``ATTACK``, or ``gradient-ATTACK`` or ``both-ATTACK`` for an attack on tensors.

    Raises:
        SettingsError: names the attacks that there are.
    """
    prefix, attack = check_drill_name(text)
    directions = {
        "": frozenset({Direction.ACTIVATION}),
        "gradient-": frozenset({Direction.GRADIENT}),
        "both-": frozenset(Direction),
    }[prefix]
    if attack in CONDUCT_ATTACKS:
        directions = frozenset()
    return DrillPlan(attack=attack, directions=directions, from_step=from_step)


class Drill:
    """Plays a plan: what this node sends, signs and says instead of the truth.

    Every method gives the honest answer back unless the plan is of its kind and has begun. ``apply`` and
    ``inject`` belong to the compute thread, the others to the event loop.
    """

    def __init__(self, plan: DrillPlan, *, seed: bytes) -> None:
        """Everything random follows from ``seed`` and the order of the calls."""
        self.plan = plan
        self.first_attack_step: int | None = None
        """Of the first call that really falsified something."""
        self.attacked = 0
        """Tensors, receipts, votes, accusations and injections falsified so far."""
        self.partners: frozenset[str] = frozenset()
        """Peer ids of the nodes that this one colludes with, from whatever step on they were set."""
        self._seed = seed
        self._counting = threading.Lock()
        self._sides = {direction: _Side(seed, direction) for direction in Direction}
        self._victims: dict[int, str] = {}
        self._inject_scale: float | None = None
        self._injections = 0
        self._honest: Tensor | None = None

    def apply(self, tensor: Tensor, direction: Direction, step: int, *, received: Tensor | None = None) -> Tensor:
        """The tensor to send instead of ``tensor`` [..., d], of the same shape and dtype.

        ``received`` is what this node got for the same microbatch in the same direction and of the same shape:
        the activation from upstream, the gradient from downstream. Stage 0 and the last stage get none; a node
        that only passes on what it gets sends zeros there.
        """
        if direction not in self.plan.directions:
            return tensor
        side = self._sides[direction]
        if self.plan.attack is Attack.DELAY:
            side.past.append(tensor.clone())
        if step < self.plan.from_step:
            return tensor
        sent = self._attacked(tensor.detach().float(), side, step, received).to(tensor.dtype)
        if torch.equal(sent, tensor):
            return tensor
        self._count(step)
        return sent

    def receipt_digest(self, digest: bytes, step: int) -> bytes:
        """The digest to sign in a receipt: the true one, or as many wrong bytes."""
        if not self._plays(Attack.FALSE_RECEIPT, step):
            return digest
        self._count(step)
        return bytes(byte ^ 0xFF for byte in digest)

    def vote(self, differs: bool, accused: str, step: int) -> bool:
        """What to say as an auditor whose own result ``differs``, or not, from that of ``accused``.

        Partners are vouched for from the first step on.
        """
        if accused in self.partners:
            said = False
        else:
            said = not differs if self._plays(Attack.LYING_AUDITOR, step) else differs
        if said != differs:
            self._count(step)
        return said

    def spares(self, peer: str, step: int) -> bool:
        """Whether ``peer`` is a partner, to be neither judged nor audited nor accused; in any step, uncounted."""
        return peer in self.partners

    def victim(self, honest_neighbours: Sequence[str], step: int) -> str | None:
        """Whom to accuse in this step: nobody twice, in an order that follows from the seed.

        The same one if asked again in the same step. None for any other plan, and once all have been accused.
        """
        if not self._plays(Attack.FRAME, step):
            return None
        if step not in self._victims:
            left = set(honest_neighbours) - self.partners - set(self._victims.values())
            if not left:
                return None
            self._victims[step] = min(left, key=lambda peer: _hash(self._seed, f"frame:{peer}"))
            self._count(step)
        return self._victims[step]

    def reduce(self, mean: Tensor, step: int) -> Tensor:
        """What to answer siblings instead of the slice ``mean`` [n] of the aggregate; -0 and 0 are the same."""
        if not self._plays(Attack.FALSE_REDUCTION, step) or not bool(mean.any()):
            return mean
        self._count(step)
        return -mean

    def withdraw(self, flat: Tensor) -> None:
        """Put the honest parameters back into ``flat`` [n], for the next update and its digest."""
        if self._honest is not None:
            with torch.no_grad():
                flat.copy_(self._honest)
            self._honest = None

    def inject(self, flat: Tensor, step: int) -> bool:
        """Falsify the parameters ``flat`` [n] in place, until ``withdraw``; once more in every third step.

        What is added is the same every time: signs that follow from the seed, times a size that follows from the
        norm of the parameters at the first injection. So the node goes on computing with parameters that are not
        its stage's, and claims the digest of those that are. Returns whether more was added in this step;
        parameters that are all zero, or not finite, are left alone.
        """
        if not self._plays(Attack.INJECT, step):
            return False
        more = (step - self.plan.from_step) % INJECT_EVERY_STEPS == 0 and self._size_injection(flat)
        self._injections += more
        if self._injections:
            self._honest = flat.detach().clone()
            self._add_injections(flat)
        if more:
            self._count(step)
        return more

    def _size_injection(self, flat: Tensor) -> bool:
        """Fix the size of what is added; false if there is nothing to measure it by."""
        if self._inject_scale is None:
            norm = float(torch.linalg.vector_norm(flat.detach(), dtype=torch.float64))
            if norm == 0.0 or not math.isfinite(norm):
                return False
            self._inject_scale = INJECT_NORM * norm / math.sqrt(flat.numel())
        return True

    @torch.no_grad()
    def _add_injections(self, flat: Tensor) -> None:
        assert self._inject_scale is not None
        generator = _generator(self._seed, "inject")
        for part in torch.split(flat, INJECT_CHUNK):
            # Drawn on the CPU, so that it is the same on every device.
            signs = torch.randint(0, 2, part.shape, generator=generator).mul_(2).sub_(1)
            part.add_(signs.to(device=part.device, dtype=part.dtype), alpha=self._injections * self._inject_scale)

    def _attacked(self, x: Tensor, side: _Side, step: int, received: Tensor | None) -> Tensor:
        attack = self.plan.attack
        if attack is Attack.DELAY:
            return side.past[0]
        if attack is Attack.STALE:
            return side.kept(x)
        if attack is Attack.IDENTITY:
            return torch.zeros_like(x) if received is None else received.detach().clone()
        if attack is Attack.DRIFT:
            amount = min(DRIFT_LIMIT, DRIFT_PER_STEP * (step - self.plan.from_step + 1))
            return drill_attacks.drift(x, amount, side.drift_direction(x.shape[-1]))
        if attack is Attack.INTERMITTENT:
            return -x if float(torch.rand((), generator=side.generator)) < INTERMITTENT_SHARE else x
        return drill_attacks.MEMORYLESS[attack](x, side.generator)

    def _plays(self, attack: Attack, step: int) -> bool:
        return self.plan.attack is attack and step >= self.plan.from_step

    def _count(self, step: int) -> None:
        # A colluder falsifies tensors in one thread and votes in another.
        with self._counting:
            self.attacked += 1
            if self.first_attack_step is None:
                self.first_attack_step = step


class _Side:
    """What a drill remembers of one direction."""

    def __init__(self, seed: bytes, direction: Direction) -> None:
        self.generator = _generator(seed, f"tensors:{direction}")
        self.past: deque[Tensor] = deque(maxlen=DELAY_MICROBATCHES)
        self._drawn = _generator(seed, f"drift:{direction}")
        self._first: Tensor | None = None
        self._drift: Tensor | None = None

    def kept(self, x: Tensor) -> Tensor:
        """The first tensor that was asked for."""
        if self._first is None:
            self._first = x.clone()
        return self._first

    def drift_direction(self, width: int) -> Tensor:
        """Always the same [width]."""
        if self._drift is None:
            self._drift = drill_attacks.unit_direction(width, self._drawn)
        return self._drift


def _generator(seed: bytes, purpose: str) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(_hash(seed, purpose)[:8], "big") >> 1)


def _hash(seed: bytes, purpose: str) -> bytes:
    return hashlib.sha256(b"sentinel:drill:" + purpose.encode() + b":" + seed).digest()
