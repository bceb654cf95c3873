"""What the checker costs: the clock counts what runs, and rows follow from what was counted. No test asserts a time."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import benchmarks
from benchmarks.__main__ import PROGRAMS
from benchmarks.cost import STAGES, Clock, Size, Spent, evenly, measure, median, report, spent

TINY = Size(width=64, context=16, microbatches=4, steps=3)
NAMES = {"case", "ours", "rival", "rival_name", "unit", "ratio"}


def made_up(**changes: float) -> Spent:
    values = {
        **{"training": 106.0, "statistics": 1.0, "sketches": 2.0, "statements": 3.0, "update": 10.0, "history": 2.0},
        **{"audits": 25.0, "audited": 0.25, "step_seconds": 1.0},
    }
    return Spent(**(values | changes))


@pytest.mark.timeout(240)
def test_a_swarm_with_audits_is_divided_into_its_parts() -> None:
    found = measure(TINY, audit_rate=0.5)
    assert 0 < found.statistics + found.sketches + found.statements < found.training
    assert found.audits > 0 and found.audited > 0
    assert 0 < found.history < found.update
    assert found.step_seconds > 0


@pytest.mark.timeout(240)
def test_a_swarm_without_checker_or_audits_spends_nothing_on_them() -> None:
    found = measure(TINY, mode="off")
    assert found.audits == found.audited == 0
    assert found.sketches > 0  # off still signs what it sends


def test_only_what_runs_while_the_clock_does_is_counted() -> None:
    clock = Clock()
    call = clock.wrap("job backward", lambda value: value + 1)
    assert call(1) == 2
    clock.running = True
    assert call(2) == 3
    assert clock.calls == {"job backward": 1}
    assert spent(clock).training >= 0


def test_the_rows_compare_with_and_without() -> None:
    rows = {str(row["case"]): row for row in report(made_up(training=105.0), made_up(), made_up())}
    assert all(set(row) == NAMES for row in rows.values())
    assert rows["all of these, in place"]["ratio"] == 1.06
    assert rows["statistics and sketches, in place"]["ratio"] == pytest.approx(106 / 103, abs=1e-5)
    assert rows["one audit against one microbatch"]["ours"] == 100.0
    assert rows["audits at 1/4, in place"]["ratio"] == pytest.approx(131 / 106, abs=1e-5)
    assert rows["audits at 1/64, by the time of one"]["ratio"] == pytest.approx(
        1 + 100 / 64 * (1 + 1 / 12) / 106, abs=1e-5
    )


def test_the_median_is_taken_for_each_field() -> None:
    middle = median([made_up(training=1.0, audits=9.0), made_up(training=2.0, audits=7.0), made_up(training=9.0)])
    assert (middle.training, middle.audits) == (2.0, 9.0)


def test_even_draws_fall_below_a_rate_as_often_as_they_should() -> None:
    draw = evenly()
    assert sum(draw() < 1 / 16 for _ in range(160)) in (9, 10, 11)


def test_each_benchmark_is_run_by_the_command_for_all_or_is_a_program() -> None:
    folder = Path(benchmarks.__file__).parent
    for name in sorted(path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")):
        module = importlib.import_module(f"benchmarks.{name}")
        assert callable(getattr(module, "main" if name in PROGRAMS else "run", None)), name


def test_there_are_stages_in_the_middle() -> None:
    assert STAGES >= 3  # only they relate a tensor to its sender's input, which costs most
