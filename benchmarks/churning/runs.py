"""The two runs of the benchmark: one under churn, and one that nobody disturbs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.churning.play import Player
from benchmarks.churning.schedule import Kind, Schedule
from benchmarks.churning.swarm import EJECTED_EXIT_CODE, ChurnSwarm, SwarmError, churn_manifest, churn_swarm
from benchmarks.churning.watch import NOTABLE, Divergence, Notable, Stall

START_SECONDS = 240.0
"""For a whole swarm to start on a small, busy machine."""
SLOW_SECONDS = 8.0
"""From this length on a stall is described: who was in which state."""
CLAIM_GRACE_SECONDS = 5.0
"""A lease has ended for everybody so long after it ran out."""
IDLE_SECONDS = 120.0
"""The undisturbed run is given up after so long without a step."""

Tell = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line says."""

    minutes: float
    seed: int
    stages: int
    replicas: int
    least: int = 1
    """Replicas that each stage keeps, neither gone nor frozen nor new."""
    log_level: str = "info"


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaks:
    """What should not be there any more."""

    processes: list[str] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    claims: list[str] = field(default_factory=list)
    open_files: dict[str, int] = field(default_factory=dict)
    """Growth of the open files of each process that lived long enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What the run under churn has shown."""

    minutes: float
    steps: int
    faults: dict[str, int]
    skipped: list[str]
    happened: list[str]
    longest: Stall
    stalls: list[dict[str, Any]]
    lost: int
    retried: int
    divergences: list[Divergence]
    compared: int
    ejected: list[str]
    notable: list[Notable]
    arrivals: list[tuple[str, str, float]]
    losses: dict[int, float]
    leaks: Leaks
    problems: list[str]


async def churned(folder: Path, options: Options, schedule: Schedule, tell: Tell) -> Outcome:
    """Play a schedule on a new swarm.

    Raises:
        SwarmError: the swarm did not come up.
    """
    manifest = churn_manifest(options.stages, options.replicas)
    async with churn_swarm(folder, manifest, tell, log_level=options.log_level) as swarm:
        await _start(swarm, options)
        player = Player(swarm, least=options.least)
        begun = swarm.now()
        async with _stalls(swarm, player) as stalls:
            try:
                await player.play(schedule)
                await asyncio.sleep(max(0.0, begun + 60 * options.minutes - swarm.now()))
                minutes = (swarm.now() - begun) / 60
                await player.settle()
            finally:
                await player.cancel()
            claims = await _claims_of_the_dead(swarm)
        swarm.watch.clock.look(swarm.now())
        open_files = _open_files(swarm, begun)
        await swarm.end()
        leaks = Leaks(
            processes=[f"{process.name()} {process.pid}" for process in swarm.processes.left()],
            folders=_folders_left(swarm, folder / "run"),
            claims=claims,
            open_files=open_files,
        )
        return _outcome(swarm, player, minutes, stalls, leaks)


async def undisturbed(folder: Path, options: Options, steps: int, tell: Tell) -> dict[int, float]:
    """Train so many steps with a swarm that nobody disturbs; returns step -> loss.

    Raises:
        SwarmError: the swarm did not come up, or stopped training.
    """
    manifest = churn_manifest(options.stages, options.replicas)
    async with churn_swarm(folder, manifest, tell) as swarm:
        await _start(swarm, options)
        clock = swarm.watch.clock
        while clock.step < steps:
            await asyncio.sleep(0.25)
            if clock.waiting(swarm.now()) > IDLE_SECONDS:
                raise SwarmError(f"the undisturbed swarm stands at step {clock.step}: {_states(swarm)}")
        await asyncio.sleep(2.0)  # so that every status tells of the last step
        await swarm.end()
        return swarm.watch.losses


