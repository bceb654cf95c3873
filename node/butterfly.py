"""The exchange of an averaging round: every member reduces one slice of the vector for all of them.

With three members or more that have trained something, the inner products of their parts decide how much of each is
used. No member sees whole vectors, and need not: slices are alike, and each is judged by itself, so that whoever sends
honest parts of most slices and something else of one gains nothing by it.

Parts are signed and kept until the step is over: whoever doubts what an owner made of its slice has them shown
(``reduction_check``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, TypeVarTuple

import torch

from node.rounds import Members, slice_length, strides
from protocol.errors import MessageError, RefusedError, RemoteError
from protocol.fields import decode, encode
from protocol.messages import Method, Part, PartAnswer, RoundParts, RoundPartsAnswer
from protocol.parts import PartClaim, PartSigner
from protocol.tensors import WireDtype, decode_tensor, encode_tensor
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport
from verifier.reduction import Reduced, reduce_parts

log = logging.getLogger(__name__)

MAX_OPEN = 16
"""Slices that one member may have this node keep at a time."""

INLINE_ENTRIES = 1 << 18
"""Larger reductions are done in a thread, so that the event loop goes on answering."""

RoundKey = tuple[int, int, Members]
Ts = TypeVarTuple("Ts")
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What this node brings: its gradient sum, float32 [parameters], and how many microbatches it is of."""

    step: int
    gradient: torch.Tensor
    microbatches: int
    parameters: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchanged:
    """What a round's owners made of it."""

    aggregate: torch.Tensor
    """float32 [parameters]."""
    coefficients: tuple[tuple[float, ...], ...]
    """For each slice, what its owner says that each member counted for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SignedPart:
    """A member's part of a slice, float32 [n], of so many microbatches."""

    part: torch.Tensor
    microbatches: int
    signature: bytes


@dataclass(slots=True)
class Gathering:
    """The slice that this node owns in one attempt: parts as they arrive, then the aggregate."""

    opener: str
    """Who made this node keep it."""
    parts: dict[str, SignedPart] = field(default_factory=dict)
    reducing: asyncio.Task[Reduced] | None = None
    shown: set[str] = field(default_factory=set)
    """Who has been shown the parts."""


