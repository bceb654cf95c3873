"""What a node measures of itself every few seconds: memory, files, event loop, connections, view and trust."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from node.daemon import Node

SAMPLE_SECONDS = 2.0


async def sample_for_ever(node: Node) -> None:
    """Measure until cancelled."""
    while True:
        before = time.monotonic()
        await asyncio.sleep(SAMPLE_SECONDS)
        sample(node, lag=max(0.0, time.monotonic() - before - SAMPLE_SECONDS))


def sample(node: Node, *, lag: float) -> None:
    """Measure once; ``lag``: seconds by which the event loop was late."""
    metrics, membership = node.metrics, node.membership
    metrics.sample_process(lag=lag, p2pd_pid=node.network.helper_pid, peers=len(node.network.transport.connected()))
    if membership is None:
        return
    for stage in range(membership.view.num_stages):
        metrics.view_replicas.labels(stage=str(stage)).set(len(membership.view.replicas(stage)))
    if node.guard is not None:
        metrics.set_trust(
            {
                (claim.peer, claim.stage): node.guard.ledger.standing(claim.peer).trust
                for claim in membership.view.claims.values()
                if claim.peer != membership.me
            }
        )
