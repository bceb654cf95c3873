"""Bytes that are nearly right, drawn from a seed: the same everywhere."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

INTERESTING = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xc0",
    b"\xc4\xff",
    b"\xdd\xff\xff\xff\xff",
    b"\xdf\x7f\xff\xff\xff",
)
INTERESTING += (
    b"[" * 200,
    b'{"a":' * 100,
    b"\x91" * 300,
    b"\xcb\x7f\xf8\0\0\0\0\0\0",
    b"NaN",
    b"1e999",
    b"-1",
    b"9" * 400,
)
MAX_BYTES = 1 << 14


def flip(data: bytearray, rng: random.Random) -> None:
    """Change one bit."""
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)


def write(data: bytearray, rng: random.Random) -> None:
    """Put another byte somewhere."""
    if data:
        data[rng.randrange(len(data))] = rng.randrange(256)


def cut(data: bytearray, rng: random.Random) -> None:
    """Take a piece out."""
    start = rng.randrange(len(data) + 1)
    del data[start : start + rng.randrange(1, 2 + len(data) // 4)]


def insert(data: bytearray, rng: random.Random) -> None:
    """Put something in that has been trouble elsewhere."""
    start = rng.randrange(len(data) + 1)
    data[start:start] = rng.choice(INTERESTING)


def replace(data: bytearray, rng: random.Random) -> None:
    """The same, over what is there."""
    found = rng.choice(INTERESTING)
    start = rng.randrange(len(data) + 1)
    data[start : start + len(found)] = found


def double(data: bytearray, rng: random.Random) -> None:
    """Say a piece again."""
    start = rng.randrange(len(data) + 1)
    data[start:start] = data[start : start + rng.randrange(1, 64)]


MUTATIONS: Sequence[Callable[[bytearray, random.Random], None]] = (flip, write, cut, insert, replace, double)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """The bytes after one to four changes, at most ``MAX_BYTES`` long or as long as they were."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        rng.choice(MUTATIONS)(changed, rng)
    return bytes(changed[: max(MAX_BYTES, len(data))])
