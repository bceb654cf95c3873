"""Peers over every transport, closed after each test with nothing left behind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.protocol.peers import MemoryPeers, P2PPeers, Peers

# How long one example takes says more about the machine than about the code.
settings.register_profile("no_deadline", deadline=None)
settings.load_profile("no_deadline")


async def _closed_after(peers: Peers) -> AsyncIterator[Peers]:
    failures: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: failures.append(context))
    before = asyncio.all_tasks()
    yield peers
    await peers.close()
    left = {
        task
        for task in asyncio.all_tasks() - before - {asyncio.current_task()}
        # hivemind's bootstrap leaves a bare timer running; nothing of this project is called sleep.
        if getattr(task.get_coro(), "__qualname__", "") != "sleep"
    }
    assert not left, f"tasks left: {left}"
    assert not failures, f"the event loop caught errors: {failures}"


@pytest.fixture(params=["memory", "p2p"])
async def peers(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Peers]:
    """Peers of either kind."""
    made = MemoryPeers() if request.param == "memory" else P2PPeers(tmp_path)
    async for ready in _closed_after(made):
        yield ready


@pytest.fixture
async def memory_peers() -> AsyncIterator[Peers]:
    """Peers in memory."""
    async for ready in _closed_after(MemoryPeers()):
        yield ready


@pytest.fixture
async def p2p_peers(tmp_path: Path) -> AsyncIterator[Peers]:
    """Peers with p2pd."""
    async for ready in _closed_after(P2PPeers(tmp_path)):
        yield ready
