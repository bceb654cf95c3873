"""The page at ``/``: a node's status as plain HTML. A pure function; whatever it shows is escaped."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

MAX_ROWS: Final = 50
MAX_CELL_CHARS: Final = 200

_STYLE: Final = (
    "body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#1b1f24}"
    "h1{font-size:1.4rem;margin-bottom:0}h2{font-size:1.05rem;margin-top:2rem}"
    "p.state{margin-top:.2rem;color:#57606a}p.state b{color:#9a3412}p.state b.ready{color:#166534}"
    "table{border-collapse:collapse;width:100%}"
    "th,td{text-align:left;padding:.25rem .75rem .25rem 0;border-bottom:1px solid #d8dee4;vertical-align:top}"
    "th{font-weight:600;white-space:nowrap}td{overflow-wrap:anywhere}"
    "p.drill{background:#fef3c7;padding:.5rem .75rem}"
    "@media(prefers-color-scheme:dark){body{background:#0d1117;color:#e6edf3}p.state{color:#9198a1}"
    "p.state b{color:#fb923c}p.state b.ready{color:#4ade80}th,td{border-color:#30363d}"
    "p.drill{background:#453507}}"
)

_HEADLINES: Final = ("name", "state", "reason", "drill", "replicas", "events", "losses")
"""Fields of the status that have a place of their own on the page."""

_REPLICA_COLUMNS: Final = ("stage", "peer", "label", "state", "step", "trust", "standing")
_EVENT_COLUMNS: Final = ("time", "step", "kind", "stage", "peer", "text")


def render_page(status: Mapping[str, Any], *, ready: bool) -> str:
    """The whole page. ``status`` is what /status serves; missing fields are left out."""
    name = escape(_short(status.get("name") or "Sentinel Swarm"))
    state = escape(_short(status.get("state", "")))
    mark = ' class="ready"' if ready else ""
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{name}: {state}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{name}</h1>",
        f'<p class="state"><b{mark}>{state}</b> {escape(_short(status.get("reason", "")))}</p>',
    ]
    if drill := status.get("drill"):
        what = _short(drill.get("attack", "") if isinstance(drill, Mapping) else drill)
        parts.append(f'<p class="drill">Drill: this node attacks the swarm on purpose ({escape(what)}).</p>')
    parts.append(_facts({key: value for key, value in status.items() if key not in _HEADLINES}))
    parts.append(_table("Replicas", _REPLICA_COLUMNS, [_replica(row) for row in _rows(status, "replicas")]))
    parts.append(_table("Events", _EVENT_COLUMNS, [_event(row) for row in _rows(status, "events")][::-1]))
    parts.append(
        '<p><a href="/status">status</a> · <a href="/metrics">metrics</a> · '
        '<a href="/healthz">health</a> · <a href="/readyz">readiness</a></p></body></html>'
    )
    return "\n".join(part for part in parts if part)


def _facts(facts: Mapping[str, Any]) -> str:
    rows = [
        f"<tr><th>{escape(_short(key).replace('_', ' '))}</th><td>{escape(_short(value))}</td></tr>"
        for key, value in _flat(facts).items()
        if value not in (None, "")
    ]
    return f"<h2>This node</h2><table>{''.join(rows)}</table>"


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
