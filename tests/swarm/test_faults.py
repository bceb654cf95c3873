"""What a swarm of real processes bears: nodes that are killed, frozen, without their p2pd, or sent away."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.churning import inject
from benchmarks.churning.schedule import stage_of
from node.demo_processes import Child
from protocol.manifest import Manifest
from tests.swarm import faults
from tests.swarm.faults import newest, play
from tests.swarm.harness import Swarm, sentinel, small_manifest
from tests.swarm.harness import running as running_swarm

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(240)]

LEASE_SECONDS = 6.0
NOTICED_SECONDS = 30.0


def two_stages() -> Manifest:
    """Two stages, so that three replicas of one cost four processes; leases so short that their end can be awaited."""
    return small_manifest(
        model={"layers": 2},
        stages={"layers_per_stage": [1, 1]},
        training={"steps": 0},
        network={
            "lease_seconds": LEASE_SECONDS,
            "renew_seconds": 1.0,
            "dead_after_seconds": 4.0,
            "heartbeat_seconds": 1.0,
        },
    )


@pytest.fixture
async def swarm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Swarm]:
    """One replica of stage 0 and three of stage 1, all training."""
    with tempfile.TemporaryDirectory(prefix="sf-") as sockets:
        monkeypatch.setenv("XDG_RUNTIME_DIR", sockets)  # the socket folders of killed nodes stay in here
        async with running_swarm(tmp_path, two_stages()) as swarm:
            await swarm.coordinate()
            await asyncio.gather(*(swarm.join(name, stage=stage_of(name)) for name in ("s0r0", "s1r0", "s1r1", "s1r2")))
            await asyncio.gather(*(trains(swarm, child) for child in faults.running(swarm)))
            yield swarm


async def trains(swarm: Swarm, child: Child, *, from_step: int = 2) -> dict[str, Any]:
    return await swarm.until(child, lambda status: status["state"] == "training" and status["step"] >= from_step)


async def steps_on(swarm: Swarm, child: Child, steps: int, *, seconds: float = NOTICED_SECONDS) -> int:
    """Wait until a node has committed so many steps more; returns the step that it is in."""
    begun = (await swarm.status(child))["step"]
    return (await swarm.until(child, lambda status: status["step"] >= begun + steps, seconds=seconds))["step"]


async def agree(swarm: Swarm, *names: str, from_step: int) -> None:
    """The siblings named have committed the same parameters in each step from ``from_step`` on, and at least one."""
    statuses = [await swarm.status(newest(swarm, name)) for name in names]
    digests = [{step: digest for step, digest in status["digests"] if step >= from_step} for status in statuses]
    common = set.intersection(*(set(found) for found in digests))
    assert common, f"no step in common: {[sorted(found)[-3:] for found in digests]}"
    assert all(len({found[step] for found in digests}) == 1 for step in common)


async def test_a_stage_of_three_goes_on_when_one_of_them_is_killed(swarm: Swarm) -> None:
    killed = newest(swarm, "s1r1")
    helper = inject.helper_of(killed)
    await play(swarm, "at step 3, on s1r1, do kill", watched="s0r0")
    assert killed.process.returncode == -signal.SIGKILL
    assert not inject.alive(helper)
    step = (await swarm.status(newest(swarm, "s0r0")))["step"]
    for name in ("s0r0", "s1r0", "s1r2"):
        await steps_on(swarm, newest(swarm, name), 2)
    await agree(swarm, "s1r0", "s1r2", from_step=step)
    assert (await swarm.status(newest(swarm, "s0r0")))["microbatches_lost"] == 0


async def test_a_frozen_replica_is_worked_around_and_catches_up(swarm: Swarm) -> None:
    frozen, first = newest(swarm, "s1r2"), newest(swarm, "s0r0")
    async with inject.frozen(frozen):
        stopped = {process.pid: process.status() for process in psutil.Process(frozen.process.pid).children()}
        assert set(stopped.values()) == {psutil.STATUS_STOPPED}
        await swarm.until(first, lambda status: frozen.peer not in peers(status), seconds=NOTICED_SECONDS)
        step = await steps_on(swarm, first, 3)
    await trains(swarm, frozen, from_step=step + 1)
    begun = frozen.status["step"]
    await swarm.until(frozen, lambda status: status["step"] >= begun + 3)
    await agree(swarm, "s1r0", "s1r1", "s1r2", from_step=begun)
    assert not [event for event in (await swarm.status(first))["events"] if event["kind"] == "ejected"]


async def test_a_replica_that_is_cut_off_knows_it_and_agrees_again_when_the_cut_has_healed(swarm: Swarm) -> None:
    lonely, first = newest(swarm, "s1r2"), newest(swarm, "s0r0")
    async with inject.cut(lonely):
        await swarm.until(first, lambda status: lonely.peer not in peers(status), seconds=NOTICED_SECONDS)
        step = await steps_on(swarm, first, 3)
        stood = (await swarm.status(lonely))["step"]  # it runs, and nothing gets through to it
        assert stood <= step
    await trains(swarm, lonely, from_step=step + 1)
    begun = lonely.status["step"]
    await swarm.until(lonely, lambda status: status["step"] >= begun + 3)
    await agree(swarm, "s1r0", "s1r1", "s1r2", from_step=begun)
    for child in (first, lonely):
        status = await swarm.status(child)
        assert status["microbatches_lost"] == 0
        assert not [event for event in status["events"] if event["kind"] == "ejected"]


async def test_a_replica_with_a_slow_line_holds_nobody_up_for_long(swarm: Swarm) -> None:
    first = newest(swarm, "s0r0")
    begun = (await swarm.status(first))["step"]
    await play(swarm, f"at step {begun}, on s1r1, do slow for 8 s", watched="s0r0")
    await steps_on(swarm, first, 3)
    for name in ("s1r0", "s1r1", "s1r2"):
        await trains(swarm, newest(swarm, name), from_step=begun + 1)
    begun = (await swarm.status(first))["step"]
    await swarm.until(newest(swarm, "s1r1"), lambda status: status["step"] >= begun + 2)
    await agree(swarm, "s1r0", "s1r1", "s1r2", from_step=begun)


async def test_a_node_notices_the_death_of_its_p2pd_and_says_so(swarm: Swarm) -> None:
    dead = newest(swarm, "s1r1")
    await play(swarm, "at step 3, on s1r1, do p2pd-death", watched="s0r0")  # waits until it notices, and ends
    assert dead.process.returncode == 1
    said = (dead.folder / "log.txt").read_text()
    assert "sentinel: p2pd ended unexpectedly with code -9; start the node again" in said
    assert not (dead.folder / "sockets").exists()
    await steps_on(swarm, newest(swarm, "s0r0"), 2)
    await play(swarm, "at step 0, on s1r1, do rejoin", watched="s0r0")
    again = newest(swarm, "s1r1")
    assert again.peer == dead.peer
    await trains(swarm, again)
    await agree(swarm, "s1r0", "s1r1", "s1r2", from_step=again.status["step"] - 1)


async def test_a_node_that_was_told_to_leave_leaves_no_claim(swarm: Swarm) -> None:
    gone = newest(swarm, "s1r0")
    await play(swarm, "at step 3, on s1r0, do term", watched="s0r0")
    code, text, errors = await sentinel("status", (await swarm.status(newest(swarm, "s0r0")))["invite"], "--json")
    assert code == 0, errors
    takes_work = {claim["peer"] for claim in json.loads(text)["claims"] if claim["state"] == "training"}
    assert takes_work == {newest(swarm, name).peer for name in ("s0r0", "s1r1", "s1r2")}
    for name in ("s0r0", "s1r1", "s1r2"):  # and when the lease that it had is over, nobody knows it any more
        await swarm.until(
            newest(swarm, name), lambda status: gone.peer not in peers(status), seconds=LEASE_SECONDS + NOTICED_SECONDS
        )
    await steps_on(swarm, newest(swarm, "s0r0"), 2)


def peers(status: dict[str, Any]) -> set[str]:
    """The peers in a node's view."""
    return {replica["peer"] for replica in status["replicas"]}


