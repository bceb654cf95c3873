"""The HTTP port over real sockets on loopback: what it serves, what it refuses, and that it cannot be held."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from node.http import HEADERS, MAX_CONNECTIONS, HttpServer
from node.metrics import Metrics
from node.page import render_page
from protocol.errors import PortInUseError, SettingsError

HOSTILE = "<script>alert('x')</script>\" onload=\"&"


@dataclass
class Site:
    """A server, a client that talks to it, and what the node would say."""

    server: HttpServer
    metrics: Metrics
    client: aiohttp.ClientSession
    port: int = 0
    status: dict[str, Any] = field(default_factory=lambda: {"state": "training", "loss": 3.25})
    ready: tuple[bool, str] = (True, "training: step 12")
    alive: tuple[bool, str] = (True, "training")

    async def get(self, path: str, method: str = "GET", **options: Any) -> tuple[int, str, Any]:
        url = f"http://127.0.0.1:{self.port}{path}"
        async with self.client.request(method, url, **options) as response:
            return response.status, await response.text(), response.headers


@pytest.fixture
async def site(no_tasks_left: None) -> AsyncIterator[Site]:
    metrics = Metrics()
    server = HttpServer(metrics, lambda: made.status, lambda: made.ready, lambda: made.alive)
    async with aiohttp.ClientSession() as client:
        made = Site(server=server, metrics=metrics, client=client)
        _, made.port = await server.start("127.0.0.1", 0)
        yield made
        await server.close()


async def test_metrics_parse_and_carry_their_content_type(site: Site) -> None:
    site.metrics.step.set(12)
    status, text, headers = await site.get("/metrics")
    assert status == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    steps = {family.name: family for family in text_string_to_metric_families(text)}["sentinel_step"]
    assert steps.samples[0].value == 12


async def test_health_and_readiness_answer_with_a_sentence(site: Site) -> None:
    assert (await site.get("/healthz"))[:2] == (200, "training\n")
    assert (await site.get("/readyz"))[:2] == (200, "training: step 12\n")
    site.alive = (False, "p2pd is down")
    site.ready = (False, "waiting: stage 2 has no replica")
    assert (await site.get("/healthz"))[:2] == (503, "p2pd is down\n")
    assert (await site.get("/readyz"))[:2] == (503, "waiting: stage 2 has no replica\n")


async def test_status_is_json_even_where_numbers_are_not(site: Site) -> None:
    site.status = {"loss": float("nan"), "losses": [(1, float("inf")), (2, 3.5)], 3: {"text": HOSTILE}}
    status, text, headers = await site.get("/status")
    assert status == 200
    assert headers["Content-Type"].startswith("application/json")
    assert json.loads(text) == {"loss": None, "losses": [[1, None], [2, 3.5]], "3": {"text": HOSTILE}}


async def test_the_page_shows_the_state_and_escapes_what_peers_say(site: Site) -> None:
    site.status = {
        "name": HOSTILE,
        "state": "training",
        "reason": HOSTILE,
        "contribution": {"tokens": 512},
        "drill": {"attack": HOSTILE},
        "replicas": [{"peer": HOSTILE, "label": HOSTILE, "standing": {"trust": 0.5, "state": "trusted"}}],
        "events": [{"time": 0.0, "kind": HOSTILE, "text": HOSTILE}, {"time": HOSTILE}],
        HOSTILE: HOSTILE,
    }
    status, text, headers = await site.get("/")
    assert status == 200
    assert headers["Content-Type"].startswith("text/html")
    assert "training" in text
    assert "512" in text
    assert "trusted" in text
    assert text.count("<script") == 1 and '<script src="/live.js" defer></script>' in text
    assert 'onload="' not in text


@pytest.mark.parametrize("status", [{}, {"replicas": 7, "events": None}, {"events": [3], "drill": "scale"}])
def test_the_page_takes_an_incomplete_status(status: dict[str, Any]) -> None:
    assert render_page(status, ready=False).endswith("</html>")


def test_long_lists_are_cut_on_the_page() -> None:
    page = render_page({"replicas": [{"peer": "p" * 5000}] * 5000}, ready=True)
    assert len(page) < 40_000
    assert "and 4950 more" in page


@pytest.mark.parametrize("path", ["/", "/metrics", "/healthz", "/readyz", "/status", "/nothing"])
async def test_every_response_carries_the_security_headers(site: Site, path: str) -> None:
    _, _, headers = await site.get(path)
    assert HEADERS.items() <= dict(headers).items()
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cache-Control"] == "no-store"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'; style-src 'self'")


async def test_an_unknown_path_is_404_in_json(site: Site) -> None:
    status, text, _ = await site.get("/../etc/passwd")
    assert status == 404
    assert "/metrics" in json.loads(text)["error"]


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "PATCH"])
async def test_only_reading_is_allowed(site: Site, method: str) -> None:
    status, text, headers = await site.get("/status", method, data=b"x")
    assert status == 405
    assert headers["Allow"] == "GET, HEAD"
    assert "only GET" in json.loads(text)["error"]


async def test_head_gives_the_headers_alone(site: Site) -> None:
    status, text, headers = await site.get("/status", "HEAD")
    assert (status, text) == (200, "")
    assert int(headers["Content-Length"]) > 0


async def test_a_fault_inside_shows_nothing_of_it(site: Site, caplog: pytest.LogCaptureFixture) -> None:
    def broken() -> dict[str, Any]:
        raise RuntimeError("the secret of the house")

    site.server._status = broken
    status, text, _ = await site.get("/status")
    assert status == 500
    assert "secret" not in text
    assert "secret" in caplog.text


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",
    ],
)
async def test_oversized_and_broken_requests_are_refused(site: Site, request_bytes: bytes) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    writer.write(request_bytes)
    line = await reader.readline()
    assert line.split()[1] in (b"400", b"414", b"431")
    writer.close()
    assert (await site.get("/healthz"))[0] == 200


async def test_idle_connections_lock_nobody_out(site: Site) -> None:
    idle = [await asyncio.open_connection("127.0.0.1", site.port) for _ in range(MAX_CONNECTIONS + 20)]
    assert (await site.get("/healthz"))[0] == 200
    assert await idle[0][0].read() == b"", "the oldest connection has been closed"
    for _, writer in idle:
        writer.close()


async def test_a_port_in_use_is_one_line_with_a_remedy(site: Site) -> None:
    other = HttpServer(Metrics(), dict, lambda: (True, ""), lambda: (True, ""))
    with pytest.raises(PortInUseError) as refused:
        await other.start("127.0.0.1", site.port)
    text = str(refused.value)
    assert str(site.port) in text
    assert "--http-port" in text
    assert "\n" not in text
    assert refused.value.exit_code == 5
    await other.close()


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), ("no such host", 0), ("127.0.0.1", 70_000)])
async def test_an_impossible_address_is_a_setting_to_correct(host: str, port: int) -> None:
    server = HttpServer(Metrics(), dict, lambda: (True, ""), lambda: (True, ""))
    with pytest.raises(SettingsError, match="--http-host") as refused:
        await server.start(host, port)
    assert "\n" not in str(refused.value)


async def test_closing_ends_idle_connections_and_frees_the_port(site: Site) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", site.port)
    await site.get("/healthz")
    async with asyncio.timeout(5):
        await site.server.close()
        await site.server.close()
        assert await reader.read() == b""
    writer.close()
    again = HttpServer(site.metrics, dict, lambda: (True, ""), lambda: (True, ""))
    assert (await again.start("127.0.0.1", site.port))[1] == site.port
    await again.close()


async def test_a_node_that_has_failed_waits_for_the_scraper_that_comes_regularly(site: Site) -> None:
    stop = asyncio.Event()
    await site.get("/metrics")
    await site.server.last_scrape(stop)  # one look is no scraper, so it returns at once
    site.server._scrapes[0] -= 1000.0
    await site.get("/metrics")
    waiting = asyncio.create_task(site.server.last_scrape(stop))
    await site.get("/healthz")
    assert not waiting.done()
    await site.get("/metrics")
    await waiting


async def test_a_signal_ends_the_wait_for_the_scraper(site: Site) -> None:
    stop = asyncio.Event()
    await site.get("/metrics")
    site.server._scrapes[0] -= 1000.0
    await site.get("/metrics")
    waiting = asyncio.create_task(site.server.last_scrape(stop))
    await site.get("/healthz")
    assert not waiting.done()
    stop.set()
    await waiting
    await site.server.last_scrape(stop)


async def test_a_scraper_that_is_overdue_is_not_waited_for(site: Site) -> None:
    site.server._scrapes.extend([0.0, 0.001])
    await site.server.last_scrape(asyncio.Event())
