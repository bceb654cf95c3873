"""What a coordinator watches: it asks the nodes how far they are, for its console and its metrics."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from node.contribution import MAX_COUNT, Contributed
from node.membership import Membership
from node.metrics import Metrics
from protocol.errors import MessageError, SentinelError
from protocol.fields import MAX_STEP
from protocol.manifest import Manifest
from protocol.messages import Empty, Method

POLL_SECONDS = 2.0
MAX_POLLED = 64
"""Nodes that are asked for their status at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReport:
    """What a node told the coordinator of itself. It may lie, so only numbers in their range are kept."""

    answers: bool = True
    step: int = 0
    loss: float | None = None
    contributed: Contributed = field(default_factory=Contributed)

    @classmethod
    def of(cls, status: Mapping[str, Any]) -> PeerReport:
        """Of a peer's status, whatever that holds."""
        step, loss = status.get("step"), status.get("loss")
        told = status.get("contribution")
        told = told if isinstance(told, Mapping) else {}
        sums = {name: told.get(name) for name in ("microbatches", "tokens", "steps")}
        return cls(
            step=step if type(step) is int and 0 <= step <= MAX_STEP else 0,
            loss=loss if type(loss) is float and math.isfinite(loss) else None,
            contributed=Contributed(
                **{name: sum_ for name, sum_ in sums.items() if type(sum_) is int and 0 <= sum_ <= MAX_COUNT}
            ),
        )


class SwarmWatch:
    """Where the swarm is, as its nodes tell."""

    def __init__(self, *, transport: Any, membership: Membership, metrics: Metrics) -> None:
        self._transport = transport
        self._membership = membership
        self._metrics = metrics
        self.reports: dict[str, PeerReport] = {}
        self.step = 0
        self.loss: float | None = None

    async def run(self, manifest: Manifest, tell: Callable[[str], None]) -> None:
        """Watch until cancelled; ``tell`` hears each time who is there."""
        while True:
            await self.poll()
            tell(self.who_is_there(manifest))
            await asyncio.sleep(POLL_SECONDS)

    async def poll(self) -> None:
        """Ask all nodes, or in a large swarm another part of them each time."""
        claims = self._membership.view.claims
        live = list(claims)
        asked = live if len(live) <= MAX_POLLED else random.sample(live, MAX_POLLED)
        answers = zip(asked, await asyncio.gather(*map(self._ask, asked)), strict=True)
        known = {peer: report for peer, report in self.reports.items() if peer in claims}
        self.reports = {**known, **dict(answers)}
        # Nodes may lie: the middle of what they say, so that a few change nothing.
        losses = sorted(report.loss for report in self.reports.values() if report.loss is not None)
        steps = sorted(report.step for report in self.reports.values() if report.answers)
        if losses:
            self.loss = losses[len(losses) // 2]
            self._metrics.loss.set(self.loss)
        if steps:
            self.step = steps[len(steps) // 2]
            self._metrics.step.set(self.step)

    async def _ask(self, peer: str) -> PeerReport:
        try:
            return PeerReport.of(await fetch_status(self._transport, peer))
        except SentinelError:
            known = self.reports.get(peer, PeerReport())
            return PeerReport(answers=False, contributed=known.contributed)

    def who_is_there(self, manifest: Manifest) -> str:
        """The replicas of each stage, and before the start those that it waits for."""
        view = self._membership.view
        counts = [len(view.replicas(stage)) for stage in range(view.num_stages)]
        held = ", ".join(f"{count} in stage {stage}" for stage, count in enumerate(counts))
        missing = view.missing(manifest.stages.min_replicas) if self.step == 0 else {}
        lacks = ", ".join(f"{count} for stage {stage}" for stage, count in sorted(missing.items()))
        return f"coordinating: {held}" + (f"; waiting for volunteers: {lacks}" if lacks else "")


async def fetch_step(transport: Any, peer: str) -> int | None:
    """The step in which a peer says that it is; None if it does not answer."""
    try:
        return PeerReport.of(await fetch_status(transport, peer)).step
    except SentinelError:
        return None


async def fetch_status(transport: Any, peer: str) -> dict[str, Any]:
    """Ask a peer for its status.

    Raises:
        SentinelError: it does not answer, or not with a status.
    """
    response = await transport.call(peer, Method.STATUS, Empty(), timeout=3.0, reply_limit=1 << 20)
    try:
        status = json.loads(bytes(response.data))
    except (ValueError, RecursionError):
        raise MessageError("a peer's status is not JSON") from None
    return status if isinstance(status, dict) else {}
