"""How quickly bytes come from the swarm's nodes: for ``sentinel doctor``, which reads some of a checkpoint to see."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from node.common_step import TRAINS
from node.estimate import estimate, size
from node.findings import Finding, good, note
from node.progress import duration
from protocol.errors import RefusedError, SentinelError
from protocol.fields import decode
from protocol.manifest import Manifest
from protocol.messages import MAX_CHECKPOINT_PART_BYTES, CheckpointOffers, CheckpointPart, CheckpointQuery, Method
from protocol.records import Claim

if TYPE_CHECKING:
    from protocol.light import LightSession

MEASURE_SECONDS = 2.0
MOST_BYTES = 32 << 20
"""Enough to know a rate, and no burden to whoever gives it."""
ASKED = 4
SLOW_MICROBATCH_SECONDS = 2.0
"""From which on a node holds others up: a step has many microbatches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """What came in some time; the request that asks for the next part is in it."""

    bytes: int
    seconds: float

    @property
    def per_second(self) -> float:
        """Bytes a second."""
        return self.bytes / max(self.seconds, 1e-9)


def measure(manifest: Manifest, claims: Sequence[Claim], *, seconds: float) -> Rate | None:
    """Read of a checkpoint for a moment, from the first node that has one; None if none gives any."""
    from protocol.light import run_light  # py-libp2p, which cannot be in one process with hivemind

    there = [claim for claim in claims if claim.state in TRAINS and claim.addresses][:ASKED]
    if not there:
        return None
    swarm = bytes.fromhex(manifest.swarm_id)

    async def read(session: LightSession) -> Rate:
        await session.hello(swarm)
        for stage in range(manifest.num_stages):
            answer = await session.request(Method.CHECKPOINTS, CheckpointQuery(stage=stage))
            offers = decode(CheckpointOffers, answer.head)
            for step, length in zip(offers.steps, offers.sizes, strict=False):
                return await _read(session, stage, step, min(length, MOST_BYTES))
        raise RefusedError("no checkpoint is here", kind="too_old")

    try:
        return run_light(read, [claim.addresses[0] for claim in there], seconds=seconds)
    except SentinelError:
        return None


async def _read(session: LightSession, stage: int, step: int, length: int) -> Rate:
    began = time.monotonic()
    done = 0
    while done < length and time.monotonic() - began < MEASURE_SECONDS:
        part = CheckpointPart(stage=stage, step=step, offset=done, length=min(MAX_CHECKPOINT_PART_BYTES, length - done))
        done += len((await session.request(Method.CHECKPOINT_PART, part)).body)
    return Rate(bytes=done, seconds=time.monotonic() - began)


def judge(rate: Rate | None, manifest: Manifest) -> Finding:
    """Whether that is enough for the tensors of this swarm."""
    name = "bandwidth"
    if rate is None or not rate.bytes:
        return good(name, "not measured: no node has a checkpoint to read of yet")
    stages = estimate(manifest).stages
    most = max(stage.traffic.per_microbatch for stage in stages)
    state = max(stage.state_bytes for stage in stages)
    each = most / rate.per_second
    joining = duration(state / rate.per_second)
    text = f"{size(rate.per_second)}/s from a node: {each:.2g} s for a microbatch, {joining} for a stage's state"
    if each > SLOW_MICROBATCH_SECONDS:
        return note(name, text, "expect little; a wire dtype of fewer bytes is the coordinator's choice")
    return good(name, text)
