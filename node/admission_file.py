"""The admissions in a state folder: one line of base64 each, written by ``sentinel admit`` and by nodes.

The command and a node may use the file at the same time, so each holds a lock of its own while it writes. Lines are
only added, until the file has grown so much that old ones are dropped. What is read is checked by whoever uses it.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from node.state_folder import write_atomically
from protocol.admissions import MAX_KNOWN, Admission, Roll, peek_admission
from protocol.errors import RecordError, StateFolderError
from protocol.manifest import Manifest
from protocol.messages import MAX_ADMISSION_BYTES

NAME = "admissions"
MAX_LINES = 4 * MAX_KNOWN
"""From so many lines on only the newest admission of each peer is kept."""
MAX_LINE_BYTES = 4 * -(-MAX_ADMISSION_BYTES // 3) + 1
MAX_FILE_BYTES = 2 * MAX_LINES * MAX_LINE_BYTES


class AdmissionFile:
    """The file of one state folder, which need not be locked, nor exist."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / NAME
        self._seen: tuple[int, int, int] | None = None

    def read(self) -> list[bytes]:
        """Every admission in the file, oldest first; lines that are none are passed over.

        Raises:
            StateFolderError: the file is there and cannot be read.
        """
        try:
            with self.path.open("rb") as file:
                data = file.read(MAX_FILE_BYTES)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StateFolderError(f"cannot read {self.path}: {error.strerror}; check who owns it") from None
        found = (_decoded(line) for line in data.split(b"\n"))
        return [admission for admission in found if admission is not None]

    def changed(self) -> bool:
        """Whether the file is another one than at the last call; a look at its date costs next to nothing."""
        try:
            status = self.path.stat()
        except OSError:
            return False
        now = (status.st_mtime_ns, status.st_size, status.st_ino)
        changed, self._seen = now != self._seen, now
        return changed

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Nobody else writes during the block.

        Raises:
            StateFolderError: the folder cannot be used.
        """
        try:
            lock = os.open(self.path.with_name(f"{NAME}.lock"), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise StateFolderError(
                f"state folder {self.path.parent} cannot be used: {error.strerror}; name another by --state-dir"
            ) from None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)

    def add(self, admissions: Iterable[bytes]) -> None:
        """Keep those that are not there yet.

        Raises:
            StateFolderError, OSError: the file cannot be written.
        """
        with self.locked():
            self.append(admissions)

    def append(self, admissions: Iterable[bytes]) -> None:
        """As ``add``, for whoever holds the lock."""
        there = self.read()
        known = set(there)
        new = [admission for admission in admissions if admission not in known]
        if not new:
            return
        if len(there) + len(new) > MAX_LINES:
            write_atomically(self.path, _lines(_newest([*there, *new])))
            return
        descriptor = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            # What a crash cut short becomes a line of its own, which is passed over.
            size = os.fstat(descriptor).st_size
            torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            os.write(descriptor, b"\n" * torn + _lines(new))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def known_here(file: AdmissionFile, manifest: Manifest, now: float) -> Roll:
    """What the file says about the swarm of a manifest. Raises StateFolderError if it cannot be read."""
    roll = Roll(swarm=bytes.fromhex(manifest.swarm_id), coordinator=manifest.admission.coordinator)
    for data in file.read():
        with contextlib.suppress(RecordError):  # of another swarm, or damaged
            roll.take(data, now)
    return roll


def _lines(admissions: Iterable[bytes]) -> bytes:
    return b"".join(base64.b64encode(admission) + b"\n" for admission in admissions)


def _decoded(line: bytes) -> bytes | None:
    with contextlib.suppress(binascii.Error):
        admission = base64.b64decode(line, validate=True)
        return admission if 0 < len(admission) <= MAX_ADMISSION_BYTES else None
    return None


def _newest(admissions: Iterable[bytes]) -> list[bytes]:
    """The newest of each swarm and peer, and of those the newest; what is no admission goes."""
    found: dict[tuple[bytes, str], tuple[Admission, bytes]] = {}
    for data in admissions:
        with contextlib.suppress(RecordError):
            admission = peek_admission(data)
            known = found.get((admission.swarm, admission.peer))
            if known is None or known[0].serial < admission.serial:
                found[admission.swarm, admission.peer] = admission, data
    newest = sorted(found.values(), key=lambda entry: entry[0].issued)
    return [data for _, data in newest[-MAX_LINES // 2 :]]
