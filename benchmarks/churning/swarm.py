"""A swarm of node processes on loopback that is watched all the time, and whose nodes come and go."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from benchmarks.churning.inject import end_all, find_helper, gone
from benchmarks.churning.leaks import (
    FileCount,
    OpenFiles,
    Processes,
    claims_of_the_dead,
    count_open_files,
    noted_sockets,
)
from benchmarks.churning.schedule import COORDINATOR, node_name, stage_of
from benchmarks.churning.watch import Watch
from node.demo_processes import Child, start_child
from protocol.invite import Invite, parse_invite
from protocol.manifest import Manifest
from protocol.manifest_template import render

LOOPBACK = ["--host", "127.0.0.1", "--no-reach"]
POLL_SECONDS = 1.0
ANSWER_SECONDS = 5.0
FILES_EVERY = 5
"""Open files are counted at every so many polls."""
INVITED = 3
"""Nodes whom an invite names."""
LEAVE_SECONDS = 30.0
"""Within which a node has to have left after SIGTERM."""
FRESH_SECONDS = 6.0
"""A status older than this tells nothing of a node any more."""
MOST_BEHIND = 3
"""Steps that a node which trains may be behind the newest: statuses come a moment after one another."""
EJECTED_EXIT_CODE = 3


class SwarmError(RuntimeError):
    """The swarm did not get as far as the benchmark needs it."""


def churn_manifest(stages: int, replicas: int) -> Manifest:
    """A model so small that a step takes well under a second; everything else is as in a real swarm."""
    return Manifest.from_mapping(
        {
            "name": "churn",
            "model": {"width": 32, "layers": stages, "heads": 2, "kv_heads": 1, "ffn": 64, "context": 32},
            "stages": {"layers_per_stage": [1] * stages, "min_replicas": replicas},
            "training": {
                "learning_rate": 3e-3,
                "warmup_steps": 5,
                "decay_steps": 1000,
                "sequences_per_step": 6 * replicas,
                "sequences_per_microbatch": 2,
            },
        }
    )


@dataclass(slots=True, eq=False)
class Life:
    """One process of a node, from its start to its end."""

    name: str
    number: int
    child: Child
    began: float
    sockets: Path | None
    fault: str = ""
    """What was done to it that ends it; empty if nothing was."""
    ended: float | None = None
    status: dict[str, Any] = field(default_factory=dict)
    seen: float = -1e9
    """When the last status came."""
    frozen: bool = False
    killed: bool = False
    """Whether it had no chance to clear up."""
    files: OpenFiles = field(default_factory=OpenFiles)
    helper_files: OpenFiles = field(default_factory=OpenFiles)

    @property
    def key(self) -> str:
        """Its name, and which process of that node it is."""
        return f"{self.name}#{self.number}"

    @property
    def here(self) -> bool:
        """Whether it runs, or is frozen, and nothing is about to end it."""
        return self.child.running and not self.fault

    def trains(self, now: float, step: int) -> bool:
        """Whether its stage can rely on it, by what it said last, while the swarm is at ``step``."""
        if not self.here or self.frozen or now - self.seen > FRESH_SECONDS:
            return False
        return self.status.get("state") == "training" and int(self.status["step"]) >= step - MOST_BEHIND

    def brief(self) -> str:
        """What it said last, in few words."""
        if not self.child.running:
            return f"ended with {self.child.process.returncode}"
        state = "frozen" if self.frozen else self.status.get("state", "starting")
        return f"{state}, step {self.status.get('step', 0)}: {str(self.status.get('reason', ''))[:160]}"


class ChurnSwarm:
    """A coordinator and nodes; use ``churn_swarm``."""

    def __init__(self, folder: Path, manifest: Manifest, tell: Callable[[str], None], *, log_level: str) -> None:
        self.folder = folder
        self.manifest = manifest
        self.watch = Watch()
        self.lives: list[Life] = []
        self.problems: list[str] = []
        """What went wrong with nodes, as sentences; faults that were done on purpose are no problems."""
        self.processes = Processes()
        self._tell = tell
        self._log_level = log_level
        self._began = time.monotonic()
        self._port = _free_port()
        self._tasks: set[asyncio.Task[None]] = set()
        self._others = set(psutil.Process().children())
        """Children of this process that are none of this swarm."""
        self._http: aiohttp.ClientSession | None = None

    def now(self) -> float:
        """Seconds since this swarm began."""
        return time.monotonic() - self._began

    def say(self, text: str) -> None:
        """A line for whoever looks on."""
        self._tell(f"{self.now():7.1f} s  step {self.watch.clock.step:>4}  {text}")

    def problem(self, text: str) -> None:
        """Note that something is not as it should be."""
        self.problems.append(f"{self.now():.1f} s: {text}")
        self.say(f"PROBLEM: {text}")

    # who is there --------------------------------------------------------------------

    def life(self, name: str) -> Life | None:
        """The newest process of a node; None if it never had one."""
        return next((life for life in reversed(self.lives) if life.name == name), None)

    def living(self) -> list[Life]:
        """The processes that run and that nothing has been done to."""
        return [life for life in self.lives if life.here]

    def nodes(self) -> list[Life]:
        """Those of them that hold a stage."""
        return [life for life in self.living() if life.name != COORDINATOR]

    def reliable(self, stage: int, *, without: str = "") -> list[Life]:
        """The replicas of a stage that train, less one."""
        now, step = self.now(), self.watch.clock.step
        replicas = (life for life in self.nodes() if stage_of(life.name) == stage and life.name != without)
        return [life for life in replicas if life.trains(now, step)]

    def invite(self) -> str:
        """An invite to some who are there, the coordinator first: any one of them may be gone in a moment."""
        asked = sorted(self.living(), key=lambda life: life.name != COORDINATOR)
        lines = [life.child.ready.get("invite") or life.status.get("invite") for life in asked if not life.frozen]
        addresses = [address for line in lines[:INVITED] if line for address in parse_invite(str(line)).addresses]
        if not addresses:
            raise SwarmError("nobody is there whom a new node could ask")
        return str(Invite(swarm_id=self.manifest.swarm_id, addresses=tuple(addresses)))

    # coming --------------------------------------------------------------------------

    async def coordinate(self) -> Life:
        """Start the coordinator, or start it again: always at the same port, as a person would."""
        path = self.folder / "swarm.toml"
        if not path.exists():
            path.write_text(render(self.manifest), encoding="utf-8")
        return await self._start(COORDINATOR, ["coordinate", str(path), *LOOPBACK, "--port", str(self._port)])

    async def join(self, name: str, invite: str | None = None) -> Life:
        """Start a node, or start it again with the state folder that it had."""
        stage = stage_of(name)
        arguments = ["join", invite or self.invite(), *LOOPBACK, "--stage", str(stage), "--label", name]
        return await self._start(name, [*arguments, "--threads", "1"])

    async def fill(self, replicas: int) -> None:
        """Start the coordinator and so many replicas of every stage."""
        await self.coordinate()
        stages = range(self.manifest.num_stages)
        names = [node_name(stage, number) for stage in stages for number in range(replicas)]
        await asyncio.gather(*map(self.join, names))

    async def _start(self, name: str, arguments: list[str]) -> Life:
        folder = self.folder / name
        number = sum(life.name == name for life in self.lives) + 1
        _keep_log(folder, number - 1)
        began = self.now()
        child = await start_child(name, folder, [*arguments, "--log-level", self._log_level], stage=stage_of(name))
        life = Life(name=name, number=number, child=child, began=began, sockets=noted_sockets(folder))
        if not child.ready:
            await child.process.wait()
            raise SwarmError(f"{life.key} did not start: {child.last_words()}")
        self.lives.append(life)
        self.watch.names[child.peer] = name
        self._spawn(self._attend(life))
        return life

    # watching ------------------------------------------------------------------------

    async def _attend(self, life: Life) -> None:
        """Ask a node for its status until it ends; note how it ended."""
        looks = 0
        ended = asyncio.ensure_future(life.child.process.wait())
        try:
            while not ended.done():
                if not life.frozen:
                    await self._look(life)
                if looks % FILES_EVERY == 0:
                    self._count_files(life)
                looks += 1
                await asyncio.wait({ended}, timeout=POLL_SECONDS)
        finally:
            ended.cancel()
        life.ended = self.now()
        code = life.child.process.returncode
        if not life.fault:
            self.problem(f"{life.key} ended by itself with code {code}: {life.child.last_words()}")

    async def _look(self, life: Life) -> None:
        status = await self.ask(life)
        if status:
            life.status, life.seen = status, self.now()
            life.child.status = status
            self.watch.take(life.name, life.key, status, life.seen)

    async def ask(self, life: Life) -> dict[str, Any]:
        """What a node says at /status now; empty if it does not answer."""
        assert self._http is not None
        host, port = life.child.ready["http"]
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with self._http.get(f"http://{host}:{port}/status") as response:
                found = await response.json()
                return found if isinstance(found, dict) else {}
        return {}

    def _count_files(self, life: Life) -> None:
        if not life.child.running:
            return
        with contextlib.suppress(psutil.Error):
            node = psutil.Process(life.child.process.pid)
            self.processes.see(node)
            for process, files in ((node, life.files), (find_helper(life.child), life.helper_files)):
                if process is not None and (count := count_open_files(process)) is not None:
                    peers = len(life.status.get("replicas", ()))
                    files.samples.append(FileCount(second=self.now(), files=count, peers=peers))

    async def until(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Look again and again whether something is so; false if it is not in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while not condition():  # noqa: ASYNC110
                    await asyncio.sleep(POLL_SECONDS / 4)  # statuses can only be polled
        return condition()

    def strange_claims(self) -> list[str]:
        """Claims of nodes that no longer live, as "viewer: owner", in the views of those that do."""
        living = {life.child.peer for life in self.living()}
        return [
            f"{life.name}: {self.watch.names.get(peer, peer[-8:])}"
            for life in self.living()
            if not life.frozen
            for peer in claims_of_the_dead(life.status.get("replicas", ()), living)
        ]

    # going ---------------------------------------------------------------------------

    async def end(self) -> None:
        """End every node; notes those that do not leave in time, and whatever still runs then."""
        for life in self.living():
            life.fault = "end"
        for name in await end_all([life.child for life in self.lives], LEAVE_SECONDS):
            self.problem(f"{name} was still there {LEAVE_SECONDS:.0f} s after SIGTERM")
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*map(gone, self.processes.left()))  # what is left then stays

    async def close(self) -> None:
        """End whatever was started for this swarm, also what was about to start."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        mine = set(psutil.Process().children()) - self._others
        for process in mine:
            with contextlib.suppress(psutil.Error):
                process.resume()
                process.terminate()
        for process in mine:
            if not await gone(process, LEAVE_SECONDS):
                with contextlib.suppress(psutil.Error):
                    process.kill()
        for process in self.processes.left():
            await gone(process)

    async def __aenter__(self) -> ChurnSwarm:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
        assert self._http is not None
        await self._http.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._over)

    def _over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.problem(f"the benchmark itself failed: {error!r}")


@contextlib.asynccontextmanager
async def churn_swarm(
    folder: Path, manifest: Manifest, tell: Callable[[str], None], *, log_level: str = "info"
) -> AsyncIterator[ChurnSwarm]:
    """A swarm that is gone when the block ends, whatever happens in it. Its sockets are in its folder, too."""
    sockets = folder / "run"
    sockets.mkdir(parents=True, mode=0o700)
    before = os.environ.get("XDG_RUNTIME_DIR")
    os.environ["XDG_RUNTIME_DIR"] = str(sockets)
    try:
        async with ChurnSwarm(folder, manifest, tell, log_level=log_level) as swarm:
            yield swarm
    finally:
        if before is None:
            del os.environ["XDG_RUNTIME_DIR"]
        else:
            os.environ["XDG_RUNTIME_DIR"] = before


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _keep_log(folder: Path, number: int) -> None:
    """Put the log of the process before aside: the next one begins a new file."""
    with contextlib.suppress(FileNotFoundError):
        (folder / "log.txt").rename(folder / f"log.{number}.txt")
