"""Grows a swarm to the moment before an attack, and forks it for every run that shares this beginning.

Runs of one setting, defence and seed differ in nothing until their attackers begin. So one process trains the honest
beginning once; then each run is a fork of it, in which some nodes turn out to be attackers.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.arena.cells import DEFENCES, Group, Run, attackers
from benchmarks.arena.forking import ForkableLoop, WorkClock, forked
from benchmarks.arena.measure import Noticed, Watch, row_of
from benchmarks.arena.score import Row
from node.drill import parse_drill
from node.drill_names import Attack
from node.simulated_swarm import Member, SimulatedSwarm, simulated
from protocol.manifest import Manifest

AUDIT_RATE = 1 / 64
AUDIT_SUSPICION = 8.0
"""In so short a run nobody earns trust, so every peer is audited at the rate of a newcomer: the product of these
two, one microbatch in eight. The manifest's default is for long runs, in which most peers are trusted."""

MINIMUM_HISTORY = 16
"""Accepted tensors before a fence judges. A node of a stage of eight sees two tensors a step here."""

NEVER = 1 << 30
"""A step that no run reaches: who waits for it is an honest node."""


def manifest_of(run: Run | Group) -> Manifest:
    """The manifest of a run: a small Llama of one layer a stage, on the standard library's sources."""
    setting, audited = run.setting, run.defence == "all"
    assert run.defence in DEFENCES
    return Manifest.from_mapping(
        {
            "name": "arena",
            "model": {
                "width": setting.width,
                "layers": setting.stages,
                "heads": 4,
                "kv_heads": 2,
                "ffn": 2 * setting.width,
                "context": setting.context,
                "seed": run.seed,
            },
            "stages": {"layers_per_stage": [1] * setting.stages, "min_replicas": setting.replicas},
            "training": {
                "steps": setting.steps,
                "learning_rate": 3e-3,
                "warmup_steps": 3,
                "decay_steps": 2 * setting.steps,
                "sequences_per_step": setting.microbatches * setting.sequences_per_microbatch,
                "sequences_per_microbatch": setting.sequences_per_microbatch,
                # What the checker does is measured here; benchmarks.robust measures what averaging withstands.
                "aggregation": "mean",
            },
            "data": {"seed": run.seed},
            "verifier": {
                "mode": "off" if run.defence == "off" else "enforce",
                "warmup_steps": setting.warmup_steps,
                "minimum_history": MINIMUM_HISTORY,
                "audit_rate": AUDIT_RATE if audited else 0.0,
                "audit_suspicion": AUDIT_SUSPICION if audited else 1.0,
                "allow_drills": True,
            },
            # All nodes live in this process: nobody's silence means anything, and leases need no renewal.
            "network": {
                "heartbeat_seconds": 300.0,
                "dead_after_seconds": 1200.0,
                "lease_seconds": 120.0,
                "renew_seconds": 60.0,
                "hop_timeout_seconds": 120.0,
            },
        }
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grown:
    """A swarm in which the next step is the one before the attack."""

    swarm: SimulatedSwarm
    members: list[Member]
    watch: Watch


def run_group(group: Group, *, clock: WorkClock, seconds: float, tell: Callable[[Run, Row | str], None]) -> None:
    """Run every run of a group, one after the other, and ``tell`` each one's row, or why there is none.

    Must be the only work of this process, which has one thread. ``clock`` must have been installed before anything
    of the nodes was imported. ``seconds`` is the limit of each run and of the beginning.

    Raises:
        TimeoutError: the swarm did not get as far as the attack.
    """
    torch.set_num_threads(1)
    gc.disable()  # a swarm has millions of live objects, and looking through them again and again costs a sixth
    loop = ForkableLoop(clock)
    with (
        tempfile.TemporaryDirectory(prefix="sentinel-arena-") as folder,
        asyncio.Runner(loop_factory=lambda: loop) as runner,
    ):
        os.chdir(folder)  # the nodes' folders are relative to it, so that each fork can have its own
        runner.run(_run_group(group, loop, clock, seconds, tell))


async def _run_group(
    group: Group, loop: ForkableLoop, clock: WorkClock, seconds: float, tell: Callable[[Run, Row | str], None]
) -> None:
    began = time.process_time()
    async with simulated(Path("nodes"), manifest_of(group), inline=True) as swarm:
        async with asyncio.timeout(seconds):
            grown = await _grow(swarm, group)
        prefix = time.process_time() - began
        for run in group.runs:
            clock.stop()
            writing, outcome = forked(lambda: _settle(loop, clock), seconds=seconds)
            if writing >= 0:
                await _go_on(grown, run, writing, prefix)  # does not return
            clock.go_on()
            if outcome.error:
                tell(run, outcome.error)
            else:
                tell(run, json.loads(outcome.said))
        # What is left is a swarm in mid-step that nobody needs: ending it in order would take as long as a run.
        sys.stdout.flush()
        shutil.rmtree(Path.cwd(), ignore_errors=True)
        os._exit(0)


def _settle(loop: ForkableLoop, clock: WorkClock) -> None:
    """Make a fork independent of its parent."""
    clock.go_on()
    loop.renew()
    mine = tempfile.mkdtemp(prefix="fork-", dir=Path.cwd())
    shutil.copytree("nodes", Path(mine, "nodes"))
    os.chdir(mine)


async def _go_on(grown: Grown, run: Run, writing: int, prefix: float) -> None:
    """In the fork: let the attackers begin, train to the end, write the row, and end the process."""
    code = 1
    try:
        started = time.perf_counter()
        _turn(grown.members, run)
        await _trained(grown.members, last=run.setting.steps - 1)
        row = row_of(run, grown.members, grown.watch)
        measured = {
            "seconds": time.perf_counter() - started,
            "cpu_seconds": time.process_time(),
            "beginning_cpu_seconds": prefix,
        }
        said = json.dumps({**row, **measured}).encode()
        while said:
            said = said[os.write(writing, said) :]
        code = 0
    finally:
        if code:
            traceback.print_exc()
            sys.stderr.flush()
        shutil.rmtree(Path.cwd(), ignore_errors=True)
        os._exit(code)


async def _grow(swarm: SimulatedSwarm, group: Group) -> Grown:
    setting = group.setting
    coordinator = await swarm.coordinate()
    watch = Watch()
    members: list[Member] = []
    near = asyncio.Event()
    for stage in range(setting.stages):
        for replica in range(setting.replicas):
            # Every node could play a drill, and waits for a step that does not come.
            member = swarm.join(_name(stage, replica), stage=stage, attack=str(Attack.CONSTANT), drill_from=NEVER)
            member.attack = ""
            watch.add(member)
            members.append(member)
            if stage == 0:
                member.node.telemetry.losses = Noticed(
                    lambda entry: near.set() if entry[0] >= group.attack_from - 2 else None
                )
    await asyncio.gather(*(_until(member, member.node.invited) for member in members))
    # Training goes on without it, and it would ask everybody for their status again and again.
    coordinator.node.stop()
    await near.wait()
    return Grown(swarm=swarm, members=members, watch=watch)


def _turn(members: Sequence[Member], run: Run) -> None:
    """Some nodes are attackers from now on."""
    by_name = {member.name: member for member in members}
    bad = {by_name[_name(attacker.stage, attacker.replica)]: attacker for attacker in attackers(run.cell, run.seed)}
    partners = frozenset(member.peer for member, attacker in bad.items() if attacker.colluding)
    for member, attacker in bad.items():
        drill = member.node.drill
        assert drill is not None, "every node of the arena can play one"
        member.attack = attacker.drill
        drill.plan = parse_drill(attacker.drill, run.cell.attack_from)
        if attacker.colluding:
            drill.partners = partners - {member.peer}


async def _trained(members: Iterable[Member], *, last: int) -> None:
    """Wait until every node has applied step ``last``, or has ended, and stage 0 knows its loss."""
    await asyncio.gather(*(_trained_one(member, last) for member in members))


async def _trained_one(member: Member, last: int) -> None:
    done = asyncio.Event()
    telemetry = member.node.telemetry

    def look(_: object = None) -> None:
        applied = bool(telemetry.digests) and telemetry.digests[-1][0] >= last
        told = member.stage != 0 or (bool(telemetry.losses) and telemetry.losses[-1][0] >= last)
        if applied and told:
            done.set()

    for name in ("digests", "losses"):
        noticed = Noticed(look)
        noticed.extend(getattr(telemetry, name))
        setattr(telemetry, name, noticed)
    look()
    await _until(member, done)


async def _until(member: Member, event: asyncio.Event) -> None:
    """Wait for an event of a node, or for the node's end."""
    waiting = asyncio.ensure_future(event.wait())
    await asyncio.wait({waiting, member.task}, return_when=asyncio.FIRST_COMPLETED)
    waiting.cancel()


def _name(stage: int, replica: int) -> str:
    return f"s{stage}r{replica}"
