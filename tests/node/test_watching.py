"""``sentinel status --watch``: the table, the line, and a swarm that does not answer."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from node.observing.live import line, table
from node.observing.picture import Picture
from node.observing.reports import Outline, read_report
from protocol.identity import Identity
from tests.node.observed import NOW, SWARM, accused, claimed, event, peer, replica, status
from tests.node.terminal import ROOT, on_terminal

NOBODY = f"sentinel://{'0123456789abcdef' * 4}/ip4/127.0.0.1/tcp/9/p2p/{Identity(bytes(range(32))).peer_id}"
SILENT = "no node of the invite has answered, still trying"
PROGRAM = """
import sys
from node.cli import main
code = main(sys.argv[1:])
sys.exit(99 if {"torch", "hivemind", "node.daemon"} & set(sys.modules) else code)
"""


def seen() -> Picture:
    """Three stages, the last of which nobody holds; one node of two in the middle is accused."""
    picture = Picture(swarm=SWARM)
    picture.know(Outline(name="attic", stages=3, steps=40))
    picture.merge([[claimed(0, 0), claimed(1, 1), claimed(2, 1, label="[red]cheat"), accused(0, 2)]], NOW)
    picture.meet(NOW)
    return picture


def heard(picture: Picture, *numbers: int) -> Picture:
    for number in numbers:
        told = status(replicas=[replica(2, "quarantined", 0.1)], events=[event("ejected", 2)])
        picture.answered(peer(number), read_report(told), NOW)
    picture.settle(NOW)
    return picture


def drawn(picture: Picture, now: float = NOW, *, answered: float = NOW) -> str:
    console = Console(file=io.StringIO(), width=120, force_terminal=True, color_system=None)
    console.print(table(picture, now, answered=answered))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_table_has_every_stage_and_what_the_neighbours_think() -> None:
    text = drawn(heard(seen(), 0, 1, 2))
    rows = {
        name: next(row for row in text.splitlines() if name in row) for name in ("node 0", "[red]cheat", "nobody  ")
    }
    assert "step 7 of 40, loss 3.500, 100 tokens/s" in text and "swarm attic (010101010101)" in text
    assert "training" in rows["node 0"] and peer(0)[-8:] in rows["node 0"] and " 3 " in rows["node 0"]
    assert "0.10 quarantined" in rows["[red]cheat"]  # and what looks like markup is text
    assert " 2 " in rows["nobody  "]
    assert "1 accusation" in text and f"{peer(2)[-8:]} of stage 1 ejected" in text


def test_the_last_picture_stays_when_nobody_answers() -> None:
    picture = heard(seen(), 0, 1)
    for number in (0, 1):
        picture.failed(peer(number), NOW + 9)
    picture.settle(NOW + 9)
    text = drawn(picture, NOW + 12, answered=NOW)
    assert "no node answers since 12 s, still trying; this is the last that was seen" in text
    assert "step 7 of 40, loss 3.500" in text and "node 0" in text and "silent" in text
    assert line(picture, NOW + 12, answered=NOW).endswith("this is the last that was seen")


def test_nothing_seen_yet() -> None:
    assert "no replicas yet" in drawn(Picture(swarm=SWARM), answered=0.0)
    nobody = Picture(swarm=SWARM)
    nobody.settle(NOW)
    assert SILENT in drawn(nobody, answered=0.0) and SILENT in line(nobody, NOW, answered=0.0)


def test_a_line_says_it_in_short() -> None:
    said = line(heard(seen(), 0, 1), NOW, answered=NOW)
    expected = (
        "[training] step 7 of 40, loss 3.500, 100 tokens/s; 1 in stage 0, 1 in stage 1, 0 in stage 2; 1 accusation"
    )
    assert said.partition(" ")[2] == expected and said[2] == said[5] == ":"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_without_a_terminal_every_round_is_a_line_until_a_signal(number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "status", NOBODY, "--watch", "--interval", "0.5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        lines = [process.stdout.readline() for _ in range(3)]
        process.send_signal(number)
        rest, errors = process.communicate(timeout=60)
    assert all(said.endswith(f"{SILENT}\n") for said in [*lines, *rest.splitlines(keepends=True)])
    assert (process.returncode, errors) == (0, "")  # 99: it took in what is heavy


def test_on_a_terminal_ctrl_c_ends_it_with_the_picture_left(tmp_path: Path) -> None:
    with on_terminal("status", NOBODY, "--watch", folder=tmp_path) as terminal:
        terminal.until(SILENT)
        terminal.type("\x03")
        assert terminal.end() == 0
    assert terminal.text.rstrip().endswith("╯") and "Traceback" not in terminal.text


def test_whoever_reads_may_have_enough() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "node", "status", NOBODY, "--watch", "--interval", "0.5"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline()
        process.stdout.close()
        assert process.wait(timeout=60) == 0
        assert process.stderr.read() == b""
