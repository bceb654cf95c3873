"""One node's part of a training step: nested calls down the pipeline and back.

A microbatch travels as one call a hop. This node checks the activation that came, runs its
forward, awaits the same call on a replica of the next stage, checks the gradient that came
back, runs its backward, and answers with its own gradient. A flagged or failed call is
repeated on another replica; what is not complete is never counted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from node.auditor import Auditor, Case
from node.boundary import Boundary, Incoming, Outgoing
from node.downstream import Downstream
from node.drill import Drill
from node.evidence import EvidenceStore, Kept, KeptInput
from node.guard import FlaggedError, Guard, score_of
from node.jobs import StageJobs
from node.membership import Membership
from node.notices import Notices
from node.stage import StageRunner
from node.telemetry import Telemetry
from node.wiring import Dealer, Wire
from node.work import Returned, Step, Work
from node.worker import ComputeWorker, Priority
from protocol.errors import MessageError, RefusedError, RemoteError
from protocol.fields import decode, encode
from protocol.framing import Buffer
from protocol.hops import check_tokens, sign_tokens
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.messages import Method, Train, Trained
from protocol.receipts import sign_receipt
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport
from verifier.audit import NEAR_FENCE
from verifier.verdicts import Direction

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """What went on to the next stage, and what came back for it."""

    forwarded: Outgoing
    returned: Returned


class Pipeline:
    """Serves and makes the nested calls of one stage."""

    def __init__(
        self,
        *,
        identity: Identity,
        manifest: Manifest,
        stage: int,
        transport: Transport,
        membership: Membership,
        boundary: Boundary,
        guard: Guard,
        auditor: Auditor,
        evidence: EvidenceStore,
        runner: StageRunner,
        worker: ComputeWorker,
        telemetry: Telemetry,
        digest_at: Callable[[int], bytes | None],
        in_flight: int | None = None,
        drill: Drill | None = None,
    ) -> None:
        """``digest_at(step)`` is the digest of this node's parameters in a step, if it still knows it. ``in_flight``:
        how many microbatches fit into its memory, else the manifest's number."""
        self._identity = identity
        self._manifest = manifest
        self._swarm = bytes.fromhex(manifest.swarm_id)
        self._stage = stage
        self._last = manifest.num_stages - 1
        self._membership = membership
        self._boundary = boundary
        self._guard = guard
        self._worker = worker
        self._telemetry = telemetry
        self._auditor = auditor
        self._evidence = evidence
        self._drill = drill
        self._jobs = StageJobs(
            manifest=manifest, stage=stage, boundary=boundary, guard=guard, runner=runner, telemetry=telemetry
        )
        self._downstream = Downstream(
            manifest=manifest,
            stage=stage,
            peers=lambda step: self.peers(stage + 1, step),
            transport=transport,
            membership=membership,
            boundary=boundary,
            guard=guard,
            auditor=auditor,
            jobs=self._jobs,
            worker=worker,
            telemetry=telemetry,
        )
        self.notices = Notices(
            manifest=manifest,
            stage=stage,
            transport=transport,
            membership=membership,
            guard=guard,
            digest_at=digest_at,
        )
        self._step: Step | None = None
        self._next_step = 0
        self._slots = asyncio.Semaphore(in_flight or manifest.network.in_flight)
        self._open_calls: dict[str, int] = {}
        self._tokens_bytes = 4 * manifest.training.sequences_per_microbatch * (manifest.model.context + 1)
        self._next_key = 0
        body_limit = self._tokens_bytes + boundary.body_bytes(Direction.ACTIVATION)
        transport.serve(Method.TRAIN, Route(handler=self._serve_train, body_limit=body_limit, admits=self._admits))

    # the step ------------------------------------------------------------------------

    def expect(self, step: int) -> None:
        """Say which step comes next, so that its first messages may wait for it."""
        self._next_step = step
        self.notices.stand_at(step)

    def begin(self, step: int, parameters: bytes, wires: Sequence[Wire]) -> Step:
        """Start a step; requests that came early go on now."""
        self._step = Step(number=step, parameters=parameters, dealer=Dealer(wires))
        self.expect(step)
        self._membership.notify()
        return self._step

    def finish(self, step: Step) -> None:
        """Close a step: later work of it is refused."""
        step.closed = True
        self._next_step = step.number + 1
        # One step more than jurors keep parameters, so that one who lags finds what it asks for.
        self._evidence.forget_before(step.number - 1)

    @property
    def waiting_reason(self) -> str:
        """Why microbatches do not get on, for people; empty when they do."""
        return self._downstream.waiting_reason

    def peers(self, stage: int, step: int) -> list[str]:
        """Live replicas of a stage that take part in a step and that this node deals with."""
        return [claim.peer for claim in self._membership.view.roster(stage, step, without=self._guard.excluded())]

    def quiet(self, step: Step) -> bool:
        """Whether no microbatch of the step is inside this node."""
        return step.serving == 0

    # work that starts here (stage 0) -------------------------------------------------

    async def train_tokens(self, step: Step, microbatch: int, tokens: torch.Tensor) -> float:
        """Train one microbatch that starts at this node.

        Args:
            tokens: int64 [B, T + 1].

        Returns:
            Its loss.

        Raises:
            UnfinishedError: every replica of the next stage refused this node's work.
        """
        data = tokens.to(torch.int32).numpy().tobytes()
        work = Work(
            microbatch=microbatch,
            tokens=data,
            origin=self._identity.peer_id,
            origin_signature=sign_tokens(
                self._identity, self._swarm, step=step.number, microbatch=microbatch, tokens=data
            ),
            input_hop=None,
        )
        async with self._slots:
            self._telemetry.in_flight(+1)
            key = self._new_key()
            try:
                if self._stage == self._last:
                    loss = await self._worker.run(Priority.FORWARD, self._jobs.train_alone, key, tokens)
                else:
                    outgoing = await self._worker.run(
                        Priority.FORWARD, self._jobs.forward, key, step.number, microbatch, tokens[:, :-1]
                    )
                    returned = await self._downstream.finish(step, work, outgoing)
                    loss = returned.loss
                    await self._worker.run(Priority.BACKWARD, self._jobs.backward_only, key, returned)
            finally:
                self._telemetry.in_flight(-1)
                await self._discard(key)
        self._completed(step, microbatch, loss)
        return loss

    # work that comes from upstream ---------------------------------------------------

    def _admits(self, peer: str) -> bool:
        return self._membership.view.stage_of(peer) == self._stage - 1 and self._guard.allows(peer)

    async def _serve_train(self, request: Request) -> Response:
        message = decode(Train, request.head)
        sender = request.peer
        limit = 2 * self._manifest.network.in_flight
        if self._open_calls.get(sender, 0) >= limit:
            raise RefusedError(f"more than {limit} microbatches of one peer are open", kind="busy")
        self._open_calls[sender] = self._open_calls.get(sender, 0) + 1
        try:
            step = await self._step_of(message.step)
            step.serving += 1
            try:
                return await self._serve_microbatch(step, request, message)
            finally:
                step.serving -= 1
                self._membership.notify()
        except RemoteError as error:
            self._guard.breach(sender, error, message.step, message.microbatch)
            raise
        finally:
            self._open_calls[sender] -= 1

    async def _step_of(self, number: int) -> Step:
        """The step that a message is about, once it has begun."""
        if not self._next_step <= number <= self._next_step + 1:
            raise RefusedError(
                f"step {number} is over or far ahead; this node is at {self._next_step}", kind="wrong_step"
            )

        def begun() -> bool:
            return self._step is not None and self._step.number >= number

        await self._membership.wait_until(begun, 2 * self._manifest.network.hop_timeout_seconds)
        step = self._step
        if step is None or step.number < number:
            raise RefusedError(f"step {number} has not begun here", kind="not_started")
        if step.number > number or step.closed:
            raise RefusedError(f"step {number} is over", kind="wrong_step")
        return step

    async def _serve_microbatch(self, step: Step, request: Request, message: Train) -> Response:
        if message.microbatch >= self._manifest.microbatches_per_step:
            raise MessageError(f"microbatch {message.microbatch} does not exist", kind="size")
        claim = self._membership.view.claims.get(request.peer)
        generation = 0 if claim is None else claim.generation
        step.arrives(request.peer, message.microbatch, message.attempt, generation)
        work, body = self._open(step, request, message)
        async with self._slots:
            self._telemetry.in_flight(+1)
            key = self._new_key()
            try:
                if self._stage == self._last:
                    outgoing, loss, incoming, judged = await self._received(
                        self._jobs.receive_last, key, step, request.peer, message, work, body
                    )
                    passed: Passed | None = None
                else:
                    forwarded, incoming, judged = await self._received(
                        self._jobs.receive, key, step, request.peer, message, work, body
                    )
                    self._evidence.add(
                        step.number,
                        message.microbatch,
                        forwarded.digest,
                        KeptInput(received=body, input_hop=message.hop),
                    )
                    returned = await self._downstream.finish(step, work, forwarded)
                    passed, loss = Passed(forwarded=forwarded, returned=returned), returned.loss
                    outgoing = await self._worker.run(
                        Priority.BACKWARD, self._jobs.backward, key, step.number, message.microbatch, returned
                    )
                self._guard.note(judged, step.number, message.microbatch)
                self.notices.tell_cleared(judged, step.number, message.microbatch)
                await self._worker.run(Priority.CHECK, self._jobs.accept, judged)
            finally:
                self._telemetry.in_flight(-1)
                await self._discard(key)
        if not judged.cleared:
            self._consider_audit(self._case(step, request.peer, message, work, body), score=score_of(judged))
        self._guard.credit(request.peer, step.number)
        self._completed(step, message.microbatch, loss)
        return self._answer(step, message.microbatch, loss, incoming, outgoing, passed, bool(judged.cleared))

    async def _received(
        self,
        job: Callable[[int, int, str, Train, Work, Buffer, int, bool], T],
        key: int,
        step: Step,
        sender: str,
        message: Train,
        work: Work,
        body: Buffer,
    ) -> T:
        """Check an activation and compute with it; one that the statistics flag is computed again by others first.

        Raises:
            RemoteError: it must not be used.
        """
        replicas = len(self.peers(self._stage - 1, step.number))
        arguments = (key, step.number, sender, message, work, body, replicas)
        try:
            return await self._worker.run(Priority.FORWARD, job, *arguments, False)
        except FlaggedError as flag:
            # Strange need not be wrong: it is refused only if it is not what it should be.
            if not await self._auditor.vindicated(self._case(step, sender, message, work, body)):
                raise
            self._guard.excuse(sender, flag, step.number, message.microbatch)
        return await self._worker.run(Priority.FORWARD, job, *arguments, True)

    def _consider_audit(self, case: Case, *, score: float) -> None:
        """Have an odd activation computed again. The sender's own callers audit the rest at random; nobody calls the
        first stage, so the second one does that, too."""
        if self._stage == 1 or score >= NEAR_FENCE:
            self._auditor.consider(case, score=score)

    def _case(self, step: Step, sender: str, message: Train, work: Work, body: Buffer) -> Case:
        return Case(
            accused=sender,
            stage=self._stage - 1,
            step=step.number,
            microbatch=message.microbatch,
            statement=message.hop,
            tensors=(body,),
            tokens=work.tokens,
            origin=work.origin,
            origin_signature=work.origin_signature,
            forward=True,
        )

    def _open(self, step: Step, request: Request, message: Train) -> tuple[Work, Buffer]:
        """Split the body and check the tokens against their origin's signature."""
        view = memoryview(request.body)
        if message.tokens_bytes != self._tokens_bytes or view.nbytes < self._tokens_bytes:
            raise MessageError(f"tokens of {message.tokens_bytes} bytes came, not {self._tokens_bytes}", kind="size")
        tokens = bytes(view[: self._tokens_bytes])
        origin_stage = self._membership.view.stage_of(message.origin)
        if origin_stage is None:
            raise RefusedError("the origin of the tokens has no claim", kind="unknown_peer")
        if origin_stage != 0 or not check_tokens(
            message.origin,
            self._swarm,
            message.origin_signature,
            step=step.number,
            microbatch=message.microbatch,
            tokens=tokens,
        ):
            raise MessageError("the tokens are not signed by a replica of stage 0", kind="origin")
        work = Work(
            microbatch=message.microbatch,
            tokens=tokens,
            origin=message.origin,
            origin_signature=message.origin_signature,
            input_hop=message.hop,
        )
        return work, view[self._tokens_bytes :]

    def _answer(
        self,
        step: Step,
        microbatch: int,
        loss: float,
        incoming: Incoming,
        outgoing: Outgoing,
        passed: Passed | None,
        outlier: bool,
    ) -> Response:
        returned = None if passed is None else passed.returned
        signed_digest = outgoing.digest
        if self._drill is not None:
            signed_digest = self._drill.receipt_digest(signed_digest, step.number)
        receipt = sign_receipt(
            self._identity,
            self._swarm,
            stage=self._stage,
            step=step.number,
            microbatch=microbatch,
            received=incoming.digest,
            sent=b"" if passed is None else passed.forwarded.digest,
            got=b"" if returned is None else returned.incoming.digest,
            returned=signed_digest,
            parameters=step.parameters,
        )
        if passed is not None:
            kept = Kept(sent=passed.forwarded.buffers, got=passed.returned.body, input_receipt=passed.returned.receipt)
            self._evidence.add(step.number, microbatch, outgoing.digest, kept)
        head = Trained(
            loss=loss,
            dtype=outgoing.dtype,
            shape=outgoing.shape,
            hop=outgoing.hop,
            input_hop=None if returned is None else returned.incoming.hop,
            receipt=receipt,
            input_receipt=None if returned is None else returned.receipt,
            outlier=outlier or (returned is not None and returned.outlier),
        )
        return Response(head=encode(head), body=outgoing.buffers)

    def _new_key(self) -> int:
        self._next_key += 1
        return self._next_key

    async def _discard(self, key: int) -> None:
        """Free what a microbatch still holds; also when the task is being cancelled."""
        await asyncio.shield(self._worker.run(Priority.BACKWARD, self._jobs.discard, key))

    def _completed(self, step: Step, microbatch: int, loss: float) -> None:
        step.losses[microbatch] = loss
        self._telemetry.completed(step.number, microbatch)
