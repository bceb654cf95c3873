"""The invite in a file: ``coordinate`` leaves it there, ``join`` and ``status`` take it from there.

So containers and services need no argument of their own, which every user of the machine could read, and a new
invite no new command line.
"""

from __future__ import annotations

import os
from pathlib import Path

from node.state_folder import write_atomically
from protocol.errors import InviteError, LocalError
from protocol.invite import MAX_INVITE_BYTES

ROOM_BYTES = 64
"""For the line break at the end, or whatever else of whitespace an editor leaves."""


def read_invite_file(path: Path) -> str:
    """The invite in a file, not yet parsed.

    Raises:
        InviteError: it cannot be read, is empty, no text, or larger than an invite.
    """
    try:
        with path.open("rb") as file:
            data = file.read(MAX_INVITE_BYTES + ROOM_BYTES + 1)
    except OSError as error:
        raise InviteError(
            f"cannot read the invite file {path}: {error.strerror}; write the line that the coordinator printed there"
        ) from None
    if len(data) > MAX_INVITE_BYTES + ROOM_BYTES:
        raise InviteError(f"the invite file {path} holds more than an invite; leave only that one line in it")
    if not data.strip():
        raise InviteError(f"the invite file {path} is empty; write the line that the coordinator printed there")
    try:
        return data.decode("ascii")
    except UnicodeDecodeError:
        raise InviteError(f"the invite file {path} holds something else than an invite; write it anew") from None


def write_invite_file(path: Path, invite: str) -> None:
    """Leave the invite where nodes on this machine look for it; readable by all, since it holds no secret.

    Raises:
        LocalError: it cannot be written.
    """
    try:
        write_atomically(path, f"{invite}\n".encode())
        os.chmod(path, 0o644)
    except OSError as error:
        raise LocalError(
            f"cannot write the invite file {path}: {error.strerror}; name another by --invite-file"
        ) from None
