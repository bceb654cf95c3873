"""Bytes become frames however they are cut, and hostile bytes raise FrameError before they cost anything."""

from __future__ import annotations

import contextlib
import itertools
import tracemalloc
from collections.abc import Mapping
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import FrameError
from protocol.framing import (
    DISCARD,
    DISCARD_CHUNK_BYTES,
    FRAMING_VERSION,
    MAGIC,
    MAX_BODY_BYTES,
    MAX_DISCARDED_BYTES,
    MAX_HEAD_BYTES,
    PREAMBLE,
    Frame,
    FrameKind,
    FrameReader,
    decode_head,
    encode_head,
)

KINDS = st.sampled_from(list(FrameKind))
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(allow_nan=False),
    st.text(max_size=20),
    st.binary(max_size=40),
)
HEADS = st.dictionaries(st.text(max_size=12), st.one_of(SCALARS, st.lists(SCALARS, max_size=4)), max_size=6)
FRAMES = st.lists(st.tuples(KINDS, HEADS, st.binary(max_size=300)), max_size=5)


def anything(kind: FrameKind, head: Mapping[str, Any]) -> int:
    """The body limit of a reader that takes every body."""
    return MAX_BODY_BYTES


def wire(kind: FrameKind, head: Mapping[str, Any], body: bytes = b"") -> bytes:
    return encode_head(kind, head, len(body)) + body


def preamble(
    *, magic: bytes = MAGIC, version: int = FRAMING_VERSION, kind: int = 2, head: int = 1, body: int = 0
) -> bytes:
    return PREAMBLE.pack(magic, version, kind, head, body)


def framed(packed_head: bytes, body: bytes = b"") -> bytes:
    return preamble(head=len(packed_head), body=len(body)) + packed_head + body


def plain(frame: Frame) -> tuple[FrameKind, dict[str, Any], bytes]:
    return frame.kind, dict(frame.head), bytes(frame.body)


@given(FRAMES)
def test_what_is_written_reads_back(frames: list[tuple[FrameKind, dict[str, Any], bytes]]) -> None:
    reader = FrameReader(anything)
    stream = b"".join(wire(*frame) for frame in frames)
    assert [plain(frame) for frame in reader.feed(stream)] == frames
    assert not reader.mid_frame


@given(FRAMES, st.data())
def test_any_cut_of_the_stream_gives_the_same_frames(
    frames: list[tuple[FrameKind, dict[str, Any], bytes]], data: st.DataObject
) -> None:
    stream = b"".join(wire(*frame) for frame in frames)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=12))
    bounds = [0, *sorted(cuts), len(stream)]
    reader = FrameReader(anything)
    read = [plain(frame) for start, end in itertools.pairwise(bounds) for frame in reader.feed(stream[start:end])]
    assert read == frames


@given(HEADS, st.binary(max_size=100), st.data())
def test_a_stream_that_ends_inside_a_frame_is_known_to_be_cut(
    head: dict[str, Any], body: bytes, data: st.DataObject
) -> None:
    stream = wire(FrameKind.REQUEST, head, body)
    length = data.draw(st.integers(1, len(stream) - 1))
    reader = FrameReader(anything)
    assert reader.feed(stream[:length]) == []
    assert reader.mid_frame


def test_a_body_is_received_in_place() -> None:
    reader = FrameReader(anything)
    reader.feed(encode_head(FrameKind.REPLY, {"id": 1}, 8))
    buffer = reader.get_buffer()
    assert len(buffer) == 8
    buffer[:] = b"12345678"
    frame = reader.buffer_updated(8)
    assert frame is not None and frame.size == 8
    buffer[0] = ord("x")  # the same memory: nothing was copied
    assert frame.body == b"x2345678"


def test_frames_do_not_share_their_bodies() -> None:
    reader = FrameReader(anything)
    first, second = reader.feed(wire(FrameKind.REPLY, {"id": 1}, b"one") + wire(FrameKind.REPLY, {"id": 2}, b"two"))
    assert (first.body, second.body) == (b"one", b"two")


@pytest.mark.parametrize("announced", [2**40, 2**64 - 1, MAX_BODY_BYTES + 1])
def test_a_body_beyond_every_limit_is_refused_before_its_head_arrives(announced: int) -> None:
    reader = FrameReader(anything)
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match="body"):
            reader.feed(preamble(body=announced))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_a_body_over_the_limit_of_its_head_is_refused_before_allocation() -> None:
    asked: list[tuple[FrameKind, Mapping[str, Any]]] = []

    def limit(kind: FrameKind, head: Mapping[str, Any]) -> int:
        asked.append((kind, head))
        return 1000

    reader = FrameReader(limit)
    head = encode_head(FrameKind.REQUEST, {"id": 7}, MAX_BODY_BYTES)
    tracemalloc.start()
    try:
        with pytest.raises(FrameError, match="1000 are allowed"):
            reader.feed(head)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()
    assert asked == [(FrameKind.REQUEST, {"id": 7})]


