"""A stage's work computed again: honest work passes, what was falsified is named, and what cannot be told is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from node.data import TokenStream
from node.digest import parameter_digest
from node.drill import Drill, parse_drill
from node.history import ParameterHistory
from node.model import StageModule
from node.replay import Replay, Replayer
from node.stage import StageRunner
from protocol.errors import MessageError, RefusedError, RemoteError
from protocol.manifest import Manifest
from protocol.tensors import WireDtype, decode_tensor, encode_tensor
from tests.reference import open_manifest_source
from verifier.audit import TOLERANCE, difference
from verifier.verdicts import Direction

CPU = torch.device("cpu")
FIRST, MIDDLE, LAST = 0, 1, 2
MICROBATCH = 3
ATTACKS = (*("sign-flip", "random", "scale", "bias", "noise", "mimic", "identity", "stale", "random-sign", "constant"),)
"""Those that falsify a tensor at once; drift begins below any tolerance."""


def small_manifest(dtype: str = "fp32") -> Manifest:
    return Manifest.from_mapping(
        {
            "name": "test",
            "model": {"width": 64, "layers": 3, "heads": 4, "kv_heads": 2, "ffn": 128, "context": 32},
            "stages": {"layers_per_stage": [1, 1, 1]},
            "training": {"sequences_per_step": 16, "sequences_per_microbatch": 2},
            "wire": {"activation_dtype": dtype, "gradient_dtype": dtype},
        }
    )


def build(manifest: Manifest, stage: int) -> StageRunner:
    return StageRunner(StageModule(manifest.model, manifest.stages.layers_per_stage, stage), CPU)


@pytest.fixture(scope="module")
def data() -> TokenStream:
    return open_manifest_source(small_manifest())


@dataclass
class Bench:
    """A stage's runner as an auditor has it, and honest work of a replica of the same stage."""

    manifest: Manifest
    stage: int
    runner: StageRunner
    history: ParameterHistory
    replayer: Replayer
    tokens: Tensor
    parameters: bytes

    def honest(self, step: int = 0, microbatch: int = MICROBATCH, runner: StageRunner | None = None) -> Replay:
        """What an honest replica got, sent, got back and returned, as it travelled."""
        runner = runner or self.runner
        received, got = self.around()
        if self.stage == FIRST:
            sent, returned = self.encode(runner.replay_forward(self.tokens[:, :-1])), None
        elif self.stage == LAST:
            _, gradient = runner.replay(received, None, self.tokens[:, 1:])
            sent, returned = None, self.encode(gradient)
        else:
            output, gradient = runner.replay(received, got)
            sent, returned = self.encode(output), self.encode(gradient)
        return Replay(
            stage=self.stage,
            step=step,
            microbatch=microbatch,
            parameters=None if self.stage == FIRST else self.parameters,
            received=None if self.stage == FIRST else self.encode(received),
            sent=sent,
            got=self.encode(got) if self.stage == MIDDLE else None,
            returned=returned,
            tokens=None if self.stage == MIDDLE else token_bytes(self.tokens),
        )

    def around(self) -> tuple[Tensor, Tensor]:
        """The activation that comes down to the stage, and the gradient that comes back up to it."""
        stages = [build(self.manifest, stage) for stage in range(3)]
        inputs, labels = self.tokens[:, :-1], self.tokens[:, 1:]
        first = over_the_wire(self.manifest, stages[FIRST].replay_forward(inputs))
        second = over_the_wire(self.manifest, stages[MIDDLE].replay_forward(first))
        _, gradient = stages[LAST].replay(second, None, labels)
        return (second if self.stage == LAST else first), over_the_wire(self.manifest, gradient)

    def encode(self, tensor: Tensor) -> bytes:
        return encode(self.manifest, tensor)


