"""One node's part of a training step: nested calls down the pipeline and back.

A microbatch travels as one call a hop. This node checks the activation that came, runs its
forward, awaits the same call on a replica of the next stage, checks the gradient that came
back, runs its backward, and answers with its own gradient. A flagged or failed call is
repeated on another replica; what is not complete is never counted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from node.barrier import EndBarrier
from node.boundary import Boundary, Incoming, Outgoing
from node.guard import Guard, Judged
from node.membership import Membership
from node.stage import StageRunner
from node.telemetry import Telemetry
from node.wiring import Dealer, Wire
from node.worker import ComputeWorker, Priority
from protocol.errors import MessageError, RefusedError, RemoteError, SentinelError
from protocol.fields import decode, encode
from protocol.framing import Buffer
from protocol.hops import check_receipt, check_tokens, sign_receipt, sign_tokens
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.messages import Cleared, End, Method, Train, Trained
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport
from verifier.verdicts import Direction, Reason

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 64
MAX_CLEARED_HOPS = 16
FORGIVABLE = frozenset({"busy", "wrong_step", "not_admitted", "unknown_peer", "unavailable", "not_started", "method"})
"""Refusals that pass: they say nothing about this node's work, and are tried again after a change."""


class UnfinishedError(RefusedError):
    """No replica of the next stage completed the microbatch."""

    default_kind = "unfinished"


