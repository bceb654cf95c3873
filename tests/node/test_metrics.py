"""The exposition is well-formed, follows the naming rules, and no peer can make it grow."""

from __future__ import annotations

import math
import re
import time
from importlib.metadata import version

import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from node import metric_words as words
from node.metrics import MAX_NEIGHBOURS, Metrics
from node.version import VERSION


@pytest.fixture
def metrics() -> Metrics:
    """One node's metrics, each family with at least one series."""
    metrics = Metrics()
    metrics.identify(peer="12D3KooWpeer", swarm="ab" * 32, stage="1")
    metrics.set_state("training")
    metrics.request_done("train", "ok")
    metrics.remote_error("tensor")
    metrics.record_rejected("signature")
    metrics.dht_operation("store", 0.004, False)
    metrics.averaging_done("committed", 0.2)
    metrics.flag("l2", "activation")
    metrics.strike("l2")
    metrics.audited("honest", 0.3)
    metrics.set_trust({("12D3KooWother", 0): 0.5})
    metrics.drill("scale")
    metrics.set_ejected({"12D3KooWcheat": 1})
    metrics.set_replicas(0, live=2, serving=1)
    metrics.set_open_audits(caller=1, juror=2)
    metrics.sample_disk(free=10, size=100)
    metrics.sample_process(lag=0.001, p2pd_pid=None, peers=3)
    return metrics


def parse(metrics: Metrics) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(metrics.render().decode())}


