"""What a swarm asks of its nodes: parameters, memory, traffic and how many of them. Needs neither torch nor a node.

Pure arithmetic on the manifest. Tests compare the parameters with the real stages, the memory with what autograd really
keeps, and the bytes with real frames. What a stage needs is decided here and nowhere else: a node that claims one, the
doctor and ``sentinel init`` all ask this module.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from protocol.framing import PREAMBLE
from protocol.manifest import Manifest

PROCESS_BYTES: Final = 600 << 20
"""What a node takes besides its stage: Python, torch, p2pd. Where a GPU trains, it is the machine's own memory."""

PARAMETER_BYTES: Final = 4
GRADIENT_BYTES: Final = 4
ADAM_BYTES: Final = 8
AUDIT_BYTES: Final = 4
"""The parameters of the step before, which audits need."""
REMEMBERED_BYTES: Final = 4
"""The aggregate of the step before, for siblings that missed it."""
AVERAGING_BYTES: Final = 20
"""While siblings average: the aggregate, their parts of this node's slice, and what reducing those takes. Measured with
a node that is alone in its stage, whose slice is the whole."""
STATE_BYTES: Final = PARAMETER_BYTES + ADAM_BYTES
"""Of each parameter, what a checkpoint holds and what a late node fetches."""

RECOMMENDED_REPLICAS: Final = 3
"""An audit needs a majority besides the accused, and the averaging three gradients, to outvote one that lies."""

HOP_BYTES: Final = 276
"""A signed hop without its sketch, in a frame's head."""
RECEIPT_BYTES: Final = 369
REQUEST_BYTES: Final = 244
"""The rest of a request's head: the origin and its signature, names, numbers."""
REPLY_BYTES: Final = 91
"""The rest of a reply's head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Bytes of memory of one stage at its node's peak."""

    parameters: int
    gradients: int
    optimizer: int
    audits: int
    """The parameters of the step before."""
    remembered: int
    """The aggregate of the step before."""
    activations: int
    """What autograd keeps of the microbatches in flight, and their tensors that come and go."""
    averaging: int
    """At the end of a step, when nothing is in flight."""

    @property
    def device(self) -> int:
        """What has to fit into a GPU: averaging goes on in the machine's own memory."""
        lasting = self.parameters + self.gradients + self.optimizer + self.audits
        return lasting + self.parameters + self.activations  # a microbatch's own gradients, before they are added up

    @property
    def stage(self) -> int:
        """Where a CPU trains, besides what the process takes anyway."""
        lasting = self.parameters + self.gradients + self.optimizer + self.audits + self.remembered
        return lasting + max(self.parameters + self.activations, self.averaging)

    @property
    def total(self) -> int:
        """The peak of a node that trains on its CPU. While it gives its state to a late joiner, and while it writes a
        checkpoint, it takes a copy more, if there is room."""
        return self.stage + PROCESS_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Bytes that one node of a stage sends and receives, both together."""

    per_microbatch: int
    work: int
    """Of a step: the microbatches that come to it, if the stage's replicas share them evenly."""
    averaging: int
    """Of a step: the gradients, at the given number of replicas."""

    @property
    def per_step(self) -> int:
        """All of a step."""
        return self.work + self.averaging


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """One stage."""

    stage: int
    layers: int
    parameters: int
    memory: StageMemory
    traffic: Traffic
    state_bytes: int
    """What a node that comes late fetches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A whole swarm."""

    swarm: str
    name: str
    stages: tuple[StageEstimate, ...]
    needed: int
    """Volunteers without which training does not begin."""
    recommended: int
    replicas: int
    """Of each stage, for the traffic of a step."""

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        return sum(stage.parameters for stage in self.stages)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``: bytes and counts, nothing rounded."""
        return {
            "swarm": self.swarm,
            "name": self.name,
            "parameters": self.parameters,
            "volunteers_needed": self.needed,
            "volunteers_recommended": self.recommended,
            "replicas_for_traffic": self.replicas,
            "stages": [
                {
                    "stage": stage.stage,
                    "layers": stage.layers,
                    "parameters": stage.parameters,
                    "memory_bytes": asdict(stage.memory) | {"process": PROCESS_BYTES, "total": stage.memory.total},
                    "microbatch_bytes": stage.traffic.per_microbatch,
                    "step_bytes": stage.traffic.per_step,
                    "averaging_bytes": stage.traffic.averaging,
                    "state_bytes": stage.state_bytes,
                }
                for stage in self.stages
            ],
        }


def estimate(manifest: Manifest, *, replicas: int | None = None) -> Estimate:
    """What the swarm of a manifest asks; ``replicas`` of each stage for the traffic, else as many as recommended."""
    least = manifest.stages.min_replicas
    best = max(RECOMMENDED_REPLICAS, least)
    replicas = best if replicas is None else replicas
    return Estimate(
        swarm=manifest.swarm_id,
        name=manifest.name,
        stages=tuple(
            StageEstimate(
                stage=stage,
                layers=len(manifest.stage_layers(stage)),
                parameters=manifest.stage_parameters(stage),
                memory=stage_memory(manifest, stage),
                traffic=stage_traffic(manifest, stage, replicas=replicas),
                state_bytes=STATE_BYTES * manifest.stage_parameters(stage),
            )
            for stage in range(manifest.num_stages)
        ),
        needed=manifest.num_stages * least,
        recommended=manifest.num_stages * best,
        replicas=replicas,
    )


# memory --------------------------------------------------------------------------------------


def stage_memory(manifest: Manifest, stage: int, *, in_flight: int | None = None) -> StageMemory:
    """The memory of a stage with so many microbatches in flight, the manifest's number if none is given."""
    count = manifest.stage_parameters(stage)
    in_flight = manifest.network.in_flight if in_flight is None else in_flight
    return StageMemory(
        parameters=PARAMETER_BYTES * count,
        gradients=GRADIENT_BYTES * count,
        optimizer=ADAM_BYTES * count,
        audits=AUDIT_BYTES * count if manifest.verifier.audits else 0,
        remembered=REMEMBERED_BYTES * count,
        activations=in_flight * _boundary_bytes(manifest)
        + graphs_at_once(manifest, stage, in_flight) * graph_bytes(manifest, stage)
        + _loss_bytes(manifest, stage),
        averaging=AVERAGING_BYTES * count,
    )


