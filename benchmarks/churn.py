"""A swarm whose nodes are killed, frozen, cut off from their p2pd, sent away and replaced all the time.

``python -m benchmarks.churn --minutes 3 --json churn.json`` starts real node processes on loopback, does something to
one of them about every ten seconds, and compares the result with a run that nobody disturbs. Exits with 0 only if the
swarm has borne all of it; docs/churn.md says what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from benchmarks.churning.inject import FaultError
from benchmarks.churning.report import build_report, failures, table
from benchmarks.churning.runs import Options, churned, undisturbed
from benchmarks.churning.schedule import Cast, Rules, Schedule, ScheduleError, check, draw, parse_schedule
from benchmarks.churning.swarm import SwarmError, churn_manifest

INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print; returns the exit code."""
    chosen = _parser().parse_args(arguments)
    options = Options(
        minutes=chosen.minutes,
        seed=chosen.seed,
        stages=chosen.stages,
        replicas=chosen.replicas,
        least=chosen.least,
        log_level=chosen.log_level,
    )
    folder = Path(tempfile.mkdtemp(prefix="sentinel-churn-"))
    try:
        return asyncio.run(_uninterrupted(_benchmark(folder, options, chosen)))
    except (SwarmError, ScheduleError, FaultError, OSError) as error:
        print(f"churn: {error}", file=sys.stderr)
        return 1
    finally:
        if chosen.keep:
            print(f"state folders and logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.churn", description=__doc__)
    parser.add_argument("--minutes", type=float, default=3.0, metavar="M", help="how long faults go on")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the schedule of faults")
    parser.add_argument("--stages", type=int, default=3, metavar="N")
    parser.add_argument("--replicas", type=int, default=3, metavar="N", help="of each stage")
    parser.add_argument("--least", type=int, default=1, metavar="N", help="replicas that each stage keeps")
    parser.add_argument("--gap", type=float, default=10.0, metavar="S", help="seconds from fault to fault, about")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result to this file")
    parser.add_argument("--schedule", type=Path, metavar="FILE", help="faults to play instead of drawn ones")
    parser.add_argument("--undisturbed", type=Path, metavar="FILE", help="an earlier result with the losses to compare")
    parser.add_argument("--keep", action="store_true", help="keep the nodes' state folders and logs")
    parser.add_argument("--log-level", choices=("debug", "info", "warning"), default="info", help="of the nodes' logs")
    return parser


async def _uninterrupted(work: Coroutine[Any, Any, int]) -> int:
    """Do the work; SIGINT and SIGTERM end it, and with it everything that it has started."""
    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    task = asyncio.ensure_future(work)
    interrupt = asyncio.ensure_future(interrupted.wait())
    try:
        await asyncio.wait({task, interrupt}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
    finally:
        interrupt.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task
    print("interrupted; everything that the benchmark started has ended")
    return INTERRUPTED


async def _benchmark(folder: Path, options: Options, chosen: argparse.Namespace) -> int:
    schedule = _schedule(options, chosen)
    _tell(f"{len(schedule)} faults in {options.minutes:g} minutes, seed {options.seed}")
    outcome = await churned(folder / "churned", options, schedule, _tell)
    losses = _earlier_losses(chosen.undisturbed, options)
    if max(losses, default=-1) + 1 < outcome.steps:
        _tell(f"the same {outcome.steps} steps undisturbed")
        losses = await undisturbed(folder / "undisturbed", options, outcome.steps, _tell)
    report = build_report(options, outcome, losses)
    found = failures(report)
    if chosen.json is not None:
        swarm = churn_manifest(options.stages, options.replicas).swarm_id
        chosen.json.write_text(json.dumps({**report, "swarm": swarm, "failures": found}, indent=2) + "\n")
    for problem in report["problems"]:
        _tell(f"problem at {problem}")
    _tell(table(report, found))
    return 1 if found else 0


def _schedule(options: Options, chosen: argparse.Namespace) -> Schedule:
    """The drawn schedule, or the one of a file.

    Raises:
        ScheduleError: the file holds something else, or what no swarm of this size could do.
    """
    cast = Cast.of(options.stages, options.replicas, Rules(least=options.least))
    if chosen.schedule is None:
        return draw(options.seed, cast, stages=options.stages, seconds=60 * options.minutes, gap=chosen.gap)
    schedule = parse_schedule(chosen.schedule.read_text(encoding="utf-8"))
    check(schedule, cast)
    return schedule


def _earlier_losses(path: Path | None, options: Options) -> dict[int, float]:
    """The undisturbed losses of an earlier result; none if it was another model or other data."""
    if path is None:
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    if found.get("swarm") != churn_manifest(options.stages, options.replicas).swarm_id:
        _tell(f"{path} is of another swarm and is not used")
        return {}
    return {int(step): float(loss) for step, loss in found["losses_undisturbed"]}


def _tell(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
