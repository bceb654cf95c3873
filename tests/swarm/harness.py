"""Real swarms for tests: node processes on loopback, each ended by its own pid."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp

from node.demo_processes import Child, start_child, stop_children
from protocol.manifest import Manifest
from protocol.manifest_template import render

ROOT = Path(__file__).parents[2]
LOOPBACK = ["--host", "127.0.0.1", "--no-reach"]
HEAVY = 99
LIGHT_COMMAND = f"""
import sys
from node.cli import main
code = main(sys.argv[1:])
heavy = {{"torch", "hivemind", "node.daemon"}} & set(sys.modules)
if heavy:
    sys.stderr.write(", ".join(heavy))
sys.exit({HEAVY} if heavy else code)
"""


class Swarm:
    """A coordinator and nodes; use ``running``."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.children: list[Child] = []
        self.invite = ""

    async def coordinate(self, name: str = "coordinator", *, path: Path | None = None) -> Child:
        """Start the coordinator and learn the invite. ``path``: a manifest's file, else this swarm's is written.

        A name that was used before starts again with that node's state folder.
        """
        if path is None:
            path = self.folder / "swarm.toml"
            path.write_text(render(self.manifest), encoding="utf-8")
        child = await self._start(name, ["coordinate", str(path), *LOOPBACK])
        self.invite = str(child.ready["invite"])
        return child

    async def join(self, name: str, *arguments: str, stage: int | None = None, attack: str = "") -> Child:
        """Start a node; returns once it can be asked for its status."""
        options = ["join", self.invite, *LOOPBACK, "--label", name, "--threads", "1", *arguments]
        if stage is not None:
            options += ["--stage", str(stage)]
        if attack:
            options += ["--drill", attack]
        return await self._start(name, options, stage=stage, attack=attack)

    async def fill(self, replicas: int, *arguments: str) -> list[Child]:
        """Start ``replicas`` pinned nodes for every stage, all at once."""
        return await asyncio.gather(
            *(
                self.join(f"s{stage}r{replica}", *arguments, stage=stage)
                for stage in range(self.manifest.num_stages)
                for replica in range(replicas)
            )
        )

    async def _start(self, name: str, arguments: list[str], **about: Any) -> Child:
        child = await start_child(name, self.folder / name, arguments, **about)
        self.children.append(child)
        assert child.ready, f"{name} did not start: {child.last_words()}"
        return child

    async def get(self, child: Child, path: str) -> tuple[int, str]:
        """The HTTP status and the text of a node's page."""
        host, port = child.ready["http"]
        async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}{path}") as response:
            return response.status, await response.text()

    async def status(self, child: Child) -> dict[str, Any]:
        """What a node says at /status; empty if it does not answer."""
        host, port = child.ready["http"]
        with contextlib.suppress(aiohttp.ClientError, TimeoutError):
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
                session.get(f"http://{host}:{port}/status") as response,
            ):
                child.status = await response.json()
                return child.status
        return {}

    async def until(
        self, child: Child, condition: Callable[[dict[str, Any]], bool], *, seconds: float = 90.0
    ) -> dict[str, Any]:
        """Poll a node's status until it meets the condition; fails with its log when it does not."""
        try:
            async with asyncio.timeout(seconds):
                while True:
                    status = await self.status(child)
                    if status and condition(status):
                        return status
                    assert child.running, f"{child.name} has ended: {child.last_words()}"
                    await asyncio.sleep(0.2)  # /status can only be polled
        except TimeoutError:
            raise AssertionError(
                f"{child.name} did not get there in {seconds:.0f} s; last: "
                f"{json.dumps({key: child.status.get(key) for key in ('state', 'reason', 'step', 'loss')})}\n"
                f"{child.last_words()}"
            ) from None

    async def all_end(self, children: list[Child], *, seconds: float = 150.0) -> list[dict[str, Any]]:
        """Wait until the nodes have left by themselves; returns their summaries."""
        try:
            async with asyncio.timeout(seconds):
                await asyncio.gather(*(child.process.wait() for child in children))
        except TimeoutError:
            stuck = {child.name: child.last_words() for child in children if child.running}
            raise AssertionError(f"still running after {seconds:.0f} s: {stuck}") from None
        return [child.summary() for child in children]


async def sentinel(*arguments: str, program: Path | None = None, heavy: bool = False) -> tuple[int, str, str]:
    """Run ``sentinel ARGUMENTS``, or another program, as a process; returns exit code, stdout and stderr.

    Fails if the command took in torch or hivemind: what is run here has to do without, unless it is ``heavy``.
    """
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *(["-m", "node"] if heavy else ["-c", LIGHT_COMMAND] if program is None else [str(program)]),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        async with asyncio.timeout(120):
            output, errors = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode != HEAVY, f"sentinel {arguments[0]} imports {errors.decode()}"
    return process.returncode or 0, output.decode(), errors.decode()


@contextlib.asynccontextmanager
async def running(folder: Path, manifest: Manifest) -> AsyncIterator[Swarm]:
    """A swarm that is gone when the block ends, whatever happens in it."""
    swarm = Swarm(folder, manifest)
    try:
        yield swarm
    finally:
        await stop_children(swarm.children)


def small_manifest(**sections: dict[str, Any]) -> Manifest:
    """A model that trains in moments: 3 stages of one layer, float32 on the wire."""
    values: dict[str, Any] = {
        "name": "test",
        "model": {"width": 64, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 128, "context": 32},
        "stages": {"layers_per_stage": [1, 1, 1], "min_replicas": 1},
        "training": {
            "steps": 20,
            "learning_rate": 3e-3,
            "warmup_steps": 3,
            "decay_steps": 40,
            "sequences_per_step": 16,
            "sequences_per_microbatch": 2,
        },
        "wire": {"activation_dtype": "fp32", "gradient_dtype": "fp32"},
        "verifier": {"allow_drills": True},
    }
    for name, section in sections.items():
        values[name] = {**values.get(name, {}), **section}
    return Manifest.from_mapping(values)
