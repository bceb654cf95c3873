"""A cut model trains exactly as a whole one, and only whole microbatches count."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from node.data import TokenStream
from node.model import StageModule
from node.optimizer import StepOptimizer
from node.stage import NonFiniteError, PendingLimitError, StageError, StageRunner
from protocol.manifest import Manifest
from tests.reference import ReferenceTrainer, flatten, open_manifest_source, train_reference

torch.set_num_threads(1)

CPU = torch.device("cpu")


def small_manifest(cut: tuple[int, ...] = (1, 2, 1)) -> Manifest:
    return Manifest.from_mapping(
        {
            "name": "test",
            "model": {
                "width": 32,
                "layers": sum(cut),
                "heads": 4,
                "kv_heads": 2,
                "ffn": 48,
                "context": 16,
            },
            "stages": {"layers_per_stage": list(cut)},
            "training": {"sequences_per_step": 8, "sequences_per_microbatch": 2, "warmup_steps": 2},
        }
    )


@pytest.fixture(scope="module")
def data() -> TokenStream:
    return open_manifest_source(small_manifest())


def build(manifest: Manifest) -> list[StageRunner]:
    cut = manifest.stages.layers_per_stage
    return [StageRunner(StageModule(manifest.model, cut, stage), CPU) for stage in range(len(cut))]


def microbatch(data: TokenStream, step: int, number: int) -> Tensor:
    return data.sequences(step, number, per_microbatch=2, context=16)


def train_microbatch(runners: list[StageRunner], key: int, tokens: Tensor) -> float:
    """What the nodes of a swarm do with a microbatch, without the swarm."""
    value = tokens[:, :-1]
    for runner in runners[:-1]:
        value = runner.forward(key, value)
    loss, gradient = runners[-1].forward_backward(key, value, tokens[:, 1:])
    for runner in reversed(runners[1:-1]):
        upstream = runner.backward(key, gradient)
        assert upstream is not None
        gradient = upstream
    assert runners[0].backward(key, gradient) is None
    return loss


@pytest.fixture
def middle(data: TokenStream) -> StageRunner:
    """The second of three stages."""
    manifest = small_manifest()
    return StageRunner(StageModule(manifest.model, manifest.stages.layers_per_stage, 1), CPU)


def activation(seed: int = 0) -> Tensor:
    return torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(seed))


class TestExactness:
    @pytest.mark.parametrize("cut", [(2, 2), (1, 2, 1)])
    def test_a_chain_of_stages_has_the_gradients_of_the_whole_model(
        self, cut: tuple[int, ...], data: TokenStream
    ) -> None:
        manifest = small_manifest(cut)
        whole = ReferenceTrainer(small_manifest((4,)), data)
        expected_loss, (expected,) = whole.gradients()
        runners = build(manifest)
        losses = [train_microbatch(runners, number, microbatch(data, 0, number)) for number in range(4)]
        assert sum(losses) / 4 == pytest.approx(expected_loss, abs=1e-6)
        whole_slots = {slot.name: slot for slot in whole.stages[0].layout()}
        for runner in runners:
            total, count = runner.take_gradient()
            assert count == 4
            for slot in runner.layout:
                torch.testing.assert_close(
                    slot.view(total) / count, whole_slots[slot.name].view(expected), atol=1e-6, rtol=1e-5
                )

    def test_several_steps_have_the_losses_of_the_reference(self, data: TokenStream) -> None:
        manifest = small_manifest()
        runners = build(manifest)
        optimizers = [StepOptimizer(runner.layout, manifest.training) for runner in runners]
        losses = []
        for step in range(5):
            microbatches = [microbatch(data, step, number) for number in range(4)]
            losses.append(sum(train_microbatch(runners, 0, tokens) for tokens in microbatches) / 4)
            for runner, optimizer in zip(runners, optimizers, strict=True):
                total, count = runner.take_gradient()
                optimizer.apply(runner.flat_parameters(), total / count, step)
        assert losses == pytest.approx(train_reference(manifest, 5, data), abs=1e-5)
        assert losses[-1] < losses[0]

    def test_the_order_of_microbatches_changes_rounding_only(self, data: TokenStream) -> None:
        sums = []
        for order in (range(4), reversed(range(4))):
            runners = build(small_manifest())
            for number in order:
                train_microbatch(runners, number, microbatch(data, 0, number))
            sums.append([runner.take_gradient()[0] for runner in runners])
        for forwards, backwards in zip(*sums, strict=True):
            torch.testing.assert_close(forwards, backwards, atol=1e-6, rtol=1e-5)

    def test_interleaved_microbatches_do_not_mix(self, data: TokenStream) -> None:
        first, second = microbatch(data, 0, 0), microbatch(data, 0, 1)
        alone, together = build(small_manifest()), build(small_manifest())
        train_microbatch(alone, 0, first)
        train_microbatch(alone, 1, second)
        values = [first[:, :-1], second[:, :-1]]
        for runner in together[:-1]:
            values = [runner.forward(key, value) for key, value in enumerate(values)]
        gradients = [
            together[-1].forward_backward(key, values[key], tokens[:, 1:])[1]
            for key, tokens in enumerate((first, second))
        ]
        for runner in (together[1], together[0]):
            gradients = [runner.backward(key, gradients[key]) for key in (0, 1)]  # type: ignore[misc]
        for one, other in zip(alone, together, strict=True):
            assert torch.equal(one.take_gradient()[0], other.take_gradient()[0])

    def test_a_model_of_one_stage_trains(self, data: TokenStream) -> None:
        manifest = small_manifest((2,))
        (runner,) = build(manifest)
        tokens = microbatch(data, 0, 0)
        loss = runner.forward(0, tokens[:, :-1], tokens[:, 1:])
        assert runner.backward(0, None) is None
        reference = ReferenceTrainer(manifest, data)
        expected = reference.loss(0)
        expected.backward()  # type: ignore[no-untyped-call]
        assert loss == pytest.approx(expected.item(), abs=1e-6)
        torch.testing.assert_close(
            runner.take_gradient()[0], flatten(reference.stages[0], gradients=True), atol=1e-6, rtol=1e-5
        )


class TestFlatParameters:
    def test_they_are_the_modules_own(self, middle: StageRunner) -> None:
        before = middle.forward(0, activation())
        middle.flat_parameters().mul_(1.5)
        assert not torch.equal(middle.forward(1, activation()), before)

    def test_they_start_as_the_modules(self) -> None:
        module = StageModule(small_manifest().model, (1, 2, 1), 1)
        expected = flatten(module)
        assert torch.equal(StageRunner(module, CPU).flat_parameters(), expected)

    def test_loading_them_back_restores_the_stage(self, middle: StageRunner) -> None:
        saved, output = middle.flat_parameters().clone(), middle.forward(0, activation())
        middle.flat_parameters().zero_()
        middle.load_flat(saved)
        assert torch.equal(middle.forward(1, activation()), output)
        assert torch.equal(middle.flat_parameters(), saved)

    def test_loading_copies(self, middle: StageRunner) -> None:
        values = torch.zeros(middle.flat_parameters().numel())
        middle.load_flat(values)
        values.fill_(1.0)
        assert not middle.flat_parameters().any()

    @pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(3, dtype=torch.float64)])
    def test_others_are_refused(self, middle: StageRunner, bad: Tensor) -> None:
        before = middle.flat_parameters().clone()
        with pytest.raises(StageError, match="float32"):
            middle.load_flat(bad)
        assert torch.equal(middle.flat_parameters(), before)

    def test_loading_drops_gradients_and_graphs_of_the_old(self, middle: StageRunner) -> None:
        middle.forward(0, activation())
        middle.backward(0, activation(1))
        middle.forward(1, activation())
        middle.load_flat(middle.flat_parameters().clone())
        assert middle.pending == 0
        assert middle.take_gradient()[1] == 0


class TestGradientSum:
    def test_it_is_zero_at_first_and_after_it_was_taken(self, middle: StageRunner) -> None:
        for _ in range(2):
            total, count = middle.take_gradient()
            assert count == 0
            assert total.shape == middle.flat_parameters().shape
            assert not total.any()
            middle.forward(0, activation())
            middle.backward(0, activation(1))
            total, count = middle.take_gradient()
            assert count == 1
            assert total.any()

    def test_what_was_taken_does_not_change_any_more(self, middle: StageRunner) -> None:
        middle.forward(0, activation())
        middle.backward(0, activation(1))
        total, _ = middle.take_gradient()
        copy = total.clone()
        middle.forward(0, activation(2))
        middle.backward(0, activation(1))
        assert torch.equal(total, copy)

    def test_a_discarded_microbatch_leaves_nothing(self, middle: StageRunner) -> None:
        middle.forward(0, activation())
        middle.discard(0)
        middle.discard(0)
        assert middle.pending == 0
        with pytest.raises(StageError, match="forward again"):
            middle.backward(0, activation(1))
        assert middle.take_gradient()[1] == 0

    def test_a_late_microbatch_does_not_enter_the_next_sum(self, middle: StageRunner) -> None:
        middle.forward(0, activation())
        middle.take_gradient()
        with pytest.raises(StageError):
            middle.backward(0, activation(1))
        assert middle.take_gradient()[1] == 0

    @pytest.mark.parametrize("bad", [float("nan"), float("inf"), 3e38])
    def test_a_gradient_that_is_not_finite_is_dropped_whole(self, middle: StageRunner, bad: float) -> None:
        middle.forward(0, activation())
        middle.backward(0, activation(1))
        middle.forward(1, activation())
        with pytest.raises(NonFiniteError):
            middle.backward(1, torch.full((2, 16, 32), bad))
        total, count = middle.take_gradient()
        assert count == 1
        assert total.isfinite().all()

    def test_a_gradient_of_the_wrong_shape_is_dropped(self, middle: StageRunner) -> None:
        middle.forward(0, activation())
        with pytest.raises(StageError, match="shape"):
            middle.backward(0, activation()[:1])
        assert middle.take_gradient()[1] == 0

    def test_parameters_that_changed_in_between_are_noticed(self, middle: StageRunner) -> None:
        middle.forward(0, activation())
        middle.flat_parameters()[5:6].add_(1.0)
        with pytest.raises(StageError, match="changed"):
            middle.backward(0, activation(1))


class TestMicrobatches:
    def test_a_key_in_use_is_refused(self, middle: StageRunner) -> None:
        middle.forward(0, activation())
        with pytest.raises(StageError, match="in use"):
            middle.forward(0, activation())

    def test_too_many_are_refused_until_one_is_done(self) -> None:
        module = StageModule(small_manifest().model, (1, 2, 1), 1)
        runner = StageRunner(module, CPU, max_pending=2)
        runner.forward(0, activation())
        runner.forward(1, activation())
        with pytest.raises(PendingLimitError, match="2 microbatches"):
            runner.forward(2, activation())
        runner.backward(0, activation(1))
        runner.forward(2, activation())

    def test_outputs_are_plain_tensors(self, middle: StageRunner) -> None:
        output = middle.forward(0, activation())
        gradient = middle.backward(0, activation(1).transpose(1, 2).contiguous().transpose(1, 2))
        assert gradient is not None
        for tensor in (output, gradient):
            assert tensor.dtype == torch.float32
            assert tensor.is_contiguous()
            assert not tensor.requires_grad
            assert tensor.shape == (2, 16, 32)

    def test_the_input_is_left_as_it_was(self, middle: StageRunner) -> None:
        received = activation()
        middle.forward(0, received)
        middle.backward(0, activation(1))
        assert torch.equal(received, activation())
        assert not received.requires_grad
        assert received.grad is None

    @pytest.mark.parametrize("bad", [-1, 260])
    def test_tokens_outside_the_vocabulary_are_refused(self, bad: int) -> None:
        first, _, last = build(small_manifest())
        tokens = torch.zeros(2, 16, dtype=torch.int64)
        tokens[1, 3] = bad
        with pytest.raises(StageError, match="vocabulary"):
            first.forward(0, tokens)
        with pytest.raises(StageError, match="vocabulary"):
            last.forward_backward(0, activation(), tokens)
        assert (first.pending, last.pending) == (0, 0)

    def test_targets_belong_to_the_last_stage(self) -> None:
        _, middle, last = build(small_manifest())
        with pytest.raises(StageError, match="last stage"):
            middle.forward(0, activation(), torch.zeros(2, 16, dtype=torch.int64))
        with pytest.raises(StageError, match="last stage"):
            last.forward(0, activation())

    def test_a_stage_in_the_middle_needs_a_gradient(self, middle: StageRunner) -> None:
        middle.forward(0, activation())
        with pytest.raises(StageError, match="gradient"):
            middle.backward(0, None)


class TestReplay:
    def test_it_computes_what_was_computed_and_leaves_no_trace(self, data: TokenStream) -> None:
        first, middle, last = build(small_manifest())
        tokens = microbatch(data, 0, 0)
        embedded = first.forward(0, tokens[:, :-1])
        output = middle.forward(0, embedded)
        loss, gradient = last.forward_backward(0, output, tokens[:, 1:])
        upstream = middle.backward(0, gradient)
        assert upstream is not None
        taken = [runner.take_gradient() for runner in (first, middle, last)]
        assert [count for _, count in taken] == [0, 1, 1]

        assert torch.equal(first.replay_forward(tokens[:, :-1]), embedded)
        assert torch.equal(middle.replay_forward(embedded), output)
        replayed, returned = middle.replay(embedded, gradient)
        assert torch.equal(replayed, output)
        assert torch.equal(returned, upstream)
        replayed, returned = last.replay(output, targets=tokens[:, 1:])
        assert replayed.item() == loss
        assert torch.equal(returned, gradient)
        for runner in (first, middle, last):
            assert runner.pending == 0
            assert runner.take_gradient()[1] == 0

    @pytest.mark.parametrize("stage", [0, 1, 2])
    def test_with_other_parameters_it_is_what_a_runner_that_holds_them_computes(
        self, stage: int, data: TokenStream
    ) -> None:
        runner, holder = build(small_manifest())[stage], build(small_manifest())[stage]
        noise = torch.randn(runner.flat_parameters().numel(), generator=torch.Generator().manual_seed(7))
        others = runner.flat_parameters() + 0.02 * noise
        holder.load_flat(others)
        tokens = microbatch(data, 0, 0)
        received = tokens[:, :-1] if stage == 0 else activation()
        if stage < 2:
            output = runner.replay_forward(received, parameters=others)
            assert torch.equal(output, holder.replay_forward(received))
            assert not torch.equal(output, runner.replay_forward(received))
        if stage > 0:
            gradient = activation(1) if stage == 1 else None
            targets = tokens[:, 1:] if stage == 2 else None
            replayed = runner.replay(received, gradient, targets, parameters=others)
            expected, own = holder.replay(received, gradient, targets), runner.replay(received, gradient, targets)
            for mine, held, other in zip(replayed, expected, own, strict=True):
                assert torch.equal(mine, held)
                assert not torch.equal(mine, other)

    def test_with_other_parameters_it_leaves_all_as_it_was(self, middle: StageRunner) -> None:
        undisturbed = StageRunner(StageModule(small_manifest().model, (1, 2, 1), 1), CPU)
        others = middle.flat_parameters() * 1.5
        copy = others.clone()
        before, version = middle.flat_parameters().clone(), middle.flat_parameters()._version
        for runner in (middle, undisturbed):
            runner.forward(0, activation())
            runner.backward(0, activation(1))
            runner.forward(1, activation(2))
        for parameters in (others, None, others):
            forward = middle.replay_forward(activation(3), parameters=parameters)
            output, returned = middle.replay(activation(3), activation(1), parameters=parameters)
            assert torch.equal(forward, output)
            for tensor in (forward, output, returned):
                assert not tensor.requires_grad and tensor.dtype == torch.float32 and tensor.is_contiguous()
        assert middle.pending == 1
        assert torch.equal(middle.flat_parameters(), before) and middle.flat_parameters()._version == version
        assert torch.equal(others, copy) and others.grad is None
        assert all(parameter.grad is None for parameter in middle._module.parameters())
        one, other = middle.backward(1, activation(1)), undisturbed.backward(1, activation(1))  # still waits, and fits
        assert one is not None and other is not None and torch.equal(one, other)
        total, count = middle.take_gradient()
        expected, expected_count = undisturbed.take_gradient()
        assert count == expected_count == 2 and torch.equal(total, expected)

    def test_the_input_is_left_as_it_was(self, middle: StageRunner) -> None:
        received, gradient = activation(), activation(1)
        middle.replay(received, gradient, parameters=middle.flat_parameters().clone())
        assert torch.equal(received, activation()) and torch.equal(gradient, activation(1))
        assert not received.requires_grad and received.grad is None

    def test_what_does_not_fit_is_refused(self, middle: StageRunner) -> None:
        with pytest.raises(StageError, match="gradient"):
            middle.replay(activation())
        with pytest.raises(StageError, match="shape"):
            middle.replay(activation(), activation()[:1])
        with pytest.raises(StageError, match="last stage"):
            middle.replay(activation(), activation(), torch.zeros(2, 16, dtype=torch.int64))
        first, _, last = build(small_manifest())
        with pytest.raises(StageError, match="last stage"):
            last.replay(activation())
        with pytest.raises(StageError, match="last stage"):
            last.replay_forward(activation())
        with pytest.raises(StageError, match="vocabulary"):
            first.replay_forward(torch.full((2, 16), 260))
        with pytest.raises(StageError, match="no gradient to return"):
            first.replay(torch.zeros(2, 16, dtype=torch.int64))


def test_autocast_computes_in_bfloat16_and_hands_out_float32(middle: StageRunner) -> None:
    module = StageModule(small_manifest().model, (1, 2, 1), 1)
    runner = StageRunner(module, CPU, torch.bfloat16)
    output, exact = runner.forward(0, activation()), middle.forward(0, activation())
    gradient = runner.backward(0, activation(1))
    assert gradient is not None
    assert (output.dtype, gradient.dtype) == (torch.float32, torch.float32)
    assert not torch.equal(output, exact)
    torch.testing.assert_close(output, exact, atol=0.05, rtol=0.05)
    assert runner.take_gradient()[0].dtype == torch.float32
