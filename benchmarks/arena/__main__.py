"""The arena: whole swarms under attack, with and without the checker.

``python -m benchmarks.arena --suite quick|paper|beyond [--seeds N] [--jobs N] [--cells PATTERN]
[--defences off sentinel all] --json FILE [--docs FILE [--also FILE ...]] [--resume]``. Swarms that differ only in
their attackers share one honest beginning, from which each is forked. The JSON is written after each swarm, so that
``--resume`` goes on where an interrupted run was left.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks.arena import report
from benchmarks.arena.cells import DEFENCES, SUITES, Group, Run, groups, runs, selected, suite_cells
from benchmarks.arena.score import Row, joined

RUN_SECONDS = 900.0
"""Longest that one swarm may take, and the beginning that it shares; the largest take a minute on a quiet core."""

ERROR_CHARS = 2000


def main(arguments: Sequence[str]) -> int:
    """Run a suite; returns the exit code: 1 if a swarm could not be run to its end."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.arena", description=__doc__)
    parser.add_argument("--suite", choices=SUITES, required=True)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds for each cell, from 0 on (1)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="N", help="swarms at a time (CPUs)")
    parser.add_argument("--cells", default="*", metavar="PATTERN", help="only cells whose name meets it, as paper/b*")
    parser.add_argument("--defences", nargs="*", choices=DEFENCES, default=DEFENCES, help="only these (all three)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="where the results go")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="write the tables there too, as Markdown")
    parser.add_argument(
        "--also", type=Path, nargs="*", default=[], metavar="FILE", help="results of other suites for it"
    )
    parser.add_argument("--resume", action="store_true", help="keep what the JSON file holds, and run the rest")
    parser.add_argument("--run-seconds", type=float, default=RUN_SECONDS, metavar="S", help="limit of one swarm")
    parser.add_argument("--group", nargs="+", metavar="KEY", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    cells = selected(suite_cells(options.suite), options.cells)
    wanted = [run for run in runs(cells, options.seeds) if run.defence in options.defences]
    if options.group is not None:
        return _run_group([run for run in wanted if run.key in options.group], options.run_seconds)
    book = Book(options.json, keep=options.resume)
    missing = [run for run in wanted if not book.has(run)]
    print(f"arena: {len(missing)} swarms to run, {options.jobs} at a time", file=sys.stderr, flush=True)
    children = Children(options.suite, options.seeds, options.run_seconds)
    pool = ThreadPoolExecutor(max_workers=max(1, options.jobs))
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C, so that no child is left behind
    try:
        futures = [pool.submit(children.run, group, book) for group in groups(missing)]
        for future in futures:
            future.result()
    except KeyboardInterrupt:
        children.end()
        pool.shutdown(wait=True, cancel_futures=True)
        print(f"arena: interrupted; go on with --resume --json {options.json}", file=sys.stderr)
        return 130
    rows = joined(book.rows, {cell.name: cell.undefended for suite in SUITES for cell in suite_cells(suite)})
    # In the order of the suite, not in that in which they happened to end.
    places = {(run.cell.name, run.defence, run.seed): place for place, run in enumerate(wanted)}
    rows.sort(key=lambda row: places.get((row["cell"], row["defence"], row["seed"]), len(places)))
    book.save(rows)
    print(report.table(rows))
    if options.docs is not None:
        others = [row for path in options.also for row in json.loads(path.read_text())]
        options.docs.write_text(report.markdown([*rows, *others], book.failures, book.about), encoding="utf-8")
    for failure in book.failures:
        print(f"arena: {failure['key']} failed: {failure['error'][-300:]}", file=sys.stderr)
    return 1 if book.failures else 0


def _run_group(wanted: Sequence[Run], seconds: float) -> int:
    """In a child: run one group, and print a line of JSON for each of its runs."""
    from benchmarks.arena.forking import WorkClock  # the parent does without all of this

    clock = WorkClock().install()
    from benchmarks.arena.swarm import run_group

    def tell(run: Run, outcome: Row | str) -> None:
        print(json.dumps([run.key, outcome]), flush=True)

    for group in groups(wanted):
        run_group(group, clock=clock, seconds=seconds, tell=tell)
    return 0


class Book:
    """The results so far, in memory and in a file that is whole at any moment."""

    def __init__(self, path: Path, *, keep: bool) -> None:
        """``keep``: begin with what the file holds, less the failures, which are run again."""
        self._path = path
        self._lock = threading.Lock()
        self.rows: list[Row] = json.loads(path.read_text()) if keep and path.exists() else []
        self.failures: list[dict[str, str]] = []
        self.about = {
            "machine": platform.machine(),
            "cpus": os.cpu_count() or 1,
            "python": platform.python_version(),
        }

    def has(self, run: Run) -> bool:
        """Whether a run is done."""
        wanted = (run.cell.name, run.defence, run.seed)
        return any((row["cell"], row["defence"], row["seed"]) == wanted for row in self.rows)

    def add(self, row: Row) -> None:
        """Note a result, and write it down."""
        with self._lock:
            self.rows.append(row)
            self._write(self.rows)

    def fail(self, run: Run, error: str) -> None:
        """Note that a swarm was not run to its end, and why."""
        with self._lock:
            self.failures.append({"key": run.key, "error": error[-ERROR_CHARS:]})

    def save(self, rows: list[Row]) -> None:
        """Write the final rows."""
        with self._lock:
            self._write(rows)

    def _write(self, rows: list[Row]) -> None:
        part = self._path.with_name(self._path.name + ".part")
        part.write_text(json.dumps(rows, indent=1) + "\n")
        part.replace(self._path)


class Children:
    """One child process for each group of swarms. What they leave behind, or a hang of them, ends with it."""

    def __init__(self, suite: str, seeds: int, run_seconds: float) -> None:
        self._command = [sys.executable, "-m", "benchmarks.arena", "--suite", suite, "--json", os.devnull]
        self._command += ["--seeds", str(seeds), "--run-seconds", str(run_seconds), "--group"]
        self._run_seconds = run_seconds
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = threading.Event()

    def run(self, group: Group, book: Book) -> None:
        """Run the swarms of one group, and note the result or the failure of each."""
        if self._ended.is_set():
            return
        missing = {run.key: run for run in group.runs}
        with tempfile.TemporaryDirectory(prefix="sentinel-arena-") as folder:
            log = Path(folder) / "log"
            with log.open("wb") as errors:
                # A group of its own, so that nothing of it is left, and TMPDIR, so that its files go with it.
                child = subprocess.Popen(
                    [*self._command, *missing],
                    stdout=subprocess.PIPE,
                    stderr=errors,
                    text=True,
                    start_new_session=True,
                    env={**os.environ, "TMPDIR": folder, "OMP_NUM_THREADS": "1"},
                )
                self._running.add(child)
                # The child limits its runs itself; this is for a child that does not.
                limit = threading.Timer((len(missing) + 2) * self._run_seconds, _kill, [child])
                limit.start()
                try:
                    assert child.stdout is not None
                    for line in child.stdout:
                        key, outcome = json.loads(line)
                        _note(book, missing.pop(key), outcome, log)
                finally:
                    limit.cancel()
                    _kill(child)
                    self._running.discard(child)
            for run in () if self._ended.is_set() else missing.values():
                _note(book, run, f"its process ended with code {child.returncode}", log)

    def end(self) -> None:
        """Kill what runs, and start nothing more."""
        self._ended.set()
        for child in list(self._running):
            _kill(child)


def _note(book: Book, run: Run, outcome: Row | str, log: Path) -> None:
    if isinstance(outcome, str):
        book.fail(run, f"{outcome}\n{log.read_text(errors='replace')}")
        print(f"arena: {run.key}: {outcome}", file=sys.stderr, flush=True)
    else:
        book.add(outcome)
        print(report.line(outcome), file=sys.stderr, flush=True)


def _kill(child: subprocess.Popen[str]) -> None:
    """End a child and all that it started; nothing happens if they have ended."""
    if child.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
    child.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
