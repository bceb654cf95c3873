"""A picture as the status that the page shows. Pure; time is an argument."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final

from node.observing.curve import middle
from node.observing.picture import Picture, Presence, Seen
from node.version import VERSION
from protocol.records import NodeState

MAX_EVENTS: Final = 300
MAX_POINTS: Final = 2000
"""Of the loss curve; a longer one is thinned, since the page draws no more."""


def tell(picture: Picture, now: float, *, started: float) -> dict[str, Any]:
    """What /status serves; the words are those of a node's own status."""
    outline = picture.outline
    answering = [seen.report for seen in picture.answering() if seen.report is not None]
    trained = [report for report in answering if not report.coordinator]
    state, reason = where(picture)
    points = picture.curve.points()
    thinned = points[:: len(points) // MAX_POINTS + 1]
    standings = judged(picture)
    return {
        "observer": True,
        "version": VERSION,
        "swarm": picture.swarm.hex(),
        "name": outline.name if outline is not None else "",
        "state": state,
        "reason": reason,
        "stages": outline.stages if outline is not None else None,
        "step": picture.step,
        "steps": outline.steps if outline is not None else 0,
        "loss": picture.loss,
        "losses": thinned if not points or thinned[-1] == points[-1] else [*thinned, points[-1]],
        "tokens_per_second": middle([report.tokens_per_second for report in trained]) or 0.0,
        "microbatches_retried": sum(report.counts.get("microbatches_retried", 0) for report in trained),
        "microbatches_lost": sum(report.counts.get("microbatches_lost", 0) for report in trained),
        "nodes": numbers(picture),
        "rounds": picture.rounds,
        "uptime_seconds": now - started,
        "replicas": [_replica(seen, standings.get(seen.peer), now) for seen in picture.shown() if seen.claim],
        "events": [asdict(event) for event in picture.events()[-MAX_EVENTS:]],
    }


def where(picture: Picture) -> tuple[str, str]:
    """The state of the swarm, in the words for nodes, and a sentence for it."""
    count = numbers(picture)
    if not picture.rounds:
        return NodeState.BOOTSTRAPPING.value, "asking the nodes of the invite"
    if not count["answering"]:
        silent = f"; {count['silent']} have a live claim" if count["silent"] else ""
        return NodeState.ISOLATED.value, f"no node answers, still trying{silent}"
    words = ", ".join(f"{number} {presence}" for presence, number in count.items() if number)
    outline = picture.outline
    if outline is not None and 0 < outline.steps <= picture.step:
        return "finished", f"all {outline.steps} steps are trained; nodes: {words}"
    states = {seen.claim.state for seen in picture.answering() if seen.claim is not None}
    if states & {NodeState.TRAINING, NodeState.PROBATION}:
        empty = missing(picture)
        lacking = f"; nobody holds stage {', '.join(map(str, empty[:8]))}" if empty else ""
        return NodeState.TRAINING.value, f"step {picture.step}; nodes: {words}{lacking}"
    return NodeState.WAITING.value, f"nobody trains; nodes: {words}"


def numbers(picture: Picture) -> dict[str, int]:
    """How many nodes are there in each way."""
    count = Counter(seen.presence.value for seen in picture.shown())
    return {presence.value: count[presence.value] for presence in Presence}


def missing(picture: Picture) -> list[int]:
    """Stages without a live claim."""
    return [
        stage for stage in range(picture.outline.stages if picture.outline else 0) if not picture.view.replicas(stage)
    ]


def judged(picture: Picture) -> dict[str, tuple[str, float]]:
    """What its neighbours think of each node: the state that most of them tell, and the middle of their trust.

    Only answering nodes of the same stage and those beside it are heard: others have seen nothing of its work.
    """
    told: dict[str, list[tuple[str, float]]] = {}
    for judge in picture.answering():
        if judge.claim is None or judge.report is None:
            continue
        for peer, standing in judge.report.standings.items():
            whom = picture.nodes.get(peer)
            near = whom is not None and whom.claim is not None and abs(whom.claim.stage - judge.claim.stage) <= 1
            if near and peer != judge.peer:
                told.setdefault(peer, []).append(standing)
    return {peer: _verdict(standings) for peer, standings in told.items()}


def _verdict(standings: list[tuple[str, float]]) -> tuple[str, float]:
    state, _ = Counter(state for state, _ in sorted(standings)).most_common(1)[0]
    return state, middle([trust for _, trust in standings]) or 0.0


def _replica(seen: Seen, standing: tuple[str, float] | None, now: float) -> dict[str, Any]:
    claim, report = seen.claim, seen.report
    assert claim is not None
    there = seen.presence is Presence.ANSWERING
    replica: dict[str, Any] = {
        "peer": claim.peer,
        "stage": claim.stage,
        "label": claim.label,
        # A node that is not heard is not what it last said.
        "state": claim.state.value if there else seen.presence.value,
        "claimed": claim.state.value,
        "presence": seen.presence.value,
        "for_seconds": round(max(0.0, now - seen.since)),
        "step": claim.step,
        "drill": claim.drill,
        "addresses": list(claim.addresses),
        "lease_seconds": round(claim.expires - now, 1),
        "told": _told(report.counts) if report is not None else {},
    }
    if standing is not None:
        replica["standing"] = {"state": standing[0], "trust": standing[1]}
    return replica


def _told(counts: Mapping[str, int]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if count}
