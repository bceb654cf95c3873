"""Every threshold of the checker, with its unit and where it comes from. Without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Mode = Literal["enforce", "observe", "off"]
"""``enforce`` acts on verdicts; ``observe`` judges and reports but bars nobody; ``off`` judges nothing."""

MODES: tuple[Mode, ...] = ("enforce", "observe", "off")

Axes = Literal["tokens", "sequences", "none"]
"""What the baseline of the means is a mean over, for a tensor [B, T, d]: ``tokens`` over sequences and tokens, one
value for each feature, [d]; ``sequences`` over the sequences of the microbatch, one for each position and feature,
[T, d]; ``none`` over nothing but microbatches and steps, [B, T, d]."""

AXES: tuple[Axes, ...] = ("tokens", "sequences", "none")

MAX_VOTES = 4
"""The ends of the pipeline are judged by four statistics: a rule that asks for more would never flag them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckerConfig:
    """Settings of the checker, the same on every node of a swarm. Raises ValueError with the remedy."""

    mode: Mode = "enforce"
    """What verdicts lead to, see ``Mode``."""

    warmup_steps: int = 20
    """Optimizer steps during which the baselines are built and only the guards refuse. The learning-rate
    warm-up (10 steps unless told) moves activations by factors per step, so checking starts after it; the
    paper spends a fifth of its run on this."""

    ema_activation: float = 0.9
    """Weight of the old value in the baseline of activations, per step (beta_h of the paper)."""

    ema_gradient: float = 0.8
    """Weight of the old value in the baseline of gradients, per step (beta_g of the paper)."""

    reduction: Axes = "tokens"
    """What L1, L2 and sign flips compare, see ``Axes``; the sliced Wasserstein distance stays with the cloud of
    tokens. The paper's text that was at hand does not say; docs/settings.md has what was measured."""

    votes: int = 1
    """Statistics that must exceed their fence for a flag, in 1 to 4. 1: any of them, since each attack shows in few
    (measured: docs/settings.md)."""

    sketches: bool = True
    """Whether continuity and gain, which need the sketch of what the sender received, are judged. False leaves the
    paper's four distances alone. Sketches travel all the same: replicas are compared by them."""

    window: int = 128
    """Accepted values a fence looks back on, in messages. Enough for steady quartiles, and short enough that
    the storm of the first steps has left it a few tens of steps later (measured: tests/verifier)."""

    minimum_history: int = 24
    """Accepted values before a fence judges at all: six per quartile."""

    fence_multiplier: float = 3.0
    """k0 in Q3 + k * spread: 3 is Tukey's "far out". It adapts between k0 and 3 * k0."""

    target_false_positive_rate: float = 0.001
    """Share of honest messages that each statistic may flag; k adapts to hold it. The paper aims below 1 %;
    strikes leak far faster than 0.1 % of flags can pile them up."""

    strike_limit: float = 3.0
    """Strikes at which a peer is quarantined. Measured, as are the window and the multiplier: docs/settings.md."""

    statistical_strikes_per_step: float = 1.0
    """Most strikes that statistics can give one peer within one step. All microbatches of a step see the same
    parameters, so when the loss jumps, all honest gradients of that step leave the fence together (measured:
    ten times their norm, for one step); they count as one event. An attacker lasts four steps: some leaks."""

    strike_decay: float = 0.1
    """Strikes that a suspect loses per step. Honest: 16 messages a step at 0.1 % earn 0.016 a step."""

    ejection_seconds: float = 3600.0
    """Longest time an ejection lasts, in seconds; longer ones are cut to it."""

    release_after_steps: int | None = None
    """Steps after which a quarantine ends by itself; None: only when released."""

    trusted_after: int = 32
    """Accepted microbatches that lead from probation to trusted."""

    max_peers: int = 4096
    """Peers the ledger remembers. Identities cost nothing, so the memory must have an end."""

    norm_bound: float = 1e4
    """Largest root mean square of a tensor's entries. Trained residual streams stay below 1e2."""

    sketch_size: int = 512
    """Entries of a sketch, 2 KiB as float32. Cosines err by about 1/sqrt(512) = 0.044."""

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"verifier mode is one of {', '.join(MODES)}, got {self.mode!r}")
        if self.reduction not in AXES:
            raise ValueError(f"reduction is one of {', '.join(AXES)}, got {self.reduction!r}")
        if not 1 <= self.votes <= MAX_VOTES:
            raise ValueError(f"votes counts statistics, 1 to {MAX_VOTES}, got {self.votes}")
        for name in ("ema_activation", "ema_gradient"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} weighs the old value and lies in [0, 1), got {getattr(self, name)}")
        if not 0.0 < self.target_false_positive_rate < 0.25:
            raise ValueError(
                f"target_false_positive_rate is a share of messages in (0, 0.25), got {self.target_false_positive_rate}"
            )
        for name in ("minimum_history", "trusted_after", "max_peers", "sketch_size"):
            _require_positive(name, getattr(self, name))
        for name in ("fence_multiplier", "strike_limit", "strike_decay", "ejection_seconds", "norm_bound"):
            _require_positive(name, getattr(self, name))
        _require_positive("statistical_strikes_per_step", self.statistical_strikes_per_step)
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps counts steps and cannot be negative, got {self.warmup_steps}")
        if self.window < self.minimum_history:
            raise ValueError(
                f"window ({self.window}) must hold the minimum_history ({self.minimum_history}): raise window"
            )
        if self.release_after_steps is not None:
            _require_positive("release_after_steps", self.release_after_steps)


def _require_positive(name: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} must be a positive number, got {value}")
