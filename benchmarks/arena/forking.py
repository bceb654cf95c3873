"""An event loop that a process can be forked in the middle of, so that many runs share one beginning.

The child goes on with the very tasks, nodes and tensors that the parent had at that moment. What the kernel shares
between the two is made anew (the selector), what threads would own is not there (the executor computes at once), and
clocks do not count the time in which the parent stood still.
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


class StoppableClock:
    """``time.time`` and ``time.monotonic`` less the time in which this process waited for its forks.

    To be put in place before anything keeps a reference to the originals: nodes compare moments before the fork
    with moments after it.
    """

    def __init__(self) -> None:
        self._real = {"time": time.time, "monotonic": time.monotonic}
        self._stood_still = 0.0
        self._since: float | None = None

    def install(self) -> Self:
        """Replace the two clocks of the ``time`` module."""
        time.time = lambda: self._real["time"]() - self._stood_still
        time.monotonic = lambda: self._real["monotonic"]() - self._stood_still
        return self

    def stop(self) -> None:
        """From now on time does not count."""
        self._since = self._real["monotonic"]()

    def go_on(self) -> None:
        """Time counts again."""
        assert self._since is not None, "stop() comes first"
        self._stood_still += self._real["monotonic"]() - self._since
        self._since = None


class ForkableSelector(selectors.BaseSelector):
    """The platform's selector, which a child can make anew: an epoll or kqueue is shared across a fork."""

    def __init__(self) -> None:
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
        return self._inner.select(timeout)

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

    def __init__(self) -> None:
        self._forkable = ForkableSelector()
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
