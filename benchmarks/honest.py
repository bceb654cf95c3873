"""How often honest nodes are punished: ``python -m benchmarks.honest [--steps 10000] [--jobs N] [--json FILE]``.

Swarms of 3 stages x 3 replicas, all of them honest, train on real text in one process each: the node's own code over
memory, with audits at the manifest's default rate and mode ``enforce``. They go through all pairs of a learning-rate
schedule and a wire dtype, each with another seed of data and parameters, until their steps add up. In each of them one
node leaves politely and comes back, one is cut off in the middle of its work and comes back, and one more node joins
late.

The *refused share* is that of refused tensors among those that could have been: tensors judged after the warm-up of the
checker that judges them. A tensor that is flagged and used all the same, since others computed the same, counts as
confirmed, not as refused. A guard's refusal counts as refused too.

The JSON is a list of rows, one for each swarm, and last the total (``"swarm": "total"``). Each row keeps the alarms
themselves: who struck whom in which step for what. It is written anew after each swarm, and ``--resume`` goes on with
what it has. The exit code is 1 if an honest node was ejected, the refused share is 0.1 % or more, an audit found
somebody guilty or could not decide, or a swarm did not get to its end.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from itertools import cycle, islice
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import uvloop

from node import daemon
from node.boundary import Incoming
from node.guard import FlaggedError, Guard, Judged
from node.refusal_kinds import NOT_THEIR_FAULT
from node.simulated_swarm import Member, SimulatedSwarm, simulated
from protocol.errors import EjectedError, RemoteError
from protocol.manifest import Manifest
from verifier.audit import NEAR_FENCE
from verifier.verdicts import Direction, Reason

STAGES = 3
LAST_LOSSES = 5
MAX_SHARE = 0.001
"""Refused honest tensors that are too many."""
MAX_ALARMS = 400
"""Alarms kept word for word for each swarm; all are counted."""
AGES = (0, 30, 60, 120)
"""Steps that divide the life of a swarm: most false alarms come when the checker has just begun."""
PATIENCE_SECONDS = 60.0
"""For the start of a swarm."""
FAREWELL_SECONDS = 10.0
"""For nodes that came late, after the others have finished."""
SECONDS_A_STEP = 6.0
"""A swarm that takes longer than this on average is ended: half a second on an idle core."""

SCHEDULES: Mapping[str, Mapping[str, float]] = {
    "constant": {"learning_rate": 3e-3, "warmup_steps": 10, "min_lr_ratio": 1.0},
    "cosine": {"learning_rate": 3e-3, "warmup_steps": 10, "min_lr_ratio": 0.1},
    "peak": {"learning_rate": 1e-2, "warmup_steps": 3, "min_lr_ratio": 0.05},
    "jumpy": {"learning_rate": 2e-2, "warmup_steps": 1, "min_lr_ratio": 1.0, "clip_norm": 100.0},
}
"""Cosines end with the run. ``jumpy`` has a rate at which the loss leaps, and hardly any warm-up."""

WIRES = ("bf16", "fp32")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One swarm."""

    swarm: int
    schedule: str
    wire: str
    steps: int
    replicas: int = 3

    def manifest(self) -> Manifest:
        """Three stages of one layer on the standard library's sources; 9 microbatches of 2 x 64 tokens a step."""
        schedule = SCHEDULES[self.schedule]
        return Manifest.from_mapping(
            {
                "name": "honest",
                "model": {
                    **{"width": 64, "layers": STAGES, "heads": 4, "kv_heads": 2, "ffn": 128, "context": 64},
                    "seed": self.swarm,
                },
                "stages": {"layers_per_stage": [1] * STAGES, "min_replicas": self.replicas},
                "training": {
                    **{"steps": self.steps, "sequences_per_step": 6 * self.replicas, "sequences_per_microbatch": 2},
                    **{"decay_steps": max(1, self.steps - int(schedule["warmup_steps"])), **schedule},
                },
                "data": {"seed": 1000 + self.swarm},
                "wire": {"activation_dtype": self.wire, "gradient_dtype": self.wire},
            }
        )


