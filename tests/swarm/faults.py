"""Faults by schedule in a swarm of the harness: ``at step 12, on s1r0, do kill``.

The schedule and what is done to a process are those of ``benchmarks.churning``; here they meet the harness. Nodes have
the names that ``Swarm.fill`` gives them. Steps are seen at /status.
"""

from __future__ import annotations

import asyncio

from benchmarks.churning import inject
from benchmarks.churning.schedule import COORDINATOR, Fault, Kind, Schedule, parse_schedule, stage_of
from node.demo_processes import Child
from tests.swarm.harness import Swarm

STEP_SECONDS = 90.0
"""For the swarm to get to the step at which a fault is due."""
LEAVE_SECONDS = 30.0
"""Within which a node has to have left after SIGTERM, or when it cannot go on."""
NOTICE_SECONDS = 10.0
"""Within which a node has to notice that its p2pd is gone."""


def newest(swarm: Swarm, name: str) -> Child:
    """The process of a node, or the last one of several."""
    return next(child for child in reversed(swarm.children) if child.name == name)


def running(swarm: Swarm) -> list[Child]:
    """The nodes whose process runs, without the coordinator."""
    return [child for child in swarm.children if child.running and child.name != COORDINATOR]


async def play(swarm: Swarm, text: str, *, watched: str) -> None:
    """Do each fault of a schedule once the node ``watched`` is at its step, which it must live to see."""
    schedule: Schedule = parse_schedule(text)
    for fault in schedule:
        assert not fault.second, "tests wait for steps, not for time"
        await swarm.until(
            newest(swarm, watched), lambda status, fault=fault: fault.due(status["step"], 0.0), seconds=STEP_SECONDS
        )
        await do(swarm, fault)


async def do(swarm: Swarm, fault: Fault) -> None:
    """Do one fault; returns once it has had its direct effect. Raises AssertionError if it has not."""
    match fault.kind:
        case Kind.KILL | Kind.SEED_DEATH:
            await inject.kill(newest(swarm, fault.node))
        case Kind.FREEZE | Kind.CUT | Kind.SLOW:
            await inject.endure(newest(swarm, fault.node), fault.kind, fault.length)
        case Kind.TERM:
            child = newest(swarm, fault.node)
            inject.terminate(child)
            assert await inject.wait_ended(child, LEAVE_SECONDS) == 0, child.last_words()
        case Kind.P2PD_DEATH:
            child = newest(swarm, fault.node)
            inject.kill_helper(child)
            await stops_training(swarm, child)
            assert await inject.wait_ended(child, LEAVE_SECONDS) is not None, f"it hangs: {child.last_words()}"
        case Kind.JOIN | Kind.REJOIN if fault.node == COORDINATOR:
            await swarm.coordinate(path=swarm.folder / "swarm.toml")
        case Kind.JOIN | Kind.REJOIN:
            await swarm.join(fault.node, stage=stage_of(fault.node))


async def stops_training(swarm: Swarm, child: Child) -> None:
    """Wait until a node no longer says that it trains, or has ended already."""
    try:
        async with asyncio.timeout(NOTICE_SECONDS):
            while child.running and (await swarm.status(child)).get("state") == "training":  # noqa: ASYNC110
                await asyncio.sleep(0.2)  # /status can only be polled
    except TimeoutError:
        raise AssertionError(f"{child.name} notices nothing for {NOTICE_SECONDS:.0f} s: {child.last_words()}") from None
