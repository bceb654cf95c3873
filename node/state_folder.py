"""A node's state folder: who uses it, where its files are, and writing them whole or not at all.

The folder holds the identity, the last good peers, the verdicts about peers, what was contributed, the checkpoints
and what runs left to read. One process uses it at a time: a lock, which the kernel drops when that process ends in
whatever way, keeps a second one out.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import stat
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, Final, Self

from protocol.errors import AddressError, StateFolderError
from protocol.invite import parse_multiaddr

log = logging.getLogger(__name__)

ENVIRONMENT: Final = "SENTINEL_STATE_DIR"
FOLDER_NAME: Final = "sentinel-swarm"

UNFINISHED: Final = ".part"
"""How the names of files end that are being written."""

MAX_CACHED_PEERS: Final = 64
"""Enough to find a swarm again when most of them have left."""

MAX_PEERS_BYTES: Final = 64 * 1024
"""64 addresses of 400 characters, and room; a larger file is not one that this project wrote."""


class StateFolder:
    """The folder of one node, locked from ``open`` (or ``with``) to ``close``."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: int | None = None

    @staticmethod
    def resolve(option: Path | str | None = None, environment: Mapping[str, str] | None = None) -> Path:
        """The folder to use: the option, else SENTINEL_STATE_DIR, else the platform's data folder."""
        environment = os.environ if environment is None else environment
        if chosen := str(option or environment.get(ENVIRONMENT) or ""):
            return Path(chosen).expanduser().absolute()
        if sys.platform == "darwin":
            return Path.home() / "Library" / "Application Support" / FOLDER_NAME
        data = Path(environment.get("XDG_DATA_HOME", ""))
        # The XDG specification has relative paths ignored.
        return (data if data.is_absolute() else Path.home() / ".local" / "share") / FOLDER_NAME

    @property
    def identity_path(self) -> Path:
        """The key file."""
        return self.path / "identity.key"

    @property
    def peers_path(self) -> Path:
        """The cache of the last good peers."""
        return self.path / "peers.json"

    @property
    def verdicts_path(self) -> Path:
        """What this node and its swarm hold against peers."""
        return self.path / "verdicts.json"

    @property
    def copies_path(self) -> Path:
        """The folder of copies of other nodes' checkpoints, of all swarms."""
        return self.path / "copies"

    @property
    def checkpoints_path(self) -> Path:
        """The folder of the checkpoints, of all swarms."""
        return self.path / "checkpoints"

    @property
    def summary_path(self) -> Path:
        """What the last run did."""
        return self.path / "summary.json"

    # who uses it ---------------------------------------------------------------------

    def open(self) -> Self:
        """Create the folder if need be (only its owner may enter) and lock it.

        Raises:
            StateFolderError: it cannot be made or used, or another process is using it.
        """
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            mode = self.path.stat().st_mode
            if mode & stat.S_IWOTH:
                raise StateFolderError(
                    f"every user can write to the state folder {self.path}; run: chmod 700 {self.path}"
                )
            # Python opens files so that children do not inherit them: p2pd cannot keep the lock.
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise self._unusable(error) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
            os.close(lock)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise self._unusable(error) from None
            who = f"process {holder}" if holder.isdigit() else "another process"
            raise StateFolderError(
                f"state folder {self.path} is in use by {who}; stop it or pass --state-dir"
            ) from None
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
        self._lock = lock
        return self

    def in_use(self) -> bool:
        """Whether some process has it open now."""
        try:
            lock = os.open(self.path / "lock", os.O_RDWR | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return True
        finally:
            os.close(lock)
        return False

    def close(self) -> None:
        """Unlock the folder. The lock file stays, since removing it would let two processes in."""
        if self._lock is not None:
            lock, self._lock = self._lock, None
            with contextlib.suppress(OSError):
                os.ftruncate(lock, 0)
            os.close(lock)

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _unusable(self, error: OSError) -> StateFolderError:
        return StateFolderError(
            f"state folder {self.path} cannot be used: {error.strerror}; name another by --state-dir"
        )

    # what is in it -------------------------------------------------------------------

    def write_json(self, name: str, value: object) -> None:
        """Write a file of the folder as JSON, whole or not at all.

        Raises:
            OSError: the disk is full, or the folder is gone.
        """
        write_atomically(self.path / name, json.dumps(value, default=str).encode())

    def read(self, name: str, *, at_most: int) -> bytes:
        """The content of a file of the folder.

        Raises:
            FileNotFoundError: there is none.
            OSError: it cannot be read.
            ValueError: it has more than ``at_most`` bytes; no more than that are read.
        """
        with (self.path / name).open("rb") as file:
            data = file.read(at_most + 1)
        if len(data) > at_most:
            raise ValueError(f"it has more than {at_most} bytes")
        return data

    def set_aside(self, name: str) -> Path:
        """Keep a damaged file as NAME.damaged, in place of an older one, and return where it is now.

        Raises:
            OSError: it cannot be renamed.
        """
        aside = self.path / f"{name}.damaged"
        os.replace(self.path / name, aside)
        return aside

    def save_peers(self, addresses: Iterable[str]) -> None:
        """Remember addresses of live peers, newest first, for the next start. No addresses change nothing."""
        if kept := list(dict.fromkeys(addresses))[:MAX_CACHED_PEERS]:
            self.write_json("peers.json", {"peers": kept})

    def load_peers(self) -> list[str]:
        """The remembered addresses that are still well-formed; a damaged file is as good as none."""
        try:
            found = json.loads(self.read("peers.json", at_most=MAX_PEERS_BYTES))["peers"]
            if not isinstance(found, list):
                raise ValueError("it holds no list")
        except FileNotFoundError:
            return []
        except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
            log.warning("the peer cache %s is ignored: %s", self.peers_path, error)
            return []
        addresses: dict[str, None] = {}
        for entry in found[:MAX_CACHED_PEERS]:
            with contextlib.suppress(AddressError):
                addresses[parse_multiaddr(entry if isinstance(entry, str) else "").text] = None
        return list(addresses)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file by new content (mode 0600), so that a crash leaves either the old or the new one.

    Raises:
        OSError: as from writing.
    """
    with replacing(path) as file:
        file.write(data)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A new file (mode 0600) that takes the place of ``path`` once the block has ended well and all is on the disk.

    A crash leaves the old file, or the new one whole, and perhaps a temporary one; see ``remove_unfinished``.

    Raises:
        OSError: as from writing. The old file is still there.
    """
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=UNFINISHED)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise
    _sync_folder(path.parent)


def remove_unfinished(folder: Path) -> None:
    """Remove what a process left that was killed while it wrote. For a folder that no other process writes to."""
    for left in folder.glob(f".*{UNFINISHED}"):
        with contextlib.suppress(OSError):
            left.unlink()


def _sync_folder(folder: Path) -> None:
    """Make a rename last. Some file systems cannot; the file itself is safe on all of them."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
