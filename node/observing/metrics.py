"""What an observer tells Prometheus about a swarm: every metric, its help text and its bounded labels.

Names begin with ``sentinel_swarm_``, so that they are never mixed up with what nodes tell of themselves.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Final

from node.metric_families import Families, Series
from node.metric_words import STATES
from node.observing.counts import Counts
from node.observing.curve import middle
from node.observing.picture import Picture, Presence, Seen
from node.observing.told import judged, numbers
from node.version import VERSION
from protocol.records import MAX_STAGE

MAX_SERIES_NODES: Final = 256
"""Nodes with series of their own. A node keeps its place until it is forgotten, so that whoever makes up identities
cannot fill a Prometheus with new series."""

NODE: Final = f"peer ids, at most {MAX_SERIES_NODES}"
STAGE: Final = "that it claims; empty if it claims none"
EVERY_STAGE: Final = "every stage, from 0 on"
OUTCOMES: Final = ("answered", "failed")
PRESENCES: Final = tuple(presence.value for presence in Presence)


class SwarmMetrics(Families):
    """The metrics of an observer; ``update`` sets all of them from a picture."""

    def __init__(self) -> None:
        super().__init__()
        self._places: dict[str, None] = {}
        self._counted = Counts()
        self.section = "The swarm, as an observer sees it"
        self.info = self._info(
            "swarm_",
            "Which swarm is observed.",
            version="of this software",
            swarm="the swarm's id",
            name="the swarm's name; empty until a node has answered",
        )
        self.nodes = self._gauge(
            "swarm_nodes",
            "Nodes that answer; that have a live claim and do not answer (silent), or were not asked yet (unasked); "
            "that had one and do not answer (gone).",
            presence=PRESENCES,
        )
        self.claims = self._gauge("swarm_claims", "Live claims by the state that their nodes signed.", state=STATES)
        self.replicas = self._gauge(
            "swarm_stage_replicas", "Nodes with a live claim of a stage, whether they answer or not.", stage=EVERY_STAGE
        )
        self.serving = self._gauge(
            "swarm_stage_serving_replicas",
            "Those of them that answer, take work in the present step, and are not ejected as most neighbours say.",
            stage=EVERY_STAGE,
        )
        self.step = self._gauge("swarm_step", "The optimizer step, as the middle of what nodes tell.", unit="steps")
        self.steps = self._gauge("swarm_steps", "Steps that the manifest wants; 0 has no end.", unit="steps")
        self.loss = self._gauge(
            "swarm_loss",
            "The training loss, as the middle of what nodes tell; NaN until one does.",
            unit="nats per token",
        )
        self.tokens_per_second = self._gauge(
            "swarm_tokens_per_second", "The swarm's speed, as the middle of what nodes tell.", unit="tokens per second"
        )
        self.accusations = self._gauge("swarm_accusations", "Signed accusations that hold now.")
        self.verdicts = self._gauge("swarm_verdicts", "Verdicts of juries that hold now.")
        self.ejected = self._gauge("swarm_ejected", "Nodes that most of their neighbours tell to be ejected.")
        self.section = "Each node, as an observer sees it"
        nodes = {"peer": NODE, "stage": STAGE}
        self._of_nodes = {
            name: Series(self._gauge(f"swarm_node_{name}", text, unit=unit, **nodes))
            for name, text, unit in (
                ("answering", "1 if the node answered when it was asked last, else 0.", "0 or 1"),
                ("presence_seconds", "Seconds since it began to answer, fell silent, or went.", ""),
                ("step", "Steps that it has applied, as its signed claim says.", "steps"),
                ("loss", "The loss that the node tells; NaN if it tells none.", "nats per token"),
                ("trust", "Trust of its neighbours, the middle of what they tell; NaN if none does.", "from 0 to 1"),
                ("uptime_seconds", "How long it runs, as it tells.", ""),
                ("microbatches", "Microbatches that it has trained in all its runs, as it tells.", ""),
                ("tokens", "Tokens that it has trained on in all its runs, as it tells.", "tokens"),
                ("microbatches_refused", "Microbatches that it has refused since it started, as it tells.", ""),
                ("stream_bytes", "Bytes that it has sent and received since it started, as it tells.", ""),
            )
        }
        self.section = "The observer itself"
        self.rounds = self._counter("swarm_rounds_total", "Rounds in which the swarm was asked.")
        self.asked = self._counter("swarm_questions_total", "Nodes asked, by how that ended.", outcome=OUTCOMES)
        self.hosts = self._counter("swarm_hosts_total", "Times that the observer has made itself a libp2p host.")
        self.round_time = self._gauge("swarm_round_timestamp_seconds", "Unix time at which the last round ended.")
        self.loss.set(math.nan)

    def update(self, picture: Picture, counts: Counts, now: float) -> None:
        """Show this picture."""
        outline = picture.outline
        self.info.info(
            {"version": VERSION, "swarm": picture.swarm.hex(), "name": outline.name if outline is not None else ""}
        )
        standings = judged(picture)
        ejected = {peer for peer, (state, _) in standings.items() if state == "ejected"}
        for presence, count in numbers(picture).items():
            self.nodes.labels(presence=presence).set(count)
        states = [claim.state.value for claim in picture.view.claims.values()]
        for state in STATES:
            self.claims.labels(state=state).set(states.count(state))
        self._update_stages(picture, ejected)
        self.step.set(picture.step)
        self.steps.set(outline.steps if outline is not None else 0)
        self.loss.set(math.nan if picture.loss is None else picture.loss)
        reports = [seen.report for seen in picture.answering() if seen.report is not None]
        speed = middle([report.tokens_per_second for report in reports if not report.coordinator])
        self.tokens_per_second.set(speed or 0.0)
        self.accusations.set(len(picture.view.accusations))
        self.verdicts.set(len(picture.view.verdicts))
        self.ejected.set(len(ejected))
        self._update_nodes(picture, standings, now)
        self._count(counts)
        self.round_time.set(now)

    def _update_stages(self, picture: Picture, ejected: set[str]) -> None:
        silent = {seen.peer for seen in picture.nodes.values() if not seen.answers}
        for stage in range(min(picture.view.num_stages, MAX_STAGE + 1) if picture.outline is not None else 0):
            self.replicas.labels(stage=str(stage)).set(len(picture.view.replicas(stage)))
            serving = picture.view.roster(stage, picture.step, without=silent | ejected)
            self.serving.labels(stage=str(stage)).set(len(serving))

    def _update_nodes(self, picture: Picture, standings: dict[str, tuple[str, float]], now: float) -> None:
        shown = {seen.peer: seen for seen in picture.shown()}
        self._places = {peer: None for peer in self._places if peer in shown}
        for peer in shown:
            if len(self._places) >= MAX_SERIES_NODES:
                break
            self._places.setdefault(peer)
        values: dict[str, dict[tuple[str, ...], float]] = {name: {} for name in self._of_nodes}
        for peer in self._places:
            seen = shown[peer]
            labels = (peer, str(seen.claim.stage) if seen.claim is not None else "")
            trust = standings[peer][1] if peer in standings else math.nan
            for name, value in _values(seen, trust, now).items():
                values[name][labels] = value
        for name, series in self._of_nodes.items():
            series.replace(values[name])

    def _count(self, counts: Counts) -> None:
        before, self._counted = self._counted, replace(counts)
        self.rounds.inc(counts.rounds - before.rounds)
        self.hosts.inc(counts.hosts - before.hosts)
        self.asked.labels(outcome="answered").inc(counts.answered - before.answered)
        self.asked.labels(outcome="failed").inc(counts.failed - before.failed)


def _values(seen: Seen, trust: float, now: float) -> dict[str, float]:
    """By the ends of the metrics' names. What only the node tells is there only once it has told."""
    report = seen.report
    found = {
        "answering": float(seen.presence is Presence.ANSWERING),
        "presence_seconds": max(0.0, now - seen.since),
        "trust": trust,
    }
    if seen.claim is not None:
        found["step"] = seen.claim.step
    if report is not None:
        found |= {
            "loss": math.nan if report.loss is None else report.loss,
            "uptime_seconds": report.uptime_seconds,
            "microbatches": report.counts.get("microbatches", 0),
            "tokens": report.counts.get("tokens", 0),
            "microbatches_refused": report.counts.get("microbatches_refused", 0),
            "stream_bytes": report.counts.get("bytes_in", 0) + report.counts.get("bytes_out", 0),
        }
    return found
