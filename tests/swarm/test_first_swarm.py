"""The page for newcomers, command by command: what stands there is what is run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from protocol.transports.deathsignal import die_with_parent
from tests.deploy.promql import program
from tests.swarm.harness import ROOT
from tests.swarm.prometheus import Prometheus, hurry

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(600)]

PAGE = ROOT / "docs" / "first-swarm.md"
STEP = re.compile(r"<!-- step: ([a-z0-9-]+) -->\n```sh\n(.*?)```\n", re.DOTALL)
PORT = re.compile(r"\b9(?:46[4-7]|090)\b")
PATIENCE = 150.0
ALERT = 'ALERTS{alertname="SentinelStageWithoutReplicas", alertstate="firing"}'


class Terminals:
    """Runs the page's commands in one folder, each in a terminal of its own if it goes on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = dict(STEP.findall(PAGE.read_text(encoding="utf-8")))
        self.used: list[str] = []
        self._ports: dict[str, str] = {}
        self._running: dict[str, tuple[asyncio.subprocess.Process, Path]] = {}
        commands = folder / "bin"
        commands.mkdir()
        for name, arguments in {"sentinel": "-m node", "python": ""}.items():  # this checkout's, whatever is installed
            script = commands / name
            script.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
            script.chmod(0o755)
        self._environment = {
            **os.environ,
            "PATH": f"{commands}:{os.environ['PATH']}",
            "PYTHONPATH": str(ROOT),
            "SWARM": str(ROOT),
            "XDG_RUNTIME_DIR": str(folder),
        }

    def port(self, told: str) -> str:
        """The free port that stands for one of the page's."""
        if told not in self._ports:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self._ports[told] = str(probe.getsockname()[1])
        return self._ports[told]

    def command(self, step: str) -> str:
        self.used.append(step)
        return PORT.sub(lambda found: self.port(found[0]), self.steps[step])

    async def run(self, step: str) -> str:
        """Run a step to its end; returns what it printed."""
        process = await self._start(self.command(step), asyncio.subprocess.PIPE)
        async with asyncio.timeout(PATIENCE):
            output, _ = await process.communicate()
        assert process.returncode == 0, f"{step}: {output.decode()}"
        return output.decode()

    async def open(self, step: str) -> None:
        """Start a step in a terminal of its own."""
        log = self.folder / f"{step}.log"
        with log.open("wb") as output:
            self._running[step] = await self._start(f"exec {self.command(step)}", output), log

    async def _start(self, command: str, output: object) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            *("bash", "-euc", command),
            cwd=self.folder,
            env=self._environment,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,  # type: ignore[arg-type]
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=die_with_parent,
        )

    async def says(self, step: str, words: str) -> None:
        """Wait until a running step has printed something."""
        process, log = self._running[step]
        try:
            async with asyncio.timeout(PATIENCE):
                while words not in log.read_text():
                    assert process.returncode is None, f"{step} ended: {log.read_text()}"
                    await asyncio.sleep(0.2)  # a file can only be polled
        except TimeoutError:
            raise AssertionError(f"{step} did not say {words!r}: {log.read_text()[-2000:]}") from None

    async def ends(self, step: str) -> int:
        """Wait for the end of a running step."""
        process, _ = self._running.pop(step)
        async with asyncio.timeout(PATIENCE):
            return await process.wait()

    async def interrupt(self, step: str) -> str:
        """Press Ctrl-C in a step's terminal; returns all that it has printed."""
        process, log = self._running[step]
        process.send_signal(signal.SIGINT)
        assert await self.ends(step) == 0, log.read_text()[-2000:]
        return log.read_text()

    async def close(self) -> None:
        """End what still runs."""
        for process, _ in self._running.values():
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
            await process.wait()


@pytest.fixture
async def terminals(tmp_path: Path) -> AsyncIterator[Terminals]:
    """Terminals in an empty folder."""
    made = Terminals(tmp_path)
    yield made
    await made.close()


async def test_the_first_swarm_of_a_newcomer(terminals: Terminals) -> None:
    program("prometheus")
    assert "wrote swarm.toml" in await terminals.run("init")
    await terminals.open("coordinator")
    await terminals.says("coordinator", "sentinel://")
    assert (terminals.folder / "invite").read_text().startswith("sentinel://")
    await terminals.run("doctor")
    for node in ("node0", "node1", "node2"):
        await terminals.open(node)
    for node in ("node0", "node1", "node2"):
        await terminals.says(node, "training")
    status = await terminals.run("status")
    assert [f"stage {stage}: 1 replica" in status for stage in range(3)] == [True] * 3

    await terminals.run("configure")
    hurry(terminals.folder / "prometheus", waits={"SentinelStageWithoutReplicas": "1s"})
    await terminals.open("prometheus")
    await terminals.says("prometheus", "Server is ready to receive web requests")
    prometheus = Prometheus(terminals.folder / "prometheus", f"127.0.0.1:{terminals.port('9090')}")
    await prometheus.until("up == 1", lambda found: len(found) == 4, seconds=PATIENCE)
    await prometheus.until("sum(rate(sentinel_checkpoints_total[5m])) > 0", bool, seconds=PATIENCE)
    assert await prometheus.query(ALERT) == []

    await terminals.run("kill")
    assert await terminals.ends("node1") == -signal.SIGKILL
    await prometheus.until(ALERT, bool, seconds=PATIENCE)
    (stood,) = await prometheus.query("swarm:sentinel_step:max")
    await terminals.open("node1-again")
    await prometheus.until(ALERT, lambda found: not found, seconds=PATIENCE)
    further = f"min(sentinel_step > 0) > {stood['value'][1]} + 5"
    await prometheus.until(further, bool, seconds=PATIENCE)

    await terminals.run("export")
    assert "torch.Size" in await terminals.run("load")
    for node in ("node0", "node1-again", "node2", "coordinator", "prometheus"):
        await terminals.interrupt(node)
    assert sorted(terminals.used) == sorted(terminals.steps)
