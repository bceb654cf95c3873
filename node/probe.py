"""The probe: one real step of a stage on this machine, before the node claims it.

It tells how many microbatches can be in flight in the memory that there is, and how fast this machine computes one. The
weights are made up, since only shapes matter, and nothing of it is left afterwards. Knows nothing of peers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import psutil
import torch

from node.device import autocast_dtype, available_memory_bytes
from node.estimate import graphs_at_once, size, stage_bytes
from node.malloc import give_back
from node.metrics import Metrics
from node.model import StageModule
from node.stage import StageRunner
from node.wording import many
from node.worker import ComputeWorker, Priority
from protocol.errors import MemoryTooSmallError
from protocol.manifest import Manifest

log = logging.getLogger(__name__)

LONG_SECONDS: Final = 2.0
"""A microbatch that takes longer is not run a second time for a better measure."""
MAX_CAPACITY: Final = 1e6
_WEIGHT: Final = 0.01

MakeRunner = Callable[[Manifest, int, torch.device], StageRunner]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probed:
    """What a machine can do with a stage."""

    stage: int
    in_flight: int
    """Microbatches at once, at most the manifest's number."""
    microbatches_per_second: float
    """Forward and backward, computing nothing else."""
    peak_bytes: int
    """The most that the probe took: of the GPU's allocator, else the growth of this process."""

    def as_dict(self) -> dict[str, float]:
        """For /status."""
        return {
            "stage": self.stage,
            "in_flight": self.in_flight,
            "microbatches_per_second": self.microbatches_per_second,
            "peak_bytes": self.peak_bytes,
        }


class Prober:
    """The probes of one node, at most one for each stage."""

    def __init__(self, manifest: Manifest, device: torch.device, metrics: Metrics, worker: ComputeWorker) -> None:
        """``worker``: the one that will train. What torch keeps for each thread is then there once, and a node that may
        use few threads is measured with few."""
        self._worker = worker
        self._manifest = manifest
        self._device = device
        self._metrics = metrics
        self._results: dict[int, Probed] = {}

    async def try_out(self, stage: int) -> None:
        """Run the probe, unless it has been run for this stage; in the compute thread.

        Raises:
            MemoryTooSmallError: the stage does not fit.
        """
        if stage not in self._results:
            self._results[stage] = await self._worker.run(Priority.CHECK, probe, self._manifest, stage, self._device)
        self._metrics.set_probed(self._results[stage])

    def result(self, stage: int | None) -> Probed | None:
        """What the probe of a stage found, if there was one."""
        return None if stage is None else self._results.get(stage)

    def in_flight(self, stage: int) -> int:
        """Microbatches that a stage may have in flight here."""
        found = self.result(stage)
        return self._manifest.network.in_flight if found is None else found.in_flight


