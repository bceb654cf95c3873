"""The one thread that computes: torch work leaves the event loop here and comes back as results.

Of the jobs that wait, the most urgent kind goes first, and within a kind the oldest. A job that runs is never
interrupted; a job whose waiter was cancelled before it began is never run. Knows nothing of what jobs do.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeVar, TypeVarTuple

from node.device import limit_threads
from protocol.errors import LocalError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class WorkerClosedError(LocalError):
    """The compute thread has ended, so the job was not run."""


class Priority(IntEnum):
    """Kinds of jobs, the most urgent first: a backward frees memory and lets a whole chain of peers go on."""

    BACKWARD = 0
    FORWARD = 1
    CHECK = 2
    AUDIT = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Job:
    call: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]


class ComputeWorker:
    """Runs jobs one at a time in a thread of its own. Close it when done."""

    def __init__(self, *, threads: int = 0) -> None:
        """``threads``: torch threads that a job may use inside itself; 0 leaves the choice to torch."""
        self._condition = threading.Condition()
        self._waiting: dict[Priority, OrderedDict[int, _Job]] = {kind: OrderedDict() for kind in Priority}
        self._busy_seconds = dict.fromkeys(Priority, 0.0)
        self._next_number = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, args=(threads,), name="compute", daemon=True)
        self._thread.start()

    async def run(self, priority: Priority, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """Await ``fn(*args)``, run in the compute thread. What it raises is raised here.

        Cancelling removes a job that still waits; one that has begun runs to its end, for nothing.

        Raises:
            WorkerClosedError: the worker was closed before the job began.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        job = _Job(call=functools.partial(fn, *args), loop=loop, future=future)
        with self._condition:
            if self._closed:
                raise WorkerClosedError("the compute thread has ended; the node is shutting down")
            number = self._next_number
            self._next_number += 1
            self._waiting[priority][number] = job
            self._condition.notify()
        del job  # else this frame would keep the arguments alive while the result is awaited
        try:
            return await future
        finally:
            del future  # an error's traceback holds this frame, so it must not hold the error
            with self._condition:
                self._waiting[priority].pop(number, None)

    def queue_lengths(self) -> dict[Priority, int]:
        """Jobs of each kind that wait, without the one that runs."""
        with self._condition:
            return {kind: len(jobs) for kind, jobs in self._waiting.items()}

    def busy_seconds(self) -> dict[Priority, float]:
        """Seconds spent on finished jobs of each kind, since the start."""
        with self._condition:
            return dict(self._busy_seconds)

    def close(self) -> None:
        """Refuse what waits, let the running job finish, and end the thread. Blocks as long as that job takes.

        May be called more than once, and from any thread but the worker's own.
        """
        with self._condition:
            self._closed = True
            refused = [job for jobs in self._waiting.values() for job in jobs.values()]
            for jobs in self._waiting.values():
                jobs.clear()
            self._condition.notify()
        for job in refused:
            _deliver(job, None, WorkerClosedError("the compute thread has ended; the node is shutting down"))
        self._thread.join()

    # in the compute thread -----------------------------------------------------------

    def _work(self, threads: int) -> None:
        limit_threads(threads)
        while self._run_next():
            pass

    def _run_next(self) -> bool:
        """Wait for a job and run it; False once closed. Its own frame, so that no job outlives its run."""
        with self._condition:
            self._condition.wait_for(lambda: self._closed or any(self._waiting.values()))
            if self._closed:
                return False
            kind = next(kind for kind, jobs in self._waiting.items() if jobs)
            _, job = self._waiting[kind].popitem(last=False)
        started = time.perf_counter()
        try:
            result = job.call()
        except BaseException as error:  # whatever it is belongs to the waiter; the thread has to go on
            self._account(kind, started)
            _deliver(job, None, error)
        else:
            self._account(kind, started)
            _deliver(job, result, None)
        finally:
            del job  # an error's traceback holds this frame, so it must not hold the error's future
        return True

    def _account(self, kind: Priority, started: float) -> None:
        with self._condition:
            self._busy_seconds[kind] += time.perf_counter() - started


class InlineWorker(ComputeWorker):
    """Runs each job at once, where it is asked for: many nodes of a simulation share one process, and a thread for
    each would only hand the interpreter's lock to and fro. While a job runs the event loop stands still."""

    def __init__(self) -> None:
        """Starts no thread."""
        self._busy = dict.fromkeys(Priority, 0.0)
        self._ended = False

    async def run(self, priority: Priority, fn: Callable[[*Ts], T], *args: *Ts) -> T:
        """``fn(*args)``. What it raises is raised here.

        Raises:
            WorkerClosedError: the worker was closed.
        """
        if self._ended:
            raise WorkerClosedError("the compute worker has ended; the node is shutting down")
        started = time.perf_counter()
        try:
            return fn(*args)
        except StopIteration as error:
            raise RuntimeError(f"a job raised StopIteration: {error}") from None  # as from a future
        finally:
            self._busy[priority] += time.perf_counter() - started

    def queue_lengths(self) -> dict[Priority, int]:
        """Nothing ever waits."""
        return dict.fromkeys(Priority, 0)

    def busy_seconds(self) -> dict[Priority, float]:
        """Seconds spent on finished jobs of each kind, since the start."""
        return dict(self._busy)

    def close(self) -> None:
        """Refuse jobs from now on."""
        self._ended = True


def _deliver(job: _Job, result: Any, error: BaseException | None) -> None:
    with contextlib.suppress(RuntimeError):  # the event loop has closed, so nobody waits any more
        job.loop.call_soon_threadsafe(_settle, job.future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return  # its waiter was cancelled while the job ran
    if isinstance(error, StopIteration):
        future.set_exception(RuntimeError(f"a job raised StopIteration: {error}"))  # a future cannot hold it
    elif error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
