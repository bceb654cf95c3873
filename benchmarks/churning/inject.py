"""Faults, done to a process that this one has started. Every signal goes to a pid that was looked up from a child."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

import psutil

from benchmarks.churning.schedule import Kind
from node.demo_processes import Child

HELPER = "p2pd"
GONE_SECONDS = 5.0
"""A p2pd is told by the kernel that its node has died, and needs a moment to end."""
LOOK_SECONDS = 0.05
STANDS_SECONDS, RUNS_SECONDS = 0.4, 0.1
"""Of a p2pd that is slowed down: a fifth of its speed, and up to half a second late."""


class FaultError(RuntimeError):
    """A fault could not be done, or did not do what it should."""


def helper_of(child: Child) -> psutil.Process:
    """The p2pd of a node.

    Raises:
        FaultError: it has none.
    """
    helper = find_helper(child)
    if helper is None:
        raise FaultError(f"{child.name} has no {HELPER}")
    return helper


def find_helper(child: Child) -> psutil.Process | None:
    """The p2pd of a node, if both run."""
    if not child.running:
        return None
    with contextlib.suppress(psutil.Error):
        for process in psutil.Process(child.process.pid).children():
            if process.name() == HELPER and alive(process):
                return process
    return None


def alive(process: psutil.Process) -> bool:
    """Whether a process runs, or is stopped; one that has ended and is not waited for yet does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


async def gone(process: psutil.Process, seconds: float = GONE_SECONDS) -> bool:
    """Wait until a process has ended; false if it does not in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            while alive(process):  # noqa: ASYNC110
                await asyncio.sleep(LOOK_SECONDS)  # it is no child of ours: nothing tells of its end
    return not alive(process)


async def kill(child: Child) -> None:
    """SIGKILL a node.

    Raises:
        FaultError: its p2pd outlives it.
    """
    helper = find_helper(child)
    with contextlib.suppress(ProcessLookupError):  # it has just ended by itself
        child.process.kill()
    await child.process.wait()
    if helper is not None and not await gone(helper):
        raise FaultError(f"{child.name} was killed and its {HELPER} (process {helper.pid}) still runs")


def terminate(child: Child) -> None:
    """SIGTERM a node, which then leaves by itself."""
    with contextlib.suppress(ProcessLookupError):
        child.process.terminate()


def kill_helper(child: Child) -> None:
    """SIGKILL the p2pd of a node, and nothing else.

    Raises:
        FaultError: it has none.
    """
    with contextlib.suppress(psutil.NoSuchProcess):  # it has just ended by itself, which is the same
        helper_of(child).kill()


def freeze(child: Child) -> list[psutil.Process]:
    """SIGSTOP a node and its p2pd; returns whom to thaw.

    Raises:
        FaultError: the node does not run.
    """
    if not child.running:
        raise FaultError(f"{child.name} has ended and cannot be frozen")
    helper = find_helper(child)
    frozen = [psutil.Process(child.process.pid), *([helper] if helper is not None else [])]
    for process in frozen:
        process.suspend()
    return frozen


def thaw(frozen: list[psutil.Process]) -> None:
    """SIGCONT. The p2pd first, so that the node does not wake up to a dead wire."""
    for process in reversed(frozen):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


@contextlib.asynccontextmanager
async def frozen(child: Child) -> AsyncIterator[None]:
    """A node that is frozen while the block runs, and goes on whatever happens in it."""
    stopped = freeze(child)
    try:
        yield
    finally:
        thaw(stopped)


@contextlib.asynccontextmanager
async def cut(child: Child) -> AsyncIterator[None]:
    """A node whose p2pd is stopped while the block runs: as if its line were cut.

    Raises:
        FaultError: it has none.
    """
    helper = helper_of(child)
    helper.suspend()
    try:
        yield
    finally:
        thaw([helper])


async def slow_down(child: Child, seconds: float) -> None:
    """For so long, let a node's p2pd run ``RUNS_SECONDS`` of every ``RUNS_SECONDS`` + ``STANDS_SECONDS``.

    Raises:
        FaultError: it has none.
    """
    ends = asyncio.get_running_loop().time() + seconds
    while asyncio.get_running_loop().time() < ends and child.running:
        async with cut(child):
            await asyncio.sleep(STANDS_SECONDS)
        await asyncio.sleep(RUNS_SECONDS)


async def endure(child: Child, kind: Kind, seconds: float) -> None:
    """Do a fault that lasts, to its end.

    Raises:
        FaultError: it cannot be done.
    """
    if kind is Kind.SLOW:
        await slow_down(child, seconds)
        return
    async with frozen(child) if kind is Kind.FREEZE else cut(child):
        await asyncio.sleep(seconds)  # the fault itself


async def wait_ended(child: Child, seconds: float) -> int | None:
    """The exit code of a node, once it has ended; None if it does not in time."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            return await child.process.wait()
    return None


async def end_all(children: list[Child], seconds: float) -> list[str]:
    """End every node politely, then not; returns those that had to be killed."""
    running = [child for child in children if child.running]
    for child in running:
        with contextlib.suppress(ProcessLookupError):
            child.process.send_signal(signal.SIGTERM)
    codes = await asyncio.gather(*(wait_ended(child, seconds) for child in running))
    stubborn = [child for child, code in zip(running, codes, strict=True) if code is None]
    for child in stubborn:
        with contextlib.suppress(ProcessLookupError):
            child.process.kill()
    await asyncio.gather(*(child.process.wait() for child in stubborn))
    return [child.name for child in stubborn]