def probe(
    manifest: Manifest,
    stage: int,
    device: torch.device,
    *,
    available: Callable[[torch.device], int] = available_memory_bytes,
    make_runner: MakeRunner | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> Probed:
    """Run a step of a stage, with as many microbatches in flight as fit. Takes seconds for a large stage.

    Raises:
        MemoryTooSmallError: not even one fits; says what to do.
    """
    wanted = manifest.network.in_flight
    free = available(device)
    in_flight = _fitting(manifest, stage, device, free, wanted)
    while in_flight:
        try:
            found = _run(manifest, stage, device, in_flight, make_runner or _runner, clock)
        except (torch.OutOfMemoryError, MemoryError):
            in_flight //= 2
        except RuntimeError as error:
            if "allocate memory" not in str(error):  # how torch's CPU allocator says it
                raise
            in_flight //= 2
        else:
            _tell(manifest, found)
            return found
        finally:
            _give_back(device)
    need = _needed(manifest, stage, device, 1)
    raise MemoryTooSmallError(
        f"stage {stage} does not fit here: with one microbatch at a time it takes {size(need)}, and {size(free)} of "
        f"the {'GPU' if device.type == 'cuda' else 'memory'} are free; close other programs or use a larger machine"
    )


def _needed(manifest: Manifest, stage: int, device: torch.device, in_flight: int) -> int:
    return stage_bytes(manifest, stage, gpu=device.type == "cuda", in_flight=in_flight)


def _fitting(manifest: Manifest, stage: int, device: torch.device, free: int, wanted: int) -> int:
    """How many to try. A GPU's allocator refuses without harm, so there only trying decides; a machine that runs out of
    memory kills processes."""
    if device.type == "cuda":
        return wanted
    while wanted and _needed(manifest, stage, device, wanted) > free:
        wanted //= 2
    return wanted


def _run(
    manifest: Manifest,
    stage: int,
    device: torch.device,
    in_flight: int,
    make_runner: MakeRunner,
    clock: Callable[[], float],
) -> Probed:
    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device) if cuda else _resident()
    runner = make_runner(manifest, stage, device)
    # The optimizer's moments and the copy for audits, so that what is left for graphs is what will be left.
    held = [torch.zeros_like(runner.flat_parameters()) for _ in range(3 if manifest.verifier.audits else 2)]
    last = stage == manifest.num_stages - 1
    received, targets, gradient = _inputs(manifest, stage)

    def forward(key: int) -> None:
        if last:
            assert targets is not None
            runner.forward(key, received, targets)
        else:
            runner.forward(key, received)

    def once(key: int) -> float:
        started = clock()
        forward(key)
        runner.backward(key, None if last else gradient)  # brings its results to the CPU, so the GPU has finished
        return clock() - started

    seconds = once(0)
    keys = range(1, 1 + graphs_at_once(manifest, stage, in_flight))
    for key in keys:
        forward(key)
    peak = _resident() - before
    for key in keys:
        runner.backward(key, None if last else gradient)
    if seconds < LONG_SECONDS:
        seconds = min(seconds, once(0))  # the first one also made ready what is made once
    if cuda:
        peak = torch.cuda.max_memory_allocated(device) - before
    del held
    return Probed(
        stage=stage,
        in_flight=in_flight,
        microbatches_per_second=min(MAX_CAPACITY, 1.0 / max(seconds, 1.0 / MAX_CAPACITY)),
        peak_bytes=max(0, peak),
    )


def _tell(manifest: Manifest, found: Probed) -> None:
    seconds, wanted = 1.0 / found.microbatches_per_second, manifest.network.in_flight
    log.info(
        "[claiming] stage %d fits here: %s at a time, %s a second if nothing else goes on",
        found.stage,
        many(found.in_flight, "microbatch"),
        f"{found.microbatches_per_second:,.0f}" if seconds < 0.1 else f"{found.microbatches_per_second:.2g}",
    )
    if found.in_flight < wanted:
        log.warning(
            "memory is short: %d microbatches at a time instead of %d; this node will be slower",
            found.in_flight,
            wanted,
        )
    if seconds > manifest.network.hop_timeout_seconds / 2:
        log.warning(
            "this machine takes %.1f s for a microbatch, and the swarm waits %.0f s for a node: expect that it is left "
            "out; use a faster device",
            seconds,
            manifest.network.hop_timeout_seconds,
        )


def _runner(manifest: Manifest, stage: int, device: torch.device) -> StageRunner:
    """A runner of made-up weights: drawing the real ones takes far longer than a step."""
    with torch.device("meta"):
        module = StageModule(manifest.model, manifest.stages.layers_per_stage, stage)
    for name, parameter in list(module.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        value = torch.full(parameter.shape, _WEIGHT if parameter.ndim > 1 else 1.0)
        setattr(module.get_submodule(owner), leaf, torch.nn.Parameter(value))
    return StageRunner(module, device, autocast_dtype(device, manifest.wire))


def _inputs(manifest: Manifest, stage: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    shape = manifest.activation_shape
    tokens = torch.arange(shape[0] * shape[1]).view(shape[:2]) % manifest.model.vocab_size
    # A generator of its own, since nothing else must depend on whether there was a probe.
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    last = stage == manifest.num_stages - 1
    return tokens if stage == 0 else values, tokens if last else None, values


def _give_back(device: torch.device) -> None:
    """Return what is free to the device and the system: what the probe took is not needed in just these pieces."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    give_back()


def _resident() -> int:
    return int(psutil.Process().memory_info().rss)