def random(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def encode(manifest: Manifest, tensor: Tensor) -> bytes:
    return b"".join(encode_tensor(tensor, WireDtype(manifest.wire.activation_dtype)))


def decode(manifest: Manifest, body: bytes) -> Tensor:
    dtype, shape = WireDtype(manifest.wire.activation_dtype), manifest.activation_shape
    return decode_tensor(body, dtype=dtype.value, shape=shape, expected_dtype=dtype, expected_shape=shape)


def over_the_wire(manifest: Manifest, tensor: Tensor) -> Tensor:
    return decode(manifest, encode(manifest, tensor))


def token_bytes(tokens: Tensor) -> bytes:
    return tokens.to(torch.int32).numpy().tobytes()


def bench_of(stage: int, data: TokenStream, dtype: str = "fp32", *, own_stage: int | None = None) -> Bench:
    """``own_stage``: that of the auditor, if it is another one than the accused's."""
    manifest = small_manifest(dtype)
    mine = stage if own_stage is None else own_stage
    runner = build(manifest, mine)
    history = ParameterHistory(runner, digest=parameter_digest(runner.flat_parameters()), keep=True)
    replayer = Replayer(
        manifest=manifest,
        stage=mine,
        runner=runner,
        history=history,
        data=data if mine == FIRST else None,
        build=lambda other: build(manifest, other),
    )
    tokens = data.sequences(0, MICROBATCH, per_microbatch=2, context=32)
    accused = runner if mine == stage else build(manifest, stage)
    return Bench(manifest, stage, runner, history, replayer, tokens, parameter_digest(accused.flat_parameters()))


def attacked(manifest: Manifest, name: str, tensor: Tensor, received: Tensor, direction: Direction) -> Tensor:
    """What a node that plays this drill sends instead of a tensor; it has sent another one before."""
    prefix = "gradient-" if direction is Direction.GRADIENT else ""
    drill = Drill(parse_drill(prefix + name, 0), seed=b"seed")
    earlier = tensor[torch.arange(tensor.shape[0] - 1, -1, -1)].roll(3, dims=1)
    drill.apply(earlier, direction, 0, received=received)
    sent = drill.apply(tensor, direction, 0, received=received)
    assert drill.attacked > 0
    return over_the_wire(manifest, sent)


# honest work -------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("stage", [FIRST, MIDDLE, LAST])
def test_honest_work_is_found_honest(stage: int, dtype: str, data: TokenStream) -> None:
    bench = bench_of(stage, data, dtype)
    assert bench.replayer.compare(bench.honest()) == ""


def test_every_wire_dtype_has_a_tolerance() -> None:
    assert set(TOLERANCE) == {dtype.value for dtype in WireDtype}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("stage", [FIRST, MIDDLE, LAST])
def test_another_number_of_threads_stays_far_below_the_tolerance(stage: int, dtype: str, data: TokenStream) -> None:
    bench = bench_of(stage, data, dtype)
    torch.set_num_threads(2)
    try:
        other = bench.honest()
    finally:
        torch.set_num_threads(1)
    mine = bench.honest()
    for one, two in ((mine.sent, other.sent), (mine.returned, other.returned)):
        assert (one is None) == (two is None)
        if one is not None and two is not None:
            apart = difference(decode(bench.manifest, bytes(one)), decode(bench.manifest, bytes(two)))
            assert apart < TOLERANCE[dtype] / 5
    assert bench.replayer.compare(other) == ""


@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_the_rounding_of_float32_stays_far_below_the_tolerance(dtype: str, data: TokenStream) -> None:
    # As far apart as any two orders of the additions in float32 are: computed in float64.
    bench = bench_of(MIDDLE, data, dtype)
    received, got = bench.around()
    output, gradient = bench.runner.replay(received, got)
    doubled = build(bench.manifest, MIDDLE)
    doubled._module.double()
    doubled._flat = doubled._flat.double()
    leaf = received.double().requires_grad_()
    exact = doubled._module(leaf)
    (exact_gradient,) = torch.autograd.grad(exact, leaf, got.double())
    for mine, other in ((output, exact), (gradient, exact_gradient)):
        sent = over_the_wire(bench.manifest, other.detach().float())
        assert difference(over_the_wire(bench.manifest, mine), sent) < TOLERANCE[dtype] / 5


# falsified work ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("name", ATTACKS)
def test_every_attack_on_a_tensor_is_above_the_tolerance_and_named(name: str, dtype: str, data: TokenStream) -> None:
    for stage, direction in (
        (FIRST, Direction.ACTIVATION),
        (MIDDLE, Direction.ACTIVATION),
        (MIDDLE, Direction.GRADIENT),
        (LAST, Direction.GRADIENT),
    ):
        bench = bench_of(stage, data, dtype)
        honest = bench.honest()
        field, source = ("sent", honest.received) if direction is Direction.ACTIVATION else ("returned", honest.got)
        body = getattr(honest, field)
        tensor = decode(bench.manifest, bytes(body))
        received = torch.zeros_like(tensor) if source is None else decode(bench.manifest, bytes(source))
        falsified = attacked(bench.manifest, name, tensor, received, direction)
        assert difference(tensor, falsified) > 1.5 * TOLERANCE[dtype], (stage, direction)
        change: dict[str, Any] = {field: bench.encode(falsified)}
        replay = replace(honest, **change)
        assert bench.replayer.compare(replay) == direction.value, (stage, direction)


@pytest.mark.parametrize("stage", [MIDDLE, LAST])
def test_work_on_another_input_is_found_out(stage: int, data: TokenStream) -> None:
    bench = bench_of(stage, data)
    other = bench.encode(0.02 * random(7, bench.manifest.activation_shape))
    assert bench.replayer.compare(replace(bench.honest(), received=other)) in ("activation", "gradient")


def test_a_gradient_that_does_not_follow_from_the_one_that_came_back_is_found_out(data: TokenStream) -> None:
    bench = bench_of(MIDDLE, data)
    other = bench.encode(1e-2 * random(7, bench.manifest.activation_shape))
    assert bench.replayer.compare(replace(bench.honest(), got=other)) == "gradient"


def test_other_labels_than_the_origins_change_the_gradient_of_the_last_stage(data: TokenStream) -> None:
    bench = bench_of(LAST, data)
    others = data.sequences(0, MICROBATCH + 1, per_microbatch=2, context=32)
    assert bench.replayer.compare(replace(bench.honest(), tokens=token_bytes(others))) == "gradient"


def test_tokens_of_the_first_stage_that_are_not_the_datas_are_found_out(data: TokenStream) -> None:
    bench = bench_of(FIRST, data)
    one_off = bench.tokens.clone()
    one_off[1, 5] = (one_off[1, 5] + 1) % bench.manifest.model.vocab_size
    for tokens in (one_off, data.sequences(0, MICROBATCH + 1, per_microbatch=2, context=32)):
        # Its work is honest, on tokens of its own choice.
        bench.tokens = tokens
        assert bench.replayer.compare(bench.honest()) == "tokens"


def test_tokens_of_another_step_or_microbatch_are_found_out(data: TokenStream) -> None:
    bench = bench_of(FIRST, data)
    assert bench.replayer.compare(bench.honest(microbatch=MICROBATCH + 1)) == "tokens"
    bench.history.about_to_change()
    bench.history.changed(1, bench.parameters)
    assert bench.replayer.compare(bench.honest(step=1)) == "tokens"
    assert bench.replayer.compare(bench.honest(step=0)) == ""


def test_of_two_falsified_tensors_the_activation_is_named(data: TokenStream) -> None:
    bench = bench_of(MIDDLE, data)
    zeros = bench.encode(torch.zeros(bench.manifest.activation_shape))
    assert bench.replayer.compare(replace(bench.honest(), sent=zeros, returned=zeros)) == "activation"


def forward_only(honest: Replay) -> Replay:
    """As it is audited by what its sender signed for the activation alone."""
    return replace(honest, parameters=None, got=None, returned=None)


def test_the_forward_of_a_stage_in_the_middle_can_be_judged_alone(data: TokenStream) -> None:
    bench = bench_of(MIDDLE, data)
    honest = forward_only(bench.honest())
    assert bench.replayer.compare(honest) == ""
    received, sent = (decode(bench.manifest, bytes(body)) for body in (honest.received, honest.sent) if body)
    for name in ATTACKS:
        falsified = attacked(bench.manifest, name, sent, received, Direction.ACTIVATION)
        assert bench.replayer.compare(replace(honest, sent=bench.encode(falsified))) == "activation"
    train_a_step(bench, 1)
    assert bench.replayer.compare(honest) == ""
    train_a_step(bench, 2)
    assert refused(lambda: bench.replayer.compare(honest)) == "expired"


# what cannot be told ------------------------------------------------------------------------------


def refused(compare: Callable[[], str]) -> str:
    with pytest.raises(RefusedError) as caught:
        compare()
    return caught.value.kind


def train_a_step(bench: Bench, step: int) -> None:
    bench.history.about_to_change()
    bench.runner.flat_parameters().mul_(1.1)
    bench.history.changed(step, parameter_digest(bench.runner.flat_parameters()))


@pytest.mark.parametrize("stage", [FIRST, MIDDLE, LAST])
def test_work_of_the_step_before_is_computed_with_its_parameters(stage: int, data: TokenStream) -> None:
    bench = bench_of(stage, data)
    honest = bench.honest()
    train_a_step(bench, 1)
    before = bench.runner.flat_parameters().clone()
    assert bench.replayer.compare(honest) == ""
    assert torch.equal(bench.runner.flat_parameters(), before)
    assert bench.runner.pending == 0 and bench.runner.take_gradient()[1] == 0
    train_a_step(bench, 2)
    assert refused(lambda: bench.replayer.compare(honest)) == "expired"


def test_a_step_that_has_not_come_is_not_known(data: TokenStream) -> None:
    bench = bench_of(MIDDLE, data)
    assert refused(lambda: bench.replayer.compare(replace(bench.honest(), step=1))) == "expired"


def test_who_computed_with_other_parameters_is_not_judged_but_told_apart(data: TokenStream) -> None:
    bench = bench_of(MIDDLE, data)
    assert refused(lambda: bench.replayer.compare(replace(bench.honest(), parameters=bytes(32)))) == "parameters"


def test_the_first_stage_without_the_data_cannot_be_judged(data: TokenStream) -> None:
    bench = bench_of(FIRST, data)
    bench.replayer = Replayer(
        manifest=bench.manifest,
        stage=FIRST,
        runner=bench.runner,
        history=bench.history,
        data=None,
        build=lambda other: build(bench.manifest, other),
    )
    assert refused(lambda: bench.replayer.compare(bench.honest())) == "no_data"


@pytest.mark.parametrize("own_stage", [FIRST, MIDDLE])
@pytest.mark.parametrize("stage", [MIDDLE, LAST])
def test_another_stages_work_is_computed_with_the_parameters_given(
    stage: int, own_stage: int, data: TokenStream
) -> None:
    if stage == own_stage:
        return
    bench = bench_of(stage, data, own_stage=own_stage)
    accused = build(bench.manifest, stage)
    accused.load_flat(1.1 * accused.flat_parameters())
    honest = bench.honest(step=7, runner=accused)  # a step of which this node keeps nothing of its own
    flat = accused.flat_parameters().clone()
    assert bench.replayer.length(stage) == flat.numel()
    assert bench.replayer.compare(honest, flat) == ""
    zeros = bench.encode(torch.zeros(bench.manifest.activation_shape))
    assert bench.replayer.compare(replace(honest, returned=zeros), flat) == "gradient"
    assert bench.replayer.compare(honest, 1.3 * flat) in ("activation", "gradient")
    assert refused(lambda: bench.replayer.compare(honest, flat[:-1])) == "parameters"


def test_the_first_stages_work_can_only_be_judged_by_who_has_the_data(data: TokenStream) -> None:
    bench = bench_of(FIRST, data, own_stage=MIDDLE)
    accused = build(bench.manifest, FIRST)
    honest = bench.honest(runner=accused)
    assert refused(lambda: bench.replayer.compare(honest, accused.flat_parameters())) == "no_data"


def test_the_length_of_every_stage_is_known_without_its_parameters(data: TokenStream) -> None:
    bench = bench_of(MIDDLE, data)
    lengths = [bench.replayer.length(stage) for stage in range(3)]
    assert lengths == [build(bench.manifest, stage).flat_parameters().numel() for stage in range(3)]


# what is no microbatch at all ----------------------------------------------------------------------


@pytest.mark.parametrize("stage", [FIRST, LAST])
@pytest.mark.parametrize("tokens", [b"", bytes(4), bytes(7), bytes(4 * 2 * 32), bytes(4 * 2 * 34)], ids=len)
def test_tokens_of_another_size_are_refused(stage: int, tokens: bytes, data: TokenStream) -> None:
    bench = bench_of(stage, data)
    with pytest.raises(MessageError) as caught:
        bench.replayer.compare(replace(bench.honest(), tokens=tokens))
    assert caught.value.kind == "size"


@pytest.mark.parametrize("stage", [FIRST, LAST])
@pytest.mark.parametrize("value", [-1, 260, 2**31 - 1])
def test_tokens_outside_the_vocabulary_are_refused(stage: int, value: int, data: TokenStream) -> None:
    bench = bench_of(stage, data)
    tokens = bench.tokens.clone()
    tokens[1, 3] = value
    with pytest.raises(MessageError) as caught:
        bench.replayer.compare(replace(bench.honest(), tokens=token_bytes(tokens)))
    assert caught.value.kind == "origin"


@pytest.mark.parametrize(
    "change", [{"received": b""}, {"got": bytes(8)}, {"sent": bytes(3)}, {"returned": b"x"}], ids=str
)
def test_tensors_of_another_size_are_refused(change: dict[str, Any], data: TokenStream) -> None:
    bench = bench_of(MIDDLE, data)
    with pytest.raises(RemoteError) as caught:
        bench.replayer.compare(replace(bench.honest(), **change))
    assert caught.value.kind == "size"


@pytest.mark.parametrize("field", ["sent", "returned"])
def test_a_tensor_that_is_not_finite_is_falsified(field: str, data: TokenStream) -> None:
    bench = bench_of(MIDDLE, data)
    tensor = torch.full(bench.manifest.activation_shape, float("nan"))
    change: dict[str, Any] = {field: bench.encode(tensor)}
    named = bench.replayer.compare(replace(bench.honest(), **change))
    assert named == {"sent": "activation", "returned": "gradient"}[field]
