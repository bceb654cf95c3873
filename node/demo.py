"""``sentinel demo``: a real swarm on loopback, with attackers, from nothing to a summary."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from node.demo_processes import Child, start_child, stop_children
from node.demo_report import build_report, summary_text, verdict
from node.demo_view import DemoView
from node.drill_names import check_drill_name
from protocol.errors import LocalError, SettingsError
from protocol.manifest import Manifest
from protocol.manifest_template import render

POLL_SECONDS = 0.5
STALL_SECONDS = 150.0
"""Without a new step for this long the demo gives up and says so."""
LOOPBACK = ["--host", "127.0.0.1", "--no-reach"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """What the demo's command line says. ``drills`` is None for no attacker, empty for the default one."""

    stages: int = 3
    replicas: int = 2
    steps: int = 60
    drills: tuple[str, ...] | None = ()
    drill_from: int = 20
    json_path: Path | None = None
    keep: bool = False
    plain: bool = False


def demo_manifest(options: DemoOptions) -> Manifest:
    """A small model, cut into the wanted stages, on the standard library's sources."""
    layers = 2 * options.stages
    return Manifest.from_mapping(
        {
            "name": "demo",
            "model": {"width": 128, "layers": layers, "heads": 4, "kv_heads": 2, "ffn": 352, "context": 128},
            "stages": {"layers_per_stage": [2] * options.stages, "min_replicas": options.replicas},
            "training": {
                "steps": options.steps,
                "learning_rate": 3e-3,
                "warmup_steps": 5,
                "decay_steps": max(options.steps, 20),
                "sequences_per_step": 48,
                "sequences_per_microbatch": 4,
            },
            "wire": {"activation_dtype": "bf16", "gradient_dtype": "bf16"},
            "verifier": {"allow_drills": True},
            # All nodes share one machine: more microbatches under way take memory and make nothing quicker.
            "network": {"in_flight": 3},
        }
    )


def parse_drills(options: DemoOptions) -> list[tuple[str, int]]:
    """(attack, stage) of each attacker.

    Raises:
        SettingsError: an unknown attack, or a stage that the demo does not have.
    """
    if options.drills is None:
        return []
    chosen = options.drills or (f"sign-flip:{options.stages // 2}",)
    drills = []
    for text in chosen:
        attack, colon, stage = text.rpartition(":")
        if not colon or not stage.isdecimal():
            raise SettingsError(f"--drill takes ATTACK:STAGE, for example sign-flip:1, not {text!r}")
        check_drill_name(attack)
        if int(stage) >= options.stages:
            raise SettingsError(f"--drill {text}: the demo has stages 0 to {options.stages - 1}")
        drills.append((attack, int(stage)))
    if options.drill_from >= options.steps:
        raise SettingsError(f"--drill-from {options.drill_from} is not before the last of {options.steps} steps")
    return drills


