"""An event loop that a process can be forked in the middle of, so that many runs share one beginning.

The child goes on with the very tasks, nodes and tensors that the parent had at that moment. What the kernel shares
between the two is made anew (the selector), what threads would own is not there (the executor computes at once), and
clocks count only the time in which this process works.
"""

from __future__ import annotations

import asyncio
import os
import select
import selectors
import signal
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Self

READ_BYTES = 1 << 16


class WorkClock:
    """``time.time`` and ``time.monotonic`` in which only this process's own work counts.

    They advance while it computes, and while its event loop waits for something (:class:`ForkableSelector` says so);
    not while it waits for its forks, nor while other processes have the CPU. So a busy machine makes a run longer and
    changes nothing in it: no node seems silent because its process was not run. For processes of one thread. To be put
    in place before anything keeps a reference to the originals: nodes compare moments before the fork with moments
    after it.
    """

    def __init__(self) -> None:
        self._real = {"time": time.time, "monotonic": time.monotonic}
        self._start = {name: clock() for name, clock in self._real.items()}
        self._counted = 0.0
        self._since: float | None = time.process_time()

    def install(self) -> Self:
        """Replace the two clocks of the ``time`` module."""
        time.time = lambda: self._start["time"] + self._passed()
        time.monotonic = lambda: self._start["monotonic"] + self._passed()
        return self

    def stop(self) -> None:
        """From now on time does not count."""
        self._counted = self._passed()
        self._since = None

    def go_on(self) -> None:
        """Time counts again. In a fork too, whose CPU time begins anew."""
        assert self._since is None, "stop() comes first"
        self._since = time.process_time()

    def waited(self, seconds: float) -> None:
        """Count time in which the event loop had nothing to do."""
        self._counted += seconds

    def _passed(self) -> float:
        return self._counted + (0.0 if self._since is None else time.process_time() - self._since)


class ForkableSelector(selectors.BaseSelector):
    """The platform's selector, which a child can make anew: an epoll or kqueue is shared across a fork.

    ``clock`` is told how long it waited, at most as long as it was asked to: what is longer was another process's.
    """

    def __init__(self, clock: WorkClock) -> None:
        self._clock = clock
        self._inner = selectors.DefaultSelector()

    def renew(self) -> None:
        """Watch the same files through a selector of this process's own."""
        keys = list(self._inner.get_map().values())
        self._inner.close()
        self._inner = selectors.DefaultSelector()
        for key in keys:
            self._inner.register(key.fileobj, key.events, key.data)

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """As the platform's."""
        return self._inner.register(fileobj, events, data)

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """As the platform's."""
        return self._inner.unregister(fileobj)

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """As the platform's."""
        return self._inner.modify(fileobj, events, data)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """As the platform's."""
        if timeout is not None and timeout <= 0:
            return self._inner.select(timeout)
        began = time.perf_counter()
        ready = self._inner.select(timeout)
        waited = time.perf_counter() - began
        self._clock.waited(waited if timeout is None else min(waited, timeout))
        return ready

    def close(self) -> None:
        """As the platform's."""
        self._inner.close()

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """As the platform's."""
        return self._inner.get_map()


class InlineExecutor(ThreadPoolExecutor):
    """Computes where it is asked to: threads do not survive a fork."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The result, or the exception, is there on return."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


class ForkableLoop(asyncio.SelectorEventLoop):
    """An event loop for a process that forks inside of one of its callbacks."""

    def __init__(self, clock: WorkClock) -> None:
        self._forkable = ForkableSelector(clock)
        super().__init__(self._forkable)
        self.set_default_executor(InlineExecutor())

    def renew(self) -> None:
        """To be called in the child at once: asyncio rightly takes no loop of another process for the running one."""
        self._forkable.renew()
        asyncio._set_running_loop(self)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a child said, or why it said nothing."""

    said: bytes
    error: str = ""


def forked(work_on: Callable[[], None], *, seconds: float) -> tuple[int, Outcome]:
    """Fork, and wait for the child; the child gets (write end of its pipe, ...) and must end by itself.

    Returns (-1, the child's outcome) in the parent and (the file descriptor to write the result to, nothing) in the
    child, after ``work_on`` has been called there. A child that takes longer than ``seconds`` is killed.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        work_on()
        return writing, Outcome(b"")
    os.close(writing)
    try:
        said, in_time = _read_all(reading, time.perf_counter() + seconds)
    finally:
        os.close(reading)
    if not in_time:
        os.kill(pid, signal.SIGKILL)  # not reaped yet, so it is ours
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if not in_time:
        return -1, Outcome(said, f"not done after {seconds:.0f} s")
    return -1, Outcome(said, f"exit code {code}" if code else "")


def _read_all(reading: int, deadline: float) -> tuple[bytes, bool]:
    """What is written until the other end is closed, and whether that was before the deadline."""
    parts: list[bytes] = []
    while (left := deadline - time.perf_counter()) > 0:
        if not select.select([reading], [], [], left)[0]:
            break
        if not (part := os.read(reading, READ_BYTES)):
            return b"".join(parts), True
        parts.append(part)
    return b"".join(parts), False
