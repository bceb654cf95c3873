"""From the words of an ERROR frame to a typed error."""

from __future__ import annotations

from protocol.errors import (
    FrameError,
    MessageError,
    ProtocolVersionError,
    RefusedError,
    RemoteError,
    SwarmMismatchError,
)


def remote_error(kind: str, message: str) -> RemoteError:
    """The typed error for an ERROR frame with this kind."""
    for error in (ProtocolVersionError, SwarmMismatchError, FrameError, MessageError):
        if kind == error.default_kind:
            return error(message)
    return RefusedError(message, kind=kind)