def test_the_limit_itself_is_allowed_and_a_frame_without_body_asks_nobody() -> None:
    assert FrameReader(lambda kind, head: 3).feed(wire(FrameKind.REPLY, {"id": 1}, b"abc"))[0].body == b"abc"
    assert FrameReader(lambda kind, head: 0).feed(wire(FrameKind.PING, {"id": 0}))[0].kind is FrameKind.PING


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (preamble(head=MAX_HEAD_BYTES + 1), "head"),
        (preamble(head=0), "empty head"),
        (preamble(magic=b"WS"), "magic"),
        (b"GET / HTTP/1.1\r\n", "magic"),
        (preamble(version=2), "version 2"),
        (preamble(kind=0), "kind 0"),
        (preamble(kind=99), "kind 99"),
        (framed(b"\xc1"), "msgpack"),
        (framed(b"\x81\xa1a"), "msgpack"),
        (framed(b"\x80\x80"), "msgpack"),
        (framed(msgpack.packb([1, 2])), "not a map"),
        (framed(msgpack.packb("text")), "not a map"),
        (framed(msgpack.packb({1: 2})), "msgpack"),
        (framed(msgpack.packb({b"bytes": 2})), "text keys"),
        (framed(b"\x91" * 5000 + b"\xc0"), "msgpack"),
        (framed(b"\x81\xa1a" * 5000 + b"\xc0"), "msgpack"),
        (framed(msgpack.packb({"a": list(range(4097))})), "msgpack"),
        (framed(msgpack.packb({str(index): 0 for index in range(257)})), "msgpack"),
        (framed(msgpack.packb({"a": "x" * 4097})), "msgpack"),
        (framed(msgpack.packb({"a": msgpack.ExtType(5, b"x")})), "msgpack"),
        (framed(b"\x81\xa1a\xdd\xff\xff\xff\xff"), "msgpack"),  # an array that claims 2**32 - 1 items
        (framed(b"\x81\xa1a\xc6\xff\xff\xff\xff"), "msgpack"),  # bytes that claim 4 GiB
        (framed(b"\x81\xa1a\xa1\xff"), "msgpack"),  # text that is not UTF-8
    ],
)
def test_a_stream_that_breaks_a_rule_is_refused(stream: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        FrameReader(anything).feed(stream)


@given(st.binary(max_size=600))
def test_arbitrary_bytes_raise_nothing_but_frame_errors(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        FrameReader(anything).feed(data)


@given(KINDS, st.binary(min_size=1, max_size=200), st.binary(max_size=50))
def test_arbitrary_heads_raise_nothing_but_frame_errors(kind: FrameKind, head: bytes, body: bytes) -> None:
    stream = preamble(kind=kind, head=len(head), body=len(body)) + head + body
    try:
        frames = FrameReader(lambda kind, head: 20).feed(stream)
    except FrameError:
        return
    assert all(isinstance(key, str) for frame in frames for key in frame.head)


@given(st.binary(min_size=1, max_size=100))
def test_a_flipped_byte_raises_nothing_but_frame_errors(noise: bytes) -> None:
    stream = bytearray(wire(FrameKind.REQUEST, {"id": 1, "method": "train", "shape": [4, 2]}, b"body"))
    for index, byte in enumerate(noise):
        stream[(byte * 7 + index) % len(stream)] ^= byte
    with contextlib.suppress(FrameError):
        FrameReader(anything).feed(bytes(stream))


def test_a_writer_refuses_what_no_reader_takes() -> None:
    with pytest.raises(FrameError, match="head"):
        encode_head(FrameKind.REPLY, {"data": bytes(MAX_HEAD_BYTES)}, 0)
    with pytest.raises(FrameError, match="body"):
        encode_head(FrameKind.REPLY, {"id": 1}, MAX_BODY_BYTES + 1)


def test_decoding_a_head_keeps_bytes_and_text_apart() -> None:
    assert decode_head(msgpack.packb({"a": b"x", "b": "x"})) == {"a": b"x", "b": "x"}


@given(size=st.integers(1, 3 * DISCARD_CHUNK_BYTES), cut=st.integers(1, DISCARD_CHUNK_BYTES + 7))
def test_a_body_that_nobody_wants_is_passed_over_and_the_next_frame_is_read(size: int, cut: int) -> None:
    reader = FrameReader(lambda kind, head: DISCARD if head["id"] == 1 else 8)
    unwanted = encode_head(FrameKind.REQUEST, {"id": 1}, size) + bytes(size)
    wanted = encode_head(FrameKind.REQUEST, {"id": 2}, 8) + b"12345678"
    stream = unwanted + wanted
    frames = [frame for start in range(0, len(stream), cut) for frame in reader.feed(stream[start : start + cut])]
    assert [(frame.head["id"], bytes(frame.body), frame.discarded) for frame in frames] == [
        (1, b"", True),
        (2, b"12345678", False),
    ]


def test_even_a_body_to_be_passed_over_has_a_limit() -> None:
    reader = FrameReader(lambda kind, head: DISCARD)
    with pytest.raises(FrameError):
        reader.feed(encode_head(FrameKind.REQUEST, {"id": 1}, MAX_DISCARDED_BYTES + 1))
