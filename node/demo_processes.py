"""The processes of a demo: start them, hear when they are ready, and end every one of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol.transports.deathsignal import die_with_parent

STOP_SECONDS = 15.0


@dataclass(slots=True)
class Child:
    """One node process."""

    name: str
    folder: Path
    process: asyncio.subprocess.Process
    stage: int | None
    attack: str
    ready: dict[str, Any] = field(default_factory=dict)
    status: dict[str, Any] = field(default_factory=dict)

    @property
    def running(self) -> bool:
        """Whether the process lives."""
        return self.process.returncode is None

    @property
    def peer(self) -> str:
        """Its peer id, once it is ready."""
        return str(self.ready.get("peer", ""))

    def summary(self) -> dict[str, Any]:
        """What it wrote on leaving; the last status that was seen if it could not write."""
        try:
            found = json.loads((self.folder / "summary.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return self.status
        return found if isinstance(found, dict) else self.status

    def last_words(self) -> str:
        """The end of its log, for a person."""
        try:
            lines = (self.folder / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            return ""
        return "\n".join(lines[-5:])


async def start_child(
    name: str, folder: Path, arguments: list[str], *, stage: int | None = None, attack: str = ""
) -> Child:
    """Start ``sentinel ARGUMENTS`` in a session of its own; it dies with this process.

    The child says that it is ready by one JSON line on a pipe.
    """
    folder.mkdir(parents=True, mode=0o700, exist_ok=True)
    reading, writing = os.pipe()
    try:
        with open(folder / "log.txt", "wb") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "node",
                *arguments,
                "--state-dir",
                str(folder),
                "--ready-fd",
                str(writing),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(writing,),
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    child = Child(name=name, folder=folder, process=process, stage=stage, attack=attack)
    child.ready = await _read_ready(reading)
    return child


async def _read_ready(descriptor: int) -> dict[str, Any]:
    """The line that a node writes when it is ready; empty if it ended before."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    transport, _ = await loop.connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb", buffering=0)
    )
    try:
        line = await reader.readline()
    finally:
        transport.close()
    if not line:
        return {}
    found = json.loads(line)
    return found if isinstance(found, dict) else {}


async def stop_children(children: list[Child]) -> None:
    """End every process that still lives: politely, then not."""
    for child in children:
        _signal(child, signal.SIGTERM)
    waits = [asyncio.ensure_future(child.process.wait()) for child in children]
    if waits:
        await asyncio.wait(waits, timeout=STOP_SECONDS)
    for child in children:
        _signal(child, signal.SIGKILL)
    await asyncio.gather(*waits)


def _signal(child: Child, number: signal.Signals) -> None:
    if child.running:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(number)
