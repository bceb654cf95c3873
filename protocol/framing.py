"""Length framing of a byte stream, without I/O: bytes in, frames out.

A frame is a 16-byte preamble, a msgpack map (the head) and raw bytes (the body)::

    offset 0  2 bytes  magic b"SW"
           2  1 byte   framing version (1)
           3  1 byte   frame kind
           4  4 bytes  head length, big endian
           8  8 bytes  body length, big endian

The reader hands out the buffer into which the next bytes belong, so that a body
lands in its final place without a copy. Each length is checked before anything is
allocated for it; a stream that breaks a rule is of no further use and is closed.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import msgpack

from protocol.errors import FrameError

MAGIC = b"SW"
FRAMING_VERSION = 1
PREAMBLE = struct.Struct(">2sBBIQ")

MAX_HEAD_BYTES = 256 * 1024
"""A head carries ids, signatures, sketches and up to 64 records of 4 KiB; never tensors."""

MAX_BODY_BYTES = 1 << 30
"""No tensor of a stage boundary and no part of an averaging round is larger than 1 GiB."""

MAX_DISCARDED_BYTES = 256 << 20
"""A body that nobody will read is passed over up to this size, so that its request can be refused politely."""

DISCARD = -1
"""The answer of a body limit that means: pass the body over, and deliver the frame without it."""

DISCARD_CHUNK_BYTES = 64 * 1024

Buffer = bytes | bytearray | memoryview


class FrameKind(IntEnum):
    """What a frame is for. Unknown kinds end the stream."""

    HELLO = 1
    REQUEST = 2
    REPLY = 3
    ERROR = 4
    CANCEL = 5
    PING = 6
    PONG = 7
    BYE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """One parsed frame. ``body`` is owned by whoever receives the frame."""

    kind: FrameKind
    head: Mapping[str, Any]
    body: Buffer = b""
    discarded: bool = False
    """Whether the body was passed over instead of received."""

    @property
    def size(self) -> int:
        """Bytes of the body, the part that dominates the traffic."""
        return len(self.body)


BodyLimit = Callable[[FrameKind, Mapping[str, Any]], int]
"""How many body bytes a frame with this head may announce, or DISCARD; called before allocation."""


def encode_head(kind: FrameKind, head: Mapping[str, Any], body_bytes: int) -> bytes:
    """Return preamble and head of a frame whose body of ``body_bytes`` bytes follows.

    Raises:
        FrameError: the head or the body is larger than any receiver accepts.
    """
    packed: bytes = msgpack.packb(dict(head), use_bin_type=True)
    if len(packed) > MAX_HEAD_BYTES:
        raise FrameError(f"a frame head of {len(packed)} bytes is over the limit of {MAX_HEAD_BYTES}")
    if body_bytes > MAX_BODY_BYTES:
        raise FrameError(f"a frame body of {body_bytes} bytes is over the limit of {MAX_BODY_BYTES}")
    return PREAMBLE.pack(MAGIC, FRAMING_VERSION, kind, len(packed), body_bytes) + packed


def decode_head(packed: Buffer) -> Mapping[str, Any]:
    """Parse the msgpack map of a head, with limits on every container.

    Raises:
        FrameError: not msgpack, not a map, or a key that is not text.
    """
    try:
        head = msgpack.unpackb(
            packed,
            raw=False,
            strict_map_key=True,
            max_array_len=4096,
            max_map_len=256,
            max_ext_len=0,
            max_str_len=4096,
            max_bin_len=MAX_HEAD_BYTES,
        )
    except Exception as error:  # msgpack raises several unrelated types for hostile bytes
        raise FrameError(f"a frame head is not valid msgpack: {type(error).__name__}") from error
    if not isinstance(head, dict) or not all(isinstance(key, str) for key in head):
        raise FrameError("a frame head is not a map with text keys")
    return head


class FrameReader:
    """Turns the bytes of one stream into frames.

    ``get_buffer`` and ``buffer_updated`` have the shape of ``asyncio.BufferedProtocol``;
    ``feed`` is the same for bytes that are already in memory.
    """

    def __init__(self, body_limit: BodyLimit) -> None:
        self._body_limit = body_limit
        self._preamble = bytearray(PREAMBLE.size)
        self._target = memoryview(self._preamble)
        self._filled = 0
        self._stage = 0  # 0 preamble, 1 head, 2 body, 3 body that is passed over
        self._kind = FrameKind.HELLO
        self._head: Mapping[str, Any] = {}
        self._body_bytes = 0
        self._body = bytearray()
        self._left = 0  # of a body that is passed over

    @property
    def mid_frame(self) -> bool:
        """Whether an end of stream now would cut a frame in two."""
        return self._stage != 0 or self._filled != 0

    def get_buffer(self) -> memoryview:
        """The memory into which the next bytes of the stream belong; never empty."""
        return self._target[self._filled :]

    def buffer_updated(self, count: int) -> Frame | None:
        """Note that ``count`` bytes were written; return a frame if that completed one.

        Raises:
            FrameError: the stream broke the framing; close it.
        """
        self._filled += count
        if self._filled < len(self._target):
            return None
        if self._stage == 0:
            return self._after_preamble()
        if self._stage == 1:
            return self._after_head()
        if self._stage == 3:
            return self._pass_over()
        return self._finish(self._body)

    def feed(self, data: Buffer) -> list[Frame]:
        """Parse ``data`` and return the frames that it completes."""
        frames: list[Frame] = []
        view = memoryview(data)
        while len(view):
            buffer = self.get_buffer()
            count = min(len(buffer), len(view))
            buffer[:count] = view[:count]
            view = view[count:]
            frame = self.buffer_updated(count)
            if frame is not None:
                frames.append(frame)
        return frames

    def _expect(self, stage: int, target: bytearray) -> None:
        self._stage, self._target, self._filled = stage, memoryview(target), 0

    def _after_preamble(self) -> Frame | None:
        magic, version, kind, head_bytes, body_bytes = PREAMBLE.unpack(self._preamble)
        if magic != MAGIC:
            raise FrameError("the stream does not speak this protocol (wrong magic)")
        if version != FRAMING_VERSION:
            raise FrameError(f"framing version {version} is not {FRAMING_VERSION}")
        try:
            self._kind = FrameKind(kind)
        except ValueError:
            raise FrameError(f"unknown frame kind {kind}") from None
        if head_bytes > MAX_HEAD_BYTES:
            raise FrameError(f"a frame announces a head of {head_bytes} bytes, over {MAX_HEAD_BYTES}")
        if body_bytes > MAX_BODY_BYTES:
            raise FrameError(f"a frame announces a body of {body_bytes} bytes, over {MAX_BODY_BYTES}")
        self._body_bytes = body_bytes
        if head_bytes == 0:
            raise FrameError("a frame announces an empty head")
        self._expect(1, bytearray(head_bytes))
        return None

    def _after_head(self) -> Frame | None:
        self._head = decode_head(self._target)
        if self._body_bytes == 0:
            return self._finish(bytearray())
        limit = self._body_limit(self._kind, self._head)
        if limit == DISCARD and self._body_bytes <= MAX_DISCARDED_BYTES:
            self._left = self._body_bytes
            self._expect(3, bytearray(min(self._left, DISCARD_CHUNK_BYTES)))
            return None
        if self._body_bytes > limit:
            allowed = max(limit, 0)
            raise FrameError(f"a frame announces a body of {self._body_bytes} bytes where {allowed} are allowed")
        self._body = bytearray(self._body_bytes)
        self._expect(2, self._body)
        return None

    def _pass_over(self) -> Frame | None:
        self._left -= len(self._target)
        if self._left:
            self._expect(3, bytearray(min(self._left, DISCARD_CHUNK_BYTES)))
            return None
        return self._finish(bytearray(), discarded=True)

    def _finish(self, body: bytearray, *, discarded: bool = False) -> Frame:
        frame = Frame(kind=self._kind, head=self._head, body=body, discarded=discarded)
        self._body, self._head = bytearray(), {}
        self._expect(0, self._preamble)
        return frame
