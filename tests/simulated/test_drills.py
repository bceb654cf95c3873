"""Each attack on activations in the middle stage of 3 x 3: the attacker is ejected, nobody else, the loss holds."""

from __future__ import annotations

import functools

import pytest

from benchmarks._drills import DrillResult, run_drill
from node.drill_names import Attack

pytestmark = pytest.mark.timeout(400)
"""Nine nodes train in one process: half a minute on an idle core, several times that on a busy one."""

EVERY_TIME = {Attack.SIGN_FLIP, Attack.DELAY, Attack.NOISE}
"""One blatant attack, one that only the sketch sees, one that the means do not show; the others are slow tests."""


@functools.cache
def attack_free() -> DrillResult:
    return run_drill("")


def test_honest_nodes_alone_train_every_step_and_accuse_nobody() -> None:
    result = attack_free()
    assert result.steps == 40
    assert (result.lost, result.honest_ejected, result.honest_quarantined) == (0, 0, 0)


@pytest.mark.parametrize(
    "attack", [pytest.param(attack, marks=() if attack in EVERY_TIME else pytest.mark.slow) for attack in Attack]
)
def test_an_attack_on_activations_is_ejected_and_costs_no_loss(attack: Attack) -> None:
    result = run_drill(str(attack))
    assert result.first_attack_step == 20
    assert result.ejected_step is not None, result
    assert result.exit_code == 3
    assert (result.lost, result.honest_ejected, result.honest_quarantined) == (0, 0, 0)
    assert result.loss == pytest.approx(attack_free().loss, rel=0.02)


def test_a_flipped_gradient_is_refused_by_those_who_get_it() -> None:
    result = run_drill("gradient-sign-flip")
    assert result.quarantined_step is not None, result
    assert result.quarantined_by >= 2
    assert (result.lost, result.honest_ejected) == (0, 0)
    assert result.loss == pytest.approx(attack_free().loss, rel=0.02)
