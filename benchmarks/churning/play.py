"""Carries a schedule out on a swarm, and looks whether each fault had the consequences that it should have."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

from benchmarks.churning import inject
from benchmarks.churning.inject import FaultError
from benchmarks.churning.schedule import ARRIVALS, COORDINATOR, LASTING, Fault, Kind, Schedule, stage_of
from benchmarks.churning.swarm import LEAVE_SECONDS, ChurnSwarm, Life, SwarmError

HOLD_SECONDS = 60.0
"""How long a fault waits until its stage can bear it. The schedule was drawn without knowing how long a node takes."""
NOTICE_SECONDS = 30.0
"""Within which a node has to have ended after its p2pd died."""
CAUGHT_UP_SECONDS = 90.0
"""Within which a node that came, or was frozen, has to train."""


@dataclass(slots=True)
class Player:
    """Plays one schedule on one swarm."""

    swarm: ChurnSwarm
    least: int
    """Other replicas that a stage has to have, really training, before something is done to one."""
    done: Counter[str] = field(default_factory=Counter)
    """Faults that happened, by kind."""
    skipped: list[str] = field(default_factory=list)
    """Faults that could not happen, and why."""
    moments: list[tuple[float, Fault]] = field(default_factory=list)
    """What happened when, by the swarm's clock."""
    arrivals: list[tuple[str, str, float]] = field(default_factory=list)
    """(node, what it came back from, seconds until it trained)."""
    _after: set[asyncio.Task[None]] = field(default_factory=set)

    async def play(self, schedule: Schedule) -> None:
        """Do every fault when it is due; what has to wait moves all later ones back."""
        begun = self.swarm.now()
        held = 0.0
        for fault in schedule:
            await self._until_due(fault, begun + held)
            since = self.swarm.now()
            await self.swarm.until(lambda fault=fault: not self._why_not(fault), HOLD_SECONDS)  # type: ignore[misc]
            if why := self._why_not(fault):
                self.skipped.append(f"{fault}: {why}")
                self.swarm.say(f"left out {fault.kind} of {fault.node}: {why}")
            else:
                await self._perform(fault)
            held += self.swarm.now() - since

    async def settle(self) -> None:
        """Wait until what has been begun is over: freezes, and nodes that come or leave."""
        await asyncio.gather(*self._after, return_exceptions=True)

    async def cancel(self) -> None:
        """Give up what has been begun; whoever is frozen is thawed."""
        for task in self._after:
            task.cancel()
        await asyncio.gather(*self._after, return_exceptions=True)

    async def _until_due(self, fault: Fault, begun: float) -> None:
        while not fault.due(self.swarm.watch.clock.step, self.swarm.now() - begun):
            rest = fault.second + begun - self.swarm.now()
            await asyncio.sleep(max(0.05, min(rest, 1.0)))  # a step is learnt by polling

    def _why_not(self, fault: Fault) -> str:
        """Why a fault has to wait; empty if it need not."""
        life = self.swarm.life(fault.node)
        if fault.kind in ARRIVALS:
            return "" if life is None or life.ended is not None else f"{fault.node} has not ended yet"
        if life is None or not life.here:
            return f"{fault.node} is not there"
        if life.frozen:
            return f"{fault.node} is frozen"
        stage = stage_of(fault.node)
        if stage is None or len(self.swarm.reliable(stage, without=fault.node)) >= self.least:
            return ""
        return f"too few other replicas of stage {stage} train"

    async def _perform(self, fault: Fault) -> None:
        self.done[fault.kind.value] += 1
        self.moments.append((self.swarm.now(), fault))
        length = f" for {fault.length:.1f} s" if fault.length else ""
        life = self.swarm.life(fault.node)
        was = f"  ({life.brief()})" if life is not None and fault.kind not in ARRIVALS else ""
        self.swarm.say(f"{fault.kind} {fault.node}{length}{was}")
        if fault.kind in ARRIVALS:
            self._later(self._arrive(fault))
            return
        assert life is not None  # else the fault would have been left out
        try:
            await self._harm(life, fault)
        except FaultError as error:
            self.swarm.problem(str(error))

    async def _harm(self, life: Life, fault: Fault) -> None:
        if fault.kind in LASTING:
            life.frozen = True
            self._later(self._endures(life, fault))
            return
        life.fault = fault.kind
        match fault.kind:
            case Kind.TERM:
                inject.terminate(life.child)
                self._later(self._leaves(life, 0, LEAVE_SECONDS))
            case Kind.P2PD_DEATH:
                inject.kill_helper(life.child)
                self._later(self._leaves(life, 1, NOTICE_SECONDS))
            case _:
                await self._kill(life)

    async def _kill(self, life: Life) -> None:
        life.killed = True
        await inject.kill(life.child)

    async def _endures(self, life: Life, fault: Fault) -> None:
        try:
            await inject.endure(life.child, fault.kind, fault.length)
        finally:
            life.frozen = False
        self.swarm.say(f"{life.name} is well again after {fault.kind}")
        await self._trains(life, fault.kind)

    async def _leaves(self, life: Life, expected: int, seconds: float) -> None:
        """See a node off that has been told to leave, or cannot go on: it ends, and nothing of it stays."""
        since = self.swarm.now()
        code = await inject.wait_ended(life.child, seconds)
        took = self.swarm.now() - since
        if code is None:
            self.swarm.problem(f"{life.key} still runs {seconds:.0f} s after {life.fault}: {life.child.last_words()}")
            await self._kill(life)
            return
        self.swarm.say(f"{life.name} ended {took:.1f} s after {life.fault} with code {code}")
        if code != expected:
            self.swarm.problem(f"{life.key} ended with {code}, not {expected}, after {life.fault}")
        if life.sockets is not None and life.sockets.exists():
            self.swarm.problem(f"{life.key} left {life.sockets} behind after {life.fault}")

    async def _arrive(self, fault: Fault) -> None:
        """Start a node, or start it again; a person would try once more if that fails."""
        name = fault.node
        for attempt in (1, 2):
            try:
                life = await (self.swarm.coordinate() if name == COORDINATOR else self.swarm.join(name))
                break
            except SwarmError as error:
                self.swarm.problem(f"attempt {attempt}: {error}")
        else:
            return
        self.swarm.say(f"{name} is up ({fault.kind})")
        if name != COORDINATOR:
            await self._trains(life, fault.kind)

    async def _trains(self, life: Life, what: str) -> None:
        """Wait until a node takes part again."""
        since = self.swarm.now()

        def settled() -> bool:
            return not life.here or (life.seen > since and life.trains(self.swarm.now(), self.swarm.watch.clock.step))

        if not await self.swarm.until(settled, CAUGHT_UP_SECONDS):
            self.swarm.problem(f"{life.key} does not train {CAUGHT_UP_SECONDS:.0f} s after {what}: {life.brief()}")
        elif life.here:
            took = self.swarm.now() - since
            self.arrivals.append((life.name, what, round(took, 1)))
            self.swarm.say(f"{life.name} trains {took:.1f} s after {what}")

    def _later(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._after.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._after.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            failed = isinstance(error, FaultError)
            self.swarm.problem(str(error) if failed else f"the benchmark itself failed: {error!r}")
