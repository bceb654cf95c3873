"""The checker of one node: what it thinks of each peer, and what the swarm has decided.

Feeds the pure decisions of ``verifier/``: the boundary checkers judge tensors (in the compute
thread), the ledger keeps each peer's standing, and accusations make or fail a quorum.
"""

from __future__ import annotations

import hashlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from node.boundary import Incoming
from node.drill import Drill
from node.refusal_kinds import NOT_THEIR_FAULT
from node.rounds import majority_digest
from node.telemetry import Telemetry
from node.view import View
from protocol.errors import RefusedError, RemoteError
from protocol.hops import open_hop
from protocol.manifest import Manifest
from protocol.messages import Cleared
from protocol.records import Accusation, Verdict
from verifier.config import CheckerConfig
from verifier.corroboration import contradicted, corroborated
from verifier.distances import Reduction
from verifier.ledger import Ledger, PeerState, StandingChanged
from verifier.quorum import LEAST_JURORS, convicts, ejects, jury, neighbouring_stages, seconds
from verifier.sentinel import BoundaryChecker, Judgement
from verifier.verdicts import Direction, Reason

MAX_EVIDENCE_LINES = 64
"""Strikes against one peer that an accusation's digest covers."""

PROVEN_BY_SIBLINGS = frozenset({Reason.REDUCTION.value, Reason.EQUIVOCATION.value})
"""Reasons of accusations for what happens in the averaging."""

GUARD_REASONS = {reason.value: reason for reason in Reason}
"""Kinds of a remote error that are a reason to strike."""


class FlaggedError(RefusedError):
    """The statistics refuse a tensor."""

    default_kind = "flagged"

    def __init__(self, message: str, direction: Direction, reasons: tuple[Reason, ...]) -> None:
        super().__init__(message)
        self.direction = direction
        self.reasons = reasons


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A judged tensor: who sent it, and what is to be learnt from it once its microbatch is complete."""

    sender: str
    direction: Direction
    judgement: Judgement | None
    flag: FlaggedError | None = None
    """What would have refused the tensor, in observe mode."""
    borne: FlaggedError | None = None
    """What would have refused the tensor, had its sender a sibling that could do the work instead."""
    cleared: tuple[str, ...] = ()
    """Replicas that sent this same flagged tensor: it is unusual, and nobody is to blame."""
    hops: tuple[bytes, ...] = ()
    """The signed proof of that."""
    contradicted: tuple[str, ...] = ()
    """Replicas whose flagged tensor of this microbatch differs from this accepted one, from equal inputs."""


def score_of(judged: Judged | None) -> float:
    """The largest statistic of an accepted tensor, over its fence; 0 if it was not judged."""
    if judged is None or judged.judgement is None:
        return 0.0
    return max(judged.judgement.verdict.scores.values(), default=0.0)


def checker_config(manifest: Manifest) -> CheckerConfig:
    """The checker's settings, as the manifest has them."""
    settings = manifest.verifier
    return CheckerConfig(
        mode=settings.mode,
        warmup_steps=settings.warmup_steps,
        ema_activation=settings.ema_activation,
        ema_gradient=settings.ema_gradient,
        reduction=settings.reduction,
        votes=settings.votes,
        sketches=settings.sketches,
        window=settings.window,
        minimum_history=settings.minimum_history,
        fence_multiplier=settings.fence_multiplier,
        target_false_positive_rate=settings.target_false_positive_rate,
        strike_limit=settings.strike_limit,
        strike_decay=settings.strike_decay,
        ejection_seconds=settings.ejection_seconds,
        norm_bound=settings.norm_bound,
        sketch_size=settings.sketch_size,
    )


LONE_STRETCH = 4.0
"""Fences within which a tensor is used all the same, and its sender not struck, while the sender is alone in its stage.

Nobody could compute the tensor again, nor do the work instead: it would be lost, and honest tensors after a change in
the swarm were seen at 1.06 to 4.4 fences. It teaches the baseline nothing."""


