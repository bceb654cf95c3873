"""Tensors as bytes: float32, bfloat16 and block-wise int8, without pickling.

The receiver says which dtype and shape it expects; what the bytes claim about themselves
only has to agree. Encoding float32 and decoding float32 copy nothing: they share memory
with the tensor. Body layouts, little endian, n values:

    fp32   n float32
    bf16   n bfloat16
    int8   ceil(n / 64) float32 scales, then n int8; value = int8 * scale of its block of 64
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import torch

from protocol.errors import TensorError
from protocol.framing import Buffer

INT8_BLOCK = 64
"""Values that share one scale: 6 % more bytes than int8 alone, and one outlier spoils only 63 others."""


class WireDtype(StrEnum):
    """How numbers travel."""

    FP32 = "fp32"
    BF16 = "bf16"
    INT8 = "int8"


def encoded_bytes(shape: Sequence[int], dtype: WireDtype) -> int:
    """Bytes of an encoded tensor of this shape."""
    count = 1
    for size in shape:
        count *= size
    if dtype is WireDtype.FP32:
        return 4 * count
    if dtype is WireDtype.BF16:
        return 2 * count
    return 4 * -(-count // INT8_BLOCK) + count


def encode_tensor(tensor: torch.Tensor, dtype: WireDtype) -> list[memoryview]:
    """Encode a CPU tensor; the buffers, one after another, are the body.

    Args:
        tensor: any shape, float32. The float32 encoding shares its memory, so it must not change
            until the buffers have been sent.
    """
    flat = tensor.detach().contiguous().view(-1)
    if dtype is WireDtype.FP32:
        return [_bytes_of(flat)]
    if dtype is WireDtype.BF16:
        return [_bytes_of(flat.to(torch.bfloat16))]
    padded = torch.nn.functional.pad(flat, (0, -len(flat) % INT8_BLOCK)).view(-1, INT8_BLOCK)
    scales = padded.abs().amax(dim=1) / 127.0
    # A block of zeros has scale 0; dividing by 1 there keeps its zeros.
    divisor = torch.where(scales > 0, scales, torch.ones_like(scales))
    values = (padded / divisor[:, None]).round_().clamp_(-127, 127).to(torch.int8).view(-1)[: len(flat)]
    return [_bytes_of(scales), _bytes_of(values.contiguous())]


def decode_tensor(
    body: Buffer,
    *,
    dtype: str,
    shape: Sequence[int],
    expected_dtype: WireDtype,
    expected_shape: Sequence[int],
) -> torch.Tensor:
    """Decode a body into a float32 CPU tensor of ``expected_shape``.

    Raises:
        TensorError: the announced dtype or shape is not the expected one, or the size does not fit.
    """
    if dtype != expected_dtype.value:
        raise TensorError(f"a tensor came as {dtype[:8]} where {expected_dtype.value} was expected", kind="dtype")
    if tuple(shape) != tuple(expected_shape):
        raise TensorError(
            f"a tensor came with shape {tuple(shape)} where {tuple(expected_shape)} was expected", kind="shape"
        )
    size = encoded_bytes(expected_shape, expected_dtype)
    if memoryview(body).nbytes != size:
        raise TensorError(f"a tensor came with {memoryview(body).nbytes} bytes where {size} were expected", kind="size")
    if size == 0:
        return torch.empty(tuple(expected_shape))
    writable = body if not memoryview(body).readonly else bytearray(body)
    if expected_dtype is WireDtype.FP32:
        return torch.frombuffer(writable, dtype=torch.float32).view(tuple(expected_shape))
    if expected_dtype is WireDtype.BF16:
        return torch.frombuffer(writable, dtype=torch.bfloat16).to(torch.float32).view(tuple(expected_shape))
    count = torch.Size(expected_shape).numel()
    blocks = -(-count // INT8_BLOCK)
    scales = torch.frombuffer(writable, dtype=torch.float32, count=blocks)
    values = torch.frombuffer(writable, dtype=torch.int8, offset=4 * blocks, count=count)
    padded = torch.nn.functional.pad(values.to(torch.float32), (0, -count % INT8_BLOCK))
    return (padded.view(blocks, INT8_BLOCK) * scales[:, None]).view(-1)[:count].view(tuple(expected_shape))


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    if tensor.numel() == 0:
        return memoryview(b"")
    if tensor.stride(-1) != 1:  # a slice of one entry is contiguous whatever its stride, and has no view as bytes
        tensor = tensor.clone(memory_format=torch.contiguous_format)
    return tensor.view(torch.uint8).numpy().data
