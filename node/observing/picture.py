"""The picture of a swarm: what views and statuses of many nodes add up to. Pure; time is an argument.

Signed claims tell who holds which stage in which state. Whether a node answers is what the observer saw itself. What a
node says beyond that is its own word (``reports``).
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import chain, zip_longest
from typing import Final

from node.observing.curve import Curve, middle
from node.observing.reports import MAX_EVENTS, Outline, Report, ToldEvent
from node.view import View
from protocol.errors import RecordError
from protocol.records import MAX_STAGE, Accusation, Claim, NodeState, Record, Verdict, parse_record

MAX_NODES: Final = 1024
"""Nodes known at a time. An identity costs nothing, so somebody could announce any number of them."""

MAX_ASKED: Final = 128
"""Answering nodes that are asked for their status in one round; of more, those asked longest ago."""

MAX_KNOCKED: Final = 32
"""Other nodes that are dialled in one round: each may cost its whole time limit."""

VIEWS: Final = 4
"""Nodes whose view is asked for in one round, so that no single one decides who is seen."""

FORGET_SECONDS: Final = 600.0
"""How long a node is shown after it has gone."""


class Presence(StrEnum):
    """Whether a node is there."""

    UNASKED = "unasked"
    """It has a live claim and has not been asked yet."""
    ANSWERING = "answering"
    """It answered when it was asked last."""
    SILENT = "silent"
    """It has a live claim, and did not answer when it was asked last."""
    GONE = "gone"
    """It has no live claim any more, and does not answer."""


@dataclass(slots=True)
class Seen:
    """One node."""

    peer: str
    addresses: tuple[str, ...]
    since: float
    """Unix seconds; since when it is as present as it is."""
    seed: bool = False
    claim: Claim | None = None
    """The last one that was seen, also when its lease has ended."""
    report: Report | None = None
    presence: Presence = Presence.UNASKED
    asked: float = 0.0
    answers: bool | None = None
    """To the last question; None before any."""
    ever_answered: bool = False


@dataclass(slots=True)
class Picture:
    """Everything that is known of a swarm."""

    swarm: bytes
    outline: Outline | None = None
    view: View = field(default_factory=lambda: View(num_stages=MAX_STAGE + 1))
    nodes: dict[str, Seen] = field(default_factory=dict)
    curve: Curve = field(default_factory=Curve)
    told: OrderedDict[str, deque[ToldEvent]] = field(default_factory=OrderedDict)
    """Events by signed records, by the writer."""
    rounds: int = 0
    step: int = 0
    loss: float | None = None

    # what comes in -------------------------------------------------------------------

    def add_seeds(self, addresses: Iterable[tuple[str, str]], now: float) -> None:
        """Peer ids and addresses that an invite names."""
        for peer, address in addresses:
            seen = self.nodes.setdefault(peer, Seen(peer, (), now, seed=True, presence=Presence.GONE))
            seen.addresses = (*seen.addresses, address)

    def know(self, outline: Outline) -> None:
        """The manifest has been seen: claims of other stages than it has are worth nothing."""
        self.outline = outline
        self.view.num_stages = outline.stages
        for peer in [peer for peer, claim in self.view.claims.items() if claim.stage >= outline.stages]:
            self.view.mark_gone(peer)

    def merge(self, views: Sequence[Sequence[bytes]], now: float) -> None:
        """Take in the records of several nodes, in turn one of each, so that a view full of strangers hides nobody."""
        known = {*self.view.signed.values(), *self.view.signed_accusations.values()}
        known.update(self.view.signed_verdicts.values())
        for data in chain.from_iterable(zip_longest(*views)):
            if data is None or data in known:
                continue
            known.add(data)
            try:
                record = parse_record(data, swarm=self.swarm, now=now)
            except RecordError:
                continue  # out of date, or the node lies: either way it proves nothing
            if isinstance(record, Claim) and not self._room_for(record):
                continue
            if self.view.merge(record, data, now) and not isinstance(record, Claim):
                self._tell(record, now)

    def answered(self, peer: str, report: Report, now: float) -> None:
        """A node told its status."""
        seen = self.nodes.get(peer)
        if seen is not None:
            seen.report, seen.asked, seen.answers, seen.ever_answered = report, now, True, True

    def failed(self, peer: str, now: float) -> None:
        """A node did not answer, or not with a status."""
        seen = self.nodes.get(peer)
        if seen is not None:
            seen.asked, seen.answers = now, False

    def settle(self, now: float) -> None:
        """Once a round is over: who is there, and where is the swarm."""
        self.rounds += 1
        self.view.expire(now)
        self.meet(now)
        for seen in list(self.nodes.values()):
            presence = self._presence(seen)
            if presence is not seen.presence:
                seen.presence, seen.since = presence, now
            if presence is Presence.GONE and not seen.seed and now - seen.since > FORGET_SECONDS:
                del self.nodes[seen.peer]
                self.told.pop(seen.peer, None)
        self._look_where_it_is()

    # whom to ask ---------------------------------------------------------------------

    def meet(self, now: float) -> None:
        """Know every node that has a live claim."""
        for peer, claim in self.view.claims.items():
            seen = self.nodes.get(peer)
            if seen is None:
                seen = self.nodes[peer] = Seen(peer, (), now)
            if claim is not seen.claim:
                seen.claim = claim
                # A seed's address from the invite may work where those it announces do not.
                seen.addresses = tuple(dict.fromkeys((*claim.addresses, *(seen.addresses if seen.seed else ()))))[:16]

    def to_ask(self) -> list[Seen]:
        """Whom to ask for their status, the answering ones first, then longest ago first."""
        known = sorted(self.nodes.values(), key=lambda seen: seen.asked)
        answering = [seen for seen in known if seen.answers]
        others = [seen for seen in known if not seen.answers and (seen.seed or seen.peer in self.view.claims)]
        return [*answering[:MAX_ASKED], *others[:MAX_KNOCKED]]

    def to_view(self, shuffled: Sequence[Seen]) -> list[Seen]:
        """Whom of those who are to be asked to ask for their view as well. ``shuffled``: ``to_ask`` in random order."""
        if not any(seen.answers for seen in shuffled):
            return list(shuffled)  # nobody is known to answer, so whoever does is wanted
        return [seen for seen in shuffled if seen.answers][:VIEWS]

    # what is seen --------------------------------------------------------------------

    def shown(self) -> list[Seen]:
        """Every node but seeds that have never been there, in order of stage and peer id."""
        shown = [seen for seen in self.nodes.values() if seen.claim is not None or seen.ever_answered]
        return sorted(shown, key=lambda seen: (seen.claim.stage if seen.claim else MAX_STAGE + 1, seen.peer))

    def answering(self) -> list[Seen]:
        """Nodes that answered when they were asked last."""
        return [seen for seen in self.nodes.values() if seen.answers and seen.report is not None]

    def events(self) -> list[ToldEvent]:
        """What records and nodes tell of what happened, oldest first; the same of several nodes is one event."""
        found: dict[tuple[str, str, int], tuple[ToldEvent, int]] = {}
        of_nodes = [seen.report.events for seen in self.nodes.values() if seen.report is not None]
        for event in sorted(chain(*self.told.values(), *of_nodes), key=lambda event: event.time):
            key = (event.kind, event.peer, event.step)
            first, tellers = found.get(key, (event, 0))
            found[key] = (first, tellers + 1)
        return [_told_by(event, tellers) for event, tellers in found.values()]

    # inside --------------------------------------------------------------------------

    def _room_for(self, claim: Claim) -> bool:
        if claim.peer in self.nodes or claim.peer in self.view.claims:
            return True
        if len(self.nodes.keys() | self.view.claims.keys()) < MAX_NODES:
            return True
        # Whoever never answered makes room: to announce nodes costs nothing, to be one costs a little.
        known = [seen for seen in self.nodes.values() if not seen.seed]
        strangers = [seen for seen in known if not seen.ever_answered and seen.asked]
        gone = [seen for seen in known if seen.presence is Presence.GONE]
        if not (strangers or gone):
            return False
        worst = min(strangers or gone, key=lambda seen: seen.since)
        self.view.mark_gone(worst.peer)
        del self.nodes[worst.peer]
        self.told.pop(worst.peer, None)
        return True

    def _tell(self, record: Record, now: float) -> None:
        if isinstance(record, Accusation):
            writer, kind, text = record.accuser, "accusation", f"{record.accuser[-8:]} accuses it: {record.reason}"
        elif isinstance(record, Verdict):
            writer, kind, text = (
                record.writer,
                "verdict",
                f"{len(record.votes)} jurors found it guilty: {record.reason}",
            )
        else:
            return
        if writer not in self.view.claims:  # anybody can write those
            return
        event = ToldEvent(
            time=now, step=record.step, kind=kind, peer=record.accused, stage=record.accused_stage, text=text
        )
        self.told.setdefault(writer, deque(maxlen=MAX_EVENTS)).append(event)
        if len(self.told) > MAX_NODES:
            self.told.popitem(last=False)

    def _presence(self, seen: Seen) -> Presence:
        if seen.answers:
            return Presence.ANSWERING
        if seen.peer not in self.view.claims:
            return Presence.GONE
        return Presence.UNASKED if seen.answers is None else Presence.SILENT

    def _look_where_it_is(self) -> None:
        tellers = [(seen, seen.report) for seen in self.answering() if seen.report is not None]
        training = (NodeState.TRAINING, NodeState.PROBATION)
        # Those who train know where the swarm is; before anybody does, all others will have to do.
        trained = [
            (seen, report) for seen, report in tellers if seen.claim is not None and seen.claim.state in training
        ]
        steps = middle([report.step for _, report in trained or tellers])
        losses = [report.loss for _, report in trained or tellers if report.loss is not None]
        if steps is not None:
            self.step = int(steps)
        if losses:
            self.loss = middle(losses)
        for seen, report in trained:
            self.curve.add(seen.peer, report.losses, step=self.step)
        for seen, report in tellers:
            if report.losses:  # those of a thousand nodes would be megabytes
                seen.report = replace(report, losses=())
        self.curve.close(step=self.step)


def _told_by(event: ToldEvent, tellers: int) -> ToldEvent:
    if tellers == 1:
        return event
    return ToldEvent(
        time=event.time,
        step=event.step,
        kind=event.kind,
        peer=event.peer,
        stage=event.stage,
        text=f"{event.text} (told by {tellers} nodes)",
    )
