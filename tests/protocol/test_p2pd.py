"""The libp2p daemon is a well-behaved child: it reports its troubles and never outlives its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from protocol.errors import LocalError, PeerGoneError, PortInUseError, SentinelError, SettingsError
from protocol.identity import Identity
from protocol.messages import Empty, Method
from protocol.transports.base import Request, Response
from protocol.transports.p2pd import Daemon, DaemonOptions
from protocol.transports.ports import check_port_free
from tests.protocol.peers import NOBODY, PATIENCE, P2PPeers, becomes, serve, until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    """A started p2pd."""
    path = tmp_path / "node.key"
    Identity.load_or_create(path)
    made = Daemon(DaemonOptions(identity_path=str(path)))
    await made.start()
    yield made
    await made.stop()


async def test_a_daemon_has_the_identity_of_its_key_file_and_listens_where_it_says(
    daemon: Daemon, tmp_path: Path
) -> None:
    identity = Identity.load(tmp_path / "node.key")
    assert str(daemon.p2p.peer_id) == identity.peer_id
    (address,) = await daemon.addresses()
    assert address.startswith("/ip4/127.0.0.1/tcp/") and address.endswith(f"/p2p/{identity.peer_id}")
    with socket.create_connection(("127.0.0.1", int(address.split("/")[4])), timeout=PATIENCE):
        pass


async def test_sockets_lie_in_a_private_folder_that_goes_away(tmp_path: Path) -> None:
    Identity.load_or_create(tmp_path / "node.key")
    daemon = Daemon(DaemonOptions(identity_path=str(tmp_path / "node.key")))
    await daemon.start()
    folder, pid = Path(daemon.folder), daemon.pid
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(daemon.control_path) <= 107
    assert pid is not None and os.getsid(pid) == pid  # Ctrl-C in the terminal does not reach it
    await daemon.stop()
    assert not folder.exists() and not psutil.pid_exists(pid) and daemon.pid is None
    await daemon.stop()  # twice does no harm


async def test_a_port_in_use_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"port {port}.*--port") as caught:
            check_port_free("127.0.0.1", port)
        assert caught.value.exit_code == 5
        daemon = Daemon(DaemonOptions(identity_path=str(tmp_path / "none.key"), port=port))
        with pytest.raises(PortInUseError):
            await daemon.start()
        assert daemon.pid is None and daemon.folder == ""
    assert check_port_free("127.0.0.1", port) == port
    assert check_port_free("127.0.0.1", 0) > 0


async def test_a_port_of_another_daemon_is_in_use(daemon: Daemon) -> None:
    (address,) = await daemon.addresses()
    with pytest.raises(PortInUseError):
        check_port_free("127.0.0.1", int(address.split("/")[4]))


async def test_a_daemon_that_cannot_start_says_why_and_leaves_nothing(tmp_path: Path) -> None:
    exits: list[int] = []
    (tmp_path / "bad.key").write_bytes(b"no key")
    daemon = Daemon(DaemonOptions(identity_path=str(tmp_path / "bad.key")), on_exit=exits.append)
    with pytest.raises(LocalError, match="while starting") as caught:
        await daemon.start()
    assert "\n" not in str(caught.value)
    assert daemon.pid is None and not Path(daemon.folder).exists() and exits == []


async def test_a_daemon_that_does_not_come_up_in_time_is_ended(tmp_path: Path) -> None:
    Identity.load_or_create(tmp_path / "node.key")
    daemon = Daemon(DaemonOptions(identity_path=str(tmp_path / "node.key"), start_seconds=0.0))
    with pytest.raises(LocalError, match="try again"):
        await daemon.start()
    assert daemon.pid is None and not Path(daemon.folder).exists()


async def test_a_dial_comes_from_a_port_of_its_own(p2p_peers: P2PPeers) -> None:
    # From the listening port, two dials in one moment would be one connection on which both sides begin to speak.
    one, two = await p2p_peers.pair()
    from_: list[str] = []

    async def note(request: Request) -> Response:
        from_.append(request.address)
        return Response()

    serve(two, Method.VIEW, note)
    await one.call(two.peer_id, Method.VIEW, Empty(), timeout=PATIENCE)
    (listening,) = await p2p_peers.daemons[one.peer_id].addresses()
    (address,) = from_
    assert address.startswith("/ip4/127.0.0.1/tcp/")
    assert address.split("/")[4] != listening.split("/")[4]


async def test_stopping_a_daemon_is_no_exit_to_report(p2p_peers: P2PPeers) -> None:
    await p2p_peers.peer()
    for daemon in p2p_peers.daemons.values():
        await daemon.stop()
    assert p2p_peers.exits == []


async def test_the_death_of_the_daemon_is_reported_and_ends_every_call(p2p_peers: P2PPeers) -> None:
    one, two = await p2p_peers.peer(), await p2p_peers.peer()
    started, ended = asyncio.Event(), asyncio.Event()

    async def handler(request: Request) -> Response:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return Response()

    serve(two, Method.AGGREGATE, handler)
    serve(two, Method.VIEW)
    await one.connect(two.peer_id, timeout=PATIENCE)
    gone = asyncio.Event()
    one.on_peer_gone(lambda peer: gone.set())
    call = asyncio.create_task(one.call(two.peer_id, Method.AGGREGATE, Empty(), timeout=PATIENCE))
    await until(started)
    own = p2p_peers.daemons[one.peer_id]
    assert own.pid is not None
    os.kill(own.pid, signal.SIGKILL)
    with pytest.raises(PeerGoneError):
        await call
    await until(gone)
    await until(ended)  # the other side notices as well
    await becomes(lambda: bool(p2p_peers.exits))
    assert p2p_peers.exits == [-signal.SIGKILL]
    for peer in (two.peer_id, NOBODY):
        with pytest.raises(SentinelError) as caught:
            await one.call(peer, Method.VIEW, Empty(), timeout=PATIENCE)
        assert "\n" not in str(caught.value)


async def test_killing_a_daemon_at_once_removes_its_folder(tmp_path: Path) -> None:
    Identity.load_or_create(tmp_path / "node.key")
    daemon = Daemon(DaemonOptions(identity_path=str(tmp_path / "node.key")))
    await daemon.start()
    pid = daemon.pid
    assert pid is not None
    daemon.kill_now()
    assert not Path(daemon.folder).exists()
    await daemon.stop()
    assert not psutil.pid_exists(pid)


SCRIPT = """
import asyncio, sys
from protocol.transports.p2pd import Daemon, DaemonOptions

