"""A swarm that was stopped, all of it or in part, goes on from its checkpoints and not from the beginning."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from node.checkpoints import find_checkpoints, read_checkpoint, stage_and_step, write_checkpoint
from node.forming import Forming, Place
from node.simulated_swarm import Member, SimulatedSwarm, simulated
from node.status import build_status
from protocol.manifest import Manifest
from protocol.records import NodeState
from tests.reference import train_reference
from tests.swarm.harness import small_manifest

pytestmark = pytest.mark.timeout(300)

PATIENCE = 90.0
EVERY = 2


def restart_manifest(*, steps: int, replicas: int = 2, every: int = EVERY) -> Manifest:
    return small_manifest(
        stages={"min_replicas": replicas}, training={"steps": steps, "checkpoint_steps": every, "sequences_per_step": 8}
    )


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - nothing tells of a state from outside
            await asyncio.sleep(0.01)


async def killed(members: Iterable[Member]) -> None:
    """End nodes at once: whoever is cancelled saves nothing."""
    tasks = [member.task for member in members]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def train_and_kill(folder: Path, manifest: Manifest, replicas: int, step: int) -> None:
    async with simulated(folder, manifest) as swarm:
        await swarm.coordinate()
        members = swarm.fill(replicas)
        await until(lambda: all(step_of(member) >= step for member in members))
        await killed(swarm.members)


def step_of(member: Member) -> int:
    return member.node.trainer.step if member.node.trainer is not None else 0


def steps_on_disk(folder: Path, member: str) -> set[int]:
    """Of one node's checkpoints."""
    (swarm,) = (folder / member / "checkpoints").iterdir()
    return {int(path.stem.rpartition("-")[2]) for path in find_checkpoints(swarm)}


def kept_steps(kept: dict[str, Path]) -> list[int]:
    """The newest step of each of several state folders."""
    return [max(steps_on_disk(place.parent, place.name)) for place in kept.values()]


def members_of(manifest: Manifest, replicas: int) -> list[str]:
    return [f"s{stage}r{replica}" for stage in range(manifest.num_stages) for replica in range(replicas)]


def restored_step(member: Member) -> int | None:
    """The step of the checkpoint that a node went on from."""
    return next((event.step for event in member.node.telemetry.events if event.kind == "restored"), None)


def digests(members: Iterable[Member]) -> list[dict[int, str]]:
    return [dict(member.node.telemetry.digests) for member in members]


async def all_done(swarm: SimulatedSwarm, members: list[Member]) -> None:
    async with asyncio.timeout(PATIENCE):
        assert await asyncio.gather(*(member.outcome() for member in members)) == [None] * len(members)
    for stage in range(swarm.manifest.num_stages):
        siblings = [member for member in members if member.node.stage == stage]
        parameters = {member.node.trainer.parameters for member in siblings if member.node.trainer is not None}
        assert len(parameters) == 1, f"the replicas of stage {stage} differ"


async def test_a_swarm_that_was_killed_goes_on_from_the_newest_common_step(tmp_path: Path) -> None:
    manifest = restart_manifest(steps=10)
    await train_and_kill(tmp_path, manifest, 2, 6)
    names = members_of(manifest, 2)
    held = {name: steps_on_disk(tmp_path, name) for name in names}
    assert all(len(steps) <= 2 and all(step % EVERY == 0 for step in steps) for steps in held.values())
    newest = [max(max(held[f"s{stage}r{replica}"]) for replica in range(2)) for stage in range(3)]
    common = min(newest)
    assert common >= 4

    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        members = swarm.fill(2)
        await all_done(swarm, members)
    for member in members:
        restored = restored_step(member)
        assert restored == (common if common in held[member.name] else None), member.name
        first = min(step for step, _ in member.node.telemetry.digests)
        assert first >= common, "nobody trained a step again that all had"
    assert {step for step, _ in members[0].node.telemetry.losses} >= set(range(common, 10))
    assert all(build_status(member.node)["checkpoint"]["step"] == 10 for member in members)
    assert all(max(steps_on_disk(tmp_path, name)) == 10 for name in names)


