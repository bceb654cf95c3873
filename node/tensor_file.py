"""Safetensors files that are written a piece at a time, so that a large state needs no second copy in memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Final

import torch

CHUNK_BYTES: Final = 16 << 20
"""Read, hashed or written at a time, so that other threads get their turn."""

DTYPES: Final = {"F32": torch.float32, "I64": torch.int64}
"""All that this project writes, by the format's names."""

_NAMES: Final = {dtype: name for name, dtype in DTYPES.items()}


def header(tensors: Iterable[tuple[str, torch.dtype, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """How a file begins in which these tensors (name, dtype, shape) follow one another.

    Name the wider dtypes first: each tensor is then aligned in the file.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def chunks(tensor: torch.Tensor) -> Iterable[memoryview]:
    """The bytes of a contiguous CPU tensor of one dimension or more, a part at a time; shares memory."""
    view = tensor.view(-1).view(torch.uint8).numpy().data
    return (view[start : start + CHUNK_BYTES] for start in range(0, len(view), CHUNK_BYTES))
