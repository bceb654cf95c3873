"""A real Prometheus scrapes a real swarm: it answers every query, and its alerts tell what happens to nodes."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from node.demo_processes import Child
from tests.deploy.promql import dashboard_queries, program, rules
from tests.swarm.harness import Swarm, running, small_manifest
from tests.swarm.observer import observing
from tests.swarm.prometheus import Prometheus, running_prometheus

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

PATIENCE = 120.0

QUIET = {
    "Strikes",
    "Flags",
    "Requests that failed",
    "Rules that peers broke",
    "Fetching the state",
}
"""Panels that are empty while nothing goes wrong and nobody joins late."""


async def test_dashboard_rules_and_alerts_work_on_a_real_swarm(tmp_path: Path) -> None:
    program("prometheus")
    manifest = small_manifest(training={"steps": 0, "checkpoint_steps": 1}, verifier={"audit_rate": 0.5})
    waits = dict.fromkeys(("SentinelStageWithoutReplicas", "SentinelObservedStageEmpty", "SentinelNodeDown"), "1s")
    async with (
        contextlib.AsyncExitStack() as watching,
        running(tmp_path, manifest) as swarm,
        running_prometheus(tmp_path / "prometheus", waits=waits) as prometheus,
    ):
        coordinator = await swarm.coordinate()
        nodes = await swarm.fill(1, "--http-port", "0")
        outside = [urlsplit((await watching.enter_async_context(observing(tmp_path, swarm.invite))).url).netloc]
        prometheus.scrape(coordinator, *nodes, others=outside)
        await prometheus.until("up == 1", lambda found: len(found) == 5, seconds=PATIENCE)
        await names_are_right(swarm, coordinator, *nodes)
        await prometheus.until("swarm:sentinel_step:max > 8", bool, seconds=PATIENCE)
        await prometheus.until("rate(sentinel_checkpoints_total[5m]) > 0", bool, seconds=PATIENCE)
        await the_dashboard_shows_something(prometheus)
        await no_rule_fails(prometheus)
        # What the start looked like may be told of for one more evaluation; then nothing is.
        await prometheus.until("ALERTS", lambda found: not found, seconds=PATIENCE)
        await a_lost_stage_is_told_of(swarm, prometheus, [coordinator, *nodes], outside)
        await no_rule_fails(prometheus)


async def names_are_right(swarm: Swarm, *nodes: Child) -> None:
    for node in nodes:
        _, text = await swarm.get(node, "/metrics")
        command = [program("promtool"), "check", "metrics"]
        ran = await asyncio.to_thread(subprocess.run, command, input=text.encode(), capture_output=True, check=False)
        assert (ran.returncode, ran.stdout + ran.stderr) == (0, b"")


async def the_dashboard_shows_something(prometheus: Prometheus) -> None:
    """Sooner or later: a rate needs two scrapes, and the rule that records it another evaluation."""
    for panel, query in dashboard_queries():
        if panel not in QUIET:
            await prometheus.until(query, bool, seconds=PATIENCE)


async def no_rule_fails(prometheus: Prometheus) -> None:
    groups = (await prometheus.ask("/rules"))["groups"]
    listed = [rule for group in groups for rule in group["rules"]]
    assert {rule["name"] for rule in listed} == rules("alert").keys() | rules("record").keys()
    assert {rule["name"]: rule.get("lastError") for rule in listed if rule["health"] != "ok"} == {}


async def a_lost_stage_is_told_of(swarm: Swarm, prometheus: Prometheus, nodes: list[Child], outside: list[str]) -> None:
    """Stage 1's only replica is killed, and comes back."""
    doomed = nodes[2]
    firing = 'ALERTS{{alertname="{}", alertstate="firing"}}'.format
    lost = firing("SentinelStageWithoutReplicas")
    observed = firing("SentinelObservedStageEmpty")
    doomed.process.kill()
    await doomed.process.wait()
    await prometheus.until(lost, bool, seconds=PATIENCE)
    (alert,) = await prometheus.alerts("SentinelStageWithoutReplicas")
    assert alert["labels"]["stage"] == "1" and alert["labels"]["swarm"] == swarm.manifest.swarm_id
    assert alert["annotations"]["summary"] == "Stage 1 has no replica"
    await prometheus.until(firing("SentinelNodeDown"), bool, seconds=PATIENCE)
    (down,) = await prometheus.alerts("SentinelNodeDown")
    assert (down["labels"]["label"], down["labels"]["stage"]) == ("s1r0", "1")
    assert down["labels"]["peer"] == doomed.peer
    assert down["annotations"]["summary"] == "Node s1r0 of stage 1 does not answer"
    await prometheus.until(observed, bool, seconds=PATIENCE)
    (seen,) = await prometheus.alerts("SentinelObservedStageEmpty")
    assert seen["labels"]["stage"] == "1" and seen["labels"]["swarm"] == swarm.manifest.swarm_id

    nodes[2] = await swarm.join("s1r0", stage=1)
    prometheus.scrape(*nodes, others=outside)
    for resolved in (lost, observed, firing("SentinelNodeDown")):
        await prometheus.until(resolved, lambda found: not found, seconds=PATIENCE)


async def test_the_last_word_of_an_ejected_node_reaches_prometheus(tmp_path: Path) -> None:
    program("prometheus")
    manifest = small_manifest(training={"steps": 0})
    async with (
        running(tmp_path, manifest) as swarm,
        running_prometheus(tmp_path / "prometheus", waits={"SentinelPeerEjected": "0s"}) as prometheus,
    ):
        await swarm.coordinate()
        # Both callers of the second stage check the receipts that it gives: a majority of its neighbours.
        *first, cheat = await asyncio.gather(
            swarm.join("s0r0", stage=0),
            swarm.join("s0r1", stage=0),
            swarm.join("cheat", stage=1, attack="false-receipt"),
        )
        prometheus.scrape(*first, cheat)
        # Two scrapes, so that the node knows of a scraper; without the last stage nothing is trained meanwhile.
        await prometheus.until('count_over_time(up{job="sentinel"}[1m]) > 2', lambda found: len(found) == 3, seconds=60)
        await swarm.join("s2", stage=2)
        await swarm.all_end([cheat])
        assert cheat.process.returncode == 3
        # Rules are evaluated in groups, each at its own moments: for one evaluation the alert may not know the stage.
        ejected = 'ALERTS{alertname="SentinelNodeEjected", alertstate="firing"}'
        await prometheus.until(
            ejected, lambda found: [each["metric"].get("stage") for each in found] == ["1"], seconds=PATIENCE
        )
        (alert,) = await prometheus.alerts("SentinelNodeEjected")
        assert (alert["labels"]["peer"], alert["labels"]["label"]) == (cheat.peer, "cheat")
        assert alert["labels"]["stage"] == "1"
        await prometheus.until('ALERTS{alertname="SentinelPeerEjected", alertstate="firing"}', bool, seconds=PATIENCE)
        (seen,) = await prometheus.alerts("SentinelPeerEjected")
        assert (seen["labels"]["peer"], seen["labels"]["stage"]) == (cheat.peer, "1")