async def test_a_killed_swarm_learns_what_one_that_was_not_killed_learns(tmp_path: Path) -> None:
    manifest = restart_manifest(steps=9, replicas=1)
    await train_and_kill(tmp_path, manifest, 1, 5)
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        members = swarm.fill(1)
        await all_done(swarm, members)
    losses = dict(members[0].node.telemetry.losses)
    assert min(losses) >= 2
    expected = train_reference(manifest, 9)
    for step, loss in losses.items():  # gradients are added up in the order in which they come
        assert loss == pytest.approx(expected[step], abs=1e-4), f"step {step}"


async def test_a_stage_whose_checkpoints_are_older_takes_all_back_and_a_damaged_one_is_not_used(tmp_path: Path) -> None:
    manifest = restart_manifest(steps=8, replicas=1)
    await train_and_kill(tmp_path, manifest, 1, 6)
    held = {name: steps_on_disk(tmp_path, name) for name in members_of(manifest, 1)}
    older = min(min(steps) for steps in held.values())
    newest = max(held["s1r0"])
    damaged = next((tmp_path / "s1r0" / "checkpoints").glob(f"*/stage-1-step-{newest}.safetensors"))
    damaged.write_bytes(damaged.read_bytes()[:-7])
    common = max(step for step in held["s1r0"] - {newest})
    assert common >= older

    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        members = swarm.fill(1)
        await all_done(swarm, members)
    assert [restored_step(member) for member in members] == [common] * 3
    assert damaged.with_name(f"{damaged.name}.damaged").exists()
    registry = members[1].node.metrics.registry
    assert registry.get_sample_value("sentinel_checkpoints_total", {"outcome": "damaged"}) == 1


async def test_newcomers_join_a_swarm_that_comes_back_and_nodes_find_their_stages_again(tmp_path: Path) -> None:
    manifest = restart_manifest(steps=8, replicas=1)
    await train_and_kill(tmp_path, manifest, 1, 4)
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        newcomer = swarm.join("newcomer", stage=1)
        await until(lambda: newcomer.node.state is NodeState.WAITING)
        old = [swarm.join(name) for name in members_of(manifest, 1)]  # none of them is told its stage
        await all_done(swarm, [newcomer, *old])
    assert [member.node.stage for member in old] == [0, 1, 2]
    assert all((restored_step(member) or 0) >= 2 for member in old)
    assert restored_step(newcomer) is None


async def test_a_swarm_waits_for_the_stage_of_which_nobody_has_a_checkpoint(tmp_path: Path) -> None:
    manifest = restart_manifest(steps=8, replicas=1)
    await train_and_kill(tmp_path, manifest, 1, 4)
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        back = [swarm.join("s0r0"), swarm.join("s2r0")]
        newcomer = swarm.join("newcomer", stage=1)
        lack = "others have checkpoints and nobody has one of stage 1; waiting for a node that has"
        await until(lambda: all(member.node.reason.endswith(lack) for member in [*back, newcomer]))
        back.append(swarm.join("s1r0"))
        await all_done(swarm, [newcomer, *back])
    assert all(restored_step(member) for member in back)


async def test_a_node_that_left_politely_follows_its_siblings_from_its_own_checkpoint(tmp_path: Path) -> None:
    manifest = restart_manifest(steps=0, replicas=1)
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        members = swarm.fill(2)
        gone = next(member for member in members if member.name == "s1r1")
        await until(lambda: step_of(gone) >= 3)
        gone.node.stop()
        assert await gone.outcome() is None
        left_at = max(steps_on_disk(tmp_path, gone.name))
        assert left_at == step_of(gone)
        again = swarm.join(gone.name)
        await until(lambda: again.node.state is NodeState.TRAINING and again.node.telemetry.counters.steps >= 2)
        assert again.node.stage == 1
        sibling = next(member for member in members if member.name == "s1r0")
        own, other = digests([again, sibling])
        common = own.keys() & other.keys()
        assert common and all(own[step] == other[step] for step in common)
        if min(own) == left_at:
            assert restored_step(again) == left_at, "no state was downloaded"


