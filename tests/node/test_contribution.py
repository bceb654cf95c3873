"""What a node contributed, over its runs: added up, kept by swarm, and safe against whatever the file holds."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from node.contribution import MAX_BYTES, MAX_COUNT, MAX_SWARMS, NAME, Contributed, Contribution, parse
from node.coordinator import PeerReport
from node.state_folder import StateFolder
from node.swarm_status import contributed
from node.telemetry import Counters

SWARM, OTHER = "ab" * 32, "cd" * 32
SUMS = {"microbatches": 5, "tokens": 640, "steps": 2, "updated": 7.5}


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[StateFolder]:
    with StateFolder(tmp_path / "state") as opened:
        yield opened


def run(folder: StateFolder, swarm: str = SWARM, microbatches: int = 0) -> Contribution:
    """A run that trains so many microbatches of 128 tokens, in as many steps, and ends."""
    counters = Counters()
    contribution = Contribution(folder, swarm, counters)
    contribution.load()
    counters.microbatches, counters.tokens, counters.steps = microbatches, 128 * microbatches, microbatches
    contribution.save()
    return contribution


def written(folder: StateFolder) -> dict[str, Any]:
    found = json.loads((folder.path / NAME).read_text())
    assert isinstance(found, dict)
    return found


def test_runs_add_up_by_swarm(folder: StateFolder) -> None:
    assert not run(folder, microbatches=3).came_back
    run(folder, OTHER, microbatches=9)
    again = run(folder, microbatches=4)
    assert again.came_back and again.now == Contributed(microbatches=4, tokens=512, steps=4)
    assert again.total == Contributed(microbatches=7, tokens=896, steps=7)
    assert run(folder).total == again.total and run(folder, OTHER).total.microbatches == 9


def test_saving_twice_in_a_run_counts_once(folder: StateFolder) -> None:
    contribution = run(folder, microbatches=3)
    contribution.save()
    contribution.save()
    assert run(folder).total.microbatches == 3


def test_nothing_is_written_before_the_file_was_read_or_without_a_change(folder: StateFolder) -> None:
    run(folder, microbatches=3)
    counters = Counters(microbatches=1)
    unread = Contribution(folder, SWARM, counters)
    unread.save()
    assert written(folder)["swarms"][SWARM]["microbatches"] == 3
    (folder.path / NAME).unlink()
    run(folder)
    assert not (folder.path / NAME).exists()


def test_the_swarms_of_long_ago_are_forgotten(folder: StateFolder) -> None:
    swarms = {f"{number:064x}": {**SUMS, "updated": float(number)} for number in range(MAX_SWARMS)}
    folder.write_json(NAME, {"format": 1, "swarms": swarms})
    run(folder, microbatches=1)
    assert set(written(folder)["swarms"]) == {*list(swarms)[1:], SWARM}
    assert os.path.getsize(folder.path / NAME) < MAX_BYTES / 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b'{"format": 2, "swarms": {}}',
        b'{"format": 1, "swarms": []}',
        b'{"format": 1, "swarms": {"ab": {}}}',
        b"[" * 100_000,
        b" " * (MAX_BYTES + 1),
        *(
            json.dumps({"format": 1, "swarms": {SWARM: {**SUMS, name: wrong}}}).encode()
            for name in SUMS
            for wrong in (-1, "5", None, True, [5], MAX_COUNT * 2, float("nan"))
        ),
        json.dumps({"format": 1, "swarms": {f"{number:064x}": SUMS for number in range(MAX_SWARMS + 1)}}).encode(),
    ],
)
def test_a_damaged_file_is_moved_aside_and_told(
    content: bytes, folder: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    (folder.path / NAME).write_bytes(content)
    with caplog.at_level(logging.WARNING):
        contribution = run(folder, microbatches=2)
    assert contribution.total.microbatches == 2 and written(folder)["swarms"].keys() == {SWARM}
    assert (folder.path / f"{NAME}.damaged").read_bytes() == content
    (message,) = [record.getMessage() for record in caplog.records]
    assert "is damaged" in message and "the count begins anew" in message


def test_a_file_that_cannot_be_read_is_left_alone(folder: StateFolder, caplog: pytest.LogCaptureFixture) -> None:
    (folder.path / NAME).mkdir()
    contribution = run(folder, microbatches=2)
    assert contribution.total.microbatches == 2 and (folder.path / NAME).is_dir()
    assert "this run counts from zero" in caplog.text


def test_a_full_disk_only_warns(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(name: str, value: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "write_json", full)
    contribution = run(folder, microbatches=2)
    assert "No space left on device" in caplog.text
    monkeypatch.undo()
    contribution.save()  # what was not written yet is written once there is room
    assert run(folder).total.microbatches == 2


def test_sums_have_a_limit(folder: StateFolder) -> None:
    most = {"microbatches": MAX_COUNT, "tokens": MAX_COUNT, "steps": MAX_COUNT, "updated": 1}
    folder.write_json(NAME, {"format": 1, "swarms": {SWARM: most}})
    assert run(folder, microbatches=5).total == Contributed(microbatches=MAX_COUNT, tokens=MAX_COUNT, steps=MAX_COUNT)
    assert parse((folder.path / NAME).read_bytes())[SWARM][0].tokens == MAX_COUNT


def test_the_words() -> None:
    assert str(Contributed(microbatches=1, tokens=1, steps=1)) == "1 microbatch (1 token) in 1 step"
    assert str(Contributed(microbatches=1200, tokens=5, steps=0)) == "1,200 microbatches (5 tokens) in 0 steps"


# what a coordinator and ``sentinel status`` make of it ---------------------------------------


@pytest.mark.parametrize("told", [None, 5, [], {"microbatches": -1, "tokens": "x", "steps": True}, {"steps": 2**61}])
def test_a_coordinator_keeps_only_numbers_that_can_be(told: Any) -> None:
    assert PeerReport.of({"contribution": told}).contributed == Contributed()
    good = PeerReport.of({"contribution": {"microbatches": 3, "tokens": told, "steps": 2}}).contributed
    assert (good.microbatches, good.steps) == (3, 2)


@pytest.mark.parametrize("replicas", [None, 7, [None, 3, {}, {"peer": 4, "contribution": {}}], [{"peer": "a"}]])
def test_a_hostile_status_gives_no_contributions(replicas: Any) -> None:
    assert contributed({"replicas": replicas}) == {}


def test_the_asked_node_tells_of_itself_and_of_others() -> None:
    replicas = [{"peer": "b", "contribution": {"microbatches": 4}}, {"peer": "c", "contribution": {"microbatches": -4}}]
    status = {"peer": "a", "contribution": {"microbatches": 3}, "replicas": replicas}
    assert contributed(status) == {"a": 3, "b": 4, "c": 0}