class Guard:
    """Standing of peers, judgement of tensors, accusations and ejections."""

    def __init__(
        self,
        *,
        me: str,
        manifest: Manifest,
        view: View,
        telemetry: Telemetry,
        accuse: Callable[[str, int, str, int, bytes], None],
        on_ejected: Callable[[str, str, float], None],
        notify: Callable[[], None],
        seed: int,
        drill: Drill | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``accuse(peer, its stage, reason, step, evidence)`` publishes an accusation;
        ``on_ejected(peer, reason, until)`` is told of every ejection, this node's own included."""
        self._me = me
        self._num_stages = manifest.num_stages
        self._view = view
        self._telemetry = telemetry
        self._accuse = accuse
        self._on_ejected = on_ejected
        self._notify = notify
        self._drill = drill
        self._wall_clock = wall_clock
        self._config = checker_config(manifest)
        self.ledger = Ledger(self._config)
        # Siblings compare their baselines, so they project on the same directions.
        self._checkers = {direction: BoundaryChecker(self._config, direction, seed=seed) for direction in Direction}
        self._evidence: dict[str, deque[str]] = {}
        self._suspects: dict[tuple[Direction, int, int], dict[str, Incoming]] = {}
        self._struck: dict[tuple[int, int], set[str]] = {}
        self._struck_in: dict[str, int] = {}
        self._would_eject: set[str] = set()
        self._barred: set[str] = set()
        self._ejected: set[str] = set()
        self._step = 0

    # in the compute thread -----------------------------------------------------------

    def judge(
        self,
        incoming: Incoming,
        *,
        sender: str,
        step: int,
        microbatch: int,
        direction: Direction,
        replicas: int,
        excused: bool = False,
    ) -> Judged:
        """Judge a tensor; ``replicas`` is the number of live replicas of the sender's stage.

        ``excused``: it has been computed again by others, and is what it should be, however it looks.

        Raises:
            FlaggedError: it must not be used.
        """
        if self._config.mode == "off" or (self._drill is not None and self._drill.spares(sender, step)):
            return Judged(sender=sender, direction=direction, judgement=None)
        judgement = self._checkers[direction].judge(
            incoming.tensor,
            step=step,
            sketch=incoming.sketch,
            input_sketch=incoming.input_sketch,
            rms=incoming.rms,
        )
        verdict = judgement.verdict
        key = (direction, step, microbatch)
        if verdict.accepted:
            mine = (incoming.sketch, incoming.input_sketch)
            wrong = tuple(
                peer
                for peer, other in self._suspects.get(key, {}).items()
                if peer != sender and contradicted((other.sketch, other.input_sketch), mine)
            )
            return Judged(sender=sender, direction=direction, judgement=judgement, contradicted=wrong)
        if excused:
            return Judged(sender=sender, direction=direction, judgement=judgement, cleared=(sender,))
        suspects = self._suspects.setdefault(key, {})
        suspects[sender] = replace(incoming, tensor=torch.empty(0))  # the sketches are enough
        agreeing = corroborated(
            [(peer, other.sketch) for peer, other in suspects.items()], peer=sender, replicas=replicas
        )
        if agreeing:
            hops = tuple(suspects[peer].hop for peer in agreeing)
            return Judged(sender=sender, direction=direction, judgement=judgement, cleared=agreeing, hops=hops)
        scores = ", ".join(f"{name} {score:.2f}" for name, score in verdict.scores.items() if score > 1)
        error = FlaggedError(
            f"the {direction} of {sender[-8:]} is flagged ({scores} times its fence)",
            direction,
            verdict.reasons,
        )
        if self.observing:
            return Judged(sender=sender, direction=direction, judgement=None, flag=error)
        if replicas == 1 and Reason.NORM not in verdict.reasons and max(verdict.scores.values()) <= LONE_STRETCH:
            return Judged(sender=sender, direction=direction, judgement=None, borne=error)
        raise error

    def accept(self, judged: Judged) -> None:
        """Learn from a tensor whose microbatch is complete."""
        if judged.judgement is not None:
            # What replicas have confirmed is learnt too: after a jump of the loss every honest tensor is flagged
            # at first, and a baseline that did not follow would flag them for ever.
            self._checkers[judged.direction].accept(judged.judgement.observation, confirmed=bool(judged.cleared))

    def end_step_checkers(self, step: int) -> None:
        """Fold what was accepted in this step into the baselines."""
        for checker in self._checkers.values():
            checker.end_step(step)
        self._suspects = {key: found for key, found in self._suspects.items() if key[1] > step}

    @property
    def judges(self) -> bool:
        """Whether the statistics are used at all."""
        return self._config.mode != "off"

    def baselines(self) -> dict[Direction, Reduction]:
        """What has been learnt so far, of the directions that this node receives."""
        found = {direction: checker.baseline() for direction, checker in self._checkers.items()}
        return {direction: baseline for direction, baseline in found.items() if baseline is not None}

    def set_baseline(self, direction: Direction, baseline: Reduction) -> None:
        """Replace a baseline by one that siblings agree on."""
        self._checkers[direction].set_baseline(baseline)

    # in the event loop ---------------------------------------------------------------

    @property
    def observing(self) -> bool:
        """Whether verdicts are only reported."""
        return self._config.mode == "observe"

    def allows(self, peer: str) -> bool:
        """Whether this node takes work from, or gives work to, a peer."""
        return self.ledger.allows(peer)

    def excluded(self) -> set[str]:
        """Peers that this node neither gives work to nor waits for."""
        return {peer for peer in self._barred if peer in self._view.claims}

    def ejected(self) -> set[str]:
        """Peers that the swarm has ejected."""
        return {peer for peer in self._ejected if peer in self._view.claims}

    def all_ejected(self) -> frozenset[str]:
        """Peers that the swarm has ejected, also those that have left."""
        return frozenset(self._ejected)

    def breach(self, peer: str, error: RemoteError, step: int, microbatch: int) -> None:
        """A peer's message was refused: strike it if that was its own doing."""
        if isinstance(error, FlaggedError):
            self._struck.setdefault((step, microbatch), set()).add(peer)
            for reason in error.reasons:
                self._telemetry.flagged(peer, error.direction.value, reason.value)
            self.strike(peer, error.reasons[0], step, detail=str(error))
        elif error.kind not in NOT_THEIR_FAULT:
            self.strike(peer, GUARD_REASONS.get(error.kind, Reason.PROTOCOL), step, detail=str(error))

    def excuse(self, peer: str, flag: FlaggedError, step: int, microbatch: int) -> None:
        """Take note of a flag that came to nothing: others computed the tensor again, and it is what it should be."""
        for reason in flag.reasons:
            self._telemetry.flagged(peer, flag.direction.value, reason.value)
        self._telemetry.event(
            "cleared", step, peer=peer, text=f"microbatch {microbatch} is unusual, and computed rightly"
        )

    def note(self, judged: Judged, step: int, microbatch: int) -> None:
        """Act on a judgement that let the tensor pass: clear whom it clears; report what observe mode hides."""
        if judged.flag is not None:
            self.breach(judged.sender, judged.flag, step, microbatch)
        if judged.borne is not None:
            for reason in judged.borne.reasons:
                self._telemetry.flagged(judged.sender, judged.borne.direction.value, reason.value)
            text = f"{judged.borne}; its stage has no other replica, so microbatch {microbatch} is used"
            self._telemetry.event("borne", step, peer=judged.sender, text=text)
        if judged.cleared:
            self.clear(judged.cleared, step=step, microbatch=microbatch)
        for peer in judged.contradicted:
            self.strike(peer, Reason.CONTRADICTED, step, detail=f"a sibling computed microbatch {microbatch} otherwise")

    def clear(self, peers: tuple[str, ...], *, step: int, microbatch: int) -> None:
        """Take back the strikes that these peers got for a microbatch whose content is to blame."""
        struck = self._struck.get((step, microbatch), set())
        for peer in struck.intersection(peers):
            struck.discard(peer)
            self._handle(self.ledger.forgive(peer, step=step), step, None)
            self._telemetry.event(
                "cleared", step, peer=peer, text=f"microbatch {microbatch} is unusual; its siblings computed the same"
            )

    def check_clearance(
        self, message: Cleared, *, stage: int, sketch_bytes: int, swarm: bytes, replicas: int
    ) -> tuple[str, ...]:
        """The peers that a sibling's notice clears, after checking its proof here.

        Raises:
            MessageError: the proof is not what it should be.
        """
        sketches: list[tuple[str, Tensor]] = []
        for data in message.hops:
            hop = open_hop(
                data,
                swarm,
                stage=stage - 1,
                step=message.step,
                microbatch=message.microbatch,
                direction=Direction.ACTIVATION.value,
                sketch_bytes=sketch_bytes,
            )
            if self._view.stage_of(hop.peer) == stage - 1:
                sketches.append((hop.peer, torch.frombuffer(bytearray(hop.sketch), dtype=torch.float32)))
        return corroborated(sketches, peer=sketches[0][0], replicas=replicas) if sketches else ()

    def strike(self, peer: str, reason: Reason, step: int, detail: str = "") -> None:
        """Count an offence; at the limit the peer is quarantined here and accused in the swarm."""
        if self._drill is not None and self._drill.spares(peer, step):
            return
        self._telemetry.struck(peer, self._view.stage_of(peer), reason.value, step, detail)
        self._evidence.setdefault(peer, deque(maxlen=MAX_EVIDENCE_LINES)).append(f"{step} {reason.value} {detail}")
        self._struck_in[peer] = step
        self._handle(self.ledger.strike(peer, reason, step=step), step, reason)
        self._second(peer, step)

    def condemn(self, peer: str, reason: Reason, step: int, detail: str) -> None:
        """Quarantine and accuse a peer for what cannot have been a mistake."""
        if self._drill is not None and self._drill.spares(peer, step):
            return
        self._telemetry.struck(peer, self._view.stage_of(peer), reason.value, step, detail)
        self._evidence.setdefault(peer, deque(maxlen=MAX_EVIDENCE_LINES)).append(f"{step} {reason.value} {detail}")
        self._struck_in[peer] = step
        self._handle(self.ledger.condemn(peer, reason, step=step), step, reason)

    def _second(self, peer: str, step: int) -> None:
        """Join others' accusations where this node's own strikes bear them out."""
        standing = self.ledger.standing(peer)
        if standing.state not in (PeerState.SUSPECT, PeerState.TRUSTED, PeerState.PROBATION):
            return
        others = len(self._view.accusers(peer).keys() - {self._me})
        if seconds(strikes=standing.strikes, others=others, limit=self._config.strike_limit):
            self._handle(self.ledger.condemn(peer, standing.reason or Reason.STRIKES, step=step), step, standing.reason)

    def judged_finally(self, peer: str) -> bool:
        """Whether the swarm has ejected a peer, or would have in a swarm that only observes."""
        return peer in self._would_eject or self.ledger.standing(peer).state is PeerState.EJECTED

    def unproven(self, peer: str) -> bool:
        """Whether a peer has not earned trust here, or has strikes: it is audited more often."""
        return self.ledger.standing(peer).state is not PeerState.TRUSTED

    def compare_parameters(self, digests: Mapping[str, bytes], step: int) -> None:
        """Strike the replicas of a stage whose parameters are not those of most.

        ``digests`` are what they say of one step; empty where a replica had not begun it.
        """
        told = {peer: digest for peer, digest in digests.items() if digest}
        standing = majority_digest(told, of=len(told)) if len(told) > 2 else None
        if standing is None:
            return
        for peer, digest in told.items():
            if digest != standing:
                self.strike(peer, Reason.PARAMETERS, step, detail="its parameters are not those of its siblings")

    def struck_in(self, peer: str, step: int) -> bool:
        """Whether a peer got a strike in this step: others are tried before it."""
        return self._struck_in.get(peer) == step

    def credit(self, peer: str, step: int) -> None:
        """Count a microbatch that went well."""
        self._handle(self.ledger.credit(peer, step=step), step, None)

    def end_step(self, step: int) -> None:
        """Let strikes leak, and ejections run out."""
        self._step = step + 1
        self._struck = {key: peers for key, peers in self._struck.items() if key[0] >= step - 1}
        self._handle(self.ledger.end_step(step), step, None)
        self._handle(self.ledger.expire(self._wall_clock()), step, None)
        self._struck_in = {peer: at for peer, at in self._struck_in.items() if at >= step}
        for accused in {accused for accused, _ in self._view.verdicts}:
            self.consider_verdicts(accused)
        self._frame(step)

    def _frame(self, step: int) -> None:
        """The drill that accuses honest peers."""
        if self._drill is None:
            return
        mine = self._view.stage_of(self._me)
        near = neighbouring_stages(mine, self._num_stages) if mine is not None else ()
        victim = self._drill.victim([claim.peer for stage in near for claim in self._view.replicas(stage)], step)
        stage = self._view.stage_of(victim) if victim is not None else None
        if victim is not None and stage is not None:
            self._accuse(victim, stage, Reason.L2.value, step, bytes(32))

    def _handle(self, changes: tuple[StandingChanged, ...], step: int, reason: Reason | None) -> None:
        for change in changes:
            stage = self._view.stage_of(change.peer)
            self._telemetry.standing_changed(change, stage, step)
            self._sort_out(change.peer)
            if change.after is PeerState.QUARANTINED and reason is not None and stage is not None and not change.would:
                log = "\n".join(self._evidence.get(change.peer, []))
                digest = hashlib.sha256(log.encode()).digest()
                self._accuse(change.peer, stage, reason.value, step, digest)
            self._notify()

    def _sort_out(self, peer: str) -> None:
        """Keep the sets of the few that are barred; they are asked for several times a microbatch."""
        ejected = self.ledger.standing(peer).state is PeerState.EJECTED
        (self._ejected.add if ejected else self._ejected.discard)(peer)
        (self._barred.discard if self.ledger.allows(peer) else self._barred.add)(peer)

    def restored(self) -> None:
        """Take note of a ledger that has been loaded."""
        for peer in self.ledger.peers():
            self._sort_out(peer)

    def consider(self, accused: str) -> None:
        """Look whether the accusations against a peer make a quorum, and eject it if so."""
        if self._config.mode == "off":
            return
        self._second(accused, self._step)
        accusers = self._view.accusers(accused)
        if not accusers or self.ledger.standing(accused).state is PeerState.EJECTED:
            return
        stage = self._view.stage_of(accused)
        if stage is None:
            stage = next(iter(accusers.values())).accused_stage
        voters = self._voters(accused, stage, accusers)
        if voters is None:
            return
        until = max(entry.expires for entry in accusers.values())
        reason = most_common_reason(list(accusers.values()))
        if self._config.mode != "enforce":
            if accused not in self._would_eject:
                self._would_eject.add(accused)
                self._telemetry.would_eject(accused, stage, reason, self._step)
            return
        changes = self.ledger.eject(accused, reason=Reason.STRIKES, until=until, now=self._wall_clock())
        self._handle(changes, self._step, None)
        if changes:
            self._on_ejected(accused, f"{reason} ({len(accusers)} of {voters})", until)

    def _voters(self, accused: str, stage: int, accusers: Mapping[str, Accusation]) -> str | None:
        """Of whom, in words, the accusers are enough to eject a peer of a stage; None if they are not enough.

        Those are its neighbours, or, for what only siblings see and each proves to itself, the siblings.
        """
        without = self.ejected() | {accused}

        def live(place: int) -> list[str]:
            return [claim.peer for claim in self._view.roster(place, 2**40, without=without)]

        neighbours = [peer for place in neighbouring_stages(stage, self._num_stages) for peer in live(place)]
        if ejects(accused=accused, accusers=accusers, neighbours=neighbours):
            return f"{len(neighbours)} neighbours"
        siblings = live(stage)
        proven = {peer for peer, entry in accusers.items() if entry.reason in PROVEN_BY_SIBLINGS}
        held = self._view.has_held(accused, stage)  # else a majority of any one stage could convict whoever it likes
        if held and convicts(accused=accused, jury=siblings, guilty=proven, live=siblings):
            return f"{len(siblings)} siblings"
        return None

    # verdicts of juries --------------------------------------------------------------

    def jury(self, draw: bytes, accused: str, stage: int, *, asker: str, enlarged: bool = False) -> tuple[str, ...]:
        """Who may judge the accused, in the order drawn by this signature, as far as this node knows.

        Those are its siblings, if there are two at least, and never the peer that asks. Where there are just two, one
        liar among them would leave everything open; an enlarged jury has two peers of the neighbouring stages more.
        It finds out who lied, but does not eject: two of three replicas are needed for that.
        """
        without = self.ejected() | {accused, asker}
        replicas = [claim.peer for claim in self._view.roster(stage, 2**40, without=without)]
        near = neighbouring_stages(stage, self._num_stages)
        reserves = [claim.peer for place in near for claim in self._view.roster(place, 2**40, without=without)]
        least = len(replicas) + 1 if enlarged and len(replicas) == LEAST_JURORS else LEAST_JURORS
        # A hash, since a signature is no uniform number.
        seed = hashlib.sha256(draw).digest()
        return jury(draw=seed, accused=accused, replicas=replicas, reserves=reserves, least=least)

    def consider_verdicts(self, accused: str) -> None:
        """Eject a peer that a jury has found guilty, as far as this node recognises the jurors."""
        if self._config.mode == "off" or self.judged_finally(accused):
            return
        for verdict in self._view.verdicts_on(accused):
            if self._drill is not None and self._drill.spares(accused, verdict.step):
                continue
            # Else a majority of any one stage could convict whoever it likes.
            if not self._view.has_held(accused, verdict.accused_stage):
                continue
            guilty = {juror for juror, _ in verdict.votes}
            drawn = self.jury(verdict.draw, accused, verdict.accused_stage, asker=verdict.writer)
            if convicts(accused=accused, jury=drawn, guilty=guilty, live=drawn):
                self._convict(verdict, votes=len(guilty & set(drawn)), jurors=len(drawn))
                return

    def _convict(self, verdict: Verdict, *, votes: int, jurors: int) -> None:
        accused, now = verdict.accused, self._wall_clock()
        text = f"audit: {verdict.reason} ({votes} of {jurors} jurors)"
        if self.observing:
            self._would_eject.add(accused)
            self._telemetry.would_eject(accused, verdict.accused_stage, text, verdict.step)
            return
        changes = self.ledger.eject(accused, reason=Reason.AUDIT, until=verdict.expires, now=now)
        self._handle(changes, self._step, None)
        if changes:
            self._on_ejected(accused, text, verdict.expires)


def most_common_reason(accusations: list[Accusation]) -> str:
    """The reason that most accusers give; among equals the first in the alphabet."""
    reasons = sorted(entry.reason for entry in accusations)
    return max(reasons, key=reasons.count)
