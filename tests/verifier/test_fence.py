"""The adaptive Tukey fence."""

import math
from collections.abc import Iterable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from verifier.fence import MULTIPLIER_RANGE, Domain, Fence

positive = st.floats(1e-6, 1e6)
histories = st.lists(positive, min_size=4, max_size=60)


def fence(values: Iterable[float] = (), *, domain: Domain = Domain.LOG, **settings: object) -> Fence:
    defaults: dict[str, object] = {
        "spread_floor": 0.1,
        "window": 64,
        "minimum_history": 4,
        "multiplier": 3.0,
        "target_rate": 0.001,
    }
    made = Fence(domain=domain, **(defaults | settings))  # type: ignore[arg-type]
    for value in values:
        made.push(value)
    return made


def test_nothing_exceeds_before_the_minimum_history() -> None:
    young = fence([1.0, 1.0, 1.0], two_sided=True)
    assert not young.ready
    assert (young.lower_limit(), young.limit()) == (-math.inf, math.inf)
    assert not young.exceeds(1e300)
    assert not young.exceeds(math.nan)
    assert young.score(1e300) == 0.0


def test_a_linear_fence_is_tukeys() -> None:
    made = fence([0.0, 1.0, 2.0, 3.0, 4.0], domain=Domain.LINEAR, two_sided=True)
    assert made.limit() == 3.0 + 3.0 * 2.0
    assert made.lower_limit() == 1.0 - 3.0 * 2.0
    assert not made.exceeds(9.0)
    assert made.exceeds(9.1)
    assert made.exceeds(-5.1)
    assert made.exceeds(math.nan)
    assert made.exceeds(math.inf)


def test_a_log_fence_multiplies() -> None:
    made = fence([1.0, 1.0, 1.0, 1.0], spread_floor=math.log(2.0))
    assert made.limit() == pytest.approx(8.0)
    assert made.lower_limit() == -math.inf
    assert not made.exceeds(0.0)


def test_a_calm_history_does_not_make_a_thin_fence() -> None:
    made = fence([5.0] * 20, domain=Domain.LINEAR, spread_floor=0.05)
    assert made.limit() == pytest.approx(5.15)


def test_zero_has_a_place_in_the_log_domain() -> None:
    made = fence([0.0] * 8)
    assert 0.0 < made.limit() < 1e-20


def test_a_fence_far_out_does_not_overflow() -> None:
    assert fence([1e-30, 1e-30, 1e300, 1e300]).limit() == pytest.approx(math.exp(700.0))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_finite_values_enter(value: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        fence().push(value)


def test_the_window_forgets() -> None:
    made = fence([100.0] * 8 + [1.0] * 8, window=8)
    assert len(made) == 8
    assert made.limit() == pytest.approx(math.exp(0.3))


def test_a_quarter_of_outliers_does_not_move_the_fence() -> None:
    clean = fence([1.0] * 12, multiplier=3.0)
    assert fence([1e6] * 3 + [1.0] * 12).limit() == pytest.approx(clean.limit())


def test_near_misses_raise_the_multiplier_up_to_its_bound() -> None:
    made = fence([1.0] * 12, window=64)
    assert made.multiplier == 3.0
    for _ in range(10):
        made.push(made.limit() * 0.999)
    assert 3.0 < made.multiplier <= 3.0 * MULTIPLIER_RANGE
    risen = made.multiplier
    for _ in range(200):
        made.push(1.0)
    assert 3.0 <= made.multiplier < risen


def test_near_misses_below_a_two_sided_fence_count_as_well() -> None:
    made = fence([1.0] * 12, domain=Domain.LINEAR, two_sided=True)
    made.push(made.lower_limit() * 1.001)
    assert made.multiplier > 3.0


def test_the_multiplier_holds_the_budget_on_a_heavy_tail() -> None:
    # Exponential values by inversion over a shuffled grid: their tail is heavier than Tukey's k foresees.
    shares = [((i * 7919) % 20011 + 0.5) / 20011 for i in range(20011)]
    made = fence(domain=Domain.LINEAR, window=256, minimum_history=24, spread_floor=0.01)
    flags = 0
    for share in shares:
        value = -math.log(share)
        if made.exceeds(value):
            flags += 1
        else:
            made.push(value)
    assert flags / len(shares) < 0.004
    plain = [v for v in (-math.log(s) for s in shares) if v > math.log(4) + 3.0 * math.log(3)]
    assert flags < len(plain) / 2


@given(history=histories, value=positive)
def test_score_and_exceeds_agree(history: list[float], value: float) -> None:
    for two_sided in (False, True):
        made = fence(history, two_sided=two_sided, domain=Domain.LINEAR)
        assume(abs(made.score(value) - 1.0) > 1e-9)
        if made.limit() > 0:
            assert made.exceeds(value) == (made.score(value) > 1.0)


@given(history=histories, low=positive, high=positive)
def test_what_lies_farther_out_is_not_judged_milder(history: list[float], low: float, high: float) -> None:
    made = fence(history)
    low, high = sorted((low, high))
    assert made.exceeds(low) <= made.exceeds(high)
    assert made.score(low) <= made.score(high)


@given(history=histories, factor=st.floats(1e-3, 1e3))
def test_a_log_fence_follows_the_scale(history: list[float], factor: float) -> None:
    plain, scaled = fence(history), fence(value * factor for value in history)
    assert scaled.limit() == pytest.approx(plain.limit() * factor, rel=1e-6)


@given(history=st.lists(positive, min_size=4, max_size=60))
def test_no_fence_cuts_off_its_own_third_quartile(history: list[float]) -> None:
    made = fence(history)
    below = sum(value <= made.limit() for value in history)
    assert 4 * below >= 3 * len(history)


@given(history=histories, larger=st.floats(0.0, 5.0))
def test_a_larger_floor_never_narrows(history: list[float], larger: float) -> None:
    assert fence(history, spread_floor=0.1 + larger, multiplier=3.0).limit() >= 0.0
    values = [math.log(v) for v in history]
    narrow = fence(values, domain=Domain.LINEAR, spread_floor=1e9, two_sided=True)
    wide = fence(values, domain=Domain.LINEAR, spread_floor=1e9 + larger, two_sided=True)
    assert wide.limit() >= narrow.limit()
    assert wide.lower_limit() <= narrow.lower_limit()
