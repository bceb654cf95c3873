"""The worker of simulations: as the real one, without a thread."""

from __future__ import annotations

import threading

import pytest

from node.worker import InlineWorker, Priority, WorkerClosedError


async def test_a_job_runs_at_once_in_the_callers_thread() -> None:
    worker = InlineWorker()
    assert await worker.run(Priority.FORWARD, threading.get_ident) == threading.get_ident()
    assert worker.busy_seconds()[Priority.FORWARD] > 0.0
    assert worker.busy_seconds()[Priority.CHECK] == 0.0
    assert set(worker.queue_lengths().values()) == {0}


async def test_what_a_job_raises_is_raised_to_its_caller() -> None:
    worker = InlineWorker()

    def fail(error: BaseException) -> None:
        raise error

    with pytest.raises(KeyError):
        await worker.run(Priority.CHECK, fail, KeyError("x"))
    with pytest.raises(RuntimeError, match="StopIteration"):
        await worker.run(Priority.CHECK, fail, StopIteration())


async def test_a_closed_worker_runs_nothing() -> None:
    worker = InlineWorker()
    worker.close()
    worker.close()
    with pytest.raises(WorkerClosedError):
        await worker.run(Priority.FORWARD, int)
