"""``sentinel demo`` as a newcomer runs it: real processes, an attacker, a summary, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

MEMORY_LIMIT = 450 * 2**20


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """A temporary folder whose path leaves room for socket names, which pytest's own does not."""
    with tempfile.TemporaryDirectory(prefix="sd-") as folder:
        yield Path(folder)


async def _demo(folder: Path, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "node",
        "demo",
        "--plain",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(folder)},
        start_new_session=True,
    )


def _descendants(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


async def _none_left(processes: list[psutil.Process]) -> list[psutil.Process]:
    _, alive = await asyncio.to_thread(psutil.wait_procs, processes, 20)
    return list(alive)


async def test_the_demo_ejects_its_attacker_and_tells_about_it(short_folder: Path) -> None:
    result = short_folder / "out.json"
    process = await _demo(short_folder, "--steps", "30", "--json", str(result))
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    report = json.loads(result.read_text())
    assert {
        "steps", "stages", "nodes", "loss", "tokens_per_second", "adversaries", "honest_ejected",
        "microbatches_retried", "microbatches_lost", "seconds",
    } <= report.keys()  # fmt: skip
    assert (report["steps"], report["stages"], len(report["nodes"])) == (30, 3, 7)
    assert len(report["loss"]) == 30
    assert report["loss"][-1] < report["loss"][0]
    (adversary,) = report["adversaries"]
    assert adversary["stage"] == 1
    assert adversary["first_attack_step"] == 20
    assert adversary["quarantined_step"] >= 20
    assert adversary["ejected_step"] >= adversary["quarantined_step"]
    assert adversary["exit_code"] == 3
    assert report["honest_ejected"] == []
    assert report["microbatches_lost"] == 0
    assert all(0 < node["peak_memory_bytes"] < MEMORY_LIMIT for node in report["nodes"])
    digests = {}
    for node in report["nodes"]:
        if not node["attack"]:
            assert node["exit_code"] == 0
            digests.setdefault(node["stage"], set()).add(node["parameters_digest"])
    assert all(len(found) == 1 for found in digests.values()), digests
    assert "ejected by the swarm" in output.decode()
    assert os.listdir(short_folder) == ["out.json"], "the demo left something behind"


async def test_false_gradients_and_a_false_first_stage_are_ejected(short_folder: Path) -> None:
    """What the statistics see badly or not at all: gradients, and both ends of the pipeline.

    Such attacks are found by audits drawn at random, so they begin while the attackers are newcomers, of whom one
    microbatch in four is audited: that none of the forty that follow is drawn has a chance of one in 100,000.
    """
    result = short_folder / "out.json"
    drills = ("gradient-sign-flip:1", "sign-flip:0", "gradient-sign-flip:2")
    arguments = [argument for drill in drills for argument in ("--drill", drill)]
    process = await _demo(short_folder, *arguments, "--drill-from", "8", "--steps", "30", "--json", str(result))
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    report = json.loads(result.read_text())
    assert {(entry["attack"], entry["stage"]) for entry in report["adversaries"]} == {
        ("gradient-sign-flip", 1),
        ("sign-flip", 0),
        ("gradient-sign-flip", 2),
    }
    assert all(entry["exit_code"] == 3 for entry in report["adversaries"])
    assert report["honest_ejected"] == []


@pytest.mark.parametrize("line", [b"starting the coordinator", b"starting 3 nodes", b"tokens/s"])
async def test_ctrl_c_at_any_moment_leaves_nothing(short_folder: Path, line: bytes) -> None:
    process = await _demo(short_folder, "--replicas", "1", "--no-drill", "--steps", "500")
    assert process.stdout is not None
    while line not in await process.stdout.readline():
        assert process.returncode is None
    started = _descendants(process.pid)
    process.send_signal(signal.SIGINT)
    output, _ = await process.communicate()
    assert process.returncode == 130, output.decode()
    assert await _none_left(started) == []
    assert os.listdir(short_folder) == []


async def test_nodes_do_not_outlive_a_demo_that_was_killed(short_folder: Path) -> None:
    process = await _demo(short_folder, "--replicas", "1", "--no-drill", "--steps", "500")
    assert process.stdout is not None
    while b"tokens/s" not in await process.stdout.readline():
        assert process.returncode is None
    started = _descendants(process.pid)
    assert len(started) >= 8  # a coordinator and three nodes, each with its p2pd
    process.kill()
    await process.wait()
    assert await _none_left(started) == []
