"""What a node says of itself and of the swarm as it sees it: one JSON object."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from node.estimate import size
from node.invites import invite_by
from node.progress import duration
from node.version import VERSION
from node.wording import many
from protocol.records import Claim, NodeState

if TYPE_CHECKING:
    from node.daemon import Node

BRIEF_EVENTS = 20
BRIEF_LOSSES = 50
BRIEF_REPLICAS = 256
"""Everything that a node knows of the others is in its view, which can be asked for too."""


def build_status(node: Node, *, brief: bool = False) -> dict[str, Any]:
    """The status of a node; ``brief`` keeps it small enough for a control stream."""
    manifest, telemetry, trainer = node.manifest, node.telemetry, node.trainer
    counters = telemetry.counters
    losses = list(telemetry.losses)
    steps_per_second = telemetry.steps_per_second()
    tokens_per_step = 0
    if manifest is not None:
        tokens_per_step = manifest.training.sequences_per_step * manifest.model.context
    claim = node.membership.claim if node.membership is not None else None
    probed = node.prober.result(node.stage) if node.prober is not None else None
    status: dict[str, Any] = {
        "version": VERSION,
        "swarm": node.swarm.hex(),
        "name": manifest.name if manifest is not None else "",
        "peer": node.identity.peer_id,
        "label": node.settings.label,
        "coordinator": node.settings.coordinates,
        "state": node.state.value,
        "reason": _reason(node),
        "stage": claim.stage if claim is not None else node.stage,
        "stages": manifest.num_stages if manifest is not None else None,
        "step": node.step,
        "steps": manifest.training.steps if manifest is not None else 0,
        "finished": node.finished,
        "loss": node.loss,
        "losses": losses[-BRIEF_LOSSES:] if brief else losses,
        "steps_per_second": steps_per_second,
        "tokens_per_second": steps_per_second * tokens_per_step,
        "parameters_digest": trainer.parameters.hex() if trainer is not None else "",
        "checkpoint": node.checkpointer.status() if node.checkpointer is not None else None,
        "probe": probed.as_dict() if probed is not None else None,
        "uptime_seconds": time.time() - node.started,
        "contribution": asdict(node.contribution.total),
        "contribution_of_this_run": asdict(node.contribution.now),
        "microbatches_retried": counters.retried,
        "microbatches_refused": counters.refused,
        "microbatches_lost": counters.lost,
        "microbatches_unaveraged": counters.unaveraged,
        "flags": counters.flags,
        "audits": counters.audits,
        "votes": counters.votes,
        "bytes_in": counters.bytes_in,
        "bytes_out": counters.bytes_out,
        "drill": _drill(node),
        "replicas": _replicas(node)[: BRIEF_REPLICAS if brief else None],
        "admission": node.admissions.status() if node.admissions is not None else None,
        "events": telemetry.event_dicts(BRIEF_EVENTS if brief else 300),
        "http": list(node.http_address) if node.http_address is not None else None,
    }
    if not brief:
        status["invite"] = _invite(node)
        status["digests"] = list(telemetry.digests)
        status["peak_memory_bytes"] = peak_memory_bytes()
    return status


def farewell(node: Node) -> str:
    """What a node did, in one line, for when it leaves."""
    lasted = duration(time.time() - node.started)
    if node.settings.coordinates:
        claims = node.membership.view.claims.values() if node.membership is not None else ()
        there = sum(claim.state is not NodeState.DRAINING for claim in claims)
        left = f"{many(there, 'node')} {'goes' if there == 1 else 'go'} on without it" if there else "no node is left"
        return f"coordinated for {lasted}, up to step {node.step:,}; {left}"
    counters, contribution = node.telemetry.counters, node.contribution
    in_all = f"; {contribution.total} with earlier runs" if contribution.came_back else ""
    return (
        f"contributed {contribution.now} over {lasted}, "
        f"sent {size(counters.bytes_out)} and received {size(counters.bytes_in)}{in_all}"
    )


def peak_memory_bytes() -> int:
    """The most resident memory that this process has had, in bytes (p2pd not included)."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _reason(node: Node) -> str:
    if node.pipeline is not None and node.pipeline.waiting_reason:
        return node.pipeline.waiting_reason
    return node.reason


def _invite(node: Node) -> str:
    """The invite to this node and some others; empty until this one can be reached."""
    if not node.invite_line or node.membership is None:
        return node.invite_line
    others = (claim for claim in node.membership.view.claims.values() if claim.peer != node.identity.peer_id)
    return invite_by(node.swarm.hex(), node.network.addresses, others)


def _drill(node: Node) -> dict[str, Any] | None:
    if node.drill is None:
        return None
    return {
        "attack": node.drill.plan.name,
        "from_step": node.drill.plan.from_step,
        "first_attack_step": node.drill.first_attack_step,
    }


def _replicas(node: Node) -> list[dict[str, Any]]:
    if node.membership is None:
        return []
    claims = sorted(node.membership.view.claims.values(), key=lambda claim: (claim.stage, claim.peer))
    return [_replica(node, claim) for claim in claims]


def _replica(node: Node, claim: Claim) -> dict[str, Any]:
    replica: dict[str, Any] = {
        "peer": claim.peer,
        "stage": claim.stage,
        "label": claim.label,
        "state": claim.state.value,
        "step": claim.step,
        "digest": claim.digest.hex(),
        "drill": claim.drill,
        "addresses": list(claim.addresses),
        "lease_seconds": round(claim.expires - time.time(), 1),
    }
    if node.guard is not None:
        standing = node.guard.ledger.standing(claim.peer)
        replica["standing"] = asdict(standing)
    if node.watch is not None and (report := node.watch.reports.get(claim.peer)) is not None:
        replica["answers"] = report.answers
        replica["contribution"] = asdict(report.contributed)
    return replica