async def _start(swarm: ChurnSwarm, options: Options) -> None:
    swarm.say(f"starting {options.stages} stages x {options.replicas} replicas and a coordinator")
    await swarm.fill(options.replicas)
    if not await swarm.until(lambda: swarm.watch.clock.step > 0, START_SECONDS):
        raise SwarmError(f"no step was trained within {START_SECONDS:.0f} s: {_states(swarm)}")
    swarm.say("training has begun")


def _states(swarm: ChurnSwarm) -> dict[str, str]:
    return {life.key: life.brief() for life in swarm.lives if life.ended is None}


@contextlib.asynccontextmanager
async def _stalls(swarm: ChurnSwarm, player: Player) -> AsyncIterator[list[dict[str, Any]]]:
    """Describe every long wait for a step while it lasts: afterwards nobody remembers."""
    found: list[dict[str, Any]] = []

    async def look() -> None:
        while True:
            await swarm.until(lambda: swarm.watch.clock.waiting(swarm.now()) > SLOW_SECONDS, 1e9)
            step, since = swarm.watch.clock.step, swarm.now() - swarm.watch.clock.waiting(swarm.now())
            swarm.say(f"no new step for {SLOW_SECONDS:.0f} s")
            entry: dict[str, Any] = {"began": round(since, 1), "step": step, "nodes": _states(swarm)}
            entry["before"] = [f"{when:.1f} s: {fault}" for when, fault in player.moments[-3:]]
            found.append(entry)
            try:
                await swarm.until(lambda step=step: swarm.watch.clock.step > step, 1e9)  # type: ignore[misc]
            finally:
                entry["seconds"] = round(swarm.now() - since, 1)
                entry["after"] = _states(swarm)
            swarm.say(f"a new step after {entry['seconds']} s")

    task = asyncio.get_running_loop().create_task(look())
    try:
        yield found
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _claims_of_the_dead(swarm: ChurnSwarm) -> list[str]:
    """Claims of those who are gone that are still in somebody's view when every lease must have ended."""
    last = max((life.ended or 0.0 for life in swarm.lives), default=0.0)
    lease = swarm.manifest.network.lease_seconds + CLAIM_GRACE_SECONDS
    await asyncio.sleep(max(0.0, last + lease - swarm.now()))
    await swarm.until(lambda: not swarm.strange_claims(), CLAIM_GRACE_SECONDS)
    return swarm.strange_claims()


def _open_files(swarm: ChurnSwarm, begun: float) -> dict[str, int]:
    found = {}
    for life in swarm.living():
        for name, files in ((life.key, life.files), (f"{life.key} p2pd", life.helper_files)):
            if (growth := files.growth(max(begun, life.began))) is not None:
                found[name] = growth
    return found


def _folders_left(swarm: ChurnSwarm, place: Path) -> list[str]:
    """Socket folders without an excuse: only who was killed and never came back could not remove its own."""
    newest = {life.name: life for life in swarm.lives}
    excused = {life.sockets for life in newest.values() if life.killed}
    return sorted(path.name for path in place.iterdir() if path not in excused)


def _outcome(swarm: ChurnSwarm, player: Player, minutes: float, stalls: list[dict[str, Any]], leaks: Leaks) -> Outcome:
    watch = swarm.watch
    ended_so = (life.name for life in swarm.lives if life.child.process.returncode == EJECTED_EXIT_CODE)
    return Outcome(
        minutes=minutes,
        steps=watch.clock.step,
        faults={kind.value: player.done[kind.value] for kind in Kind},
        skipped=player.skipped,
        happened=[f"{when:.1f} s: {fault}" for when, fault in player.moments],
        longest=watch.clock.longest,
        stalls=stalls,
        lost=watch.lost(),
        retried=watch.total("retried"),
        divergences=watch.digests.divergences(),
        compared=watch.digests.compared(),
        ejected=sorted({*watch.ejected(), *ended_so}),
        notable=watch.notable(*NOTABLE),
        arrivals=player.arrivals,
        losses=watch.losses,
        leaks=leaks,
        problems=swarm.problems,
    )
