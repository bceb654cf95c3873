"""A state becomes bytes and comes back to the bit, and descriptions that cannot be true are refused."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.digest import parameter_digest
from node.snapshot import CHUNK_BYTES, Layout, StageState
from protocol.errors import MessageError
from protocol.messages import MAX_CHUNKS
from tests.node.donating import LAYOUT, make_state, same_bits


def packed(state: StageState, layout: Layout = LAYOUT) -> torch.Tensor:
    image = layout.image()
    layout.pack(state, image)
    return image


@given(parameters=st.integers(1, 300), chunk_bytes=st.integers(1, 4000), step=st.integers(0, 2**40))
def test_a_state_comes_back_to_the_bit(parameters: int, chunk_bytes: int, step: int) -> None:
    state = make_state(step, parameters=parameters)
    layout = Layout.of(state, chunk_bytes=chunk_bytes)
    back = layout.unpack(packed(state, layout), step)
    assert back.step == step
    assert back.tensors().keys() == state.tensors().keys()
    for name, tensor in state.tensors().items():
        other = back.tensors()[name]
        assert (other.dtype, other.shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(other, tensor)


@given(parameters=st.integers(1, 5000), chunk_bytes=st.integers(1, 4000))
def test_chunks_cover_the_state_once_and_are_few_enough_to_be_named(parameters: int, chunk_bytes: int) -> None:
    layout = Layout.of(make_state(0, parameters=parameters), chunk_bytes=chunk_bytes)
    assert layout.size == 12 * parameters + 8
    assert 1 <= layout.chunks <= MAX_CHUNKS
    covered = [place for index in range(layout.chunks) for place in range(layout.size)[layout.bounds(index)]]
    assert covered == list(range(layout.size))


def test_the_chunks_of_a_small_state_are_of_the_usual_size() -> None:
    assert Layout.of(make_state(0)).chunk_bytes == CHUNK_BYTES


def test_every_tensor_begins_where_its_elements_may_lie() -> None:
    for segment in LAYOUT.segments:
        assert segment.start % torch.empty(0, dtype=segment.dtype).element_size() == 0


def test_a_description_names_the_hash_of_each_chunk() -> None:
    state = make_state(3)
    image = packed(state)
    digest = parameter_digest(state.parameters)
    answer = LAYOUT.describe(image, step=3, parameters=digest)
    LAYOUT.check(answer, 3)
    data = image.numpy().tobytes()
    assert answer.chunks == tuple(hashlib.sha256(data[LAYOUT.bounds(index)]).digest() for index in range(LAYOUT.chunks))
    other = replace(state, optimizer={**state.optimizer, "exp_avg": state.optimizer["exp_avg"] + 1})
    assert LAYOUT.describe(packed(other), step=3, parameters=digest) != answer
    assert LAYOUT.describe(packed(make_state(3)), step=3, parameters=digest) == answer


@pytest.mark.parametrize(
    "change",
    [
        {"step": 4},
        {"size": LAYOUT.size + 1},
        {"size": 1 << 40},
        {"chunk_bytes": LAYOUT.chunk_bytes * 2},
        {"chunks": (bytes(32),) * (LAYOUT.chunks - 1)},
        {"chunks": (bytes(32),) * (LAYOUT.chunks + 1)},
        {"chunks": ()},
    ],
    ids=str,
)
def test_a_description_of_anything_else_than_this_stages_state_is_refused(change: dict[str, Any]) -> None:
    state = make_state(3)
    answer = LAYOUT.describe(packed(state), step=3, parameters=bytes(32))
    with pytest.raises(MessageError) as caught:
        LAYOUT.check(replace(answer, **change), 3)
    assert caught.value.kind == "snapshot"


@pytest.mark.parametrize("name", ["parameters", "optimizer.exp_avg", "optimizer.exp_avg_sq"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_state_with_a_value_that_is_not_finite_is_refused(name: str, value: float) -> None:
    state = make_state(3)
    state.tensors()[name][7] = value
    with pytest.raises(MessageError, match=f"{name} of a snapshot is not finite"):
        LAYOUT.unpack(packed(state), 3)


def test_states_differ_if_one_bit_does() -> None:
    state = make_state(3)
    assert same_bits(state, make_state(3))
    state.optimizer["exp_avg_sq"].view(torch.int32)[0] ^= 1
    assert not same_bits(state, make_state(3))
