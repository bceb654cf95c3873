"""The joining benchmark measures what it names, and its rows have the form of all the others."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import joining
from benchmarks._donor import STEP, make_state
from node.snapshot import Layout
from tests.node.donating import same_bits

pytestmark = pytest.mark.swarm

PARAMETERS = 300_000


def test_all_donors_hold_the_same_bits() -> None:
    one, other = make_state(1000), make_state(1000)
    assert one.step == STEP and same_bits(one, other)
    assert Layout.of(one).size == 12 * 1000 + 8


def test_every_row_is_a_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joining, "LEAST_STEPS", 2)
    path = tmp_path / "rows.json"
    assert joining.main(["--parameters", str(PARAMETERS), "--link", "20", "--json", str(path)]) == 0
    rows = json.loads(path.read_text())
    assert len(rows) == 8
    for row in rows:
        assert row.keys() == {"case", "ours", "rival", "rival_name", "unit", "ratio"}
        assert row["ours"] >= 0 and row["rival"] >= 0
        assert row["case"].startswith("0.3 M parameters")
    assert {row["unit"] for row in rows} == {"MiB/s", "s"}
    assert all(row["ours"] > 0 for row in rows if row["unit"] == "MiB/s")
    assert capsys.readouterr().out.count("\n") == len(rows)
