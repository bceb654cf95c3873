"""Peers in one process, joined by queues: for tests, simulations and the arena.

Frames are copied at the border, so that a receiver owns what it gets, as over a network.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from protocol.errors import PeerGoneError, PeerUnreachableError, RecordError, SentinelError
from protocol.framing import BodyLimit, Buffer, Frame, FrameKind, FrameReader, encode_head
from protocol.messages import StreamKind
from protocol.record_cache import check_record
from protocol.records import Record, record_key, record_subkey
from protocol.transports.base import Link, RecordKeeper
from protocol.transports.sessions import DialingTransport

QUEUE_BYTES = 1 << 20


class MemoryLink(Link):
    """One end of a pair of queues. Bytes go through the same frame reader as on a network."""

    def __init__(self, peer: str) -> None:
        self.peer = peer
        self.other: MemoryLink | None = None
        self.on_ended: Callable[[MemoryLink], None] = lambda link: None
        self._queue: deque[bytes] = deque()
        self._queued = 0
        self._paused = True
        self._scheduled = False
        self._reader: FrameReader | None = None
        self._on_frame: Callable[[Frame], None] | None = None
        self._on_closed: Callable[[SentinelError], None] | None = None
        self._error: SentinelError | None = None
        self._room = asyncio.Event()
        self._room.set()

    def start(
        self,
        body_limit: BodyLimit,
        on_frame: Callable[[Frame], None],
        on_closed: Callable[[SentinelError], None],
    ) -> None:
        self._reader = FrameReader(body_limit)
        self._on_frame = on_frame
        if self._error is not None:
            on_closed(self._error)
            return
        self._on_closed = on_closed
        self.resume()

    def send(self, kind: FrameKind, head: Mapping[str, Any], body: Sequence[Buffer] = ()) -> int:
        other = self.other
        if self._error is not None or other is None:
            raise self._error or PeerGoneError("the link is not open")
        size = sum(memoryview(buffer).nbytes for buffer in body)
        packed = b"".join((encode_head(kind, head, size), *body))
        other.receive(packed)
        return len(packed)

    def receive(self, data: bytes) -> None:
        """Take bytes from the other end."""
        if self._error is not None:
            return
        self._queue.append(data)
        self._queued += len(data)
        if self._queued > QUEUE_BYTES and self.other is not None:
            self.other._room.clear()
        self._schedule()

    @property
    def closed(self) -> bool:
        """Whether the stream has ended."""
        return self._error is not None

    async def drain(self) -> None:
        await self._room.wait()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        self._paused = True

    def resume(self) -> None:
        self._paused = False
        self._schedule()

    def close(self) -> None:
        self.fail(PeerGoneError("the stream was closed by this node"))

    def fail(self, error: SentinelError) -> None:
        """Cut both ends; this end ends with ``error``."""
        if self._error is not None:
            return
        self._report(error)  # the session may still say why to the peer
        self._error = error
        self.on_ended(self)
        self._queue.clear()
        self._room.set()
        if self.other is not None and self.other._error is None:
            self.other._end(PeerGoneError("the stream was closed by the other side"))

    def _end(self, error: SentinelError) -> None:
        """The other side has closed; what it sent before still arrives."""
        self._error = error
        self.on_ended(self)
        self._room.set()
        asyncio.get_running_loop().call_soon(self._tell_closed, error)

    def _tell_closed(self, error: SentinelError) -> None:
        self._deliver_all()
        self._report(error)

    def _report(self, error: SentinelError) -> None:
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            on_closed(error)

    def _schedule(self) -> None:
        if not self._scheduled and not self._paused and self._queue:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        self._deliver_all()

    def _deliver_all(self) -> None:
        while self._queue and not self._paused and self._reader is not None and self._on_frame is not None:
            data = self._queue.popleft()
            self._queued -= len(data)
            try:
                for frame in self._reader.feed(data):
                    self._on_frame(frame)
            except SentinelError as error:
                self._queue.clear()
                self.fail(error)
                self._report(error)  # where the other side had closed already
                return
        if self._queued <= QUEUE_BYTES and self.other is not None:
            self.other._room.set()


class MemoryNetwork:
    """Knows every transport of one simulated network; pairs can be cut and healed."""

    def __init__(self) -> None:
        self._transports: dict[str, MemoryTransport] = {}
        self._cuts: set[frozenset[str]] = set()

    def add(self, transport: MemoryTransport) -> None:
        """Make a transport reachable."""
        self._transports[transport.peer_id] = transport

    def remove(self, peer: str) -> None:
        """Make a transport unreachable."""
        self._transports.pop(peer, None)

    def cut(self, one: str, other: str) -> None:
        """Break every link between two peers and refuse new ones."""
        self._cuts.add(frozenset((one, other)))
        for peer, far in ((one, other), (other, one)):
            if peer in self._transports:
                self._transports[peer].drop_links(far)

    def heal(self, one: str, other: str) -> None:
        """Allow links between two peers again."""
        self._cuts.discard(frozenset((one, other)))

    def link(self, caller: str, callee: str, stream: StreamKind) -> MemoryLink:
        """Open a stream from caller to callee.

        Raises:
            PeerUnreachableError: no such peer, or the pair is cut.
        """
        target = self._transports.get(callee)
        if target is None or frozenset((caller, callee)) in self._cuts:
            raise PeerUnreachableError(f"peer {callee} cannot be reached; it has left or the network is cut")
        near, far = MemoryLink(callee), MemoryLink(caller)
        near.other, far.other = far, near
        target.accept(far, stream)
        return near


class MemoryTransport(DialingTransport):
    """A peer of a :class:`MemoryNetwork`."""

    def __init__(self, network: MemoryNetwork, peer_id: str, **options: Any) -> None:
        super().__init__(peer_id=peer_id, **options)
        self._network = network
        self._links: dict[MemoryLink, None] = {}
        network.add(self)

    def learn(self, peer: str, addresses: Iterable[str]) -> None:
        """Nothing to remember: the network knows everybody."""

    async def _open_link(self, peer: str, stream: StreamKind) -> Link:
        link = self._network.link(self.peer_id, peer, stream)
        self._keep(link)
        return link

    def accept(self, link: MemoryLink, stream: StreamKind) -> None:
        """Take a stream that another peer opened."""
        self._keep(link)
        self._accept_link(link, stream)

    def _keep(self, link: MemoryLink) -> None:
        if not link.closed:  # a transport that is closing refuses a stream at once
            self._links[link] = None
            link.on_ended = self._forget

    def _forget(self, link: MemoryLink) -> None:
        self._links.pop(link, None)

    def drop_links(self, peer: str) -> None:
        """Cut every stream to this peer."""
        for link in [link for link in self._links if link.peer == peer]:
            link.fail(PeerGoneError("the network was cut"))

    async def _close_links(self) -> None:
        self._network.remove(self.peer_id)
        for link in list(self._links):
            link.close()


class MemoryRecords(RecordKeeper):
    """The record store of a :class:`MemoryNetwork`; checks records as the DHT does."""

    def __init__(self, swarm: bytes, wall_clock: Callable[[], float] = time.time) -> None:
        self._swarm = swarm
        self._wall_clock = wall_clock
        self._records: dict[str, dict[str, tuple[Record, bytes]]] = {}
        self._checks: list[Callable[[Record], None]] = []

    def restrict(self, check: Callable[[Record], None]) -> None:
        self._checks.append(check)

    async def store(self, data: bytes) -> bool:
        record = check_record(data, swarm=self._swarm, now=self._wall_clock())
        if self._checks and not any(_passes(check, record) for check in self._checks):
            return False  # as in the DHT: it is enough that one of those who could keep it does
        place = self._records.setdefault(record_key(record), {})
        known = place.get(record_subkey(record))
        if known is not None and known[0].expires >= record.expires:
            return False  # as in the DHT: of two records the one that expires later stays
        place[record_subkey(record)] = (record, data)
        return True

    async def fetch(self, keys: Sequence[str]) -> list[tuple[Record, bytes]]:
        now = self._wall_clock()
        places = [self._records[key].values() for key in keys if key in self._records]
        # Checked when they were stored; here only the clock has moved on.
        return [entry for place in places for entry in place if entry[0].expires > now]


def _passes(check: Callable[[Record], None], record: Record) -> bool:
    try:
        check(record)
    except RecordError:
        return False
    return True
