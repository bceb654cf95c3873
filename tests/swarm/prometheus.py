"""A real Prometheus server for tests, with the project's own configuration and rules, in a hurry."""

from __future__ import annotations

import asyncio
import contextlib
import re
import shutil
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from node.demo_processes import Child
from protocol.transports.deathsignal import die_with_parent
from tests.deploy.promql import DEPLOY, load, program

SCRAPE_SECONDS = 1
LISTENS = re.compile(r'msg="Listening on" address=(\S+)')


class Prometheus:
    """A server that runs; use ``running_prometheus``."""

    def __init__(self, folder: Path, address: str) -> None:
        self.folder = folder
        self._url = f"http://{address}/api/v1"

    def scrape(self, *nodes: Child, others: Collection[str] = ()) -> None:
        """From now on these nodes (and ``others``, HOST:PORT) are scraped. Prometheus looks at the file by itself."""
        targets = ["{}:{}".format(*node.ready["http"]) for node in nodes] + [*others]
        written = self.folder / "nodes" / "swarm.part"
        written.write_text(yaml.safe_dump([{"targets": targets}]), encoding="utf-8")
        written.rename(written.with_suffix(".yml"))

    async def ask(self, path: str, **parameters: str) -> Any:
        """The data of an answer of the API."""
        async with aiohttp.ClientSession() as session, session.get(self._url + path, params=parameters) as response:
            answer = await response.json()
        assert answer["status"] == "success", f"{parameters}: {answer.get('error')}"
        assert not answer.get("warnings"), f"{parameters}: {answer['warnings']}"
        return answer["data"]

    async def query(self, query: str) -> list[dict[str, Any]]:
        """The series that a query has now."""
        found = (await self.ask("/query", query=query))["result"]
        assert isinstance(found, list)
        return found

    async def alerts(self, name: str, state: str = "firing") -> list[dict[str, Any]]:
        """The alerts of a name that are in a state."""
        found = (await self.ask("/alerts"))["alerts"]
        return [alert for alert in found if alert["labels"]["alertname"] == name and alert["state"] == state]

    async def until(self, query: str, condition: Callable[[list[dict[str, Any]]], bool], *, seconds: float) -> None:
        """Poll a query until its series meet the condition."""
        found: list[dict[str, Any]] = []
        try:
            async with asyncio.timeout(seconds):
                while not condition(found := await self.query(query)):  # noqa: ASYNC110
                    await asyncio.sleep(0.25)  # the API can only be polled
        except TimeoutError:
            raise AssertionError(f"after {seconds:.0f} s {query} is {found}") from None


@contextlib.asynccontextmanager
async def running_prometheus(folder: Path, *, waits: dict[str, str]) -> AsyncIterator[Prometheus]:
    """A server that is gone when the block ends. ``waits``: alert -> how long it is pending, instead of its ``for``."""
    configure(folder, waits)
    process = await asyncio.create_subprocess_exec(
        program("prometheus"),
        *("--config.file", str(folder / "prometheus.yml"), "--storage.tsdb.path", str(folder / "data")),
        *("--web.listen-address", "127.0.0.1:0"),
        stderr=asyncio.subprocess.PIPE,
        preexec_fn=die_with_parent,
    )
    assert process.stderr is not None
    reader = process.stderr
    said: list[str] = []
    reading: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(30):
            while (match := LISTENS.search(said[-1] if said else "")) is None:
                line = await reader.readline()
                assert line, "".join(said)
                said.append(line.decode())
        reading = asyncio.create_task(_read_on(reader))
        yield Prometheus(folder, match.group(1))
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()
        if reading is not None:
            await reading


async def _read_on(reader: asyncio.StreamReader) -> None:
    """Keep the pipe from filling up."""
    while await reader.readline():
        pass


def configure(folder: Path, waits: dict[str, str]) -> None:
    """Copy the project's files; only times, and where the nodes are, are changed."""
    (folder / "nodes").mkdir(parents=True)
    shutil.copytree(DEPLOY / "prometheus" / "rules", folder / "rules")
    shutil.copy(DEPLOY / "prometheus" / "prometheus.yml", folder)
    hurry(folder, waits)


def hurry(folder: Path, waits: dict[str, str]) -> None:
    """Change the times in a copy of the project's files, and take out what asks a name server."""
    configuration = load(folder / "prometheus.yml")
    interval = f"{SCRAPE_SECONDS}s"
    configuration["global"] = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), interval)
    (job,) = configuration["scrape_configs"]
    del job["dns_sd_configs"]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
    alerts = load(folder / "rules" / "alerts.yml")
    listed = {rule["alert"]: rule for group in alerts["groups"] for rule in group["rules"]}
    for name, wait in waits.items():
        listed[name]["for"] = wait
    (folder / "rules" / "alerts.yml").write_text(yaml.safe_dump(alerts), encoding="utf-8")
