"""The document about metrics is made from the code, and whoever forgets to make it anew is told."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from node.metric_families import Families
from node.metrics import Metrics
from node.observing.metrics import SwarmMetrics
from scripts import metrics_doc


def test_the_document_is_up_to_date() -> None:
    assert metrics_doc.PATH.read_text(encoding="utf-8") == metrics_doc.document(), f"run: {metrics_doc.COMMAND}"


def test_a_document_that_is_out_of_date_is_told_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "metrics.md"
    monkeypatch.setattr(metrics_doc, "PATH", path)

    def ran(*words: str) -> int:
        monkeypatch.setattr(sys, "argv", ["metrics_doc", *words])
        return metrics_doc.main()

    assert ran("--check") == 1 and not path.exists()
    assert ran() == 0 and ran("--check") == 0
    path.write_text(path.read_text(encoding="utf-8") + "\n", encoding="utf-8")
    assert ran("--check") == 1
    assert metrics_doc.COMMAND in capsys.readouterr().err


@pytest.mark.parametrize(("shown", "least"), [(Metrics, 50), (SwarmMetrics, 25)])
def test_every_metric_that_is_shown_is_in_it(shown: type[Families], least: int) -> None:
    text = metrics_doc.document()
    families = list(text_string_to_metric_families(shown().render().decode()))
    assert len(families) > least
    for family in families:
        name = family.name + "_total" * (family.type == "counter")
        assert f"| `{name}` | {family.type} |" in text
        for sample in family.samples:
            for label in sample.labels.keys() - {"le"}:
                assert f"`{label}`:" in next(line for line in text.splitlines() if f"`{name}`" in line)
