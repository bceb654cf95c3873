"""Real peers for the transport tests: the same verbs over memory and over libp2p on loopback."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from protocol import fields
from protocol.errors import SentinelError
from protocol.framing import MAX_BODY_BYTES, Frame, FrameKind
from protocol.identity import Identity
from protocol.messages import Hello, Method, StreamKind
from protocol.transports.base import Link, Observer, Request, Response, Route
from protocol.transports.memory import MemoryLink, MemoryNetwork, MemoryTransport
from protocol.transports.p2p import P2PTransport
from protocol.transports.p2pd import Daemon, DaemonOptions
from protocol.transports.sessions import SessionOptions, Transport

SWARM = b"\x01" * 32
NOBODY = Identity(b"\x7f" * 32).peer_id
PATIENCE = 20.0
"""Seconds that an event may take on a busy machine; no test waits so long when all is well."""


@dataclass
class Recorder(Observer):
    """Remembers what a transport reports."""

    moved: dict[str, int] = field(default_factory=lambda: {"in": 0, "out": 0})
    outcomes: list[tuple[str, str]] = field(default_factory=list)
    errors: list[tuple[str, SentinelError]] = field(default_factory=list)
    offsets: dict[str, float] = field(default_factory=dict)

    def bytes_moved(self, direction: str, stream: StreamKind, count: int) -> None:
        self.moved[direction] += count

    def request_done(self, method: str, outcome: str) -> None:
        self.outcomes.append((method, outcome))

    def remote_error(self, peer: str, error: SentinelError) -> None:
        self.errors.append((peer, error))

    def clock_offset(self, peer: str, seconds: float) -> None:
        self.offsets[peer] = seconds


class Peers(ABC):
    """Makes peers that know each other, and harms them."""

    def __init__(self) -> None:
        self.transports: list[Transport] = []

    async def peer(self, **options: Any) -> Transport:
        """A new peer that every earlier one can reach. ``options`` are those of its sessions."""
        transport = await self._make(SessionOptions(**{"swarm": SWARM, **options}), Recorder())
        self.transports.append(transport)
        await self._introduce()
        return transport

    async def pair(self, **options: Any) -> tuple[Transport, Transport]:
        """Two peers with the same options."""
        return await self.peer(**options), await self.peer(**options)

    async def close(self) -> None:
        """Close everything."""
        await asyncio.gather(*(transport.close() for transport in self.transports))

    @abstractmethod
    async def crash(self, transport: Transport) -> None:
        """End a peer without a goodbye."""

    @abstractmethod
    def freeze(self, transport: Transport) -> None:
        """Make a peer neither read nor write."""

    @abstractmethod
    async def _make(self, options: SessionOptions, observer: Observer) -> Transport: ...

    @abstractmethod
    async def _introduce(self) -> None:
        """Let every peer know where the others are."""


class MemoryPeers(Peers):
    """Peers of one ``MemoryNetwork``."""

    def __init__(self) -> None:
        super().__init__()
        self.network = MemoryNetwork()

    async def _make(self, options: SessionOptions, observer: Observer) -> Transport:
        peer = Identity.generate().peer_id
        return MemoryTransport(self.network, peer, options=options, observer=observer)

    async def _introduce(self) -> None:
        return  # the network knows everybody

    async def crash(self, transport: Transport) -> None:
        self.network.remove(transport.peer_id)
        for other in self.transports:
            if isinstance(other, MemoryTransport):
                other.drop_links(transport.peer_id)

    def freeze(self, transport: Transport) -> None:
        assert isinstance(transport, MemoryTransport)
        for link in transport._links:
            if isinstance(link, MemoryLink):
                link.pause()


class P2PPeers(Peers):
    """Peers with a p2pd each."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.daemons: dict[str, Daemon] = {}
        self.exits: list[int] = []
        self.frozen: set[int] = set()

    async def daemon(self, **options: Any) -> Daemon:
        """A started p2pd with an identity of its own."""
        path = self.folder / f"{len(self.daemons)}.key"
        peer = Identity.load_or_create(path).peer_id
        daemon = Daemon(DaemonOptions(identity_path=str(path), **options), on_exit=self.exits.append)
        self.daemons[peer] = daemon
        await daemon.start()
        return daemon

    async def _make(self, options: SessionOptions, observer: Observer) -> Transport:
        transport = P2PTransport(await self.daemon(), options=options, observer=observer)
        await transport.start()
        return transport

    async def _introduce(self) -> None:
        for transport in self.transports:
            daemon = self.daemons[transport.peer_id]
            if daemon.pid is None:
                continue
            addresses = await daemon.addresses()
            for other in self.transports:
                if isinstance(other, P2PTransport):
                    other.learn(transport.peer_id, addresses)

    async def crash(self, transport: Transport) -> None:
        pid = self.daemons[transport.peer_id].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)

    def freeze(self, transport: Transport) -> None:
        pid = self.daemons[transport.peer_id].pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        self.frozen.add(pid)

    async def close(self) -> None:
        for pid in self.frozen:  # only these: one that crashed may be reaped before its daemon has heard of it
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        try:
            await super().close()
        finally:
            await asyncio.gather(*(daemon.stop() for daemon in self.daemons.values()))


