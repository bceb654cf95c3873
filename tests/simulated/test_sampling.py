"""What nodes measure of themselves and of the swarm, in a swarm over memory."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

from node.metrics import Metrics
from node.sampling import sample, sample_disk_for_ever
from node.simulated_swarm import Member, simulated
from protocol.errors import EjectedError
from tests.swarm.harness import small_manifest


def value(member: Member, name: str, **labels: str) -> float:
    sample(member.node, lag=0.5)
    found = member.node.metrics.registry.get_sample_value(f"sentinel_{name}", labels)
    assert found is not None, (name, labels)
    return found


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing tells of it from outside
            await asyncio.sleep(0.01)


async def test_every_node_measures_the_whole_view_while_it_trains(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest(training={"steps": 0, "checkpoint_steps": 7})) as swarm:
        coordinator = await swarm.coordinate()
        assert value(coordinator, "view_replicas", stage="0") == 0
        nodes = swarm.fill(1)
        await until(lambda: all(member.node.step >= 1 for member in nodes))
        for stage, member in enumerate(nodes):
            assert value(member, "step") >= 1
            assert value(member, "training_finished") == 0
            for other in range(3):
                assert value(member, "view_replicas", stage=str(other)) == 1
                assert value(member, "view_serving_replicas", stage=str(other)) == 1
            assert value(member, "event_loop_lag_seconds") == 0.5
            assert value(member, "checkpoint_interval_steps") == 7
            (who,) = next(f for f in member.node.metrics.registry.collect() if f.name == "sentinel").samples
            told = (who.labels["stage"], who.labels["label"], who.labels["role"], who.labels["peer"])
            assert told == (str(stage), member.name, "volunteer", member.peer)


async def test_the_end_of_the_training_is_told(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest(training={"steps": 2})) as swarm:
        await swarm.coordinate()
        nodes = swarm.fill(1)
        assert [await member.outcome() for member in nodes] == [None] * 3
    assert [value(member, "training_finished") for member in nodes] == [1] * 3
    assert [value(member, "step") for member in nodes] == [2] * 3


async def test_an_ejected_peer_is_named_with_its_stage_and_serves_nobody(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest(training={"steps": 0})) as swarm:
        await swarm.coordinate()
        first = [swarm.join(f"s0r{number}", stage=0) for number in range(2)]
        honest = swarm.join("s1r0", stage=1)
        cheat = swarm.join("cheat", stage=1, attack="false-receipt")
        swarm.join("s2r0", stage=2)
        async with asyncio.timeout(60):
            assert isinstance(await cheat.outcome(), EjectedError)
        for member in first:
            assert member.node.guard is not None
            await until(lambda guard=member.node.guard: cheat.peer in guard.all_ejected())  # type: ignore[misc]
        for member in first:
            assert value(member, "peer_ejected", peer=cheat.peer, stage="1") == 1
            view = member.node.membership.view if member.node.membership is not None else None
            assert view is not None
            serving = {claim.peer for claim in view.roster(1, member.node.step)} - {cheat.peer}
            assert value(member, "view_serving_replicas", stage="1") == len(serving)
            assert value(member, "ejections_total", kind="seen") == 1
        assert value(cheat, "node_state", state="ejected") == 1
        assert value(cheat, "ejections_total", kind="self") == 1
        assert value(honest, "node_state", state="ejected") == 0


async def test_the_disk_is_measured_and_a_folder_that_is_gone_makes_no_number(
    tmp_path: Path, no_tasks_left: None
) -> None:
    for folder, finite in ((tmp_path, True), (tmp_path / "gone", False)):
        metrics = Metrics()
        measuring = asyncio.create_task(sample_disk_for_ever(metrics, folder))
        await until(lambda metrics=metrics: metrics.registry.get_sample_value("sentinel_disk_size_bytes") != 0)  # type: ignore[misc]
        free = metrics.registry.get_sample_value("sentinel_disk_free_bytes")
        size = metrics.registry.get_sample_value("sentinel_disk_size_bytes")
        measuring.cancel()
        assert free is not None and size is not None
        assert (0 < free <= size) if finite else math.isnan(free) and math.isnan(size)