async def test_the_only_replica_of_a_stage_that_left_politely_loses_nothing(tmp_path: Path) -> None:
    manifest = restart_manifest(steps=12, replicas=1)
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        members = swarm.fill(1)
        gone = members[1]
        await until(lambda: step_of(gone) >= 3)
        gone.node.stop()
        assert await gone.outcome() is None
        left_at = step_of(gone)
        again = swarm.join(gone.name)
        await all_done(swarm, [members[0], again, members[2]])
    assert restored_step(again) == left_at


async def test_the_only_replica_of_a_stage_that_was_killed_takes_it_up_again_from_its_checkpoint(
    tmp_path: Path,
) -> None:
    manifest = restart_manifest(steps=0, replicas=1, every=5)
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        members = swarm.fill(1)
        # Well after a checkpoint and before the next.
        await until(lambda: all(step_of(member) >= 8 and step_of(member) % 5 in (3, 4) for member in members))
        await killed([members[1]])
        held = max(steps_on_disk(tmp_path, "s1r0"))
        assert held <= step_of(members[0]) - 2, "the others are further than its checkpoint"
        stood = step_of(members[0])
        again = swarm.join("s1r0")
        others = [members[0], members[2]]
        await until(lambda: again.node.trainer is not None)
        # The others may still have ended the step that was under way, and go on as soon as this one trains.
        went_on = step_of(members[0])
        await until(lambda: all(step_of(member) >= went_on + 3 for member in [again, *others]))
        assert restored_step(again) == held
        lost = again.node.metrics.updates_lost._value.get()
        assert 1 < stood - held <= lost <= went_on - held
        assert all(member.node.state is NodeState.TRAINING for member in others), "nobody went back or was thrown out"
        assert not any(member.node.guard.all_ejected() for member in [again, *others] if member.node.guard)
        # Whoever comes now is its sibling, to the bit.
        second = swarm.join("s1r1", stage=1)
        await until(lambda: second.node.telemetry.counters.steps >= 2)
        one, two = digests([again, second])
        common = one.keys() & two.keys()
        assert common and all(one[step] == two[step] for step in common)


async def test_too_old_a_checkpoint_waits_until_all_others_go_back_with_it(tmp_path: Path) -> None:
    manifest = restart_manifest(steps=0, replicas=1, every=2)
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        members = swarm.fill(1)
        await until(lambda: all(step_of(member) >= 5 for member in members))
        await killed([members[1]])
        held = max(steps_on_disk(tmp_path, "s1r0"))
        kept = {name: tmp_path / f"{name}-kept" for name in ("s0r0", "s1r0", "s2r0")}
        await killed([members[0], members[2]])
        for name, place in kept.items():
            shutil.copytree(tmp_path / name, place)
        back = swarm.fill(1)
        await until(lambda: all(step_of(member) >= held + 12 for member in back))
        await killed([back[1]])
        shutil.rmtree(tmp_path / "s1r0")
        shutil.copytree(kept["s1r0"], tmp_path / "s1r0")
        again = swarm.join("s1r0")
        offer = f"or for a restart of all others, to go back to step {held}, which this node has"
        await until(lambda: again.node.reason.endswith(offer))
        assert again.node.stage == 1
        await killed([back[0], back[2]])
        for name in ("s0r0", "s2r0"):
            shutil.rmtree(tmp_path / name)
            shutil.copytree(kept[name], tmp_path / name)
        last = [swarm.join("s0r0"), swarm.join("s2r0")]
        await until(lambda: all(step_of(member) >= held + 2 for member in [again, *last]))
    assert {restored_step(member) for member in [again, *last]} == {min(held, *kept_steps(kept))}


async def test_a_stage_whose_disk_is_lost_comes_back_from_copies(tmp_path: Path) -> None:
    manifest = restart_manifest(steps=0, replicas=1, every=3)
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        members = swarm.fill(1, copies_gib=1.0)
        await until(lambda: all(copied(tmp_path, name, 1) for name in ("s0r0", "s2r0")))
        assert not copied(tmp_path, "s1r0", 1), "a stage's own nodes keep no copies of it"
        await killed([members[1]])
        stood = step_of(members[0])
        shutil.rmtree(tmp_path / "s1r0")
        volunteer = swarm.join("volunteer")
        others = [members[0], members[2]]
        await until(lambda: volunteer.node.trainer is not None)
        assert volunteer.node.stage == 1
        # The others may still have ended the step that was under way, and go on as soon as the volunteer trains.
        went_on = step_of(members[0])
        await until(lambda: all(step_of(member) >= went_on + 3 for member in [volunteer, *others]))
        held = restored_step(volunteer)
        assert held is not None and held > 0 and held % 3 == 0
        assert stood - held <= volunteer.node.metrics.updates_lost._value.get() <= went_on - held


