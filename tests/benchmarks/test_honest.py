"""The count of false alarms: a small honest swarm is counted, and rows add up to a verdict."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.honest import (
    HEADER,
    SCHEDULES,
    WIRES,
    Case,
    age,
    cases,
    last_line,
    line,
    load,
    main,
    passes,
    run_all,
    run_case,
    total,
)


def row_of(case: Case, **changes: Any) -> dict[str, Any]:
    """A row as a good swarm gives it."""
    counts = dict.fromkeys(("trained_steps", "flagged", "refused", "confirmed", "cleared", "judged_microbatches"), 0)
    others = dict.fromkeys(("refused_microbatches", "quarantined", "ejected", "retried", "lost"), 0)
    words: dict[str, dict[str, int]] = {name: {} for name in ("flags", "guards", "strikes", "near_fence")}
    return {
        **{**asdict(case), **counts, **others, **words, "judged": 1500, "judged_in_earnest": 1000, "loss": 2.5},
        **{"judged_by_age": {"0-29": 1000}, "refused_by_age": {}, "audits": {"honest": 5}, "finished": True},
        **changes,
    }


CASE = Case(swarm=0, schedule="cosine", wire="bf16", steps=10)


@pytest.mark.timeout(240)
def test_a_small_honest_swarm_with_nodes_that_go_and_come_is_counted(tmp_path: Path) -> None:
    row = run_case(Case(swarm=1, schedule="constant", wire="bf16", steps=8, replicas=2), tmp_path)
    assert row["finished"] and row["trained_steps"] == 8
    assert (row["ejected"], row["quarantined"], row["lost"]) == (0, 0, 0)
    # Each of 6 microbatches of 8 steps crosses two boundaries both ways.
    assert row["judged"] >= 4 * 6 * 8
    assert row["judged_in_earnest"] == row["refused"] == 0  # the warm-up is longer
    assert not {"guilty", "disputed"} & row["audits"].keys()
    assert json.loads(json.dumps(row)) == row


def test_every_kind_of_swarm_has_a_manifest_and_comes_among_the_first_eight() -> None:
    first = cases(8 * 250, 250)
    assert {(case.schedule, case.wire) for case in first} == {(name, wire) for name in SCHEDULES for wire in WIRES}
    assert len({case.manifest().swarm_id for case in first}) == len(first) == 8
    assert {case.manifest().verifier.mode for case in first} == {"enforce"}
    assert len(cases(1001, 250)) == 5


def test_a_total_sums_rows_and_gives_the_share_of_what_could_be_refused() -> None:
    rows = [
        row_of(CASE, refused=1, flags={"gradient l2": 1}, strikes={"l2": 1}),
        row_of(CASE, refused=2, flags={"gradient l2": 2}, strikes={"l2": 1, "gain": 1}),
    ]
    summary = total(rows)
    assert summary["refused_share"] == pytest.approx(3 / 2000)
    assert (summary["flags"], summary["strikes"]) == ({"gradient l2": 3}, {"l2": 2, "gain": 1})
    assert not passes(summary)
    assert last_line(summary).startswith("steps: 0, honest nodes ejected: 0, refused: 0.1500 % of honest microbatches")


@pytest.mark.parametrize(
    ("changes", "good"),
    [
        ({}, True),
        ({"refused": 1}, False),
        ({"ejected": 1}, False),
        ({"audits": {"guilty": 1}}, False),
        ({"audits": {"disputed": 1}}, False),
        ({"audits": {"expired": 1, "inconclusive": 1}}, True),
        ({"finished": False}, False),
    ],
)
def test_an_ejection_a_wrong_audit_or_too_many_refusals_fail(changes: dict[str, Any], good: bool) -> None:
    assert passes(total([row_of(CASE, **changes)])) is good


def test_a_run_that_was_interrupted_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    wanted = cases(30, 10)
    begun: list[int] = []

    def run_one(case: Case) -> dict[str, Any]:
        begun.append(case.swarm)
        failed = case.swarm == 1 and len(begun) == 2
        return {**asdict(case), "finished": False, "error": "it was killed"} if failed else row_of(case)

    summary = run_all(wanted, jobs=1, path=path, run_one=run_one)
    assert (begun, summary["unfinished"], len(load(path))) == ([0, 1, 2], 1, 2)
    summary = run_all(wanted, jobs=1, path=path, done=load(path), run_one=run_one)
    assert (begun, summary["unfinished"], summary["swarms"]) == ([0, 1, 2, 1], 0, 3)
    assert [row["swarm"] for row in json.loads(path.read_text())] == [0, 1, 2, "total"]


def test_the_lines_of_the_table_are_as_wide_as_its_header() -> None:
    good = line(row_of(CASE))
    assert len(good) == len(HEADER)
    assert "it was killed" in line({**asdict(CASE), "error": "it was killed"})


@pytest.mark.parametrize(("step", "named"), [(0, "0-29"), (29, "0-29"), (30, "30-59"), (119, "60-119"), (500, "120+")])
def test_a_step_belongs_to_one_range(step: int, named: str) -> None:
    assert age(step) == named


def test_no_steps_at_all_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--steps", "0"])
    assert "at least 1" in capsys.readouterr().err
