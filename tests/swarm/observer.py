"""``sentinel observe`` as a process for tests, ended by its own pid."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from protocol.transports.deathsignal import die_with_parent
from tests.swarm.harness import LIGHT_COMMAND, ROOT

LEAVE_SECONDS = 30.0


@dataclass
class Observing:
    """An observer that runs; use ``observing``."""

    process: asyncio.subprocess.Process
    line: str
    log: Path

    @property
    def url(self) -> str:
        """Where it serves, as its one line says."""
        found = re.search(r"http://\S+/$", self.line)
        assert found, self.line
        return found.group()

    async def get(self, path: str) -> tuple[int, str]:
        """The HTTP status and the text of a page."""
        async with aiohttp.ClientSession() as session, session.get(f"{self.url}{path}") as response:
            return response.status, await response.text()

    async def status(self) -> dict[str, Any]:
        """What it says at /status."""
        code, text = await self.get("status")
        assert code == 200
        found = json.loads(text)
        assert isinstance(found, dict)
        return found

    async def until(self, condition: Callable[[dict[str, Any]], bool], *, seconds: float = 90.0) -> dict[str, Any]:
        """Poll its status until that meets the condition."""
        status: dict[str, Any] = {}
        try:
            async with asyncio.timeout(seconds):
                while True:
                    status = await self.status()
                    if condition(status):
                        return status
                    assert self.process.returncode is None, self.log.read_text()
                    await asyncio.sleep(0.2)  # /status can only be polled
        except TimeoutError:
            told = {key: status.get(key) for key in ("state", "reason", "step", "nodes", "replicas")}
            raise AssertionError(f"not so in {seconds:.0f} s: {json.dumps(told)}\n{self.log.read_text()}") from None

    def most_memory(self) -> int:
        """The most resident memory that the process has had, in bytes."""
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"^VmHWM:\s+(\d+) kB$", text, re.MULTILINE)
        assert found
        return int(found.group(1)) * 1024

    async def leave(self, number: int) -> int:
        """Send a signal; returns the exit code."""
        self.process.send_signal(number)
        async with asyncio.timeout(LEAVE_SECONDS):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def observing(folder: Path, invite: str, *arguments: str) -> AsyncIterator[Observing]:
    """``sentinel observe INVITE``, which is gone when the block ends. Ends with another code if it takes in torch."""
    log = folder / "observer.txt"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", LIGHT_COMMAND, "observe", invite, "--interval", "1", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            preexec_fn=die_with_parent,
        )
    try:
        assert process.stdout is not None
        line = await process.stdout.readline()
        assert line, log.read_text()
        yield Observing(process, line.decode().rstrip("\n"), log)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
