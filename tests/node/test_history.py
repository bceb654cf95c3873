"""Of a stage's parameters the present ones and those of the step before are known, and no others."""

from __future__ import annotations

import pytest
import torch

from node.digest import parameter_digest
from node.history import ParameterHistory
from node.model import StageModule
from node.stage import StageRunner
from tests.node.test_stage import CPU, small_manifest


@pytest.fixture
def runner() -> StageRunner:
    manifest = small_manifest()
    return StageRunner(StageModule(manifest.model, manifest.stages.layers_per_stage, 1), CPU)


def begin(runner: StageRunner, *, keep: bool = True) -> tuple[ParameterHistory, bytes]:
    digest = parameter_digest(runner.flat_parameters())
    return ParameterHistory(runner, digest=digest, keep=keep), digest


def update(history: ParameterHistory, runner: StageRunner, step: int) -> bytes:
    """What the trainer does at the end of the step before ``step``."""
    history.about_to_change()
    runner.flat_parameters().add_(0.01)
    digest = parameter_digest(runner.flat_parameters())
    history.changed(step, digest)
    return digest


def test_before_the_first_update_only_step_0_is_known(runner: StageRunner) -> None:
    history, digest = begin(runner)
    assert history.step == 0
    assert history.digest_at(0) == digest
    assert history.digest_at(1) is None
    assert history.parameters_of(digest) is runner.flat_parameters()
    assert history.parameters_of(bytes(32)) is None


def test_two_versions_are_kept(runner: StageRunner) -> None:
    history, first = begin(runner)
    initial = runner.flat_parameters().clone()
    second = update(history, runner, 1)
    assert history.step == 1
    assert (history.digest_at(0), history.digest_at(1), history.digest_at(2)) == (first, second, None)
    before, present = history.parameters_of(first), history.parameters_of(second)
    assert before is not None and torch.equal(before, initial)
    assert present is runner.flat_parameters()
    assert parameter_digest(before) == first and not before.requires_grad

    third = update(history, runner, 2)
    assert (history.digest_at(0), history.digest_at(1), history.digest_at(2)) == (None, second, third)
    assert history.parameters_of(first) is None
    before = history.parameters_of(second)
    assert before is not None and parameter_digest(before) == second


def test_the_older_version_does_not_change_with_the_parameters(runner: StageRunner) -> None:
    history, first = begin(runner)
    initial = runner.flat_parameters().clone()
    update(history, runner, 1)
    runner.flat_parameters().zero_()
    before = history.parameters_of(first)
    assert before is not None and torch.equal(before, initial)


def test_what_was_before_a_replaced_state_is_no_history_of_it(runner: StageRunner) -> None:
    history, first = begin(runner)
    second = update(history, runner, 1)
    runner.load_flat(torch.ones_like(runner.flat_parameters()))
    fetched = parameter_digest(runner.flat_parameters())
    history.replaced(40, fetched)
    assert history.step == 40
    assert [history.digest_at(step) for step in (0, 1, 39, 40, 41)] == [None, None, None, fetched, None]
    assert history.parameters_of(first) is None and history.parameters_of(second) is None
    assert history.parameters_of(fetched) is runner.flat_parameters()
    followed = update(history, runner, 41)
    assert (history.digest_at(40), history.digest_at(41)) == (fetched, followed)


def test_an_update_that_changed_nothing_is_both_steps(runner: StageRunner) -> None:
    history, digest = begin(runner)
    history.about_to_change()
    history.changed(1, digest)
    assert history.digest_at(0) == history.digest_at(1) == digest
    assert history.parameters_of(digest) is runner.flat_parameters()


def test_where_nobody_audits_no_copy_is_made(runner: StageRunner) -> None:
    history, first = begin(runner, keep=False)
    second = update(history, runner, 1)
    assert (history.digest_at(0), history.digest_at(1)) == (None, second)
    assert history.parameters_of(first) is None
    assert history.parameters_of(second) is runner.flat_parameters()
