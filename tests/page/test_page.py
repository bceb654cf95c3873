"""The page in a real browser: what it shows, how soon it follows, and what it never does."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from node.http import HttpServer
from node.metrics import Metrics
from tests.page.browser import Browser, browsing, needs_chromium

pytestmark = [needs_chromium, pytest.mark.timeout(120)]

HOSTILE = "</script><script>document.title='taken'</script><img src=x onerror=alert(1)>'\"&"
ME = "12D3KooWMe000000"


def peer(stage: int, place: int) -> str:
    return f"12D3KooWStage{stage:02}Place{place:03}"


def replica(stage: int, place: int, trust: float = 0.9, **more: Any) -> dict[str, Any]:
    standing = {"state": "trusted" if trust > 0.5 else "probation", "trust": trust, "strikes": 0.0}
    return {
        **{"peer": peer(stage, place), "stage": stage, "label": "", "state": "training", "step": 20},
        **{"standing": standing},
        **more,
    }


def status_of(stages: int = 3, replicas: int = 3) -> dict[str, Any]:
    """What a node of a healthy swarm says."""
    found = [replica(stage, place) for stage in range(stages) for place in range(replicas)]
    found[0] |= {"peer": ME, "label": "mine"}
    return {
        **{"name": "nightly", "state": "training", "reason": "step 20", "peer": ME, "stage": 0, "stages": stages},
        **{"step": 20, "steps": 100, "loss": 3.2101, "tokens_per_second": 5374.2, "uptime_seconds": 754.0},
        **{"microbatches_retried": 4, "microbatches_lost": 0, "coordinator": False},
        "losses": [[step, 5.5 - 0.1 * step] for step in range(20)],
        "contribution": {"microbatches": 160, "tokens": 20480, "steps": 20},
        "replicas": found,
        "events": [],
    }


@dataclass
class Site:
    """A server whose status the test sets."""

    status: dict[str, Any] = field(default_factory=status_of)
    url: str = ""


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    made = Site()
    server = HttpServer(Metrics(), lambda: made.status, lambda: (True, "training"), lambda: (True, "alive"))
    host, port = await server.start("127.0.0.1", 0)
    made.url = f"http://{host}:{port}"
    yield made
    await server.close()


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with browsing() as made:
        yield made


async def picture(browser: Browser, name: str) -> None:
    """Save what is seen where PAGE_PICTURES names a folder, for people to look at."""
    if folder := os.environ.get("PAGE_PICTURES"):
        await browser.picture(Path(folder) / f"{name}.png")


async def test_it_shows_the_swarm_and_asks_nobody_else(site: Site, browser: Browser) -> None:
    await browser.size(1280, 900)
    await browser.open(site.url)
    await browser.until("document.querySelectorAll('.replica').length === 9")
    text = await browser.text()
    for shown in ("nightly", "training", "20 of 100", "3.210", "5,374", "stage 2: 3 replicas", "this node", "20,480"):
        assert shown in text, text
    assert await browser.run("document.querySelectorAll('.replica.good').length") == 9
    assert await browser.run("document.querySelector('#curve svg').getAttribute('aria-label')") == (
        "Loss from 5.500 at step 0 to 3.600 at step 19"
    )
    assert {url.rsplit("/", 1)[0] for url in browser.requests if not url.startswith("data:")} == {site.url}
    assert browser.complaints == []
    await picture(browser, "wide")
    await browser.size(1280, 900, dark=True)
    await picture(browser, "dark")


async def test_it_follows_what_happens(site: Site, browser: Browser) -> None:
    await browser.open(site.url)
    await browser.until("document.querySelectorAll('.replica').length === 9")
    bad = site.status["replicas"][4]
    bad["standing"] = {"state": "ejected", "trust": 0.0, "strikes": 3.0}
    site.status["events"] = [
        {
            "time": time.time(),
            "step": 21,
            "kind": "ejected",
            "peer": bad["peer"],
            "stage": 1,
            "text": "4 of 6 accuse it",
        }
    ]
    site.status["losses"].append([21, 3.1])
    began = time.monotonic()
    await browser.until(
        "document.querySelector('.replica.bad') && document.body.innerText.includes('4 of 6 accuse it')"
    )
    print(f"an ejection was shown after {time.monotonic() - began:.1f} s")
    assert await browser.run("document.querySelectorAll('.replica.bad').length") == 1
    await browser.until("document.querySelector('#curve svg').getAttribute('aria-label').includes('3.100 at step 21')")
    await picture(browser, "ejection")
    site.status["replicas"] = [one for one in site.status["replicas"] if one["stage"] != 2]
    await browser.until("document.body.innerText.includes('nobody: the swarm waits for a volunteer here')")
    assert browser.complaints == []


async def test_of_an_observer_it_shows_who_is_silent_or_gone(site: Site, browser: Browser) -> None:
    site.status |= {"observer": True, "peer": "", "nodes": {"answering": 7, "silent": 1, "gone": 1, "unasked": 0}}
    for one in site.status["replicas"]:
        one |= {"presence": "answering", "for_seconds": 300}
    site.status["replicas"][1] |= {"state": "silent", "presence": "silent", "for_seconds": 12}
    site.status["replicas"][2] |= {"state": "gone", "presence": "gone", "for_seconds": 130}
    await browser.open(site.url)
    await browser.until("document.querySelectorAll('.replica').length === 9")
    text = await browser.text()
    for shown in (
        "Which nodes answer",
        "trusted by its neighbours",
        "silent for 12 s",
        "gone for 2 min",
        "watching for",
    ):
        assert shown in text, text
    assert "What this node contributed" not in text and "this node" not in text
    assert await browser.run("document.querySelector('.replica.bad').innerText.includes('gone')")
    assert await browser.run("document.querySelector('.replica.fair').innerText.includes('silent')")
    assert await browser.run("document.querySelectorAll('.replica.good').length") == 7
    assert await browser.run("[...document.querySelectorAll('#glance dd')].map(one => one.innerText).includes('8')")
    assert browser.complaints == []
    await picture(browser, "observer")


async def test_it_says_when_the_node_does_not_answer_and_goes_on_when_it_does(browser: Browser) -> None:
    made = status_of()
    servers = [HttpServer(Metrics(), lambda: made, lambda: (True, ""), lambda: (True, "")) for _ in range(2)]
    host, port = await servers[0].start("127.0.0.1", 0)
    await browser.open(f"http://{host}:{port}")
    await browser.until("document.querySelectorAll('.replica').length === 9")
    await servers[0].close()
    await browser.until("!document.getElementById('stale').hidden")
    await servers[1].start(host, port)
    await browser.until("document.getElementById('stale').hidden")
    await servers[1].close()


async def test_nothing_that_peers_say_is_taken_for_markup(site: Site, browser: Browser) -> None:
    for one in site.status["replicas"]:
        one |= {"label": HOSTILE, "peer": HOSTILE, "state": HOSTILE}
    site.status |= {"name": HOSTILE, "reason": HOSTILE, "state": HOSTILE}
    site.status["events"] = [{"time": "x", "step": HOSTILE, "kind": "ejected", "peer": HOSTILE, "text": HOSTILE}]
    site.status["losses"] = [[0, "x"], None, [1, 2.0], [2, HOSTILE]]
    await browser.open(site.url)
    await browser.until("document.querySelectorAll('.replica').length === 9")
    assert await browser.run("document.querySelectorAll('img, #live script').length") == 0
    assert await browser.run("document.title") != "taken"
    assert HOSTILE in await browser.text()
    assert browser.complaints == []


@pytest.mark.parametrize("bad", [{}, {"replicas": 7, "events": None, "stages": "x"}, {"stages": 1e9, "losses": [[1]]}])
async def test_an_incomplete_status_is_no_error(site: Site, browser: Browser, bad: dict[str, Any]) -> None:
    site.status = bad
    await browser.open(site.url)
    await browser.until("!document.getElementById('live').hidden")
    assert browser.complaints == []


async def test_it_is_readable_on_a_phone(site: Site, browser: Browser) -> None:
    await browser.size(360, 780)
    site.status["events"] = [
        {"time": time.time(), "step": 21, "kind": "strike", "peer": peer(1, 1), "stage": 1, "text": "a long story " * 9}
    ]
    site.status["replicas"][3]["label"] = "a-label-without-any-space-that-is-forty-c"
    await browser.open(site.url)
    await browser.until("document.querySelectorAll('.replica').length === 9")
    assert await browser.run("document.documentElement.scrollWidth") <= 360
    await picture(browser, "phone")


async def test_two_hundred_nodes_fit(site: Site, browser: Browser) -> None:
    site.status = status_of(stages=16, replicas=13)
    for place, one in enumerate(site.status["replicas"]):
        one["standing"]["trust"] = (place % 10) / 10
    await browser.size(1280, 900)
    await browser.open(site.url)
    await browser.until("document.querySelectorAll('.replica').length === 208")
    assert await browser.run("document.documentElement.scrollWidth") <= 1280
    load = await browser.run("performance.getEntriesByType('navigation')[0].loadEventEnd")
    print(f"208 nodes: loaded after {load:.0f} ms")
    await picture(browser, "many")
    await browser.size(360, 780)
    assert await browser.run("document.documentElement.scrollWidth") <= 360
    assert browser.complaints == []


async def test_what_changes_is_announced_and_every_part_has_a_name(site: Site, browser: Browser) -> None:
    await browser.open(site.url)
    await browser.until("document.querySelectorAll('.replica').length === 9")
    tree = (await browser.call("Accessibility.getFullAXTree"))["nodes"]
    named = {(node["role"]["value"], node.get("name", {}).get("value", "")) for node in tree if not node["ignored"]}
    for role, name in (
        ("main", ""),
        ("heading", "nightly"),
        ("region", "Pipeline"),
        ("region", "Flagged, audited, ejected"),
        ("image", "Loss from 5.500 at step 0 to 3.600 at step 19"),
    ):
        assert (role, name) in named, named
    assert any(role == "status" for role, _ in named)


async def test_without_scripts_the_tables_are_there(site: Site, browser: Browser) -> None:
    await browser.call("Emulation.setScriptExecutionDisabled", value=True)
    await browser.open(site.url)
    async with asyncio.timeout(10):
        body = (await browser.call("DOM.getDocument", depth=-1))["root"]
    assert body["nodeName"] == "#document"
    text = (await browser.call("Page.captureSnapshot"))["data"]
    assert "nightly" in text and "Replicas" in text
