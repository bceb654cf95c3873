"""What volunteer and coordinator see of a real swarm: a contribution that outlives a restart, and the live picture."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from node.demo_processes import Child
from tests.node.terminal import on_terminal
from tests.swarm.harness import LIGHT_COMMAND, ROOT, Swarm, running, sentinel, small_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

PATIENCE = 120.0


async def test_the_same_count_everywhere_also_after_a_restart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One swarm for all of it, since each process costs seconds of a small machine."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    manifest = small_manifest(
        model={"layers": 2}, stages={"layers_per_stage": [1, 1]}, training={"steps": 0, "checkpoint_steps": 2}
    )
    async with running(tmp_path, manifest) as swarm:
        coordinator = await swarm.coordinate()
        first, second = await swarm.fill(1)
        await swarm.until(second, lambda status: status["contribution"]["steps"] >= 3, seconds=PATIENCE)
        await the_live_picture(swarm, [first, second])
        before = await leave(second)
        assert before["contribution"] == before["contribution_of_this_run"]

        again = await swarm.join(second.name, stage=1)
        await swarm.until(again, lambda status: status["contribution_of_this_run"]["steps"] >= 2, seconds=PATIENCE)
        await the_coordinator_shows(swarm, coordinator, again, least=before["contribution"]["microbatches"] + 1)
        await the_metrics_show(swarm, again, least=before["contribution"])
        after = await leave(again)
        for name, count in before["contribution"].items():
            assert after["contribution"][name] == count + after["contribution_of_this_run"][name] > count
        log = (again.folder / "log.txt").read_text()
        total = after["contribution"]["microbatches"]
        assert f"{total:,} microbatches" in log.splitlines()[-1] and "with earlier runs" in log


async def leave(node: Child) -> dict[str, Any]:
    """End a node; returns its summary."""
    node.process.send_signal(signal.SIGTERM)
    async with asyncio.timeout(60):
        assert await node.process.wait() == 0, node.last_words()
    return node.summary()


async def the_live_picture(swarm: Swarm, nodes: list[Child]) -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", LIGHT_COMMAND, "status", swarm.invite, "--watch", "--interval", "0.5"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        while b"1 in stage 0, 1 in stage 1" not in (said := await process.stdout.readline()):
            assert said, "it ended"
    assert b"[training] step " in said and b", loss " in said
    process.send_signal(signal.SIGINT)
    _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")

    def on_a_terminal() -> str:
        with on_terminal("status", swarm.invite, "--watch", folder=swarm.folder) as terminal:
            terminal.until(nodes[1].peer[-8:])
            terminal.type("\x03")
            assert terminal.end() == 0
            return terminal.text

    text = await asyncio.to_thread(on_a_terminal)
    assert all(node.peer[-8:] in text and node.name in text for node in nodes)


async def the_coordinator_shows(swarm: Swarm, coordinator: Child, node: Child, *, least: int) -> None:
    def told(status: dict[str, Any]) -> bool:
        replicas = {replica["peer"]: replica for replica in status["replicas"]}
        contribution = replicas.get(node.peer, {}).get("contribution", {})
        return bool(contribution.get("microbatches", 0) >= least)

    await swarm.until(coordinator, told, seconds=PATIENCE)
    code, text, errors = await sentinel("status", swarm.invite, "--timeout", "30")
    assert code == 0, errors
    (row,) = [row for row in text.splitlines() if node.peer[-8:] in row and "microbatches" in row]
    shown = next(words for words in row.split("  ") if words.endswith(" microbatches"))
    assert int(shown.split()[0].replace(",", "")) >= least
    assert json.loads((await sentinel("status", swarm.invite, "--json"))[1])["seed"]["coordinator"] is True


async def the_metrics_show(swarm: Swarm, node: Child, *, least: dict[str, int]) -> None:
    _, text = await swarm.get(node, "/metrics")
    values = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    assert all(values[f"sentinel_contributed_{name}"] >= count for name, count in least.items())
    _, page = await swarm.get(node, "/")
    assert "What this node contributed, restarts included" in page
