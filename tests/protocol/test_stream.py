"""A framed stream over a real socket: the daemon's prelude, ends in the middle, and peers that read nothing."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from protocol.errors import FrameError, PeerGoneError, SentinelError
from protocol.framing import Frame, FrameKind, encode_head
from protocol.transports import stream
from protocol.transports.stream import MAX_PRELUDE_BYTES, StreamLink
from tests.protocol.peers import becomes

PATIENCE = 10.0


class Far:
    """The other end: a plain socket."""

    def __init__(self, link: StreamLink, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.link = link
        self.reader = reader
        self.writer = writer
        self.frames: asyncio.Queue[Frame] = asyncio.Queue()
        self.closed: asyncio.Future[SentinelError] = asyncio.get_running_loop().create_future()

    def start(self, limit: int = 1 << 20) -> None:
        """Begin to deliver what the link receives."""
        self.link.start(lambda kind, head: limit, self.frames.put_nowait, self.closed.set_result)

    async def write(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def ended(self) -> SentinelError:
        async with asyncio.timeout(PATIENCE):
            return await self.closed

    async def frame(self) -> Frame:
        async with asyncio.timeout(PATIENCE):
            return await self.frames.get()


@contextlib.asynccontextmanager
async def connected(*, prelude: bool = False) -> AsyncIterator[Far]:
    near, far = socket.socketpair()
    near.setblocking(False)
    loop = asyncio.get_running_loop()
    transport, link = await loop.create_connection(lambda: StreamLink(prelude=prelude), sock=near)
    reader, writer = await asyncio.open_connection(sock=far)
    yield Far(link, reader, writer)
    transport.abort()
    writer.transport.abort()
    await asyncio.sleep(0)


def wire(head: Mapping[str, Any], body: bytes = b"", kind: FrameKind = FrameKind.REPLY) -> bytes:
    return encode_head(kind, head, len(body)) + body


async def test_frames_pass_both_ways() -> None:
    async with connected() as far:
        far.start()
        await far.write(wire({"id": 1}, b"body") + wire({"id": 2}))
        assert (await far.frame()).body == b"body"
        assert (await far.frame()).head == {"id": 2}
        sent = far.link.send(FrameKind.REPLY, {"id": 3}, (b"ab", b"", memoryview(b"c")))
        assert await far.reader.readexactly(sent) == wire({"id": 3}, b"abc")
        await far.link.drain()


async def test_nothing_is_read_before_the_link_is_started() -> None:
    async with connected() as far:
        await far.write(wire({"id": 1}))
        await asyncio.sleep(0)
        assert far.frames.empty()
        far.start()
        assert (await far.frame()).head == {"id": 1}


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, MAX_PRELUDE_BYTES])
async def test_the_message_of_the_daemon_comes_before_the_frames(size: int) -> None:
    message = bytes(index % 251 for index in range(size))
    varint = bytes([size & 0x7F | 0x80, size >> 7 & 0x7F | 0x80, size >> 14]) if size else b"\0"
    async with connected(prelude=True) as far:
        await far.write(varint + message + wire({"id": 1}))
        async with asyncio.timeout(PATIENCE):
            assert await far.link.opened == message
        far.start()
        assert (await far.frame()).head == {"id": 1}


@pytest.mark.parametrize("varint", [b"\x81\x80\x04", b"\xff\xff\xff\xff\x7f", b"\x80\x80\x80\x80\x01"])
async def test_a_daemon_that_announces_too_much_ends_the_stream(varint: bytes) -> None:
    async with connected(prelude=True) as far:
        await far.write(varint)
        with pytest.raises(FrameError, match="local daemon"):
            async with asyncio.timeout(PATIENCE):
                await far.link.opened
        assert far.link.closed


async def test_an_end_inside_a_frame_is_told_apart_from_one_between_frames() -> None:
    for data, words in ((wire({"id": 1}, b"body")[:-1], "in the middle of a frame"), (wire({"id": 1}), "other side")):
        async with connected() as far:
            far.start()
            await far.write(data)
            far.writer.close()
            error = await far.ended()
            assert isinstance(error, PeerGoneError) and words in str(error)
            with pytest.raises(PeerGoneError):
                far.link.send(FrameKind.PING, {"id": 0})
            with pytest.raises(PeerGoneError):
                await far.link.drain()


async def test_a_start_after_the_end_tells_at_once() -> None:
    async with connected() as far:
        far.link.close()
        await asyncio.sleep(0)
        far.start()
        assert isinstance(await far.ended(), PeerGoneError)


async def test_a_stream_that_breaks_the_framing_ends_with_its_error_and_a_last_word() -> None:
    async with connected() as far:
        far.link.start(
            lambda kind, head: 0,
            far.frames.put_nowait,
            lambda error: far.link.send(FrameKind.ERROR, {"id": -1, "kind": "frame", "message": type(error).__name__}),
        )
        await far.write(b"GET / HTTP/1.1\r\n")
        async with asyncio.timeout(PATIENCE):
            said = await far.reader.read()
        assert b"FrameError" in said and far.link.closed


async def test_a_paused_link_delivers_nothing_until_it_is_resumed() -> None:
    async with connected() as far:
        far.start()
        far.link.pause()
        far.link.pause()  # twice does no harm
        await far.write(wire({"id": 1}))
        await asyncio.sleep(0.05)
        assert far.frames.empty()
        far.link.resume()
        far.link.resume()
        assert (await far.frame()).head == {"id": 1}


@pytest.mark.parametrize("end", ["close", "fail"])
async def test_a_peer_that_reads_nothing_cannot_keep_a_closed_stream_alive(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "FLUSH_SECONDS", 0.05)
    async with connected() as far:
        far.reader._transport.pause_reading()  # type: ignore[attr-defined]
        far.start()
        far.link.send(FrameKind.REPLY, {"id": 1}, (bytes(64 << 20),))
        waiting = asyncio.create_task(far.link.drain())
        await asyncio.sleep(0)
        assert not waiting.done()
        if end == "close":
            far.link.close()
        else:
            far.link.fail(PeerGoneError("enough"))
        with pytest.raises(PeerGoneError):
            async with asyncio.timeout(PATIENCE):
                await waiting
        assert far.link._transport is not None
        near = far.link._transport.get_extra_info("socket")
        await becomes(lambda: near.fileno() == -1)
        assert isinstance(await far.ended(), PeerGoneError)


async def test_what_was_queued_before_a_close_still_leaves() -> None:
    async with connected() as far:
        far.start()
        far.link.send(FrameKind.BYE, {"id": 0}, ())
        far.link.close()
        async with asyncio.timeout(PATIENCE):
            assert await far.reader.read() == wire({"id": 0}, kind=FrameKind.BYE)
