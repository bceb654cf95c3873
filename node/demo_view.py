"""The demo's picture: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from node.console import STANDING_COLOURS, sparkline
from node.demo_processes import Child
from protocol.manifest import Manifest

SHOWN_EVENTS = 8
SHOWN_KINDS = frozenset({"quarantined", "ejected", "accusation", "verdict", "lost", "out_of_sync"})


class DemoView:
    """Shows the children's statuses. Use as a context manager."""

    def __init__(self, manifest: Manifest, *, plain: bool) -> None:
        self._manifest = manifest
        self._console = Console()
        self._live: Live | None = None
        if not plain and self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
        self._shown_events: set[tuple[Any, ...]] = set()
        self._last_step = -1
        self._started = time.monotonic()

    def __enter__(self) -> DemoView:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """One line of progress."""
        self._console.print(
            f"[{time.monotonic() - self._started:5.1f} s] {text}", markup=False, highlight=False, soft_wrap=True
        )

    def update(self, children: list[Child]) -> None:
        """Show the newest statuses."""
        for event in _news(children, self._shown_events):
            self.say(event)
        workers = [child for child in children if child.stage is not None]
        if self._live is not None:
            self._live.update(self._picture(workers))
            return
        step = max((child.status.get("step", 0) for child in workers), default=0)
        loss = _loss(workers)
        if loss is not None and step // 5 != self._last_step // 5:
            self._last_step = step
            rate = max((child.status.get("tokens_per_second", 0.0) for child in workers), default=0.0)
            self.say(f"step {step} of {self._manifest.training.steps}, loss {loss:.3f}, {rate:.0f} tokens/s")

    def _picture(self, workers: list[Child]) -> Group:
        step = max((child.status.get("step", 0) for child in workers), default=0)
        rate = max((child.status.get("tokens_per_second", 0.0) for child in workers), default=0.0)
        histories: list[list[tuple[int, float]]] = [child.status.get("losses", []) for child in workers]
        losses = max(histories, key=len, default=[])
        head = Text(f"step {step} of {self._manifest.training.steps}")
        if losses:
            head.append(f"   loss {losses[-1][1]:.3f}   {rate:.0f} tokens/s   ")
            head.append(sparkline([loss for _, loss in losses], 50), style="cyan")
        table = Table(expand=True, show_edge=False)
        for column in ("stage", "node", "peer", "state", "trust", "microbatches"):
            table.add_column(column)
        standings = _standings(workers)
        for child in sorted(workers, key=lambda child: (child.stage or 0, child.name)):
            standing, trust = standings.get(child.peer, ("", 0.0))
            if child.process.returncode == 3:
                standing = "ejected"
            state = child.status.get("state", "starting") if child.running else "gone"
            name = Text(child.name)
            if child.attack:
                name.append(f"  {child.attack}", style="red")
            table.add_row(
                str(child.stage),
                name,
                child.peer[-8:],
                state,
                Text(f"{trust:.2f} {standing}" if standing else "-", style=STANDING_COLOURS.get(standing, "")),
                str(child.status.get("contribution", {}).get("microbatches", 0)),
            )
        return Group(Panel(Group(head, table), title=f"swarm {self._manifest.name}"))


def _loss(workers: list[Child]) -> float | None:
    losses = [child.status["loss"] for child in workers if child.status.get("loss") is not None]
    return losses[0] if losses else None


def _standings(workers: list[Child]) -> dict[str, tuple[str, float]]:
    """Each peer as its neighbours see it: the worst standing that any honest neighbour reports."""
    order = ["trusted", "probation", "suspect", "quarantined", "ejected"]
    found: dict[str, tuple[str, float]] = {}
    for child in workers:
        if child.attack:
            continue
        for replica in child.status.get("replicas", []):
            standing = replica.get("standing")
            if not standing or abs((child.stage or 0) - replica["stage"]) != 1:
                continue
            known = found.get(replica["peer"])
            if known is None or order.index(standing["state"]) > order.index(known[0]):
                found[replica["peer"]] = (standing["state"], standing["trust"])
    return found


def _news(children: list[Child], shown: set[tuple[Any, ...]]) -> list[str]:
    """Events that were not shown yet, once each though several nodes report them."""
    names = {child.peer: child.name for child in children if child.peer}
    lines = []
    for child in children:
        for event in child.status.get("events", []):
            key = (event["kind"], event["peer"], event["text"] if event["kind"] == "accusation" else child.name)
            if event["kind"] == "ejected":
                key = (event["kind"], event["peer"], "")
            if event["kind"] not in SHOWN_KINDS or key in shown:
                continue
            shown.add(key)
            who = names.get(event["peer"], event["peer"][-8:])
            by = "" if event["kind"] in ("ejected", "accusation") else f" by {child.name}"
            text = event["text"]
            for peer, name in names.items():
                text = text.replace(peer[-8:], name)
            lines.append(f"step {event['step']}: {who} {event['kind']}{by}: {text}")
    return lines