def stage_bytes(manifest: Manifest, stage: int, *, gpu: bool = False, in_flight: int | None = None) -> int:
    """What a stage needs besides the process: the measure by which a node claims one or leaves it."""
    found = stage_memory(manifest, stage, in_flight=in_flight)
    return found.device if gpu else found.stage


def graphs_at_once(manifest: Manifest, stage: int, in_flight: int) -> int:
    """Microbatches whose graphs are kept at once. The last stage goes both ways in one go, and keeps one."""
    return 1 if stage == manifest.num_stages - 1 else in_flight


def graph_bytes(manifest: Manifest, stage: int) -> int:
    """What autograd keeps between forward and backward of one microbatch, in fp32.

    Some 6 widths, 2 key or value widths and 4 feed-forward widths a token and layer (attention is computed without its
    full matrix), the input, and in the last stage the logarithms of the probabilities.
    """
    model = manifest.model
    kv_width = model.kv_heads * (model.width // model.heads)
    per_token = len(manifest.stage_layers(stage)) * (6 * model.width + 2 * kv_width + 4 * model.ffn) + model.width
    if stage == manifest.num_stages - 1:
        per_token += model.width + model.vocab_size
    return 4 * per_token * _tokens(manifest)


def _loss_bytes(manifest: Manifest, stage: int) -> int:
    """The last stage's logits and their gradient, of the one microbatch that it computes."""
    return 8 * manifest.model.vocab_size * _tokens(manifest) if stage == manifest.num_stages - 1 else 0


def _boundary_bytes(manifest: Manifest) -> int:
    """Tensors of a microbatch as they come and go: received, decoded, sent and returned."""
    wire = manifest.wire
    return 2 * manifest.activation_bytes("fp32") + sum(
        manifest.activation_bytes(dtype) for dtype in (wire.activation_dtype, wire.gradient_dtype)
    )


def _tokens(manifest: Manifest) -> int:
    return manifest.training.sequences_per_microbatch * manifest.model.context


# traffic -------------------------------------------------------------------------------------


def stage_traffic(manifest: Manifest, stage: int, *, replicas: int) -> Traffic:
    """What a node of a stage sends and receives, where the stage has so many replicas."""
    boundaries = [boundary for boundary in (stage - 1, stage) if 0 <= boundary < manifest.num_stages - 1]
    per_microbatch = sum(
        downstream_frame_bytes(manifest, boundary) + upstream_frame_bytes(manifest, boundary) for boundary in boundaries
    )
    share = -(-manifest.microbatches_per_step // replicas)
    # Of each of the others' slices a part goes out and the aggregate comes back, and of its own the other way round.
    averaging = 4 * manifest.stage_parameters(stage) * 4 * (replicas - 1) // replicas
    return Traffic(per_microbatch=per_microbatch, work=share * per_microbatch, averaging=averaging)


def downstream_frame_bytes(manifest: Manifest, boundary: int) -> int:
    """One microbatch from stage ``boundary`` to the next: preamble, head, tokens and activation."""
    tokens = 4 * manifest.training.sequences_per_microbatch * (manifest.model.context + 1)
    hops = 1 if boundary == 0 else 2  # the sender's own, and that of what it received
    body = tokens + manifest.activation_bytes(manifest.wire.activation_dtype)
    return PREAMBLE.size + REQUEST_BYTES + hops * _hop_bytes(manifest) + body


def upstream_frame_bytes(manifest: Manifest, boundary: int) -> int:
    """The answer: preamble, head and gradient."""
    hops = 1 if boundary == manifest.num_stages - 2 else 2  # each comes with a receipt
    body = manifest.activation_bytes(manifest.wire.gradient_dtype)
    return PREAMBLE.size + REPLY_BYTES + hops * (_hop_bytes(manifest) + RECEIPT_BYTES) + body


def _hop_bytes(manifest: Manifest) -> int:
    return HOP_BYTES + 4 * manifest.verifier.sketch_size


# for people ----------------------------------------------------------------------------------


def describe(found: Estimate) -> str:
    """The estimate in a few lines."""
    stages = found.stages
    lines = [
        f"swarm id      {found.swarm}",
        f"parameters    {found.parameters:,} in all; by stage {_each(f'{stage.parameters:,}' for stage in stages)}",
        f"memory        by stage {_each(size(stage.memory.total) for stage in stages)} a node, of which "
        f"{size(PROCESS_BYTES)} are the program",
        f"traffic       by stage {_each(size(stage.traffic.per_microbatch) for stage in stages)} a microbatch, sent "
        "and received",
        f"              by stage {_each(size(stage.traffic.per_step) for stage in stages)} a step and node, with "
        f"{found.replicas} replicas a stage",
        f"late joiners  fetch {_each(size(stage.state_bytes) for stage in stages)}",
        f"volunteers    {found.needed} to begin; {found.recommended} recommended: with {RECOMMENDED_REPLICAS} a stage"
        " or more, one that lies is outvoted",
    ]
    return "\n".join(lines)


def size(count: float) -> str:
    """Bytes for people: ``1.5 GiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 10 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"


SHOWN: Final = 6
"""Stages that are listed one by one; more are told by their range."""


def _each(values: Iterable[str]) -> str:
    """``1, 2, 3``; once if all are alike; first, middle and last if they are many."""
    listed = list(values)
    if len(set(listed)) == 1:
        return listed[0]
    if len(listed) <= SHOWN:
        return ", ".join(listed)
    return f"{listed[0]} (first), {listed[len(listed) // 2]} (middle), {listed[-1]} (last)"
