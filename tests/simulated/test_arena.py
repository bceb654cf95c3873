"""The arena's quick suite, as its command runs it: with everything on, every attacker is found and nobody else."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)
"""Twelve swarms of sixteen nodes: three minutes on two idle cores."""

FIELDS = {
    *("suite", "attack", "direction", "stage_role", "defence", "seed", "precision", "recall", "f1"),
    *("steps_to_quarantine", "steps_to_ejection", "honest_refused_share"),
    *("loss", "loss_attack_free", "loss_undefended"),
}


async def test_the_quick_suite_finds_every_attacker_and_no_honest_node(tmp_path: Path) -> None:
    out, page = tmp_path / "arena.json", tmp_path / "arena.md"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.arena", "--suite", "quick", "--json", str(out), "--docs", str(page)),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    assert all(row.keys() >= FIELDS for row in rows)
    assert {row["defence"] for row in rows} == {"off", "sentinel", "all"}
    assert all(row["precision"] == 1.0 and row["honest_ejected"] == 0 for row in rows)
    defended = [row for row in rows if row["defence"] == "all"]
    attacked = [row for row in defended if row["attack"] != "none"]
    assert attacked and all(row["recall"] == 1.0 for row in attacked)
    assert all(row["loss"] == pytest.approx(row["loss_attack_free"], rel=0.01) for row in defended)
    undefended = [row for row in rows if row["defence"] == "off" and row["attack"] != "none"]
    assert max(row["loss"] / row["loss_attack_free"] for row in undefended) > 1.01, "no attack of the suite does harm"
    assert all(row["microbatches_lost"] == 0 and not row["died"] for row in defended)
    assert page.read_text().startswith("# ")