@dataclass(slots=True, kw_only=True)
class Watched:
    """What the guards of all nodes of a swarm did."""

    judged: int = 0
    warming_up: int = 0
    """Of those, the ones that nothing could have refused."""
    confirmed: int = 0
    flagged: int = 0
    refused: int = 0
    """Of the flagged, those that were not found right by others, and so not used."""
    near_fence: Counter[str] = field(default_factory=Counter)
    """Tensors that passed but lie so near to a fence that they are audited more often, by the nearest statistic."""
    flags: Counter[str] = field(default_factory=Counter)
    """By ``direction reason``; a tensor can have several reasons."""
    broken: Counter[str] = field(default_factory=Counter)
    """Messages that a guard refused, by the kind of the error."""
    judged_microbatches: set[tuple[int, int]] = field(default_factory=set)
    """(step, microbatch) of which some tensor was judged in earnest..."""
    refused_microbatches: set[tuple[int, int]] = field(default_factory=set)
    """...and of which some tensor was refused."""
    judged_by_age: Counter[str] = field(default_factory=Counter)
    """Judged in earnest, by the range of steps since the start of the swarm."""
    refused_by_age: Counter[str] = field(default_factory=Counter)
    strikes: Counter[str] = field(default_factory=Counter)
    alarms: list[dict[str, object]] = field(default_factory=list)

    def refuse(self, step: int, microbatch: int) -> None:
        """Count a refused tensor."""
        self.refused_microbatches.add((step, microbatch))
        self.refused_by_age[age(step)] += 1

    def in_earnest(self, step: int, microbatch: int) -> None:
        """Count a tensor that could have been flagged."""
        self.judged_microbatches.add((step, microbatch))
        self.judged_by_age[age(step)] += 1

    def passed(self, judged: Judged) -> None:
        """Count a tensor that was accepted near its fence."""
        scores = judged.judgement.verdict.scores if judged.judgement is not None else {}
        nearest = max(scores, key=lambda name: scores[name], default="")
        if nearest and scores[nearest] >= NEAR_FENCE:
            self.near_fence[f"{judged.direction} {nearest}"] += 1

    def alarm(self, **about: object) -> None:
        """Keep an alarm word for word."""
        if len(self.alarms) < MAX_ALARMS:
            self.alarms.append(about)


@contextlib.contextmanager
def watching() -> Iterator[Watched]:
    """Count what the guards of nodes that begin in this block decide; the decisions stay theirs."""
    watched = Watched()

    class WatchedGuard(Guard):
        def judge(
            self,
            incoming: Incoming,
            *,
            sender: str,
            step: int,
            microbatch: int,
            direction: Direction,
            replicas: int,
            excused: bool = False,
        ) -> Judged:
            watched.judged += not excused
            try:
                judged = super().judge(
                    incoming,
                    sender=sender,
                    step=step,
                    microbatch=microbatch,
                    direction=direction,
                    replicas=replicas,
                    excused=excused,
                )
            except FlaggedError as flag:
                watched.flagged += 1
                watched.flags.update(f"{direction} {reason}" for reason in flag.reasons)
                watched.in_earnest(step, microbatch)
                watched.alarm(
                    **{"kind": "flag", "step": step, "microbatch": microbatch, "direction": str(direction)},
                    **{"by_stage": self._stage_of(self._me), "stage": self._stage_of(sender), "by": self._me[-8:]},
                    **{"reasons": [str(reason) for reason in flag.reasons], "text": str(flag), "peer": sender[-8:]},
                    rms=float(incoming.tensor.square().mean().sqrt()),
                )
                raise
            watched.confirmed += bool(judged.cleared)
            if excused:
                return judged  # counted when it was flagged
            if judged.judgement is not None and judged.judgement.verdict.warming_up:
                watched.warming_up += 1
            else:
                watched.in_earnest(step, microbatch)
                watched.passed(judged)
            return judged

        def breach(self, peer: str, error: RemoteError, step: int, microbatch: int) -> None:
            if isinstance(error, FlaggedError):
                watched.refused += 1
                watched.refuse(step, microbatch)
            elif error.kind not in NOT_THEIR_FAULT:
                watched.broken[error.kind] += 1
                watched.refuse(step, microbatch)
            super().breach(peer, error, step, microbatch)

        def strike(self, peer: str, reason: Reason, step: int, detail: str = "") -> None:
            watched.strikes[str(reason)] += 1
            watched.alarm(
                **{"kind": "strike", "step": step, "reason": str(reason), "text": detail, "peer": peer[-8:]},
                **{"by_stage": self._stage_of(self._me), "stage": self._stage_of(peer), "by": self._me[-8:]},
            )
            super().strike(peer, reason, step, detail)

        def _stage_of(self, peer: str) -> int | None:
            return self._view.stage_of(peer)

    with mock.patch.object(daemon, "Guard", WatchedGuard):
        yield watched


