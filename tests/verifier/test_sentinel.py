"""The checker of one boundary, on made-up traffic."""

import math

import pytest
import torch
from torch import Tensor

from verifier.baselines import pack_reduction, unpack_reduction
from verifier.config import AXES, Axes, CheckerConfig
from verifier.distances import Reduction
from verifier.sentinel import FENCING, RAMP_STEPS, BoundaryChecker, Judgement
from verifier.sketch import sketch
from verifier.verdicts import Direction, Reason

SHAPE = (2, 16, 32)
SETTINGS = {"warmup_steps": 3, "minimum_history": 8}
STATISTICS = {"l1", "l2", "sign_flip", "wasserstein"}


def make(direction: Direction = Direction.ACTIVATION, **settings: object) -> BoundaryChecker:
    return BoundaryChecker(CheckerConfig(**(SETTINGS | settings)), direction, seed=1)  # type: ignore[arg-type]


def tensor(number: int, *, shift: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randn(SHAPE, generator=generator) + shift


def judge(checker: BoundaryChecker, value: Tensor, *, step: int = 0, source: Tensor | None = None) -> Judgement:
    key = bytes(32)
    sketches = (sketch(t, key=key, size=128) if t is not None else None for t in (value, source))
    mine, theirs = sketches
    return checker.judge(value, step=step, sketch=mine, input_sketch=theirs)


def run(checker: BoundaryChecker, steps: int, *, first: int = 0, per_step: int = 4) -> None:
    """Honest steps: each output is its input plus a little."""
    for step in range(first, first + steps):
        for number in range(per_step):
            source = tensor(1000 * step + number)
            value = source + 0.3 * tensor(1000 * step + number + 500, shift=0.0)
            checker.accept(judge(checker, value, step=step, source=source).observation)
        checker.end_step(step)


def test_nothing_but_nonsense_is_refused_during_the_warm_up() -> None:
    checker = make()
    run(checker, 2)
    wild = judge(checker, tensor(7) * 1e3).verdict
    assert checker.warming_up
    assert (wild.accepted, wild.warming_up, wild.reasons, dict(wild.scores)) == (True, True, (), {})
    broken = judge(checker, tensor(7) * math.nan).verdict
    assert (broken.accepted, broken.reasons, broken.warming_up) == (False, (Reason.NON_FINITE,), True)


def test_the_warm_up_needs_steps_and_history() -> None:
    few = make(minimum_history=50, window=64)
    run(few, 5)
    assert few.warming_up
    enough = make()
    run(enough, 3)
    assert not enough.warming_up


def test_an_honest_tensor_passes_with_a_score_for_each_statistic() -> None:
    checker = make()
    run(checker, 8)
    source = tensor(77)
    verdict = judge(checker, source + 0.3 * tensor(78, shift=0.0), step=8, source=source).verdict
    assert verdict.accepted
    assert set(verdict.scores) == STATISTICS | {"continuity", "gain"}
    assert all(0.0 <= score <= 1.0 for score in verdict.scores.values())


def test_an_edge_stage_is_judged_without_its_input() -> None:
    checker = make()
    run(checker, 8)
    assert set(judge(checker, tensor(5), step=8).verdict.scores) == STATISTICS


@pytest.mark.parametrize(
    ("attack", "reason"),
    [
        (lambda x: x + 5.0, Reason.L1),
        (lambda x: x * 10.0, Reason.L2),
        (lambda x: -x, Reason.SIGN_FLIP),
        (lambda x: x + 5.0 * tensor(9, shift=0.0), Reason.WASSERSTEIN),
        (lambda x: tensor(10), Reason.CONTINUITY),
        (lambda x: x * 3.0, Reason.GAIN),
        (lambda x: x / 3.0, Reason.GAIN),
        (lambda x: torch.zeros_like(x), Reason.CONTINUITY),
    ],
)
def test_each_attack_shows_where_it_should(attack: object, reason: Reason) -> None:
    checker = make()
    run(checker, 12)
    source = tensor(77)
    honest = source + 0.3 * tensor(78, shift=0.0)
    verdict = judge(checker, attack(honest), step=12, source=source).verdict  # type: ignore[operator]
    assert not verdict.accepted
    assert reason in verdict.reasons
    assert verdict.scores[reason] > 1.0


def test_a_flag_needs_as_many_votes_as_the_setting_says() -> None:
    source = tensor(77)
    honest = source + 0.3 * tensor(78, shift=0.0)
    found = {}
    for votes in (1, 2, 3, 4):
        checker = make(votes=votes)
        run(checker, 12)
        found[votes] = judge(checker, honest + 5.0, step=12, source=source).verdict
    beyond = {Reason(name) for name, score in found[1].scores.items() if score > 1.0}
    assert beyond == {Reason.L1, Reason.L2, Reason.WASSERSTEIN}
    for votes, verdict in found.items():
        assert verdict.accepted is (votes > len(beyond))
        assert set(verdict.reasons) == (beyond if votes <= len(beyond) else set())
        assert verdict.scores == found[1].scores  # what was outvoted can still be seen
    lonely = make(votes=2)
    run(lonely, 12)
    assert judge(lonely, tensor(10), step=12, source=source).verdict.accepted  # a replay: continuity alone
    broken = judge(lonely, honest * math.nan, step=12, source=source).verdict
    assert broken.reasons == (Reason.NON_FINITE,)  # takes no vote


def test_without_sketches_the_four_distances_judge_alone() -> None:
    checker = make(sketches=False)
    run(checker, 12)
    source = tensor(77)
    verdict = judge(checker, tensor(10), step=12, source=source).verdict
    assert set(verdict.scores) == STATISTICS
    assert verdict.accepted  # a replay looks like any other tensor
    assert not judge(checker, tensor(10) * 10.0, step=12, source=source).verdict.accepted
    with_sketches = make()
    run(with_sketches, 12)
    assert judge(with_sketches, tensor(10), step=12, source=source).verdict.reasons == (Reason.CONTINUITY,)


@pytest.mark.parametrize(("axes", "entries"), [("tokens", 32), ("sequences", 16 * 32), ("none", 2 * 16 * 32)])
def test_the_baseline_is_a_mean_over_the_axes_of_the_setting(axes: str, entries: int) -> None:
    checker = make(reduction=axes)
    run(checker, 12)
    baseline = checker.baseline()
    assert baseline is not None
    assert baseline.mean.shape == (entries,)
    source = tensor(77)
    honest = source + 0.3 * tensor(78, shift=0.0)
    assert judge(checker, honest, step=12, source=source).verdict.accepted
    assert {Reason.L1, Reason.L2, Reason.SIGN_FLIP} <= set(judge(checker, honest * -10.0, step=12).verdict.reasons)


@pytest.mark.parametrize("axes", AXES)
def test_a_baseline_of_any_axes_can_be_sent_to_siblings(axes: Axes) -> None:
    checker = make(reduction=axes)
    run(checker, 2)
    baseline = checker.baseline()
    assert baseline is not None
    received = unpack_reduction(pack_reduction(baseline), like=baseline)
    assert torch.equal(received.mean, baseline.mean)
    checker.set_baseline(received)


def test_one_reduction_can_be_judged_many_times() -> None:
    checker, other = make(), make(fence_multiplier=6.0)
    run(checker, 8)
    run(other, 8)
    reduction = checker.reduce(tensor(5) * 2.0)
    for each in (checker, other):
        apart = each.judge_reduced(reduction, step=8, sketch=None, input_sketch=None).verdict
        assert apart == judge(each, tensor(5) * 2.0, step=8).verdict


def test_judging_changes_nothing() -> None:
    checker = make()
    run(checker, 8)
    first = judge(checker, tensor(5), step=8).verdict
    for number in range(50):
        judge(checker, tensor(number) * 100, step=8)
    assert judge(checker, tensor(5), step=8).verdict == first


def test_what_was_flagged_never_enters() -> None:
    checker = make()
    run(checker, 8)
    flagged = judge(checker, tensor(5) * 100, step=8)
    with pytest.raises(ValueError, match="flagged"):
        checker.accept(flagged.observation)


def test_what_a_replica_confirmed_enters_although_it_was_flagged() -> None:
    checker = make()
    run(checker, 8)
    changed = [judge(checker, tensor(number) * 20, step=8) for number in range(100)]
    assert not any(judgement.verdict.accepted for judgement in changed)
    for judgement in changed:
        checker.accept(judgement.observation, confirmed=True)
    assert judge(checker, tensor(500) * 20, step=8).verdict.accepted
    nonsense = judge(checker, tensor(1) * math.nan, step=8)
    with pytest.raises(ValueError, match="not finite"):
        checker.accept(nonsense.observation, confirmed=True)


def test_a_poisoned_sketch_is_refused_before_it_reaches_a_window() -> None:
    checker = make()
    bad = torch.full((128,), math.nan)
    verdict = checker.judge(tensor(1), step=0, sketch=bad, input_sketch=torch.ones(128)).verdict
    assert verdict.reasons == (Reason.NON_FINITE,)


@pytest.mark.parametrize(("direction", "old"), [(Direction.ACTIVATION, 0.9), (Direction.GRADIENT, 0.8)])
def test_the_baseline_is_the_mean_of_a_step_weighed_against_the_old(direction: Direction, old: float) -> None:
    checker = make(direction)
    assert checker.baseline() is None
    for step in range(200):
        checker.accept(judge(checker, torch.full(SHAPE, 1.0), step=step).observation)
        checker.end_step(step)
    for value in (2.0, 4.0):
        # Accepted by fiat: an observation is what a judgement says, and the warm-up of a twin says yes.
        twin = make(direction)
        checker.accept(judge(twin, torch.full(SHAPE, value), step=200).observation)
    checker.end_step(200)
    baseline = checker.baseline()
    assert baseline is not None
    assert baseline.mean.tolist() == pytest.approx([old * 1.0 + (1 - old) * 3.0] * SHAPE[-1])


def test_the_memory_of_the_baseline_grows_from_nothing() -> None:
    checker = make()
    for step, value in enumerate((1.0, 2.0)):
        checker.accept(judge(checker, torch.full(SHAPE, value), step=step).observation)
        checker.end_step(step)
    old = 2 / (RAMP_STEPS + 1)
    baseline = checker.baseline()
    assert baseline is not None
    assert baseline.mean.tolist() == pytest.approx([old * 1.0 + (1 - old) * 2.0] * SHAPE[-1])


def test_a_step_ends_once_and_what_comes_later_is_left_out() -> None:
    checker = make()
    run(checker, 2)
    before = checker.baseline()
    checker.accept(judge(checker, tensor(3) * 50, step=1).observation)
    checker.end_step(1)
    checker.end_step(2)
    assert checker.baseline() is before


def test_a_step_without_traffic_leaves_the_baseline() -> None:
    checker = make()
    run(checker, 4)
    before = checker.baseline()
    checker.end_step(10)
    assert checker.baseline() is before


def test_baselines_are_exchanged_only_if_they_fit() -> None:
    checker = make()
    run(checker, 2)
    present = checker.baseline()
    assert present is not None
    checker.set_baseline(present.scaled(2.0))
    doubled = checker.baseline()
    assert doubled is not None
    assert torch.equal(doubled.mean, present.mean * 2)
    with pytest.raises(ValueError, match="shape"):
        checker.set_baseline(Reduction(mean=torch.zeros(3), quantiles=present.quantiles))
    with pytest.raises(ValueError, match="shape"):
        checker.set_baseline(Reduction(mean=present.mean, quantiles=torch.zeros(3, 8)))
    with pytest.raises(ValueError, match="finite"):
        checker.set_baseline(present.scaled(math.inf))


def test_a_new_checker_takes_a_siblings_baseline() -> None:
    donor, heir = make(), make()
    run(donor, 4)
    baseline = donor.baseline()
    assert baseline is not None
    heir.set_baseline(baseline)
    assert set(judge(heir, tensor(1)).observation.values) >= {Reason.L1, Reason.WASSERSTEIN}


def test_off_judges_nothing() -> None:
    checker = make(mode="off")
    judgement = judge(checker, tensor(1) * math.nan)
    assert judgement.verdict.accepted
    checker.accept(judgement.observation)
    checker.end_step(0)
    assert checker.baseline() is None


def test_every_statistic_has_a_fence_in_both_directions() -> None:
    expected = {Reason(name) for name in (*STATISTICS, "continuity", "gain")}
    for direction in Direction:
        assert set(FENCING[direction]) == expected


@pytest.mark.parametrize("steps", [0, 40])
def test_a_tensor_over_the_norm_bound_is_flagged_in_and_after_the_warm_up_and_teaches_nothing(steps: int) -> None:
    checker = make(norm_bound=10.0)
    run(checker, steps)
    before = checker.baseline()
    judgement = checker.judge(tensor(1), step=steps, sketch=None, input_sketch=None, rms=10.1)
    assert judgement.verdict.reasons == (Reason.NORM,)
    assert judgement.verdict.scores == {"norm": pytest.approx(1.01)}
    with pytest.raises(ValueError, match="flagged"):
        checker.accept(judgement.observation)
    checker.accept(judgement.observation, confirmed=True)
    checker.end_step(steps)
    assert checker.baseline() is before
    assert checker.judge(tensor(1), step=steps + 1, sketch=None, input_sketch=None, rms=10.0).verdict.accepted


def test_without_a_checker_a_large_tensor_passes() -> None:
    checker = make(mode="off", norm_bound=10.0)
    assert checker.judge(tensor(1), step=0, sketch=None, input_sketch=None, rms=1e9).verdict.accepted