async def test_a_swarm_that_was_killed_gets_a_lost_stage_from_copies(tmp_path: Path) -> None:
    manifest = restart_manifest(steps=0, replicas=1, every=3)
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        swarm.fill(1, copies_gib=1.0)
        await until(lambda: all(copied(tmp_path, name, 1) for name in ("s0r0", "s2r0")))
        await killed(swarm.members)
    shutil.rmtree(tmp_path / "s1r0")
    newest = max(step for name in ("s0r0", "s2r0") for step in copied(tmp_path, name, 1))
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        members = [swarm.join("s0r0"), swarm.join("s2r0"), swarm.join("volunteer")]
        await until(lambda: all(step_of(member) >= newest + 2 for member in members))
    assert restored_step(members[2]) is not None
    assert members[2].node.stage == 1


def copied(folder: Path, member: str, stage: int) -> set[int]:
    """The steps of a node's copies of another node's stage."""
    found = [stage_and_step(path) for path in (folder / member / "copies").glob("*/stage-*.safetensors")]
    return {step for place, step in found if place == stage}


@pytest.mark.parametrize("first", [False, True], ids=["together", "it-is-the-first"])
async def test_a_replica_with_other_parameters_takes_those_of_its_siblings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Also if it sees before all others that its siblings have others: they must not wait for it to wait with them."""
    manifest = restart_manifest(steps=8, replicas=3)
    await train_and_kill(tmp_path, manifest, 3, 4)
    common = max(set.intersection(*(steps_on_disk(tmp_path, name) for name in members_of(manifest, 3))))
    (folder,) = (tmp_path / "s1r1" / "checkpoints").iterdir()
    path = folder / f"stage-1-step-{common}.safetensors"
    checkpoint, state = read_checkpoint(path)
    state.parameters.mul_(1.001)
    write_checkpoint(path, state, manifest=manifest, stage=1, now=checkpoint.saved)
    for later in find_checkpoints(folder):
        if stage_and_step(later)[1] > common:
            later.unlink()
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        members = swarm.fill(3)
        odd = next(member for member in members if member.name == "s1r1")
        if first:
            waits = Forming.wait_for_start

            async def wait_for_start(forming: Forming, stage: int) -> Place:
                if forming._membership.me != odd.peer:
                    await until(lambda: odd.node.state is NodeState.SYNCING)
                return await waits(forming, stage)

            monkeypatch.setattr(Forming, "wait_for_start", wait_for_start)
        await all_done(swarm, members)
    assert restored_step(odd) is None
    assert sum(restored_step(member) is not None for member in members) >= 6


async def test_one_who_has_a_checkpoint_does_not_begin_anew_with_newcomers(tmp_path: Path) -> None:
    manifest = restart_manifest(steps=5, replicas=1)
    await train_and_kill(tmp_path, manifest, 1, 3)
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        old = swarm.join("s1r0")
        await until(lambda: old.node.state is NodeState.WAITING)
        newcomers = [swarm.join(f"new{stage}", stage=stage) for stage in range(3)]
        await until(lambda: "stop them to go on from it, or move it away to begin with them" in old.node.reason)
        await all_done(swarm, newcomers)
        assert all(min(step for step, _ in member.node.telemetry.digests) == 0 for member in newcomers)
        assert max(steps_on_disk(tmp_path, "s1r0")) >= 2


async def test_a_full_disk_costs_checkpoints_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("node.checkpoints.write_checkpoint", full)
    manifest = restart_manifest(steps=5, replicas=1)
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        members = swarm.fill(1)
        await all_done(swarm, members)
    for member in members:
        assert "No space left on device; make room" in build_status(member.node)["checkpoint"]["problem"]
        assert member.node.metrics.registry.get_sample_value("sentinel_checkpoints_total", {"outcome": "failed"}) >= 2
