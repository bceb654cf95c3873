"""Jobs run one at a time, the urgent first, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref
from collections.abc import Iterator

import pytest

from node.worker import ComputeWorker, Priority, WorkerClosedError


@pytest.fixture
def worker() -> Iterator[ComputeWorker]:
    worker = ComputeWorker()
    yield worker
    worker.close()


class Gate:
    """A job that occupies the worker until it is opened."""

    def __init__(self, worker: ComputeWorker) -> None:
        self._entered = threading.Event()
        self._opened = threading.Event()
        self.task = asyncio.get_running_loop().create_task(worker.run(Priority.CHECK, self._wait))

    def _wait(self) -> str:
        self._entered.set()
        assert self._opened.wait(10)
        return "opened"

    async def entered(self) -> None:
        assert await asyncio.to_thread(self._entered.wait, 10)

    def open(self) -> None:
        self._opened.set()


async def queued(worker: ComputeWorker, count: int) -> None:
    """Let the tasks that were just created reach the queue."""
    for _ in range(100):
        if sum(worker.queue_lengths().values()) == count:
            return
        await asyncio.sleep(0)
    raise AssertionError(worker.queue_lengths())


async def test_a_job_returns_its_result_from_one_other_thread(worker: ComputeWorker) -> None:
    names = [await worker.run(kind, threading.get_ident) for kind in Priority]
    assert len(set(names)) == 1
    assert names[0] != threading.get_ident()
    assert await worker.run(Priority.AUDIT, divmod, 7, 3) == (2, 1)


async def test_urgent_jobs_go_first_and_equal_ones_in_order(worker: ComputeWorker) -> None:
    gate = Gate(worker)
    await gate.entered()
    order: list[str] = []
    tasks = []
    for name, kind in (
        ("audit", Priority.AUDIT),
        ("forward 1", Priority.FORWARD),
        ("check", Priority.CHECK),
        ("forward 2", Priority.FORWARD),
        ("backward 1", Priority.BACKWARD),
        ("backward 2", Priority.BACKWARD),
    ):
        tasks.append(asyncio.create_task(worker.run(kind, order.append, name)))
    await queued(worker, 6)
    assert worker.queue_lengths() == {
        Priority.BACKWARD: 2,
        Priority.FORWARD: 2,
        Priority.CHECK: 1,
        Priority.AUDIT: 1,
    }
    gate.open()
    await asyncio.gather(*tasks)
    assert order == ["backward 1", "backward 2", "forward 1", "forward 2", "check", "audit"]
    assert await gate.task == "opened"


@pytest.mark.parametrize("error", [ValueError("no"), MemoryError(), KeyError("k")])
async def test_errors_come_back_and_the_worker_goes_on(worker: ComputeWorker, error: Exception) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(type(error)) as caught:
        await worker.run(Priority.FORWARD, fail)
    assert caught.value is error
    assert await worker.run(Priority.FORWARD, len, "ab") == 2


async def test_even_a_stop_iteration_comes_back(worker: ComputeWorker) -> None:
    with pytest.raises(RuntimeError, match="StopIteration"):
        await worker.run(Priority.FORWARD, next, iter(()))
    assert await worker.run(Priority.FORWARD, len, "ab") == 2


async def test_a_cancelled_job_that_waits_is_never_run(worker: ComputeWorker) -> None:
    gate = Gate(worker)
    await gate.entered()
    ran: list[int] = []
    waiting = [asyncio.create_task(worker.run(Priority.FORWARD, ran.append, number)) for number in range(3)]
    await queued(worker, 3)
    waiting[1].cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting[1]
    assert worker.queue_lengths()[Priority.FORWARD] == 2
    gate.open()
    await asyncio.gather(waiting[0], waiting[2])
    assert ran == [0, 2]


async def test_a_cancelled_job_that_runs_ends_for_nothing(worker: ComputeWorker) -> None:
    gate = Gate(worker)
    await gate.entered()
    gate.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gate.task
    gate.open()
    assert await worker.run(Priority.AUDIT, len, "ab") == 2


async def test_busy_seconds_are_counted_by_kind(worker: ComputeWorker) -> None:
    assert worker.busy_seconds() == dict.fromkeys(Priority, 0.0)
    await worker.run(Priority.FORWARD, threading.Event().wait, 0.05)
    busy = worker.busy_seconds()
    assert 0.04 < busy[Priority.FORWARD] < 5.0
    assert busy[Priority.BACKWARD] == 0.0


async def test_jobs_leave_nothing_behind(worker: ComputeWorker) -> None:
    """Arguments are microbatches: one that lingered until the next job would be memory lost."""

    class Tensor:
        pass

    def fail(tensor: Tensor) -> None:
        raise ValueError

    gc.disable()
    try:
        tensor = Tensor()
        reference = weakref.ref(tensor)
        await worker.run(Priority.FORWARD, id, tensor)
        with contextlib.suppress(ValueError):
            await worker.run(Priority.FORWARD, fail, tensor)
        await worker.run(Priority.FORWARD, int)
        del tensor
        assert reference() is None
    finally:
        gc.enable()


async def test_closing_refuses_what_waits_and_finishes_what_runs() -> None:
    worker = ComputeWorker()
    gate = Gate(worker)
    await gate.entered()
    waiting = asyncio.create_task(worker.run(Priority.BACKWARD, len, "ab"))
    await queued(worker, 1)
    closing = asyncio.create_task(asyncio.to_thread(worker.close))
    with pytest.raises(WorkerClosedError):
        await waiting
    assert not closing.done()
    gate.open()
    await closing
    assert await gate.task == "opened"
    with pytest.raises(WorkerClosedError):
        await worker.run(Priority.BACKWARD, len, "ab")
    worker.close()
    assert not worker._thread.is_alive()


def test_a_job_whose_event_loop_is_gone_does_no_harm() -> None:
    worker = ComputeWorker()
    release = threading.Event()

    async def leave() -> None:
        task = asyncio.create_task(worker.run(Priority.FORWARD, release.wait, 10))
        await asyncio.sleep(0)
        task.cancel()

    asyncio.run(leave())
    release.set()
    assert asyncio.run(worker.run(Priority.FORWARD, len, "ab")) == 2
    worker.close()
