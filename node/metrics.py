"""What a node tells Prometheus: every metric, its help text and its bounded labels.

One ``Metrics`` belongs to one node and has its own registry, so that many nodes can share a process. All
names begin with ``sentinel_`` and use base units. A label value that a peer can influence is mapped onto a
closed set of words, and "other" stands for the rest: no peer can make the number of series grow.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection, Iterator, Mapping
from typing import Final, cast

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from node.resources import read_resources
from node.version import VERSION
from protocol.messages import Method, StreamKind
from protocol.records import NodeState
from verifier.verdicts import Direction, Reason

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4
"""The content type of ``Metrics.render``."""

OTHER: Final = "other"

STATES: Final = tuple(state.value for state in NodeState)
OUTCOMES: Final = ("completed", "retried", "refused", "failed", "lost", "unaveraged")
PHASES: Final = ("forward", "backward", "wait", "send", "average", "optimizer", "check", "audit", "idle")
REASONS: Final = tuple(reason.value for reason in Reason)
DIRECTIONS: Final = tuple(direction.value for direction in Direction)
METHODS: Final = tuple(method.value for method in Method)
DHT_OPERATIONS: Final = ("store", "get")
AUDIT_OUTCOMES: Final = ("honest", "guilty", "disputed", "parameters", "expired", "inconclusive", "skipped")
AVERAGING_OUTCOMES: Final = ("committed", "refetched", "failed")
CHECKPOINT_OUTCOMES: Final = ("written", "failed", "skipped", "damaged")

REMOTE_KINDS: Final = tuple(
    dict.fromkeys(
        (
            *("remote", "version", "swarm", "frame", "message", "tensor", "record", "refused", "flagged"),
            *("internal", "unavailable", "busy", "too_old", "not_yet", "not_started", "not_admitted"),
            *("unknown_peer", "unknown_method", "incomplete", "range", "round", "digest", "snapshot"),
            *("expired", "exhausted", "unfinished", "no_evidence", "no_data", "not_drawn", "inconclusive"),
            *REASONS,
        )
    )
)
"""Kinds of ``protocol.errors.RemoteError``. The kind of a refusal is text that a peer chose."""

REQUEST_OUTCOMES: Final = ("ok", "timeout", "unreachable", "cancelled", *REMOTE_KINDS)

RECORD_KINDS: Final = (
    *("record", "foreign_swarm", "expired", "too_far_ahead", "signature", "shape", "size", "type"),
    *("unknown_kind", "range", "owner", "key", "expiry"),
)

MAX_NEIGHBOURS: Final = 64
"""Peers with a trust series. A larger swarm shows the least trusted ones."""

STEP_BUCKETS: Final = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
DHT_BUCKETS: Final = (0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)


def bounded(value: str, known: Collection[str]) -> str:
    """The value if it is a known word, else "other"."""
    return value if value in known else OTHER


class Metrics:
    """The metrics of one node. Attributes are the prometheus-client objects; methods keep labels bounded."""

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self._trust_labels: set[tuple[str, str]] = set()
        self._attack = ""
        self._checkpoint_saved = math.nan
        self._define_training()
        self._define_checkpoints()
        self._define_wire()
        self._define_checker()
        self._define_swarm()
        self._define_process()
        self.identify(peer="", swarm="")

    # definitions ---------------------------------------------------------------------

    def _define_training(self) -> None:
        self.node_state = self._gauge("node_state", "1 for the state that the node is in, 0 for the others.", "state")
        self.info = Info("sentinel", "Version, swarm, peer id and stage of this node.", registry=self.registry)
        self.step = self._gauge("step", "The optimizer step that the node is working on.")
        self.loss = self._gauge("loss", "Mean training loss of the last step in nats per token; NaN until it is known.")
        self.tokens = self._counter("tokens_total", "Tokens that this node has trained on, both ways.")
        self.microbatches = self._counter("microbatches_total", "Microbatches by how they ended here.", "outcome")
        self.contributed = self._counter(
            "contributed_microbatches_total", "Microbatches whose gradient this node has added to its stage."
        )
        self.in_flight = self._gauge("microbatches_in_flight", "Microbatches that are inside this node now.")
        self.phase_seconds = self._counter(
            "phase_seconds_total",
            "Seconds spent in each phase; microbatches overlap, so phases can too.",
            "phase",
        )
        self.step_seconds = self._histogram(
            "step_seconds", "Seconds from the start of a step to its commit.", STEP_BUCKETS
        )
        self.averaging_rounds = self._counter(
            "averaging_rounds_total", "Averaging rounds by how they ended.", "outcome"
        )
        self.averaging_seconds = self._histogram("averaging_seconds", "Seconds of an averaging round.", STEP_BUCKETS)
        self.parameter_agreement = self._gauge(
            "parameter_agreement", "1 if this node's parameters are those of most siblings, else 0."
        )
        for state in STATES:
            self.node_state.labels(state=state).set(0)
        for outcome in OUTCOMES:
            self.microbatches.labels(outcome=outcome)
        for phase in PHASES:
            self.phase_seconds.labels(phase=phase)
        for outcome in AVERAGING_OUTCOMES:
            self.averaging_rounds.labels(outcome=outcome)
        self.loss.set(float("nan"))
        self.parameter_agreement.set(1)

    def _define_checkpoints(self) -> None:
        self.checkpoint_step = self._gauge(
            "checkpoint_step", "Steps in this node's newest checkpoint; NaN without one."
        )
        self.checkpoint_age = self._gauge("checkpoint_age_seconds", "Age of the newest checkpoint; NaN without one.")
        self.checkpoints = self._counter(
            "checkpoints_total",
            "Checkpoints by what became of them: written, failed, skipped since the disk is slow, or found damaged.",
            "outcome",
        )
        self.checkpoint_seconds = self._histogram(
            "checkpoint_seconds", "Seconds from the copy of the state until it is on disk.", STEP_BUCKETS
        )
        self.checkpoint_step.set(math.nan)
        self.checkpoint_age.set_function(lambda: time.time() - self._checkpoint_saved)
        for outcome in CHECKPOINT_OUTCOMES:
            self.checkpoints.labels(outcome=outcome)

    def _define_wire(self) -> None:
        self.stream_bytes = self._counter(
            "stream_bytes_total",
            "Bytes of framed messages over streams to and from peers.",
            "direction",
            "stream",
        )
        self.requests = self._counter(
            "requests_total", "Requests that this node made, by how they ended.", "method", "outcome"
        )
        self.state_done = self._gauge("state_fetched_bytes", "Bytes of its stage's state that this node has fetched.")
        self.state_size = self._gauge("state_bytes", "Bytes of the state that this node fetches; 0 if it has none to.")
        self.remote_errors = self._counter("remote_errors_total", "Rules that peers broke, by kind.", "kind")
        self.dht_seconds = self._histogram("dht_seconds", "Seconds of a DHT operation.", DHT_BUCKETS, "operation")
        self.dht_failures = self._counter("dht_failures_total", "DHT operations that failed.", "operation")
        self.record_rejects = self._counter("record_rejects_total", "DHT records refused, by what was wrong.", "kind")
        self.clock_offset = self._gauge("clock_offset_seconds", "Median of peers' clocks minus this node's.")
        self.peers_connected = self._gauge("peers_connected", "Peers with an open control stream.")
        for direction in ("in", "out"):
            for stream in StreamKind:
                self.stream_bytes.labels(direction=direction, stream=stream.value)
        for operation in DHT_OPERATIONS:
            self.dht_seconds.labels(operation=operation)
            self.dht_failures.labels(operation=operation)

    def _define_checker(self) -> None:
        self.trust = self._gauge("peer_trust", "Trust in a neighbour, from 0 to 1.", "peer", "stage")
        self.flags = self._counter(
            "flags_total",
            "Tensors of peers refused by the statistics, by direction and reason.",
            "direction",
            "reason",
        )
        self.strikes = self._counter("strikes_total", "Strikes given to peers, by reason.", "reason")
        self.quarantines = self._counter("quarantines_total", "Times that this node has quarantined a peer.")
        self.ejections = self._counter(
            "ejections_total", "Ejections that this node has seen, and those of itself.", "kind"
        )
        self.audits = self._counter("audits_total", "Audits that this node asked for, by how they ended.", "outcome")
        self.audit_seconds = self._histogram(
            "audit_seconds", "Seconds from the opening of an audit to its end.", STEP_BUCKETS
        )
        self.votes = self._counter("votes_total", "Votes of this node as a juror in audits.", "vote")
        self.accusations = self._counter("accusations_total", "Accusations sent and received.", "direction")
        self.drill_active = self._gauge(
            "drill_active", "1 while this node attacks the swarm on purpose, to test it.", "attack"
        )
        for outcome in AUDIT_OUTCOMES:
            self.audits.labels(outcome=outcome)
        for vote in ("guilty", "honest"):
            self.votes.labels(vote=vote)
        for kind in ("seen", "self"):
            self.ejections.labels(kind=kind)
        for direction in ("sent", "received"):
            self.accusations.labels(direction=direction)

    def _define_swarm(self) -> None:
        self.view_replicas = self._gauge("view_replicas", "Live replicas of a stage in this node's view.", "stage")

    def _define_process(self) -> None:
        self.open_files = self._gauge("open_files", "Open file descriptors of the node's process.")
        self.open_files_limit = self._gauge("open_files_limit", "The most that it may open; -1 without a limit.")
        self.resident_memory = self._gauge("resident_memory_bytes", "Resident memory of the node's process.")
        self.p2pd_up = self._gauge("p2pd_up", "1 while the p2pd child runs, else 0.")
        self.p2pd_resident_memory = self._gauge("p2pd_resident_memory_bytes", "Resident memory of the p2pd child.")
        self.event_loop_lag = self._gauge("event_loop_lag_seconds", "How late the event loop woke up at the last look.")

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(f"sentinel_{name}", text, labels, registry=self.registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"sentinel_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...], *labels: str) -> Histogram:
        return Histogram(f"sentinel_{name}", text, labels, registry=self.registry, buckets=buckets)

    # what the node reports -----------------------------------------------------------

    def identify(self, *, peer: str, swarm: str, stage: str = "") -> None:
        """Say who this node is; called again once it holds a stage."""
        self.info.info({"version": VERSION, "swarm": swarm, "peer": peer, "stage": stage})

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
        labels = {(peer, str(stage)): trust[peer, stage] for peer, stage in kept}
        for gone in self._trust_labels - labels.keys():
            self.trust.remove(*gone)
        for (peer, stage), value in labels.items():
            self.trust.labels(peer=peer, stage=stage).set(value)
        self._trust_labels = set(labels)

    def drill(self, attack: str) -> None:
        """This node attacks on purpose from now on; "" ends it."""
        if self._attack:
            self.drill_active.remove(self._attack)
        self._attack = attack
        if attack:
            self.drill_active.labels(attack=attack).set(1)

    def sample_process(self, *, lag: float, p2pd_pid: int | None, peers: int) -> None:
        """Read what the process uses; ``lag`` in seconds, ``peers`` connected ones."""
        now = read_resources(p2pd_pid)
        self.open_files.set(now.open_files)
        self.open_files_limit.set(now.open_files_limit)
        self.resident_memory.set(now.resident_bytes)
        self.p2pd_resident_memory.set(now.p2pd_resident_bytes)
        self.event_loop_lag.set(lag)
        self.peers_connected.set(peers)

    # what Prometheus reads -----------------------------------------------------------

    def render(self) -> bytes:
        """All metrics in the Prometheus text format; see ``CONTENT_TYPE``."""
        # generate_latest asks its argument for nothing but collect().
        return generate_latest(cast(CollectorRegistry, _WithoutCreated(self.registry)))


class _WithoutCreated:
    """A registry without the ``_created`` series, which double the exposition and which nobody reads.

    prometheus-client can leave them out itself, but only by a switch for the whole process.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry

    def collect(self) -> Iterator[Family]:
        for family in self._registry.collect():
            copy = Family(family.name, family.documentation, family.type, family.unit)
            copy.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield copy
