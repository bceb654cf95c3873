"""A replica whose parameters are not its siblings' is found in the next step, takes theirs, and goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from node.optimizer import StepOptimizer
from node.simulated_swarm import simulated
from tests.swarm.harness import small_manifest

pytestmark = pytest.mark.timeout(300)

WRONG_STEP = 4


async def test_injected_weights_do_not_outlive_the_step_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = small_manifest(stages={"min_replicas": 3}, training={"steps": 10, "sequences_per_step": 36})
    honest = StepOptimizer.apply
    wrong: list[Any] = []

    def apply(self: StepOptimizer, parameters: torch.Tensor, mean_gradient: torch.Tensor, step: int) -> float:
        norm = honest(self, parameters, mean_gradient, step)
        if wrong and self is wrong[0] and step == WRONG_STEP:
            parameters.add_(torch.randn(parameters.shape, generator=torch.Generator().manual_seed(0)), alpha=0.05)
        return norm

    monkeypatch.setattr(StepOptimizer, "apply", apply)
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        members = swarm.fill(3)
        victim = next(member for member in members if member.name == "s1r1")
        while victim.node.trainer is None:  # noqa: ASYNC110 - nothing tells of it from outside
            await asyncio.sleep(0.01)
        wrong.append(victim.node.trainer._optimizer)
        outcomes = await asyncio.gather(*(member.outcome() for member in members))
    assert outcomes == [None] * 9
    found = [event.step for event in victim.node.telemetry.events if event.kind == "out_of_sync"]
    assert found == [WRONG_STEP + 1]
    siblings = {member.node.trainer.parameters for member in members if member.stage == 1 and member.node.trainer}
    assert len(siblings) == 1, "it ends with the parameters of its siblings"
    strikes = [
        event
        for member in members
        if member.stage == 0
        for event in member.node.telemetry.events
        if event.kind == "strike" and event.peer == victim.peer
    ]
    assert strikes, "the stage above has noticed, too"
    assert {event.step for event in strikes} == {WRONG_STEP + 1}
    ejected = [event for member in members for event in member.node.telemetry.events if event.kind == "ejected"]
    assert ejected == [], "an accident is no crime"
