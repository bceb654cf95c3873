"""Frames over an asyncio byte stream, with the bytes of a body received in place."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from protocol.errors import FrameError, PeerGoneError, SentinelError
from protocol.framing import BodyLimit, Buffer, Frame, FrameKind, FrameReader, encode_head
from protocol.transports.base import Link

MAX_PRELUDE_BYTES = 64 * 1024
WRITE_BUFFER_BYTES = 1 << 20
FLUSH_SECONDS = 1.0
"""How long the last words of a stream that is being closed may take to leave."""


class StreamLink(asyncio.BufferedProtocol, Link):
    """One stream. Before its frames may stand one varint-delimited message of the local daemon.

    ``opened`` resolves to that message (empty bytes when ``prelude`` is false).
    """

    def __init__(self, *, prelude: bool = False, on_opened: Callable[[StreamLink, bytes], None] | None = None) -> None:
        self.peer = ""
        self.opened: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._on_opened = on_opened
        self._transport: asyncio.Transport | None = None
        self._reader: FrameReader | None = None
        self._on_frame: Callable[[Frame], None] | None = None
        self._on_closed: Callable[[SentinelError], None] | None = None
        self._error: SentinelError | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._in_prelude = prelude
        self._varint = 0
        self._varint_shift = 0
        self._byte = bytearray(1)
        self._prelude: memoryview | None = None
        self._prelude_filled = 0

    # asyncio calls these -------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)  # uvloop's transports are no subclass
        self._transport = stream
        stream.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)
        if not self._in_prelude:
            self._open(b"")

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._in_prelude:
            return memoryview(self._byte) if self._prelude is None else self._prelude[self._prelude_filled :]
        assert self._reader is not None
        return self._reader.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        try:
            if self._in_prelude:
                self._read_prelude(nbytes)
                return
            assert self._reader is not None and self._on_frame is not None
            frame = self._reader.buffer_updated(nbytes)
            if frame is not None:
                self._on_frame(frame)
        except SentinelError as error:
            self.fail(error)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        cut = self._reader is not None and self._reader.mid_frame
        if self._error is None:
            reason = "in the middle of a frame" if cut else (str(exc) if exc else "by the other side")
            self._error = PeerGoneError(f"the stream was closed {reason}")
        self._writable.set()
        if not self.opened.done():
            self.opened.set_exception(self._error)
            self.opened.exception()  # the opener may have given up; asyncio must not complain
        if self._on_closed is not None:
            on_closed, self._on_closed = self._on_closed, None
            on_closed(self._error)

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # the Link contract ---------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether the stream has ended."""
        return self._error is not None

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
        if self._error is not None or self._transport is None:
            raise self._error or PeerGoneError("the stream is not open")
        body_bytes = sum(memoryview(buffer).nbytes for buffer in body)
        packed = encode_head(kind, head, body_bytes)
        self._transport.write(packed)
        for buffer in body:
            if len(buffer):
                self._transport.write(buffer)
        return len(packed) + body_bytes

    def write_raw(self, data: bytes) -> None:
        """Write bytes outside of any frame: the local daemon's own request."""
        assert self._transport is not None
        self._transport.write(data)

    async def drain(self) -> None:
        await self._writable.wait()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            with contextlib.suppress(RuntimeError):  # already paused
                self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._error is None:
            with contextlib.suppress(RuntimeError):  # not paused
                self._transport.resume_reading()

    def close(self) -> None:
        if self._error is None:
            self._error = PeerGoneError("the stream was closed by this node")
        self._shut()

    def fail(self, error: SentinelError) -> None:
        """End the stream because of ``error``, after telling the session, which may say why to the peer."""
        if self._error is not None:
            return
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            on_closed(error)
        self._error = error
        self.pause()
        self._shut()

    # ---------------------------------------------------------------------------------

    def _shut(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.close()
            # A peer that reads nothing must not keep the socket open, nor the memory of what was meant for it.
            asyncio.get_running_loop().call_later(FLUSH_SECONDS, self._transport.abort)

    def _open(self, prelude: bytes) -> None:
        """Hand the stream over; nothing more is read until ``start``."""
        self._in_prelude = False
        if self._transport is not None:
            self._transport.pause_reading()
        if not self.opened.done():
            self.opened.set_result(prelude)
        if self._on_opened is not None:
            self._on_opened(self, prelude)

    def _read_prelude(self, count: int) -> None:
        if self._prelude is not None:
            self._prelude_filled += count
            if self._prelude_filled == len(self._prelude):
                self._open(bytes(self._prelude))
            return
        byte = self._byte[0]
        self._varint |= (byte & 0x7F) << self._varint_shift
        self._varint_shift += 7
        if self._varint > MAX_PRELUDE_BYTES or self._varint_shift > 28:
            raise FrameError(f"the local daemon announces a message over {MAX_PRELUDE_BYTES} bytes")
        if not byte & 0x80:
            self._prelude = memoryview(bytearray(self._varint))
            if self._varint == 0:
                self._open(b"")
