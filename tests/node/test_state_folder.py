"""One node a folder, files whole or not at all, and a damaged cache is no reason to stop."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from node.state_folder import MAX_CACHED_PEERS, MAX_PEERS_BYTES, StateFolder, write_atomically
from protocol.errors import StateFolderError
from protocol.identity import Identity

HOLD_THE_FOLDER = """
import sys
from pathlib import Path
from node.state_folder import StateFolder
with StateFolder(Path(sys.argv[1])):
    print("locked", flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two addresses with real peer ids."""
    folder = tmp_path_factory.mktemp("keys")
    peers = [Identity.load_or_create(folder / name).peer_id for name in ("a", "b")]
    return [f"/ip4/192.0.2.{number}/tcp/31337/p2p/{peer}" for number, peer in enumerate(peers, start=1)]


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    """An unlocked folder that exists."""
    with StateFolder(tmp_path / "state") as made:
        pass
    return made


def hold(path: Path) -> subprocess.Popen[str]:
    """Another process that uses the folder until its stdin ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD_THE_FOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "locked\n"
    return process


# where it is -------------------------------------------------------------------------


def test_the_option_wins_over_the_environment_and_that_over_the_platform(tmp_path: Path) -> None:
    environment = {"SENTINEL_STATE_DIR": "/from/environment", "XDG_DATA_HOME": "/xdg"}
    assert StateFolder.resolve(tmp_path, environment) == tmp_path
    assert StateFolder.resolve(None, environment) == Path("/from/environment")
    assert StateFolder.resolve("~/here", environment) == Path.home() / "here"


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has another data folder")
def test_the_platform_folder_follows_xdg() -> None:
    assert StateFolder.resolve(None, {"XDG_DATA_HOME": "/xdg"}) == Path("/xdg/sentinel-swarm")
    default = Path.home() / ".local/share/sentinel-swarm"
    assert StateFolder.resolve(None, {}) == default
    assert StateFolder.resolve(None, {"XDG_DATA_HOME": "relative", "SENTINEL_STATE_DIR": ""}) == default


# who uses it -------------------------------------------------------------------------


def test_a_new_folder_is_for_its_owner_alone(tmp_path: Path) -> None:
    with StateFolder(tmp_path / "deep" / "state") as folder:
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
        assert (folder.path / "lock").read_text() == f"{os.getpid()}\n"


def test_a_folder_in_use_names_the_process(folder: StateFolder) -> None:
    process = hold(folder.path)
    try:
        with pytest.raises(StateFolderError) as refused:
            folder.open()
        text = str(refused.value)
        assert text == (f"state folder {folder.path} is in use by process {process.pid}; stop it or pass --state-dir")
        assert refused.value.exit_code == 1
    finally:
        process.communicate()
    with folder:
        pass


def test_a_killed_process_leaves_the_folder_free(folder: StateFolder) -> None:
    process = hold(folder.path)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with folder:
        assert (folder.path / "lock").read_text() == f"{os.getpid()}\n"


def test_one_process_cannot_use_a_folder_twice_either(folder: StateFolder) -> None:
    with folder, pytest.raises(StateFolderError, match=f"in use by process {os.getpid()};"):
        StateFolder(folder.path).open()


def test_children_do_not_keep_the_lock(folder: StateFolder) -> None:
    with folder:
        child = subprocess.Popen(
            [sys.executable, "-c", "print(flush=True); input()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            close_fds=False,
        )
        assert child.stdout is not None
        child.stdout.readline()  # it runs, so what is not inherited is closed
    try:
        with folder:
            pass
    finally:
        child.communicate(b"\n")


def test_closing_twice_is_harmless(folder: StateFolder) -> None:
    folder.open()
    folder.close()
    folder.close()


def test_a_folder_that_all_users_can_write_to_is_refused(folder: StateFolder) -> None:
    folder.path.chmod(0o777)
    with pytest.raises(StateFolderError, match="chmod 700"):
        folder.open()


@pytest.mark.parametrize("below", ["", "state"])
def test_a_file_in_the_way_is_reported_in_one_line(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("here")
    with pytest.raises(StateFolderError, match="cannot be used") as refused:
        StateFolder(tmp_path / "file" / below).open()
    assert "\n" not in str(refused.value)


# what is in it -----------------------------------------------------------------------


def test_peers_come_back_once_each_and_in_order(folder: StateFolder, addresses: list[str]) -> None:
    folder.save_peers([*addresses, addresses[0]])
    assert folder.load_peers() == addresses


def test_no_cache_is_no_peers(folder: StateFolder) -> None:
    assert folder.load_peers() == []


def test_no_live_peers_do_not_erase_the_known_ones(folder: StateFolder, addresses: list[str]) -> None:
    folder.save_peers(addresses)
    folder.save_peers([])
    assert folder.load_peers() == addresses


def test_the_cache_is_bounded(folder: StateFolder, addresses: list[str]) -> None:
    folder.save_peers(addresses[0].replace("31337", str(port)) for port in range(1, 500))
    assert len(folder.load_peers()) == MAX_CACHED_PEERS


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'{"peers": 3}',
        b'{"peers": {"a": 1}}',
        b"\xff\xfe\x00",
        b"[" * 5000,
        b'{"peers": []}' + b" " * MAX_PEERS_BYTES,
    ],
)
def test_a_damaged_cache_is_ignored_with_a_warning(
    folder: StateFolder, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    folder.peers_path.write_bytes(content)
    assert folder.load_peers() == []
    assert "is ignored" in caplog.text


def test_wrong_entries_of_the_cache_are_left_out(folder: StateFolder, addresses: list[str]) -> None:
    entries = [7, None, "nonsense", "/ip4/1.2.3.4/tcp/99999/p2p/x", "a" * 3000, addresses[1]]
    folder.peers_path.write_text(json.dumps({"peers": entries}))
    assert folder.load_peers() == [addresses[1]]


def test_json_is_written_whole_or_not_at_all(folder: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.write_json("summary.json", {"steps": 1, "path": Path("x")})

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        folder.write_json("summary.json", {"steps": 2})
    assert json.loads(folder.summary_path.read_text())["steps"] == 1
    assert sorted(path.name for path in folder.path.iterdir()) == ["lock", "summary.json"]


def test_written_files_are_private(tmp_path: Path) -> None:
    write_atomically(tmp_path / "file", b"content")
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_no_more_is_read_than_was_allowed(folder: StateFolder) -> None:
    (folder.path / "file").write_bytes(b"12345")
    assert folder.read("file", at_most=5) == b"12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        folder.read("file", at_most=4)
    with pytest.raises(FileNotFoundError):
        folder.read("none", at_most=4)


def test_a_damaged_file_is_kept_under_another_name(folder: StateFolder) -> None:
    assert folder.verdicts_path == folder.path / "verdicts.json"
    for text in ("first", "second"):
        folder.verdicts_path.write_text(text)
        aside = folder.set_aside("verdicts.json")
        assert (aside.name, aside.read_text()) == ("verdicts.json.damaged", text)
        assert not folder.verdicts_path.exists()
    with pytest.raises(FileNotFoundError):
        folder.set_aside("verdicts.json")