async def main():
    daemon = Daemon(DaemonOptions(identity_path=sys.argv[1]))
    await daemon.start()
    print(daemon.pid, daemon.folder, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_the_daemon_dies_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    Identity.load_or_create(tmp_path / "node.key")
    parent = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "node.key")],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)},
    )
    assert parent.stdout is not None
    try:
        daemon = psutil.Process(int(parent.stdout.readline().split()[0]))
        assert daemon.is_running() and "p2pd" in daemon.name()
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    gone, alive = psutil.wait_procs([daemon], timeout=PATIENCE)
    assert not alive and gone


async def test_a_folder_that_a_killed_node_left_behind_is_removed_by_its_next_start(tmp_path: Path) -> None:
    Identity.load_or_create(tmp_path / "node.key")
    note, left, other = tmp_path / "note", tmp_path / "sentinel-left", tmp_path / "other"
    for folder in (left, other):
        folder.mkdir()
    options = DaemonOptions(identity_path=str(tmp_path / "node.key"), note_path=str(note))
    for noted in (left, other):
        note.write_text(str(noted))
        daemon = Daemon(options)
        await daemon.start()
        assert note.read_text() == daemon.folder
        await daemon.stop()
        assert not note.exists()
    assert not left.exists()
    assert other.exists()  # whatever a note says, only a folder for sockets is ever removed


async def test_sockets_go_among_the_temporary_files_where_the_runtime_folder_is_anothers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Identity.load_or_create(tmp_path / "node.key")
    for unusable in (tmp_path / "missing", tmp_path / ("deep" * 20)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(unusable))
        daemon = Daemon(DaemonOptions(identity_path=str(tmp_path / "node.key")))
        await daemon.start()
        assert Path(daemon.folder).parent == Path(tempfile.gettempdir())
        await daemon.stop()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with pytest.raises(LocalError, match=r"no folder for sockets can be made .* set TMPDIR"):
        await daemon.start()


@pytest.mark.parametrize("host", ["192.0.2.1", "2001:db8::1"])
def test_an_address_of_another_machine_is_told_from_a_port_in_use(host: str) -> None:
    with pytest.raises(SettingsError, match="correct --host"):
        check_port_free(host, 0)
