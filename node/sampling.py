"""What a node measures of itself every few seconds: p2pd, event loop, connections, view, trust, audits and disk."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING

from node.metrics import Metrics
from node.resources import read_disk

if TYPE_CHECKING:
    from node.daemon import Node

SAMPLE_SECONDS = 2.0
DISK_SECONDS = 10.0


async def sample_for_ever(node: Node) -> None:
    """Measure until cancelled."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(SAMPLE_SECONDS)
        sample(node, lag=max(0.0, time.monotonic() - before - SAMPLE_SECONDS))


async def sample_disk_for_ever(metrics: Metrics, folder: Path) -> None:
    """Measure the disk until cancelled, in a thread: one that hangs holds up nothing else."""
    while True:
        try:
            free, size = await asyncio.to_thread(read_disk, folder)
            metrics.sample_disk(free=free, size=size)
        except OSError:
            metrics.sample_disk(free=math.nan, size=math.nan)
        await asyncio.sleep(DISK_SECONDS)


def sample(node: Node, *, lag: float) -> None:
    """Measure once; ``lag``: seconds by which the event loop was late."""
    metrics, membership = node.metrics, node.membership
    metrics.sample_process(lag=lag, p2pd_pid=node.network.helper_pid, peers=len(node.network.transport.connected()))
    if membership is None:
        return
    view = membership.view
    ejected = node.guard.ejected() if node.guard is not None else ()
    for stage in range(view.num_stages):
        serving = view.roster(stage, node.step, without=ejected)
        metrics.set_replicas(stage, live=len(view.replicas(stage)), serving=len(serving))
    steps = node.manifest.training.steps if node.manifest is not None else 0
    metrics.step.set(node.step)
    metrics.set_contribution(node.contribution.total)
    metrics.finished.set(node.finished or 0 < steps <= node.step)
    if node.guard is not None:
        metrics.set_trust(
            {
                (claim.peer, claim.stage): node.guard.ledger.standing(claim.peer).trust
                for claim in view.claims.values()
                if claim.peer != membership.me
            }
        )
        metrics.set_ejected({peer: view.last_stage(peer) for peer in node.guard.all_ejected()})
    if node.parts is not None:
        metrics.set_open_audits(caller=node.parts.auditor.open_cases, juror=node.parts.juror.open_audits)