# the benchmark -----------------------------------------------------------------------------------


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder whose path leaves room for socket names, which pytest's own does not."""
    with tempfile.TemporaryDirectory(prefix="sc-") as folder:
        yield Path(folder)


async def churn(folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "benchmarks.churn",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    )


async def line_with(process: asyncio.subprocess.Process, text: str) -> None:
    assert process.stdout is not None
    while text not in (line := (await process.stdout.readline()).decode()):
        assert line, f"it ended without saying {text!r}"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_everything_that_the_benchmark_started(short_folder: Path, number: signal.Signals) -> None:
    (short_folder / "faults").write_text("at 0.1 s, on s1r0, do freeze for 30 s\n")
    arguments = ("--stages", "2", "--replicas", "1", "--schedule", str(short_folder / "faults"), "--least", "0")
    process = await churn(short_folder, *arguments)
    await line_with(process, "freeze s1r0" if number is signal.SIGTERM else "starting")
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(number)
    output, _ = await process.communicate()
    assert process.returncode == 130, output.decode()
    _, alive = await asyncio.to_thread(psutil.wait_procs, started, 10)
    assert not alive
    assert os.listdir(short_folder) == ["faults"]


@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_a_swarm_bears_churn(short_folder: Path) -> None:
    result = short_folder / "churn.json"
    process = await churn(short_folder, "--minutes", "2", "--seed", "7", "--json", str(result))
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    report = json.loads(result.read_text())
    assert sum(report["faults"].values()) >= 6 and report["failures"] == []
    assert os.listdir(short_folder) == ["churn.json"]
