"""AdamW as torch has it, and the same bits wherever the same aggregate is applied."""

from __future__ import annotations

import hashlib
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from node import optimizer as module
from node.digest import parameter_digest
from node.model import ParameterSlot
from node.optimizer import StepOptimizer, learning_rate, stable_norm
from protocol.manifest_sections import TrainingSection

torch.set_num_threads(1)

TRAINING = TrainingSection(learning_rate=1e-2, warmup_steps=3, decay_steps=20, weight_decay=0.1, clip_norm=1e6)
LAYOUT = (
    ParameterSlot(name="a.weight", shape=(40, 30), offset=0),
    ParameterSlot(name="b.weight", shape=(30,), offset=1200),
    ParameterSlot(name="c.weight", shape=(7, 11), offset=1230),
)
LENGTH = 1307


def vectors(count: int, *, length: int = LENGTH, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(length, generator=generator) for _ in range(count)]


def train(optimizer: StepOptimizer, steps: int, *, start: int = 0, parameters: Tensor | None = None) -> Tensor:
    values = vectors(1, seed=99)[0] if parameters is None else parameters
    for step, gradient in enumerate(vectors(start + steps)):
        if step >= start:
            optimizer.apply(values, gradient, step)
    return values


class TestAdamW:
    def test_it_is_torchs(self) -> None:
        values = vectors(1, seed=99)[0]
        parameters = [torch.nn.Parameter(slot.view(values).clone()) for slot in LAYOUT]
        groups = [
            {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": TRAINING.weight_decay},
            {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
        ]
        expected = torch.optim.AdamW(groups, betas=(TRAINING.beta1, TRAINING.beta2), eps=TRAINING.eps)
        optimizer = StepOptimizer(LAYOUT, TRAINING)
        for step, gradient in enumerate(vectors(30)):
            for group in expected.param_groups:
                group["lr"] = learning_rate(step, TRAINING)
            for slot, parameter in zip(LAYOUT, parameters, strict=True):
                parameter.grad = slot.view(gradient).clone()
            expected.step()
            optimizer.apply(values, gradient, step)
        for slot, parameter in zip(LAYOUT, parameters, strict=True):
            torch.testing.assert_close(slot.view(values), parameter.detach(), atol=2e-6, rtol=1e-5)

    def test_only_matrices_decay(self) -> None:
        optimizer = StepOptimizer(LAYOUT, TRAINING)
        values = torch.ones(LENGTH)
        optimizer.apply(values, torch.zeros(LENGTH), 10)
        decayed = 1.0 - learning_rate(10, TRAINING) * TRAINING.weight_decay
        for slot in LAYOUT:
            expected = decayed if len(slot.shape) >= 2 else 1.0
            torch.testing.assert_close(slot.view(values), torch.full(slot.shape, expected))

    def test_a_long_gradient_is_clipped_to_the_stages_norm(self) -> None:
        clipped = StepOptimizer(LAYOUT, TRAINING.model_copy(update={"clip_norm": 0.5}))
        gradient = vectors(1)[0]
        norm = clipped.apply(vectors(1, seed=99)[0], gradient, 0)
        assert norm == pytest.approx(gradient.double().norm().item(), rel=1e-12)
        torch.testing.assert_close(clipped.state()["exp_avg"], gradient * (0.5 / norm) * 0.1)

    def test_a_short_gradient_is_not_touched(self) -> None:
        optimizer = StepOptimizer(LAYOUT, TRAINING)
        gradient = vectors(1)[0]
        optimizer.apply(vectors(1, seed=99)[0], gradient, 0)
        assert torch.equal(optimizer.state()["exp_avg"], gradient * 0.1)

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_a_gradient_that_is_not_finite_changes_nothing(self, bad: float) -> None:
        optimizer = StepOptimizer(LAYOUT, TRAINING)
        values = train(optimizer, 3)
        before = values.clone(), {name: tensor.clone() for name, tensor in optimizer.state().items()}
        gradient = vectors(1)[0]
        gradient[1290] = bad
        assert not math.isfinite(optimizer.apply(values, gradient, 3))
        assert torch.equal(values, before[0])
        assert all(torch.equal(tensor, before[1][name]) for name, tensor in optimizer.state().items())

    @pytest.mark.parametrize("bad", [torch.zeros(LENGTH - 1), torch.zeros(LENGTH, dtype=torch.float64)])
    def test_other_vectors_are_refused(self, bad: Tensor) -> None:
        optimizer = StepOptimizer(LAYOUT, TRAINING)
        with pytest.raises(ValueError, match="float32"):
            optimizer.apply(torch.zeros(LENGTH), bad, 0)
        with pytest.raises(ValueError, match="float32"):
            optimizer.apply(bad, torch.zeros(LENGTH), 0)

    def test_the_gradient_is_left_as_it_was(self) -> None:
        gradient = vectors(1)[0]
        copy = gradient.clone()
        StepOptimizer(LAYOUT, TRAINING.model_copy(update={"clip_norm": 0.1})).apply(torch.zeros(LENGTH), gradient, 0)
        assert torch.equal(gradient, copy)


class TestSameBits:
    def test_two_replicas_agree(self) -> None:
        first, second = (train(StepOptimizer(LAYOUT, TRAINING), 10) for _ in range(2))
        assert parameter_digest(first) == parameter_digest(second)

    def test_a_replica_that_joins_with_the_state_agrees(self) -> None:
        stayed = StepOptimizer(LAYOUT, TRAINING)
        values = train(stayed, 5)
        joined = StepOptimizer(LAYOUT, TRAINING)
        joined.load(stayed.state())
        copy = values.clone()
        train(stayed, 5, start=5, parameters=values)
        train(joined, 5, start=5, parameters=copy)
        assert torch.equal(values, copy)
        assert all(torch.equal(tensor, joined.state()[name]) for name, tensor in stayed.state().items())

    def test_threads_and_slices_change_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        length = 300_000
        layout = (ParameterSlot(name="a", shape=(1000, 300), offset=0),)
        results = []
        for threads, chunk in ((1, 1 << 20), (2, 1 << 20), (2, 777)):
            torch.set_num_threads(threads)
            monkeypatch.setattr(module, "_CHUNK", chunk)
            optimizer = StepOptimizer(layout, TRAINING.model_copy(update={"clip_norm": 1.0}))
            values = vectors(1, length=length, seed=5)[0]
            norms = [optimizer.apply(values, gradient, step) for step, gradient in enumerate(vectors(3, length=length))]
            results.append((norms, parameter_digest(values)))
        torch.set_num_threads(1)
        assert results[0] == results[1] == results[2]

    def test_they_are_those_of_numpy(self) -> None:
        """Another library has to round each operation alike, as another processor has to."""
        training = TRAINING.model_copy(update={"clip_norm": 0.5})
        optimizer = StepOptimizer(LAYOUT, training)
        one = np.float32(1.0)
        beta1, beta2 = np.float32(training.beta1), np.float32(training.beta2)
        rest1, rest2 = np.float32(1.0 - training.beta1), np.float32(1.0 - training.beta2)
        values = vectors(1, seed=99)[0]
        expected = values.numpy().copy()
        mean, square = np.zeros(LENGTH, np.float32), np.zeros(LENGTH, np.float32)
        for step, gradient in enumerate(vectors(20)):
            norm = optimizer.apply(values, gradient, step)
            rate = learning_rate(step, training)
            clipped = gradient.numpy() * np.float32(0.5 / norm)
            mean = mean * beta1 + clipped * rest1
            square = square * beta2 + clipped * clipped * rest2
            root = np.sqrt(square) * np.float32(1.0 / math.sqrt(1.0 - training.beta2 ** (step + 1)))
            update = mean / (root + np.float32(training.eps)) * np.float32(rate / (1.0 - training.beta1 ** (step + 1)))
            kept = np.full(LENGTH, np.float32(1.0 - rate * training.weight_decay))
            kept[1200:1230] = one
            expected = expected * kept - update
            assert values.numpy().tobytes() == expected.tobytes()

    def test_they_are_the_same_in_every_release(self) -> None:
        """Replicas of different releases average with each other."""
        optimizer = StepOptimizer(LAYOUT, TRAINING.model_copy(update={"clip_norm": 1.0}))
        # Integers, since torch does not promise the same random numbers for ever.
        values = torch.arange(LENGTH) % 101 / 128 - 0.25
        for step in range(6):
            optimizer.apply(values, (torch.arange(LENGTH) * (step + 3) % 127 - 60) / 1024, step)
        assert parameter_digest(values).hex() == "ce084ac6141ff5ea22b41961a5b959a3e144fd04be41127b6857b0334ee88de1"


class TestStableNorm:
    @settings(max_examples=40, deadline=None)
    @given(st.integers(0, 200_000), st.integers(0, 1000), st.floats(1e-6, 1e12))
    def test_it_is_the_norm(self, length: int, seed: int, scale: float) -> None:
        vector = torch.randn(length, generator=torch.Generator().manual_seed(seed)) * scale
        assert stable_norm(vector) == pytest.approx(vector.double().norm().item(), rel=1e-12)

    def test_it_does_not_overflow(self) -> None:
        assert stable_norm(torch.full((10,), 3e38)) == pytest.approx(3e38 * math.sqrt(10), rel=1e-6)


class TestLearningRate:
    def test_it_rises_in_a_line_and_falls_as_half_a_cosine(self) -> None:
        training = TrainingSection(learning_rate=2.0, warmup_steps=4, decay_steps=10, min_lr_ratio=0.1)
        rates = [learning_rate(step, training) for step in range(30)]
        assert rates[:5] == pytest.approx([0.5, 1.0, 1.5, 2.0, 2.0])
        assert rates[9] == pytest.approx((2.0 + 0.2) / 2)
        assert rates[14:] == pytest.approx([0.2] * 16)
        assert rates[4:15] == sorted(rates[4:15], reverse=True)

    def test_without_warmup_it_starts_at_the_peak(self) -> None:
        assert learning_rate(0, TrainingSection(learning_rate=0.5, warmup_steps=0)) == 0.5


class TestState:
    def test_it_has_fixed_names_shapes_and_dtypes(self) -> None:
        optimizer = StepOptimizer(LAYOUT, TRAINING)
        train(optimizer, 2)
        described = {name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in optimizer.state().items()}
        assert described == {
            "exp_avg": (torch.float32, (LENGTH,)),
            "exp_avg_sq": (torch.float32, (LENGTH,)),
            "step": (torch.int64, (1,)),
        }
        assert optimizer.state()["step"].item() == 2

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("exp_avg", None),
            ("exp_avg", torch.zeros(LENGTH - 1)),
            ("exp_avg_sq", torch.zeros(LENGTH, dtype=torch.float64)),
            ("exp_avg_sq", torch.full((LENGTH,), -1.0)),
            ("step", torch.tensor(3)),
            ("step", torch.tensor([-1])),
        ],
    )
    def test_a_wrong_one_is_refused_whole(self, name: str, value: Tensor | None) -> None:
        optimizer = StepOptimizer(LAYOUT, TRAINING)
        train(optimizer, 2)
        before = {key: tensor.clone() for key, tensor in optimizer.state().items()}
        state = {**StepOptimizer(LAYOUT, TRAINING).state()}
        if value is None:
            del state[name]
        else:
            state[name] = value
        with pytest.raises(ValueError, match="optimizer state"):
            optimizer.load(state)
        assert all(torch.equal(tensor, before[key]) for key, tensor in optimizer.state().items())

    def test_loading_copies(self) -> None:
        source, target = StepOptimizer(LAYOUT, TRAINING), StepOptimizer(LAYOUT, TRAINING)
        target.load(source.state())
        train(source, 2)
        assert not target.state()["exp_avg"].any()


class TestDigest:
    def test_it_is_the_sha256_of_dtype_length_and_bytes(self) -> None:
        flat = torch.tensor([1.0, -2.5])
        expected = hashlib.sha256(b"torch.float32:2:" + b"\x00\x00\x80\x3f\x00\x00\x20\xc0").digest()
        assert parameter_digest(flat) == expected

    def test_one_bit_or_another_dtype_gives_another(self) -> None:
        zeros = torch.zeros(8)
        digests = {parameter_digest(vector) for vector in (zeros, -zeros, zeros.int(), zeros[:7], zeros.bfloat16())}
        assert len(digests) == 5

    def test_it_reads_a_slice_and_a_tensor_with_gradient(self) -> None:
        base = torch.arange(10.0)
        expected = parameter_digest(base[2:5].clone())
        assert parameter_digest(base[2:5]) == expected
        assert parameter_digest(base[2:5].clone().requires_grad_()) == expected

    @pytest.mark.parametrize("bad", [torch.zeros(2, 2), torch.zeros(8)[::2], torch.tensor(1.0)])
    def test_others_are_refused(self, bad: Tensor) -> None:
        with pytest.raises(ValueError, match="1-D"):
            parameter_digest(bad)
