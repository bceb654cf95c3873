"""What liars do to gradients: attacks are what they are said to be, and rows follow from what was measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks import robust
from benchmarks.robust import (
    ATTACKS,
    LIARS,
    MEAN,
    NEIGHBOURS,
    NONE,
    OURS,
    REPLICAS,
    RULES,
    Kept,
    Loss,
    Results,
    Retention,
    Size,
    attacked,
    closeness,
    kept,
    little,
    made_up,
    main,
    mean_cosine,
    retention,
    row,
    rows,
    tables,
)

ROOT = Path(__file__).resolve().parent.parent.parent
TINY = Size(steps=2, sequences=1, width=8, context=8)


def of_all(ours: Kept, mean: Kept) -> dict[str, Kept]:
    return {MEAN: mean, OURS: ours, NEIGHBOURS: mean}


def results(*, ours: float = 0.95, loss: float = 3.0) -> Results:
    """Results as a good measurement gives them."""
    found = [
        Retention(
            group=group, attack=NONE, kept=of_all(Kept(retained=ours, cosine=0.9), Kept(retained=0.5, cosine=0.8))
        )
        for group in ("made up, 0.1", "real, first half")
    ]
    return Results(
        size=TINY,
        seeds=1,
        cosines={"made up, 0.1": 0.1, "real, first half": 0.7},
        retentions=found,
        numbers=[(3, Retention(group="3 members", attack=NONE, kept=found[0].kept))],
        losses=[
            Loss(attack="zeros", ours=loss, mean=3.3, free=3.0),
            Loss(attack="zeros", ours=9.0, mean=9.0, free=8.0, momentum=True),
        ],
    )


def test_liars_replace_their_own_gradients_and_nobody_elses() -> None:
    gradients = made_up(0.5, seed=1)
    assert torch.equal(attacked(gradients, None), gradients)
    for attack in ATTACKS:
        sent = attacked(gradients, attack)
        assert sent.shape == gradients.shape == (REPLICAS, robust.LENGTH)
        assert torch.equal(sent[:-LIARS], gradients[:-LIARS])
        assert not torch.equal(sent[-LIARS:], gradients[-LIARS:])


def test_who_lies_in_some_slices_is_honest_in_the_others_and_gains_nothing_in_its_own() -> None:
    gradients = made_up(0.5, seed=1)
    lying = [attack for attack in ATTACKS if attack.slices]
    assert lying
    for attack in lying:
        changed = (attacked(gradients, attack) != gradients)[-LIARS:]
        for liar in changed:
            assert {entry % REPLICAS for entry in liar.nonzero().flatten().tolist()} == set(range(attack.slices))
        found = retention([gradients], attack, RULES)
        assert found[OURS].retained > 0.9
        assert found[MEAN].retained < 0.6


def test_a_little_is_as_much_as_its_authors_say() -> None:
    assert little(8, 3) == pytest.approx(0.2533, abs=1e-4)
    assert little(50, 24) == pytest.approx(1.43, abs=0.01)


def test_made_up_gradients_have_the_cosine_that_is_asked_for() -> None:
    assert mean_cosine([made_up(0.3, seed) for seed in range(3)]) == pytest.approx(0.3, abs=0.02)


def test_what_is_kept_of_the_honest_mean() -> None:
    wanted = torch.tensor([2.0, 0.0])
    assert kept(torch.tensor([1.0, 1.0]), wanted) == Kept(retained=0.5, cosine=pytest.approx(0.5**0.5))
    assert kept(torch.zeros(2), wanted) == Kept(retained=0.0, cosine=0.0)


@pytest.mark.parametrize("attack", [attack for attack in ATTACKS if attack.promised], ids=lambda attack: attack.name)
def test_our_rule_reaches_the_goal_on_made_up_gradients(attack: robust.Attack) -> None:
    found = retention([made_up(0.1, seed=0)], attack, RULES)
    assert Retention(group="", attack=attack.name, kept=found).good
    assert found[OURS].cosine >= found[MEAN].cosine - 1e-3


def test_without_liars_every_rule_keeps_the_gradient() -> None:
    for one in retention([made_up(0.9, seed=0)], None, RULES).values():
        assert one.retained == pytest.approx(1.0, abs=0.02)


def test_a_ratio_above_one_says_that_ours_is_better() -> None:
    assert row("", 1.0, 0.5, MEAN, "cosine")["ratio"] == 2.0
    assert row("", 1.25, 400.0, MEAN, "retained signal")["ratio"] == 80.0
    assert row("", 2.0, 2.5, MEAN, "loss")["ratio"] == 1.25
    assert closeness(-3.0) == 0.01


def test_rows_and_tables_have_all_that_was_measured() -> None:
    found = results()
    made = rows(found)
    assert all(set(entry) == {"case", "ours", "rival", "rival_name", "unit", "ratio"} for entry in made)
    assert {entry["unit"] for entry in made} == {"retained signal", "cosine", "loss"}
    assert json.loads(json.dumps(made)) == made
    text = "\n".join(tables(found).values())
    assert "3.300 (+10.0 %)" in text and "0.95 (0.90)" in text and "missed" not in text


@pytest.mark.parametrize(("changes", "good"), [({}, True), ({"ours": 0.8}, False), ({"loss": 3.07}, False)])
def test_a_missed_goal_is_said(changes: dict[str, float], good: bool) -> None:
    found = results(**changes)
    assert found.good is good
    assert ("missed" in "\n".join(tables(found).values())) is not good


def test_the_document_has_a_place_for_each_table() -> None:
    text = (ROOT / "docs" / "averaging.md").read_text(encoding="utf-8")
    names = {*(f"made up, {cosine}" for cosine in robust.COSINES), *robust.REAL_GROUPS, "losses", "numbers"}
    assert all(f"<!-- table {name} -->" in text for name in {*names, "losses with momentum"})


@pytest.mark.timeout(240)
def test_the_command_measures_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(robust, "Size", lambda **changes: Size(**{"width": 8, "context": 8, **changes}))
    monkeypatch.setattr(robust, "LENGTH", 100)
    monkeypatch.setattr(robust, "OTHER_NUMBERS", (3, 4))
    monkeypatch.setattr(robust, "HELD_OUT", 1)
    document = tmp_path / "averaging.md"
    document.write_text((ROOT / "docs" / "averaging.md").read_text(encoding="utf-8"), encoding="utf-8")
    written = tmp_path / "rows.json"
    words = ["--steps", "2", "--sequences", "1", "--momentum", "--json", str(written), "--docs", str(document)]
    assert main(words) in (0, 1)  # so little training reaches no goal
    assert len(json.loads(written.read_text())) > 100
    assert "ALIE in own noise" in document.read_text(encoding="utf-8")


def test_the_quick_part_is_for_the_command_for_all() -> None:
    assert set(robust.run()) == {attack.name for attack in ATTACKS}


def test_too_little_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--steps", "1"])
    assert "at least" in capsys.readouterr().err
