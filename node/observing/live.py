"""A picture of a swarm for a terminal: a table, or one line of text. Pure; time is an argument.

Labels, names and reasons come from strangers. Records and reports hold only short printable text, and nothing here is
read as rich's own markup.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from node.console import STANDING_COLOURS, sparkline
from node.observing.picture import Picture
from node.observing.reports import ToldEvent
from node.observing.told import tell
from node.wording import many

SHOWN_EVENTS: Final = 6
SHOWN_KINDS: Final = frozenset({"accusation", "verdict", "quarantined", "ejected", "lost", "out_of_sync"})
BARS: Final = 40
STATE_COLOURS: Final = {
    "training": "green",
    "probation": "cyan",
    "syncing": "cyan",
    "silent": "yellow",
    "gone": "dim",
    "draining": "dim",
    "ejected": "red",
}


def table(picture: Picture, now: float, *, answered: float) -> RenderableType:
    """The whole swarm. ``answered``: Unix time at which a node answered last; 0 if none ever has."""
    told = tell(picture, now, started=now)
    parts: list[RenderableType] = [_head(told, picture, now, answered), Text("")]
    if told["replicas"]:
        parts.append(_replicas(told, picture))
    else:
        parts.append(Text("no replicas yet", style="dim"))
    if events := [event for event in picture.events() if event.kind in SHOWN_KINDS][-SHOWN_EVENTS:]:
        parts += [Text(""), *map(_event, events)]
    title = Text(f"swarm {told['name'] or '?'} ({told['swarm'][:12]})")
    return Panel(Group(*parts), title=title, subtitle=Text("Ctrl-C ends this; the swarm goes on", style="dim"))


def line(picture: Picture, now: float, *, answered: float) -> str:
    """The same in one line."""
    told = tell(picture, now, started=now)
    replicas = told["replicas"]
    stages = Counter(replica["stage"] for replica in replicas if replica["presence"] == "answering")
    parts = [
        time.strftime("%H:%M:%S", time.localtime(now)),
        f"[{told['state']}]",
        f"{_progress(told)};",
        ", ".join(f"{stages[stage]} in stage {stage}" for stage in range(told["stages"] or 0)) or "no stages known",
    ]
    if picture.view.accusations:
        parts.append(f"; {many(len(picture.view.accusations), 'accusation')}")
    if silence := _silence(told, now, answered):
        parts.append(f"; {silence}")
    return " ".join(parts).replace(" ;", ";")


def _progress(told: dict[str, Any]) -> str:
    text = f"step {told['step']}" + (f" of {told['steps']}" if told["steps"] else "")
    if told["loss"] is not None:
        text += f", loss {told['loss']:.3f}"
    return f"{text}, {told['tokens_per_second']:,.0f} tokens/s"


def _silence(told: dict[str, Any], now: float, answered: float) -> str:
    """What is wrong if no node answers; empty if one does."""
    if told["nodes"]["answering"] or not told["rounds"]:
        return ""
    if not answered:
        return "no node of the invite has answered, still trying"
    return f"no node answers since {now - answered:.0f} s, still trying; this is the last that was seen"


def _head(told: dict[str, Any], picture: Picture, now: float, answered: float) -> Text:
    head = Text(_progress(told))
    losses = [loss for _, loss in told["losses"]]
    if losses:
        head.append(f"   {sparkline(losses, BARS)}", style="cyan")
    if silence := _silence(told, now, answered):
        head.append(f"\n{silence}", style="yellow")
    else:
        head.append(f"\n{told['state']}: {told['reason']}")
        if accused := len(picture.view.accusations):
            head.append(f"; {many(accused, 'accusation')}", style="red")
    return head


def _replicas(told: dict[str, Any], picture: Picture) -> Table:
    found = Table(expand=True, show_edge=False)
    for name, justify in (
        ("stage", "right"),
        ("peer", "left"),
        ("label", "left"),
        ("state", "left"),
        ("trust", "left"),
        ("step", "right"),
        ("microbatches", "right"),
    ):
        found.add_column(name, justify=justify)  # type: ignore[arg-type]
    stages = range(told["stages"] or 1 + max(replica["stage"] for replica in told["replicas"]))
    for stage in stages:
        here = [replica for replica in told["replicas"] if replica["stage"] == stage]
        for replica in here:
            report = picture.nodes[replica["peer"]].report
            found.add_row(*_row(replica, step=max(replica["step"], 0 if report is None else report.step)))
        if not here:
            found.add_row(str(stage), Text("nobody", style="yellow"))
    return found


def _row(replica: dict[str, Any], *, step: int) -> list[Text]:
    """``step``: the newer of what its claim and its status say."""
    label = Text(replica["label"])
    if replica["drill"]:
        label.append(f"  drill {replica['drill']}", style="red")
    standing, state = replica.get("standing"), replica["state"]
    trust = Text("-", style="dim")
    if standing is not None:
        trust = Text(f"{standing['trust']:.2f} {standing['state']}", style=STANDING_COLOURS.get(standing["state"], ""))
    return [
        Text(str(replica["stage"])),
        Text(replica["peer"][-8:]),
        label,
        Text(state, style=STATE_COLOURS.get(state, "")),
        trust,
        Text(str(step)),
        Text(f"{replica['told'].get('microbatches', 0):,}"),
    ]


def _event(event: ToldEvent) -> Text:
    where = f" of stage {event.stage}" if event.stage is not None else ""
    text = Text(f"step {event.step}: ", style="dim")
    text.append(f"{event.peer[-8:]}{where} {event.kind}: {event.text}", style="red" if event.kind == "ejected" else "")
    return text
