"""When a node writes checkpoints, and what becomes of it when it cannot.

Training goes on meanwhile: the state is copied between two steps, and everything else happens in a thread. A disk that
is full or slow costs checkpoints, never steps.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from node.checkpoints import Checkpoint, CheckpointError, CheckpointStore, find_checkpoints
from node.device import available_memory_bytes
from node.metrics import Metrics
from node.snapshot import Layout, StageState
from protocol.errors import MessageError, SentinelError
from protocol.manifest import Manifest

log = logging.getLogger(__name__)

CLOSE_SECONDS = 5.0
"""For a write that is under way when the node ends at once; what is left of it is removed at the next start."""

Freeze = Callable[[Callable[[StageState], None]], Awaitable[tuple[int, bytes]]]
"""Runs its argument in a thread, on the live state, while no step can change it; returns step and digest."""


class Checkpointer:
    """Writes and reads the checkpoints of one node."""

    def __init__(
        self,
        store: CheckpointStore,
        *,
        manifest: Manifest,
        metrics: Metrics,
        wall_clock: Callable[[], float] = time.time,
        memory: Callable[[], int] = lambda: available_memory_bytes(torch.device("cpu")),
    ) -> None:
        """``memory()``: how many bytes are free for a copy of the state."""
        self.newest: Checkpoint | None = None
        """The last one that was written, or that this node went on from."""
        self.problem = ""
        """Why the last attempt failed, for people; empty if it did not."""
        self._store = store
        self._interval = manifest.training.checkpoint_steps
        self._metrics = metrics
        metrics.checkpoint_interval.set(self._interval if store.keep else 0)
        self._wall_clock = wall_clock
        self._memory = memory
        self._stage = 0
        self._freeze: Freeze | None = None
        self._writing = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    # reading -------------------------------------------------------------------------

    async def found(self) -> tuple[Checkpoint, ...]:
        """The sound checkpoints of this swarm on this machine, newest first."""
        if count := len(find_checkpoints(self._store.folder)):
            log.info("reading %d checkpoint%s in %s", count, "s" * (count != 1), self._store.folder)
        sound, errors = await asyncio.to_thread(self._store.check_all)
        for error in errors:
            self._failed("damaged", error)
        return tuple(sound)

    async def load(self, checkpoint: Checkpoint) -> StageState | None:
        """The state in a checkpoint; None, and the reason in the log, if it can no longer be read."""
        try:
            state = await asyncio.to_thread(self._store.load, checkpoint)
        except CheckpointError as error:
            self._failed("damaged", error)
            return None
        self._note(checkpoint)
        return state

    # writing -------------------------------------------------------------------------

    def attach(self, stage: int, freeze: Freeze) -> None:
        """From now on this is the stage, and ``freeze`` gives its state."""
        self._stage, self._freeze = stage, freeze

    def step_begins(self, step: int) -> None:
        """So many steps have been applied: write a checkpoint, if it is time for one."""
        if self._freeze is None or not self._store.keep or step == 0 or step % self._interval:
            return
        if self._writing.locked():
            self._failed(
                "skipped",
                CheckpointError(
                    f"there is no checkpoint of step {step}: the one before is still being written; use a faster disk, "
                    "or fewer checkpoints (training.checkpoint_steps in the manifest of the next swarm)"
                ),
            )
            return
        task = asyncio.get_running_loop().create_task(self._save(step))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def save(self) -> None:
        """Write a checkpoint of the present step, unless there is one."""
        await self._save(None)

    async def close(self) -> None:
        """Wait a moment for what is being written."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS)
            for task in late:
                task.cancel()

    async def _save(self, wanted: int | None) -> None:
        if self._freeze is None or not self._store.keep:
            return
        async with self._writing:
            started = time.perf_counter()
            try:
                saved = await self._write(self._freeze, wanted)
            except SentinelError as error:
                self._failed("failed", error)
                return
            if saved is not None:
                self._metrics.checkpoint_seconds.observe(time.perf_counter() - started)
                self._metrics.checkpoints.labels(outcome="written").inc()
                self.problem = ""
                self._note(saved)

    async def _write(self, freeze: Freeze, wanted: int | None) -> Checkpoint | None:
        """Returns None if there is nothing to write: the first step, a step that is over, or one that is written."""
        copies: list[StageState] = []
        step, _ = await freeze(lambda state: copies.append(self._copy(state)))
        written = self.newest is not None and (self.newest.stage, self.newest.step) == (self._stage, step)
        if step == 0 or written or wanted not in (None, step):
            return None
        return await asyncio.to_thread(self._store.save, self._stage, copies.pop(), now=self._wall_clock())

    def _copy(self, state: StageState) -> StageState:
        """A copy of a state on the CPU; in a thread.

        Raises:
            SentinelError: there is no memory for it, or it is not worth keeping.
        """
        layout = Layout.of(state)
        if self._memory() < layout.size:
            raise CheckpointError(
                f"there is no checkpoint of step {state.step}: a copy of the state takes {layout.size >> 20} MiB of "
                "memory, and less is free; close other programs, or give up checkpoints with --checkpoints 0"
            )
        image = torch.empty(layout.size, dtype=torch.uint8)
        layout.pack(state, image)
        try:
            return layout.unpack(image, state.step)
        except MessageError:
            raise CheckpointError(
                f"there is no checkpoint of step {state.step}, whose parameters are not finite; stop the swarm, and"
                " begin anew with a lower training.learning_rate"
            ) from None

    # telling -------------------------------------------------------------------------

    def status(self) -> dict[str, Any] | None:
        """The newest checkpoint for /status; None if there is none."""
        if self.newest is None:
            return {"problem": self.problem} if self.problem else None
        return {
            "step": self.newest.step,
            "age_seconds": max(0.0, self._wall_clock() - self.newest.saved),
            "problem": self.problem,
        }

    def _note(self, checkpoint: Checkpoint) -> None:
        self.newest = checkpoint
        self._metrics.checkpoint_kept(checkpoint.step, saved=checkpoint.saved)

    def _failed(self, outcome: str, error: SentinelError) -> None:
        self._metrics.checkpoints.labels(outcome=outcome).inc()
        self.problem = str(error)
        kept = f"; the newest one is of step {self.newest.step}" if self.newest is not None else ""
        log.warning("%s%s", error, "" if outcome == "damaged" else f"{kept}; training goes on")
