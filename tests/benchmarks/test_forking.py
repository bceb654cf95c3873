"""Forking a process in the middle of its event loop: what goes on, what is made anew, and which time counts."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from benchmarks.arena.cells import DEFENCES, Group, groups, runs, suite_cells


def run_script(body: str) -> Any:
    """Run in a process of its own, with a work clock and a forkable loop; its last line is JSON."""
    script = (
        textwrap.dedent(
            """
            import time
            from benchmarks.arena.forking import ForkableLoop, WorkClock, forked
            clock = WorkClock().install()
            import asyncio, json, os
            """
        )
        + textwrap.dedent(body)
        + textwrap.dedent(
            """
            loop = ForkableLoop(clock)
            with asyncio.Runner(loop_factory=lambda: loop) as runner:
                print(json.dumps(runner.run(main(loop))))
            """
        )
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_each_fork_goes_on_with_the_same_tasks_streams_and_threads_of_none() -> None:
    said = run_script(
        """
        async def count(queue, reader):
            total = 0
            while True:
                total += await queue.get() + len(await reader.readexactly(1))
                queue.task_done()
                if total >= 20:
                    return total + await asyncio.to_thread(lambda: 1000)

        async def main(loop):
            queue = asyncio.Queue()
            reading, writing = os.pipe()
            reader = asyncio.StreamReader()
            await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(reading, "rb"))
            counting = asyncio.create_task(count(queue, reader))
            queue.put_nowait(4)
            os.write(writing, b".")
            await queue.join()
            heard = []
            for extra in (15, 20):
                pipe, outcome = forked(loop.renew, seconds=30)
                if pipe >= 0:
                    queue.put_nowait(extra)
                    os.write(writing, b".")  # a fork's own event loop sees it, though the pipe is everybody's
                    os.write(pipe, str(await counting).encode())
                    os._exit(0)
                heard.append([outcome.said.decode(), outcome.error])
            counting.cancel()
            return heard
        """
    )
    assert said == [["1021", ""], ["1026", ""]]


def test_time_stands_still_while_the_parent_waits() -> None:
    waited, counted = run_script(
        """
        async def main(loop):
            began, real = time.monotonic(), time.perf_counter()
            clock.stop()
            pipe, outcome = forked(lambda: None, seconds=30)
            if pipe >= 0:
                time.sleep(0.5)
                os._exit(0)
            clock.go_on()
            return [time.perf_counter() - real, time.monotonic() - began]
        """
    )
    assert waited >= 0.5 > counted


def test_time_passes_with_computing_and_with_timers_and_not_while_others_have_the_cpu() -> None:
    slept, computed, stopped, real = run_script(
        """
        import signal, subprocess, sys

        async def main(loop):
            began = time.monotonic()
            await asyncio.sleep(0.3)
            slept = time.monotonic() - began
            began, used = time.monotonic(), time.process_time()
            while time.process_time() - used < 0.3:
                pass
            computed = time.monotonic() - began
            # Stopped by another process, which lets it go on after a time: as if that one had had the CPU.
            # It may do so before Popen returns.
            began, real = time.monotonic(), time.perf_counter()
            other = subprocess.Popen(["sh", "-c", f"kill -STOP {os.getpid()}; sleep 1; kill -CONT {os.getpid()}"])
            while time.perf_counter() - real < 1:
                pass
            other.wait()
            return [slept, computed, time.monotonic() - began, time.perf_counter() - real]
        """
    )
    assert 0.29 <= slept < 0.6 and 0.29 <= computed < 0.6
    assert stopped < real - 0.5


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("os._exit(3)", "exit code 3"),
        ("os.kill(os.getpid(), 9)", "exit code -9"),
        ("time.sleep(60)", "not done after 1 s"),
    ],
)
def test_a_fork_that_fails_says_how(body: str, error: str) -> None:
    outcome = run_script(
        f"""
        async def main(loop):
            pipe, outcome = forked(loop.renew, seconds=1)
            if pipe >= 0:
                os.write(pipe, b"half")
                {body}
            return [outcome.said.decode(), outcome.error]
        """
    )
    assert outcome == ["half", error]


def test_a_fork_leaves_no_process_and_no_open_file() -> None:
    before, after = run_script(
        """
        async def main(loop):
            before = len(os.listdir("/dev/fd"))
            for _ in range(3):
                pipe, _ = forked(loop.renew, seconds=30)
                if pipe >= 0:
                    os._exit(0)
            try:
                os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return [before, len(os.listdir("/dev/fd"))]
        """
    )
    assert before == after


@pytest.mark.parametrize("suite", ["quick", "paper", "beyond"])
def test_groups_hold_every_run_once_beside_those_it_shares_its_beginning_with(suite: str) -> None:
    wanted = runs(suite_cells(suite), 3)
    found = groups(wanted)
    assert sorted(run.key for group in found for run in group.runs) == sorted(run.key for run in wanted)
    for group in found:
        assert group.defence in DEFENCES and 0 < len(group.runs) <= 12
        for run in group.runs:
            assert (run.setting, run.defence, run.seed) == (group.setting, group.defence, group.seed)
            assert not run.cell.drill or run.cell.attack_from == group.attack_from


def test_groups_are_of_about_equal_size() -> None:
    sizes = [len(group.runs) for group in groups(runs(suite_cells("paper"), 1))]
    assert max(sizes) - min(sizes) <= 1


def test_a_group_has_the_manifest_of_its_runs() -> None:
    from benchmarks.arena.swarm import manifest_of

    def same(group: Group) -> bool:
        return {manifest_of(run).swarm_id for run in group.runs} == {manifest_of(group).swarm_id}

    assert all(same(group) for group in groups(runs(suite_cells("beyond"), 1)))
