"""Tensors as bytes: exact where they promise it, within their error where they do not, refused when wrong."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import TensorError
from protocol.tensors import INT8_BLOCK, WireDtype, decode_tensor, encode_tensor, encoded_bytes

SHAPES = st.lists(st.integers(0, 9), max_size=3).map(tuple)
DTYPES = st.sampled_from(list(WireDtype))
SEEDS = st.integers(0, 2**32)


def random_tensor(shape: tuple[int, ...], seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def joined(tensor: torch.Tensor, dtype: WireDtype) -> bytearray:
    return bytearray(b"".join(encode_tensor(tensor, dtype)))


def decoded(body: bytes | bytearray | memoryview, shape: tuple[int, ...], dtype: WireDtype) -> torch.Tensor:
    return decode_tensor(body, dtype=dtype.value, shape=shape, expected_dtype=dtype, expected_shape=shape)


def test_fp32_keeps_every_bit_of_the_smallest_and_largest_values() -> None:
    values = torch.tensor([0.0, -0.0, 1e-45, -1e-38, 3.4e38, math.pi])
    back = decoded(joined(values, WireDtype.FP32), (6,), WireDtype.FP32)
    assert torch.equal(back.view(torch.int32), values.view(torch.int32))


@given(SHAPES, SEEDS)
def test_fp32_is_exact(shape: tuple[int, ...], seed: int) -> None:
    tensor = random_tensor(shape, seed)
    back = decoded(joined(tensor, WireDtype.FP32), shape, WireDtype.FP32)
    assert back.shape == tensor.shape and back.dtype is torch.float32
    assert torch.equal(back, tensor)


@given(SHAPES, SEEDS, st.sampled_from([1e-30, 1e-3, 1.0, 1e30]))
def test_bf16_is_within_its_eight_bits(shape: tuple[int, ...], seed: int, scale: float) -> None:
    tensor = random_tensor(shape, seed, scale)
    back = decoded(joined(tensor, WireDtype.BF16), shape, WireDtype.BF16)
    assert back.shape == tensor.shape and back.dtype is torch.float32
    assert torch.equal(back, tensor.to(torch.bfloat16).to(torch.float32))
    assert bool(((back - tensor).abs() <= tensor.abs() * 2.0**-8).all())


@given(SHAPES, SEEDS, st.sampled_from([1e-20, 1e-3, 1.0, 1e20]))
def test_int8_is_within_half_a_step_of_its_block(shape: tuple[int, ...], seed: int, scale: float) -> None:
    tensor = random_tensor(shape, seed, scale)
    back = decoded(joined(tensor, WireDtype.INT8), shape, WireDtype.INT8)
    assert back.shape == tensor.shape and back.dtype is torch.float32
    for block, other in zip(tensor.flatten().split(INT8_BLOCK), back.flatten().split(INT8_BLOCK), strict=True):
        if len(block):
            step = float(block.abs().max()) / 127
            assert float((block - other).abs().max()) <= 0.5001 * step


def test_one_outlier_spoils_only_its_own_block_of_int8() -> None:
    tensor = torch.full((3 * INT8_BLOCK,), 0.5)
    tensor[INT8_BLOCK] = 1e6
    back = decoded(joined(tensor, WireDtype.INT8), (3 * INT8_BLOCK,), WireDtype.INT8)
    assert torch.allclose(back[:INT8_BLOCK], tensor[:INT8_BLOCK])
    assert torch.allclose(back[2 * INT8_BLOCK :], tensor[2 * INT8_BLOCK :])
    assert float(back[INT8_BLOCK]) == pytest.approx(1e6) and not back[INT8_BLOCK + 1 : 2 * INT8_BLOCK].any()


def test_int8_keeps_zeros() -> None:
    back = decoded(joined(torch.zeros(130), WireDtype.INT8), (130,), WireDtype.INT8)
    assert torch.equal(back, torch.zeros(130))


@given(SHAPES, DTYPES, SEEDS)
def test_encoded_bytes_is_the_real_size(shape: tuple[int, ...], dtype: WireDtype, seed: int) -> None:
    buffers = encode_tensor(random_tensor(shape, seed), dtype)
    assert sum(buffer.nbytes for buffer in buffers) == encoded_bytes(shape, dtype)
    assert all(buffer.format == "B" and buffer.contiguous for buffer in buffers)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 127, 128, 129])
def test_odd_sizes_around_a_block(count: int) -> None:
    tensor = random_tensor((count,), count)
    for dtype in WireDtype:
        body = joined(tensor, dtype)
        assert len(body) == encoded_bytes((count,), dtype)
        assert torch.allclose(decoded(body, (count,), dtype), tensor, atol=0.05)


def test_a_view_with_strides_is_encoded_in_the_order_of_its_values() -> None:
    tensor = random_tensor((4, 6), 1).t()[1:5]
    for dtype in WireDtype:
        assert joined(tensor, dtype) == joined(tensor.contiguous(), dtype)


@pytest.mark.parametrize("dtype", list(WireDtype))
@pytest.mark.parametrize("step", [1, 2, 7])
def test_a_slice_of_one_entry_is_encoded_whatever_its_stride(dtype: WireDtype, step: int) -> None:
    values = torch.arange(float(step + 1))[1::step][:1]
    assert values.shape == (1,)
    body = b"".join(encode_tensor(values, dtype))
    decoded = decode_tensor(body, dtype=dtype.value, shape=(1,), expected_dtype=dtype, expected_shape=(1,))
    assert decoded.tolist() == [1.0]


def test_encoding_needs_no_detached_tensor() -> None:
    tensor = torch.ones(3, requires_grad=True)
    back = decoded(joined(tensor * 2, WireDtype.FP32), (3,), WireDtype.FP32)
    assert not back.requires_grad and torch.equal(back, torch.full((3,), 2.0))


def test_fp32_is_encoded_and_decoded_without_a_copy() -> None:
    tensor = random_tensor((2, 3), 1)
    (buffer,) = encode_tensor(tensor, WireDtype.FP32)
    assert torch.frombuffer(buffer, dtype=torch.float32).data_ptr() == tensor.data_ptr()
    body = bytearray(buffer)
    back = decoded(body, (2, 3), WireDtype.FP32)
    assert torch.frombuffer(body, dtype=torch.float32).data_ptr() == back.data_ptr()
    body[:4] = bytes(4)
    assert float(back[0, 0]) == 0.0


@pytest.mark.parametrize("dtype", list(WireDtype))
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda body: memoryview(bytes(body))])
def test_any_buffer_is_decoded_and_a_readonly_one_is_not_written_to(dtype: WireDtype, kind: type) -> None:
    tensor = random_tensor((5, 7), 2)
    body = kind(joined(tensor, dtype))
    kept = bytes(body)
    decoded(body, (5, 7), dtype).zero_()
    if memoryview(body).readonly:
        assert bytes(body) == kept


@pytest.mark.parametrize("dtype", [WireDtype.FP32, WireDtype.BF16])
def test_values_that_are_not_finite_arrive_as_they_are(dtype: WireDtype) -> None:
    back = decoded(joined(torch.tensor([math.nan, math.inf, -math.inf, 1.0]), dtype), (4,), dtype)
    assert math.isnan(back[0]) and back[1:].tolist() == [math.inf, -math.inf, 1.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_int8_of_values_that_are_not_finite_does_not_hide_them(bad: float) -> None:
    tensor = torch.ones(2 * INT8_BLOCK)
    tensor[3] = bad
    back = decoded(joined(tensor, WireDtype.INT8), (2 * INT8_BLOCK,), WireDtype.INT8)
    assert not torch.isfinite(back[:INT8_BLOCK]).all()
    assert torch.allclose(back[INT8_BLOCK:], torch.ones(INT8_BLOCK))


@given(st.binary(min_size=4 + 5, max_size=4 + 5))
def test_any_bytes_of_the_right_size_decode_to_something(body: bytes) -> None:
    assert decoded(body, (5,), WireDtype.INT8).shape == (5,)


@pytest.mark.parametrize(
    ("dtype", "shape", "size", "kind"),
    [
        ("bf16", (2, 3), 24, "dtype"),
        ("float32", (2, 3), 24, "dtype"),
        ("", (2, 3), 24, "dtype"),
        ("fp32", (3, 2), 24, "shape"),
        ("fp32", (6,), 24, "shape"),
        ("fp32", (), 24, "shape"),
        ("fp32", (2, 3), 23, "size"),
        ("fp32", (2, 3), 25, "size"),
        ("fp32", (2, 3), 0, "size"),
    ],
)
def test_what_is_not_expected_is_refused_with_its_kind(
    dtype: str, shape: tuple[int, ...], size: int, kind: str
) -> None:
    with pytest.raises(TensorError) as caught:
        decode_tensor(bytes(size), dtype=dtype, shape=shape, expected_dtype=WireDtype.FP32, expected_shape=(2, 3))
    assert caught.value.kind == kind


@given(DTYPES, st.integers(0, 400))
def test_only_the_exact_size_is_taken(dtype: WireDtype, size: int) -> None:
    right = encoded_bytes((10, 7), dtype)
    if size == right:
        assert decoded(bytes(size), (10, 7), dtype).shape == (10, 7)
        return
    with pytest.raises(TensorError) as caught:
        decoded(bytes(size), (10, 7), dtype)
    assert caught.value.kind == "size"
