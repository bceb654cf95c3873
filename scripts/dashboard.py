"""Makes ``deploy/grafana/dashboards/sentinel.json``, the Grafana dashboard: ``python -m scripts.dashboard``.

What the panels show and ask stands in ``scripts/dashboard_panels.py``. A test fails when the file is out of date, and
when a query names a metric that no node has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from scripts.dashboard_panels import ROWS, Panel

PATH = Path(__file__).resolve().parent.parent / "deploy" / "grafana" / "dashboards" / "sentinel.json"

SOURCE = {"type": "prometheus", "uid": "${datasource}"}

WIDTH = 24
"""Of a row, in Grafana's columns."""

Json = dict[str, Any]


def dashboard() -> Json:
    """The whole dashboard."""
    return {
        "uid": "sentinel-swarm",
        "title": "Sentinel Swarm",
        "tags": ["sentinel"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "15s",
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": list(variables())},
        "panels": list(panels()),
    }


def variables() -> Iterator[Json]:
    """What can be chosen at the top."""
    yield {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus", "current": {}}
    for name, query in (
        ("job", "label_values(sentinel_info, job)"),
        ("instance", 'label_values(sentinel_info{job=~"$job"}, instance)'),
    ):
        yield {
            "name": name,
            "label": name.capitalize(),
            "type": "query",
            "datasource": SOURCE,
            "query": {"query": query, "refId": name},
            "refresh": 2,
            "sort": 1,
            "multi": True,
            "includeAll": True,
            "allValue": ".+",
            "current": {"text": ["All"], "value": ["$__all"]},
        }


def panels() -> Iterator[Json]:
    """Rows and panels with their places."""
    number, top = 0, 0
    for title, row in ROWS.items():
        number += 1
        place = {"h": 1, "w": WIDTH, "x": 0, "y": top}
        yield {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place, "panels": []}
        top, left, height = top + 1, 0, 0
        for panel in row:
            if left + panel.width > WIDTH:
                top, left, height = top + height, 0, 0
            number += 1
            place = {"h": 4 if panel.kind == "stat" else 8, "w": panel.width, "x": left, "y": top}
            yield {"id": number, "gridPos": place, **rendered(panel)}
            left, height = left + panel.width, max(height, place["h"])
        top += height


def rendered(panel: Panel) -> Json:
    """One panel as Grafana wants it."""
    defaults: Json = {"unit": panel.unit}
    if panel.kind != "table":
        colours = [("red", None)] if panel.kind == "bargauge" else [("green", None)]
        steps = [{"color": colour, "value": value} for colour, value in [*colours, *panel.steps]]
        defaults["thresholds"] = {"mode": "absolute", "steps": steps}
        defaults["min"] = 0 if panel.from_zero else None
        defaults["max"] = panel.most
    if panel.kind == "timeseries":
        defaults["custom"] = {
            "fillOpacity": 20 if panel.stacked else 0,
            "showPoints": "never",
            "stacking": {"mode": "normal" if panel.stacked else "none"},
            "thresholdsStyle": {"mode": "line" if panel.steps else "off"},
        }
    return {
        "type": panel.kind,
        "title": panel.title,
        "description": panel.about,
        "datasource": SOURCE,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": OPTIONS[panel.kind],
        "targets": [target(panel, index, *ask) for index, ask in enumerate(panel.asks.items())],
        **({"transformations": HIDE} if panel.kind == "table" else {}),
    }


def target(panel: Panel, index: int, legend: str, query: str) -> Json:
    """One query."""
    found: Json = {"refId": "ABCDEFGH"[index], "datasource": SOURCE, "expr": query, "legendFormat": legend or "__auto"}
    return found | ({"format": "table", "instant": True} if panel.kind == "table" else {})


OPTIONS: dict[str, Json] = {
    "stat": {"graphMode": "area", "colorMode": "value", "reduceOptions": {"calcs": ["lastNotNull"]}},
    "bargauge": {"displayMode": "basic", "orientation": "horizontal", "reduceOptions": {"calcs": ["lastNotNull"]}},
    "table": {"showHeader": True},
    "timeseries": {
        "legend": {"displayMode": "table", "placement": "bottom", "calcs": ["lastNotNull"]},
        "tooltip": {"mode": "multi", "sort": "desc"},
    },
}
HIDE = [{"id": "organize", "options": {"excludeByName": {"Time": True, "Value": True, "__name__": True}}}]


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=2) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
