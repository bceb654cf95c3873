"""Sketches: linear where they must be, true to cosines, blind to common biases and single heavy tokens."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verifier.sketch import KEPT_SHAPES, KEY_BYTES, Scratch, cosine, gain, project, sketch, temper

KEY = bytes(range(32))
SIZE = 512
GOLDEN = [4.0, 8.0, 3.0, -4.0]


def cloud(seed: int, *, tokens: int = 256, width: int = 64) -> torch.Tensor:
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed))


def test_a_sketch_is_deterministic_and_depends_on_the_key() -> None:
    tensor = cloud(0).view(2, 128, 64)
    one = sketch(tensor, key=KEY, size=SIZE)
    assert one.shape == (SIZE,)
    assert one.dtype is torch.float32
    assert torch.equal(one, sketch(tensor.clone(), key=KEY, size=SIZE))
    assert not torch.equal(one, sketch(tensor, key=bytes(32), size=SIZE))


def test_the_signs_never_change_between_releases() -> None:
    # Peers with other versions of this program and of torch must compute the same sketch.
    folded = project(torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]), key=KEY, size=4)
    assert folded.tolist() == GOLDEN


@pytest.mark.parametrize(("tokens", "width", "size"), [(1, 1, 1), (3, 5, 7), (7, 16, 64), (2, 4, 512), (9, 6, 9)])
def test_any_shape_folds_into_any_size(tokens: int, width: int, size: int) -> None:
    folded = project(cloud(1, tokens=tokens, width=width), key=KEY, size=size)
    assert folded.shape == (size,)
    assert torch.isfinite(folded).all()


def test_wrong_keys_and_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        sketch(cloud(0), key=b"short", size=SIZE)
    with pytest.raises(ValueError, match="size 0"):
        sketch(cloud(0), key=KEY, size=0)


@given(seed=st.integers(0, 10_000), factor=st.floats(-10.0, 10.0))
@settings(max_examples=30)
def test_projection_is_linear(seed: int, factor: float) -> None:
    a, b = cloud(seed), cloud(seed + 1)
    together = project(a + factor * b, key=KEY, size=SIZE)
    apart = project(a, key=KEY, size=SIZE) + factor * project(b, key=KEY, size=SIZE)
    assert torch.allclose(together, apart, atol=1e-3)


@given(seed=st.integers(0, 10_000), factor=st.floats(0.01, 100.0))
@settings(max_examples=30)
def test_a_sketch_scales_with_its_tensor(seed: int, factor: float) -> None:
    plain = sketch(cloud(seed), key=KEY, size=SIZE)
    scaled = sketch(cloud(seed) * factor, key=KEY, size=SIZE)
    assert torch.allclose(scaled, plain * factor, rtol=1e-3, atol=1e-3 * factor)
    assert gain(scaled, plain) == pytest.approx(math.log(factor), abs=1e-4)


@given(seed=st.integers(0, 10_000), mix=st.floats(-1.0, 1.0))
@settings(max_examples=50)
def test_cosines_survive_projection(seed: int, mix: float) -> None:
    a, noise = cloud(seed), cloud(seed + 1)
    b = mix * a + (1.0 - abs(mix)) * noise
    true = float(torch.nn.functional.cosine_similarity(a.flatten(), b.flatten(), dim=0))
    measured = cosine(project(a, key=KEY, size=SIZE), project(b, key=KEY, size=SIZE))
    assert abs(measured - true) < 5.0 / math.sqrt(SIZE)


def test_a_single_massive_feature_does_not_shrink_the_sketch() -> None:
    # Were one feature to fall into few sums, two unrelated tensors could look parallel by chance.
    a, b = cloud(2, tokens=512), cloud(3, tokens=512)
    a[:, 5] *= 1000.0
    b[:, 5] *= 1000.0
    worst = max(
        abs(cosine(project(a, key=key, size=SIZE), project(b, key=key, size=SIZE)))
        for key in (bytes([i]) * 32 for i in range(20))
    )
    assert worst < 0.3


def test_a_common_bias_is_not_likeness() -> None:
    a, b = cloud(4) + 50.0, cloud(5) + 50.0
    assert abs(cosine(sketch(a, key=KEY, size=SIZE), sketch(b, key=KEY, size=SIZE))) < 0.25


def test_a_heavy_token_is_cut_to_the_median() -> None:
    tensor = cloud(6)
    tensor[7] *= 1e4
    lengths = temper(tensor).norm(dim=1)
    assert lengths.max() <= lengths.median() * 1.001
    clean, heavy = (sketch(t, key=KEY, size=SIZE) for t in (cloud(6), tensor))
    assert cosine(clean, heavy) > 0.8


def test_tempering_leaves_the_tensor_alone() -> None:
    tensor = cloud(8)
    before = tensor.clone()
    temper(tensor)
    assert torch.equal(tensor, before)


def test_cosine_and_gain_of_extremes() -> None:
    one, zero = torch.ones(4), torch.zeros(4)
    assert cosine(one, zero) == 0.0
    assert cosine(one, one) == pytest.approx(1.0)
    assert cosine(one, -one) == pytest.approx(-1.0)
    assert math.isnan(cosine(one, one * math.inf))
    assert math.isfinite(gain(one, zero))
    assert gain(one, zero) == -gain(zero, one) > 0
    assert cosine(one * 1e38, one * 1e38) == pytest.approx(1.0)


def test_an_all_zero_tensor_has_an_all_zero_sketch() -> None:
    assert not sketch(torch.zeros(2, 8, 4), key=KEY, size=16).any()


def test_memory_that_is_used_again_changes_nothing() -> None:
    scratch = Scratch()
    generator = torch.Generator().manual_seed(5)
    shapes = [(2, 8, 16), (1, 8, 16), (3, 5, 7), (2, 8, 16), (2, 4, 24), (2, 8, 16)]
    assert len(set(shapes)) > KEPT_SHAPES
    for shape in shapes:
        for _ in range(2):
            tensor = torch.randn(shape, generator=generator)
            again = sketch(tensor, key=bytes(KEY_BYTES), size=64, scratch=scratch)
            assert torch.equal(again, sketch(tensor, key=bytes(KEY_BYTES), size=64))
