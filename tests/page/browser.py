"""A headless Chromium that a test drives over the DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="needs a browser: Debian's package chromium")
START_SECONDS = 30.0
PATIENCE = 30.0


class Browser:
    """One tab. Keeps what the page complained of, and whom it asked for anything."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._number = 0
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._changed = asyncio.Event()
        self._session = ""
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.loaded = asyncio.Event()
        self._reading = asyncio.ensure_future(self._read())

    async def start(self) -> None:
        """Open a tab and listen to it."""
        target = await self.call("Target.createTarget", url="about:blank")
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            await self.call(f"{domain}.enable")

    async def close(self) -> None:
        """Stop listening."""
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the protocol; returns its result."""
        self._number += 1
        answer: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._answers[self._number] = answer
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        await self._socket.send_json(message)
        async with asyncio.timeout(PATIENCE):
            return await answer

    async def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        self.loaded.clear()
        await self.call("Page.navigate", url=url)
        async with asyncio.timeout(PATIENCE):
            await self.loaded.wait()

    async def run(self, script: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        result = await self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    async def until(self, script: str) -> None:
        """Wait until an expression in the page is true; looks at it whenever the document changes."""
        watched = f"""new Promise((resolve) => {{
            const good = () => {{ try {{ return Boolean({script}); }} catch {{ return false; }} }};
            if (good()) {{ resolve(true); return; }}
            const watcher = new MutationObserver(() => {{ if (good()) {{ watcher.disconnect(); resolve(true); }} }});
            watcher.observe(document, {{subtree: true, childList: true, characterData: true, attributes: true}});
        }})"""
        try:
            assert await self.run(watched)
        except TimeoutError:
            raise AssertionError(f"never true: {script}; page: {await self.text()}") from None

    async def text(self) -> str:
        """What a person can read of the page."""
        return str(await self.run("document.body.innerText"))

    async def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Make the window so many pixels large."""
        await self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def picture(self, path: Path) -> None:
        """Save the whole page as PNG."""
        image = await self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(image["data"]))

    async def _read(self) -> None:
        async for frame in self._socket:
            message = json.loads(frame.data)
            if "id" in message:
                answer = self._answers.pop(message["id"])
                if not answer.done():
                    answer.set_result(message.get("result", {"exceptionDetails": message.get("error")}))
                continue
            self._event(message["method"], message.get("params", {}))

    def _event(self, method: str, parameters: dict[str, Any]) -> None:
        if method == "Page.loadEventFired":
            self.loaded.set()
        elif method == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.complaints.append(str(parameters["exceptionDetails"]))
        elif method == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "warning", "assert"):
            self.complaints.append(str(parameters["args"]))
        elif method == "Log.entryAdded" and parameters["entry"]["level"] in ("error", "warning"):
            self.complaints.append(str(parameters["entry"]))


@contextlib.asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """A browser of its own, with an empty profile, that ends with everything it started."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="sentinel-page-", ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            *("--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        draining: asyncio.Task[None] | None = None
        try:
            assert process.stderr is not None
            async with asyncio.timeout(START_SECONDS):
                while not (line := (await process.stderr.readline()).decode()).startswith("DevTools listening on "):
                    assert line, "Chromium ended before it listened"
            draining = asyncio.ensure_future(_drain(process.stderr))
            address = line.removeprefix("DevTools listening on ").strip()
            async with (
                aiohttp.ClientSession() as client,
                client.ws_connect(address, max_msg_size=1 << 26) as socket,
            ):
                browser = Browser(socket)
                await browser.start()
                yield browser
                await browser.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
            if draining is not None:
                await draining


async def _drain(stream: asyncio.StreamReader) -> None:
    while await stream.read(1 << 16):
        pass
