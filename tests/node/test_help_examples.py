"""Every example of every ``--help`` is run for real, against a small swarm on loopback.

A new command without an example, or an example with a placeholder that nothing here knows, fails.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import pytest
import pytest_asyncio

from node import cli
from node.initialise import new_manifest
from protocol.identity import Identity
from protocol.transports.deathsignal import die_with_parent
from tests.swarm.harness import ROOT, running, small_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]

INVITE = "sentinel://SWARM_ID/ip4/192.0.2.7/tcp/31330/p2p/PEER_ID"
LONG_RUNNING = {
    "demo": (r"starting \d+ nodes", 130),
    "coordinate": (r"invite: sentinel://", 0),
    "join": (r"holding stage \d of 2", 0),
    "observe": (r"observing swarm \w+ at http://127", 0),
    "status --watch": (r"step \d+", 0),
}
"""Commands that go on until they are told: their first meaningful words, and the exit code after Ctrl-C."""
WORDS_OF_WRONG = ("Traceback", "Usage:", "Error:")


def examples() -> Iterator[tuple[str, str]]:
    """Command and example; those of a command without any are empty."""

    def of(name: str, command: click.Command) -> Iterator[tuple[str, str]]:
        _, _, text = (command.help or "").partition("Example:")
        lines = [line.strip() for line in text.partition("\n\n")[0].splitlines() if line.strip()]
        for line in lines:
            yield name, re.split(r"\s{2,}", line)[0]  # what follows after a gap explains it
        if not lines:
            yield name, ""
        if isinstance(command, click.Group):
            for inner, sub in command.commands.items():
                yield from of(f"{name} {inner}".strip(), sub)

    yield from of("", cli.cli)


@dataclass
class World:
    """What the examples are about: a swarm of two stages that trains, and its nodes' state folders."""

    invite: str
    nodes: tuple[Path, Path]

    def real(self, words: list[str]) -> list[str]:
        """The words with placeholders replaced."""
        known = {
            **dict.fromkeys((INVITE, "INVITE", "$INVITE"), self.invite),
            "/data/node1": str(self.nodes[0]),
            "/data/node2": str(self.nodes[1]),
        }
        found = [known.get(word, word) for word in words]
        for index, word in enumerate(found[:-1]):
            if word in ("--port", "--http-port"):
                found[index + 1] = "0"
        unknown = [word for word in found if word not in known.values() and placeholder(word)]
        assert not unknown, f"this test does not know what to put for {unknown}"
        return found


def placeholder(word: str) -> bool:
    """Whether a word stands for something else: $NAME, NAME, an address of documentation, or somebody's folder."""
    return bool(re.search(r"\$|\b[A-Z][A-Z_]{2,}\b|192\.0\.2\.|198\.51\.100\.|203\.0\.113\.|^/", word))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    folder = tmp_path_factory.mktemp("swarm")
    manifest = small_manifest(
        model={"layers": 2}, stages={"layers_per_stage": [1, 1]}, training={"steps": 0, "checkpoint_steps": 2}
    )
    async with running(folder, manifest) as swarm:
        await swarm.coordinate()
        first, second = await swarm.fill(1)
        for node in (first, second):
            await swarm.until(node, lambda status: (status["checkpoint"] or {}).get("step", 0) >= 4)
        yield World(invite=swarm.invite, nodes=(first.folder, second.folder))


def prepare(folder: Path, words: list[str]) -> None:
    """What a person would have before this command: a manifest, a key, a state folder with an identity."""
    coordinator = ""
    if words[0] == "admit":
        coordinator = Identity.load_or_create(folder / "state" / "identity.key").peer_id
    if words[0] in ("coordinate", "admit") and not (folder / "swarm.toml").exists():
        _, text = new_manifest(
            **{"name": "tiny", "stages": 2, "layers": 2, "width": 64, "heads": 4, "kv_heads": 2, "steps": 0},
            data="stdlib",
            min_replicas=1,
            allow_drills=False,
            coordinator=coordinator,
        )
        (folder / "swarm.toml").write_text(text, encoding="utf-8")
    if words[:2] in (["identity", "show"], ["identity", "export"]):
        Identity.create(folder / "state" / "identity.key")
    if words[:2] == ["identity", "import"]:
        Identity.create(folder / words[2])


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("command", "example"), list(examples()), ids=lambda value: value or "sentinel")
async def test_the_example_works(command: str, example: str, world: World, tmp_path: Path) -> None:
    assert example, f"sentinel {command} --help shows no example"
    for part in example.split("&&"):
        program, *words = shlex.split(part)
        assert program == "sentinel", example
        words = world.real(words)
        assert not command or example.startswith(f"sentinel {command}"), "the example is of another command"
        prepare(tmp_path, words)
        if words[0] in ("coordinate", "join"):
            words.append("--no-reach")
        long_running = next((key for key in LONG_RUNNING if set(key.split()) <= set(words)), "")
        code, said = await run(words, tmp_path, until=LONG_RUNNING[long_running][0] if long_running else "")
        expected = LONG_RUNNING[long_running][1] if long_running else 0
        assert code == expected and not any(wrong in said for wrong in WORDS_OF_WRONG), said
        assert said, "it says nothing"


@pytest.mark.asyncio(loop_scope="module")
async def test_a_step_that_nobody_has_is_said_in_one_line(world: World, tmp_path: Path) -> None:
    code, said = await run(["export", world.invite, "--step", "1000000000", "--out", "model"], tmp_path, until="")
    *_, last = said.splitlines()
    assert code == 1 and "Traceback" not in said, said
    assert last.startswith("sentinel: not every stage has step 1000000000 (steps of stage 0: "), said
    assert not (tmp_path / "model").exists() and not list(tmp_path.glob(".export-*"))


async def run(words: list[str], folder: Path, *, until: str) -> tuple[int, str]:
    """Run a command to its end, or ``until`` it has said that and Ctrl-C comes; its exit code and all that it said."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SENTINEL_")}
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "node", *words),
        cwd=folder,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={
            **environment,
            "PYTHONPATH": str(ROOT),
            "SENTINEL_HOST": "127.0.0.1",
            "SENTINEL_STATE_DIR": str(folder / "state"),
            "XDG_RUNTIME_DIR": str(folder),
        },
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    said = b""
    try:
        async with asyncio.timeout(150):
            while until and not re.search(until, said.decode(errors="replace")):
                line = await process.stdout.readline()
                assert line, f"sentinel {words[0]} ended: {said.decode()}"
                said += line
            if until:
                process.send_signal(signal.SIGINT)
            said += await process.stdout.read()
            return await process.wait(), said.decode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def test_every_command_that_goes_on_is_named() -> None:
    """What is long-running here exists, so that a command that was renamed is noticed."""
    shown = {example for _, example in examples()}
    for key in LONG_RUNNING:
        assert any(set(key.split()) <= set(example.split()) for example in shown), key


@pytest.mark.parametrize(
    ("word", "unknown"),
    [
        ("PEER_ID", True),
        ("$KEY", True),
        ("/data/x", True),
        ("192.0.2.9", True),
        ("swarm.toml", False),
        ("--out", False),
    ],
)
def test_placeholders_are_recognised(word: str, unknown: bool) -> None:
    assert placeholder(word) is unknown
