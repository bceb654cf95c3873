"""Each attack in the middle stage of 3 x 3: the attacker is ejected, nobody else, and the loss holds."""

from __future__ import annotations

import functools

import pytest

from benchmarks._drills import DrillResult, run_drill
from node.drill_names import CONDUCT_ATTACKS, TENSOR_ATTACKS, Attack

pytestmark = pytest.mark.timeout(400)
"""Nine nodes train in one process: half a minute on an idle core, several times that on a busy one."""

EVERY_TIME = {"sign-flip", "delay", "gradient-bias"}
"""One blatant attack, one that only the sketch sees, one that the statistics miss; the others are slow tests."""

LATE = frozenset({Attack.STALE, Attack.INTERMITTENT})
"""Do not falsify the very first tensor."""


def _drills() -> list[object]:
    names = [f"{prefix}{attack}" for attack in TENSOR_ATTACKS for prefix in ("", "gradient-")]
    return [pytest.param(name, marks=() if name in EVERY_TIME else pytest.mark.slow) for name in names]


@functools.cache
def attack_free() -> DrillResult:
    return run_drill("")


def test_honest_nodes_alone_train_every_step_and_accuse_nobody() -> None:
    result = attack_free()
    assert result.steps == 40
    assert (result.lost, result.honest_ejected, result.honest_quarantined) == (0, 0, 0)


@pytest.mark.parametrize("drill", _drills())
def test_a_false_tensor_is_ejected_and_costs_no_loss(drill: str) -> None:
    result = run_drill(drill)
    assert result.first_attack_step is not None
    if drill.removeprefix("gradient-") not in LATE:
        assert result.first_attack_step == 20
    assert result.ejected_step is not None, result
    assert result.exit_code == 3
    assert (result.lost, result.honest_ejected, result.honest_quarantined) == (0, 0, 0)
    assert result.loss == pytest.approx(attack_free().loss, rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("drill", [str(attack) for attack in CONDUCT_ATTACKS if attack is not Attack.FALSE_REDUCTION])
def test_lies_about_others_and_oneself_harm_nobody(drill: str) -> None:
    result = run_drill(drill)
    assert (result.lost, result.honest_ejected, result.honest_quarantined) == (0, 0, 0)
    assert result.loss == pytest.approx(attack_free().loss, rel=0.02)
    if drill == Attack.INJECT:
        assert result.exit_code == 3, result


def test_a_false_reduction_is_never_committed_and_ejects_its_owner() -> None:
    result = run_drill(str(Attack.FALSE_REDUCTION), from_step=8, steps=16)
    assert result.first_attack_step == result.ejected_step == 8 and result.exit_code == 3
    assert (result.lost, result.honest_ejected, result.honest_quarantined) == (0, 0, 0)
    assert result.loss == pytest.approx(run_drill("", steps=16).loss, rel=0.02)
