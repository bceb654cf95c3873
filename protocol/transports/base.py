"""The contract between sessions and whatever carries their frames."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from protocol.errors import SentinelError
from protocol.framing import BodyLimit, Buffer, Frame, FrameKind
from protocol.messages import Method, StreamKind
from protocol.records import Record


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request as its handler sees it. ``peer`` is authenticated by the transport."""

    peer: str
    method: Method
    head: Mapping[str, Any]
    body: Buffer = b""
    address: str = ""
    """The multiaddr that the peer's connection comes from, where the transport knows it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Response:
    """What a handler answers, and what a caller gets. Body buffers are sent one after another."""

    head: Mapping[str, Any] = field(default_factory=dict)
    body: Sequence[Buffer] = ()

    @property
    def data(self) -> Buffer:
        """The body of a received response (one buffer)."""
        return self.body[0] if self.body else b""


Handler = Callable[[Request], Awaitable[Response]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """How a node serves one method."""

    handler: Handler
    body_limit: int = 0
    """Largest body in bytes that a request of this method may announce."""
    admits: Callable[[str], bool] = lambda peer: True
    """Whether this peer may ask at all; judged before the body is allocated."""


class Observer:
    """Is told what happens on the wire; the default does nothing. Metrics subclass it."""

    def bytes_moved(self, direction: str, stream: StreamKind, count: int) -> None:
        """``count`` bytes went ``in`` or ``out``."""

    def request_done(self, method: str, outcome: str) -> None:
        """A request that this node made ended as ``ok`` or with the name of an error."""

    def remote_error(self, peer: str, error: SentinelError) -> None:
        """A peer broke a rule."""

    def clock_offset(self, peer: str, seconds: float) -> None:
        """The peer's clock is ``seconds`` ahead of ours."""


class RecordKeeper(ABC):
    """Where signed records are published and looked up."""

    @abstractmethod
    async def store(self, data: bytes) -> bool:
        """Publish one signed record under its own key; false if nobody took it."""

    @abstractmethod
    def restrict(self, check: Callable[[Record], None]) -> None:
        """Keep and believe only records for which ``check`` does not raise RecordError."""

    @abstractmethod
    async def fetch(self, keys: Sequence[str]) -> list[tuple[Record, bytes]]:
        """Every valid record under the keys, with its signed bytes."""


class Link(ABC):
    """One ordered two-way stream of frames to one authenticated peer."""

    peer: str
    address: str = ""
    """The multiaddr of the other end, where it is known."""

    @abstractmethod
    def start(
        self,
        body_limit: BodyLimit,
        on_frame: Callable[[Frame], None],
        on_closed: Callable[[SentinelError], None],
    ) -> None:
        """Begin to deliver frames; ``on_closed`` is called once, with the reason."""

    @abstractmethod
    def send(self, kind: FrameKind, head: Mapping[str, Any], body: Sequence[Buffer] = ()) -> int:
        """Queue one frame; return its size in bytes. Buffers must not change until drained.

        Raises:
            PeerGoneError: the link is closed.
            FrameError: the frame is over a limit.
        """

    @abstractmethod
    async def drain(self) -> None:
        """Wait until there is room for more.

        Raises:
            PeerGoneError: the link closed meanwhile.
        """

    @abstractmethod
    def pause(self) -> None:
        """Stop delivering frames, so that the sender is held back."""

    @abstractmethod
    def resume(self) -> None:
        """Deliver frames again."""

    @abstractmethod
    def close(self) -> None:
        """Close now; frames that are still queued may be lost."""
