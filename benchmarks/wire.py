"""How fast tensors become bytes and frames become messages, on one thread and without a network."""

from __future__ import annotations

from functools import partial

import torch

from benchmarks._timing import median_seconds
from protocol.framing import FrameKind, FrameReader, encode_head
from protocol.tensors import WireDtype, decode_tensor, encode_tensor

SHAPE = (4, 1024, 1024)
"""Sequences, tokens, width: 16 MiB as float32."""

READ_BYTES = 256 * 1024
"""Bytes that a socket hands over at once."""

MIB = 1 << 20


def run() -> dict[str, float]:
    """MiB of float32 values a second for each codec, and MiB of body a second for framing."""
    tensor = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
    size = tensor.nbytes / MIB
    numbers: dict[str, float] = {}
    for dtype in (WireDtype.BF16, WireDtype.INT8):
        body = bytearray().join(encode_tensor(tensor, dtype))
        encode, decode = partial(encode_tensor, tensor, dtype), partial(_decode, body, dtype)
        numbers[f"encode_{dtype}_mib_per_second"] = size / median_seconds(encode)
        numbers[f"decode_{dtype}_mib_per_second"] = size / median_seconds(decode)
    numbers["framing_mib_per_second"] = size / median_seconds(_ReadFrame(tensor.numpy().tobytes()))
    return {name: round(value, 1) for name, value in numbers.items()}


def _decode(body: bytearray, dtype: WireDtype) -> torch.Tensor:
    return decode_tensor(body, dtype=dtype.value, shape=SHAPE, expected_dtype=dtype, expected_shape=SHAPE)


class _ReadFrame:
    """Reads one frame as it would come from a socket."""

    def __init__(self, body: bytes) -> None:
        stream = memoryview(encode_head(FrameKind.REPLY, {"id": 1}, len(body)) + body)
        self._pieces = [stream[at : at + READ_BYTES] for at in range(0, len(stream), READ_BYTES)]
        self._limit = len(body)

    def __call__(self) -> None:
        reader = FrameReader(lambda kind, head: self._limit)
        for piece in self._pieces:
            reader.feed(piece)
