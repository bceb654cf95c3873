"""What every test gets: one torch thread, and a check that nothing is left running."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator

import psutil
import pytest

SETTLE_SECONDS = 3.0
"""Time for children and threads that were told to end."""


@pytest.fixture(autouse=True)
def one_torch_thread() -> None:
    """Keep torch on one thread, so that tests share a small machine and sums come out the same.

    Looks for torch instead of importing it: most tests do without.
    """
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def nothing_left_running() -> Iterator[None]:
    """Fail a test that leaves a process or a non-daemon thread behind."""
    processes, threads = _processes(), _threads()
    yield
    deadline = time.monotonic() + SETTLE_SECONDS
    while (left := (_processes() - processes, _threads() - threads)) != (set(), set()):
        if time.monotonic() > deadline:
            names = [f"process {process.pid} ({process.name()})" for process in left[0]]
            pytest.fail(f"left running: {', '.join(names + [thread.name for thread in left[1]])}")
        time.sleep(0.02)


@pytest.fixture
async def no_tasks_left() -> AsyncIterator[None]:
    """For async tests that ask for it: fail if a task outlives the test body."""
    before = asyncio.all_tasks()
    yield
    left = asyncio.all_tasks() - before - {asyncio.current_task()}
    assert not left, f"tasks left: {', '.join(task.get_name() for task in left)}"


def _processes() -> set[psutil.Process]:
    """Children that run; those that have ended but are not waited for yet do no harm."""
    multiprocessing.active_children()  # waits for ended ones
    running = set()
    for child in psutil.Process().children(recursive=True):
        try:
            # multiprocessing keeps helpers of its own for the life of the process.
            helper = any("multiprocessing.resource_tracker" in word for word in child.cmdline())
            if not helper and child.status() != psutil.STATUS_ZOMBIE:
                running.add(child)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return running


def _threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if not thread.daemon}
