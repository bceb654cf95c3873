"""What hostile nodes tell of themselves: whatever it is, what is kept of it is small, finite, and safe to show."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.http import finite
from node.observing import metrics as metrics_module
from node.observing.counts import Counts
from node.observing.lean import UNUSED
from node.observing.metrics import SwarmMetrics
from node.observing.picture import Picture
from node.observing.reports import (
    COUNTS,
    EVENT_KINDS,
    MAX_EVENTS,
    MAX_LOSSES,
    MAX_STANDINGS,
    MAX_TEXT_CHARS,
    Outline,
    Report,
    read_outline,
    read_report,
)
from node.observing.told import tell
from node.page import render_page
from protocol.errors import MessageError
from protocol.fields import MAX_STEP
from protocol.identity import is_peer_id
from protocol.packing import pack
from tests.deploy.promql import program
from tests.node.observed import NOW, SWARM, claimed, event, peer, replica, status
from tests.swarm.harness import small_manifest

ROOT = Path(__file__).parents[2]
HOSTILE = "<script>alert(1)</script>\"'&\n\x1b[2J\u202e" + "x" * 500

numbers = st.one_of(st.integers(), st.floats(), st.booleans())
words = st.one_of(st.text(max_size=20), st.just(HOSTILE), st.sampled_from(sorted(EVENT_KINDS)), st.just(peer(1)))
scalars = st.one_of(st.none(), numbers, words)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from([*status(), *event("strike", 1), *replica(1), "standing", "state"]), inner),
    ),
    max_leaves=20,
)
statuses = st.one_of(
    st.dictionaries(st.sampled_from([*status(), *COUNTS, "label"]), values),
    st.fixed_dictionaries(
        {
            "step": scalars,
            "losses": st.lists(st.one_of(values, st.lists(numbers, min_size=2, max_size=2)), max_size=4),
            "events": st.lists(
                st.one_of(values, st.fixed_dictionaries({key: scalars for key in event("strike", 1)})), max_size=4
            ),
            "replicas": st.lists(
                st.one_of(
                    values,
                    st.fixed_dictionaries(
                        {"peer": words, "standing": st.fixed_dictionaries({"state": scalars, "trust": scalars})}
                    ),
                ),
                max_size=4,
            ),
        }
    ),
)


def shown(*reports: Report) -> Picture:
    """A swarm whose nodes tell this."""
    made = Picture(swarm=SWARM)
    made.know(Outline(name="tiny", stages=2, steps=0))
    made.merge([[claimed(number, number % 2) for number in range(len(reports))]], NOW)
    made.meet(NOW)
    for number, report in enumerate(reports):
        made.answered(peer(number), report, NOW)
    made.settle(NOW)
    return made


def check(report: Report) -> None:
    assert 0 <= report.step <= MAX_STEP
    assert report.loss is None or (math.isfinite(report.loss) and report.loss >= 0)
    assert math.isfinite(report.tokens_per_second) and math.isfinite(report.uptime_seconds)
    assert len(report.losses) <= MAX_LOSSES and len(report.events) <= MAX_EVENTS
    assert len(report.standings) <= MAX_STANDINGS
    assert all(0 <= trust <= 1 and is_peer_id(whom) for whom, (_, trust) in report.standings.items())
    for text in (report.reason, report.label, *(told.text for told in report.events)):
        assert len(text) <= MAX_TEXT_CHARS and (text.isprintable() or not text)
    assert all(told.kind in EVENT_KINDS for told in report.events)
    assert all(type(count) is int and count >= 0 for count in report.counts.values())


@given(st.lists(statuses, min_size=1, max_size=3))
def test_whatever_nodes_tell_the_picture_can_be_shown(told: list[dict[str, Any]]) -> None:
    reports = [read_report(entry) for entry in told]
    for report in reports:
        check(report)
    made = shown(*reports)
    found = tell(made, NOW, started=NOW)
    json.dumps(finite(found), allow_nan=False)
    page = render_page(found, ready=True)
    assert page.count("<script") == 1 and "alert(1)</script>" not in page
    metrics = SwarmMetrics()
    metrics.update(made, Counts(rounds=1), NOW)
    assert metrics.render().count(b"sentinel_swarm_node_answering{") == len(told)


def test_an_honest_status_is_kept() -> None:
    report = read_report(
        status(
            label="mine", replicas=[replica(1), replica(2, "probation", 0.5)], events=[event("strike", 1)], bytes_in=5
        )
    )
    assert (report.step, report.loss, report.tokens_per_second, report.label) == (7, 3.5, 100.0, "mine")
    assert report.losses == ((5, 4.0), (6, 3.5))
    assert report.standings == {peer(1): ("trusted", 0.9)}  # of the other it knows nothing
    assert report.counts["tokens"] == 300 and report.counts["bytes_in"] == 5
    assert [asdict(told) for told in report.events] == [event("strike", 1)]


def test_long_lists_are_cut_to_their_newest() -> None:
    report = read_report(
        status(
            losses=[[step, 1.0] for step in range(1000)],
            events=[event("strike", 1, step=step) for step in range(1000)],
            replicas=[replica(number) for number in range(300)],
        )
    )
    check(report)
    assert report.losses[-1] == (999, 1.0) and report.events[-1].step == 999


# the manifest ----------------------------------------------------------------------------


def test_the_outline_is_that_of_the_manifest_whose_hash_the_invite_names() -> None:
    manifest = small_manifest()
    swarm = bytes.fromhex(manifest.swarm_id)
    assert read_outline(manifest.to_bytes(), swarm) == Outline(name="test", stages=3, steps=20)
    with pytest.raises(MessageError, match="another swarm"):
        read_outline(manifest.to_bytes() + b"\x00", swarm)


@given(st.one_of(st.binary(max_size=50), values.map(lambda value: pack_or_nothing(value))))
def test_what_is_no_manifest_is_refused_and_crashes_nothing(data: bytes) -> None:
    import hashlib

    with pytest.raises(MessageError):
        read_outline(data, hashlib.sha256(data).digest())


def pack_or_nothing(value: object) -> bytes:
    try:
        return pack({"stages": value})
    except (OverflowError, ValueError):
        return b""


# metrics ---------------------------------------------------------------------------------


def test_the_number_of_series_is_bounded_and_a_place_is_kept_until_its_node_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(metrics_module, "MAX_SERIES_NODES", 3)
    metrics = SwarmMetrics()
    made = shown(*[read_report(status())] * 8)
    metrics.update(made, Counts(), NOW)
    kept = set(metrics._places)
    assert len(kept) == 3
    made.merge([[claimed(number) for number in range(100, 120)]], NOW + 1)
    made.settle(NOW + 1)
    metrics.update(made, Counts(rounds=1, answered=8), NOW + 1)
    assert set(metrics._places) == kept
    assert metrics.render().count(b"sentinel_swarm_node_trust{") == 3
    gone = kept.pop()
    del made.nodes[gone]
    metrics.update(made, Counts(rounds=2, answered=16), NOW + 2)
    assert gone not in metrics._places and kept < set(metrics._places)
    text = metrics.render().decode()
    assert gone not in text
    assert (
        'sentinel_swarm_questions_total{outcome="answered"} 16.0' in text and "sentinel_swarm_rounds_total 2.0" in text
    )


def test_the_metrics_please_promtool() -> None:
    metrics = SwarmMetrics()
    metrics.update(shown(read_report(status()), read_report(status(replicas=[replica(0)]))), Counts(), NOW)
    ran = subprocess.run(
        [program("promtool"), "check", "metrics"], input=metrics.render(), capture_output=True, check=False
    )
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, b"")


# imports ---------------------------------------------------------------------------------

LIGHT = f"""
import sys
import node.observing.run
from node.observing.lean import left_out
with left_out():
    import node.observing.asking
heavy = ("torch", "hivemind", "pydantic", "numpy", "node.daemon", *{UNUSED!r})
print(sorted(name for name in heavy if name in sys.modules))
import {", ".join(UNUSED)}
print(requests.Session().headers["User-Agent"][:8])
"""


def test_an_observer_takes_in_neither_torch_nor_what_it_does_not_use_of_libp2p() -> None:
    ran = subprocess.run([sys.executable, "-c", LIGHT], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines() == ["[]", "python-r"]  # whoever needs them afterwards gets the real ones