@dataclass(slots=True)
class Step:
    """What this node knows of the step that it is in."""

    number: int
    parameters: bytes
    """Digest of this node's parameters during the step; goes into its receipts."""
    dealer: Dealer
    started: float = field(default_factory=time.monotonic)
    serving: int = 0
    closed: bool = False
    seen: set[tuple[str, int, int]] = field(default_factory=set)
    trained: set[int] = field(default_factory=set)
    losses: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One microbatch as it passes through this node."""

    microbatch: int
    tokens: bytes
    """int32 little endian [B, T + 1]: inputs and, shifted by one, labels."""
    origin: str
    origin_signature: bytes
    input_hop: bytes | None
    """The hop of the activation that this node received; None at stage 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Returned:
    """A gradient that came back and was accepted."""

    loss: float
    incoming: Incoming
    judged: Judged
    peer: str
    outlier: bool
    """Whether the microbatch was flagged further down and then cleared."""


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
        runner: StageRunner,
        worker: ComputeWorker,
        telemetry: Telemetry,
    ) -> None:
        self._identity = identity
        self._manifest = manifest
        self._swarm = bytes.fromhex(manifest.swarm_id)
        self._stage = stage
        self._last = manifest.num_stages - 1
        self._transport = transport
        self._membership = membership
        self._boundary = boundary
        self._guard = guard
        self._runner = runner
        self._worker = worker
        self._telemetry = telemetry
        self._step: Step | None = None
        self._next_step = 0
        self._barriers: dict[int, EndBarrier] = {}
        self._slots = asyncio.Semaphore(manifest.network.in_flight)
        self._open_calls: dict[str, int] = {}
        self._tokens_bytes = 4 * manifest.training.sequences_per_microbatch * (manifest.model.context + 1)
        self._next_key = 0
        self._notices: set[asyncio.Task[None]] = set()
        self.waiting_reason = ""
        body_limit = self._tokens_bytes + boundary.body_bytes(Direction.ACTIVATION)
        transport.serve(Method.TRAIN, Route(handler=self._serve_train, body_limit=body_limit, admits=self._admits))
        transport.serve(Method.END, Route(handler=self._serve_end, admits=self._admits))
        transport.serve(Method.CLEARED, Route(handler=self._serve_cleared, admits=self._is_sibling))

    # the step ------------------------------------------------------------------------

    def expect(self, step: int) -> None:
        """Say which step comes next, so that its first messages may wait for it."""
        self._next_step = step

    def begin(self, step: int, parameters: bytes, wires: Sequence[Wire]) -> Step:
        """Start a step; requests that came early go on now."""
        self._step = Step(number=step, parameters=parameters, dealer=Dealer(wires))
        self._next_step = step
        for old in [number for number in self._barriers if number < step]:
            del self._barriers[old]
        self._membership.notify()
        return self._step

    def finish(self, step: Step) -> None:
        """Close a step: later work of it is refused."""
        step.closed = True
        self._next_step = step.number + 1

    def barrier(self, step: int) -> EndBarrier:
        """The ENDs of a step."""
        return self._barriers.setdefault(step, EndBarrier())

    def peers(self, stage: int, step: int) -> list[str]:
        """Live replicas of a stage that take part in a step and that this node deals with."""
        return [claim.peer for claim in self._membership.view.roster(stage, step, without=self._guard.excluded())]

    def quiet(self, step: Step) -> bool:
        """Whether no microbatch of the step is inside this node."""
        return step.serving == 0

    async def send_end(self, step: int, loss: float, microbatches: int) -> None:
        """Tell every replica of the next stage that no more work comes; repeats until each took it or left."""
        message = End(step=step, loss=loss, microbatches=microbatches)
        told: set[str] = set()

        async def tell(peer: str) -> None:
            try:
                await self._transport.call(
                    peer, Method.END, message, timeout=self._manifest.network.hop_timeout_seconds
                )
                told.add(peer)
            except RemoteError as error:
                log.debug("peer %s refused the end of step %d: %s", peer[-8:], step, error)
                told.add(peer)
            except SentinelError as error:
                log.debug("peer %s did not take the end of step %d: %s", peer[-8:], step, error)

        def untold() -> list[str]:
            # Also to those that only this node has quarantined: END is no work, and whoever waited for it
            # in vain would hold up the stages below.
            roster = self._membership.view.roster(self._stage + 1, step, without=self._guard.ejected())
            return [claim.peer for claim in roster if claim.peer not in told]

        while self._next_step <= step + 1:
            await asyncio.gather(*map(tell, untold()))
            # A replica that could not be told is dialled anew by the membership, or is found to be gone.
            await self._membership.wait_until(lambda: bool(untold()), 2.0)

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
                    loss = await self._worker.run(Priority.FORWARD, self._train_alone, key, tokens)
                else:
                    outgoing = await self._worker.run(
                        Priority.FORWARD, self._forward, key, step.number, microbatch, tokens[:, :-1]
                    )
                    returned = await self._downstream(step, work, outgoing)
                    loss = returned.loss
                    await self._worker.run(Priority.BACKWARD, self._backward_only, key, returned)
            finally:
                self._telemetry.in_flight(-1)
                await self._discard(key)
        self._completed(step, microbatch, loss)
        return loss

    # work that comes from upstream ---------------------------------------------------

    def _admits(self, peer: str) -> bool:
        return self._membership.view.stage_of(peer) == self._stage - 1 and self._guard.allows(peer)

    def _is_sibling(self, peer: str) -> bool:
        return self._membership.view.stage_of(peer) == self._stage and self._guard.allows(peer)

    async def _serve_end(self, request: Request) -> Response:
        message = decode(End, request.head)
        if not self._next_step - 1 <= message.step <= self._next_step + 1:
            raise RefusedError(f"step {message.step} is not the present one", kind="wrong_step")
        self.barrier(message.step).end(request.peer, message.loss)
        self._membership.notify()
        return Response()

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
        identity = (request.peer, message.microbatch, message.attempt)
        if identity in step.seen:
            raise MessageError("a microbatch came twice in the same attempt", kind="repeated")
        if message.microbatch >= self._manifest.microbatches_per_step:
            raise MessageError(f"microbatch {message.microbatch} does not exist", kind="size")
        step.seen.add(identity)
        work, body = self._open(step, request, message)
        replicas = len(self.peers(self._stage - 1, step.number))
        async with self._slots:
            self._telemetry.in_flight(+1)
            key = self._new_key()
            try:
                if self._stage == self._last:
                    outgoing, loss, incoming, judged = await self._worker.run(
                        Priority.FORWARD,
                        self._receive_last,
                        key,
                        step.number,
                        request.peer,
                        message,
                        work,
                        body,
                        replicas,
                    )
                    input_hop, outlier = None, False
                else:
                    forwarded, incoming, judged = await self._worker.run(
                        Priority.FORWARD, self._receive, key, step.number, request.peer, message, body, replicas
                    )
                    returned = await self._downstream(step, work, forwarded)
                    loss, input_hop, outlier = returned.loss, returned.incoming.hop, returned.outlier
                    outgoing = await self._worker.run(
                        Priority.BACKWARD, self._backward, key, step.number, message.microbatch, returned
                    )
                self._guard.note(judged, step.number, message.microbatch)
                self._tell_cleared(judged, step.number, message.microbatch)
                await self._worker.run(Priority.CHECK, self._guard.accept, judged)
            finally:
                self._telemetry.in_flight(-1)
                await self._discard(key)
        self._guard.credit(request.peer, step.number)
        self._completed(step, message.microbatch, loss)
        outlier = outlier or bool(judged.cleared)
        return self._answer(step, message.microbatch, loss, incoming, outgoing, input_hop, outlier)

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
        input_hop: bytes | None,
        outlier: bool,
    ) -> Response:
        receipt = sign_receipt(
            self._identity,
            self._swarm,
            step=step.number,
            microbatch=microbatch,
            received=incoming.digest,
            returned=outgoing.digest,
            parameters=step.parameters,
        )
        head = Trained(
            loss=loss,
            dtype=outgoing.dtype,
            shape=outgoing.shape,
            hop=outgoing.hop,
            input_hop=input_hop,
            receipt=receipt,
            parameters=step.parameters,
            outlier=outlier,
        )
        return Response(head=encode(head), body=outgoing.buffers)

    # the call to the next stage ------------------------------------------------------

    async def _downstream(self, step: Step, work: Work, outgoing: Outgoing) -> Returned:
        """Have a replica of the next stage finish the microbatch; tries all, the wired ones first."""
        refused: dict[str, str] = {}
        passing: set[str] = set()
        dealt = False
        deadline = time.monotonic() + self._call_seconds()
        for attempt in range(MAX_ATTEMPTS):
            live = [peer for peer in self.peers(self._stage + 1, step.number) if peer not in refused]
            candidates = [peer for peer in step.dealer.order(live) if peer not in passing]
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
                returned = await self._call_downstream(step, work, outgoing, peer, attempt)
            except RemoteError as error:
                if error.kind in FORGIVABLE:
                    passing.add(peer)
                    if error.kind in ("not_admitted", "unknown_peer"):
                        await self._membership.introduce(peer)
                else:
                    refused[peer] = error.kind
                self._telemetry.retried(work.microbatch, step.number, peer, error)
                continue
            except SentinelError as error:
                passing.add(peer)
                self._telemetry.retried(work.microbatch, step.number, peer, error)
                continue
            for other, kind in refused.items():
                if kind == UnfinishedError.default_kind and not returned.outlier:
                    # Another replica has completed the very same microbatch, so it could be done.
                    self._guard.strike(other, Reason.UNFINISHED, step.number)
            self._guard.credit(returned.peer, step.number)
            self._guard.note(returned.judged, step.number, work.microbatch)
            await self._worker.run(Priority.CHECK, self._guard.accept, returned.judged)
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
        if not self.peers(stage, step.number):
            self.waiting_reason = f"stage {stage} has no replica; waiting for a volunteer"

        def fresh() -> bool:
            return any(peer not in refused and peer not in passing for peer in self.peers(stage, step.number))

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
            incoming, judged = await self._worker.run(
                Priority.BACKWARD,
                self._receive_gradient,
                step.number,
                work.microbatch,
                peer,
                trained,
                response.data,
                len(self.peers(self._stage + 1, step.number)),
            )
            if not check_receipt(
                peer,
                self._swarm,
                trained.receipt,
                step=step.number,
                microbatch=work.microbatch,
                received=outgoing.digest,
                returned=incoming.digest,
                parameters=trained.parameters,
            ):
                raise MessageError("a receipt does not fit what was sent and returned", kind="receipt")
        except RemoteError as error:
            self._guard.breach(peer, error, step.number, work.microbatch)
            raise
        outlier = trained.outlier or bool(judged.cleared)
        return Returned(loss=trained.loss, incoming=incoming, judged=judged, peer=peer, outlier=outlier)

    # in the compute thread -----------------------------------------------------------

    def _forward(self, key: int, step: int, microbatch: int, value: torch.Tensor) -> Outgoing:
        with self._telemetry.phase("forward"):
            output = self._runner.forward(key, value)
        with self._telemetry.phase("send"):
            return self._boundary.outgoing(output, step=step, microbatch=microbatch, direction=Direction.ACTIVATION)

    def _take_activation(
        self, step: int, sender: str, message: Train, body: Buffer, replicas: int
    ) -> tuple[Incoming, Judged]:
        with self._telemetry.phase("check"):
            incoming = self._boundary.incoming(
                body,
                dtype=message.dtype,
                shape=message.shape,
                hop=message.hop,
                input_hop=message.input_hop,
                sender=sender,
                step=step,
                microbatch=message.microbatch,
                direction=Direction.ACTIVATION,
            )
            judged = self._guard.judge(
                incoming,
                sender=sender,
                step=step,
                microbatch=message.microbatch,
                direction=Direction.ACTIVATION,
                replicas=replicas,
            )
            return incoming, judged

    def _receive(
        self, key: int, step: int, sender: str, message: Train, body: Buffer, replicas: int
    ) -> tuple[Outgoing, Incoming, Judged]:
        incoming, judged = self._take_activation(step, sender, message, body, replicas)
        return self._forward(key, step, message.microbatch, incoming.tensor), incoming, judged

    def _receive_last(
        self, key: int, step: int, sender: str, message: Train, work: Work, body: Buffer, replicas: int
    ) -> tuple[Outgoing, float, Incoming, Judged]:
        incoming, judged = self._take_activation(step, sender, message, body, replicas)
        training = self._manifest.training
        tokens = torch.frombuffer(bytearray(work.tokens), dtype=torch.int32).long()
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._manifest.model.vocab_size:
            raise MessageError("a token is outside the vocabulary", kind="origin")
        targets = tokens.view(training.sequences_per_microbatch, -1)[:, 1:]
        with self._telemetry.phase("forward"):
            loss, gradient = self._runner.forward_backward(key, incoming.tensor, targets)
        with self._telemetry.phase("send"):
            outgoing = self._boundary.outgoing(
                gradient, step=step, microbatch=message.microbatch, direction=Direction.GRADIENT
            )
        return outgoing, loss, incoming, judged

    def _receive_gradient(
        self, step: int, microbatch: int, peer: str, trained: Trained, body: Buffer, replicas: int
    ) -> tuple[Incoming, Judged]:
        with self._telemetry.phase("check"):
            incoming = self._boundary.incoming(
                body,
                dtype=trained.dtype,
                shape=trained.shape,
                hop=trained.hop,
                input_hop=trained.input_hop,
                sender=peer,
                step=step,
                microbatch=microbatch,
                direction=Direction.GRADIENT,
            )
            judged = self._guard.judge(
                incoming,
                sender=peer,
                step=step,
                microbatch=microbatch,
                direction=Direction.GRADIENT,
                replicas=replicas,
            )
            return incoming, judged

    def _backward(self, key: int, step: int, microbatch: int, returned: Returned) -> Outgoing:
        with self._telemetry.phase("backward"):
            gradient = self._runner.backward(key, returned.incoming.tensor)
        assert gradient is not None
        with self._telemetry.phase("send"):
            return self._boundary.outgoing(gradient, step=step, microbatch=microbatch, direction=Direction.GRADIENT)

    def _train_alone(self, key: int, tokens: torch.Tensor) -> float:
        """Both ways through the only stage that there is."""
        with self._telemetry.phase("forward"):
            loss = self._runner.forward(key, tokens[:, :-1], tokens[:, 1:])
        with self._telemetry.phase("backward"):
            self._runner.backward(key, None)
        return loss

    def _backward_only(self, key: int, returned: Returned) -> None:
        with self._telemetry.phase("backward"):
            self._runner.backward(key, returned.incoming.tensor)

    # clearance -----------------------------------------------------------------------

    def _tell_cleared(self, judged: Judged, step: int, microbatch: int) -> None:
        """Show the siblings that what they may have flagged was the content of a microbatch."""
        if not judged.cleared:
            return
        message = Cleared(step=step, microbatch=microbatch, hops=judged.hops[:MAX_CLEARED_HOPS])
        for peer in self.peers(self._stage, step):
            if peer != self._identity.peer_id:
                task = asyncio.get_running_loop().create_task(self._tell_one_cleared(peer, message))
                self._notices.add(task)
                task.add_done_callback(self._notices.discard)

    async def _tell_one_cleared(self, peer: str, message: Cleared) -> None:
        try:
            await self._transport.call(
                peer, Method.CLEARED, message, timeout=self._manifest.network.hop_timeout_seconds
            )
        except SentinelError as error:
            log.debug("sibling %s did not take a clearance: %s", peer[-8:], error)

    async def _serve_cleared(self, request: Request) -> Response:
        message = decode(Cleared, request.head)
        peers = self._guard.check_clearance(
            message,
            stage=self._stage,
            sketch_bytes=4 * self._manifest.verifier.sketch_size,
            swarm=self._swarm,
            replicas=len(self.peers(self._stage - 1, message.step)),
        )
        self._guard.clear(peers, step=message.step, microbatch=message.microbatch)
        return Response()

    # ---------------------------------------------------------------------------------

    def _new_key(self) -> int:
        self._next_key += 1
        return self._next_key

    async def _discard(self, key: int) -> None:
        """Free what a microbatch still holds; also when the task is being cancelled."""
        await asyncio.shield(self._worker.run(Priority.BACKWARD, self._runner.discard, key))

    def _completed(self, step: Step, microbatch: int, loss: float) -> None:
        step.losses[microbatch] = loss
        self._telemetry.completed(step.number, microbatch)
