"""What ``sentinel init`` promises is compared with real stages, real graphs and real frames."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from node import estimate
from node.estimate import describe, size, stage_memory, stage_traffic
from node.history import ParameterHistory
from node.model import StageModule, stage_layout
from node.optimizer import StepOptimizer
from node.stage import StageRunner
from protocol.fields import encode
from protocol.framing import FrameKind, encode_head
from protocol.hops import sign_hop, sign_tokens
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.messages import Method, Train, Trained
from protocol.receipts import sign_receipt
from protocol.tensors import WireDtype, encode_tensor

ME = Identity(bytes(range(32)))
MODELS: list[dict[str, Any]] = [
    {},
    {
        "model": {"width": 96, "layers": 5, "heads": 6, "kv_heads": 3, "ffn": 256, "context": 40, "vocab_size": 700},
        "stages": {"layers_per_stage": [2, 1, 1, 1]},
    },
    {
        "model": {"width": 64, "layers": 3, "heads": 4, "kv_heads": 4, "ffn": 128, "context": 256, "vocab_size": 4000},
        "stages": {"layers_per_stage": [1, 2]},
    },
    {"stages": {"layers_per_stage": [6]}, "model": {"tie_embeddings": True}},
    {"stages": {"layers_per_stage": [6]}},
]


def manifest(values: dict[str, Any], **wire: str) -> Manifest:
    return Manifest.from_mapping({"name": "attic", **values, **({"wire": wire} if wire else {})})


every_shape = pytest.mark.parametrize(
    ("values", "stage"),
    [(values, stage) for values in MODELS for stage in range(manifest(values).num_stages)],
)


def runner(swarm: Manifest, stage: int) -> StageRunner:
    module = StageModule(swarm.model, swarm.stages.layers_per_stage, stage)
    return StageRunner(module, torch.device("cpu"))


@every_shape
def test_the_parameters_are_those_of_the_real_stage(values: dict[str, Any], stage: int) -> None:
    swarm = manifest(values)
    layout = stage_layout(swarm.model, swarm.stages.layers_per_stage, stage)
    assert estimate.estimate(swarm).stages[stage].parameters == sum(slot.numel for slot in layout)


@every_shape
def test_the_lasting_memory_is_that_of_the_real_vectors(values: dict[str, Any], stage: int) -> None:
    swarm = manifest(values)
    real = runner(swarm, stage)
    optimizer = StepOptimizer(real.layout, swarm.training)
    history = ParameterHistory(real, digest=b"before", keep=swarm.verifier.audits)
    history.about_to_change()
    optimizer.apply(real.flat_parameters(), torch.ones_like(real.flat_parameters()), 0)
    history.changed(1, b"after")
    before = history.parameters_of(b"before")
    state = optimizer.state()
    assert before is not None
    found = stage_memory(swarm, stage)
    assert found.parameters == real.flat_parameters().nbytes
    assert found.gradients == real.take_gradient()[0].nbytes
    assert found.optimizer == state["exp_avg"].nbytes + state["exp_avg_sq"].nbytes
    assert found.audits == before.nbytes


@every_shape
def test_the_activations_are_what_autograd_keeps(values: dict[str, Any], stage: int) -> None:
    swarm = manifest(values)
    real = runner(swarm, stage)
    kept: dict[int, torch.Tensor] = {}
    not_kept = {real.flat_parameters().untyped_storage().data_ptr()}
    not_kept |= {table.untyped_storage().data_ptr() for table in real._module.buffers()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in not_kept:
            kept[place] = tensor  # held, so that no other tensor takes its place
        return tensor

    shape = swarm.activation_shape
    tokens = torch.randint(0, swarm.model.vocab_size, shape[:2])
    received = tokens if stage == 0 else torch.randn(shape)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        if stage == swarm.num_stages - 1:
            real.forward(0, received, tokens)
        else:
            real.forward(0, received)
    real_bytes = sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
    assert 0.85 * real_bytes <= estimate.graph_bytes(swarm, stage) <= 1.25 * real_bytes


def test_only_the_last_stage_keeps_a_single_graph() -> None:
    swarm = manifest({})
    few, many = (stage_memory(swarm, 1, in_flight=count).activations for count in (1, 5))
    assert many == 5 * few
    last = stage_memory(swarm, 2, in_flight=5).activations - stage_memory(swarm, 2, in_flight=1).activations
    assert 0 < last < estimate.graph_bytes(swarm, 2)


def test_no_audits_need_no_copy() -> None:
    without = manifest({"verifier": {"audit_rate": 0.0}})
    count = without.stage_parameters(0)
    assert stage_memory(without, 0).audits == 0 and stage_memory(manifest({}), 0).audits == 4 * count


# traffic ---------------------------------------------------------------------------------


def hop(swarm: Manifest, stage: int, direction: str) -> bytes:
    return sign_hop(
        ME,
        bytes.fromhex(swarm.swarm_id),
        stage=stage,
        step=100,
        microbatch=5,
        direction=direction,
        digest=bytes(32),
        source=bytes(32),
        sketch=bytes(4 * swarm.verifier.sketch_size),
    )


def frame_bytes(kind: FrameKind, head: dict[str, Any], body: list[Any]) -> int:
    length = sum(memoryview(part).nbytes for part in body)
    return len(encode_head(kind, head, length)) + length


def request(swarm: Manifest, boundary: int) -> int:
    """Bytes of a real frame of a microbatch that goes downstream."""
    body = encode_tensor(torch.randn(swarm.activation_shape), WireDtype(swarm.wire.activation_dtype))
    training = swarm.training
    tokens = torch.zeros(training.sequences_per_microbatch, swarm.model.context + 1, dtype=torch.int32)
    packed = tokens.numpy().tobytes()
    message = Train(
        step=100,
        microbatch=5,
        attempt=0,
        origin=ME.peer_id,
        origin_signature=sign_tokens(ME, bytes.fromhex(swarm.swarm_id), step=100, microbatch=5, tokens=packed),
        tokens_bytes=len(packed),
        dtype=swarm.wire.activation_dtype,
        shape=swarm.activation_shape,
        hop=hop(swarm, boundary, "activation"),
        input_hop=hop(swarm, boundary - 1, "activation") if boundary else None,
    )
    head = {**encode(message), "id": 100, "method": Method.TRAIN.value}
    return frame_bytes(FrameKind.REQUEST, head, [packed, *body])


def reply(swarm: Manifest, boundary: int) -> int:
    """Bytes of a real frame of the gradient that comes back."""
    body = encode_tensor(torch.randn(swarm.activation_shape), WireDtype(swarm.wire.gradient_dtype))
    below = boundary + 1 < swarm.num_stages - 1
    receipt = sign_receipt(
        ME,
        bytes.fromhex(swarm.swarm_id),
        stage=boundary + 1,
        step=100,
        microbatch=5,
        received=bytes(32),
        sent=bytes(32),
        got=bytes(32),
        returned=bytes(32),
        parameters=bytes(32),
    )
    message = Trained(
        loss=3.5,
        dtype=swarm.wire.gradient_dtype,
        shape=swarm.activation_shape,
        hop=hop(swarm, boundary + 1, "gradient"),
        input_hop=hop(swarm, boundary + 2, "gradient") if below else None,
        receipt=receipt,
        input_receipt=receipt if below else None,
    )
    return frame_bytes(FrameKind.REPLY, {**encode(message), "id": 100}, body)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("values", MODELS[:3])
def test_the_traffic_is_that_of_real_frames(values: dict[str, Any], dtype: str) -> None:
    swarm = manifest(values, activation_dtype=dtype, gradient_dtype=dtype)
    boundaries = range(swarm.num_stages - 1)
    down, up = [request(swarm, each) for each in boundaries], [reply(swarm, each) for each in boundaries]
    for boundary in boundaries:
        assert abs(estimate.downstream_frame_bytes(swarm, boundary) - down[boundary]) <= 32
        assert abs(estimate.upstream_frame_bytes(swarm, boundary) - up[boundary]) <= 32
    both = [one + other for one, other in zip(down, up, strict=True)]
    for stage in range(swarm.num_stages):
        real = sum(both[max(0, stage - 1) : stage + 1])
        assert stage_traffic(swarm, stage, replicas=3).per_microbatch == pytest.approx(real, rel=0.005)


def test_the_traffic_of_a_step_follows_the_replicas() -> None:
    swarm = manifest({})
    alone, three = (stage_traffic(swarm, 1, replicas=count) for count in (1, 3))
    assert alone.averaging == 0 and alone.work == swarm.microbatches_per_step * alone.per_microbatch
    # Two slices of three go out and come back as aggregates; the third comes from both others and goes to them.
    slice_bytes = 4 * swarm.stage_parameters(1) / 3
    assert three.averaging == pytest.approx(8 * slice_bytes, abs=4)
    assert three.work == 3 * three.per_microbatch  # 8 microbatches among 3


def test_one_stage_sends_nothing_but_gradients() -> None:
    swarm = manifest({"stages": {"layers_per_stage": [6]}})
    traffic = stage_traffic(swarm, 0, replicas=2)
    assert traffic.per_microbatch == traffic.work == 0 and traffic.per_step == 4 * 2 * swarm.stage_parameters(0)


# for people ----------------------------------------------------------------------------------


def test_the_volunteers() -> None:
    found = estimate.estimate(manifest({"stages": {"min_replicas": 2}}))
    assert (found.needed, found.recommended, found.replicas) == (6, 9, 3)
    found = estimate.estimate(manifest({"stages": {"min_replicas": 5}}))
    assert (found.needed, found.recommended, found.replicas) == (15, 15, 5)


def test_what_it_says() -> None:
    said = describe(estimate.estimate(manifest({})))
    assert "1,174,144 in all; by stage 402,432, 369,152, 402,560" in said
    assert "3 to begin; 9 recommended" in said and "600 MiB are the program" in said
    many = manifest({"model": {"layers": 9}, "stages": {"layers_per_stage": [1] * 9}})
    assert "(first)" in describe(estimate.estimate(many)) and "(middle)" in describe(estimate.estimate(many))
    assert max(map(len, describe(estimate.estimate(many)).splitlines())) <= 140


@pytest.mark.parametrize(("count", "says"), [(3, "3 B"), (1536, "1.5 KiB"), (20 << 20, "20 MiB"), (3 << 29, "1.5 GiB")])
def test_sizes_for_people(count: int, says: str) -> None:
    assert size(count) == says