def age(step: int) -> str:
    """The range of steps that a step is in."""
    low = max(bound for bound in AGES if bound <= step)
    high = min((bound for bound in AGES if bound > step), default=None)
    return f"{low}+" if high is None else f"{low}-{high - 1}"


# one swarm -----------------------------------------------------------------------------------


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Train one swarm in an empty folder; returns its row."""
    started = time.monotonic()
    with watching() as watched:
        members, finished = uvloop.run(_train(case, folder))
    row = {**asdict(case), **_row(members, watched), "finished": finished}
    return {**row, "seconds": round(time.monotonic() - started, 1)}


async def _train(case: Case, folder: Path) -> tuple[list[Member], bool]:
    async with simulated(folder, case.manifest(), inline=True) as swarm:
        await swarm.coordinate()
        stayers = {member.name: member for member in swarm.fill(case.replicas)}
        for member in stayers.values():
            _keep_all_events(member)
        leaver, victim = _who_goes(case)
        goers = [stayers.pop(leaver), stayers.pop(victim)]
        changes = asyncio.get_running_loop().create_task(_change(case, swarm, goers, next(iter(stayers.values()))))
        try:
            async with asyncio.timeout(PATIENCE_SECONDS + case.steps * SECONDS_A_STEP):
                await asyncio.gather(*(member.outcome() for member in stayers.values()))
            late = [member.task for member in swarm.members if not member.node.settings.coordinates]
            await asyncio.wait(late, timeout=FAREWELL_SECONDS)
        finally:
            changes.cancel()
            await asyncio.gather(changes, return_exceptions=True)
        finished = all(member.node.finished for member in stayers.values())
    return swarm.members, finished


def _who_goes(case: Case) -> tuple[str, str]:
    """Names of the node that leaves politely and of the one that is cut off: of two stages, others in each swarm."""
    rng = random.Random(case.swarm)
    leaver, victim = rng.sample(range(STAGES), 2)
    return f"s{leaver}r{rng.randrange(case.replicas)}", f"s{victim}r{rng.randrange(case.replicas)}"


async def _change(case: Case, swarm: SimulatedSwarm, goers: Sequence[Member], clock: Member) -> None:
    """Let nodes go, come back and join, at a quarter, half and two thirds of the steps."""
    leaver, victim = goers
    await _until_step(clock, case.steps // 4)
    leaver.node.stop()
    await leaver.outcome()
    await _until_step(clock, case.steps // 4 + 4)
    _keep_all_events(swarm.join(leaver.name, stage=leaver.stage))
    await _until_step(clock, case.steps // 2)
    await crash(victim)
    await _until_step(clock, case.steps // 2 + 4)
    _keep_all_events(swarm.join(victim.name, stage=victim.stage))
    await _until_step(clock, 2 * case.steps // 3)
    _keep_all_events(swarm.join("late"))


async def _until_step(member: Member, step: int) -> None:
    while member.node.trainer is None or member.node.trainer.step < step:  # noqa: ASYNC110 - nothing tells of a step
        await asyncio.sleep(0.05)


async def crash(member: Member) -> None:
    """End a node as if its process were killed: no goodbye, its claim stays until it runs out."""
    node = member.node

    async def nothing() -> None:
        pass

    node.pipeline = None  # else it would finish the microbatches that it has
    if node.membership is not None:
        vars(node.membership)["release"] = nothing
    await node.network.close()
    member.task.cancel()
    await asyncio.gather(member.task, return_exceptions=True)


def _keep_all_events(member: Member) -> None:
    """A node keeps its newest events only; a long run has more."""
    telemetry = member.node.telemetry
    telemetry.events = type(telemetry.events)(telemetry.events)


def _row(members: Iterable[Member], watched: Watched) -> dict[str, Any]:
    nodes = [member.node for member in members if not member.node.settings.coordinates]
    peers = {member.peer for member in members}
    events = [event for node in nodes for event in node.telemetry.events]
    ejected = {event.peer for event in events if event.kind == "ejected" and event.peer in peers}
    ejected |= {member.peer for member in members if member.task.done() and _ended_by(member, EjectedError)}
    losses = max((list(node.telemetry.losses) for node in nodes), key=len)
    audits: Counter[str] = Counter()
    for node in nodes:
        audits.update(_counts(node.metrics.audits, "outcome"))
    return {
        "trained_steps": len(losses),
        "judged": watched.judged,
        "judged_in_earnest": watched.judged - watched.warming_up,
        "flagged": watched.flagged,
        "flags": dict(watched.flags),
        "guards": dict(watched.broken),
        "near_fence": dict(watched.near_fence),
        "refused": watched.refused + sum(watched.broken.values()),
        "judged_microbatches": len(watched.judged_microbatches),
        "refused_microbatches": len(watched.refused_microbatches),
        "judged_by_age": dict(watched.judged_by_age),
        "refused_by_age": dict(watched.refused_by_age),
        "confirmed": watched.confirmed,
        "cleared": sum(event.kind == "cleared" for event in events),
        "strikes": dict(watched.strikes),
        "quarantined": sum(event.kind == "quarantined" for event in events),
        "ejected": len(ejected),
        "audits": {outcome: count for outcome, count in audits.items() if count},
        "retried": sum(node.telemetry.counters.retried for node in nodes),
        "lost": max(node.telemetry.counters.lost for node in nodes),
        "loss": statistics.fmean(loss for _, loss in losses[-LAST_LOSSES:]) if losses else None,
        "highest_loss": max((loss for _, loss in losses), default=None),
        "alarms": watched.alarms,
    }


def _ended_by(member: Member, kind: type[BaseException]) -> bool:
    return not member.task.cancelled() and isinstance(member.task.exception(), kind)


def _counts(metric: Any, label: str) -> dict[str, int]:
    """Values of a counter by one label."""
    return {
        sample.labels[label]: int(sample.value)
        for family in metric.collect()
        for sample in family.samples
        if sample.name.endswith("_total")
    }


# many swarms ---------------------------------------------------------------------------------


def cases(steps: int, swarm_steps: int) -> list[Case]:
    """Swarms of ``swarm_steps`` whose steps add up to ``steps`` or a little more; the first eight differ in kind."""
    # Neighbours differ in both, so that few swarms see much.
    half = [(schedule, WIRES[number % 2]) for number, schedule in enumerate(SCHEDULES)]
    kinds = [*half, *((schedule, WIRES[1 - WIRES.index(wire)]) for schedule, wire in half)]
    return [
        Case(swarm=number, schedule=schedule, wire=wire, steps=swarm_steps)
        for number, (schedule, wire) in enumerate(islice(cycle(kinds), -(-steps // swarm_steps)))
    ]


_children: set[subprocess.Popen[str]] = set()
"""Those that run now."""


def run_child(case: Case) -> dict[str, Any]:
    """Train one swarm in a process of its own, which is ended if it takes too long; returns its row."""
    limit = 3 * PATIENCE_SECONDS + case.steps * SECONDS_A_STEP
    with tempfile.TemporaryDirectory(prefix="sentinel-honest-") as name:
        result = Path(name) / "row.json"
        command = [sys.executable, "-m", "benchmarks.honest", "--case", json.dumps(asdict(case)), "--folder", name]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as child:
            _children.add(child)
            try:
                _, errors = child.communicate(timeout=limit)
            except subprocess.TimeoutExpired:
                return {**asdict(case), "finished": False, "error": f"it took more than {limit:.0f} s"}
            finally:
                _children.discard(child)
                child.kill()
        if not result.exists():
            last = (errors.strip().splitlines() or ["no message"])[-1]
            return {**asdict(case), "finished": False, "error": f"exit code {child.returncode}: {last}"}
        row: dict[str, Any] = json.loads(result.read_text())
    return row


_COUNTED = ("trained_steps", "judged", "judged_in_earnest", "flagged", "refused", "confirmed", "cleared")
_ALSO_COUNTED = ("judged_microbatches", "refused_microbatches", "quarantined", "ejected", "retried", "lost")
_BY_WORD = ("flags", "guards", "strikes", "audits", "near_fence", "judged_by_age", "refused_by_age")


def total(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The last row: sums over all swarms, and the share of honest tensors that were refused."""
    sums: dict[str, Any] = {name: sum(row.get(name, 0) for row in rows) for name in (*_COUNTED, *_ALSO_COUNTED)}
    for name in _BY_WORD:
        words: Counter[str] = Counter()
        for row in rows:
            words.update(row.get(name, {}))
        sums[name] = dict(words)
    share = sums["refused"] / max(1, sums["judged_in_earnest"])
    unfinished = sum(not row.get("finished", False) for row in rows)
    return {"swarm": "total", "swarms": len(rows), **sums, "refused_share": share, "unfinished": unfinished}


