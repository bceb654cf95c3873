"""The libp2p daemon (p2pd, shipped with hivemind) as a child of this process.

Started by us and not by hivemind, so that Ctrl-C in a terminal does not kill it before the
node has said goodbye, its sockets live in a private folder that goes away with it, it dies
with this process, and its own death is noticed at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from protocol.errors import LocalError
from protocol.transports.deathsignal import die_with_parent
from protocol.transports.hivemind_parts import P2P, Multiaddr
from protocol.transports.ports import check_port_free

FOLDER_PREFIX = "sentinel-"
MAX_FOLDER_BYTES = 79
"""Of the 107 bytes that the path of a unix socket may have; the names of the sockets take the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonOptions:
    """How p2pd is started."""

    identity_path: str
    host: str = "127.0.0.1"
    port: int = 0
    """TCP port; 0 lets the operating system choose a free one."""
    announce: Sequence[str] = ()
    """Multiaddrs under which others reach this node, where they differ from the listening ones."""
    reach: bool = False
    """Whether to use NAT port mapping, AutoNAT and relays; off on a private network."""
    note_path: str = ""
    """A file of this node alone, in which the socket folder is noted, so that the next start can remove a folder
    that was left behind by a process that was killed. None if empty."""
    start_seconds: float = 30.0


class Daemon:
    """A running p2pd and hivemind's client of it."""

    def __init__(self, options: DaemonOptions, on_exit: Callable[[int], None] | None = None) -> None:
        self._options = options
        self._on_exit = on_exit
        self._process: asyncio.subprocess.Process | None = None
        self._reader: asyncio.Task[None] | None = None
        self._folder = ""
        self._stopping = False
        self._lines: deque[str] = deque(maxlen=50)
        self.p2p: Any = None

    @property
    def control_path(self) -> str:
        """Path of the control socket."""
        return f"{self._folder}/p2pd.sock"

    @property
    def folder(self) -> str:
        """Private folder (0700) for sockets; removed by ``stop``."""
        return self._folder

    @property
    def pid(self) -> int | None:
        """Process id while the daemon runs."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def start(self) -> None:
        """Start p2pd and attach to it.

        Raises:
            PortInUseError: the listening port is taken.
            SettingsError: this machine cannot listen on that address.
            LocalError: p2pd ended or did not come up in time; holds its last line.
        """
        options = self._options
        port = check_port_free(options.host, options.port)
        self._remove_left_behind()
        self._folder = _make_folder()
        try:
            self._note()
            await self._launch(port)
        except BaseException:
            await self.stop()
            raise

    async def _launch(self, port: int) -> None:
        # Each dial from a port of its own. From the listening port, two nodes that dial each other in the same moment
        # would share one TCP connection on which both begin to speak, fail, and wait for seconds (docs/decisions/0023).
        options = self._options
        protocol = "ip6" if ":" in options.host else "ip4"
        flag = "1" if options.reach else "0"
        arguments = [
            str(files("hivemind.hivemind_cli") / "p2pd"),
            f"-listen=/unix{self.control_path}",
            f"-id={options.identity_path}",
            f"-hostAddrs=/{protocol}/{options.host}/tcp/{port}",
            "-dhtServer=1",
            f"-autonat={flag}",
            f"-natPortMap={flag}",
            f"-relay={flag}",
            f"-autoRelay={flag}",
            "-idleTimeout=30s",
        ]
        if options.announce:
            arguments.append(f"-announceAddrs={','.join(options.announce)}")
        self._process = await asyncio.create_subprocess_exec(
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "GOLOG_LOG_LEVEL": "error", "LIBP2P_TCP_REUSEPORT": "false"},
            preexec_fn=die_with_parent,
            start_new_session=True,
        )
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._reader = asyncio.get_running_loop().create_task(self._read(self._process, ready))
        try:
            async with asyncio.timeout(options.start_seconds):
                await asyncio.shield(ready)
        except TimeoutError:
            raise LocalError(
                f"p2pd did not start in {options.start_seconds:.0f} s; the machine may be overloaded, try again"
            ) from None
        # hivemind keeps the folder of its own socket in a class attribute; a subclass per daemon
        # leaves the shared one alone.
        attached: Any = type("AttachedP2P", (P2P,), {"_UNIX_SOCKET_PREFIX": f"/unix{self._folder}/"})
        self.p2p = await attached.replicate(Multiaddr(f"/unix{self.control_path}"))

    async def _read(self, process: asyncio.subprocess.Process, ready: asyncio.Future[None]) -> None:
        assert process.stdout is not None
        async for raw in process.stdout:
            line = raw.decode(errors="replace").rstrip()
            self._lines.append(line)
            if line.startswith("Peer ID:") and not ready.done():
                ready.set_result(None)
        code = await process.wait()
        if not ready.done():
            last = self._lines[-1] if self._lines else "it said nothing"
            ready.set_exception(LocalError(f"p2pd ended with code {code} while starting: {last[:200]}"))
            ready.exception()
        elif self._on_exit is not None and not self._stopping:
            self._on_exit(code)

    async def addresses(self) -> list[str]:
        """Multiaddrs with the peer id under which this node listens."""
        return [str(address) for address in await self.p2p.get_visible_maddrs(latest=True)]

    def _note(self) -> None:
        if self._options.note_path:
            Path(self._options.note_path).write_text(self._folder, encoding="utf-8")

    def _remove_left_behind(self) -> None:
        """Remove the socket folder of an earlier run that was killed; only the noted one, and only if it is one."""
        if not self._options.note_path:
            return
        note = Path(self._options.note_path)
        with contextlib.suppress(OSError, ValueError):
            folder = Path(note.read_text(encoding="utf-8"))
            mine = folder.lstat().st_uid == os.getuid() and not folder.is_symlink()
            if mine and folder.is_absolute() and folder.name.startswith(FOLDER_PREFIX):
                shutil.rmtree(folder, ignore_errors=True)

    def _remove_folder(self) -> None:
        if not self._folder:
            return
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._options.note_path:
            Path(self._options.note_path).unlink(missing_ok=True)

    def kill_now(self) -> None:
        """End p2pd without waiting and remove its folder: for a node that leaves at once."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        self._remove_folder()

    async def stop(self) -> None:
        """End p2pd and remove its folder. Safe to call twice."""
        self._stopping = True
        if self.p2p is not None:
            p2p, self.p2p = self.p2p, None
            await p2p.shutdown()
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                async with asyncio.timeout(3):
                    await process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()
        if self._reader is not None:
            await asyncio.gather(self._reader, return_exceptions=True)
        await asyncio.to_thread(self._remove_folder)


def _make_folder() -> str:
    """A private folder (0700) for sockets: in the user's runtime folder, else among the temporary files.

    Not below the state folder, whose path may be too long for a socket.

    Raises:
        LocalError: neither can be used.
    """
    problems: list[str] = []
    for parent in filter(None, (os.environ.get("XDG_RUNTIME_DIR"), tempfile.gettempdir())):
        if len(os.fsencode(parent)) + len(FOLDER_PREFIX) + 9 > MAX_FOLDER_BYTES:
            problems.append(f"{parent}: its path is too long for a socket")
            continue
        try:
            return tempfile.mkdtemp(prefix=FOLDER_PREFIX, dir=parent)
        except OSError as error:  # after `su`, XDG_RUNTIME_DIR is another user's
            problems.append(f"{parent}: {error.strerror}")
    raise LocalError(f"no folder for sockets can be made ({'; '.join(problems)}); set TMPDIR to one that you may use")
