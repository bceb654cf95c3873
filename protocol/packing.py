"""msgpack with one spelling for each value, and reading it from strangers.

Packing is deterministic: maps with sorted keys, floats always of 64 bits, text and bytes kept apart. Reading
bounds the input first, so that nothing in it can claim more memory than it has bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

import msgpack


def pack(value: object) -> bytes:
    """The one spelling of a value made of maps with text keys, sequences, text, bytes, numbers, booleans."""
    return cast(bytes, msgpack.packb(_sorted(value), use_bin_type=True, use_single_float=False))


def unpack(data: bytes) -> object:
    """Read one value. Raises ValueError, and nothing else, for bytes that are not exactly one value."""
    try:
        return cast(object, msgpack.unpackb(data, raw=False, strict_map_key=True))
    except (msgpack.UnpackException, TypeError, OverflowError, RecursionError) as error:
        raise ValueError(str(error)) from error


def _sorted(value: object) -> object:
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value