def passes(row: Mapping[str, Any]) -> bool:
    """Whether a total is as it should be."""
    audits = row["audits"]
    innocent = row["ejected"] == 0 and not audits.get("guilty", 0) and not audits.get("disputed", 0)
    return bool(innocent and row["refused_share"] < MAX_SHARE and row["unfinished"] == 0)


HEADER = (
    "swarm  schedule  wire  steps   judged  refused  confirmed  cleared  strikes  quarantined  ejected  "
    "audits (not honest)  lost   loss"
)


def line(row: Mapping[str, Any]) -> str:
    """One row of the table."""
    if "judged" not in row:
        return f"{row['swarm']:>5}  {row['schedule']:<8}  {row['wire']:<4}  {row.get('error', 'no result')}"
    audits = row["audits"]
    strange = {outcome: count for outcome, count in audits.items() if outcome != "honest"}
    said = ", ".join(f"{count} {outcome}" for outcome, count in sorted(strange.items()))
    loss = f"{row['loss']:.2f}" if row.get("loss") is not None else ""
    return (
        f"{row['swarm']:>5}  {row.get('schedule', ''):<8}  {row.get('wire', ''):<4}  {row['trained_steps']:>5}  "
        f"{row['judged_in_earnest']:>7}  {row['refused']:>7}  {row['confirmed']:>9}  {row['cleared']:>7}  "
        f"{sum(row['strikes'].values()):>7}  {row['quarantined']:>11}  {row['ejected']:>7}  "
        f"{f'{sum(audits.values())} ({said})':>19}  {row['lost']:>4}  {loss:>5}"
    )


