"""A light peer on py-libp2p: looks at a swarm without torch, hivemind or a daemon.

Speaks the same frames over Noise and Yamux, one request after another on one stream. It is
also the second, independent implementation of the transport that tests drive nodes with.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

import multiaddr
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport

from protocol import fields
from protocol.errors import CallTimeoutError, MessageError, PeerUnreachableError, RecordError, SentinelError
from protocol.framing import Frame, FrameKind, FrameReader, encode_head
from protocol.invite import parse_multiaddr
from protocol.messages import (
    CONTROL_PROTOCOL,
    PROTOCOL_VERSION,
    Empty,
    ErrorHead,
    Hello,
    Method,
    Push,
)
from protocol.records import Record, parse_record
from protocol.refusals import remote_error

Result = TypeVar("Result")

READ_BYTES = 64 * 1024
MAX_REPLY_BYTES = 1 << 20
CLOSE_SECONDS = 0.2


class LightSession:
    """One control stream to one node."""

    def __init__(self, stream: Any, *, reply_limit: int = MAX_REPLY_BYTES) -> None:
        self._stream = stream
        self._reader = FrameReader(lambda kind, head: reply_limit)
        self._frames: list[Frame] = []
        self._next_id = 0

    async def send(self, kind: FrameKind, head: Mapping[str, Any], body: bytes = b"") -> None:
        """Write one frame."""
        await self._stream.write(encode_head(kind, head, len(body)) + body)

    async def send_bytes(self, data: bytes) -> None:
        """Write bytes as they are; for tests of hostile input."""
        await self._stream.write(data)

    async def receive(self) -> Frame:
        """Read one frame.

        Raises:
            PeerUnreachableError: the stream ended.
            FrameError: what came is no frame.
        """
        while not self._frames:
            data = await self._stream.read(READ_BYTES)
            if not data:
                raise PeerUnreachableError("the node closed the stream")
            self._frames.extend(self._reader.feed(data))
        return self._frames.pop(0)

    async def hello(self, swarm: bytes, *, agent: str = "sentinel-light", version: int = PROTOCOL_VERSION) -> Hello:
        """Greet the node; returns its greeting.

        Raises:
            RemoteError: it refuses this swarm or version.
        """
        mine = Hello(version=version, swarm=swarm, agent=agent, time=time.time())
        await self.send(FrameKind.HELLO, fields.encode(mine))
        frame = await self.receive()
        if frame.kind is FrameKind.ERROR:
            raise _error(frame)
        return fields.decode(Hello, frame.head)

    async def request(
        self, method: Method, message: fields.DataclassInstance | None = None, body: bytes = b""
    ) -> Frame:
        """Make one request and return the answering frame.

        Raises:
            RemoteError: the node refuses, or answers something else.
        """
        request_id = self._next_id
        self._next_id += 1
        head = {**fields.encode(message or Empty()), "id": request_id, "method": method.value}
        await self.send(FrameKind.REQUEST, head, body)
        while True:
            frame = await self.receive()
            if frame.kind is FrameKind.ERROR:
                raise _error(frame)
            if frame.kind is FrameKind.REPLY:
                if frame.head.get("id") != request_id:  # one is asked after another, so there is no other to answer
                    raise MessageError("the node answers what it was not asked")
                return frame

    async def status(self) -> dict[str, Any]:
        """The node's status."""
        frame = await self.request(Method.STATUS)
        try:
            # Numbers that JSON itself does not have would make the output of --json unreadable for others.
            status = json.loads(bytes(frame.body), parse_constant=lambda _: None, parse_float=_finite)
        except (ValueError, RecursionError):
            raise MessageError("the node's status is not JSON") from None
        if not isinstance(status, dict):
            raise MessageError("the node's status is not an object")
        return status

    async def signed_records(self) -> tuple[bytes, ...]:
        """The records that the node knows, as they are: nothing in them is checked."""
        frame = await self.request(Method.VIEW)
        return fields.decode(Push, frame.head).records

    async def records(self, swarm: bytes) -> list[Record]:
        """The claims and accusations that the node knows, each checked here."""
        records: list[Record] = []
        for data in await self.signed_records():
            try:
                records.append(parse_record(data, swarm=swarm, now=time.time()))
            except RecordError:
                continue  # expired on the way, or the node lies: either way it proves nothing
        return records


def _error(frame: Frame) -> SentinelError:
    head = fields.decode(ErrorHead, frame.head)
    return remote_error(head.kind, head.message)


def run_light(
    use: Callable[[LightSession], Awaitable[Result]],
    addresses: Sequence[str],
    *,
    seconds: float,
    protocol: str = CONTROL_PROTOCOL,
) -> Result:
    """Dial the addresses all at once, run ``use`` on the streams in the order in which they open until it succeeds
    on one, and return its result.

    Args:
        seconds: for everything, dial included.

    Raises:
        PeerUnreachableError: no address answered.
        CallTimeoutError: it took too long.
        SentinelError: as ``use`` raised it for the first that answered, when it succeeded for none.
    """
    quiet_libraries()

    async def main() -> Result:
        with trio.move_on_after(seconds):
            return await _with_first(use, addresses, protocol)
        raise CallTimeoutError(
            f"no answer in {seconds:.0f} s from {len(addresses)} address(es); is the swarm running and reachable?"
        )

    return trio.run(main)


