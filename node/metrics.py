"""What a node tells Prometheus: every metric, its help text and its bounded labels.

One ``Metrics`` belongs to one node and has its own registry, so that many nodes can share a process. Names begin
with ``sentinel_`` and use base units; memory, files and processor time have the names that all exporters have,
``process_``. A label value that a peer can influence is mapped onto a closed set of words, and "other" stands for
the rest: no peer can make the number of series grow. ``docs/metrics.md`` is made from this file.
"""

from __future__ import annotations

import math
import platform
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

from prometheus_client import CollectorRegistry

from node.contribution import Contributed
from node.metric_families import Families, Series
from node.metric_words import (
    ACCUSATIONS,
    AUDIT_OUTCOMES,
    AUDIT_ROLES,
    AVERAGING_OUTCOMES,
    CHECKPOINT_OUTCOMES,
    COPY_OUTCOMES,
    DHT_OPERATIONS,
    DIRECTIONS,
    EJECTIONS,
    EXAMINED_OUTCOMES,
    EXAMINED_WHY,
    METHODS,
    OUTCOMES,
    PHASES,
    REASONS,
    RECORD_KINDS,
    REFUSED_WHERE,
    REMOTE_KINDS,
    REQUEST_OUTCOMES,
    ROLES,
    STATES,
    STREAMS,
    VOTES,
    WIRE_DIRECTIONS,
    bounded,
)
from node.resources import p2pd_resident_bytes
from node.version import VERSION

if TYPE_CHECKING:
    from node.probe import Probed

MAX_NEIGHBOURS: Final = 64
"""Peers with a trust series, and those with an ejection. A larger swarm shows the least trusted ones."""

EVERY_STAGE: Final = "every stage, from 0 on"
PEERS: Final = f"peer ids, at most {MAX_NEIGHBOURS}"

STEP_BUCKETS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
DHT_BUCKETS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

LIBRARIES: Final = ("torch", "hivemind")
"""Whose versions are told: nodes with different ones can compute different bits."""


