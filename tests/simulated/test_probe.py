"""A node tries a stage out before it claims it: one that does not fit is left to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from node import probe as probing
from node.probe import Probed
from node.simulated_swarm import simulated
from node.status import build_status
from protocol.errors import MemoryTooSmallError
from protocol.manifest import Manifest
from tests.swarm.harness import small_manifest

PATIENCE = 60.0
REAL = probing.probe


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Stages that do not fit when they are tried."""
    too_large: set[int] = set()

    def probe(manifest: Manifest, stage: int, device: torch.device) -> Probed:
        return REAL(manifest, stage, device, available=lambda device: 0 if stage in too_large else 1 << 50)

    monkeypatch.setattr(probing, "probe", probe)
    return too_large


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - nothing tells of a state from outside
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stage", [None, 1])
async def test_a_node_for_which_nothing_fits_ends_and_claims_nothing(
    tmp_path: Path, large: set[int], stage: int | None
) -> None:
    large.update({0, 1, 2} if stage is None else {stage})
    async with simulated(tmp_path, small_manifest()) as swarm:
        coordinator = await swarm.coordinate()
        node = swarm.join("node", stage=stage)
        async with asyncio.timeout(PATIENCE):
            error = await node.outcome()
        assert isinstance(error, MemoryTooSmallError) and error.exit_code == 5
        assert "does not fit here: with one microbatch at a time it takes" in str(error)
        assert coordinator.node.membership is not None and not coordinator.node.membership.view.claims


async def test_another_stage_is_taken_where_one_does_not_fit(tmp_path: Path, large: set[int]) -> None:
    large.update({0, 2})
    async with simulated(tmp_path, small_manifest()) as swarm:
        await swarm.coordinate()
        node = swarm.join("node")
        await until(lambda: node.node.stage is not None)
        assert node.node.stage == 1
        told = build_status(node.node)["probe"]
        assert told["stage"] == 1 and told["microbatches_per_second"] > 0
        # What it can do is its own business: shares of work follow what all can check.
        await until(lambda: node.node.membership is not None and node.node.membership.claim is not None)
        assert node.node.membership is not None and node.node.membership.claim is not None
        assert node.node.membership.claim.capacity == 1.0


async def test_a_swarm_trains_with_fewer_microbatches_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def probe(manifest: Manifest, stage: int, device: torch.device) -> Probed:
        return Probed(stage=stage, in_flight=1, microbatches_per_second=9.0, peak_bytes=5)

    monkeypatch.setattr(probing, "probe", probe)
    most = 0
    async with simulated(tmp_path, small_manifest(training={"steps": 4})) as swarm:
        await swarm.coordinate()
        nodes = swarm.fill(1)
        tasks = asyncio.gather(*(node.outcome() for node in nodes))
        while not tasks.done():
            most = max(most, *(node.node.telemetry.microbatches_in_flight for node in nodes))
            await asyncio.sleep(0.001)
        assert await tasks == [None] * 3
        assert all(node.node.finished for node in nodes)
    assert most == 1
