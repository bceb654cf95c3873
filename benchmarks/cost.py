"""What the checker adds to the training of a stage: ``python -m benchmarks.cost [--json FILE]``.

One microbatch is one sequence of 512 tokens at width 1024, bf16 on the wire, and a stage is one layer (``--layers``),
the least favourable case: the checks cost the same for a stage of many. The nodes' own code runs in simulated swarms of
3 stages x 2 replicas, one after another: without the checker, with the statistics, and with audits. After one step that
is not counted, what the compute jobs of all nodes take is divided by the microbatches that they trained. The unit is
milliseconds of CPU time of one thread for one microbatch at one stage, both ways: other load on the machine lengthens
wall time and not this. Medians over repetitions, in which the swarms take turns.

Two kinds of rows, since a difference of two swarms is noisier than what is to be measured:

* *between swarms*: the same step in a swarm with the checker and in one with ``mode = "off"``. Off still signs and
  checks sketches and digests, so this shows the statistics alone.
* *in place*: inside one swarm, the CPU time of the calls that belong to the checker against that of the rest.

Audits are measured in their steady state, all peers trusted and all tensors ordinary (``audit_suspicion = 1``), at a
rate that a few microbatches can show. Lower rates follow from the time of one audit and the number to be expected: the
rate, and a quarter more for each stage in the middle, whose audits may go on with the stage below. On probation, until
32 microbatches went well, a peer is audited ``audit_suspicion`` times as often, by default 16; that has a row of its
own.

The JSON is a list of ``{case, ours, rival, rival_name, unit, ratio}``, where ``ratio`` is ours / rival: 1.008 says that
the checker adds 0.8 %.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple
from unittest import mock

import torch

from node import boundary, jobs, simulated_swarm
from node.auditor import FOLLOW_CHANCE, Auditor
from node.guard import Guard
from node.history import ParameterHistory
from node.simulated_swarm import Member, SimulatedSwarm, simulated
from node.worker import InlineWorker, Priority
from protocol.manifest import Manifest

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

STAGES = 3
REPLICAS = 2
UNIT = "ms CPU per microbatch and stage"
WITHOUT = "the same without"
OFF = "mode = off"
DEFAULT_RATE = 1 / 64
RATES = (1 / 64, 1 / 16)
MEASURED_RATE = 1 / 4
"""Of audits in the swarm that measures them: a few microbatches see some."""
SUSPICION = 16.0
"""Default of ``audit_suspicion``."""
SOON = {"warmup_steps": 0, "minimum_history": 4, "audit_suspicion": 1.0}
"""Of the checker: judge from the second step on, and suspect nobody."""
LIMIT_SECONDS = 600.0
"""For one swarm."""

DONE = ("backward", "backward_only", "receive_last")
"""Jobs of which each microbatch has exactly one at each stage."""
NOT_PER_MICROBATCH = ("audit", "take_gradient", "_apply_in_worker", "_state", "_load")
"""Jobs that are audits, or that come once a step whatever the checker does."""

STATISTICS = ("judge", "accept", "end_step_checkers")
SKETCHES = ("sketch",)
STATEMENTS = ("body_digest", "sign_hop", "open_hop", "check_tensor", "check_receipt", "check_input_receipt")
"""Digests, signatures and guards: what the statements about a tensor cost, whether or not it is judged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is measured."""

    width: int = 1024
    context: int = 512
    layers: int = 1
    """Of each stage."""
    microbatches: int = 4
    """A step."""
    steps: int = 3
    """The first of them is not counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """Of one swarm, milliseconds of CPU per microbatch and stage unless it says otherwise."""

    training: float
    """All compute jobs of a microbatch but audits, with what the checks in them take."""
    statistics: float
    sketches: float
    statements: float
    update: float
    """Milliseconds of one replica's optimizer step, with the next."""
    history: float
    """Milliseconds in it for keeping the parameters of the step before, which audits need."""
    audits: float
    audited: float
    """Audits per microbatch and stage."""
    step_seconds: float
    """Wall time of a step."""


