"""Sees that what the owners of slices answer is what the members' parts make of them, before it is committed.

Every member asks every other one for projections of its gradient, with signs drawn after the answers came
(``verifier.reduction``). Where they do not fit the answer of an owner, the owner has to show the parts, which the
members signed, and they are reduced again, to the bit. Now and then they are looked at without any doubt, since who
chooses coefficients that are nearly right leaves none.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from node.butterfly import Contribution, Exchanged, computed, finite, flat
from node.rounds import Members, slice_length, strides
from protocol.errors import MessageError, RefusedError, RemoteError, SentinelError
from protocol.fields import decode
from protocol.messages import Method, RoundParts, RoundPartsAnswer, RoundProjection
from protocol.parts import PartClaim, PartSigner
from protocol.tensors import WireDtype, encode_tensor
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport
from verifier.reduction import doubt, fits, projection_width, projections, reduce_parts
from verifier.verdicts import Reason

log = logging.getLogger(__name__)

CHANCE = "chance"
"""Why parts are looked at that nothing speaks against."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """An attempt of a step's averaging, and how many microbatches each member has told everybody of."""

    step: int
    attempt: int
    members: Members
    microbatches: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class Findings:
    """Members that should not be averaged with."""

    false: dict[str, tuple[Reason, str]] = field(default_factory=dict)
    """Proven to this node, and by what."""
    silent: set[str] = field(default_factory=set)
    """Did not say or show what they have to."""

    @property
    def all(self) -> set[str]:
        """Both."""
        return self.silent | self.false.keys()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Told:
    """The projections of one round: members' of all slices, and the answers', float32 [width] each."""

    key: bytes
    members: torch.Tensor
    """[members, slices, width]"""
    answers: torch.Tensor
    """[slices, width]"""


