"""Rules and alerts: Prometheus takes them, each alert fires and does not, and tells a person what to do."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from node.metrics import Metrics
from node.observing.metrics import SwarmMetrics
from tests.deploy.promql import DEPLOY, ROOT, dashboard_queries, known, load, names, program, rules

PROMETHEUS = DEPLOY / "prometheus"
TESTS = sorted((PROMETHEUS / "tests").glob("*.yml"))
RUNBOOK = ROOT / "docs" / "runbook.md"


def promtool(*words: str | Path, text: bytes = b"") -> str:
    """Run promtool; returns all that it says."""
    ran = subprocess.run([program("promtool"), *words], input=text, capture_output=True, check=False, timeout=60)
    said = (ran.stdout + ran.stderr).decode()
    assert ran.returncode == 0, said
    return said


def test_promtool_takes_the_configuration_and_every_rule() -> None:
    said = promtool("check", "config", PROMETHEUS / "prometheus.yml")
    assert said.count("rules found") == 2
    promtool("check", "rules", "--lint=all", "--lint-fatal", *sorted((PROMETHEUS / "rules").glob("*.yml")))


def test_promtool_has_nothing_to_say_about_the_names_of_metrics() -> None:
    assert promtool("check", "metrics", text=Metrics().render()) == ""
    assert promtool("check", "metrics", text=SwarmMetrics().render()) == ""


@pytest.mark.parametrize("path", TESTS, ids=lambda path: path.stem)
def test_the_alerts_do_what_their_tests_say(path: Path) -> None:
    assert "SUCCESS" in promtool("test", "rules", path)


def test_a_rule_that_is_wrong_fails_its_test(tmp_path: Path) -> None:
    """The tests above can fail: one limit is changed in a copy."""
    for folder in ("rules", "tests"):
        (tmp_path / folder).mkdir()
        for path in (PROMETHEUS / folder).glob("*.yml"):
            text = path.read_text(encoding="utf-8").replace("(abs(sentinel_clock_offset_seconds) > 1.5)", "(vector(0))")
            (tmp_path / folder / path.name).write_text(text, encoding="utf-8")
    command = [program("promtool"), "test", "rules", tmp_path / "tests" / "node.yml"]
    ran = subprocess.run(command, capture_output=True, check=False, timeout=60)
    assert ran.returncode == 1 and b"SentinelClockSkew" in ran.stdout + ran.stderr


def test_every_alert_is_tested_to_fire_and_not_to_fire() -> None:
    cases = [case for path in TESTS for test in load(path)["tests"] for case in test["alert_rule_test"]]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    does_not = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert fires == does_not == rules("alert").keys()


@pytest.mark.parametrize("name", rules("alert"))
def test_an_alert_tells_a_person_what_to_do(name: str) -> None:
    alert = rules("alert")[name]
    assert re.fullmatch(r"Sentinel[A-Z][A-Za-z0-9]+", name)
    assert re.fullmatch(r"\d+[smh]", alert["for"])
    assert alert["labels"] == {"severity": alert["labels"]["severity"]}
    assert alert["labels"]["severity"] in ("critical", "warning")
    told = alert["annotations"]
    assert told.keys() == {"summary", "description", "runbook"}
    assert len(told["summary"]) < 140 and len(told["description"]) > 60
    assert told["runbook"] == f"docs/runbook.md#{name.lower()}"


def test_the_runbook_has_a_section_for_each_alert_and_no_other() -> None:
    sections = re.split(r"^## ", RUNBOOK.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    found = {section.splitlines()[0].strip(): section for section in sections}
    assert {name for name in found if name.startswith("Sentinel")} == rules("alert").keys()
    for name in rules("alert"):
        for part in ("**What it means.**", "**Look at.**", "**Do.**"):
            assert part in found[name], f"{name} lacks {part}"


@pytest.mark.parametrize("kind", ["alert", "record"])
def test_rules_name_metrics_that_there_are(kind: str) -> None:
    unknown = {name: names(rule["expr"]) - known() for name, rule in rules(kind).items()}
    assert {name: missing for name, missing in unknown.items() if missing} == {}


def test_every_recorded_series_is_used() -> None:
    queries = [rule["expr"] for rule in rules("alert").values()] + [query for _, query in dashboard_queries()]
    used = set().union(*map(names, queries))
    assert rules("record").keys() - used == set()


def test_the_names_in_a_query_are_found() -> None:
    query = (
        'sum by (job) (rate(a_total{x="b_c"}[5m])) / on (i) group_left (s) (lev:b:max > 2e3) unless up == NaN or d_sum'
    )
    assert names(query) == {"a_total", "lev:b:max", "up", "d_sum"}
