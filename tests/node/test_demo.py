"""The demo watches real processes, whatever they do while it looks at them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from aiohttp import web

from node.demo import Demo, DemoOptions
from node.demo_processes import Child


async def process(code: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdin=asyncio.subprocess.PIPE)


@pytest.mark.parametrize("code", [0, 7])
async def test_nodes_that_end_while_they_are_asked_are_no_trouble(tmp_path: Path, code: int) -> None:
    node = await process(f"import sys; sys.stdin.read(); sys.exit({code})")

    async def last_answer(request: web.Request) -> web.Response:
        assert node.stdin is not None
        node.stdin.close()  # the last node ends between two looks at whether it runs
        await node.wait()
        return web.json_response({"step": 3, "state": "training"})

    app = web.Application()
    app.router.add_get("/status", last_answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        demo = Demo(DemoOptions(steps=3, drills=None, plain=True), [], tmp_path)
        child = Child(name="honest-0a", folder=tmp_path, process=node, stage=0, attack="")
        child.ready = {"http": ("127.0.0.1", runner.addresses[0][1])}
        demo._children.append(child)
        async with asyncio.timeout(20):
            problem = await demo._watch()
    finally:
        await runner.cleanup()
    assert problem == ("" if code == 0 else "node honest-0a ended with code 7: ")
    assert child.status["step"] == 3
