"""The pure parts of the arena: which swarms it runs, how it scores them, and what it writes about them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.arena import report
from benchmarks.arena.__main__ import Book
from benchmarks.arena.cells import (
    DEFENCES,
    PAPER,
    PAPER_ATTACKS,
    SUITES,
    attackers,
    runs,
    selected,
    suite_cells,
)
from benchmarks.arena.score import NodeFact, agreed_losses, detection, final_loss, joined, mean_delay
from benchmarks.arena.swarm import manifest_of
from node.drill_names import CONDUCT_ATTACKS, check_drill_name


def fact(attacker: bool = False, **fields: Any) -> NodeFact:
    return NodeFact(**{"attacker": attacker, "ejected": False, "quarantined_by": 0, "neighbours": 4, **fields})


def row(**fields: Any) -> dict[str, Any]:
    """A row as a swarm gives it."""
    base = {
        "suite": "quick",
        "cell": "quick/bias/activation/middle",
        "attack": "bias",
        "direction": "activation",
        "stage_role": "middle",
        "defence": "all",
        "seed": 0,
        "precision": 1.0,
        "recall": 0.5,
        "f1": 2 / 3,
        "f1_ejected": 0.0,
        "f1_isolated": 1.0,
        "recall_ejected": 0.0,
        "steps_to_quarantine": 2.0,
        "steps_to_ejection": None,
        "attacked_microbatches_to_quarantine": 3.0,
        "attacked_microbatches_to_ejection": None,
        "honest_refused_share": 0.001,
        "loss": 2.5,
        "extra_compute_share": 0.1,
        "check_share": 0.5,
        "bytes_out": 110,
        "honest_ejected": 0,
        "honest_detected": 0,
        "died": [],
        "seconds": 3.0,
    }
    return {**base, **fields}


class TestCells:
    def test_the_paper_has_its_attacks_in_each_direction_and_a_mixture(self) -> None:
        cells = suite_cells("paper")
        assert (PAPER.stages * PAPER.replicas, PAPER.attackers / PAPER.replicas) == (128, 0.375)
        found = {(cell.attack, cell.direction) for cell in cells if cell.drill}
        each = {(str(attack), way) for attack in PAPER_ATTACKS for way in ("activation", "gradient", "both")}
        assert found == each | {("mixed", "both")}
        assert all(cell.attacked_stages == range(1, 15) for cell in cells if cell.drill)

    @pytest.mark.parametrize("suite", SUITES)
    def test_a_suite_begins_without_attackers_and_names_each_cell_once(self, suite: str) -> None:
        cells = suite_cells(suite)
        assert attackers(cells[0], 0) == []
        keys = [run.key for run in runs(cells, 2)]
        assert len(set(keys)) == len(keys)
        assert {run.defence for run in runs(cells, 1)} == set(DEFENCES)

    @pytest.mark.parametrize("suite", SUITES)
    def test_every_attacker_plays_a_drill_that_there_is_in_a_stage_that_there_is(self, suite: str) -> None:
        for cell in suite_cells(suite):
            found = attackers(cell, 1)
            assert found == attackers(cell, 1)  # drawn, but not anew
            assert len(found) == len(cell.attacked_stages) * (cell.setting.attackers if cell.drill else 0)
            for attacker in found:
                check_drill_name(attacker.drill)
                assert attacker.stage in cell.attacked_stages
                assert 0 <= attacker.replica < cell.setting.replicas

    def test_the_ends_send_one_kind_of_tensor_only(self) -> None:
        for cell in suite_cells("beyond"):
            assert cell.stage_role != "first" or cell.direction == "activation"
            assert cell.stage_role != "last" or cell.direction == "gradient"

    def test_colluders_are_six_in_ten_of_the_attackers(self) -> None:
        cell = next(cell for cell in suite_cells("beyond") if cell.colluding)
        found = attackers(cell, 0)
        assert sum(attacker.colluding for attacker in found) == round(0.6 * len(found))

    def test_a_cell_that_changes_nothing_without_defence_borrows_that_run(self) -> None:
        cells = suite_cells("beyond")
        names = {cell.name for cell in cells}
        borrowing = [cell for cell in cells if cell.undefended]
        assert {str(attack) for attack in CONDUCT_ATTACKS} - {"inject"} <= {cell.attack for cell in borrowing}
        assert all(cell.undefended in names for cell in borrowing)
        assert not any(run.defence == "off" for run in runs(borrowing, 1))

    def test_a_pattern_keeps_what_the_others_are_compared_with(self) -> None:
        assert [cell.attack for cell in selected(suite_cells("paper"), "paper/bias/both/*")] == ["none", "bias"]

    def test_each_run_has_a_manifest(self) -> None:
        for suite in SUITES:
            manifests = {run.defence: manifest_of(run) for run in runs(suite_cells(suite)[:1], 1)}
            assert {name: manifest.verifier.audits for name, manifest in manifests.items()} == {
                "off": False,
                "sentinel": False,
                "all": True,
            }
        first, second = (manifest_of(run) for run in runs(suite_cells("quick")[:1], 2) if run.defence == "off")
        assert (first.data.seed, first.model.seed) == (0, 0)
        assert (second.data.seed, second.model.seed) == (1, 1)


class TestScore:
    def test_nodes_are_counted_and_not_messages(self) -> None:
        nodes = [fact(True, ejected=True), fact(True), fact(ejected=True), fact(), fact()]
        found = detection(nodes, found=lambda node: node.ejected)
        assert (found.precision, found.recall, found.f1) == (0.5, 0.5, 0.5)

    def test_nobody_found_is_no_false_alarm_and_nobody_there_is_no_miss(self) -> None:
        missed = detection([fact(True), fact()], found=lambda node: node.detected)
        assert (missed.precision, missed.recall, missed.f1) == (1.0, 0.0, 0.0)
        quiet = detection([fact(), fact()], found=lambda node: node.detected)
        assert (quiet.precision, quiet.recall, quiet.f1) == (1.0, 1.0, 1.0)
        alarmed = detection([fact(ejected=True)], found=lambda node: node.detected)
        assert (alarmed.precision, alarmed.recall) == (0.0, 1.0)

    def test_a_strict_majority_of_live_neighbours_detects(self) -> None:
        assert [fact(quarantined_by=count).detected for count in range(5)] == [False, False, False, True, True]
        assert not fact(quarantined_by=0, neighbours=0).detected
        assert fact(barred_on_one_side=True).isolated
        assert not fact(barred_on_one_side=True).detected

    def test_a_delay_counts_from_the_first_attack_of_those_that_were_caught(self) -> None:
        nodes = [
            fact(True, first_attack_step=10, quarantined_step=14),
            fact(True, first_attack_step=12, quarantined_step=14),
            fact(True, first_attack_step=10),
            fact(quarantined_step=3),
        ]
        assert mean_delay(nodes, lambda node: node.quarantined_step) == 3.0
        assert mean_delay(nodes, lambda node: node.ejected_step) is None

    def test_the_loss_is_what_most_nodes_noted(self) -> None:
        told = [[(0, 5.0), (1, 4.0)], [(0, 5.0), (1, 4.0)], [(1, 99.0)]]
        assert agreed_losses(told) == [5.0, 4.0]
        assert final_loss([9.0, 1.0, 2.0, 3.0, 4.0, 5.0]) == 3.0
        assert final_loss([]) is None

    def test_rows_are_joined_with_those_of_the_same_seed(self) -> None:
        free = {"cell": "quick/none/none/none", "attack": "none", "defence": "off"}
        rows = [
            row(**free, loss=2.0, bytes_out=100),
            row(**free, loss=2.1, bytes_out=100, seed=1),
            row(defence="off", loss=3.0),
            row(),
            row(cell="quick/frame/none/middle", attack="frame"),
        ]
        out = joined(rows, {"quick/frame/none/middle": "quick/none/none/none"})
        assert (out[3]["loss_attack_free"], out[3]["loss_undefended"]) == (2.0, 3.0)
        assert out[3]["extra_traffic_share"] == pytest.approx(0.1)
        assert out[4]["loss_undefended"] == 2.0
        assert joined([row(seed=7)], {})[0]["loss_attack_free"] is None


class TestReport:
    def test_seeds_are_averaged_and_the_least_recall_kept(self) -> None:
        (mean,) = report.averaged([row(recall=1.0), row(recall=0.0, seed=1, honest_ejected=1)])
        assert (mean["recall"], mean["min_recall"], mean["seeds"], mean["honest_ejected"]) == (0.5, 0.0, 2, 1)
        assert mean["steps_to_ejection"] is None

    def test_the_page_names_every_cell_and_whatever_went_wrong(self) -> None:
        rows = joined([row(died=[{"node": "s1r2", "attacker": False, "error": "KeyError('x')"}])], {})
        page = report.markdown(rows, [{"key": "quick/noise/both/middle/all/0", "error": "exit code 1\n..."}], {})
        assert "| bias | activation | middle | all |" in page
        assert "s1r2 ended with `KeyError('x')`" in page
        assert "quick/noise/both/middle/all/0 was not run to its end: `exit code 1`" in page
        assert "second-hand" not in page  # that table stands beside the paper's own suite only

    def test_the_papers_numbers_are_marked_as_second_hand(self) -> None:
        rows = joined([row(suite="paper", cell="paper/delay/both/middle", attack="delay", direction="both")], {})
        page = report.markdown(rows, [], {})
        assert "| delay | 94.1 % | second-hand | all | both 66.7 % |" in page

    def test_the_table_and_the_line_show_an_attack_free_swarm_without_f1(self) -> None:
        free = row(attack="none", cell="quick/none/none/none", direction="none", stage_role="none")
        text = report.table(joined([free], {}))
        assert "66.7 %" not in text
        assert "none" in report.line(free)


class TestBook:
    def test_it_is_written_after_each_swarm_and_read_again(self, tmp_path: Path) -> None:
        path = tmp_path / "arena.json"
        run, other = runs(suite_cells("quick"), 1)[:2]
        book = Book(path, keep=True)
        assert not book.has(run)
        book.add(row(cell=run.cell.name, defence=run.defence, seed=run.seed))
        book.fail(other, "it hung")
        assert book.failures == [{"key": other.key, "error": "it hung"}]
        assert len(json.loads(path.read_text())) == 1
        again = Book(path, keep=True)
        assert again.has(run)
        assert not again.has(other)
        assert not Book(path, keep=False).has(run)