def last_line(row: Mapping[str, Any]) -> str:
    """The outcome in one line."""
    return (
        f"steps: {row['trained_steps']}, honest nodes ejected: {row['ejected']}, "
        f"refused: {100 * row['refused_share']:.4f} % of honest microbatches "
        f"({row['refused']} of {row['judged_in_earnest']} tensors judged after the warm-up)"
    )


def details(row: Mapping[str, Any]) -> str:
    """What the false alarms were, and when they came."""
    flags = ", ".join(f"{count} {word}" for word, count in sorted(row["flags"].items())) or "none"
    guards = ", ".join(f"{count} {word}" for word, count in sorted(row["guards"].items())) or "none"
    strikes = ", ".join(f"{count} {word}" for word, count in sorted(row["strikes"].items())) or "none"
    near = ", ".join(f"{count} {word}" for word, count in sorted(row["near_fence"].items())) or "none"
    judged, refused = row["judged_by_age"], row["refused_by_age"]
    ages = ", ".join(
        f"{100 * refused.get(steps, 0) / judged[steps]:.3f} % in steps {steps}"
        for steps in map(age, AGES)
        if judged.get(steps)
    )
    return (
        f"flags: {flags}\nguards: {guards}\nstrikes: {strikes}; {row['cleared']} taken back\n"
        f"refused: {ages or 'nothing could be'}\n"
        f"near a fence: {sum(row['near_fence'].values())} of {row['judged_in_earnest']} ({near})\n"
        f"microbatches refused somewhere: {row['refused_microbatches']} of {row['judged_microbatches']}"
    )


