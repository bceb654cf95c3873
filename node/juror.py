"""Being asked in an audit: as a juror to compute again, as the accused for the evidence.

A juror believes nobody. The asking peer's tensors have to fit the accused's signed statement, the
rest comes from the accused itself, and that it really went over the wire is proven by the receipt
of the stage below. What a juror cannot settle it refuses to vote on.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

import torch

from node.digest import parameter_digest
from node.drill import Drill
from node.evidence import EvidenceStore, KeptInput, open_input, open_passed_on
from node.guard import Guard
from node.history import ParameterHistory
from node.membership import Membership
from node.refusal_kinds import CANNOT_BE_ASKED
from node.replay import Replay, Replayer
from node.telemetry import Telemetry
from node.worker import ComputeWorker, Priority
from protocol.errors import MessageError, RefusedError, RemoteError, SentinelError
from protocol.fields import decode, encode
from protocol.framing import Buffer
from protocol.hops import body_digest, check_tokens, read_hop
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.messages import Audit, AuditAnswer, Evidence, EvidenceAnswer, Method, Parameters, Receipt
from protocol.receipts import check_draw, open_receipt, sign_vote, statement_digest
from protocol.tensors import WireDtype, decode_tensor, encode_tensor, encoded_bytes
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport
from verifier.verdicts import Direction

MAX_OPEN = 16
"""Audits that wait for this node's idle time..."""
MAX_OPEN_OF_ONE = 4
"""...and those of one asking peer."""
MAX_IN_STEP = 64
"""Audits of one asking peer in one step; an honest one asks for a few."""
MAX_PARAMETER_BYTES = 256 << 20
"""Largest stage that a node of another stage loads for an audit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Statement:
    """What the accused has signed, and who that is."""

    accused: str
    stage: int
    step: int
    microbatch: int
    receipt: Receipt | None
    digest: bytes = b""
    """With a hop: of what was sent, and..."""
    source: bytes = b""
    """...of what it was made from; empty in the first stage."""


class Juror:
    """Serves audits, evidence and parameters."""

    def __init__(
        self,
        *,
        identity: Identity,
        manifest: Manifest,
        stage: int,
        transport: Transport,
        membership: Membership,
        guard: Guard,
        worker: ComputeWorker,
        replayer: Replayer,
        history: ParameterHistory,
        evidence: EvidenceStore,
        telemetry: Telemetry,
        drill: Drill | None,
    ) -> None:
        self._identity = identity
        self._manifest = manifest
        self._swarm = bytes.fromhex(manifest.swarm_id)
        self._stage = stage
        self._last = manifest.num_stages - 1
        self._transport = transport
        self._membership = membership
        self._guard = guard
        self._worker = worker
        self._replayer = replayer
        self._history = history
        self._evidence = evidence
        self._telemetry = telemetry
        self._drill = drill
        self._open: Counter[str] = Counter()
        self._asked: Counter[tuple[int, str]] = Counter()
        self._sending_parameters = asyncio.Lock()
        shape = manifest.activation_shape
        self._activation_bytes = encoded_bytes(shape, WireDtype(manifest.wire.activation_dtype))
        self._gradient_bytes = encoded_bytes(shape, WireDtype(manifest.wire.gradient_dtype))
        self._tokens_bytes = 4 * manifest.training.sequences_per_microbatch * (manifest.model.context + 1)
        body_limit = self._activation_bytes + self._gradient_bytes + self._tokens_bytes
        transport.serve(Method.AUDIT, Route(handler=self._serve_audit, body_limit=body_limit, admits=self._admits))
        transport.serve(Method.EVIDENCE, Route(handler=self._serve_evidence, admits=self._admits))
        transport.serve(Method.PARAMETERS, Route(handler=self._serve_parameters, admits=self._admits))

    @property
    def open_audits(self) -> int:
        """Audits that wait for this node's vote."""
        return self._open.total()

    def _admits(self, peer: str) -> bool:
        """Whoever takes part; a peer that this node has quarantined may still ask for its rights."""
        return self._membership.view.stage_of(peer) is not None and peer not in self._guard.ejected()

    # as a juror ----------------------------------------------------------------------

    async def _serve_audit(self, request: Request) -> Response:
        message = decode(Audit, request.head)
        if self._open.total() >= MAX_OPEN or self._open[request.peer] >= MAX_OPEN_OF_ONE:
            raise RefusedError("too many audits wait here already", kind="busy")
        self._open[request.peer] += 1
        try:
            statement = self._read(message)
            self._admit_one_more(request.peer, statement)
            subject = statement_digest(message.statement)
            self._check_drawn(request.peer, message.draw, subject, statement)
            reason = await self._judge(request, message, statement)
        finally:
            self._open[request.peer] -= 1
        guilty = bool(reason)
        if self._drill is not None:
            guilty = self._drill.vote(guilty, statement.accused, statement.step)
        self._telemetry.voted(guilty)
        vote = sign_vote(self._identity, self._swarm, subject=subject, accused=statement.accused, guilty=guilty)
        reason = (reason or "activation") if guilty else ""
        return Response(head=encode(AuditAnswer(guilty=guilty, reason=reason, signature=vote)))

    def _admit_one_more(self, asker: str, statement: _Statement) -> None:
        """Nobody takes this node's time for much more than honest audits need, or for what it cannot settle."""
        own = statement.stage == self._stage
        present = self._history.step
        if abs(statement.step - present) > 2 or (own and self._history.digest_at(statement.step) is None):
            raise RefusedError(f"the parameters of step {statement.step} are no longer kept here", kind="expired")
        if self._asked[statement.step, asker] >= MAX_IN_STEP:
            raise RefusedError("one peer asks for too many audits in a step", kind="busy")
        self._asked = Counter({key: n for key, n in self._asked.items() if key[0] >= present - 2})
        self._asked[statement.step, asker] += 1

    def _read(self, message: Audit) -> _Statement:
        """The accused's statement: a receipt, or the hop of an activation.

        Raises:
            MessageError: it is neither.
        """
        try:
            receipt = open_receipt(message.statement, self._swarm)
        except MessageError:
            hop = read_hop(message.statement, self._swarm, sketch_bytes=4 * self._manifest.verifier.sketch_size)
            forward = hop.stage < self._last and hop.direction == Direction.ACTIVATION.value
            if not forward or bool(hop.source) == (hop.stage == 0):
                raise MessageError("a hop is of no stage that sends activations like it", kind="receipt") from None
            return _Statement(
                accused=hop.peer,
                stage=hop.stage,
                step=hop.step,
                microbatch=hop.microbatch,
                receipt=None,
                digest=hop.digest,
                source=hop.source,
            )
        if not 1 <= receipt.stage <= self._last or bool(receipt.sent) == (receipt.stage == self._last):
            raise MessageError("a receipt is of no stage that gives receipts like it", kind="receipt")
        return _Statement(
            accused=receipt.peer,
            stage=receipt.stage,
            step=receipt.step,
            microbatch=receipt.microbatch,
            receipt=receipt,
        )

    def _check_drawn(self, asker: str, draw: bytes, subject: bytes, statement: _Statement) -> None:
        if not check_draw(asker, self._swarm, draw, subject):
            raise MessageError("the draw of a jury is not signed by the peer that asks", kind="receipt")
        jury = self._guard.jury(draw, statement.accused, statement.stage, asker=asker, enlarged=True)
        if self._membership.me not in jury:
            raise RefusedError("this node was not drawn for that jury", kind="not_drawn")

    async def _judge(self, request: Request, message: Audit, statement: _Statement) -> str:
        """The reason why the accused is guilty, or nothing.

        Raises:
            RefusedError: this node cannot tell.
            MessageError: the asking peer's tensors do not fit the statement.
        """
        first, second, tokens = self._parts(request, message, statement)
        receipt = statement.receipt
        if receipt is None:
            received = None
            if statement.stage > 0:
                received = await self._fetch_input(statement)
                if received is None:
                    return "withheld"
            replay = Replay(
                stage=statement.stage,
                step=statement.step,
                microbatch=statement.microbatch,
                parameters=None,
                received=received,
                sent=first,
                tokens=tokens,
            )
        else:
            sent: Buffer | None = None
            got: Buffer | None = None
            if receipt.stage < self._last:
                evidence = await self._fetch_evidence(receipt)
                if evidence is None:
                    return "withheld"
                sent, got = evidence
            replay = Replay(
                stage=receipt.stage,
                step=receipt.step,
                microbatch=receipt.microbatch,
                parameters=receipt.parameters,
                received=first,
                sent=sent,
                got=got,
                returned=second,
                tokens=tokens,
            )
        parameters = None
        if statement.stage != self._stage:
            parameters = await self._fetch_parameters(statement)
        return await self._worker.run(Priority.AUDIT, self._compare, replay, parameters)

    def _compare(self, replay: Replay, parameters: torch.Tensor | None) -> str:
        with self._telemetry.phase("audit"):
            return self._replayer.compare(replay, parameters)

    def _parts(
        self, request: Request, message: Audit, statement: _Statement
    ) -> tuple[Buffer, Buffer | None, Buffer | None]:
        """Cut the body into the two tensors (of the first stage one) and the tokens, and check all of them."""
        receipt = statement.receipt
        wants_tokens = statement.stage in (0, self._last)
        sizes = [self._activation_bytes]
        if receipt is not None:
            sizes.append(self._gradient_bytes)
        view = memoryview(request.body)
        tokens_bytes = self._tokens_bytes if wants_tokens else 0
        if message.tokens_bytes != tokens_bytes or view.nbytes != sum(sizes) + tokens_bytes:
            raise MessageError("the body of an audit has the wrong size", kind="size")
        first = view[: sizes[0]]
        second = view[sizes[0] : sum(sizes)] if receipt is not None else None
        tokens = view[sum(sizes) :] if wants_tokens else None
        expected = statement.digest if receipt is None else receipt.received
        if body_digest((first,)) != expected:
            raise MessageError("an audit's tensor is not the one that the accused signed for", kind="receipt")
        if receipt is not None and second is not None and body_digest((second,)) != receipt.returned:
            raise MessageError("an audit's gradient is not the one that the accused signed for", kind="receipt")
        if tokens is not None:
            self._check_origin(message, statement, tokens)
        return first, second, tokens

    def _check_origin(self, message: Audit, statement: _Statement, tokens: Buffer) -> None:
        origin = statement.accused if statement.receipt is None else message.origin
        signed = check_tokens(
            origin,
            self._swarm,
            message.origin_signature,
            step=statement.step,
            microbatch=statement.microbatch,
            tokens=tokens,
        )
        if not signed or (statement.receipt is not None and self._membership.view.stage_of(origin) != 0):
            raise MessageError("the tokens of an audit are not signed by a replica of stage 0", kind="origin")

    async def _fetch_evidence(self, receipt: Receipt) -> tuple[Buffer, Buffer] | None:
        """What the accused sent on and got back; None if it does not show it.

        Raises:
            RefusedError: it cannot be asked, which proves nothing.
        """
        message = Evidence(step=receipt.step, microbatch=receipt.microbatch, returned=receipt.returned)
        try:
            answer, view = await self._ask_accused(receipt.peer, message, self._activation_bytes + self._gradient_bytes)
            below, sent, got = open_passed_on(
                answer, view, self._swarm, of=receipt, activation_bytes=self._activation_bytes
            )
            self._check_witness(below.peer, receipt.stage + 1)
        except MessageError:
            return None
        return sent, got

    async def _fetch_input(self, statement: _Statement) -> Buffer | None:
        """What the accused received for an activation that it sent; None if it does not show it.

        Raises:
            RefusedError: it cannot be asked, which proves nothing.
        """
        message = Evidence(step=statement.step, microbatch=statement.microbatch, sent=statement.digest)
        try:
            answer, view = await self._ask_accused(statement.accused, message, self._activation_bytes)
            above = open_input(
                answer,
                view,
                self._swarm,
                stage=statement.stage,
                step=statement.step,
                microbatch=statement.microbatch,
                source=statement.source,
                sketch_bytes=4 * self._manifest.verifier.sketch_size,
            )
            self._check_witness(above.peer, statement.stage - 1)
        except MessageError:
            return None
        return view

    def _check_witness(self, peer: str, stage: int) -> None:
        """Only a peer of the neighbouring stage can have sent or taken it; one that has left since may have, too."""
        if self._membership.view.stage_of(peer) not in (stage, None):
            raise MessageError("the evidence is signed by a peer of another stage", kind="receipt")

    async def _ask_accused(self, accused: str, message: Evidence, limit: int) -> tuple[EvidenceAnswer, memoryview]:
        """Ask for evidence.

        Raises:
            MessageError: the accused hides it, or answers with something else.
            RefusedError: it cannot be asked, which proves nothing.
        """
        if accused == self._membership.me:
            raise RefusedError("nobody sits on his own jury", kind="not_drawn")
        try:
            response = await self._transport.call(
                accused,
                Method.EVIDENCE,
                message,
                timeout=self._manifest.network.hop_timeout_seconds,
                reply_limit=limit,
            )
            return decode(EvidenceAnswer, response.head), memoryview(response.data)
        except RemoteError as error:
            if error.kind == "no_evidence" and self._history.step > message.step:
                raise RefusedError("the accused keeps that step no longer", kind="expired") from None
            if error.kind in CANNOT_BE_ASKED:
                raise RefusedError(f"the accused could not be asked: {error.kind}", kind="inconclusive") from None
            raise MessageError(f"the accused hides its evidence: {error.kind}", kind="receipt") from None
        except SentinelError as error:
            raise RefusedError(f"the accused could not be asked: {error}", kind="inconclusive") from None

    async def _fetch_parameters(self, statement: _Statement) -> torch.Tensor:
        """The parameters of another stage, from its replicas, the accused last.

        Raises:
            RefusedError: nobody gave them.
        """
        if statement.receipt is None:
            # A hop does not say with which parameters it was computed, and siblings know that best.
            raise RefusedError("only siblings can compute that again", kind="no_data")
        digest = statement.receipt.parameters
        length = self._replayer.length(statement.stage)
        if 4 * length > MAX_PARAMETER_BYTES:
            raise RefusedError("that stage is too large to be loaded for an audit", kind="parameters")
        replicas = [claim.peer for claim in self._membership.view.replicas(statement.stage)]
        replicas.sort(key=lambda peer: peer == statement.accused)
        for peer in replicas:
            try:
                response = await self._transport.call(
                    peer,
                    Method.PARAMETERS,
                    Parameters(digest=digest),
                    timeout=self._manifest.network.hop_timeout_seconds,
                    reply_limit=4 * length,
                )
                flat = decode_tensor(
                    response.data,
                    dtype=WireDtype.FP32.value,
                    shape=(length,),
                    expected_dtype=WireDtype.FP32,
                    expected_shape=(length,),
                )
            except SentinelError:
                continue
            if await asyncio.to_thread(parameter_digest, flat) == digest:
                return flat
        raise RefusedError("no replica of that stage gives its parameters", kind="inconclusive")

    # as the accused, or as a witness -------------------------------------------------

    async def _serve_evidence(self, request: Request) -> Response:
        message = decode(Evidence, request.head)
        kept = self._evidence.find(message.step, message.microbatch, message.returned or message.sent)
        if kept is None:
            raise RefusedError("nothing is kept here of that microbatch", kind="no_evidence")
        if isinstance(kept, KeptInput):
            return Response(head=encode(EvidenceAnswer(input_hop=kept.input_hop)), body=(kept.received,))
        return Response(head=encode(EvidenceAnswer(input_receipt=kept.input_receipt)), body=(*kept.sent, kept.got))

    async def _serve_parameters(self, request: Request) -> Response:
        message = decode(Parameters, request.head)
        if self._sending_parameters.locked():
            raise RefusedError("parameters are being given to somebody else", kind="busy")
        async with self._sending_parameters:
            flat = await self._worker.run(Priority.AUDIT, self._copy_of, message.digest)
        return Response(body=encode_tensor(flat, WireDtype.FP32))

    def _copy_of(self, digest: bytes) -> torch.Tensor:
        flat = self._history.parameters_of(digest)
        if flat is None or flat.nbytes > MAX_PARAMETER_BYTES:
            raise RefusedError("parameters of that digest are not kept here", kind="too_old")
        return flat.detach().to("cpu", copy=True)
