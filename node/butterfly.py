"""The exchange of an averaging round: every member reduces one slice of the vector for all of them.

With three members or more that have trained something, the inner products of their parts decide how much of each is
used. No member sees whole vectors, and need not: slices are alike, and each is judged by itself, so that whoever sends
honest parts of most slices and something else of one gains nothing by it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVarTuple

import torch

from node.rounds import Members, reduce_slice, slice_length, strides
from protocol.errors import MessageError, RefusedError, RemoteError
from protocol.fields import decode
from protocol.messages import Method, Part
from protocol.tensors import WireDtype, decode_tensor, encode_tensor
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport
from verifier.aggregation import Rule, agreement, capped_weights, rule_for

log = logging.getLogger(__name__)

MAX_OPEN = 16
"""Slices that one member may have this node keep at a time."""

INLINE_ENTRIES = 1 << 18
"""Larger reductions are done in a thread, so that the event loop goes on answering."""

RoundKey = tuple[int, int, Members]
Ts = TypeVarTuple("Ts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Contribution:
    """What this node brings: its gradient sum, float32 [parameters], and how many microbatches it is of."""

    step: int
    gradient: torch.Tensor
    microbatches: int
    parameters: bytes


@dataclass(slots=True)
class Gathering:
    """The slice that this node owns in one attempt: parts as they arrive, then the aggregate."""

    opener: str
    """Who made this node keep it."""
    parts: dict[str, tuple[torch.Tensor, int]] = field(default_factory=dict)
    reducing: asyncio.Task[torch.Tensor] | None = None


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
    ) -> None:
        """``robust``: use the rule that fits the number of members, else always the mean.
        ``check_round(step, attempt)`` raises for rounds that must not be prepared. ``siblings(step)`` lists the live
        ones that take part in a step; nobody is waited for who is one no longer."""
        self._me = me
        self._transport = transport
        self._length = length
        self._robust = robust
        self._wait_until = wait_until
        self._notify = notify
        self._check_round = check_round
        self._siblings = siblings
        self._hop_seconds = hop_seconds
        self._gatherings: dict[RoundKey, Gathering] = {}
        body_limit = 4 * (length + 1)
        transport.serve(Method.PART, Route(handler=self._serve_part, body_limit=body_limit, admits=is_sibling))

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

    async def exchange(self, contribution: Contribution, members: Members, attempt: int) -> torch.Tensor:
        """Trade slices with all members; returns the aggregate, float32 [parameters].

        Raises:
            SentinelError: a member did not answer, or not with what it should have.
        """
        cuts = strides(len(members))
        key = (contribution.step, attempt, members)
        gathering = self._gathering(key, self._me)
        own = members.index(self._me)
        gradient, count = contribution.gradient, contribution.microbatches
        self._add_part(gathering, self._me, gradient[cuts[own]].contiguous(), count)
        aggregate = torch.empty(self._length)
        message = Part(step=contribution.step, attempt=attempt, members=members, microbatches=count)

        async def trade(index: int) -> None:
            length = slice_length(self._length, cuts[index])
            if index == own:
                aggregate[cuts[index]] = await self._reduced(key, gathering)
                return
            response = await self._transport.call(
                members[index],
                Method.PART,
                message,
                encode_tensor(gradient[cuts[index]], WireDtype.FP32),
                timeout=3 * self._hop_seconds,
                reply_limit=4 * length,
            )
            try:
                aggregate[cuts[index]] = finite(flat(response.data, length), members[index])
            except RemoteError as error:
                self._transport.observer.remote_error(members[index], error)
                raise

        trades = [asyncio.ensure_future(trade(index)) for index in range(len(members))]
        try:
            await asyncio.gather(*trades)
        finally:
            for task in trades:
                task.cancel()  # where one has failed the attempt has, whatever the others answer
            await asyncio.gather(*trades, return_exceptions=True)
        return aggregate

    # the slice that this node owns ---------------------------------------------------

    def _gathering(self, key: RoundKey, opener: str) -> Gathering:
        gathering = self._gatherings.get(key)
        if gathering is None:
            opened = sum(known.opener == opener for known in self._gatherings.values())
            if opener != self._me and opened >= MAX_OPEN:
                raise RefusedError("too many rounds are open", kind="busy")
            gathering = self._gatherings[key] = Gathering(opener=opener)
        return gathering

    def _add_part(self, gathering: Gathering, peer: str, part: torch.Tensor, microbatches: int) -> None:
        gathering.parts[peer] = (finite(part, peer), microbatches)
        self._notify()

    async def _reduced(self, key: RoundKey, gathering: Gathering) -> torch.Tensor:
        """The aggregate of this node's slice; whoever asks first has it made, and the others wait for it."""
        if gathering.reducing is None:
            gathering.reducing = asyncio.get_running_loop().create_task(self._reduce(key, gathering))
            # Whoever waited may be gone by the time that it fails.
            gathering.reducing.add_done_callback(lambda task: task.cancelled() or task.exception())
        return await asyncio.shield(gathering.reducing)

    async def _reduce(self, key: RoundKey, gathering: Gathering) -> torch.Tensor:
        members = key[2]
        await self._all_told(key, gathering.parts)
        missing = [peer[-8:] for peer in members if peer not in gathering.parts]
        if missing:
            raise RefusedError(f"no part came from {', '.join(missing)}", kind="incomplete")
        parts, counts = zip(*(gathering.parts[member] for member in members), strict=True)
        active = [index for index, count in enumerate(counts) if count > 0]
        rule = rule_for(len(active)) if self._robust and active else Rule.MEAN
        if rule is Rule.MEAN:
            return await _computed(self._length, reduce_slice, parts, counts)
        means = await _computed(self._length, _means, parts, counts)
        weights = capped_weights([counts[index] for index in active])
        return await _computed(self._length, agreement, means[active], weights)

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
        length = slice_length(self._length, strides(len(message.members))[message.members.index(self._me)])
        gathering = self._gathering(key, request.peer)
        if request.peer in gathering.parts:
            raise MessageError("a part came twice", kind="repeated")
        self._add_part(gathering, request.peer, flat(request.body, length), message.microbatches)
        reduced = await self._reduced(key, gathering)
        return Response(body=encode_tensor(reduced, WireDtype.FP32))

    def _round(self, message: Part, peer: str) -> RoundKey:
        self._check_round(message.step, message.attempt)
        if self._me not in message.members or peer not in message.members:
            raise MessageError("a part came for a round without its sender or receiver", kind="round")
        return message.step, message.attempt, message.members


def _means(parts: Sequence[torch.Tensor], counts: Sequence[int]) -> torch.Tensor:
    """Each member's mean gradient over its microbatches, float32 [members, n]; zeros where it has none."""
    return torch.stack([part / max(1, count) for part, count in zip(parts, counts, strict=True)])


async def _computed(entries: int, compute: Callable[[*Ts], torch.Tensor], *args: *Ts) -> torch.Tensor:
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
