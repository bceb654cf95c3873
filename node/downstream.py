"""The call to the next stage: who is tried, in which order, and what is made of their answers."""

from __future__ import annotations

import time
from collections.abc import Callable

from node.auditor import Auditor, Case
from node.boundary import Boundary, Outgoing
from node.guard import Guard, score_of
from node.jobs import StageJobs
from node.membership import Membership
from node.refusal_kinds import NOT_READY, PASSING
from node.telemetry import Telemetry
from node.work import Returned, Step, UnfinishedError, Work
from node.worker import ComputeWorker, Priority
from protocol.errors import RemoteError, SentinelError
from protocol.fields import decode
from protocol.framing import Buffer
from protocol.manifest import Manifest
from protocol.messages import Method, Train, Trained
from protocol.transports.sessions import Transport
from verifier.verdicts import Direction, Reason

MAX_ATTEMPTS = 64
"""Calls for one microbatch that fail, of a peer that is there."""


class Downstream:
    """The next stage, as a node of ``stage`` uses it."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        stage: int,
        peers: Callable[[int], list[str]],
        transport: Transport,
        membership: Membership,
        boundary: Boundary,
        guard: Guard,
        auditor: Auditor,
        jobs: StageJobs,
        worker: ComputeWorker,
        telemetry: Telemetry,
    ) -> None:
        """``peers(step)`` lists the replicas of the next stage that this node deals with in a step."""
        self._manifest = manifest
        self._stage = stage
        self._last = manifest.num_stages - 1
        self._peers = peers
        self._transport = transport
        self._membership = membership
        self._boundary = boundary
        self._guard = guard
        self._auditor = auditor
        self._jobs = jobs
        self._worker = worker
        self._telemetry = telemetry
        self.waiting_reason = ""
        """Why microbatches do not get on, for people; empty when they do."""

    async def finish(self, step: Step, work: Work, outgoing: Outgoing) -> Returned:
        """Have a replica of the next stage finish the microbatch; tries all, the wired ones first.

        Raises:
            UnfinishedError: every replica refused it, or none could be reached in time.
        """
        refused: dict[str, str] = {}
        passing: set[str] = set()
        dealt = False
        deadline = time.monotonic() + self._call_seconds()
        attempts = 0  # waiting is none: a stage may lack replicas for hours
        while attempts < MAX_ATTEMPTS:
            live = [peer for peer in self._peers(step.number) if peer not in refused]
            candidates = [peer for peer in step.dealer.order(live) if peer not in passing]
            # Whoever was struck in this step comes last in it: each refused gradient costs all the work below.
            candidates.sort(key=lambda peer: self._guard.struck_in(peer, step.number))
            if not candidates:
                if not live and refused:
                    break
                await self._wait_for_downstream(step, refused, passing, deadline)
                passing.clear()
                continue
            peer = candidates[0]
            if not dealt:
                step.dealer.deal(peer)
                dealt = True
            try:
                attempt = step.next_attempt(work.microbatch)
                returned = await self._call_downstream(step, work, outgoing, peer, attempt)
            except RemoteError as error:
                attempts += error.kind not in NOT_READY
                if error.kind in PASSING:
                    passing.add(peer)
                    if error.kind in ("not_admitted", "unknown_peer"):
                        await self._membership.introduce(peer)
                else:
                    refused[peer] = error.kind
                self._telemetry.retried(work.microbatch, step.number, peer, error)
                continue
            except SentinelError as error:
                attempts += 1
                passing.add(peer)
                self._telemetry.retried(work.microbatch, step.number, peer, error)
                continue
            for other, kind in refused.items():
                if kind == UnfinishedError.default_kind and not returned.outlier:
                    # Another replica has completed the very same microbatch, so it could be done.
                    self._guard.strike(other, Reason.UNFINISHED, step.number)
            self._guard.credit(returned.peer, step.number)
            self._guard.note(returned.judged, step.number, work.microbatch)
            await self._worker.run(Priority.CHECK, self._jobs.accept, returned.judged)
            return returned
        kinds = ", ".join(sorted(set(refused.values()))) or "no replica answers"
        raise UnfinishedError(f"no replica of stage {self._stage + 1} completed microbatch {work.microbatch}: {kinds}")

    async def _wait_for_downstream(
        self, step: Step, refused: dict[str, str], passing: set[str], deadline: float
    ) -> None:
        """Wait for a change in the next stage. Stage 0 waits as long as it takes: its work is not lost."""
        if self._stage > 0 and time.monotonic() > deadline:
            raise UnfinishedError(f"no replica of stage {self._stage + 1} could be reached")
        stage = self._stage + 1
        if not self._peers(step.number):
            self.waiting_reason = f"stage {stage} has no replica; waiting for a volunteer"

        def fresh() -> bool:
            return any(peer not in refused and peer not in passing for peer in self._peers(step.number))

        await self._membership.wait_until(fresh, 1.0)
        self.waiting_reason = ""

    def _call_seconds(self) -> float:
        """Time for the call to the next stage: longer the more hops lie below it."""
        return self._manifest.network.hop_timeout_seconds * (self._last - self._stage + 1)

    async def _call_downstream(self, step: Step, work: Work, outgoing: Outgoing, peer: str, attempt: int) -> Returned:
        message = Train(
            step=step.number,
            microbatch=work.microbatch,
            attempt=attempt,
            origin=work.origin,
            origin_signature=work.origin_signature,
            tokens_bytes=len(work.tokens),
            dtype=outgoing.dtype,
            shape=outgoing.shape,
            hop=outgoing.hop,
            input_hop=work.input_hop,
        )
        with self._telemetry.phase("wait"):
            response = await self._transport.call(
                peer,
                Method.TRAIN,
                message,
                (work.tokens, *outgoing.buffers),
                timeout=self._call_seconds(),
                reply_limit=self._boundary.body_bytes(Direction.GRADIENT),
            )
        try:
            trained = decode(Trained, response.head)
            arrival = await self._worker.run(
                Priority.BACKWARD,
                self._jobs.receive_gradient,
                step.number,
                work.microbatch,
                peer,
                trained,
                response.data,
                outgoing.digest,
                len(self._peers(step.number)),
            )
            case = self._case(step, work, outgoing, peer, trained, response.data)
            judged = arrival.judged
            if judged is None:
                assert arrival.flag is not None
                # Strange need not be wrong: it is refused only if it is not what it should be.
                if not await self._auditor.vindicated(case):
                    raise arrival.flag
                self._guard.excuse(peer, arrival.flag, step.number, work.microbatch)
                judged = await self._worker.run(
                    Priority.BACKWARD,
                    self._jobs.excuse,
                    step.number,
                    work.microbatch,
                    peer,
                    arrival.incoming,
                    len(self._peers(step.number)),
                )
            else:
                self._auditor.consider(case, score=score_of(judged))
        except RemoteError as error:
            self._guard.breach(peer, error, step.number, work.microbatch)
            raise
        return Returned(
            loss=trained.loss,
            incoming=arrival.incoming,
            judged=judged,
            peer=peer,
            body=response.data,
            receipt=trained.receipt,
            outlier=trained.outlier or bool(judged.cleared),
        )

    def _case(self, step: Step, work: Work, outgoing: Outgoing, peer: str, trained: Trained, body: Buffer) -> Case:
        return Case(
            accused=peer,
            stage=self._stage + 1,
            step=step.number,
            microbatch=work.microbatch,
            statement=trained.receipt,
            tensors=(*outgoing.buffers, body),
            tokens=work.tokens,
            origin=work.origin,
            origin_signature=work.origin_signature,
        )