class Butterfly:
    """The slices that one node owns, and its part in the others'."""

    def __init__(
        self,
        *,
        me: str,
        transport: Transport,
        length: int,
        robust: bool,
        wait_until: Callable[[Callable[[], bool], float | None], Awaitable[bool]],
        notify: Callable[[], None],
        check_round: Callable[[int, int], None],
        is_sibling: Callable[[str], bool],
        siblings: Callable[[int], list[str]],
        hop_seconds: float,
        signer: PartSigner,
        falsify: Callable[[torch.Tensor, int], torch.Tensor] | None = None,
    ) -> None:
        """``robust``: use the rule that fits the number of members, else always the mean.
        ``check_round(step, attempt)`` raises for rounds that must not be prepared. ``siblings(step)`` lists the live
        ones that take part in a step; nobody is waited for who is one no longer. ``falsify(slice, step)`` is the
        drill's: what to answer instead of a reduced slice."""
        self._me = me
        self._transport = transport
        self._length = length
        self._robust = robust
        self._wait_until = wait_until
        self._notify = notify
        self._check_round = check_round
        self._siblings = siblings
        self._hop_seconds = hop_seconds
        self._signer = signer
        self._falsify = falsify
        self._gatherings: dict[RoundKey, Gathering] = {}
        body_limit = 4 * (length + 1)
        transport.serve(Method.PART, Route(handler=self._serve_part, body_limit=body_limit, admits=is_sibling))
        transport.serve(Method.ROUND_PARTS, Route(handler=self._serve_parts, admits=is_sibling))

    def forget(self, step: int) -> None:
        """Drop what is kept of rounds up to this step."""
        for key in [key for key in self._gatherings if key[0] <= step]:
            del self._gatherings[key]

    async def close(self) -> None:
        """Stop what is under way."""
        tasks = [gathering.reducing for gathering in self._gatherings.values() if gathering.reducing is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def exchange(self, contribution: Contribution, members: Members, attempt: int) -> Exchanged:
        """Trade slices with all members.

        Raises:
            SentinelError: a member did not answer, or not with what it should have.
        """
        cuts = strides(len(members))
        key = (contribution.step, attempt, members)
        gathering = self._gathering(key, self._me)
        own = members.index(self._me)
        gradient, count = contribution.gradient, contribution.microbatches
        self._add_part(gathering, self._me, await self._signed(gradient[cuts[own]], key, self._me, count))
        aggregate = torch.empty(self._length)
        coefficients: list[tuple[float, ...]] = [()] * len(members)

        async def trade(index: int) -> None:
            if index == own:
                reduced = await self._reduced(key, gathering)
                aggregate[cuts[index]], coefficients[index] = reduced.mean, reduced.coefficients
                return
            mine = await self._signed(gradient[cuts[index]], key, members[index], count)
            aggregate[cuts[index]], coefficients[index] = await self._ask(key, index, mine)

        trades = [asyncio.ensure_future(trade(index)) for index in range(len(members))]
        try:
            await asyncio.gather(*trades)
        finally:
            for task in trades:
                task.cancel()  # where one has failed the attempt has, whatever the others answer
            await asyncio.gather(*trades, return_exceptions=True)
        return Exchanged(aggregate=aggregate, coefficients=tuple(coefficients))

    async def _signed(self, part: torch.Tensor, key: RoundKey, owner: str, microbatches: int) -> SignedPart:
        step, attempt, members = key
        claim = PartClaim(step=step, attempt=attempt, members=members, owner=owner, microbatches=microbatches)
        part = part.contiguous()
        signature = await computed(self._length, self._signer.sign, claim, encode_tensor(part, WireDtype.FP32))
        return SignedPart(part=part, microbatches=microbatches, signature=signature)

    async def _ask(self, key: RoundKey, index: int, mine: SignedPart) -> tuple[torch.Tensor, tuple[float, ...]]:
        """Give the owner of a slice this node's part of it; returns the reduced slice and its coefficients."""
        step, attempt, members = key
        owner = members[index]
        message = Part(
            step=step, attempt=attempt, members=members, microbatches=mine.microbatches, signature=mine.signature
        )
        response = await self._transport.call(
            owner,
            Method.PART,
            message,
            encode_tensor(mine.part, WireDtype.FP32),
            timeout=3 * self._hop_seconds,
            reply_limit=4 * len(mine.part),
        )
        try:
            coefficients = decode(PartAnswer, response.head).coefficients
            if len(coefficients) != len(members):
                raise MessageError("an owner told coefficients of another number of members", kind="round")
            return finite(flat(response.data, len(mine.part)), owner), coefficients
        except RemoteError as error:
            self._transport.observer.remote_error(owner, error)
            raise

    # the slice that this node owns ---------------------------------------------------

    def _gathering(self, key: RoundKey, opener: str) -> Gathering:
        gathering = self._gatherings.get(key)
        if gathering is None:
            opened = sum(known.opener == opener for known in self._gatherings.values())
            if opener != self._me and opened >= MAX_OPEN:
                raise RefusedError("too many rounds are open", kind="busy")
            gathering = self._gatherings[key] = Gathering(opener=opener)
        return gathering

    def _add_part(self, gathering: Gathering, peer: str, part: SignedPart) -> None:
        finite(part.part, peer)
        gathering.parts[peer] = part
        self._notify()

    async def _reduced(self, key: RoundKey, gathering: Gathering) -> Reduced:
        """The aggregate of this node's slice; whoever asks first has it made, and the others wait for it."""
        if gathering.reducing is None:
            gathering.reducing = asyncio.get_running_loop().create_task(self._reduce(key, gathering))
            # Whoever waited may be gone by the time that it fails.
            gathering.reducing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(gathering.reducing)

    async def _reduce(self, key: RoundKey, gathering: Gathering) -> Reduced:
        members = key[2]
        await self._all_told(key, gathering.parts)
        missing = [peer[-8:] for peer in members if peer not in gathering.parts]
        if missing:
            raise RefusedError(f"no part came from {', '.join(missing)}", kind="incomplete")
        signed = [gathering.parts[member] for member in members]
        parts, counts = [each.part for each in signed], [each.microbatches for each in signed]
        return await computed(self._length, lambda: reduce_parts(parts, counts, robust=self._robust))

    async def _all_told(self, key: RoundKey, told: Mapping[str, object]) -> None:
        """Wait until every member is in ``told``, or one that is not turns out to be gone, or the time is up."""
        step, _, members = key
        # Those whom this node alone has lost, and the others have not, may still be heard of.
        there = set(self._siblings(step))

        def over() -> bool:
            missing = [member for member in members if member not in told]
            return not missing or not there.intersection(missing).issubset(self._siblings(step))

        await self._wait_until(over, self._hop_seconds)

    # answering -----------------------------------------------------------------------

    async def _serve_part(self, request: Request) -> Response:
        message = decode(Part, request.head)
        key = self._round(message, request.peer)
        step, attempt, members = key
        length = slice_length(self._length, strides(len(members))[members.index(self._me)])
        part = flat(request.body, length)
        claim = PartClaim(
            step=step, attempt=attempt, members=members, owner=self._me, microbatches=message.microbatches
        )
        body = encode_tensor(part, WireDtype.FP32)
        if not await computed(length, self._signer.check, request.peer, claim, body, message.signature):
            # Nobody could be shown what this node was sent.
            raise MessageError("a part is not signed by its sender", kind="signature")
        gathering = self._gathering(key, request.peer)
        if request.peer in gathering.parts:
            raise MessageError("a part came twice", kind="repeated")
        signed = SignedPart(part=part, microbatches=message.microbatches, signature=message.signature)
        self._add_part(gathering, request.peer, signed)
        reduced = await self._reduced(key, gathering)
        mean = reduced.mean if self._falsify is None else self._falsify(reduced.mean, step)
        return Response(
            head=encode(PartAnswer(coefficients=reduced.coefficients)), body=encode_tensor(mean, WireDtype.FP32)
        )

    async def _serve_parts(self, request: Request) -> Response:
        message = decode(RoundParts, request.head)
        key = self._round(message, request.peer)
        gathering = self._gatherings.get(key)
        if gathering is None or set(gathering.parts) != set(key[2]):
            raise RefusedError("these parts are not here, or not all of them", kind="incomplete")
        if request.peer in gathering.shown:
            raise MessageError("the parts were asked for twice", kind="repeated")
        gathering.shown.add(request.peer)
        signed = [gathering.parts[member] for member in key[2]]
        answer = RoundPartsAnswer(
            microbatches=tuple(each.microbatches for each in signed),
            signatures=tuple(each.signature for each in signed),
        )
        body = [buffer for each in signed for buffer in encode_tensor(each.part, WireDtype.FP32)]
        return Response(head=encode(answer), body=body)

    def _round(self, message: Part | RoundParts, peer: str) -> RoundKey:
        self._check_round(message.step, message.attempt)
        if self._me not in message.members or peer not in message.members:
            raise MessageError("a part came for a round without its sender or receiver", kind="round")
        return message.step, message.attempt, message.members


async def computed(entries: int, compute: Callable[[*Ts], T], *args: *Ts) -> T:
    """The result of a computation over so many entries, made in a thread if they are many."""
    return compute(*args) if entries <= INLINE_ENTRIES else await asyncio.to_thread(compute, *args)


def finite(part: torch.Tensor, peer: str) -> torch.Tensor:
    """The part, if all of its values are finite.

    Raises:
        RemoteError: kind "non_finite".
    """
    if not torch.isfinite(part).all():
        raise RemoteError(f"what came from sibling {peer[-8:]} holds values that are not finite", kind="non_finite")
    return part


def flat(body: object, length: int) -> torch.Tensor:
    """Decode a float32 [length].

    Raises:
        TensorError: the body is of another size.
    """
    return decode_tensor(
        body,  # type: ignore[arg-type]
        dtype=WireDtype.FP32.value,
        shape=(length,),
        expected_dtype=WireDtype.FP32,
        expected_shape=(length,),
    )