def save(path: Path | None, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows and their total, whole or not at all."""
    if path is None:
        return
    ordered = sorted(rows, key=lambda row: int(row["swarm"]))
    partial = path.with_name(path.name + ".part")
    partial.write_text(json.dumps([*ordered, total(ordered)], indent=1) + "\n")
    partial.replace(path)


def load(path: Path | None) -> list[dict[str, Any]]:
    """The finished rows of an earlier run."""
    if path is None or not path.exists():
        return []
    rows: list[dict[str, Any]] = json.loads(path.read_text())
    return [row for row in rows if row["swarm"] != "total" and row.get("finished")]


def run_all(
    wanted: Sequence[Case],
    *,
    jobs: int,
    path: Path | None,
    done: Sequence[dict[str, Any]] = (),
    run_one: Callable[[Case], dict[str, Any]] = run_child,
) -> dict[str, Any]:
    """Run what is not done yet, ``jobs`` swarms at a time; print and save each row. Returns the total."""
    names = {name.name for name in fields(Case)}
    known = [{name: row.get(name) for name in names} for row in done]
    rows = [row for row in done if {name: row.get(name) for name in names} in [asdict(case) for case in wanted]]
    print(HEADER)
    for row in rows:
        print(line(row), flush=True)
    with ThreadPoolExecutor(jobs) as pool:
        try:
            for row in pool.map(run_one, [case for case in wanted if asdict(case) not in known]):
                rows.append(row)
                print(line(row), flush=True)
                save(path, rows)
        finally:  # if it was interrupted, some run still
            for child in list(_children):
                child.kill()
    summary = total(rows)
    print(line(summary))
    print(details(summary))
    print(last_line(summary))
    return summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.honest",
        description="How often honest nodes are punished: trains honest swarms and counts false alarms.",
    )
    parser.add_argument("--steps", type=int, default=10_000, help="steps of all swarms together")
    parser.add_argument("--swarm-steps", type=int, default=250, help="steps of each swarm")
    parser.add_argument("--jobs", type=int, default=1, help="swarms at a time, each on about one core")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--resume", action="store_true", help="keep the finished swarms that FILE has")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.case is not None:
        torch.set_num_threads(1)
        (options.folder / "swarm").mkdir()
        row = run_case(Case(**json.loads(options.case)), options.folder / "swarm")
        (options.folder / "row.json").write_text(json.dumps(row))
        return 0
    if min(options.steps, options.swarm_steps, options.jobs) < 1:
        parser.error("--steps, --swarm-steps and --jobs are at least 1")
    done = load(options.json) if options.resume else []
    wanted = cases(options.steps, options.swarm_steps)
    try:
        summary = run_all(wanted, jobs=options.jobs, path=options.json, done=done)
    except KeyboardInterrupt:
        print("honest: interrupted; --resume goes on with what FILE has", file=sys.stderr)
        return 130
    return 0 if passes(summary) else 1


if __name__ == "__main__":
    sys.exit(main())