class RawPeer:
    """One end of a stream, without a session: what it gets is kept, and it sends what it likes."""

    def __init__(self, link: Link) -> None:
        self.link = link
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.closed: asyncio.Future[SentinelError] = asyncio.get_running_loop().create_future()
        link.start(lambda kind, head: MAX_BODY_BYTES, self.frames.put_nowait, self._on_closed)

    @classmethod
    async def dial(cls, transport: Transport, peer: str, stream: StreamKind = StreamKind.CONTROL) -> RawPeer:
        """Open a stream from ``transport`` to ``peer``."""
        return cls(await transport._open_link(peer, stream))

    @staticmethod
    def answer(transport: Transport) -> asyncio.Queue[RawPeer]:
        """Let ``transport`` take streams without a session; the streams arrive in the queue."""
        arrived: asyncio.Queue[RawPeer] = asyncio.Queue()
        transport._accept_link = lambda link, stream: arrived.put_nowait(RawPeer(link))  # type: ignore[method-assign]
        return arrived

    def send(self, kind: FrameKind, head: Mapping[str, Any], *body: bytes) -> None:
        """Send one frame."""
        self.link.send(kind, head, body)

    def hello(self, **changes: Any) -> None:
        """Send a good hello, with changes."""
        self.send(FrameKind.HELLO, fields.encode(Hello(version=1, swarm=SWARM, agent="raw", time=1.0)) | changes)

    async def receive(self) -> Frame:
        """The next frame."""
        async with asyncio.timeout(PATIENCE):
            return await self.frames.get()

    async def ended(self) -> SentinelError:
        """Why the stream ended."""
        async with asyncio.timeout(PATIENCE):
            return await self.closed

    def _on_closed(self, error: SentinelError) -> None:
        self.closed.set_result(error)


def recorder(transport: Transport) -> Recorder:
    """What this transport has reported."""
    assert isinstance(transport.observer, Recorder)
    return transport.observer


async def echo(request: Request) -> Response:
    """Answer with what came."""
    head = {name: value for name, value in request.head.items() if name not in ("id", "method")}
    return Response(head=head, body=(request.body,))


def serve(
    transport: Transport,
    method: Method,
    handler: Callable[[Request], Awaitable[Response]] = echo,
    body_limit: int = 1 << 26,
    **more: Any,
) -> None:
    """Serve one method."""
    transport.serve(method, Route(handler=handler, body_limit=body_limit, **more))


async def until(event: asyncio.Event) -> None:
    """Wait for an event, but not for ever."""
    async with asyncio.timeout(PATIENCE):
        await event.wait()


async def becomes(condition: Callable[[], bool]) -> None:
    """Wait for something that no event tells of."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
