"""The attacks on single tensors: what each changes, what it keeps, and tensors that are hard to change."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Generator, Tensor

from node import drill_attacks
from node.drill_attacks import MEMORYLESS, MIMIC_CHANGE, SCALE_FACTOR, mimic
from node.drill_names import Attack
from verifier import distances
from verifier.sketch import cosine, gain, sketch

SMALL = settings(max_examples=60)


def generator(seed: int = 1) -> Generator:
    return Generator().manual_seed(seed)


def cloud(tokens: int, width: int, *, seed: int, mean: float = 0.0, correlated: bool = False) -> Tensor:
    """[tokens, width]: normal, with features of unlike deviations; ``mean`` in units of them."""
    draw = generator(seed)
    x = torch.randn(tokens, width, generator=draw)
    if correlated:
        x = x @ torch.randn(width, width, generator=draw) / math.sqrt(width)
    return (x + mean * torch.randn(width, generator=draw)) * torch.rand(width, generator=draw).add_(0.1)


@st.composite
def any_tensor(draw: st.DrawFn) -> Tensor:
    """[B, T, d] of any magnitude, also with one token, with constant features, or all zero."""
    shape = tuple(draw(st.integers(1, top)) for top in (3, 5, 6))
    x = cloud(shape[0] * shape[1], shape[2], seed=draw(st.integers(0, 1000)), mean=draw(st.floats(0.0, 5.0)))
    kind = draw(st.sampled_from(["normal", "zero", "constant", "same tokens", "constant feature", "bf16"]))
    if kind == "zero":
        x.zero_()
    elif kind == "constant":
        x.fill_(0.1)
    elif kind == "same tokens":
        x = x[:1].repeat(len(x), 1)
    elif kind == "constant feature":
        x[:, 0] = 7.0
    elif kind == "bf16":
        x = x.bfloat16().float()
    return (x * draw(st.sampled_from([1.0, 1e-30, 1e-8, 1e6, 1e30]))).view(shape)


@SMALL
@given(any_tensor(), st.sampled_from(sorted(MEMORYLESS)))
def test_no_tensor_breaks_an_attack_or_is_changed_by_it(x: Tensor, attack: Attack) -> None:
    kept = x.clone()
    sent = MEMORYLESS[attack](x, generator())
    assert torch.equal(x, kept)
    assert sent.shape == x.shape and sent.dtype is torch.float32
    assert torch.isfinite(sent).all()
    assert sent.data_ptr() != x.data_ptr()


@SMALL
@given(any_tensor(), st.floats(0.0, 1.0))
def test_no_tensor_breaks_the_drift_or_is_changed_by_it(x: Tensor, amount: float) -> None:
    kept = x.clone()
    sent = drill_attacks.drift(x, amount, drill_attacks.unit_direction(x.shape[-1], generator()))
    assert torch.equal(x, kept)
    assert sent.shape == x.shape and sent.dtype is torch.float32
    assert torch.isfinite(sent).all()


def test_the_attacks_do_what_they_say() -> None:
    x = 3.0 + torch.randn(4, 64, generator=generator(7))
    sent = {attack: change(x, generator()) for attack, change in MEMORYLESS.items()}
    assert not sent[Attack.CONSTANT].any()
    assert torch.equal(sent[Attack.SCALE], SCALE_FACTOR * x)
    assert torch.equal(sent[Attack.SIGN_FLIP], -x)
    assert torch.allclose(sent[Attack.BIAS], x + x.std())
    assert torch.equal(sent[Attack.RANDOM_SIGN].abs(), x.abs())
    assert 0.3 < float((sent[Attack.RANDOM_SIGN] == x).float().mean()) < 0.7
    noise = sent[Attack.NOISE] - x
    assert float(noise.mean().abs()) < 0.3 * float(x.std())
    assert float(noise.std()) == pytest.approx(float(x.std()), rel=0.2)
    random = sent[Attack.RANDOM]
    assert float(random.mean()) == pytest.approx(float(x.mean()), rel=0.2)
    assert float(random.std()) == pytest.approx(float(x.std()), rel=0.2)
    assert abs(float(torch.corrcoef(torch.stack([random.flatten(), x.flatten()]))[0, 1])) < 0.3


@SMALL
@given(
    tokens=st.integers(8, 60),
    width=st.integers(4, 20),
    mean=st.floats(0.0, 1.0),
    correlated=st.booleans(),
    magnitude=st.sampled_from([1.0, 1e-30, 1e-8, 1e6, 1e30]),
    seed=st.integers(0, 1000),
)
def test_a_mimic_keeps_the_statistics_and_changes_the_tensor(
    tokens: int, width: int, mean: float, correlated: bool, magnitude: float, seed: int
) -> None:
    x = cloud(tokens, width, seed=seed, mean=mean, correlated=correlated) * magnitude
    sent = mimic(x, generator(seed))
    honest, fake = x.double(), sent.double()
    size = honest.square().mean().sqrt()
    assert torch.allclose(fake.mean(dim=0), honest.mean(dim=0), rtol=1e-4, atol=float(1e-5 * size))
    assert torch.allclose(fake.std(dim=0), honest.std(dim=0), rtol=1e-4, atol=float(1e-5 * size))
    assert float(fake.norm()) == pytest.approx(float(honest.norm()), rel=1e-5)
    change = float((fake - honest).norm() / honest.norm())
    assert 0.2 < change < 0.4
    assert float((fake * honest).sum() / (fake.norm() * honest.norm())) == pytest.approx(1 - change**2 / 2, abs=1e-5)


@pytest.mark.parametrize("heavy", [False, True])
def test_a_mimic_stays_close_to_what_the_checker_measures(heavy: bool) -> None:
    x = cloud(512, 64, seed=3, mean=0.5, correlated=True)
    if heavy:
        x[::50] *= 8.0  # tokens that outweigh the others, as large models grow them
    sent = mimic(x, generator())
    directions = distances.unit_directions(64, seed=5)
    honest, fake = (distances.reduce(tensor, directions) for tensor in (x, sent))
    assert float((sent - x).norm() / x.norm()) == pytest.approx(MIMIC_CHANGE, abs=1e-3)
    assert distances.normalised_l2(fake, honest) < 1e-5
    assert distances.sign_flip_ratio(fake, honest) == 0.0
    assert distances.sliced_wasserstein(fake, honest) < 0.1
    a, b = (sketch(tensor, key=bytes(32), size=256) for tensor in (x, sent))
    assert cosine(a, b) > 0.9
    assert abs(gain(a, b)) < 0.05


def test_where_the_means_dominate_a_mimic_changes_no_more_than_the_tokens_differ() -> None:
    x = 100.0 + torch.randn(32, 16, generator=generator())
    sent = mimic(x, generator())
    assert torch.allclose(sent.mean(dim=0), x.mean(dim=0)) and torch.allclose(sent.std(dim=0), x.std(dim=0), rtol=1e-3)
    assert float((sent - x).norm() / (x - x.mean(dim=0)).norm()) == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("tokens", [1, 2])
def test_too_few_tokens_leave_a_mimic_nothing_to_change(tokens: int) -> None:
    x = torch.randn(tokens, 8, generator=generator())
    assert torch.equal(mimic(x, generator()), x)


@pytest.mark.parametrize("width", [1, 2, 500])
def test_a_unit_direction_has_entries_of_the_size_of_one(width: int) -> None:
    direction = drill_attacks.unit_direction(width, generator())
    assert direction.shape == (width,)
    assert float(direction.square().mean()) == pytest.approx(1.0, rel=1e-5)
