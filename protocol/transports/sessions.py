"""Requests and answers over links: multiplexing, heartbeats, timeouts, limits.

Whoever opens a stream makes the requests on it, and the other side answers; so a pair of
peers that both call has a stream each way of each kind. Heartbeats run on the control
stream that a node opened; when they stop, both of its streams to that peer are cut.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from protocol import fields
from protocol.errors import (
    CallTimeoutError,
    FrameError,
    MessageError,
    PeerGoneError,
    ProtocolVersionError,
    RemoteError,
    SentinelError,
    SwarmMismatchError,
)
from protocol.framing import DISCARD, Buffer, Frame, FrameKind
from protocol.messages import (
    PROTOCOL_VERSION,
    STREAM_OF,
    ErrorHead,
    Hello,
    Method,
    RequestHead,
    StreamKind,
)
from protocol.refusals import remote_error
from protocol.transports.base import Link, Observer, Request, Response, Route

METHODS = frozenset(method.value for method in Method)

MAX_SERVED_AT_ONCE = 64
"""Requests of one stream that are being answered; the next ones wait in the sender."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """What every session of a node shares."""

    swarm: bytes
    agent: str = "sentinel"
    heartbeat_seconds: float = 2.0
    dead_after_seconds: float = 8.0
    handshake_seconds: float = 10.0
    write_seconds: float = 30.0
    """How long a peer may take to accept an answer before its stream is cut."""
    version: int = PROTOCOL_VERSION
    wall_clock: Callable[[], float] = time.time
    """Unix seconds, sent in the hello; an argument so that tests can shift a clock."""


def _check_hello(head: Mapping[str, Any], options: SessionOptions) -> Hello:
    hello = fields.decode(Hello, head)
    if hello.version != options.version:
        raise ProtocolVersionError(
            f"the peer speaks protocol version {hello.version}, this node version {options.version}; "
            "the older of the two must be upgraded"
        )
    if hello.swarm != options.swarm:
        raise SwarmMismatchError(f"the peer belongs to swarm {hello.swarm.hex()[:12]}, not to this one")
    return hello


def _request_id(head: Mapping[str, Any]) -> int:
    request_id = head.get("id")
    if type(request_id) is not int:
        raise FrameError("a frame does not say which request it is about")
    return request_id


def _hello(options: SessionOptions) -> dict[str, Any]:
    now = options.wall_clock()
    return fields.encode(Hello(version=options.version, swarm=options.swarm, agent=options.agent, time=now))


class ClientSession:
    """The side that opened a stream and makes the requests on it."""

    def __init__(self, link: Link, stream: StreamKind, options: SessionOptions, observer: Observer) -> None:
        self.link = link
        self.stream = stream
        self._options = options
        self._observer = observer
        self._pending: dict[int, tuple[asyncio.Future[Frame], int]] = {}
        self._next_id = 0
        self._largest_reply = 0
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._error: SentinelError | None = None
        self._heard = time.monotonic()
        self.closed = asyncio.Event()

    @property
    def alive(self) -> bool:
        """Whether requests can still be made."""
        return self._error is None

    async def open(self) -> None:
        """Say hello and wait for the other side's.

        Raises:
            ProtocolVersionError, SwarmMismatchError: the peer is not one of ours.
            CallTimeoutError: it said nothing in time.
        """
        self.link.start(self._body_limit, self._on_frame, self._on_closed)
        self._send(FrameKind.HELLO, _hello(self._options))
        try:
            async with asyncio.timeout(self._options.handshake_seconds):
                await self._ready
        except TimeoutError:
            self.fail(CallTimeoutError(f"peer {self.link.peer} did not answer the hello"))
            assert self._error is not None
            raise self._error from None

    async def request(
        self,
        method: Method,
        head: Mapping[str, Any],
        body: Sequence[Buffer] = (),
        *,
        timeout: float,
        reply_limit: int = 0,
    ) -> Response:
        """Make one request and return its answer.

        Args:
            timeout: seconds until the wait is given up; the peer is then told to stop working on it.
            reply_limit: largest body in bytes that the answer may announce.

        Raises:
            RemoteError: the peer refused, or broke a rule.
            TransportError: the peer is gone or did not answer in time.
        """
        if self._error is not None:
            raise self._error
        request_id = self._next_id
        self._next_id += 1
        future: asyncio.Future[Frame] = asyncio.get_running_loop().create_future()
        self._pending[request_id] = (future, reply_limit)
        self._largest_reply = max(self._largest_reply, reply_limit)
        try:
            async with asyncio.timeout(timeout):
                self._send(FrameKind.REQUEST, {**head, "id": request_id, "method": method.value}, body)
                await self.link.drain()
                frame = await future
        except TimeoutError:
            raise CallTimeoutError(f"peer {self.link.peer} did not answer {method} in {timeout:.1f} s") from None
        finally:
            del self._pending[request_id]
            if not future.done() or future.cancelled():
                self._cancel(request_id)
            else:
                future.exception()  # a session that ended while the request was still being written
        return Response(head=frame.head, body=(frame.body,))

    async def keep_alive(self) -> None:
        """Ping until the session ends; ends it when the peer has been silent for too long."""
        options = self._options
        while self._error is None:
            asked = time.monotonic()
            try:
                self._send(FrameKind.PING, {"id": 0})
            except SentinelError as error:
                self.fail(error)  # the link has ended and the news is still under way
                return
            try:
                async with asyncio.timeout(options.heartbeat_seconds):
                    await self.closed.wait()
            except TimeoutError:
                pass
            now = time.monotonic()
            stalled = now - asked - options.heartbeat_seconds
            if stalled > options.heartbeat_seconds:
                self._heard = now  # this process was stopped or overloaded; silence proves nothing
            elif now - self._heard > options.dead_after_seconds:
                self.fail(PeerGoneError(f"peer {self.link.peer} has been silent for {now - self._heard:.0f} s"))

    def fail(self, error: SentinelError) -> None:
        """End the session because of ``error``."""
        if self._error is None:
            self._error = error
        self.link.close()
        self._on_closed(error)

    def close(self) -> None:
        """End the session politely."""
        if self._error is None:
            with contextlib.suppress(SentinelError):
                self._send(FrameKind.BYE, {"id": 0})
        self.fail(PeerGoneError("this node closed the session"))

    def _send(self, kind: FrameKind, head: Mapping[str, Any], body: Sequence[Buffer] = ()) -> None:
        try:
            count = self.link.send(kind, head, body)
        except SentinelError:
            if self._error is not None:
                raise self._error from None
            raise
        self._observer.bytes_moved("out", self.stream, count)

    def _cancel(self, request_id: int) -> None:
        if self._error is None:
            try:
                self._send(FrameKind.CANCEL, {"id": request_id})
            except SentinelError:
                return  # the link just ended, and the request with it

    def _body_limit(self, kind: FrameKind, head: Mapping[str, Any]) -> int:
        if kind is not FrameKind.REPLY:
            return 0
        pending = self._pending.get(_request_id(head))
        # An answer that comes too late is still on its way; it is no larger than some answer asked for.
        return pending[1] if pending is not None else self._largest_reply

    def _on_frame(self, frame: Frame) -> None:
        self._heard = time.monotonic()
        self._observer.bytes_moved("in", self.stream, frame.size)
        if frame.kind is FrameKind.HELLO:
            hello = _check_hello(frame.head, self._options)
            self._observer.clock_offset(self.link.peer, hello.time - self._options.wall_clock())
            if not self._ready.done():
                self._ready.set_result(None)
        elif frame.kind is FrameKind.REPLY:
            self._resolve(_request_id(frame.head), frame)
        elif frame.kind is FrameKind.ERROR:
            error_head = fields.decode(ErrorHead, frame.head)
            error = remote_error(error_head.kind, error_head.message)
            if error_head.id < 0:
                raise error
            self._resolve(error_head.id, error)
        elif frame.kind is FrameKind.BYE:
            raise PeerGoneError(f"peer {self.link.peer} said goodbye")
        elif frame.kind is not FrameKind.PONG:
            raise FrameError(f"a {frame.kind.name} frame does not belong on this side of a stream")

    def _resolve(self, request_id: int, outcome: Frame | RemoteError) -> None:
        pending = self._pending.get(request_id)
        if pending is None or pending[0].done():
            return  # the caller has given up
        if isinstance(outcome, Frame):
            pending[0].set_result(outcome)
        else:
            pending[0].set_exception(outcome)

    def _on_closed(self, error: SentinelError) -> None:
        if self._error is None:
            self._error = error
        if isinstance(self._error, RemoteError) and not self.closed.is_set():
            self._observer.remote_error(self.link.peer, self._error)
        self.closed.set()
        if not self._ready.done():
            self._ready.set_exception(self._error)
            self._ready.exception()
        for future, _ in self._pending.values():
            if not future.done():
                future.set_exception(self._error)


class ServerSession:
    """The side that answers the requests of one stream."""

    def __init__(
        self,
        link: Link,
        stream: StreamKind,
        options: SessionOptions,
        observer: Observer,
        routes: Mapping[Method, Route],
        on_ended: Callable[[ServerSession], None],
    ) -> None:
        self.link = link
        self.stream = stream
        self._options = options
        self._observer = observer
        self._routes = routes
        self._on_ended = on_ended
        self._greeted = False
        self._ended = False
        self._heard = time.monotonic()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._paused = False
        self._greet_timer = asyncio.get_running_loop().call_later(options.handshake_seconds, self._hello_overdue)

    def start(self) -> None:
        """Begin to answer."""
        self.link.start(self._body_limit, self._on_frame, self._on_closed)

    async def close(self) -> None:
        """Stop answering and wait until the handlers have ended."""
        tasks = list(self._tasks.values())
        self.link.close()
        self._on_closed(PeerGoneError("this node closed the session"))
        await asyncio.gather(*tasks, return_exceptions=True)

    def silent_for(self) -> float:
        """Seconds since the peer was last heard on this stream."""
        return time.monotonic() - self._heard

    def fail(self, error: SentinelError) -> None:
        """Tell the peer why, then end the session."""
        self._on_closed(error)
        self.link.close()

    def _hello_overdue(self) -> None:
        if not self._greeted and not self._ended:
            self.fail(FrameError("no hello came in time"))

    def _send(self, kind: FrameKind, head: Mapping[str, Any], body: Sequence[Buffer] = ()) -> bool:
        try:
            count = self.link.send(kind, head, body)
        except FrameError:
            raise
        except SentinelError:
            return False
        self._observer.bytes_moved("out", self.stream, count)
        return True

    def _send_error(self, request_id: int, kind: str, message: str) -> None:
        text = "".join(char if char.isprintable() else "?" for char in message)[:300]
        self._send(FrameKind.ERROR, fields.encode(ErrorHead(id=request_id, kind=kind[:40], message=text)))

    def _body_limit(self, kind: FrameKind, head: Mapping[str, Any]) -> int:
        if kind is not FrameKind.REQUEST or not self._greeted:
            return 0
        method = head.get("method")
        if not isinstance(method, str) or method not in METHODS:
            return 0
        route = self._routes.get(Method(method))
        if route is None or not route.admits(self.link.peer):
            # Refused below, by a reply: the sender may have been quicker than the news of its claim, or this
            # node slower to get ready, and cutting the stream would cost both their other requests.
            return DISCARD
        return route.body_limit

    def _on_frame(self, frame: Frame) -> None:
        if self._ended:
            return
        self._heard = time.monotonic()
        self._observer.bytes_moved("in", self.stream, frame.size)
        if frame.kind is FrameKind.HELLO:
            hello = _check_hello(frame.head, self._options)
            self._observer.clock_offset(self.link.peer, hello.time - self._options.wall_clock())
            self._greeted = True
            self._greet_timer.cancel()
            self._send(FrameKind.HELLO, _hello(self._options))
        elif not self._greeted:
            raise FrameError("the first frame must be a hello")
        elif frame.kind is FrameKind.PING:
            self._send(FrameKind.PONG, {"id": 0})
        elif frame.kind is FrameKind.REQUEST:
            self._begin(frame)
        elif frame.kind is FrameKind.CANCEL:
            task = self._tasks.get(_request_id(frame.head))
            if task is not None:
                task.cancel()
        elif frame.kind is FrameKind.BYE:
            raise PeerGoneError(f"peer {self.link.peer} said goodbye")
        else:
            raise FrameError(f"a {frame.kind.name} frame does not belong on this side of a stream")

    def _begin(self, frame: Frame) -> None:
        head = fields.decode(RequestHead, frame.head)
        if head.id in self._tasks:
            raise MessageError(f"request id {head.id} is already in use")
        route = self._routes.get(head.method)  # type: ignore[call-overload]
        if route is None or STREAM_OF[Method(head.method)] is not self.stream:
            self._send_error(head.id, "method", f"this node does not answer {head.method} on this stream")
            return
        if frame.discarded or not route.admits(self.link.peer):
            self._send_error(head.id, "not_admitted", f"{head.method} needs a claim that this node knows and admits")
            return
        request = Request(
            peer=self.link.peer,
            method=Method(head.method),
            head=frame.head,
            body=frame.body,
            address=self.link.address,
        )
        task = asyncio.get_running_loop().create_task(self._answer(head.id, route, request))
        self._tasks[head.id] = task
        task.add_done_callback(lambda _: self._done(head.id))
        if len(self._tasks) >= MAX_SERVED_AT_ONCE and not self._paused:
            self._paused = True
            self.link.pause()

    def _done(self, request_id: int) -> None:
        self._tasks.pop(request_id, None)
        if self._paused and len(self._tasks) < MAX_SERVED_AT_ONCE and not self._ended:
            self._paused = False
            self.link.resume()

    async def _answer(self, request_id: int, route: Route, request: Request) -> None:
        try:
            response = await route.handler(request)
        except asyncio.CancelledError:
            return  # the caller gave up or the session ended; nobody waits for an answer
        except RemoteError as error:
            self._observer.remote_error(request.peer, error)
            self._send_error(request_id, error.kind, str(error))
            return
        except SentinelError as error:
            self._send_error(request_id, "unavailable", str(error))
            return
        except Exception as error:
            self._send_error(request_id, "internal", f"the node failed: {type(error).__name__}")
            raise
        try:
            if not self._send(FrameKind.REPLY, {**response.head, "id": request_id}, response.body):
                return
        except FrameError as error:
            self._send_error(request_id, "too_large", f"the answer fits no frame: {error}")
            return
        try:
            async with asyncio.timeout(self._options.write_seconds):
                await self.link.drain()
        except TimeoutError:
            self.fail(CallTimeoutError(f"peer {request.peer} does not read its answers"))
        except SentinelError:
            return  # the link ended; the peer will ask again

    def _on_closed(self, error: SentinelError) -> None:
        if self._ended:
            return
        self._ended = True
        self._greet_timer.cancel()
        if isinstance(error, RemoteError):
            self._send_error(-1, error.kind, str(error))
            self._observer.remote_error(self.link.peer, error)
        for task in list(self._tasks.values()):
            task.cancel()
        self._on_ended(self)


class Transport(ABC):
    """All sessions of one node. Subclasses open links and hand in those that others open."""

    def __init__(self, *, peer_id: str, options: SessionOptions, observer: Observer | None = None) -> None:
        self.peer_id = peer_id
        self.options = options
        self.observer = observer or Observer()
        self._routes: dict[Method, Route] = {}
        self._clients: dict[tuple[str, StreamKind], ClientSession] = {}
        self._opening: dict[tuple[str, StreamKind], asyncio.Task[ClientSession]] = {}
        self._servers: set[ServerSession] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._gone_callbacks: list[Callable[[str], None]] = []
        self._may_ask: Callable[[str, Method], bool] = lambda peer, method: True
        self._closing = False

    # what a node uses ----------------------------------------------------------------

    def serve(self, method: Method, route: Route) -> None:
        """Answer a method from now on."""
        self._routes[method] = replace(route, admits=lambda peer: self._may_ask(peer, method) and route.admits(peer))

    def restrict(self, may_ask: Callable[[str, Method], bool]) -> None:
        """Answer only whom ``may_ask`` allows a method, besides what the method's own route demands."""
        self._may_ask = may_ask

    def on_peer_gone(self, callback: Callable[[str], None]) -> None:
        """Call back with a peer's id when the control session to it ends for any reason."""
        self._gone_callbacks.append(callback)

    def connected(self) -> frozenset[str]:
        """Peers to which this node holds a live control session."""
        return frozenset(
            peer for (peer, kind), session in self._clients.items() if kind is StreamKind.CONTROL and session.alive
        )

    async def call(
        self,
        peer: str,
        method: Method,
        message: fields.DataclassInstance,
        body: Sequence[Buffer] = (),
        *,
        timeout: float,
        reply_limit: int = 0,
    ) -> Response:
        """Send one request to a peer, opening the stream for it if needed; see ClientSession.request."""
        outcome = "ok"
        try:
            session = self._clients.get((peer, STREAM_OF[method]))
            if session is None or not session.alive:  # a timer for each call only where one may have to wait
                async with asyncio.timeout(timeout):
                    session = await self._session(peer, STREAM_OF[method])
            return await session.request(method, fields.encode(message), body, timeout=timeout, reply_limit=reply_limit)
        except TimeoutError:
            outcome = "timeout"
            raise CallTimeoutError(f"peer {peer} could not be dialled in {timeout:.1f} s") from None
        except RemoteError as error:
            outcome = error.kind
            raise
        except SentinelError as error:
            outcome = "timeout" if isinstance(error, CallTimeoutError) else "unreachable"
            raise
        except asyncio.CancelledError:
            outcome = "cancelled"
            raise
        finally:
            self.observer.request_done(method.value, outcome)

    async def connect(self, peer: str, *, timeout: float) -> None:
        """Open the control session to a peer, so that its liveness is watched.

        Raises:
            SentinelError: the peer cannot be reached, or is not one of ours.
        """
        try:
            async with asyncio.timeout(timeout):
                await self._session(peer, StreamKind.CONTROL)
        except TimeoutError:
            raise CallTimeoutError(f"peer {peer} could not be dialled in {timeout:.1f} s") from None

    def drop(self, peer: str) -> None:
        """Close what this node opened to a peer and what the peer opened to it."""
        for kind in StreamKind:
            session = self._clients.pop((peer, kind), None)
            if session is not None:
                session.close()
        for server in [server for server in self._servers if server.link.peer == peer]:
            server.link.close()

    async def close(self) -> None:
        """Say goodbye on every stream and stop."""
        self._closing = True
        for task in list(self._opening.values()):
            task.cancel()
        for session in list(self._clients.values()):
            session.close()
        await asyncio.gather(*(server.close() for server in list(self._servers)))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, *self._opening.values(), return_exceptions=True)
        await self._close_links()

    # what a subclass provides --------------------------------------------------------

    @abstractmethod
    async def _open_link(self, peer: str, stream: StreamKind) -> Link:
        """Open a stream to a peer.

        Raises:
            PeerUnreachableError: no address of the peer answered.
        """

    @abstractmethod
    async def _close_links(self) -> None:
        """Release what lies below the links."""

    # ---------------------------------------------------------------------------------

    def _accept_link(self, link: Link, stream: StreamKind) -> None:
        """Serve a stream that a peer opened."""
        if self._closing:
            link.close()
            return
        server = ServerSession(link, stream, self.options, self.observer, self._routes, self._servers.discard)
        self._servers.add(server)
        server.start()

    async def _session(self, peer: str, stream: StreamKind) -> ClientSession:
        key = (peer, stream)
        session = self._clients.get(key)
        if session is not None and session.alive:
            return session
        if self._closing:
            raise PeerGoneError("this node is closing")
        task = self._opening.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._open_session(peer, stream))
            self._opening[key] = task
            task.add_done_callback(lambda done: self._opened(key, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            current = asyncio.current_task()
            if task.cancelled() and current is not None and not current.cancelling():
                raise PeerGoneError("this node is closing") from None  # it was the opening that was cancelled
            raise

    def _opened(self, key: tuple[str, StreamKind], task: asyncio.Task[ClientSession]) -> None:
        self._opening.pop(key, None)
        if not task.cancelled():
            task.exception()  # every waiter got it; one that gave up must not leave a warning behind

    async def _open_session(self, peer: str, stream: StreamKind) -> ClientSession:
        link = await self._open_link(peer, stream)
        session = ClientSession(link, stream, self.options, self.observer)
        try:
            await session.open()
        except BaseException:
            link.close()
            raise
        self._clients[(peer, stream)] = session
        self._spawn(self._watch(peer, stream, session))
        return session

    async def _watch(self, peer: str, stream: StreamKind, session: ClientSession) -> None:
        if stream is StreamKind.CONTROL:
            await session.keep_alive()
        await session.closed.wait()
        if self._clients.get((peer, stream)) is session:
            del self._clients[(peer, stream)]
        if stream is not StreamKind.CONTROL or self._closing:
            return
        tensor = self._clients.pop((peer, StreamKind.TENSOR), None)
        if tensor is not None:
            tensor.fail(PeerGoneError(f"the control stream to peer {peer} ended"))
        for callback in self._gone_callbacks:
            callback(peer)

    def _spawn(self, coroutine: Any) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class DialingTransport(Transport):
    """A transport that has to be told where peers are."""

    @abstractmethod
    def learn(self, peer: str, addresses: Iterable[str]) -> None:
        """Remember where a peer listens (multiaddrs, with or without the peer id)."""
