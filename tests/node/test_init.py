"""``sentinel init``: questions on a terminal, none anywhere else, and what the swarm will ask."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node import cli
from node.estimate import estimate
from node.init_cli import QUESTIONS
from protocol.manifest import Manifest
from tests.node.terminal import ROOT, on_terminal

pytestmark = pytest.mark.usefixtures("elsewhere")


def written(path: str = "swarm.toml") -> Manifest:
    return Manifest.from_toml(Path(path).read_text(encoding="utf-8"))


def test_enter_takes_the_defaults_that_flags_have(tmp_path: Path) -> None:
    with on_terminal("init", folder=tmp_path) as terminal:
        for question in QUESTIONS:
            seen = len(terminal.until(f"{question.text} ["))
            assert question.why in terminal.text
            terminal.type("\n")
        terminal.until("next: ", after=seen)
        assert terminal.end() == 0
    assert cli.main(["init", "plain.toml", "--yes"]) == 0
    assert written() == written("plain.toml")


def test_answers_that_do_not_fit_together_are_asked_again(tmp_path: Path) -> None:
    with on_terminal("init", folder=tmp_path) as terminal:
        terminal.until("Name [my-swarm]")
        terminal.type("garden\nwide\n")
        terminal.until("'wide' is not a valid integer")
        terminal.type("64\n4\n2\n3\nstdlib\n9\n2\n")
        seen = len(terminal.until("That does not work: "))
        assert "heads" in terminal.text
        terminal.until("Name [garden]", after=seen - 200)
        terminal.type("\n\n\n\n8\n\n\n\n")
        terminal.until("next: ")
        assert terminal.end() == 0
    found = written()
    assert (found.name, found.model.width, found.model.layers, found.model.heads) == ("garden", 64, 4, 8)
    assert found.model.kv_heads == 4 and found.training.steps == 9 and found.stages.min_replicas == 2


def test_ctrl_d_at_a_question_writes_nothing(tmp_path: Path) -> None:
    with on_terminal("init", folder=tmp_path) as terminal:
        terminal.until("Name [my-swarm]")
        terminal.type("\x04")
        assert terminal.end() == 130
        assert "Traceback" not in terminal.text
    assert not Path("swarm.toml").exists()


@pytest.mark.parametrize("option", [["--yes"], ["--name", "garden"], ["--json"]])
def test_with_any_choice_nothing_is_asked_on_a_terminal(option: list[str], tmp_path: Path) -> None:
    with on_terminal("init", *option, folder=tmp_path) as terminal:
        assert terminal.end() == 0
        assert "Attention heads [" not in terminal.text
    assert written().model.width == 128


def test_it_says_what_the_swarm_asks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "--stages", "2", "--min-replicas", "4"]) == 0
    said = capsys.readouterr().out
    found = estimate(written())
    assert f"{found.parameters:,} in all" in said and "8 to begin; 8 recommended" in said


def test_the_quick_start_shows_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "--yes"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if not line.startswith(("wrote", "swarm id", "next"))]
    assert "\n".join(said) in (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")


def test_the_estimate_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "mine.toml", "--json", "--steps", "5"]) == 0
    said = json.loads(capsys.readouterr().out)
    manifest = written("mine.toml")
    assert said["file"] == "mine.toml" and said["swarm"] == manifest.swarm_id
    assert said["volunteers_needed"] == 3 and said["volunteers_recommended"] == 9
    assert [stage["parameters"] for stage in said["stages"]] == [manifest.stage_parameters(stage) for stage in range(3)]
    memory = said["stages"][0]["memory_bytes"]
    assert memory["total"] > memory["process"] + sum(memory[name] for name in ("parameters", "gradients", "optimizer"))
