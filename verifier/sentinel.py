"""The checker of one stage boundary in one direction: does this tensor look like the others?

One instance per boundary and direction that a node receives on. The life of a tensor:

1. ``judge`` compares it with the baseline and the fences, and changes nothing. The caller may learn
   meanwhile that the microbatch was tainted elsewhere, and drop the observation.
2. ``accept`` takes the observation of a tensor that was used: its distances enter the fences' windows, its
   reduction waits in the step's pool. What was flagged never enters, unless a replica confirmed it.
3. ``end_step`` folds the mean of the pool into the baseline.

A tensor is flagged if ``votes`` statistics exceed their fences. One is enough unless told otherwise: each
attack shows in few of them (a bias in the means, noise in the cloud, a replay only against the sender's own
input), so a rule that asks for more loses recall (docs/settings.md).

Until the warm-up has passed everything is accepted that is finite, and builds the history. A baseline
describes a network that changes slowly: after a jump of the parameters (restored from an older checkpoint)
build a new checker instead of letting the old one flag everybody.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from torch import Tensor

from verifier import distances
from verifier.config import CheckerConfig
from verifier.distances import Reduction
from verifier.fence import Domain, Fence
from verifier.sketch import cosine, gain
from verifier.verdicts import Direction, Reason, Verdict

DISTANCES: Mapping[Reason, Callable[[Reduction, Reduction], float]] = {
    Reason.L1: distances.mean_absolute,
    Reason.L2: distances.normalised_l2,
    Reason.SIGN_FLIP: distances.sign_flip_ratio,
    Reason.WASSERSTEIN: distances.sliced_wasserstein,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Fencing:
    """How one statistic is fenced."""

    domain: Domain
    spread_floor: float
    """Least spread, in units of the domain."""

    two_sided: bool = False


FENCING: Mapping[Direction, Mapping[Reason, Fencing]] = {
    Direction.ACTIVATION: {
        Reason.L1: Fencing(domain=Domain.LOG, spread_floor=0.3),
        Reason.L2: Fencing(domain=Domain.LOG, spread_floor=0.3),
        Reason.SIGN_FLIP: Fencing(domain=Domain.LINEAR, spread_floor=0.14),
        Reason.WASSERSTEIN: Fencing(domain=Domain.LOG, spread_floor=0.3),
        Reason.CONTINUITY: Fencing(domain=Domain.LINEAR, spread_floor=0.08),
        Reason.GAIN: Fencing(domain=Domain.LINEAR, spread_floor=0.18, two_sided=True),
    },
    Direction.GRADIENT: {
        Reason.L1: Fencing(domain=Domain.LOG, spread_floor=0.8),
        Reason.L2: Fencing(domain=Domain.LOG, spread_floor=0.8),
        Reason.SIGN_FLIP: Fencing(domain=Domain.LINEAR, spread_floor=0.15),
        Reason.WASSERSTEIN: Fencing(domain=Domain.LOG, spread_floor=0.6),
        Reason.CONTINUITY: Fencing(domain=Domain.LINEAR, spread_floor=0.1),
        Reason.GAIN: Fencing(domain=Domain.LINEAR, spread_floor=0.26, two_sided=True),
    },
}
"""Floors measured on honest training of small Llama-like stacks: widths 64 and 128, learning rates 1e-3 to
1e-2, 2 to 8 microbatches a step, the first hundreds of steps; and in whole swarms by ``benchmarks.honest``. They
keep refusals of honest tensors below 0.1 %. Narrower ones would catch a few attacks more (a bias), which audits
find anyway, at ten times the false alarms. A floor of 0.3 in the log domain lets a distance grow 2.5 times beyond
its third quartile before it is flagged. Gradients have wider ones: the mean of a gradient over tokens is a small
difference of large numbers, and now and then a few rare tokens decide it."""

RAMP_STEPS = 10
"""The weight of the old baseline is at most (1 + n) / (RAMP_STEPS + n) after n steps. An average with its
full memory from the start lags ten steps behind a network that changes by factors in as many; the lag would
fill the windows with distances that blind the fences for a hundred steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What ``judge`` saw of one tensor, to be handed to ``accept`` if the tensor is used."""

    step: int
    reduction: Reduction | None
    """None in mode ``off``, and for a tensor over the norm bound, of which nothing is learnt even if it is right."""

    values: Mapping[Reason, float]
    """Raw statistics, before any fence."""

    flagged: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """A verdict and the observation behind it."""

    verdict: Verdict
    observation: Observation


class BoundaryChecker:
    """Baseline, fences and warm-up of one boundary and direction."""

    def __init__(self, config: CheckerConfig, direction: Direction, *, seed: int) -> None:
        """``seed`` fixes the projections of the Wasserstein distance.

        Nodes that share baselines need the same one; it should be unknown to those who are judged.
        """
        self._config = config
        self._seed = seed
        self._beta = config.ema_activation if direction is Direction.ACTIVATION else config.ema_gradient
        self._fences = {
            reason: Fence(
                domain=fencing.domain,
                spread_floor=fencing.spread_floor,
                two_sided=fencing.two_sided,
                window=config.window,
                minimum_history=config.minimum_history,
                multiplier=config.fence_multiplier,
                target_rate=config.target_false_positive_rate,
            )
            for reason, fencing in FENCING[direction].items()
        }
        self._directions: Tensor | None = None
        self._baseline: Reduction | None = None
        self._pool: Reduction | None = None
        self._pooled = 0
        self._folded_steps = 0
        self._last_step = -1

    @property
    def warming_up(self) -> bool:
        """Whether the baseline is still being built."""
        return self._folded_steps < self._config.warmup_steps or not self._fences[Reason.L1].ready

    def judge(
        self, tensor: Tensor, *, step: int, sketch: Tensor | None, input_sketch: Tensor | None, rms: float = 0.0
    ) -> Judgement:
        """Judge a tensor [B, T, d] that has passed the guards. Changes nothing.

        ``rms`` is the root mean square of its entries. Over the norm bound it is flagged, even during the warm-up.
        It is a flag and no guard, since an honest peer sends such a gradient where its input was near zero.

        ``sketch`` is that of the tensor, ``input_sketch`` that of what its sender received for the same
        microbatch, signed by *its* sender; without both (the sender sits at an end of the pipeline), or
        with the setting ``sketches`` off, continuity and gain are not judged. A non-finite statistic is
        refused even during the warm-up.
        """
        if self._config.mode == "off":
            return Judgement(
                verdict=Verdict(accepted=True),
                observation=Observation(step=step, reduction=None, values={}, flagged=False),
            )
        if rms > self._config.norm_bound:
            return self._oversize(step, rms)
        return self.judge_reduced(self.reduce(tensor), step=step, sketch=sketch, input_sketch=input_sketch)

    def _oversize(self, step: int, rms: float) -> Judgement:
        return Judgement(
            verdict=Verdict(
                accepted=False,
                reasons=(Reason.NORM,),
                scores={str(Reason.NORM): rms / self._config.norm_bound},
                warming_up=self.warming_up,
            ),
            observation=Observation(step=step, reduction=None, values={}, flagged=True),
        )

    def reduce(self, tensor: Tensor) -> Reduction:
        """All that the distances need of a tensor [B, T, d]."""
        return distances.reduce(tensor, self._unit_directions(tensor.shape[-1]), axes=self._config.reduction)

    def judge_reduced(
        self, reduction: Reduction, *, step: int, sketch: Tensor | None, input_sketch: Tensor | None
    ) -> Judgement:
        """``judge`` of a tensor that ``reduce`` has reduced, in any mode: one reduction can be judged many times."""
        values = self._statistics(reduction, sketch, input_sketch)
        verdict = self._verdict(reduction, values)
        observation = Observation(step=step, reduction=reduction, values=values, flagged=not verdict.accepted)
        return Judgement(verdict=verdict, observation=observation)

    def accept(self, observation: Observation, *, confirmed: bool = False) -> None:
        """Let the observation of a used tensor enter windows and pool. Raises ValueError if it was flagged.

        ``confirmed`` lets a flagged one in: another replica computed the same tensor, so it is the network that
        has changed, not the peer. Without this way out a sudden change would be flagged for ever, since what
        is flagged cannot move the fences. An observation that comes after its step has ended is left out: it
        was measured against an older baseline.
        """
        if observation.flagged and not confirmed:
            raise ValueError("a flagged tensor never enters the baseline unless a replica confirmed it")
        if observation.reduction is None or observation.step <= self._last_step:
            return
        if confirmed and not _finite(observation.reduction, observation.values):
            raise ValueError("a tensor that is not finite never enters the baseline, whoever confirms it")
        for reason, value in observation.values.items():
            self._fences[reason].push(value)
        reduction = observation.reduction
        self._pool = reduction if self._pool is None else self._pool.plus(reduction)
        self._pooled += 1

    def end_step(self, step: int) -> None:
        """Fold what was accepted since the last call into the baseline. A step that was ended stays ended."""
        if self._pool is None or step <= self._last_step:
            return
        mean = self._pool.scaled(1.0 / self._pooled)
        beta = min(self._beta, (1 + self._folded_steps) / (RAMP_STEPS + self._folded_steps))
        self._baseline = mean if self._baseline is None else self._baseline.scaled(beta).plus(mean.scaled(1.0 - beta))
        self._pool, self._pooled = None, 0
        self._folded_steps += 1
        self._last_step = step

    def baseline(self) -> Reduction | None:
        """The current baseline, None before the first step has ended."""
        return self._baseline

    def set_baseline(self, baseline: Reduction) -> None:
        """Replace the baseline, for instance by the median over siblings.

        Raises ValueError if it is not finite or not shaped like the present one.
        """
        present = self._baseline
        if present is not None and (
            present.mean.shape != baseline.mean.shape or present.quantiles.shape != baseline.quantiles.shape
        ):
            raise ValueError("the new baseline belongs to a boundary of another shape")
        if not baseline.is_finite():
            raise ValueError("the new baseline has entries that are not finite")
        self._baseline = baseline

    def _unit_directions(self, width: int) -> Tensor:
        if self._directions is None:
            self._directions = distances.unit_directions(width, seed=self._seed)
        return self._directions

    def _statistics(
        self, reduction: Reduction, sketch: Tensor | None, input_sketch: Tensor | None
    ) -> dict[Reason, float]:
        values: dict[Reason, float] = {}
        if self._baseline is not None:
            values.update({reason: of(reduction, self._baseline) for reason, of in DISTANCES.items()})
        if self._config.sketches and sketch is not None and input_sketch is not None:
            values[Reason.CONTINUITY] = 1.0 - cosine(sketch, input_sketch)
            values[Reason.GAIN] = gain(sketch, input_sketch)
        return values

    def _verdict(self, reduction: Reduction, values: Mapping[Reason, float]) -> Verdict:
        warming_up = self.warming_up
        if not _finite(reduction, values):
            return Verdict(accepted=False, reasons=(Reason.NON_FINITE,), warming_up=warming_up)
        if warming_up:
            return Verdict(accepted=True, warming_up=True)
        fenced = {reason: self._fences[reason] for reason in values if self._fences[reason].ready}
        exceeded = tuple(reason for reason, fence in fenced.items() if fence.exceeds(values[reason]))
        scores = {str(reason): fence.score(values[reason]) for reason, fence in fenced.items()}
        flagged = len(exceeded) >= self._config.votes
        return Verdict(accepted=not flagged, reasons=exceeded if flagged else (), scores=scores)


def _finite(reduction: Reduction, values: Mapping[Reason, float]) -> bool:
    return reduction.is_finite() and all(map(math.isfinite, values.values()))
