"""Every process of a swarm is killed at once, and it goes on from its checkpoints; then its model comes out."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from node.checkpoints import find_checkpoints
from node.demo_processes import Child
from tests.swarm.harness import ROOT, running, small_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

PATIENCE = 150.0
EVERY = 3


async def test_a_swarm_that_is_killed_goes_on_and_its_model_comes_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # the socket folders of killed nodes stay in here
    manifest = small_manifest(training={"steps": 0, "checkpoint_steps": EVERY})
    async with running(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        nodes = await swarm.fill(1)
        for node in nodes:
            await swarm.until(node, lambda status: status["step"] >= 2 * EVERY + 1, seconds=PATIENCE)
        for child in swarm.children:
            child.process.kill()
        await asyncio.gather(*(child.process.wait() for child in swarm.children))
        held = [steps_on_disk(node.folder) for node in nodes]
        common = max(set.intersection(*held))
        assert common >= EVERY and common % EVERY == 0

        await swarm.coordinate(path=tmp_path / "swarm.toml")
        nodes = await swarm.fill(1)
        for node in nodes:
            status = await swarm.until(node, lambda status: status["step"] >= common + EVERY + 1, seconds=PATIENCE)
            assert min(step for step, _ in status["digests"]) == common, "no step was trained again"
            assert {"restored"} <= {event["kind"] for event in status["events"]}
            assert status["checkpoint"]["step"] > common and status["checkpoint"]["problem"] == ""
        for node in nodes:
            node.process.send_signal(signal.SIGTERM)
        summaries = await swarm.all_end(nodes)
        assert all(
            max(steps_on_disk(node.folder)) == summary["step"] for node, summary in zip(nodes, summaries, strict=True)
        )

    facts = await export(nodes, tmp_path / "model")
    assert facts["step"] >= common + EVERY
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["num_hidden_layers"] == 3


def steps_on_disk(state_dir: Path) -> set[int]:
    (folder,) = (state_dir / "checkpoints").iterdir()
    return {int(path.stem.rpartition("-")[2]) for path in find_checkpoints(folder)}


async def export(nodes: list[Child], out: Path) -> dict[str, int]:
    """``sentinel export``, as a person would call it."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "node", "export", "--out", str(out), "--json"),
        *(word for node in nodes for word in ("--state-dir", str(node.folder))),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    found = json.loads(output)
    assert isinstance(found, dict)
    return found