@dataclass(slots=True, kw_only=True)
class Clock:
    """CPU seconds of this thread by what they were spent on; counts only while ``running``."""

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    calls: Counter[str] = field(default_factory=Counter)
    running: bool = False

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the time spent inside to ``name``."""
        started = time.thread_time()
        try:
            yield
        finally:
            if self.running:
                self.seconds[name] += time.thread_time() - started
                self.calls[name] += 1

    def wrap(self, name: str, call: Callable[..., T]) -> Any:
        """``call``, timed."""

        def timed(*args: Any, **kwargs: Any) -> T:
            with self.timed(name):
                return call(*args, **kwargs)

        return timed

    def sum(self, names: Sequence[str]) -> float:
        """Seconds of several names."""
        return sum(self.seconds.get(name, 0.0) for name in names)


def evenly(start: float = 0.5) -> Callable[[], float]:
    """Draws from [0, 1) that fall into each part of it as often as they should: multiples of the golden ratio."""
    value = start

    def draw() -> float:
        nonlocal value
        value = (value + 0.6180339887498949) % 1.0
        return value

    return draw


@contextlib.contextmanager
def clocked() -> Iterator[Clock]:
    """Time the compute jobs, and the checks in them, of nodes that begin in this block."""
    clock = Clock()
    draw = evenly()

    class ClockedWorker(InlineWorker):
        async def run(self, priority: Priority, fn: Callable[[*Ts], T], *args: *Ts) -> T:
            kind = "audit" if priority is Priority.AUDIT else getattr(fn, "__name__", "")
            timed: Callable[[*Ts], T] = clock.wrap(f"job {kind}", fn)
            return await super().run(priority, timed, *args)

    def begin_auditor(auditor: Auditor, **parts: Any) -> None:
        begin(auditor, **(parts | {"chance": draw}))

    begin = Auditor.__init__
    with contextlib.ExitStack() as stack:

        def put(owner: object, name: str, value: object) -> None:
            stack.enter_context(mock.patch.object(owner, name, value))

        put(simulated_swarm, "InlineWorker", ClockedWorker)
        put(Auditor, "__init__", begin_auditor)
        for owner, names in (
            (boundary, (*SKETCHES, *STATEMENTS[:4])),
            (jobs, STATEMENTS[4:]),
            (Guard, STATISTICS),
            (ParameterHistory, ("about_to_change",)),
        ):
            for name in names:
                put(owner, name, clock.wrap(name, getattr(owner, name)))
        yield clock


def manifest(size: Size, *, mode: str, audit_rate: float) -> Manifest:
    """A swarm whose learning rate is so small that nothing is ever out of the ordinary."""
    return Manifest.from_mapping(
        {
            "name": "cost",
            "model": {
                **{"width": size.width, "layers": STAGES * size.layers, "heads": max(1, size.width // 64)},
                **{"kv_heads": max(1, size.width // 256), "ffn": 8 * size.width // 3, "context": size.context},
            },
            "stages": {"layers_per_stage": [size.layers] * STAGES, "min_replicas": REPLICAS},
            "training": {
                **{"steps": size.steps, "learning_rate": 1e-6, "warmup_steps": 0},
                **{"sequences_per_step": size.microbatches, "sequences_per_microbatch": 1},
            },
            "wire": {"activation_dtype": "bf16", "gradient_dtype": "bf16"},
            "verifier": {"mode": mode, "audit_rate": audit_rate, **SOON},
            # Many nodes share one thread, so each is slow to answer.
            "network": {
                **{"hop_timeout_seconds": 300.0, "heartbeat_seconds": 30.0, "dead_after_seconds": 300.0},
                **{"lease_seconds": 120.0, "renew_seconds": 30.0},
            },
        }
    )


def measure(size: Size, *, mode: str = "enforce", audit_rate: float = 0.0) -> Spent:
    """Train one swarm and divide what its compute jobs took."""
    with clocked() as clock, tempfile.TemporaryDirectory(prefix="sentinel-cost-") as folder:
        return asyncio.run(_measure(Path(folder), clock, size, manifest(size, mode=mode, audit_rate=audit_rate)))


async def _measure(folder: Path, clock: Clock, size: Size, settings: Manifest) -> Spent:
    started = time.monotonic()

    async def start_clock(swarm: SimulatedSwarm) -> None:
        """Count from the second step on, when every node is in it."""
        nonlocal started
        while not all(_step(member) >= 1 for member in swarm.members[1:]):  # noqa: ASYNC110 - nothing tells of a step
            await asyncio.sleep(0.002)
        clock.running, started = True, time.monotonic()

    async with simulated(folder, settings, inline=True) as swarm:
        await swarm.coordinate()
        members = swarm.fill(REPLICAS)
        starting = asyncio.get_running_loop().create_task(start_clock(swarm))
        async with asyncio.timeout(LIMIT_SECONDS):
            outcomes = await asyncio.gather(*(member.outcome() for member in members))
        seconds = time.monotonic() - started
        clock.running = False
        starting.cancel()
    for member, outcome in zip(members, outcomes, strict=True):
        if outcome is not None or not member.node.finished:
            raise RuntimeError(f"node {member.name} did not finish: {outcome}")
    return spent(clock, step_seconds=seconds / (size.steps - 1))


def spent(clock: Clock, *, step_seconds: float = 0.0) -> Spent:
    """Divide what a clock counted by the microbatches that it saw, each once for each stage."""
    done = max(1, sum(clock.calls[f"job {name}"] for name in DONE))
    updates = max(1, clock.calls["job _apply_in_worker"])
    milliseconds = 1000.0 / done
    counted = [
        name
        for name in clock.seconds
        if name.startswith("job ") and name.removeprefix("job ") not in NOT_PER_MICROBATCH
    ]
    return Spent(
        training=milliseconds * (clock.sum(counted) + clock.sum(["end_step_checkers"])),
        statistics=milliseconds * clock.sum(STATISTICS),
        sketches=milliseconds * clock.sum(SKETCHES),
        statements=milliseconds * clock.sum(STATEMENTS),
        update=1000.0 * clock.sum(["job _apply_in_worker"]) / updates,
        history=1000.0 * clock.sum(["about_to_change"]) / updates,
        audits=milliseconds * clock.sum(["job audit"]),
        audited=clock.calls["job audit"] / done,
        step_seconds=step_seconds,
    )


def _step(member: Member) -> int:
    return member.node.trainer.step if member.node.trainer is not None else 0


# the report ----------------------------------------------------------------------------------


def median(of: Sequence[Spent]) -> Spent:
    """Each field's median."""
    return Spent(**{item.name: statistics.median(getattr(one, item.name) for one in of) for item in fields(Spent)})