def run_demo(options: DemoOptions) -> int:
    """Run the demo; returns its exit code."""
    drills = parse_drills(options)
    folder = Path(tempfile.mkdtemp(prefix="sentinel-demo-"))
    try:
        return asyncio.run(Demo(options, drills, folder).run())
    finally:
        if options.keep:
            print(f"state folders and logs are kept in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


class Demo:
    """One run."""

    def __init__(self, options: DemoOptions, drills: list[tuple[str, int]], folder: Path) -> None:
        self._options = options
        self._drills = drills
        self._folder = folder
        self._manifest = demo_manifest(options)
        self._children: list[Child] = []
        self._view = DemoView(self._manifest, plain=options.plain)
        self._interrupted = asyncio.Event()
        self._started = time.monotonic()
        self.first_step_seconds: float | None = None

    async def run(self) -> int:
        """Start, watch, stop, report."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._interrupted.set)
        work = asyncio.ensure_future(self._work())
        interrupt = asyncio.ensure_future(self._interrupted.wait())
        problem = ""
        try:
            with self._view:
                await asyncio.wait({work, interrupt}, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    problem = work.result()
        finally:
            interrupt.cancel()
            work.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await work
            await stop_children(self._children)
        if self._interrupted.is_set():
            print("interrupted; everything that the demo started has ended")
            return 130
        return self._finish(problem)

    def _finish(self, problem: str) -> int:
        report = build_report(
            self._manifest,
            self._children,
            seconds=time.monotonic() - self._started,
            first_step_seconds=self.first_step_seconds,
        )
        failures = verdict(report, steps=self._options.steps)
        if problem:
            failures.insert(0, problem)
        if self._options.json_path is not None:
            self._options.json_path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
        print(summary_text(report, failures))
        return 1 if failures else 0

    async def _work(self) -> str:
        """The demo itself; returns what went wrong, if anything did."""
        try:
            await self._start()
            return await self._watch()
        except LocalError as error:
            return str(error)

    async def _start(self) -> None:
        path = self._folder / "swarm.toml"
        path.write_text(render(self._manifest), encoding="utf-8")
        self._view.say("starting the coordinator")
        coordinator = await self._child("coordinator", ["coordinate", str(path), *LOOPBACK])
        invite = coordinator.ready.get("invite")
        if not invite:
            raise LocalError(f"the coordinator did not start: {coordinator.last_words()}")
        plan: list[tuple[str, int, str]] = [
            (f"honest-{stage}{'abcdefghijklmnop'[replica]}", stage, "")
            for stage in range(self._options.stages)
            for replica in range(self._options.replicas)
        ]
        plan += [(f"attacker-{index + 1}", stage, attack) for index, (attack, stage) in enumerate(self._drills)]
        self._view.say(f"starting {len(plan)} nodes")
        await asyncio.gather(*(self._node(str(invite), *entry) for entry in plan))

    async def _node(self, invite: str, name: str, stage: int, attack: str) -> None:
        arguments = [
            "join",
            invite,
            *LOOPBACK,
            "--stage",
            str(stage),
            "--label",
            name,
            "--threads",
            "1",
            "--exit-when-done",
        ]
        if attack:
            arguments += ["--drill", attack, "--drill-from", str(self._options.drill_from)]
        child = await self._child(name, arguments, stage=stage, attack=attack)
        if not child.ready:
            raise LocalError(f"node {name} did not start: {child.last_words()}")

    async def _child(self, name: str, arguments: list[str], **about: Any) -> Child:
        child = await start_child(name, self._folder / name, arguments, **about)
        self._children.append(child)
        return child

    async def _watch(self) -> str:
        """Look at every node until the honest ones have left; returns what went wrong."""
        workers = [child for child in self._children if child.stage is not None]
        last_step, moved = -1, time.monotonic()
        timeout = aiohttp.ClientTimeout(total=3)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while any(child.running for child in workers if not child.attack):
                await asyncio.gather(*(self._poll(session, child) for child in self._children))
                step = max((child.status.get("step", 0) for child in workers), default=0)
                if self.first_step_seconds is None and any(
                    child.status.get("state") == "training" for child in workers
                ):
                    self.first_step_seconds = time.monotonic() - self._started
                if step != last_step:
                    last_step, moved = step, time.monotonic()
                self._view.update(self._children)
                for child in workers:
                    code = child.process.returncode
                    if not child.attack and code not in (None, 0):
                        return f"node {child.name} ended with code {code}: {child.last_words()}"
                if time.monotonic() - moved > STALL_SECONDS:
                    reasons = "; ".join(
                        f"{child.name}: {child.status.get('reason', '')}" for child in workers if child.running
                    )
                    return f"no new step for {STALL_SECONDS:.0f} s ({reasons})"
                await self._pause(workers)
        return ""

    async def _pause(self, workers: list[Child]) -> None:
        """Until the next look, or until some process ends."""
        waits = [asyncio.ensure_future(child.process.wait()) for child in workers if child.running]
        if not waits:  # the last ones ended while they were asked for their status
            return
        _, pending = await asyncio.wait(waits, timeout=POLL_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        for wait in pending:
            wait.cancel()

    async def _poll(self, session: aiohttp.ClientSession, child: Child) -> None:
        address = child.ready.get("http")
        if not child.running or not address:
            return
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with session.get(f"http://{address[0]}:{address[1]}/status") as response:
                child.status = await response.json()