class Metrics(Families):
    """The metrics of one node. Attributes are the prometheus-client objects; methods keep labels bounded."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        super().__init__(registry)
        self._attack = ""
        self._checkpoint_saved = math.nan
        self._define_node()
        self._define_training()
        self._define_checkpoints()
        self._define_wire()
        self._define_checker()
        self.identify(peer="", swarm="")

    # definitions ---------------------------------------------------------------------

    def _define_node(self) -> None:
        self.section = "The node, and the swarm as it sees it"
        self.build = self._info(
            "build_",
            "Version of this software, and of what it computes and talks with.",
            version="of this software",
            python="a version",
            **dict.fromkeys(LIBRARIES, "a version"),
        )
        self.info = self._info(
            "",
            "Who this node is; join it to name the swarm, peer and stage in alerts.",
            version="of this software",
            swarm="the swarm's id",
            peer="this node's peer id",
            label="the operator's name for this node",
            role=ROLES,
            stage="of this node; empty before it holds one",
        )
        self.node_state = self._gauge(
            "node_state", "1 for the state that the node is in, 0 for the others.", unit="0 or 1", state=STATES
        )
        self.view_replicas = self._gauge(
            "view_replicas", "Live replicas of a stage in this node's view, in whatever state.", stage=EVERY_STAGE
        )
        self.serving_replicas = self._gauge(
            "view_serving_replicas",
            "Those of them that take work in the present step, and are not ejected.",
            stage=EVERY_STAGE,
        )
        self.peers_connected = self._gauge("peers_connected", "Peers with an open control stream.")
        self.clock_offset = self._gauge("clock_offset_seconds", "Median of peers' clocks minus this node's.")
        self.p2pd_up = self._gauge("p2pd_up", "1 while the p2pd child runs, else 0.", unit="0 or 1")
        self.p2pd_resident_memory = self._gauge("p2pd_resident_memory_bytes", "Resident memory of the p2pd child.")
        self.event_loop_lag = self._gauge("event_loop_lag_seconds", "How late the event loop woke up at the last look.")
        self.disk_free = self._gauge("disk_free_bytes", "Bytes that are free on the disk with the state folder.")
        self.disk_size = self._gauge("disk_size_bytes", "Size of the disk with the state folder.")
        self.drill_active = self._gauge(
            "drill_active",
            "1 while this node attacks the swarm on purpose, to test it.",
            unit="0 or 1",
            attack="the drill's name, one at a time",
        )
        self.build.info(
            {"version": VERSION, "python": platform.python_version(), **{name: _version(name) for name in LIBRARIES}}
        )
        for state in STATES:
            self.node_state.labels(state=state).set(0)

    def _define_training(self) -> None:
        self.section = "Training"
        self.step = self._gauge("step", "The optimizer step that the node is working on.", unit="steps")
        self.loss = self._gauge(
            "loss", "Mean training loss of the last step; NaN until it is known.", unit="nats per token"
        )
        self.finished = self._gauge(
            "training_finished", "1 once the last step of the manifest has been trained, else 0.", unit="0 or 1"
        )
        self.tokens = self._counter(
            "tokens_total", "Tokens that this node has trained on, forward and backward.", unit="tokens"
        )
        self.microbatches = self._counter(
            "microbatches_total",
            "Microbatches: completed here, retried on another replica, refused with a strike, lost on every path, "
            "or gone unaveraged with a replica that died.",
            outcome=OUTCOMES,
        )
        self._contributed = {
            name: self._gauge(
                f"contributed_{name}",
                f"{name.capitalize()} that this node has contributed to the swarm in all its runs, restarts included; "
                "0 until it takes part.",
                unit=unit,
            )
            for name, unit in (("microbatches", ""), ("tokens", "tokens"), ("steps", "steps"))
        }
        self.capacity = self._gauge(
            "capacity_microbatches_per_second",
            "Microbatches of its stage that this machine computes both ways, as the probe before the start measured; 0 "
            "before.",
            unit="microbatches per second",
        )
        self.in_flight_limit = self._gauge(
            "microbatches_in_flight_limit",
            "Microbatches that may be inside this node at a time, by the manifest and its memory; 0 before the probe.",
        )
        self.probe_peak = self._gauge(
            "probe_peak_bytes", "Memory that the probe of the stage took at its peak; 0 before it."
        )
        self.in_flight = self._gauge("microbatches_in_flight", "Microbatches that are inside this node now.")
        self.phase_seconds = self._counter(
            "phase_seconds_total",
            "Seconds spent in each phase; microbatches overlap, so phases can too.",
            phase=PHASES,
        )
        self.step_seconds = self._histogram(
            "step_seconds", "Seconds from the start of a step to its commit.", STEP_BUCKETS
        )
        self.averaging_rounds = self._counter(
            "averaging_rounds_total", "Averaging rounds by how they ended.", outcome=AVERAGING_OUTCOMES
        )
        self.averaging_seconds = self._histogram("averaging_seconds", "Seconds of an averaging round.", STEP_BUCKETS)
        self.parameter_agreement = self._gauge(
            "parameter_agreement", "1 if this node's parameters are those of most siblings, else 0.", unit="0 or 1"
        )
        self.state_done = self._gauge("state_fetched_bytes", "Bytes of its stage's state that this node has fetched.")
        self.state_size = self._gauge("state_bytes", "Bytes of the state that this node fetches; 0 if it has none to.")
        self.loss.set(float("nan"))
        self.parameter_agreement.set(1)

    def _define_checkpoints(self) -> None:
        self.section = "Checkpoints"
        self.checkpoint_step = self._gauge(
            "checkpoint_step", "Steps in this node's newest checkpoint; NaN without one.", unit="steps"
        )
        self.checkpoint_interval = self._gauge(
            "checkpoint_interval_steps",
            "Steps from one checkpoint of this node to the next; 0 if it writes none.",
            unit="steps",
        )
        self.checkpoint_age = self._gauge("checkpoint_age_seconds", "Age of the newest checkpoint; NaN without one.")
        self.checkpoints = self._counter(
            "checkpoints_total",
            "Checkpoints by what became of them: written, failed, skipped since the disk is slow, or found damaged.",
            outcome=CHECKPOINT_OUTCOMES,
        )
        self.checkpoint_seconds = self._histogram(
            "checkpoint_seconds", "Seconds from the copy of the state until it is on disk.", STEP_BUCKETS
        )
        self.copies = self._counter(
            "checkpoint_copies_total", "Attempts to fetch a copy of another stage's checkpoint.", outcome=COPY_OUTCOMES
        )
        self.copies_bytes = self._gauge("checkpoint_copies_bytes", "Copies of other stages' checkpoints that are kept.")
        self.updates_lost = self._counter(
            "updates_lost_total",
            "Updates of this node's stage that went with its last replica, before this node took it up from an older "
            "checkpoint.",
        )
        self.checkpoint_step.set(math.nan)
        self.checkpoint_age.set_function(lambda: time.time() - self._checkpoint_saved)

    def _define_wire(self) -> None:
        self.section = "Streams, requests and the DHT"
        self.stream_bytes = self._counter(
            "stream_bytes_total",
            "Bytes of framed messages over streams to and from peers.",
            direction=WIRE_DIRECTIONS,
            stream=STREAMS,
        )
        self.requests = self._counter(
            "requests_total",
            "Requests that this node made, by how they ended.",
            method=METHODS,
            outcome=REQUEST_OUTCOMES,
        )
        self.remote_errors = self._counter("remote_errors_total", "Rules that peers broke, by kind.", kind=REMOTE_KINDS)
        self.dht_seconds = self._histogram(
            "dht_seconds", "Seconds of a DHT operation.", DHT_BUCKETS, operation=DHT_OPERATIONS
        )
        self.dht_failures = self._counter("dht_failures_total", "DHT operations that failed.", operation=DHT_OPERATIONS)
        self.strangers = self._counter(
            "strangers_refused_total",
            "Requests and records of peers that an invited swarm has not admitted, refused by this node.",
            where=REFUSED_WHERE,
        )
        self.admissions_known = self._gauge(
            "admissions_known", "Admissions and revocations that this node knows; 0 in an open swarm."
        )
        self.record_rejects = self._counter(
            "record_rejects_total", "DHT records refused, by what was wrong.", kind=RECORD_KINDS
        )
        for direction in WIRE_DIRECTIONS:
            for stream in STREAMS:
                self.stream_bytes.labels(direction=direction, stream=stream)
        for operation in DHT_OPERATIONS:
            self.dht_seconds.labels(operation=operation)

    def _define_checker(self) -> None:
        self.section = "The checker"
        self.trust = self._gauge(
            "peer_trust", "Trust in a neighbour.", unit="from 0 to 1", peer=PEERS, stage="that the peer holds"
        )
        self.ejected = self._gauge(
            "peer_ejected",
            "1 for each peer that the swarm has ejected, until its ejection ends.",
            unit="always 1",
            peer=PEERS,
            stage="that the peer held; empty if this node does not know",
        )
        self._trust_series = Series(self.trust)
        self._ejected_series = Series(self.ejected)
        self.flags = self._counter(
            "flags_total",
            "Tensors of peers that the statistics flagged, by direction and reason.",
            direction=DIRECTIONS,
            reason=REASONS,
        )
        self.strikes = self._counter("strikes_total", "Strikes given to peers, by reason.", reason=REASONS)
        self.quarantines = self._counter("quarantines_total", "Times that this node has quarantined a peer.")
        self.ejections = self._counter(
            "ejections_total", "Ejections that this node has seen, and those of itself.", kind=EJECTIONS
        )
        self.audits = self._counter(
            "audits_total", "Audits that this node asked for, by how they ended.", outcome=AUDIT_OUTCOMES
        )
        self.audits_open = self._gauge(
            "audits_open",
            "Audits under way that this node asked for, or was asked to judge as a juror.",
            role=AUDIT_ROLES,
        )
        self.audit_seconds = self._histogram(
            "audit_seconds", "Seconds from the opening of an audit to its end.", STEP_BUCKETS
        )
        self.slices_examined = self._counter(
            "slices_examined_total",
            "Slices of an aggregate whose parts this node had shown and reduced again, by why and with what result.",
            why=EXAMINED_WHY,
            outcome=EXAMINED_OUTCOMES,
        )
        self.votes = self._counter("votes_total", "Votes of this node as a juror in audits.", vote=VOTES)
        self.accusations = self._counter("accusations_total", "Accusations sent and received.", direction=ACCUSATIONS)
        for role in AUDIT_ROLES:
            self.audits_open.labels(role=role)

    # what the node reports -----------------------------------------------------------

    def identify(self, *, peer: str, swarm: str, stage: str = "", label: str = "", coordinates: bool = False) -> None:
        """Say who this node is; called again once it holds a stage."""
        role = ROLES[0] if coordinates else ROLES[1]
        self.info.info({"version": VERSION, "swarm": swarm, "peer": peer, "label": label, "role": role, "stage": stage})

    def set_state(self, state: str) -> None:
        """Enter one of the ten node states."""
        for known in STATES:
            self.node_state.labels(state=known).set(1 if known == state else 0)

    def request_done(self, method: str, outcome: str) -> None:
        """A request to a peer ended as ``ok`` or with a word for what went wrong."""
        self.requests.labels(method=bounded(method, METHODS), outcome=bounded(outcome, REQUEST_OUTCOMES)).inc()

    def state_fetched(self, done: int, size: int) -> None:
        """So much of the stage's state is here; it is so large."""
        self.state_done.set(done)
        self.state_size.set(size)

    def remote_error(self, kind: str) -> None:
        """A peer broke a rule."""
        self.remote_errors.labels(kind=bounded(kind, REMOTE_KINDS)).inc()

    def record_rejected(self, kind: str) -> None:
        """A DHT record was refused."""
        self.record_rejects.labels(kind=bounded(kind, RECORD_KINDS)).inc()

    def dht_operation(self, operation: str, seconds: float, ok: bool) -> None:
        """A DHT operation ended."""
        label = bounded(operation, DHT_OPERATIONS)
        self.dht_seconds.labels(operation=label).observe(seconds)
        if not ok:
            self.dht_failures.labels(operation=label).inc()

    def audited(self, outcome: str, seconds: float | None) -> None:
        """An audit ended like this; ``seconds`` is None where it did not begin."""
        self.audits.labels(outcome=bounded(outcome, AUDIT_OUTCOMES)).inc()
        if seconds is not None:
            self.audit_seconds.observe(seconds)

    def averaging_done(self, outcome: str, seconds: float) -> None:
        """An averaging round ended as committed, refetched or failed."""
        self.averaging_rounds.labels(outcome=bounded(outcome, AVERAGING_OUTCOMES)).inc()
        self.averaging_seconds.observe(seconds)

    def checkpoint_kept(self, step: int, *, saved: float) -> None:
        """The newest checkpoint is of this step, and was saved at this Unix time."""
        self.checkpoint_step.set(step)
        self._checkpoint_saved = saved

    def flag(self, reason: str, direction: str = "") -> None:
        """The statistics refused a tensor of a peer."""
        self.flags.labels(direction=bounded(direction, DIRECTIONS), reason=bounded(reason, REASONS)).inc()

    def strike(self, reason: str) -> None:
        """A peer got a strike."""
        self.strikes.labels(reason=bounded(reason, REASONS)).inc()

    def set_trust(self, trust: Mapping[tuple[str, int], float]) -> None:
        """Replace the trust of all neighbours, by (peer, stage); the series of those who left disappear."""
        # The least trusted ones first: those are the ones to look at.
        kept = sorted(trust, key=lambda neighbour: (trust[neighbour], neighbour))[:MAX_NEIGHBOURS]
        self._trust_series.replace({(peer, str(stage)): trust[peer, stage] for peer, stage in kept})

    def set_ejected(self, stages: Mapping[str, int | None]) -> None:
        """Replace the ejected peers; each with the stage that it held, None if that is not known."""
        kept = sorted(stages)[:MAX_NEIGHBOURS]
        self._ejected_series.replace(
            {(peer, "" if (stage := stages[peer]) is None else str(stage)): 1.0 for peer in kept}
        )

    def set_replicas(self, stage: int, *, live: int, serving: int) -> None:
        """So many replicas of a stage are in the view, and so many of them take work."""
        self.view_replicas.labels(stage=str(stage)).set(live)
        self.serving_replicas.labels(stage=str(stage)).set(serving)

    def set_probed(self, found: Probed) -> None:
        """What the probe of this node's stage found."""
        self.capacity.set(found.microbatches_per_second)
        self.in_flight_limit.set(found.in_flight)
        self.probe_peak.set(found.peak_bytes)

    def set_contribution(self, sums: Contributed) -> None:
        """What this node has contributed in all of its runs."""
        for name, gauge in self._contributed.items():
            gauge.set(getattr(sums, name))

    def set_open_audits(self, *, caller: int, juror: int) -> None:
        """Audits under way: those that this node asked for, and those in which it is a juror."""
        self.audits_open.labels(role="caller").set(caller)
        self.audits_open.labels(role="juror").set(juror)

    def drill(self, attack: str) -> None:
        """This node attacks on purpose from now on; "" ends it."""
        if self._attack:
            self.drill_active.remove(self._attack)
        self._attack = attack
        if attack:
            self.drill_active.labels(attack=attack).set(1)

    def sample_process(self, *, lag: float, p2pd_pid: int | None, peers: int) -> None:
        """Note what is not measured when it is asked for; ``lag`` in seconds, ``peers`` connected ones."""
        self.p2pd_resident_memory.set(p2pd_resident_bytes(p2pd_pid))
        self.event_loop_lag.set(lag)
        self.peers_connected.set(peers)

    def sample_disk(self, *, free: float, size: float) -> None:
        """The disk with the state folder has so many bytes, of which so many are free; NaN if it cannot be asked."""
        self.disk_free.set(free)
        self.disk_size.set(size)


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