def row(case: str, ours: float, rival: float, rival_name: str = WITHOUT, unit: str = UNIT) -> dict[str, object]:
    """One comparison."""
    ratio = ours / rival if rival > 0 else float("nan")
    return {
        **{"case": case, "ours": round(ours, 3), "rival": round(rival, 3), "rival_name": rival_name},
        **{"unit": unit, "ratio": round(ratio, 5)},
    }


def report(off: Spent, checked: Spent, audited: Spent) -> list[dict[str, object]]:
    """Rows from the medians of the three swarms: checker off; statistics alone; audits at ``MEASURED_RATE``."""
    bare = checked.training - checked.statistics - checked.sketches - checked.statements
    judged = checked.statistics + checked.sketches
    each = audited.audits / audited.audited if audited.audited > 0 else 0.0

    def more(rate: float) -> float:
        """What audits at a rate add to a microbatch at a stage."""
        return each * rate * (1.0 + FOLLOW_CHANCE * (STAGES - 2) / STAGES)

    return [
        row("statistics and sketches, in place", bare + checked.statements + judged, bare + checked.statements),
        row("statistics alone, in place", bare + checked.statistics, bare),
        row("sketches alone, in place", bare + checked.sketches, bare),
        row("digests, signatures and guards, in place", bare + checked.statements, bare),
        row("all of these, in place", checked.training, bare),
        row("step with statistics, between swarms", checked.training, off.training, OFF),
        row("wall time of a step with statistics, between swarms", checked.step_seconds, off.step_seconds, OFF, "s"),
        row("one audit against one microbatch", each, checked.training, "training a microbatch"),
        row(
            f"audits drawn at {_fraction(MEASURED_RATE)}, per microbatch",
            audited.audited,
            MEASURED_RATE,
            "the rate",
            "audits",
        ),
        row(f"audits at {_fraction(MEASURED_RATE)}, in place", checked.training + audited.audits, checked.training),
        *(
            row(f"audits at {_fraction(rate)}, by the time of one", checked.training + more(rate), checked.training)
            for rate in RATES
        ),
        row(
            f"audits at {_fraction(DEFAULT_RATE)} on probation, by the time of one",
            checked.training + more(min(1.0, SUSPICION * DEFAULT_RATE)),
            checked.training,
        ),
        row(
            "optimizer step that keeps the last parameters for audits, in place",
            audited.update,
            audited.update - audited.history,
            unit="ms CPU per step and replica",
        ),
    ]


def _fraction(rate: float) -> str:
    return f"1/{round(1 / rate)}"


def compare(size: Size, *, repetitions: int) -> list[dict[str, object]]:
    """Measure the three swarms in turn, so often, and compare their medians."""
    kinds: dict[str, dict[str, Any]] = {
        "off": {"mode": "off"},
        "checked": {},
        "audited": {"audit_rate": MEASURED_RATE},
    }
    seen: dict[str, list[Spent]] = {kind: [] for kind in kinds}
    for repetition in range(repetitions):
        for kind, settings in kinds.items():
            started = time.monotonic()
            seen[kind].append(measure(size, **settings))
            gc.collect()
            seconds = time.monotonic() - started
            print(
                f"{repetition + 1}/{repetitions} {kind}: {seconds:.0f} s: {seen[kind][-1]}", file=sys.stderr, flush=True
            )
    return report(*(median(seen[kind]) for kind in kinds))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cost", description="What the checker adds to a step.")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--repetitions", type=int, default=3, help="of each swarm (half a minute each)")
    parser.add_argument("--layers", type=int, default=1, help="of each stage")
    parser.add_argument("--microbatches", type=int, default=4, help="a step")
    parser.add_argument("--steps", type=int, default=3, help="of each swarm; the first is not counted")
    options = parser.parse_args(arguments)
    if min(options.repetitions, options.layers, options.microbatches) < 1 or options.steps < 2:
        parser.error("--repetitions, --layers and --microbatches are at least 1, --steps at least 2")
    torch.set_num_threads(1)
    size = Size(layers=options.layers, microbatches=options.microbatches, steps=options.steps)
    rows = compare(size, repetitions=options.repetitions)
    for entry in rows:
        print(
            f"{entry['case']:<52} {entry['ours']:>9} against {entry['rival']:>9} {entry['unit']} "
            f"({entry['rival_name']}): ratio {entry['ratio']}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
