"""Checkpoints are written beside the training: whatever the disk does, no step waits for it and nothing is raised."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from node.checkpointer import Checkpointer
from node.checkpoints import CheckpointStore, write_checkpoint
from node.metrics import Metrics
from node.snapshot import StageState
from tests.node.test_checkpoints import MANIFEST, NOW, same, state_of, steps

pytestmark = pytest.mark.usefixtures("no_tasks_left")


class Stage:
    """A stage whose steps the test makes; gives its state as the trainer does."""

    def __init__(self) -> None:
        self.state = state_of(0)
        self.between_steps = asyncio.Lock()

    async def freeze(self, copy: Callable[[StageState], None]) -> tuple[int, bytes]:
        async with self.between_steps:
            await asyncio.to_thread(copy, self.state)
            return self.state.step, b""


class Bench:
    """A checkpointer in a folder, and what it reports."""

    def __init__(self, folder: Path, *, keep: int = 2, memory: int = 1 << 40) -> None:
        self.stage = Stage()
        self.metrics = Metrics()
        self.store = CheckpointStore(folder, MANIFEST, keep=keep)
        self.made = Checkpointer(
            self.store, manifest=MANIFEST, metrics=self.metrics, wall_clock=lambda: NOW, memory=lambda: memory
        )
        self.made.attach(0, self.stage.freeze)

    async def steps(self, *numbers: int) -> None:
        """Train up to these steps; waits for what is written."""
        for number in numbers:
            self.begin(number)
            await self.written()

    def begin(self, number: int) -> None:
        self.stage.state = state_of(number)
        self.made.step_begins(number)

    async def written(self) -> None:
        await asyncio.gather(*self.made._tasks)

    def count(self, outcome: str) -> float | None:
        return self.metrics.registry.get_sample_value("sentinel_checkpoints_total", {"outcome": outcome})


async def test_every_so_many_steps_one_is_written(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.steps(*range(35))
    assert steps(bench.store) == [30, 20] and bench.count("written") == 3
    assert bench.made.status() == {"step": 30, "age_seconds": 0.0, "problem": ""}
    assert bench.metrics.registry.get_sample_value("sentinel_checkpoint_step") == 30
    assert bench.metrics.registry.get_sample_value("sentinel_checkpoint_seconds_count") == 3
    (newest, *_), _ = bench.store.check_all()
    found = await bench.made.load(newest)
    assert found is not None and same(found, state_of(30))


async def test_a_node_that_leaves_writes_the_step_in_which_it_is(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.made.save()
    assert steps(bench.store) == [], "the first parameters follow from the manifest"
    await bench.steps(27)
    await bench.made.save()
    await bench.made.save()
    assert steps(bench.store) == [27] and bench.count("written") == 1


async def test_what_is_written_is_the_state_of_that_moment(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.begin(10)
    live = bench.stage.state.parameters
    expected = live.clone()
    async with bench.stage.between_steps:
        pass  # the copy has been asked for, and comes before whoever waits for the next step
    await bench.written()
    live.zero_()
    (saved,), _ = bench.store.check_all()
    found = await bench.made.load(saved)
    assert found is not None and torch.equal(found.parameters, expected)


async def test_a_step_that_is_over_is_not_written_in_its_place(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    async with bench.stage.between_steps:  # the next step is applied before the copy is made
        bench.begin(10)
        await asyncio.sleep(0)
        bench.stage.state = state_of(11)
    await bench.written()
    assert steps(bench.store) == []


async def test_without_checkpoints_nothing_is_written(tmp_path: Path) -> None:
    bench = Bench(tmp_path, keep=0)
    await bench.steps(10, 20)
    await bench.made.save()
    assert list(tmp_path.iterdir()) == [] and bench.made.status() is None


async def test_a_disk_that_is_full_is_told_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench(tmp_path)
    await bench.steps(10)
    with monkeypatch.context() as full:
        full.setattr("node.state_folder.os.fsync", no_space)
        await bench.steps(20, 30)
    assert bench.count("failed") == 2 and steps(bench.store) == [10]
    (line,) = {record.getMessage() for record in caplog.records if "of step 30" in record.getMessage()}
    assert "No space left on device; make room for" in line and "\n" not in line
    assert line.endswith("the newest one is of step 10; training goes on")
    status = bench.made.status()
    assert status is not None and "No space left" in status["problem"] and status["step"] == 10
    await bench.steps(40)
    assert steps(bench.store) == [40, 10] and bench.made.problem == ""


def no_space(handle: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_a_disk_that_is_slow_costs_checkpoints_and_not_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path)
    go_on, begun = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow(*arguments: object, **keywords: object) -> object:
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(60)
        return write_checkpoint(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr("node.checkpoints.write_checkpoint", slow)
    bench.begin(10)
    async with asyncio.timeout(60):
        await begun.wait()
    bench.begin(20)
    assert bench.count("skipped") == 1 and "still being written" in bench.made.problem
    go_on.set()
    await bench.written()
    assert steps(bench.store) == [10]
    await bench.steps(30)
    assert steps(bench.store) == [30, 10]


async def test_a_copy_that_does_not_fit_is_not_made(tmp_path: Path) -> None:
    bench = Bench(tmp_path, memory=1000)
    await bench.steps(10)
    assert bench.count("failed") == 1 and steps(bench.store) == []
    assert "memory, and less is free; close other programs" in bench.made.problem


async def test_parameters_that_are_not_finite_do_not_push_out_sound_ones(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    await bench.steps(10, 20)
    bench.stage.state = state_of(30)
    bench.stage.state.parameters[3] = torch.nan
    bench.made.step_begins(30)
    await bench.written()
    assert steps(bench.store) == [20, 10] and "not finite" in bench.made.problem


async def test_damaged_ones_are_counted_and_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    bench = Bench(tmp_path)
    await bench.steps(10, 20)
    (newest, older), _ = bench.store.check_all()
    newest.path.write_bytes(b"rust")
    assert await bench.made.load(newest) is None
    assert await bench.made.found() == (older,)
    older.path.write_bytes(b"rust")
    assert await bench.made.found() == ()
    assert bench.count("damaged") == 2
    assert all(record.getMessage().count("\n") == 0 for record in caplog.records)


async def test_what_is_being_written_when_the_node_ends_is_waited_for(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.begin(10)
    await bench.made.close()
    assert steps(bench.store) == [10]
