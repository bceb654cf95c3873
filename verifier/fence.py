"""An adaptive Tukey fence: how large may the next value be, given the last accepted ones?

The fence keeps a sliding window of accepted values and allows up to ``Q3 + k * spread``, where the spread is
the interquartile range. Quartiles ignore up to a quarter of outliers in the window, which a mean and a
standard deviation would not. Four things make it fit for training:

*Log domain.* Distances are positive, skewed to the right, and their level moves by factors, not by amounts:
activations grow and gradients shrink by orders of magnitude in the first tens of steps. Their logarithms are
nearly symmetric, and a steady drift shows up as a spread in proportion, so the fence stretches with it.
Bounded quantities (a share, a cosine) do not drift by factors and are judged as they are.

*A floor under the spread.* A calm stretch of training makes the interquartile range arbitrarily small, and
the first ordinary microbatch after it would be flagged. The spread never counts as less than the floor.

*A multiplier that adapts to a budget.* k starts at its configured value and is never below it nor above
three times that. It cannot be tuned on flags: under attack most flags are right, and a fence that widens on
every flag is opened by the attacker. It is tuned on accepted values instead. If an honest value exceeds Q3
by more than u spreads with a probability that falls about exponentially in u, then one in ``1/rate`` exceeds
the fence when one in ``sqrt(1/rate)`` gets more than halfway to it. So each accepted value beyond half of k
raises k by 5 %, each other lowers it by just so much that the two balance at that frequency.

*Minimum history.* Until the window holds enough values, nothing exceeds.

Pure and deterministic; values are plain floats.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from enum import StrEnum

MULTIPLIER_STEP = 1.05
"""Factor on k for one accepted value that came too near: fourteen in a row double it."""

MULTIPLIER_RANGE = 3.0
"""k stays within [k0, 3 * k0]: an attacker who feeds near misses gains a bounded amount of room."""

SMALLEST = 1e-30
"""Stands for zero in the log domain."""


class Domain(StrEnum):
    """The scale on which values are compared."""

    LOG = "log"
    LINEAR = "linear"


class Fence:
    """Upper fence, and with ``two_sided`` also a lower one, over a window of accepted values."""

    def __init__(
        self,
        *,
        domain: Domain,
        spread_floor: float,
        window: int,
        minimum_history: int,
        multiplier: float,
        target_rate: float,
        two_sided: bool = False,
    ) -> None:
        """``spread_floor`` is in units of the domain; ``target_rate`` is the wanted share of honest values
        that exceed."""
        self._domain = domain
        self._spread_floor = spread_floor
        self._minimum_history = minimum_history
        self._base_multiplier = multiplier
        self._two_sided = two_sided
        near = math.sqrt(target_rate)
        self._relax = MULTIPLIER_STEP ** (-near / (1.0 - near))
        self._multiplier = multiplier
        self._arrivals: deque[float] = deque(maxlen=window)
        self._ordered: list[float] = []

    @property
    def multiplier(self) -> float:
        """The current k."""
        return self._multiplier

    @property
    def ready(self) -> bool:
        """Whether there is enough history to judge by."""
        return len(self._ordered) >= self._minimum_history

    def __len__(self) -> int:
        """Accepted values in the window."""
        return len(self._ordered)

    def limit(self) -> float:
        """The largest value that passes; infinite before the minimum history."""
        if not self.ready:
            return math.inf
        _, upper, spread = self._quartiles()
        return self._outward(upper + self._multiplier * spread)

    def lower_limit(self) -> float:
        """The smallest value that passes; minus infinity if one-sided or before the minimum history."""
        if not (self._two_sided and self.ready):
            return -math.inf
        lower, _, spread = self._quartiles()
        return self._outward(lower - self._multiplier * spread)

    def exceeds(self, value: float) -> bool:
        """Whether ``value`` lies outside the fence. NaN always does, once there is a fence."""
        return self.ready and not self.lower_limit() <= value <= self.limit()

    def score(self, value: float) -> float:
        """How far out ``value`` lies, as a share of what is allowed: above 1 exactly when it exceeds.

        One-sided: value over limit. Two-sided: distance from the middle of the fence over its half-width.
        0.0 before the minimum history.
        """
        if not self.ready:
            return 0.0
        limit = self.limit()
        if not self._two_sided:
            return value / limit
        low = self.lower_limit()
        return abs(2 * value - limit - low) / (limit - low)

    def push(self, value: float) -> None:
        """Take an accepted value into the window. Raises ValueError unless it is finite."""
        if not math.isfinite(value):
            raise ValueError(f"a fence takes finite values only, got {value}")
        inward = self._inward(value)
        if self.ready:
            self._adapt(inward)
        if len(self._arrivals) == self._arrivals.maxlen:
            del self._ordered[bisect_left(self._ordered, self._arrivals[0])]
        self._arrivals.append(inward)
        insort(self._ordered, inward)

    def _adapt(self, inward: float) -> None:
        lower, upper, spread = self._quartiles()
        excess = (inward - upper) / spread
        if self._two_sided:
            excess = max(excess, (lower - inward) / spread)
        factor = MULTIPLIER_STEP if excess > self._multiplier / 2 else self._relax
        ceiling = MULTIPLIER_RANGE * self._base_multiplier
        self._multiplier = min(ceiling, max(self._base_multiplier, self._multiplier * factor))

    def _quartiles(self) -> tuple[float, float, float]:
        """First and third quartile and the spread, in the domain."""
        lower, upper = _quantile(self._ordered, 0.25), _quantile(self._ordered, 0.75)
        return lower, upper, max(upper - lower, self._spread_floor)

    def _inward(self, value: float) -> float:
        return math.log(max(value, SMALLEST)) if self._domain is Domain.LOG else value

    def _outward(self, inward: float) -> float:
        return math.exp(min(inward, 700.0)) if self._domain is Domain.LOG else inward


def _quantile(ordered: list[float], share: float) -> float:
    """Quantile with linear interpolation between the two nearest of the sorted values."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)