def quiet_libraries() -> None:
    """Keep the libraries from logging: whatever goes wrong in a dial reaches the caller as an error."""
    for name in ("libp2p", "libp2p.host", "multiaddr", "trio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def light_host() -> Any:
    """A libp2p host with a key of its own that listens nowhere; use it as ``async with host.run(listen_addrs=[])``."""
    key_pair = create_new_key_pair()
    noise = NoiseTransport(key_pair, noise_privkey=create_noise_key().private_key)
    # The library's default also offers plaintext; noise alone is spoken here.
    return new_host(key_pair=key_pair, sec_opt={NOISE_ID: noise}, muxer_preference="YAMUX")


def with_host(use: Callable[[Any], Awaitable[Result]]) -> Result:
    """Run ``use`` with a host that is running; what it raises comes out by itself, and in no group."""
    quiet_libraries()

    async def main() -> Result:
        outcome: list[Result] = []
        failures: list[Exception] = []
        host = light_host()
        async with host.run(listen_addrs=[]):
            try:
                outcome.append(await use(host))
            except Exception as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return outcome[0]

    return trio.run(main)


MAX_ADDRESSES = 4
"""Addresses of one node that are dialled, one after another."""


async def open_session(
    host: Any, peer: str, addresses: Sequence[str], swarm: bytes, *, agent: str, reply_limit: int
) -> LightSession:
    """Dial a node through a host that is running, and greet it.

    Raises:
        PeerUnreachableError: none of its addresses can be dialled.
        SentinelError: it does not greet back as it should.
        Exception: the library raises many unrelated types; each means that the node does not answer.
    """
    network, known = host.get_network(), ID.from_string(peer)
    # Each address is dialled by itself: the library's own choice of one leaves a peer alone for a minute after a
    # failure, and never takes loopback where there is anything else.
    usable = [text for text in addresses if parse_multiaddr(text).transport == "tcp"]
    failed: SentinelError = PeerUnreachableError("it has no address that can be dialled")
    for text in usable[:MAX_ADDRESSES]:
        try:
            await network.dial_addr(multiaddr.Multiaddr(text), known)
        except Exception as error:
            failed = PeerUnreachableError(str(error)[:120])
            continue
        stream = await host.new_stream(known, [CONTROL_PROTOCOL])
        session = LightSession(stream, reply_limit=reply_limit)
        await session.hello(swarm, agent=agent)
        return session
    raise failed


async def _with_first(
    use: Callable[[LightSession], Awaitable[Result]], addresses: Sequence[str], protocol: str
) -> Result:
    host = light_host()
    failures: list[str] = []

    async def dial(address: str, opened: trio.MemorySendChannel[Any]) -> None:
        try:
            info = info_from_p2p_addr(multiaddr.Multiaddr(address))
            await host.connect(info)
            stream = await host.new_stream(info.peer_id, [protocol])
        except Exception as error:  # the library raises many unrelated types
            failures.append(f"nothing at {address.partition('/p2p/')[0]}" if _refused(error) else _short(error))
        else:
            with contextlib.suppress(trio.BrokenResourceError):  # nobody waits for it any more
                await opened.send(stream)
        finally:
            opened.close()

    # An error that leaves the host's own nurseries comes out as a group; so it is carried out by hand.
    outcome: list[Result] = []
    refusals: list[SentinelError] = []
    async with host.run(listen_addrs=[]), trio.open_nursery() as nursery:
        sending, streams = trio.open_memory_channel[Any](len(addresses))
        for address in addresses:
            nursery.start_soon(dial, address, sending.clone())
        sending.close()
        async for stream in streams:
            try:
                outcome.append(await use(LightSession(stream)))
            except SentinelError as error:
                refusals.append(error)
            except (OSError, StreamError) as error:
                refusals.append(PeerUnreachableError(f"the node closed the stream: {_short(error)}"))
            with trio.move_on_after(CLOSE_SECONDS):
                await stream.close()
            if outcome:
                break
        nursery.cancel_scope.cancel()
    if outcome:
        return outcome[0]
    if refusals:
        raise refusals[0]
    raise PeerUnreachableError(
        f"no node of the invite answers ({'; '.join(dict.fromkeys(failures))[:200]}); is one of them running? "
        "The invite of any other node of the swarm will do"
    )


def _finite(text: str) -> float | None:
    number = float(text)
    return number if math.isfinite(number) else None


def _refused(error: BaseException) -> bool:
    """Whether the library's error says only that the dial failed."""
    return "unable to connect" in str(error)


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:120] or type(error).__name__
