"""The node's HTTP port: metrics, health, status, and a small page for people.

It only reads. Everything shown is escaped, since much of it was said by peers, and every limit that a client
could stretch is set. It listens on loopback unless told otherwise and knows no secrets.
"""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final

from aiohttp import web

from node.metric_families import CONTENT_TYPE, Families
from node.page import asset, render_page
from protocol.errors import PortInUseError, SettingsError

log = logging.getLogger(__name__)

MAX_CONNECTIONS: Final = 128
"""Scrapers and browsers hold a few. Beyond it the oldest is closed, so that idle ones lock nobody out."""

MAX_LINE_BYTES: Final = 4096
"""Longest request line, and longest header: paths here have at most 9 characters."""

MAX_BODY_BYTES: Final = 1024
"""Nothing here takes a body."""

KEEP_ALIVE_SECONDS: Final = 75.0
"""Longer than the usual scrape interval of 15 to 60 s, so that a scraper keeps its connection."""

CLOSE_SECONDS: Final = 2.0
"""What a response under way gets when the node leaves."""

LAST_SCRAPE_SECONDS: Final = 60.0
"""The longest that a node which has failed waits for its scraper."""

SCRAPE_PATIENCE: Final = 1.5
"""Of the time between the last two scrapes, within which the next one is due."""

HEADERS: Final = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}

Status = Callable[[], dict[str, Any]]
Check = Callable[[], tuple[bool, str]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """Serves one node, or what observes a swarm. The callables are asked anew at each request and must not block."""

    def __init__(self, metrics: Families, status: Status, ready: Check, alive: Check) -> None:
        self._metrics = metrics
        self._status = status
        self._ready = ready
        self._alive = alive
        self._runner: web.AppRunner | None = None
        self._listener: asyncio.Server | None = None
        self._scrapes: deque[float] = deque(maxlen=2)
        self._scraped = asyncio.Event()

    async def start(self, host: str, port: int) -> tuple[str, int]:
        """Listen; port 0 takes a free one. Returns the address in use.

        Raises:
            PortInUseError: another process listens there.
            SettingsError: this machine cannot listen on that address or port.
        """
        app = web.Application(middlewares=[_guarded], client_max_size=MAX_BODY_BYTES)
        app.router.add_get("/", self._page)
        app.router.add_get("/page.css", partial(_serve_asset, asset("page.css"), "text/css"))
        app.router.add_get("/live.js", partial(_serve_asset, asset("live.js"), "text/javascript"))
        app.router.add_get("/metrics", self._serve_metrics)
        app.router.add_get("/healthz", self._health)
        app.router.add_get("/readyz", self._readiness)
        app.router.add_get("/status", self._serve_status)
        runner = web.AppRunner(
            app,
            access_log=None,
            handle_signals=False,
            keepalive_timeout=KEEP_ALIVE_SECONDS,
            max_line_size=MAX_LINE_BYTES,
            max_field_size=MAX_LINE_BYTES,
            shutdown_timeout=CLOSE_SECONDS,
        )
        await runner.setup()
        try:
            self._listener = await asyncio.get_running_loop().create_server(
                _bounded(runner), host, port, reuse_address=True
            )
        except (OSError, OverflowError) as error:
            await runner.cleanup()
            raise _listen_error(host, port, error) from None
        self._runner = runner
        address = self._listener.sockets[0].getsockname()
        return str(address[0]), int(address[1])

    async def last_scrape(self, stop: asyncio.Event) -> None:
        """Wait until a scraper that comes regularly has come once more: how this node ended is told nowhere else.

        Returns at once without such a scraper, and when ``stop`` is set.
        """
        if len(self._scrapes) < 2 or stop.is_set():
            return
        before, last = self._scrapes
        due = last + SCRAPE_PATIENCE * (last - before) - time.monotonic()
        self._scraped.clear()
        waits = [asyncio.ensure_future(event.wait()) for event in (self._scraped, stop)]
        await asyncio.wait(waits, timeout=min(max(0.0, due), LAST_SCRAPE_SECONDS), return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)

    async def close(self) -> None:
        """Stop listening and end every connection; may be called twice, and without a start."""
        listener, self._listener = self._listener, None
        runner, self._runner = self._runner, None
        if listener is not None:
            listener.close()
        if runner is not None:
            await runner.cleanup()
        if listener is not None:
            await listener.wait_closed()

    # what it serves ------------------------------------------------------------------

    async def _serve_metrics(self, request: web.Request) -> web.Response:
        self._scrapes.append(time.monotonic())
        self._scraped.set()
        return web.Response(body=self._metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def _health(self, request: web.Request) -> web.Response:
        return _answer(self._alive())

    async def _readiness(self, request: web.Request) -> web.Response:
        return _answer(self._ready())

    async def _serve_status(self, request: web.Request) -> web.Response:
        return _json(self._status())

    async def _page(self, request: web.Request) -> web.Response:
        ready, _ = self._ready()
        return web.Response(text=render_page(self._status(), ready=ready), content_type="text/html")


async def _serve_asset(text: str, kind: str, request: web.Request) -> web.Response:
    return web.Response(text=text, content_type=kind)


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Answer every fault in JSON without telling its inside, and give each response the headers."""
    response: web.StreamResponse
    try:
        response = await handler(request)
    except web.HTTPMethodNotAllowed as error:
        response = _json({"error": "only GET and HEAD are answered here"}, status=405)
        response.headers["Allow"] = ", ".join(sorted(error.allowed_methods))
    except web.HTTPNotFound:
        known = "/, /metrics, /healthz, /readyz and /status"
        response = _json({"error": f"there is no such page; there are {known}"}, status=404)
    except web.HTTPException as error:
        response = _json({"error": error.reason}, status=error.status)
    except Exception:
        log.exception("the request for %s failed", request.path)
        response = _json({"error": "internal failure; the node's log tells more"}, status=500)
    response.headers.update(HEADERS)
    return response


def _bounded(runner: web.AppRunner) -> Callable[[], asyncio.Protocol]:
    """Makes connections; the oldest ends when there are too many."""
    server = runner.server
    assert server is not None  # setup() has made it

    def connect() -> asyncio.Protocol:
        connections = server.connections
        for oldest in connections[: max(0, len(connections) - MAX_CONNECTIONS + 1)]:
            oldest.force_close()
        return server()

    return connect


def _listen_error(host: str, port: int, error: Exception) -> Exception:
    number = error.errno if isinstance(error, OSError) else None
    if number == errno.EADDRINUSE:
        return PortInUseError(
            f"HTTP port {port} on {host} is in use; stop what uses it, or pass --http-port 0 to take a free one"
        )
    if number == errno.EACCES:
        return SettingsError(f"this user may not listen on HTTP port {port}; pass --http-port with one above 1023")
    reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    return SettingsError(
        f"cannot serve HTTP on {host} port {port}: {' '.join(reason.split())}; correct --http-host or --http-port"
    )


def _answer(checked: tuple[bool, str]) -> web.Response:
    good, sentence = checked
    return web.Response(text=f"{sentence}\n", status=200 if good else 503)


def _json(value: object, *, status: int = 200) -> web.Response:
    text = json.dumps(finite(value), default=str, allow_nan=False)
    return web.Response(text=f"{text}\n", status=status, content_type="application/json")


def finite(value: object) -> object:
    """The same value with null for every number that JSON cannot hold."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [finite(entry) for entry in value]
    return value
