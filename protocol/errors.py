"""The project's one tree of errors.

Every message is one line that says what happened and what to do. ``exit_code`` is what a command exits
with when the error reaches its top level. A ``RemoteError`` is something that a peer did wrong, and its
``kind`` is a short word from a bounded set, fit for a metric label and for a strike.
"""

from __future__ import annotations

from typing import ClassVar


class SentinelError(Exception):
    """Anything this project raises on purpose."""

    exit_code: ClassVar[int] = 1


class UsageError(SentinelError):
    """The user gave something wrong."""

    exit_code = 2


class InviteError(UsageError):
    """An invite line that cannot be read."""


class AddressError(UsageError):
    """A multiaddr or a peer id that cannot be read."""


class ManifestError(UsageError):
    """A manifest that cannot be read, contradicts itself, or is not the one that was asked for."""


class SettingsError(UsageError):
    """A setting (option, environment variable) with a wrong value."""


class LocalError(SentinelError):
    """Something on this machine is not as it has to be."""


class IdentityError(LocalError):
    """The key file is missing, damaged, unreadable or readable by others."""


class StateFolderError(LocalError):
    """The state folder cannot be used, or another node is using it."""


class PortInUseError(LocalError):
    """The listening port belongs to another process."""

    exit_code = 5


class DataSourceError(LocalError):
    """The training data or the tokenizer cannot be read, or is not the one that the manifest names."""

    exit_code = 5


class MemoryTooSmallError(LocalError):
    """No stage fits this device."""

    exit_code = 5


class EjectedError(SentinelError):
    """The swarm has ejected this node."""

    exit_code = 3


class AdmissionError(SentinelError):
    """The swarm does not admit this node."""

    exit_code = 4


class PreflightError(SentinelError):
    """A check before the start failed."""

    exit_code = 5


class TransportError(SentinelError):
    """The connection failed; says nothing about whether the peer is honest."""


class PeerUnreachableError(TransportError):
    """No address of the peer answered."""


class PeerGoneError(TransportError):
    """The connection to the peer ended while something was still expected from it."""


class CallTimeoutError(TransportError):
    """The peer did not answer in time."""


class RemoteError(SentinelError):
    """The peer did something wrong. ``kind`` is a short word from a bounded set (a metric label)."""

    default_kind: ClassVar[str] = "remote"

    kind: str

    def __init__(self, message: str = "", *, kind: str | None = None) -> None:
        super().__init__(message)
        self.kind = self.default_kind if kind is None else kind


class ProtocolVersionError(RemoteError):
    """The peer speaks another version of the protocol."""

    default_kind = "version"


class SwarmMismatchError(RemoteError):
    """The peer belongs to another swarm."""

    default_kind = "swarm"


class FrameError(RemoteError):
    """The bytes on a stream are not frames."""

    default_kind = "frame"


class MessageError(RemoteError):
    """A frame does not hold a message of the right shape."""

    default_kind = "message"


class TensorError(RemoteError):
    """An encoded tensor has the wrong shape, dtype or size."""

    default_kind = "tensor"


class RecordError(RemoteError):
    """A DHT record is malformed, badly signed, foreign or out of date."""

    default_kind = "record"


class RefusedError(RemoteError):
    """The peer refused a call; ``kind`` is the reason that it gave."""

    default_kind = "refused"