def value(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(name, labels)


def test_the_exposition_tells_everything_that_an_operator_needs(metrics: Metrics) -> None:
    names = {sample.name for family in parse(metrics).values() for sample in family.samples}
    for name in (
        *("node_state", "step", "loss", "tokens_total", "microbatches_total", "stream_bytes_total"),
        *(
            "phase_seconds_total",
            "step_seconds_bucket",
            "microbatches_in_flight",
            "peer_trust",
            "flags_total",
        ),
        *("strikes_total", "quarantines_total", "ejections_total", "accusations_total", "view_replicas"),
        *("requests_total", "remote_errors_total", "record_rejects_total", "dht_seconds_bucket"),
        *("dht_failures_total", "averaging_rounds_total", "averaging_seconds_bucket", "clock_offset_seconds"),
        *("view_serving_replicas", "peer_ejected", "audits_open", "p2pd_up", "p2pd_resident_memory_bytes"),
        *("disk_free_bytes", "disk_size_bytes", "checkpoint_interval_steps", "training_finished", "build_info"),
        *("peers_connected", "parameter_agreement", "drill_active", "info", "event_loop_lag_seconds"),
        *("audits_total", "audit_seconds_bucket", "votes_total"),
        *("state_fetched_bytes", "state_bytes"),
        *("checkpoint_step", "checkpoint_age_seconds", "checkpoints_total", "checkpoint_seconds_bucket"),
    ):
        assert f"sentinel_{name}" in names
    for name in ("open_fds", "max_fds", "resident_memory_bytes", "cpu_seconds_total", "start_time_seconds"):
        assert f"process_{name}" in names


def test_every_family_has_help_type_and_the_prefix(metrics: Metrics) -> None:
    text = metrics.render().decode()
    sampled = {re.split(r"[{ ]", line)[0] for line in text.splitlines() if not line.startswith("#")}
    for family in parse(metrics).values():
        assert family.name.startswith(("sentinel_", "process_"))
        assert len(family.documentation) > 15
        assert family.documentation.endswith(".")
        assert family.type in ("counter", "gauge", "histogram")
        for sample in family.samples:
            sampled.discard(sample.name)
    assert not sampled, "a sample stands outside of every declared family"


def test_names_follow_the_conventions(metrics: Metrics) -> None:
    for family in parse(metrics).values():
        assert re.fullmatch(r"[a-z0-9_]+", family.name)
        text = family.documentation.lower()
        if family.type == "counter":
            assert all(sample.name.endswith("_total") for sample in family.samples)
        if text.startswith("seconds") or family.type == "histogram":
            assert "_seconds" in family.name
        if text.startswith(("bytes", "resident memory")):
            assert "_bytes" in family.name
        assert not re.search(r"_(ms|millis|kb|mb|minutes|percent)(_|$)", family.name)


def test_series_of_creation_times_are_left_out(metrics: Metrics) -> None:
    assert b"_created" not in metrics.render()


def test_known_series_exist_from_the_start_so_that_rates_can_be_taken() -> None:
    fresh = Metrics()
    assert value(fresh, "sentinel_microbatches_total", outcome="lost") == 0
    assert value(fresh, "sentinel_phase_seconds_total", phase="forward") == 0
    assert value(fresh, "sentinel_ejections_total", kind="self") == 0
    assert value(fresh, "sentinel_stream_bytes_total", direction="in", stream="tensor") == 0
    for outcome in words.AUDIT_OUTCOMES:
        assert value(fresh, "sentinel_audits_total", outcome=outcome) == 0
    for vote in ("guilty", "honest"):
        assert value(fresh, "sentinel_votes_total", vote=vote) == 0
    assert value(fresh, "sentinel_phase_seconds_total", phase="audit") == 0
    for outcome in words.CHECKPOINT_OUTCOMES:
        assert value(fresh, "sentinel_checkpoints_total", outcome=outcome) == 0


def test_a_checkpoint_grows_older_by_itself(metrics: Metrics) -> None:
    assert math.isnan(value(metrics, "sentinel_checkpoint_age_seconds") or 0.0)
    assert math.isnan(value(metrics, "sentinel_checkpoint_step") or 0.0)
    metrics.checkpoint_kept(50, saved=time.time() - 100)
    assert value(metrics, "sentinel_checkpoint_step") == 50
    assert (value(metrics, "sentinel_checkpoint_age_seconds") or 0.0) >= 100


def test_a_node_is_in_exactly_one_state(metrics: Metrics) -> None:
    for state in words.STATES:
        metrics.set_state(state)
        values = [value(metrics, "sentinel_node_state", state=other) for other in words.STATES]
        assert sum(v or 0 for v in values) == 1
        assert value(metrics, "sentinel_node_state", state=state) == 1


@pytest.mark.parametrize("hostile", ["x" * 10_000, 'a"b\n# TYPE', "", "🦊"])
def test_a_label_from_the_network_becomes_other(metrics: Metrics, hostile: str) -> None:
    before = len(parse(metrics))
    metrics.request_done(hostile, hostile)
    metrics.remote_error(hostile)
    metrics.record_rejected(hostile)
    metrics.flag(hostile, hostile)
    metrics.strike(hostile)
    metrics.dht_operation(hostile, 0.1, False)
    metrics.averaging_done(hostile, 0.1)
    metrics.audited(hostile, 0.1)
    assert value(metrics, "sentinel_audits_total", outcome="other") == 1
    assert value(metrics, "sentinel_remote_errors_total", kind="other") == 1
    assert value(metrics, "sentinel_requests_total", method="other", outcome="other") == 1
    assert value(metrics, "sentinel_flags_total", direction="other", reason="other") == 1
    assert len(parse(metrics)) == before


def test_an_audit_is_counted_by_its_outcome_and_timed_only_if_it_began(metrics: Metrics) -> None:
    metrics.audited("skipped", None)
    metrics.audited("guilty", 2.0)
    metrics.audited("guilty", 4.0)
    assert value(metrics, "sentinel_audits_total", outcome="skipped") == 1
    assert value(metrics, "sentinel_audits_total", outcome="guilty") == 2
    assert value(metrics, "sentinel_audit_seconds_count") == 3  # with the one of the fixture
    assert value(metrics, "sentinel_audit_seconds_sum") == pytest.approx(6.3)


@pytest.mark.parametrize("kind", ["receipt", "expired", "no_evidence", "no_data", "not_drawn", "inconclusive"])
def test_refusals_in_audits_have_words_of_their_own(metrics: Metrics, kind: str) -> None:
    metrics.remote_error(kind)
    metrics.request_done("audit", kind)
    assert value(metrics, "sentinel_remote_errors_total", kind=kind) == 1
    assert value(metrics, "sentinel_requests_total", method="audit", outcome=kind) == 1


def test_the_trust_of_those_who_left_disappears(metrics: Metrics) -> None:
    metrics.set_trust({("a", 0): 1.0, ("b", 2): 0.25})
    metrics.set_trust({("b", 2): 0.5})
    assert value(metrics, "sentinel_peer_trust", peer="a", stage="0") is None
    assert value(metrics, "sentinel_peer_trust", peer="b", stage="2") == 0.5


def test_the_least_trusted_neighbours_are_shown_when_there_are_too_many(metrics: Metrics) -> None:
    crowd = {(f"peer{number}", 1): number / 1000 for number in range(3 * MAX_NEIGHBOURS)}
    metrics.set_trust(crowd)
    samples = parse(metrics)["sentinel_peer_trust"].samples
    assert len(samples) == MAX_NEIGHBOURS
    assert value(metrics, "sentinel_peer_trust", peer="peer0", stage="1") == 0


def test_the_ejected_are_named_until_their_ejection_ends(metrics: Metrics) -> None:
    assert value(metrics, "sentinel_peer_ejected", peer="12D3KooWcheat", stage="1") == 1
    metrics.set_ejected({"12D3KooWother": None})
    assert value(metrics, "sentinel_peer_ejected", peer="12D3KooWcheat", stage="1") is None
    assert value(metrics, "sentinel_peer_ejected", peer="12D3KooWother", stage="") == 1
    metrics.set_ejected({f"peer{number}": 0 for number in range(3 * MAX_NEIGHBOURS)})
    assert len(parse(metrics)["sentinel_peer_ejected"].samples) == MAX_NEIGHBOURS


def test_a_node_says_who_it_is_and_what_it_runs(metrics: Metrics) -> None:
    metrics.identify(peer="p", swarm="s", stage="2", label="attic", coordinates=False)
    (who,) = parse(metrics)["sentinel_info"].samples
    assert who.value == 1
    assert who.labels == {
        "version": VERSION, "swarm": "s", "peer": "p", "stage": "2", "label": "attic", "role": "volunteer"
    }  # fmt: skip
    (build,) = parse(metrics)["sentinel_build_info"].samples
    assert build.labels["version"] == VERSION
    assert build.labels["torch"] == version("torch") and build.labels["hivemind"] == version("hivemind")


def test_two_nodes_in_one_process_share_nothing() -> None:
    one, other = Metrics(), Metrics()
    one.step.set(7)
    one.strike("norm")
    one.drill("sign-flip")
    assert value(other, "sentinel_step") == 0
    assert value(other, "sentinel_strikes_total", reason="norm") == 0
    assert b"sign-flip" not in other.render()


def test_a_drill_that_ends_leaves_no_series(metrics: Metrics) -> None:
    metrics.drill("noise")
    assert value(metrics, "sentinel_drill_active", attack="scale") is None
    metrics.drill("")
    assert value(metrics, "sentinel_drill_active", attack="noise") is None


def test_the_process_is_measured(metrics: Metrics) -> None:
    import os

    metrics.sample_process(lag=0.25, p2pd_pid=os.getpid(), peers=2)
    assert (value(metrics, "process_resident_memory_bytes") or 0) > 1e6
    assert (value(metrics, "sentinel_p2pd_resident_memory_bytes") or 0) > 1e6
    assert (value(metrics, "process_open_fds") or 0) > 2
    assert value(metrics, "sentinel_peers_connected") == 2
    metrics.sample_process(lag=0.0, p2pd_pid=2**22 + 1, peers=0)
    assert value(metrics, "sentinel_p2pd_resident_memory_bytes") == 0
