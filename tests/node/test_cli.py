"""The command line: every mistake gets one line, the right exit code, and costs nothing."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import aiohttp
import click
import pytest

from node import cli
from node.demo_processes import Child, start_child, stop_children
from node.invite_file import read_invite_file, write_invite_file
from node.state_folder import StateFolder
from node.version import VERSION
from protocol.errors import LocalError
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.manifest import Manifest

pytestmark = pytest.mark.usefixtures("elsewhere")

ROOT = Path(__file__).parents[2]
SWARM = "0123456789abcdef" * 4
PEER = Identity(bytes(range(32))).peer_id
INVITE = f"sentinel://{SWARM}/ip4/127.0.0.1/tcp/9/p2p/{PEER}"  # port 9 is "discard", which nobody serves
NODE_OPTIONS = {
    *("--state-dir", "--host", "--port", "--announce", "--reach", "--http-host", "--http-port", "--label"),
    *("--log-format", "--log-level", "--ready-fd"),
}
OPTIONS = {
    "": {"--version"},
    "demo": {
        *("--stages", "--replicas", "--steps", "--drill", "--no-drill", "--drill-from", "--json", "--keep", "--plain"),
    },
    "init": {
        *("--name", "--stages", "--layers", "--width", "--heads", "--kv-heads", "--steps", "--data"),
        *("--min-replicas", "--allow-drills", "--invited", "--state-dir", "--force", "--yes", "--json"),
    },
    "admit": {"--days", "--revoke", "--list", "--json", "--manifest", "--state-dir"},
    "coordinate": {*NODE_OPTIONS, "--invite-file"},
    "join": {
        *NODE_OPTIONS,
        *("--stage", "--device", "--threads", "--drill", "--drill-from", "--checkpoints", "--exit-when-done"),
        *("--invite-file", "--copies-gib"),
    },
    "status": {"--json", "--timeout", "--watch", "--interval", "--invite-file"},
    "observe": {"--http-host", "--http-port", "--interval", "--log-format", "--log-level", "--invite-file"},
    "doctor": {
        *("--state-dir", "--host", "--port", "--http-host", "--http-port", "--device", "--timeout", "--json"),
        "--invite-file",
    },
    "export": {"--state-dir", "--out", "--step", "--swarm", "--json", "--timeout", "--invite-file"},
    "identity": set(),
    "identity show": {"--state-dir"},
    "identity export": {"--state-dir"},
    "identity import": {"--state-dir"},
}
"""Scripts and units that people write depend on these: a new option is added here as well, an old one stays."""


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    """Run a command that fails with this code; returns the one line that it says."""
    assert cli.main(arguments) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("sentinel: ") and said.err.count("\n") == 1 and said.err.endswith("\n"), said.err
    return said.err.removeprefix("sentinel: ").rstrip("\n")


def commands() -> dict[str, click.Command]:
    found: dict[str, click.Command] = {"": cli.cli}
    for name, command in cli.cli.commands.items():
        found[name] = command
        if isinstance(command, click.Group):
            found |= {f"{name} {inner}": sub for inner, sub in command.commands.items()}
    return found


# help -------------------------------------------------------------------------------


def test_the_options_of_every_command_are_the_frozen_ones() -> None:
    shown = {
        name: {
            option.opts[0]
            for option in command.params
            if isinstance(option, click.Option) and option.name not in ("help",)
        }
        for name, command in commands().items()
    }
    assert shown == OPTIONS


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_shows_an_example(name: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*name.split(), flag]) == 0
    said = capsys.readouterr()
    assert "Example:  sentinel" in said.out and said.err == ""
    assert all(len(line) <= 100 for line in said.out.splitlines())


@pytest.mark.parametrize("name", ["", "identity"])
def test_a_command_that_needs_another_one_shows_them_all(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(name.split()) == 2
    said = capsys.readouterr().err
    assert said.startswith("Usage: sentinel") and "\nCommands:\n" in said


def test_the_version_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"sentinel {VERSION}\n"


# words that cannot be right -----------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["dance"], "No such command 'dance'"),
        (["join", INVITE, "--bogus"], "No such option"),
        (["join", INVITE, INVITE], "unexpected extra argument"),
        (["join", INVITE, "--port", "70000"], "--port"),
        (["join", INVITE, "--http-port", "-1"], "--http-port"),
        (["join", INVITE, "--stage", "first"], "--stage"),
        (["join", INVITE, "--threads", "many"], "--threads"),
        (["join", INVITE, "--log-level", "loud"], "--log-level"),
        (["join", INVITE, "--host", "localhost"], "--host: 'localhost' is not an IP address"),
        (["join", INVITE, "--announce", "/ip4/192.0.2/tcp/1"], "--announce: the address"),
        (["join", INVITE, "--label", "x" * 41], "--label: write at most 40"),
        (["join", INVITE, "--label", "two\nlines"], "--label"),
        (["join", INVITE, "--drill", "bribe"], "unknown drill 'bribe'; choose one of constant"),
        (["join", INVITE, "--drill", "gradient-bribe"], "unknown drill 'gradient-bribe'"),
        (["coordinate", "missing.toml"], "cannot read missing.toml: No such file or directory; write one with"),
        (["coordinate", "."], "is a directory"),
        (["demo", "--stages", "1"], "--stages"),
        (["demo", "--drill", "bribe:1"], "bribe"),
        (["demo", "--drill", "random:9"], "9"),
        (["demo", "--no-drill", "--drill", "random:1"], "contradict"),
        (["demo", "--json", "no/such/folder/result.json"], "does not exist"),
        (["status", INVITE, "--timeout", "0"], "--timeout"),
        (["status", INVITE, "--watch", "--interval", "0"], "--interval"),
        (["status", INVITE, "--watch", "--json"], "contradict"),
        (["observe", INVITE, "--interval", "0.5"], "--interval"),
        (["observe", INVITE, "--http-port", "70000"], "--http-port"),
        (["observe", INVITE, "--log-level", "loud"], "--log-level"),
        (["observe", INVITE, "--bogus"], "No such option"),
        (["init", "no/such/folder/swarm.toml"], "cannot write no/such/folder/swarm.toml: No such file or directory"),
        (["init", "--heads", "3"], "heads"),
        (["init", "--layers", "2", "--stages", "3"], "layers_per_stage"),
        (["init", "--data", "shakespeare"], "data.source"),
        (["init", "--name", " "], "name"),
        (["join", INVITE, "--checkpoints", "-1"], "--checkpoints"),
        (["export"], "--out"),
        (["export", "--out", "model"], "there is no folder"),
        (["export", "--out", "model", "--state-dir", "none"], "--state-dir: there is no folder"),
        (["export", "--out", "model", "--step", "0"], "--step"),
        (["identity", "import", "missing.key"], "missing.key"),
    ],
)
def test_a_wrong_argument_gets_one_line(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refused(capsys, *arguments)
    assert list(Path.cwd().iterdir()) == []


def words_for_numbers() -> list[tuple[str, str]]:
    """Every option of every command that takes a number or one of some words."""
    kinds = (click.IntRange, click.FloatRange, click.Choice)
    return [
        (name, option.opts[0])
        for name, command in commands().items()
        for option in command.params
        if isinstance(option, click.Option) and isinstance(option.type, kinds)
    ]


@pytest.mark.parametrize(("name", "option"), words_for_numbers())
def test_every_option_with_a_range_refuses_another_word(
    name: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert option in refused(capsys, *name.split(), option, "nonsense")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("name", OPTIONS)
def test_every_command_refuses_an_option_that_it_does_not_have(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "No such option" in refused(capsys, *name.split(), "--bogus")
    assert list(Path.cwd().iterdir()) == []


@pytest.mark.parametrize("command", ["join", "status", "observe"])
@pytest.mark.parametrize(
    ("invite", "says"),
    [
        ("", "an invite is needed"),
        ("hello", "begins with sentinel://"),
        (INVITE.replace("sentinel", "https"), "begins with https:"),
        (INVITE[:40], "cut short (29 of 64"),
        (INVITE[: 11 + 64], "names no seed"),
        (INVITE.replace(SWARM, SWARM[:-1] + "g"), "something else than the digits"),
        (INVITE[:-1], "wrong peer id"),
        (INVITE.replace("/p2p/", "/p2q/"), "/p2q"),
        (INVITE.replace("/ip4/", "/ip5/"), "/ip5/"),
        (INVITE.replace("127.0.0.1", "127.0.0.256"), "not an IPv4 address"),
        (INVITE.replace("/tcp/9/", "/tcp/99999/"), "port '99999'"),
        (INVITE.replace(f"/p2p/{PEER}", ""), "lacks its end /p2p/PEER_ID"),
        (INVITE.replace("/ip4/", " /ip4/"), "space"),
        (f"{INVITE},", "address"),
    ],
)
def test_a_wrong_invite_gets_one_line(command: str, invite: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in refused(capsys, command, invite)
    assert "libp2p" not in sys.modules or command == "join"


@pytest.mark.parametrize("command", ["join", "status"])
@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "cannot read the invite file invite: No such file or directory; write the line"),
        (b" \n", "the invite file invite is empty"),
        (b"hello\n", "begins with sentinel://"),
        (b"\xff\xfe", "something else than an invite"),
        (b"x" * 10_000, "more than an invite"),
        (f"{INVITE}\n{INVITE}\n".encode(), "one unbroken line"),
    ],
)
def test_a_wrong_invite_file_gets_one_line(
    command: str, content: bytes | None, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if content is not None:
        Path("invite").write_bytes(content)
    assert says in refused(capsys, command, "--invite-file", "invite")


@pytest.mark.parametrize("command", ["join", "status"])
def test_an_argument_or_the_environment_goes_before_the_invite_file(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("invite").write_text("from the file")
    Path("other").write_text("from the other file")
    monkeypatch.setenv("SENTINEL_INVITE_FILE", "invite")
    file, line = "holds a space", "begins with https:"
    assert file in refused(capsys, command)
    assert line in refused(capsys, command, "https://x")
    monkeypatch.setenv("SENTINEL_INVITE", "https://x")
    assert line in refused(capsys, command)
    assert file in refused(capsys, command, "--invite-file", "other")
    assert "contradict" in refused(capsys, command, "https://x", "--invite-file", "other")


def test_the_invite_of_a_file_is_taken_with_its_line_break(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def look(invite: Invite, *, seconds: float) -> dict[str, object]:  # the real one takes in libp2p
        asked.append(str(invite))
        raise LocalError("nobody is there")

    monkeypatch.setattr("node.swarm_status.look", look)
    Path("invite").write_text(f"{INVITE}\n")
    assert cli.main(["status", "--invite-file", "invite"]) == 1
    assert asked == [INVITE]


def test_an_invite_file_is_replaced_whole_and_readable_by_others() -> None:
    path = Path("invite")
    path.write_text("an older one, which is longer\n" * 9)
    write_invite_file(path, INVITE)
    assert read_invite_file(path) == f"{INVITE}\n" and path.stat().st_mode & 0o777 == 0o644
    assert list(Path.cwd().iterdir()) == [Path.cwd() / "invite"]
    with pytest.raises(LocalError, match=r"cannot write the invite file no/invite: No such file .* --invite-file"):
        write_invite_file(Path("no/invite"), INVITE)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('name = "mine"', 'name = "mine"\ncolour = "red"'), "colour"),
        (("heads = 4", "heads = 4\nhands = 2"), "model.hands"),
        (("width = 128", 'width = "wide"'), "model.width"),
        (("heads = 4", "heads = 3"), "heads"),
        (("layers = 6", "layers = 7"), "layers_per_stage"),
        (("[model]", "[model"), "line"),
        (("protocol_version = 1", "protocol_version = 9"), "protocol_version"),
    ],
)
def test_a_wrong_manifest_gets_one_line(change: tuple[str, str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("swarm.toml")
    assert cli.main(["init", "--name", "mine"]) == 0
    capsys.readouterr()
    text = path.read_text()
    assert change[0] in text
    path.write_text(text.replace(*change, 1))
    assert says in refused(capsys, "coordinate")
    assert not Path("data").exists()


def test_a_manifest_that_is_no_text_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("swarm.toml").write_bytes(b"\xff\xfe")
    assert "it is not UTF-8 text" in refused(capsys, "coordinate")


# init ---------------------------------------------------------------------------------


def test_init_writes_a_manifest_that_reads_back(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init", "mine.toml", "--name", "mine", "--stages", "2", "--layers", "3", "--steps", "7"]) == 0
    said = capsys.readouterr().out
    manifest = Manifest.from_toml(Path("mine.toml").read_text())
    assert manifest.swarm_id in said and "sentinel coordinate mine.toml" in said
    assert manifest.stages.layers_per_stage == (2, 1) and manifest.training.steps == 7


def test_init_overwrites_only_when_told(capsys: pytest.CaptureFixture[str]) -> None:
    Path("swarm.toml").write_text("precious")
    assert "use --force" in refused(capsys, "init")
    assert Path("swarm.toml").read_text() == "precious"
    assert cli.main(["init", "--force"]) == 0
    assert Path("swarm.toml").read_text() != "precious"


# identity -----------------------------------------------------------------------------


def test_an_identity_goes_round(capsys: pytest.CaptureFixture[str]) -> None:
    mine = Identity.create("here/identity.key")
    assert cli.main(["identity", "show", "--state-dir", "here"]) == 0
    assert capsys.readouterr().out.startswith(mine.peer_id)
    assert cli.main(["identity", "export", "backup.key", "--state-dir", "here"]) == 0
    assert Path("backup.key").stat().st_mode & 0o777 == 0o600
    assert cli.main(["identity", "import", "backup.key", "--state-dir", "there"]) == 0
    assert "secret" in capsys.readouterr().out
    assert Identity.load("there/identity.key").peer_id == mine.peer_id


def test_identities_are_never_replaced_or_made_up(capsys: pytest.CaptureFixture[str]) -> None:
    Identity.create("here/identity.key")
    Identity.create("there/identity.key")
    before = Path("there/identity.key").read_bytes()
    for arguments, says in (
        (("show", "--state-dir", "none"), "no key file at"),
        (("export", "backup.key", "--state-dir", "none"), "no key file at"),
        (("export", "there/identity.key", "--state-dir", "here"), "exists already"),
        (("import", "here/identity.key", "--state-dir", "there"), "exists already"),
    ):
        assert says in refused(capsys, "identity", *arguments, code=1)
    assert Path("there/identity.key").read_bytes() == before
    assert not Path("none").exists() and not Path("backup.key").exists()


@pytest.mark.parametrize(
    ("content", "mode", "says"),
    [
        (b"not a key", 0o600, "is not an Ed25519 key file of 68 bytes; restore it from a copy, or move it away"),
        (b"", 0o600, "is not an Ed25519 key file"),
        (None, 0o644, "run `chmod 600"),
    ],
)
def test_a_key_file_that_cannot_be_used_tells_the_remedy(
    content: bytes | None, mode: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path("state/identity.key")
    Identity.create(path)
    before = content if content is not None else path.read_bytes()
    path.write_bytes(before)
    path.chmod(mode)
    for arguments in (["join", INVITE], ["identity", "show"]):
        assert says in refused(capsys, *arguments, "--state-dir", "state", code=1)
    assert path.read_bytes() == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_key_file_tells_the_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    Identity.create("state/identity.key")
    Path("state/identity.key").chmod(0)
    assert "Permission denied" in refused(capsys, "join", INVITE, "--state-dir", "state", code=1)


# the state folder ----------------------------------------------------------------------


@pytest.mark.parametrize("command", [["join", INVITE], ["coordinate"]])
def test_a_state_folder_in_use_names_who_uses_it(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["init"]) == 0
    capsys.readouterr()
    with StateFolder(Path.cwd() / "state"):
        said = refused(capsys, *command, "--state-dir", "state", code=1)
    assert f"in use by process {os.getpid()}" in said and "--state-dir" in said


def test_a_state_folder_that_cannot_be_made_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Path("file").write_text("")
    assert "cannot be used" in refused(capsys, "join", INVITE, "--state-dir", "file/state", code=1)


# imports ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["init"], 0),
        (["identity", "show", "--state-dir", "state"], 0),
        (["join", INVITE, "--state-dir", "bad"], 1),
        (["coordinate", "missing.toml"], 2),
        (["status", INVITE, "--timeout", "20"], 1),
    ],
)
def test_commands_that_run_no_node_take_in_neither_torch_nor_hivemind(arguments: list[str], code: int) -> None:
    Identity.create("state/identity.key")
    Path("bad").mkdir()
    Path("bad/identity.key").write_text("no key")
    script = (
        "import sys; from node.cli import main; code = main(sys.argv[1:]);"
        "print(sorted({'torch', 'hivemind'} & set(sys.modules))); sys.exit(code)"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
        check=False,
    )
    assert result.returncode == code, result.stderr
    assert result.stdout.splitlines()[-1] == "[]"
    assert result.stderr.count("\n") == (code != 0)


def test_a_reader_that_has_enough_is_no_error() -> None:
    result = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m node init --force | true"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
        check=False,
    )
    assert result.stderr == ""


def test_sigterm_is_heard_before_the_node_has_begun() -> None:
    """The first process of a container hears only signals for which it has a handler."""
    script = (
        "import os, signal, sys, types\n"
        "def run_node(*_, **__):\n"
        "    assert callable(signal.getsignal(signal.SIGTERM))\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    signal.pause()\n"
        "sys.modules['node.run'] = types.SimpleNamespace(run_node=run_node)\n"
        "from node.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, "join", INVITE, "--state-dir", "state"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=100,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


# real nodes -------------------------------------------------------------------------------


@pytest.fixture
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.mark.usefixtures("runtime")
async def test_a_port_in_use_ends_the_start_and_keeps_what_was_there(tmp_path: Path) -> None:
    with socket.socket() as peers, socket.socket() as pages:
        for taken in (peers, pages):
            taken.bind(("127.0.0.1", 0))
            taken.listen()
        for name, option, port in (
            ("peers", "--port", peers.getsockname()[1]),
            ("pages", "--http-port", pages.getsockname()[1]),
        ):
            folder = tmp_path / name
            folder.mkdir(mode=0o700)
            (folder / "summary.json").write_text("precious")
            child = await start_child(name, folder, ["join", INVITE, "--host", "127.0.0.1", option, str(port)])
            assert await child.process.wait() == 5
            last = child.last_words().splitlines()[-1]
            assert last.startswith("sentinel: ") and str(port) in last and option in last
            assert (folder / "summary.json").read_text() == "precious"
            assert not list(tmp_path.glob("sentinel-*"))


@pytest.mark.usefixtures("runtime")
async def test_a_seed_that_nobody_serves_is_tried_for_ever(tmp_path: Path) -> None:
    child = await start_child("node", tmp_path / "node", ["join", INVITE, "--host", "127.0.0.1", "--no-reach"])
    try:
        assert child.ready, child.last_words()
        async with asyncio.timeout(60):
            while "no seed answers yet" not in (status := await ask(child)).get("reason", ""):  # noqa: ASYNC110
                await asyncio.sleep(0.1)  # /status can only be polled
        assert status["state"] == "bootstrapping"
        assert "trying for ever" in status["reason"] and PEER[-8:] in status["reason"]
        child.process.send_signal(signal.SIGINT)
        async with asyncio.timeout(30):
            assert await child.process.wait() == 0
    finally:
        await stop_children([child])
    assert "no seed answers yet" in (tmp_path / "node" / "log.txt").read_text()


@pytest.mark.usefixtures("runtime")
async def test_a_coordinator_leaves_its_invite_in_a_file(tmp_path: Path) -> None:
    assert cli.main(["init", "--name", "mine"]) == 0
    options = ["coordinate", "swarm.toml", "--host", "127.0.0.1", "--no-reach", "--invite-file"]
    child = await start_child("coordinator", tmp_path / "coordinator", [*options, "invite"])
    try:
        assert child.ready, child.last_words()
        assert read_invite_file(Path("invite")) == f"{child.ready['invite']}\n"
        child.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            assert await child.process.wait() == 0
    finally:
        await stop_children([child])
    child = await start_child("coordinator", tmp_path / "coordinator", [*options, "no/such/folder/invite"])
    try:
        async with asyncio.timeout(30):
            assert await child.process.wait() == 1
    finally:
        await stop_children([child])
    assert "sentinel: cannot write the invite file no/such/folder/invite: No such file" in child.last_words()


async def ask(child: Child) -> dict[str, str]:
    host, port = child.ready["http"]
    async with aiohttp.ClientSession() as session, session.get(f"http://{host}:{port}/status") as response:
        found = json.loads(await response.text())
    assert isinstance(found, dict)
    return found
