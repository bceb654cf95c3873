"""Accusations and verdicts of one node: what it says of others, what it hears, and what it keeps over a restart."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TYPE_CHECKING

from node.verdicts import restore_verdicts, save_verdicts
from protocol.errors import RecordError
from protocol.records import Accusation, Verdict, parse_record, sign_accusation

if TYPE_CHECKING:
    from node.daemon import Node


class Findings:
    """Connects a node's checker with what the swarm says of its peers."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def heard(self, finding: Accusation | Verdict) -> None:
        """The membership has learnt of something new."""
        node = self._node
        if isinstance(finding, Accusation):
            self._accusation(finding)
            return
        if node.guard is not None and node.guard.judged_finally(finding.accused):
            return
        node.telemetry.event(
            "verdict",
            finding.step,
            peer=finding.accused,
            stage=finding.accused_stage,
            text=f"{len(finding.votes)} jurors computed its work again: {finding.reason}",
        )
        if node.guard is not None:
            node.guard.consider_verdicts(finding.accused)

    def _accusation(self, accusation: Accusation) -> None:
        node = self._node
        node.metrics.accusations.labels(direction="received").inc()
        node.telemetry.event(
            "accusation",
            accusation.step,
            peer=accusation.accused,
            stage=accusation.accused_stage,
            text=f"accused by {accusation.accuser[-8:]} of stage {accusation.accuser_stage}: {accusation.reason}",
        )
        if node.guard is not None:
            node.guard.consider(accusation.accused)

    def accuse(self, peer: str, stage: int, reason: str, step: int, evidence: bytes) -> None:
        """Tell the swarm of a peer; ``evidence`` is the SHA-256 of what can be shown."""
        node = self._node
        assert node.manifest is not None and node.membership is not None
        membership = node.membership
        claim = membership.claim
        if claim is None:
            return
        accusation = Accusation(
            swarm=node.swarm,
            accuser=node.identity.peer_id,
            accuser_stage=claim.stage,
            accused=peer,
            accused_stage=stage,
            kind="strikes",
            reason=reason,
            step=step,
            evidence=evidence,
            expires=time.time() + node.manifest.verifier.ejection_seconds,
        )
        node.metrics.accusations.labels(direction="sent").inc()
        data = sign_accusation(node.identity, accusation)
        node.spawn(membership.publish_finding(data, accusation))

    async def remember(self) -> None:
        """Take up the standings and findings of an earlier run: a restart is no amnesty."""
        node = self._node
        guard, membership = node.guard, node.membership
        assert guard is not None and membership is not None
        now = time.time()
        expired, records = await asyncio.to_thread(
            lambda: restore_verdicts(node.folder, node.swarm.hex(), guard.ledger, now=now)
        )
        for change in expired:
            node.telemetry.standing_changed(change, membership.view.stage_of(change.peer), 0)
        guard.restored()
        for data in records:
            with contextlib.suppress(RecordError):  # most have run out by now; what is damaged is worth nothing
                membership.take(parse_record(data, swarm=node.swarm, now=now), data)

    async def keep(self) -> None:
        """Write them to the state folder."""
        node = self._node
        if node.guard is None or node.membership is None:
            return
        view, ejected = node.membership.view, node.guard.all_ejected()
        signed = [*view.signed_accusations.items(), *view.signed_verdicts.items()]
        records = [data for (accused, _), data in signed if accused in ejected]
        standings = node.guard.ledger.export()
        with contextlib.suppress(OSError):  # a full disk shows elsewhere, and must not end the training
            await asyncio.to_thread(save_verdicts, node.folder, node.swarm.hex(), standings, records)
