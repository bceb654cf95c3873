"""The dashboard is what its script makes, asks for metrics that there are, and can be read."""

from __future__ import annotations

import json
import re
from itertools import combinations

from scripts.dashboard import text
from tests.deploy.promql import DASHBOARD, DEPLOY, dashboard_panels, dashboard_queries, known, load, names

OF_A_NODE = re.compile(r"sentinel_(?!swarm_)|process_")
"""An observer's numbers are about the swarm, whichever nodes are chosen."""


def test_the_file_is_what_the_script_makes() -> None:
    assert DASHBOARD.read_text(encoding="utf-8") == text(), "run: python -m scripts.dashboard"


def test_every_query_names_metrics_that_there_are() -> None:
    unknown = {query: names(query) - known() for _, query in dashboard_queries()}
    assert {query: missing for query, missing in unknown.items() if missing} == {}


def test_every_panel_says_what_it_shows_in_which_unit() -> None:
    panels = dashboard_panels()
    assert len({panel["title"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["description"].endswith(".") and panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        if panel["type"] != "table":
            assert panel["fieldConfig"]["defaults"]["thresholds"]["steps"], panel["title"]
        for target in panel["targets"]:
            assert target["expr"] and target["legendFormat"]


def test_no_panel_covers_another() -> None:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)

    def cells(panel: dict[str, dict[str, int]]) -> set[tuple[int, int]]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        return {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}

    for one, other in combinations(panels, 2):
        assert not cells(one) & cells(other), f"{one['title']} lies over {other['title']}"


def test_job_and_instance_can_be_chosen_and_are_heeded() -> None:
    variables = json.loads(DASHBOARD.read_text(encoding="utf-8"))["templating"]["list"]
    assert [variable["name"] for variable in variables] == ["datasource", "job", "instance"]
    raw = [target["expr"] for panel in dashboard_panels() for target in panel["targets"]]
    of_nodes = [query for query in raw if any(OF_A_NODE.match(name) for name in names(query))]
    assert len(of_nodes) > 40
    assert all('job=~"$job"' in query and 'instance=~"$instance"' in query for query in of_nodes)


def test_grafana_finds_the_dashboard_and_prometheus() -> None:
    provisioning = DEPLOY / "grafana" / "provisioning"
    (source,) = load(provisioning / "datasources" / "prometheus.yaml")["datasources"]
    assert source["type"] == "prometheus" and source["url"] == "http://prometheus:9090"
    (provider,) = load(provisioning / "dashboards" / "sentinel.yaml")["providers"]
    assert provider["options"]["path"] == "/etc/grafana/dashboards"
