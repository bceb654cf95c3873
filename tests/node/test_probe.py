"""The probe before a claim: what fits, how fast it is, and a stage that does not fit at all."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from node.estimate import size, stage_bytes
from node.metrics import Metrics
from node.model import StageModule
from node.probe import Prober, probe
from node.stage import StageRunner
from node.worker import InlineWorker
from protocol.errors import MemoryTooSmallError
from protocol.manifest import Manifest
from tests.swarm.harness import small_manifest

CPU = torch.device("cpu")
PLENTY = 1 << 50


def found(manifest: Manifest, stage: int = 1, *, free: int = PLENTY, **options: Any) -> Any:
    return probe(manifest, stage, CPU, available=lambda device: free, **options)


class Small(StageRunner):
    """A runner on a device that has room for so many graphs."""

    room = 2
    error: BaseException = torch.OutOfMemoryError("CUDA out of memory")

    def forward(self, key: int, received: Tensor, targets: Tensor | None = None) -> Any:  # type: ignore[override]
        if self.pending >= self.room:
            raise self.error
        return super().forward(key, received) if targets is None else super().forward(key, received, targets)


def small(room: int, error: BaseException | None = None) -> Any:
    def make(manifest: Manifest, stage: int, device: torch.device) -> StageRunner:
        runner = Small(StageModule(manifest.model, manifest.stages.layers_per_stage, stage), device)
        runner.room = room
        runner.error = error or runner.error
        return runner

    return make


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_every_kind_of_stage_is_run(stage: int) -> None:
    manifest = small_manifest()
    result = found(manifest, stage)
    assert result.stage == stage and result.in_flight == manifest.network.in_flight
    assert result.microbatches_per_second > 0 and result.peak_bytes >= 0


def test_a_model_of_a_single_stage_too() -> None:
    assert found(small_manifest(stages={"layers_per_stage": [3]}), 0).microbatches_per_second > 0


def test_the_speed_is_that_of_the_faster_of_two_runs() -> None:
    times = iter([0.0, 0.5, 1.0, 1.25])
    assert found(small_manifest(), clock=lambda: next(times)).microbatches_per_second == 4.0
    times = iter([0.0, 8.0])  # a slow machine is not asked twice
    assert found(small_manifest(), clock=lambda: next(times)).microbatches_per_second == 0.125


def test_the_random_numbers_of_the_process_are_left_alone() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    found(small_manifest())
    assert torch.equal(torch.get_rng_state(), before)


def test_on_a_cpu_the_memory_decides_before_anything_is_run(caplog: pytest.LogCaptureFixture) -> None:
    # Wide activations, so that the averaging is not what needs the most.
    manifest = small_manifest(model={"context": 2048}, network={"in_flight": 8})
    needed = {count: stage_bytes(manifest, 1, in_flight=count) for count in (1, 2, 4, 8)}
    ran: list[int] = []

    def make(manifest: Manifest, stage: int, device: torch.device) -> StageRunner:
        ran.append(stage)
        return StageRunner(StageModule(manifest.model, manifest.stages.layers_per_stage, stage), device)

    with caplog.at_level(logging.WARNING):
        assert found(manifest, free=needed[4] - 1, make_runner=make).in_flight == 2
    assert "2 microbatches at a time instead of 8" in caplog.text
    assert found(manifest, free=needed[8], make_runner=make).in_flight == 8
    with pytest.raises(MemoryTooSmallError) as refused:
        found(manifest, free=needed[1] - 1, make_runner=make)
    assert ran == [1, 1]
    assert refused.value.exit_code == 5
    assert str(refused.value).startswith(
        f"stage 1 does not fit here: with one microbatch at a time it takes {size(needed[1])}"
    )


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 99 bytes"),
    ],
)
@pytest.mark.parametrize(("room", "in_flight"), [(99, 8), (4, 4), (3, 2), (1, 1)])
def test_out_of_memory_halves_what_is_in_flight(room: int, in_flight: int, error: BaseException) -> None:
    manifest = small_manifest(network={"in_flight": 8})
    assert found(manifest, make_runner=small(room, error)).in_flight == in_flight


def test_out_of_memory_with_a_single_one_is_the_end() -> None:
    with pytest.raises(MemoryTooSmallError, match="close other programs or use a larger machine"):
        found(small_manifest(), make_runner=small(0))


def test_another_error_is_not_taken_for_a_lack_of_memory() -> None:
    with pytest.raises(RuntimeError, match="something else"):
        found(small_manifest(), make_runner=small(1, RuntimeError("something else")))


def test_a_machine_that_is_too_slow_is_told(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 15.0])
    found(small_manifest(), clock=lambda: next(times))
    assert "takes 15.0 s for a microbatch, and the swarm waits 20 s" in caplog.text


async def test_a_stage_is_probed_once_and_shown() -> None:
    metrics = Metrics()
    prober = Prober(small_manifest(network={"in_flight": 3}), CPU, metrics, InlineWorker())
    assert prober.result(1) is None and prober.result(None) is None and prober.in_flight(1) == 3
    await prober.try_out(1)
    first = prober.result(1)
    await prober.try_out(1)
    assert first is not None and prober.result(1) is first and prober.in_flight(1) == 3
    text = metrics.render().decode()
    assert "sentinel_microbatches_in_flight_limit 3.0" in text
    assert f"sentinel_capacity_microbatches_per_second {first.microbatches_per_second}" in text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA GPU")
def test_on_a_gpu_the_allocator_decides() -> None:
    gpu = torch.device("cuda")
    manifest = small_manifest(model={"width": 512, "ffn": 1376, "heads": 8, "context": 512}, network={"in_flight": 8})
    result = probe(manifest, 1, gpu)
    assert result.in_flight == 8 and result.peak_bytes > 0
    before = torch.cuda.memory_allocated(gpu)
    torch.cuda.set_per_process_memory_fraction(
        (before + 0.6 * result.peak_bytes) / torch.cuda.get_device_properties(gpu).total_memory
    )
    try:
        assert 1 <= probe(manifest, 1, gpu).in_flight < 8
        torch.cuda.set_per_process_memory_fraction(1e-6)
        with pytest.raises(MemoryTooSmallError, match="of the GPU"):
            probe(manifest, 1, gpu)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert torch.cuda.memory_allocated(gpu) == before
