"""Having peers' work computed again: when, by whom, and what follows from it.

Whoever holds a signed statement of a peer, and the tensors that it is about, may open a *case*. One juror
computes the microbatch again. If it finds the work honest, that is all. If not, the rest of the jury is asked,
and its majority decides: against the accused, whom the signed votes eject everywhere; or against the juror who
cried wolf. The jury is drawn by a signature that the accused cannot foresee.

Cases run beside the training and wait for the jurors' idle time; what cannot be settled while the parameters are
kept expires, and is counted.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakValueDictionary

from node.drill import Drill
from node.evidence import open_input, open_passed_on
from node.guard import Guard
from node.membership import Membership
from node.telemetry import Telemetry
from protocol.errors import MessageError, RemoteError, SentinelError
from protocol.fields import decode
from protocol.framing import Buffer
from protocol.hops import read_hop
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.messages import Audit, AuditAnswer, Evidence, EvidenceAnswer, Method
from protocol.receipts import check_vote, open_receipt, sign_draw, statement_digest
from protocol.records import MAX_VOTES, Verdict, sign_verdict
from protocol.tensors import WireDtype, encoded_bytes
from protocol.transports.sessions import Transport
from verifier.audit import audit_chance
from verifier.quorum import convicts
from verifier.verdicts import Reason

log = logging.getLogger(__name__)

MAX_OPEN_CASES = 8
FIRST_JURORS = 3
"""Drawn jurors that are asked, one after another, until one has an answer."""
VOUCHERS = 2
"""Jurors who have to vouch for a tensor that was flagged: one alone could be in league with its sender."""
FOLLOW_CHANCE = 0.25
"""How often an audit that found nothing goes on with the stage below: two neighbours who collude audit each other
never, but whoever calls the first of them can follow the receipts down to the second."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One microbatch of one peer, as the peer that opens the case saw it."""

    accused: str
    stage: int
    step: int
    microbatch: int
    statement: bytes
    """The accused's packed receipt, or the packed hop of an activation that it sent."""
    tensors: tuple[Buffer, ...]
    """As they travelled. With a receipt: what the accused received and what it returned; with a hop: what it sent."""
    tokens: bytes
    origin: str
    origin_signature: bytes
    forward: bool = False
    """Whether the statement is a hop."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vote:
    guilty: bool
    reason: str
    signature: bytes


class Auditor:
    """Opens cases and sees them through."""

    def __init__(
        self,
        *,
        identity: Identity,
        manifest: Manifest,
        transport: Transport,
        membership: Membership,
        guard: Guard,
        telemetry: Telemetry,
        drill: Drill | None,
        publish: Callable[[bytes, Verdict], None],
        chance: Callable[[], float] = random.random,
    ) -> None:
        """``publish(signed bytes, verdict)`` tells the swarm; ``chance()`` draws from [0, 1)."""
        self._identity = identity
        self._manifest = manifest
        self._swarm = bytes.fromhex(manifest.swarm_id)
        self._last = manifest.num_stages - 1
        self._transport = transport
        self._membership = membership
        self._guard = guard
        self._telemetry = telemetry
        self._drill = drill
        self._publish = publish
        self._chance = chance
        self._open: dict[str, asyncio.Task[None]] = {}
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        settings = manifest.verifier
        self._rate = settings.audit_rate if settings.audits else 0.0
        self._suspicion = settings.audit_suspicion
        shape = manifest.activation_shape
        self._activation_bytes = encoded_bytes(shape, WireDtype(manifest.wire.activation_dtype))
        self._gradient_bytes = encoded_bytes(shape, WireDtype(manifest.wire.gradient_dtype))

    @property
    def open_cases(self) -> int:
        """Cases that are not settled yet."""
        return len(self._open)

    def consider(self, case: Case, *, score: float) -> None:
        """Open the case if chance, or suspicion, wants it. ``score``: the tensor's largest statistic by its fence."""
        if self._rate <= 0.0 or self._guard.judged_finally(case.accused):
            return
        if self._drill is not None and self._drill.spares(case.accused, case.step):
            return
        chance = audit_chance(
            rate=self._rate, suspicion=self._suspicion, suspect=self._guard.unproven(case.accused), score=score
        )
        if self._chance() < chance:
            self._begin(case)

    async def vindicated(self, case: Case) -> bool:
        """Whether a tensor that the statistics would refuse is right after all.

        It is computed again, and so is what it was made from, up to where the microbatch began: an honest replica
        makes something strange of something false. False as well if that cannot be settled in time.
        """
        if self._rate <= 0.0:
            return False
        lock = self._locks.setdefault(case.accused, asyncio.Lock())
        try:
            async with asyncio.timeout(self._manifest.network.hop_timeout_seconds), lock:
                following: Case | None = case
                while following is not None:
                    if self._guard.judged_finally(following.accused):
                        return False
                    outcome = await self._settle(following, needed=VOUCHERS)
                    self._telemetry.audited(outcome)
                    if outcome != "honest":
                        return False
                    following = await (self._before if case.forward else self._below)(following)
        except TimeoutError:
            self._telemetry.audited("expired")
            return False
        except SentinelError as error:
            log.debug("a flag on %s could not be settled: %s", case.accused[-8:], error)
            return False
        return True

    async def close(self) -> None:
        """Drop what is open."""
        tasks = list(self._open.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # one case ------------------------------------------------------------------------

    def _begin(self, case: Case) -> None:
        if case.accused in self._open:
            return  # its outcome comes soon enough
        if len(self._open) >= MAX_OPEN_CASES:
            self._telemetry.audited("skipped")
            return
        task = asyncio.get_running_loop().create_task(self._run(case))
        self._open[case.accused] = task
        task.add_done_callback(lambda _: self._open.pop(case.accused, None))

    async def _run(self, case: Case) -> None:
        started = time.monotonic()
        try:
            outcome = await self._settle(case)
            if outcome == "honest":
                await self._follow(case)
        except SentinelError as error:
            log.debug("the audit of %s failed: %s", case.accused[-8:], error)
            outcome = "inconclusive"
        self._telemetry.audited(outcome, time.monotonic() - started)

    async def _settle(self, case: Case, *, needed: int = 1) -> str:
        """See a case through; returns how it ended, a word for the metric.

        ``needed`` jurors have to find the work honest before it passes; one who does not brings the whole jury in.
        """
        subject = statement_digest(case.statement)
        draw = sign_draw(self._identity, self._swarm, subject)
        me = self._identity.peer_id
        jury = self._guard.jury(draw, case.accused, case.stage, asker=me)
        votes: dict[str, _Vote] = {}
        refusals: list[str] = []
        for juror in jury[: FIRST_JURORS + needed - 1]:
            vote = await self._ask(juror, case, draw, subject, refusals)
            if vote is not None:
                votes[juror] = vote
                if vote.guilty or len(votes) == needed:
                    break
        if not any(vote.guilty for vote in votes.values()):
            return "honest" if len(votes) >= needed else self._unsettled(case, refusals)
        settled: list[str] = []
        for enlarged in (False, True):
            jury = self._guard.jury(draw, case.accused, case.stage, asker=me, enlarged=enlarged)
            rest = [juror for juror in jury if juror not in (*votes, *settled)]
            answers = await asyncio.gather(*(self._ask(juror, case, draw, subject, refusals) for juror in rest))
            votes |= {juror: vote for juror, vote in zip(rest, answers, strict=True) if vote is not None}
            settled += rest
            outcome = self._decide(case, draw, subject, jury, votes, enlarged=enlarged)
            if outcome:
                return outcome
        return "disputed"

    def _decide(
        self,
        case: Case,
        draw: bytes,
        subject: bytes,
        jury: Sequence[str],
        votes: dict[str, _Vote],
        *,
        enlarged: bool,
    ) -> str:
        """What the jury has found, once a majority of it agrees; else nothing."""
        guilty = {juror: vote for juror, vote in votes.items() if vote.guilty}
        honest = votes.keys() - guilty.keys()
        # Who has left since the draw does not acquit by its silence.
        live = [juror for juror in jury if self._membership.view.stage_of(juror) is not None]
        if convicts(accused=case.accused, jury=jury, guilty=guilty, live=live):
            if enlarged:
                self._guard.condemn(case.accused, Reason.AUDIT, case.step, detail="computed again, it differs")
            else:
                self._publish_verdict(case, draw, subject, guilty)
            for juror in honest:
                self._guard.condemn(juror, Reason.FALSE_VOTE, case.step, detail="it acquitted whom its jury convicted")
            return "guilty"
        if 2 * len(honest) > len(votes):
            for juror in guilty:
                self._guard.condemn(juror, Reason.FALSE_VOTE, case.step, detail="it convicted whom its jury acquitted")
            return "honest"
        return ""

    def _publish_verdict(self, case: Case, draw: bytes, subject: bytes, guilty: Mapping[str, _Vote]) -> None:
        reasons = sorted(vote.reason for vote in guilty.values())
        verdict = Verdict(
            swarm=self._swarm,
            writer=self._identity.peer_id,
            accused=case.accused,
            accused_stage=case.stage,
            reason=max(reasons, key=reasons.count),
            step=case.step,
            subject=subject,
            draw=draw,
            votes=tuple((juror, vote.signature) for juror, vote in guilty.items())[:MAX_VOTES],
            expires=time.time() + self._manifest.verifier.ejection_seconds,
        )
        self._publish(sign_verdict(self._identity, verdict), verdict)

    def _unsettled(self, case: Case, refusals: list[str]) -> str:
        if refusals.count("parameters") > 1:
            # Whoever computes with other parameters than its siblings is found out by all of them.
            self._guard.strike(case.accused, Reason.PARAMETERS, case.step, detail="its parameters are not its stage's")
            return "parameters"
        if "expired" in refusals:
            return "expired"
        if len(refusals) > 1 and set(refusals) == {"inconclusive"}:
            # Several jurors could not get its evidence: it is in trouble, or evades. Once is forgiven.
            self._guard.strike(case.accused, Reason.AUDIT, case.step, detail="it shows no evidence of its work")
        return "inconclusive"

    async def _ask(self, juror: str, case: Case, draw: bytes, subject: bytes, refusals: list[str]) -> _Vote | None:
        wants_tokens = case.stage in (0, self._last)
        message = Audit(
            statement=case.statement,
            draw=draw,
            origin=case.origin if wants_tokens else "",
            origin_signature=case.origin_signature if wants_tokens else b"",
            tokens_bytes=len(case.tokens) if wants_tokens else 0,
        )
        body = (*case.tensors, case.tokens) if wants_tokens else case.tensors
        try:
            response = await self._transport.call(
                juror, Method.AUDIT, message, body, timeout=3 * self._manifest.network.hop_timeout_seconds
            )
            answer = decode(AuditAnswer, response.head)
            signed = check_vote(
                juror, self._swarm, answer.signature, subject=subject, accused=case.accused, guilty=answer.guilty
            )
            if not signed:
                raise MessageError("a vote is not signed by its juror", kind="receipt")
        except RemoteError as error:
            log.debug("juror %s does not vote: %s", juror[-8:], error)
            refusals.append(error.kind)
            return None
        except SentinelError as error:
            log.debug("juror %s was not reached: %s", juror[-8:], error)
            return None
        return _Vote(guilty=answer.guilty, reason=answer.reason or "activation", signature=answer.signature)

    # further down --------------------------------------------------------------------

    async def _follow(self, case: Case) -> None:
        """Go on with the stage below now and then: two neighbours in league would never audit each other."""
        if case.forward or self._chance() >= FOLLOW_CHANCE:
            return
        further = await self._below(case)
        if further is None or further.accused == self._identity.peer_id or further.accused in self._open:
            return
        if not self._guard.judged_finally(further.accused):
            self._begin(further)

    async def _before(self, case: Case) -> Case | None:
        """The case against who sent the accused its input."""
        if case.stage == 0:
            return None
        sketch_bytes = 4 * self._manifest.verifier.sketch_size
        hop = read_hop(case.statement, self._swarm, sketch_bytes=sketch_bytes)
        response = await self._transport.call(
            case.accused,
            Method.EVIDENCE,
            Evidence(step=case.step, microbatch=case.microbatch, sent=hop.digest),
            timeout=self._manifest.network.hop_timeout_seconds,
            reply_limit=self._activation_bytes,
        )
        answer = decode(EvidenceAnswer, response.head)
        above = open_input(
            answer,
            response.data,
            self._swarm,
            stage=case.stage,
            step=case.step,
            microbatch=case.microbatch,
            source=hop.source,
            sketch_bytes=sketch_bytes,
        )
        return replace(
            case, accused=above.peer, stage=above.stage, statement=answer.input_hop, tensors=(response.data,)
        )

    async def _below(self, case: Case) -> Case | None:
        """The case against who returned the accused its gradient."""
        if case.stage == self._last:
            return None
        receipt = open_receipt(case.statement, self._swarm)
        response = await self._transport.call(
            case.accused,
            Method.EVIDENCE,
            Evidence(step=case.step, microbatch=case.microbatch, returned=receipt.returned),
            timeout=self._manifest.network.hop_timeout_seconds,
            reply_limit=self._activation_bytes + self._gradient_bytes,
        )
        answer = decode(EvidenceAnswer, response.head)
        below, sent, got = open_passed_on(
            answer, response.data, self._swarm, of=receipt, activation_bytes=self._activation_bytes
        )
        return replace(case, accused=below.peer, stage=below.stage, statement=answer.input_receipt, tensors=(sent, got))
