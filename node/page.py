"""The page at ``/``: a node's status as HTML. A pure function; whatever it shows is escaped.

A script keeps the page up to date from ``/status``. What is rendered here is what a browser without scripts shows, and
what everybody sees until the first answer.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any, Final

MAX_ROWS: Final = 50
MAX_CELL_CHARS: Final = 200

_HEADLINES: Final = ("name", "state", "reason", "drill", "replicas", "events", "losses")
"""Fields of the status that have a place of their own on the page."""

_OF_NODE: Final = {"mine": "What this node contributed, restarts included", "by": "this node", "facts": "This node"}
_OF_SWARM: Final = {"mine": "Which nodes answer", "by": "its neighbours", "facts": "The swarm"}
"""What is said otherwise on the page of an observer."""

_LIVE: Final = """<main id="live" hidden>
<section aria-label="The swarm at a glance"><dl class="numbers" id="glance"></dl></section>
<section aria-labelledby="pipeline-title"><h2 id="pipeline-title">Pipeline</h2><ol class="stages" id="stages"></ol>
<p class="legend">Green: trusted by {by}. Yellow: new, little seen, or silent.
Red: suspect, quarantined, ejected or gone.</p>
</section>
<section aria-labelledby="loss-title"><h2 id="loss-title">Loss</h2><div id="curve"></div></section>
<section aria-labelledby="checks-title"><h2 id="checks-title">Flagged, audited, ejected</h2>
<div class="scroll" id="events"></div></section>
<section aria-labelledby="mine-title"><h2 id="mine-title">{mine}</h2>
<dl class="numbers" id="mine"></dl></section>
</main>"""

_REPLICA_COLUMNS: Final = ("stage", "peer", "label", "state", "step", "trust", "standing")
_EVENT_COLUMNS: Final = ("time", "step", "kind", "stage", "peer", "text")


def render_page(status: Mapping[str, Any], *, ready: bool) -> str:
    """The whole page. ``status`` is what /status of a node or an observer serves; missing fields are left out."""
    words = _OF_SWARM if status.get("observer") is True else _OF_NODE
    name = escape(_short(status.get("name") or "Sentinel Swarm"))
    state = escape(_short(status.get("state", "")))
    mark = ' class="ready"' if ready else ""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<link rel="icon" href="data:,"><link rel="stylesheet" href="/page.css">'
        f'<title>{name}: {state}</title><script src="/live.js" defer></script></head><body>',
        f'<header><h1 id="name">{name}</h1>',
        f'<p class="state" id="state" role="status"><b{mark}>{state}</b> '
        f"{escape(_short(status.get('reason', '')))}</p></header>",
        '<p class="stale" id="stale" role="alert" hidden>This node does not answer; what is shown may be old.</p>',
    ]
    if drill := status.get("drill"):
        what = _short(drill.get("attack", "") if isinstance(drill, Mapping) else drill)
        parts.append(f'<p class="drill">Drill: this node attacks the swarm on purpose ({escape(what)}).</p>')
    parts += [_LIVE.format(**words), '<div id="still">']
    parts.append(_facts(words["facts"], {key: value for key, value in status.items() if key not in _HEADLINES}))
    parts.append(_table("Replicas", _REPLICA_COLUMNS, [_replica(row) for row in _rows(status, "replicas")]))
    parts.append(_table("Events", _EVENT_COLUMNS, [_event(row) for row in _rows(status, "events")][::-1]))
    parts.append(
        '</div><nav><a href="/status">status</a> · <a href="/metrics">metrics</a> · '
        '<a href="/healthz">health</a> · <a href="/readyz">readiness</a></nav></body></html>'
    )
    return "\n".join(part for part in parts if part)


def asset(name: str) -> str:
    """The text of a file that the page loads: page.css or live.js."""
    return (files("node") / "web" / name).read_text(encoding="utf-8")


def _facts(title: str, facts: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><th>{escape(_short(key).replace('_', ' '))}</th><td>{escape(_short(value))}</td></tr>"
        for key, value in _flat(facts).items()
        if value not in (None, "")
    ]
    return f"<h2>{title}</h2><table>{''.join(rows)}</table>"


def _flat(facts: Mapping[str, Any]) -> dict[str, Any]:
    """One level: ``contribution: {tokens: 3}`` becomes ``contribution tokens: 3``."""
    flat: dict[str, Any] = {}
    for key, value in facts.items():
        if isinstance(value, Mapping):
            flat |= {f"{key} {inner}": entry for inner, entry in value.items()}
        else:
            flat[str(key)] = value
    return flat


def _table(title: str, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return ""
    head = "".join(f"<th>{column}</th>" for column in columns)
    lines = [
        "<tr>" + "".join(f"<td>{escape(_short(row.get(column)))}</td>" for column in columns) + "</tr>"
        for row in rows[:MAX_ROWS]
    ]
    more = f"<p>and {len(rows) - MAX_ROWS} more</p>" if len(rows) > MAX_ROWS else ""
    return f"<h2>{title}</h2><table><tr>{head}</tr>{''.join(lines)}</table>{more}"


def _rows(status: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    rows = status.get(key)
    return [row for row in rows if isinstance(row, Mapping)] if isinstance(rows, list | tuple) else []


def _replica(row: Mapping[str, Any]) -> Mapping[str, Any]:
    standing = row.get("standing")
    if not isinstance(standing, Mapping):
        return row
    return {**row, "trust": standing.get("trust"), "standing": standing.get("state")}


def _event(row: Mapping[str, Any]) -> Mapping[str, Any]:
    at = row.get("time")
    if not isinstance(at, int | float):
        return row
    return {**row, "time": time.strftime("%H:%M:%S", time.localtime(at))}


def _short(value: object) -> str:
    """A value as short text for one place."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if len(text) <= MAX_CELL_CHARS else f"{text[: MAX_CELL_CHARS - 1]}…"
