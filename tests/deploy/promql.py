"""The queries of rules and dashboard, and the names that they use."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from node.metrics import Metrics
from node.observing.metrics import SwarmMetrics

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
RULES = DEPLOY / "prometheus" / "rules"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "sentinel.json"

KEYWORDS = {
    *("and", "or", "unless", "by", "without", "on", "ignoring", "group_left", "group_right", "bool", "offset"),
    *("inf", "nan"),
}
OF_PROMETHEUS = {"up", "ALERTS"}


def program(name: str) -> str:
    """The path of a program of Debian's package prometheus; the test is skipped where it is not there."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not here; install Debian's package prometheus")
    return found


def load(path: Path) -> dict[str, Any]:
    """A YAML file that holds a mapping."""
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict), path
    return found


def rules(kind: str) -> dict[str, dict[str, Any]]:
    """The rules of a kind ("alert" or "record") by name."""
    groups = [group for path in sorted(RULES.glob("*.yml")) for group in load(path)["groups"]]
    listed = [rule for group in groups for rule in group["rules"] if kind in rule]
    found = {rule[kind]: rule for rule in listed}
    assert found and len(found) == len(listed), f"a name of a {kind} stands twice"
    return found


def dashboard_panels() -> list[dict[str, Any]]:
    """Every panel of the dashboard, without its rows."""
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [panel for panel in panels if panel["type"] != "row"]


def dashboard_queries() -> Iterator[tuple[str, str]]:
    """Panel and query, with everything chosen at the top."""
    for panel in dashboard_panels():
        for target in panel["targets"]:
            yield panel["title"], target["expr"].replace("$job", ".+").replace("$instance", ".+")


def names(query: str) -> set[str]:
    """The metrics that a query names."""
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", query)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]", "", bare)
    bare = re.sub(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)", " ", bare)
    words = re.findall(r"(?<![\w.:])[a-zA-Z_:][\w:]*(?![\w:]*\s*\()", bare)
    return {word for word in words if word.lower() not in KEYWORDS}


def known() -> set[str]:
    """Every name that a query may use."""
    found = set(OF_PROMETHEUS) | rules("record").keys()
    for family in (*Metrics().described, *SwarmMetrics().described):
        parts = ("_bucket", "_sum", "_count") if family.kind == "histogram" else ("",)
        found |= {family.name + part for part in parts}
    return found
