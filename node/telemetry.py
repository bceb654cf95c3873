"""What this node did and saw: one place that feeds the metrics, the event list and /status.

The parts of the node report facts here and never read them back to decide anything.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass

from node.metric_words import PHASES
from node.metrics import Metrics
from node.wording import many
from protocol.errors import RemoteError, SentinelError
from protocol.messages import StreamKind
from protocol.transports.base import Observer
from verifier.ledger import StandingChanged

log = logging.getLogger(__name__)

MAX_EVENTS = 300
MAX_LOSSES = 100_000
MAX_DIGESTS = 1_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that a person wants to see."""

    time: float
    step: int
    kind: str
    peer: str
    stage: int | None
    text: str


@dataclass(slots=True)
class Counters:
    """Totals of this process."""

    microbatches: int = 0
    tokens: int = 0
    retried: int = 0
    refused: int = 0
    lost: int = 0
    unaveraged: int = 0
    flags: int = 0
    audits: int = 0
    votes: int = 0
    steps: int = 0
    bytes_in: int = 0
    bytes_out: int = 0


class Telemetry(Observer):
    """Metrics, events and counters of one node."""

    def __init__(self, metrics: Metrics, *, tokens_per_microbatch: int = 0) -> None:
        self.metrics = metrics
        self.counters = Counters()
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.losses: deque[tuple[int, float]] = deque(maxlen=MAX_LOSSES)
        self.digests: deque[tuple[int, str]] = deque(maxlen=MAX_DIGESTS)
        self.clock_offsets: dict[str, float] = {}
        self.microbatches_in_flight = 0
        self.download: tuple[int, int] | None = None
        """Bytes of the stage's state that are here, of how many; None while none is fetched."""
        self._tokens_per_microbatch = tokens_per_microbatch
        self._step_ended: deque[tuple[float, int]] = deque(maxlen=32)
        # Looked up once: these are touched many times for each microbatch, and a look-up costs more than the count.
        self._phase_seconds = {phase: metrics.phase_seconds.labels(phase=phase) for phase in PHASES}
        self._stream_bytes = {
            (direction, stream): metrics.stream_bytes.labels(direction=direction, stream=stream.value)
            for direction in ("in", "out")
            for stream in StreamKind
        }
        self._completed = metrics.microbatches.labels(outcome="completed")

    def set_tokens_per_microbatch(self, tokens: int) -> None:
        """Known once the manifest is."""
        self._tokens_per_microbatch = tokens

    # the wire (Observer) -------------------------------------------------------------

    def bytes_moved(self, direction: str, stream: StreamKind, count: int) -> None:
        if direction == "in":
            self.counters.bytes_in += count
        else:
            self.counters.bytes_out += count
        self._stream_bytes[direction, stream].inc(count)

    def request_done(self, method: str, outcome: str) -> None:
        self.metrics.request_done(method, outcome)

    def remote_error(self, peer: str, error: SentinelError) -> None:
        if isinstance(error, RemoteError):
            self.metrics.remote_error(error.kind)
            log.debug("peer %s broke a rule (%s): %s", peer[-8:], error.kind, error)

    def clock_offset(self, peer: str, seconds: float) -> None:
        self.clock_offsets[peer] = seconds
        if len(self.clock_offsets) > 256:
            self.clock_offsets.pop(next(iter(self.clock_offsets)))
        offsets = sorted(self.clock_offsets.values())
        self.metrics.clock_offset.set(offsets[len(offsets) // 2])

    # the pipeline --------------------------------------------------------------------

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds spent inside as a phase of the step."""
        started = time.perf_counter()
        try:
            yield
        finally:
            self._phase_seconds[name].inc(time.perf_counter() - started)

    def in_flight(self, change: int) -> None:
        """A microbatch entered (+1) or left (-1) this node."""
        self.microbatches_in_flight += change
        self.metrics.in_flight.inc(change)

    def state_fetched(self, done: int, size: int) -> None:
        """So much of the stage's state is here."""
        self.download = (done, size) if done < size else None
        self.metrics.state_fetched(done, size)

    def completed(self, step: int, microbatch: int) -> None:
        """A microbatch was trained here, both ways."""
        self.counters.microbatches += 1
        self.counters.tokens += self._tokens_per_microbatch
        self._completed.inc()
        self.metrics.tokens.inc(self._tokens_per_microbatch)

    def retried(self, microbatch: int, step: int, peer: str, error: SentinelError) -> None:
        """A call to the next stage failed and is made again elsewhere."""
        self.counters.retried += 1
        self.metrics.microbatches.labels(outcome="retried").inc()
        log.debug("microbatch %d of step %d is retried: %s: %s", microbatch, step, peer[-8:], error)

    def lost(self, step: int, microbatch: int) -> None:
        """Every replica of stage 0 failed at a microbatch."""
        self.counters.lost += 1
        self.metrics.microbatches.labels(outcome="lost").inc()
        self.event("lost", step, text=f"microbatch {microbatch} was refused on every path")

    def unaveraged(self, step: int, count: int) -> None:
        """Gradients of so many microbatches are not in this stage's aggregate: they went with a replica that died."""
        self.counters.unaveraged += count
        self.metrics.microbatches.labels(outcome="unaveraged").inc(count)
        self.event(
            "unaveraged", step, text=f"the gradients of {many(count, 'microbatch')} went with a replica that is gone"
        )

    def restored(self, held: int, step: int) -> None:
        """This node goes on at ``step`` from its checkpoint of step ``held``."""
        text = f"goes on from the checkpoint of step {held}"
        if lost := step - held:
            self.metrics.updates_lost.inc(lost)
            text += f" in step {step}: {lost} updates of this stage went with its last replica"
        self.event("restored", held, text=text)

    def step_done(self, step: int, loss: float | None, seconds: float) -> None:
        """A step was committed."""
        self.counters.steps += 1
        self.metrics.step.set(step + 1)
        self.metrics.step_seconds.observe(seconds)
        if loss is not None:
            self.losses.append((step, loss))
            self.metrics.loss.set(loss)
        self._step_ended.append((time.monotonic(), step))

    def applied(self, step: int, digest: bytes) -> None:
        """An aggregate was applied, with this digest of the parameters as the result."""
        self.digests.append((step, digest.hex()))

    def averaged(self, outcome: str, seconds: float) -> None:
        """A step's averaging ended with an aggregate, so this node's parameters were its siblings'."""
        self.metrics.averaging_done(outcome, seconds)
        self.metrics.parameter_agreement.set(1)

    def round_failed(self) -> None:
        """One attempt at averaging came to nothing."""
        self.metrics.averaging_rounds.labels(outcome="failed").inc()

    def out_of_sync(self, step: int, why: str) -> None:
        """This node's parameters are not its siblings'."""
        self.metrics.parameter_agreement.set(0)
        self.event("out_of_sync", step, text=why)

    def steps_per_second(self) -> float:
        """Over the last steps; 0 when there are too few."""
        if len(self._step_ended) < 2:
            return 0.0
        (first_time, first), (last_time, last) = self._step_ended[0], self._step_ended[-1]
        return (last - first) / max(last_time - first_time, 1e-6)

    # the checker ---------------------------------------------------------------------

    def flagged(self, peer: str, direction: str, reason: str) -> None:
        """A tensor of a peer was refused by the statistics."""
        self.counters.flags += 1
        self.metrics.flag(reason, direction)

    def struck(self, peer: str, stage: int | None, reason: str, step: int, detail: str) -> None:
        """A peer got a strike."""
        self.counters.refused += 1
        self.metrics.strike(reason)
        self.metrics.microbatches.labels(outcome="refused").inc()
        self.event("strike", step, peer=peer, stage=stage, text=detail or reason)

    def standing_changed(self, change: StandingChanged, stage: int | None, step: int) -> None:
        """A peer's standing changed."""
        would = "would be " if change.would else ""
        text = f"{change.before} -> {would}{change.after}"
        if change.after.value == "quarantined" and not change.would:
            self.metrics.quarantines.inc()
        if change.after.value == "ejected" and not change.would:
            self.metrics.ejections.labels(kind="seen").inc()
        self.event(change.after.value, step, peer=change.peer, stage=stage, text=text)

    def would_eject(self, peer: str, stage: int, reason: str, step: int) -> None:
        """A quorum stands, but this swarm only observes."""
        self.event("would_eject", step, peer=peer, stage=stage, text=f"would be ejected: {reason}")

    def audited(self, outcome: str, seconds: float | None = None) -> None:
        """An audit that this node asked for has ended."""
        self.counters.audits += 1
        self.metrics.audited(outcome, seconds)

    def slice_examined(self, why: str, outcome: str) -> None:
        """This node had the parts of a slice shown, and reduced them again."""
        self.metrics.slices_examined.labels(why=why, outcome=outcome).inc()

    def voted(self, guilty: bool) -> None:
        """This node has voted as a juror."""
        self.counters.votes += 1
        self.metrics.votes.labels(vote="guilty" if guilty else "honest").inc()

    def event(self, kind: str, step: int, *, peer: str = "", stage: int | None = None, text: str = "") -> None:
        """Note something that a person wants to see."""
        self.events.append(Event(time=time.time(), step=step, kind=kind, peer=peer, stage=stage, text=text))
        level = logging.INFO if kind not in ("strike", "trusted") else logging.DEBUG
        where = f" (stage {stage})" if stage is not None else ""
        who = f" {peer[-8:]}{where}:" if peer else ""
        log.log(level, "[%s]%s %s", kind, who, text)

    def event_dicts(self, most: int = 100) -> list[dict[str, object]]:
        """The newest events, oldest first."""
        return [asdict(event) for event in list(self.events)[-most:]]