class ReductionCheck:
    """One node's look at what others reduce, and its answers to their questions."""

    def __init__(
        self,
        *,
        me: str,
        transport: Transport,
        length: int,
        robust: bool,
        signer: PartSigner,
        check_round: Callable[[int, int], None],
        is_sibling: Callable[[str], bool],
        hop_seconds: float,
        chance: float,
        on_examined: Callable[[str, str], None],
        on_false_projection: Callable[[str], None],
        rng: random.Random | None = None,
    ) -> None:
        """``chance``: in how many steps of all the parts of some slice are looked at without any doubt.
        ``on_examined(why, outcome)`` hears of every look at parts, ``on_false_projection(peer)`` of who told of
        another part than it sent, which makes nothing false but costs others a look."""
        self._me = me
        self._transport = transport
        self._length = length
        self._robust = robust
        self._signer = signer
        self._check_round = check_round
        self._hop_seconds = hop_seconds
        self._chance = chance
        self._on_examined = on_examined
        self._on_false_projection = on_false_projection
        self._rng = rng or random.Random()
        self._contribution: Contribution | None = None
        self._asked: set[tuple[str, int, Members]] = set()
        transport.serve(Method.ROUND_PROJECTION, Route(handler=self._serve_projection, admits=is_sibling))

    def hold(self, contribution: Contribution) -> None:
        """Answer questions about this gradient from now on."""
        self._contribution = contribution
        self._asked.clear()

    def forget(self, step: int) -> None:
        """The step is over."""
        if self._contribution is not None and self._contribution.step <= step:
            self._contribution = None
            self._asked.clear()

    # looking -------------------------------------------------------------------------

    async def inspect(self, about: Round, exchanged: Exchanged) -> Findings:
        """Look at what the owners of this round's slices answered."""
        findings = Findings()
        members = about.members
        if len(members) < 2 or not any(about.microbatches):
            return findings
        told = await self._told(about, exchanged, findings)
        if told is None:
            return findings
        looked_at = self._rng.choice([member for member in members if member != self._me])
        by_chance = self._rng.random() < self._chance
        examined = []
        for index, owner in enumerate(members):
            if owner == self._me:
                continue
            found = doubt(
                told.answers[index],
                told.members[:, index],
                about.microbatches,
                exchanged.coefficients[index],
                robust=self._robust,
            )
            why = found.value if found is not None else CHANCE if by_chance and owner == looked_at else None
            if why is not None:
                examined.append(self._examine(about, exchanged, told, index, why, findings))
        await asyncio.gather(*examined)
        return findings

    async def _told(self, about: Round, exchanged: Exchanged, findings: Findings) -> _Told | None:
        """Everybody's projections; None if somebody did not tell."""
        members, key = about.members, os.urandom(32)
        assert self._contribution is not None
        found: dict[str, torch.Tensor] = {}

        async def ask(peer: str) -> None:
            try:
                found[peer] = await self._ask_projections(about, peer, key)
            except SentinelError as error:
                log.debug("sibling %s did not tell its projections: %s", peer[-8:], error)
                findings.silent.add(peer)

        await asyncio.gather(*(ask(peer) for peer in members if peer != self._me))
        if findings.silent:
            return None
        count = len(members)
        found[self._me] = await computed(self._length, _projected, self._contribution.gradient, count, key)
        answers = await computed(self._length, _projected, exchanged.aggregate, count, key)
        return _Told(key=key, members=torch.stack([found[member] for member in members]), answers=answers)

    async def _ask_projections(self, about: Round, peer: str, key: bytes) -> torch.Tensor:
        count = len(about.members)
        width = projection_width(self._length, count)
        message = RoundProjection(step=about.step, attempt=about.attempt, members=about.members, key=key)
        response = await self._transport.call(
            peer, Method.ROUND_PROJECTION, message, timeout=self._hop_seconds, reply_limit=4 * count * width
        )
        try:
            return finite(flat(response.data, count * width), peer).view(count, width)
        except RemoteError as error:
            self._transport.observer.remote_error(peer, error)
            raise

    # proof ---------------------------------------------------------------------------

    async def _examine(
        self, about: Round, exchanged: Exchanged, told: _Told, index: int, why: str, findings: Findings
    ) -> None:
        """Have the owner of a slice show its parts, and reduce them again."""
        owner, cut = about.members[index], strides(len(about.members))[index]
        try:
            parts, counts = await self._parts(about, index)
        except SentinelError as error:
            log.warning("%s does not show the parts of its slice (%s): %s", owner[-8:], why, error)
            findings.silent.add(owner)
            self._on_examined(why, "not_shown")
            return
        false: dict[str, tuple[Reason, str]] = {}
        right = await computed(self._length, lambda: reduce_parts(parts, counts, robust=self._robust))
        if exchanged.coefficients[index] != right.coefficients or not torch.equal(exchanged.aggregate[cut], right.mean):
            text = f"it reduced the slice of step {about.step} to something else than its members' parts make"
            false[owner] = (Reason.REDUCTION, text)
        for member, count, announced in zip(about.members, counts, about.microbatches, strict=True):
            if count != announced and member != self._me:
                text = f"it told siblings of {announced} and of {count} microbatches in step {about.step}"
                false[member] = (Reason.EQUIVOCATION, text)
        for member, part, said in zip(about.members, parts, told.members[:, index], strict=True):
            if member != self._me and not await computed(len(part), lambda: fits(said, part, key=told.key)):  # noqa: B023
                self._on_false_projection(member)
        findings.false |= false
        self._on_examined(why, "false" if false else "right")

    async def _parts(self, about: Round, index: int) -> tuple[Sequence[torch.Tensor], tuple[int, ...]]:
        """The parts that the owner of a slice shows, and the numbers of microbatches that were signed with them.

        Raises:
            SentinelError: it does not, or what it shows is not signed.
        """
        members, owner = about.members, about.members[index]
        length = slice_length(self._length, strides(len(members))[index])
        message = RoundParts(step=about.step, attempt=about.attempt, members=members)
        response = await self._transport.call(
            owner,
            Method.ROUND_PARTS,
            message,
            timeout=3 * self._hop_seconds,
            reply_limit=4 * length * len(members),
        )
        answer = decode(RoundPartsAnswer, response.head)
        if not len(answer.microbatches) == len(answer.signatures) == len(members):
            raise MessageError("an owner shows parts of another number of members", kind="round")
        parts = finite(flat(response.data, length * len(members)), owner).view(len(members), length)
        for member, part, count, signature in zip(members, parts, answer.microbatches, answer.signatures, strict=True):
            claim = PartClaim(step=about.step, attempt=about.attempt, members=members, owner=owner, microbatches=count)
            body = encode_tensor(part, WireDtype.FP32)
            if not await computed(length, self._signer.check, member, claim, body, signature):
                raise MessageError("an owner shows a part that its member has not signed", kind="signature")
        return parts.unbind(), answer.microbatches

    # answering -----------------------------------------------------------------------

    async def _serve_projection(self, request: Request) -> Response:
        message = decode(RoundProjection, request.head)
        self._check_round(message.step, message.attempt)
        members = message.members
        if self._me not in members or request.peer not in members:
            raise MessageError("projections are asked for in a round without asker or asked", kind="round")
        mine = self._contribution
        if mine is None or mine.step != message.step:
            raise RefusedError("this node has no gradient of that step", kind="not_yet")
        asked = (request.peer, message.attempt, members)
        if asked in self._asked:
            raise MessageError("projections were asked for twice", kind="repeated")
        self._asked.add(asked)
        found = await computed(self._length, _projected, mine.gradient, len(members), message.key)
        return Response(body=encode_tensor(found, WireDtype.FP32))


def _projected(vector: torch.Tensor, members: int, key: bytes) -> torch.Tensor:
    return projections(vector, members, key=key)
