"""One step's averaging with the siblings of this node's stage: all of them commit, or none.

Four phases. *Join*: siblings announce the same set of members. *Parts*: each member owns a
slice, gets everyone's gradient sums of it and answers with the aggregate (``butterfly``). *Check*:
each member sees for itself that no owner answered with something else (``reduction_check``). *Commit*:
members compare the digest of the whole aggregate. Whoever misses a phase asks a member that
has committed for the aggregate; whoever dies costs the others one more attempt.

An owner that a member has proven false is left out of the next attempt. If most members insist on it, it
has lied to that one only: the member goes along, and takes the aggregate that most hold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass

import torch

from node.butterfly import Butterfly, Contribution, Exchanged, flat
from node.reduction_check import ReductionCheck, Round
from node.rounds import (
    Announcement,
    Members,
    aggregate_digest,
    agreed,
    differing,
    insisted_on,
    joinable,
    majority_digest,
    next_attempt,
    settle_members,
)
from node.survivors import outnumbered
from protocol.errors import LocalError, MessageError, RefusedError, SentinelError
from protocol.fields import decode, encode
from protocol.messages import (
    Aggregate,
    AggregateAnswer,
    Method,
    RoundAnswer,
    RoundCommit,
    RoundJoin,
)
from protocol.parts import PartSigner
from protocol.tensors import WireDtype, encode_tensor
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport
from verifier.verdicts import Reason


class OutOfSyncError(LocalError):
    """This node's parameters are not those of its siblings; it has to fetch their state."""


class FalseReductionError(SentinelError):
    """What a sibling made of its slice is not what the members' parts make of it."""


log = logging.getLogger(__name__)

MAX_LOGGED_BYTES = 64 << 20
"""Committed aggregates kept for siblings that missed a commit or are catching up."""
MAX_LOGGED_STEPS = 16
CONTROL_SECONDS = 5.0
WITNESS_SECONDS = 1.0
"""Between questions to the neighbours whether lost siblings live."""
FALSE_PROJECTION = "it told of another part of its gradient than it sent"
MAX_ATTEMPTS = 8
MAX_FOLLOWED_ATTEMPT = 2 * MAX_ATTEMPTS
"""No sibling that keeps to the rules gets further; a number above it must not drag the others along."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """An aggregate that the stage has agreed on. ``mean`` is float32 [parameters]."""

    step: int
    mean: torch.Tensor
    digest: bytes
    microbatches: int
    present: int = 0
    """The step that the sibling was in that gave this aggregate; 0 where it was made here."""
    fetched: bool = False
    """Whether a sibling gave it, after this node missed a phase."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checking:
    """How what siblings reduce is checked."""

    signer: PartSigner
    mode: str = "enforce"
    """As ``verifier.mode``: "observe" reports only, "off" does not look."""
    chance: float = 0.0
    """In how many steps of all the parts of some slice are looked at although nothing speaks against them."""
    on_false: Callable[[str, Reason, str], None] = lambda peer, reason, text: None
    """Hears whom this node has proven false, and by what."""
    barred: Callable[[str], bool] = lambda peer: False
    """Whether this node still holds it against a sibling that it was proven false."""
    on_examined: Callable[[str, str], None] = lambda why, outcome: None
    """Hears of every look at the parts of a slice."""
    falsify: Callable[[torch.Tensor, int], torch.Tensor] | None = None
    """The drill's: what to answer instead of a reduced slice."""


async def _nobody(lost: Collection[str]) -> Collection[str]:
    return ()


class Averager:
    """The averaging of one node, step after step."""

    def __init__(
        self,
        *,
        me: str,
        transport: Transport,
        parameters: int,
        siblings: Callable[[int], list[str]],
        is_sibling: Callable[[str], bool],
        wait_until: Callable[[Callable[[], bool], float | None], Awaitable[bool]],
        notify: Callable[[], None],
        on_stalled: Callable[[str], None],
        hop_seconds: float,
        robust: bool,
        checking: Checking,
        on_failed_round: Callable[[], None] = lambda: None,
        alive: Callable[[Collection[str]], Awaitable[Collection[str] | None]] = _nobody,
        check_present: Callable[[int], None] = lambda step: None,
        tell: Callable[[str], None] = lambda text: None,
        slept_since: Callable[[float], bool] = lambda moment: False,
    ) -> None:
        """``siblings(step)`` lists live siblings, without this node, that take part in a step;
        ``is_sibling`` tells whether a peer holds a claim on this stage at all.

        ``robust``: outliers among three members or more count less, else the mean is taken.
        ``alive(lost)`` returns those of some lost siblings that are there nevertheless, None if that cannot be known
        now. ``check_present(step)`` raises OutOfSyncError if the swarm has gone on from ``step``. ``tell`` is told
        why this node waits, in words for people. ``slept_since(moment)`` tells whether this process was stopped after
        a moment of ``time.monotonic``.
        """
        self._me = me
        self._transport = transport
        self._length = parameters
        self._siblings = siblings
        self._wait_until = wait_until
        self._notify = notify
        self._on_stalled = on_stalled
        self._hop_seconds = hop_seconds
        self._announced: dict[int, dict[str, Announcement]] = {}
        self._commits: dict[tuple[int, int], dict[str, bytes]] = {}
        self._log: OrderedDict[int, Committed] = OrderedDict()
        self._step = -1
        self._on_failed_round = on_failed_round
        self._alive = alive
        self._check_present = check_present
        self._tell = tell
        self._slept_since = slept_since
        self._last_members: frozenset[str] = frozenset()
        self._behind: set[str] = set()
        self._checking = checking
        self._false: set[str] = set()
        """Siblings that were proven false to this node."""
        self._silent: set[str] = set()
        """Those that did not show what they had to in this step."""
        self._insisted: set[str] = set()
        """Those of both that most others average with in this step."""
        self.rounds_failed = 0
        transport.serve(Method.ROUND_JOIN, Route(handler=self._serve_join, admits=is_sibling))
        transport.serve(Method.ROUND_COMMIT, Route(handler=self._serve_commit, admits=is_sibling))
        transport.serve(Method.AGGREGATE, Route(handler=self._serve_aggregate, admits=is_sibling))
        self._butterfly = Butterfly(
            me=me,
            transport=transport,
            length=parameters,
            robust=robust,
            wait_until=wait_until,
            notify=notify,
            check_round=self._check_round,
            is_sibling=is_sibling,
            siblings=siblings,
            hop_seconds=hop_seconds,
            signer=checking.signer,
            falsify=checking.falsify,
        )
        self._check = ReductionCheck(
            me=me,
            transport=transport,
            length=parameters,
            robust=robust,
            signer=checking.signer,
            check_round=self._check_round,
            is_sibling=is_sibling,
            hop_seconds=hop_seconds,
            chance=checking.chance,
            on_examined=checking.on_examined,
            on_false_projection=lambda peer: checking.on_false(peer, Reason.EQUIVOCATION, FALSE_PROJECTION),
        )

    async def close(self) -> None:
        """Stop what is under way."""
        await self._butterfly.close()

    def stand_at(self, step: int) -> None:
        """Take part in the averaging of this step next."""
        self._step = step

    def remember(self, committed: Committed) -> None:
        """Keep a committed aggregate for those who ask for it later."""
        self._log[committed.step] = committed
        size = sum(entry.mean.nbytes for entry in self._log.values())
        while len(self._log) > 1 and (len(self._log) > MAX_LOGGED_STEPS or size > MAX_LOGGED_BYTES):
            _, oldest = self._log.popitem(last=False)
            size -= oldest.mean.nbytes
        for step in [step for step in self._announced if step <= committed.step]:
            del self._announced[step]
        for key in [key for key in self._commits if key[0] <= committed.step]:
            del self._commits[key]
        self._butterfly.forget(committed.step)
        self._check.forget(committed.step)
        self._notify()

    # the round -----------------------------------------------------------------------

    async def run(self, contribution: Contribution) -> Committed:
        """Average one step with the live siblings and return what the stage agreed on.

        Raises:
            LocalError: no agreement after many attempts.
        """
        step = contribution.step
        self._step = step
        attempt = 0
        self._behind.clear()
        self._false = {peer for peer in self._false if self._checking.barred(peer)}
        self._silent.clear()
        self._insisted.clear()
        self._check.hold(contribution)
        for _ in range(MAX_ATTEMPTS):
            while True:
                joined = await self._join(contribution, attempt)
                if isinstance(joined, Committed):
                    return joined
                members, attempt = joined
                if await self._may_go_on(step, members):
                    break
            began = time.monotonic()
            try:
                committed = await self._attempt(contribution, members, attempt)
            except SentinelError as error:
                log.warning("averaging of step %d, attempt %d failed, trying again: %s", step, attempt, error)
                committed = None
            if committed is not None and self._slept_since(began):
                # The siblings may have given this attempt up for one without this node: ask before it counts.
                log.warning("this process was stopped in the middle of averaging step %d; asking the siblings", step)
                committed = None
            if committed is not None:
                self._last_members = frozenset(members)
                return committed
            self.rounds_failed += 1
            self._on_failed_round()
            attempt += 1
        raise LocalError(f"the siblings could not agree on step {step} in {MAX_ATTEMPTS} attempts; restart the node")

    async def _attempt(self, contribution: Contribution, members: Members, attempt: int) -> Committed | None:
        """Exchange, check and commit; None if the members do not agree.

        Raises:
            SentinelError: a member did not answer, or not with what it should have.
        """
        step = contribution.step
        announced = {peer: told.microbatches for peer, told in self._announced[step].items()}
        announced[self._me] = contribution.microbatches
        counts = tuple(announced[peer] for peer in members)
        exchanged = await self._butterfly.exchange(contribution, members, attempt)
        await self._check_reduction(Round(step=step, attempt=attempt, members=members, microbatches=counts), exchanged)
        return await self._commit(step, attempt, members, exchanged.aggregate, sum(counts))

    async def _check_reduction(self, about: Round, exchanged: Exchanged) -> None:
        """See that nobody answered with something else than the members' parts make.

        Raises:
            FalseReductionError: somebody did, and is left out of the next attempt.
        """
        if self._checking.mode == "off":
            return
        findings = await self._check.inspect(about, exchanged)
        for peer, (reason, text) in findings.false.items():
            self._checking.on_false(peer, reason, text)
        if self._checking.mode != "enforce":
            return
        self._false.update(findings.false)
        for peer in (findings.silent - self._insisted).intersection(self._siblings(about.step)):
            self._on_stalled(peer)  # and not gone
        self._silent |= findings.silent
        if left_out := findings.all - self._insisted:
            names = ", ".join(sorted(peer[-8:] for peer in left_out))
            raise FalseReductionError(f"{names} reduced a slice to something false, or does not show what it was given")

    def _left_out(self) -> set[str]:
        """Siblings that this node does not average with."""
        return (self._false | self._silent) - self._insisted

    async def _may_go_on(self, step: int, members: Members) -> bool:
        """Whether these members may commit the step without those who were there in the last one; waits if not.

        Raises:
            OutOfSyncError: the others have gone on.
        """
        lost = self._last_members.difference(members, self._behind, self._left_out())
        if not lost:
            return True
        alive = await self._alive(lost)
        if alive is not None and not outnumbered(members, alive):
            return True
        names = ", ".join(sorted(peer[-8:] for peer in (lost if alive is None else alive)))
        why = "no neighbour can be asked whether they live" if alive is None else "the neighbouring stages know them"
        self._tell(f"not averaging without {names}, which cannot be reached: {why}")
        before = self._live_members(step, set())
        await self._wait_until(lambda: self._live_members(step, set()) != before, WITNESS_SECONDS)
        self._check_present(step)
        return False

    async def _join(self, contribution: Contribution, attempt: int) -> tuple[Members, int] | Committed:
        step = contribution.step
        announced = self._announced.setdefault(step, {})
        dropped = self._left_out()
        live = members = self._live_members(step, dropped)
        settle_after = self._hop_seconds / 4
        while True:
            if len(members) == 1:
                return members, attempt
            mine = Announcement(
                members=members,
                attempt=attempt,
                microbatches=contribution.microbatches,
                parameters=contribution.parameters,
            )
            untold: set[str] = set()
            committed = await self._announce(step, mine, dropped, untold)
            if committed is not None:
                return committed

            def ready(mine: Announcement = mine, live: Members = live) -> bool:
                return (
                    agreed(self._me, mine, announced)
                    or self._live_members(step, dropped) != live
                    or next_attempt(mine.attempt, announced, mine.members, MAX_FOLLOWED_ATTEMPT) != mine.attempt
                    or bool(insisted_on(self._left_out(), mine, announced))
                )

            in_time = await self._wait_until(ready, settle_after)
            self._check_agreement(mine, announced, dropped)
            if agreed(self._me, mine, announced) and dropped.isdisjoint(members):
                # Whoever was not ready to hear of it has announced itself since, and waits to hear the same from here.
                if untold and (committed := await self._announce(step, mine, dropped, untold)) is not None:
                    return committed
                return members, attempt
            attempt = next_attempt(attempt, announced, members, MAX_FOLLOWED_ATTEMPT)
            if insisted := insisted_on(self._left_out(), mine, announced):
                self._insisted |= insisted
                dropped.difference_update(insisted)
            if not in_time:
                settle_after *= 2
            if not in_time and settle_after > 4 * self._hop_seconds:
                # Silent, stuck in an earlier attempt, or telling everybody something else: go on without them.
                odd = differing(self._me, mine, announced)
                kept = joinable(self._me, mine, announced, odd) or ()
                odd = [peer for peer in odd if peer not in kept]
                for peer in odd:
                    self._on_stalled(peer)
                dropped.update(odd)
            before, live = live, self._live_members(step, dropped)
            if live != before:
                members = live
            elif not in_time and all(peer == self._me or peer in announced for peer in members):
                settled = settle_members(self._me, members, announced)
                members = tuple(peer for peer in settled if peer not in dropped)

    def _check_agreement(self, mine: Announcement, announced: dict[str, Announcement], dropped: set[str]) -> None:
        """Only equal parameters may be averaged: leave out siblings that differ, or be left out.

        Raises:
            OutOfSyncError: this node is the one that differs.
        """
        digests = {peer: announced[peer].parameters for peer in mine.members if peer in announced}
        digests[self._me] = mine.parameters
        if len(set(digests.values())) == 1:
            return
        standing = majority_digest(digests, of=len(mine.members))
        if standing is None:
            if len(digests) < len(mine.members):
                return  # those who have not spoken yet decide it
            # Without a majority (two siblings) the smaller digest stays: arbitrary, but the same for both.
            standing = min(digests.values())
        if standing != mine.parameters:
            raise OutOfSyncError("this node's parameters differ from its siblings'; fetching theirs")
        odd = {peer for peer, digest in digests.items() if digest != standing}
        dropped |= odd
        self._behind |= odd

    def _live_members(self, step: int, dropped: set[str]) -> Members:
        return tuple(sorted({self._me, *(peer for peer in self._siblings(step) if peer not in dropped)}))

    async def _announce(self, step: int, mine: Announcement, dropped: set[str], untold: set[str]) -> Committed | None:
        """Tell the members; returns the step's aggregate if they have committed one. Those that are in a much earlier
        step, and so cannot take part, are added to ``dropped``. ``untold``: whom to tell, everybody if empty; holds
        afterwards who did not hear of it."""
        message = RoundJoin(
            step=step,
            attempt=mine.attempt,
            members=mine.members,
            microbatches=mine.microbatches,
            parameters=mine.parameters,
        )

        held: dict[str, bytes] = {}
        ahead: set[str] = set()

        async def tell(peer: str) -> None:
            try:
                response = await self._transport.call(peer, Method.ROUND_JOIN, message, timeout=CONTROL_SECONDS)
                answer = decode(RoundAnswer, response.head)
            except SentinelError as error:
                log.debug("sibling %s did not take the announcement: %s", peer[-8:], error)
                untold.add(peer)
                if isinstance(error, RefusedError) and error.kind == "too_old":
                    ahead.add(peer)
                elif isinstance(error, RefusedError) and error.kind == "wrong_step":
                    dropped.add(peer)
                    self._behind.add(peer)
                return
            if answer.committed:
                held[peer] = answer.digest

        peers = sorted(untold) or [peer for peer in mine.members if peer != self._me]
        untold.clear()
        await asyncio.gather(*map(tell, peers))
        if 2 * len(ahead) > len(peers):
            raise OutOfSyncError(f"the siblings are past step {step} and keep it no longer; fetching their state")
        # One sibling alone must not talk this node into an aggregate of its own making.
        digest = majority_digest(held, of=len(peers)) if held else None
        if digest is None:
            return None
        try:
            return await self.fetch(step, [peer for peer in held if held[peer] == digest], want=digest)
        except LocalError as error:
            log.warning("%s", error)
            return None

    async def _commit(
        self, step: int, attempt: int, members: Members, mean: torch.Tensor, microbatches: int
    ) -> Committed | None:
        digest = aggregate_digest(encode_tensor(mean, WireDtype.FP32)[0], microbatches)
        mine = Committed(step=step, mean=mean, digest=digest, microbatches=microbatches)
        others = [peer for peer in members if peer != self._me]
        if not others:
            return mine
        commits = self._commits.setdefault((step, attempt), {})
        commits[self._me] = digest
        message = RoundCommit(step=step, attempt=attempt, digest=digest)

        async def tell(peer: str) -> None:
            try:
                response = await self._transport.call(peer, Method.ROUND_COMMIT, message, timeout=CONTROL_SECONDS)
                answer = decode(RoundAnswer, response.head)
                if answer.committed:
                    commits[peer] = answer.digest
            except SentinelError as error:
                log.debug("sibling %s did not take the commit: %s", peer[-8:], error)

        await asyncio.gather(*map(tell, others))
        live = set(self._siblings(step))
        await self._wait_until(
            lambda: all(peer in commits or peer not in self._siblings(step) for peer in others),
            4 * self._hop_seconds,  # they may be looking at the parts of a slice first
        )
        if any(peer not in commits for peer in others):
            missing = [peer[-8:] for peer in others if peer not in commits]
            log.warning("no commit of step %d from %s (live: %d)", step, ", ".join(missing), len(live))
            return None
        held = {peer: commits[peer] for peer in members}  # and not what others said about this attempt
        if len(set(held.values())) == 1:
            return mine
        best = majority_digest(held)
        if best is None:
            log.warning("siblings hold different aggregates of step %d and none has a majority", step)
            return None
        if best == digest:
            return mine
        return await self.fetch(step, [peer for peer in others if held[peer] == best], want=best)

    # catching up ---------------------------------------------------------------------

    async def fetch(self, step: int, peers: list[str], *, want: bytes | None = None) -> Committed:
        """Get the committed aggregate of a step from a sibling that has it.

        Raises:
            LocalError: nobody gave one with the wanted digest.
        """
        last = "nobody to ask"
        for peer in peers:
            try:
                response = await self._transport.call(
                    peer,
                    Method.AGGREGATE,
                    Aggregate(step=step),
                    timeout=4 * self._hop_seconds,
                    reply_limit=4 * self._length,
                )
                answer = decode(AggregateAnswer, response.head)
                mean = flat(response.data, self._length)
                digest = aggregate_digest(memoryview(response.data), answer.microbatches)
                if digest != answer.digest or (want is not None and digest != want):
                    raise MessageError("the aggregate does not match its digest", kind="digest")
            except SentinelError as error:
                last = str(error)
                continue
            return Committed(
                step=step,
                mean=mean,
                digest=digest,
                microbatches=answer.microbatches,
                present=answer.present,
                fetched=True,
            )
        raise LocalError(f"the aggregate of step {step} could not be fetched from a sibling: {last}")

    # answering -----------------------------------------------------------------------

    async def _serve_join(self, request: Request) -> Response:
        message = decode(RoundJoin, request.head)
        committed = self._log.get(message.step)
        if committed is not None:
            return Response(head=encode(RoundAnswer(committed=True, digest=committed.digest)))
        self._check_round(message.step, message.attempt)
        self._announced.setdefault(message.step, {})[request.peer] = Announcement(
            members=message.members,
            attempt=message.attempt,
            microbatches=message.microbatches,
            parameters=message.parameters,
        )
        self._notify()
        return Response(head=encode(RoundAnswer(committed=False)))

    async def _serve_commit(self, request: Request) -> Response:
        message = decode(RoundCommit, request.head)
        committed = self._log.get(message.step)
        if committed is not None:
            return Response(head=encode(RoundAnswer(committed=True, digest=committed.digest)))
        self._check_round(message.step, message.attempt)
        self._commits.setdefault((message.step, message.attempt), {})[request.peer] = message.digest
        self._notify()
        return Response(head=encode(RoundAnswer(committed=False)))

    async def _serve_aggregate(self, request: Request) -> Response:
        message = decode(Aggregate, request.head)
        if message.step not in self._log and message.step < self._step:
            raise RefusedError(f"step {message.step} is no longer in the log", kind="too_old")
        await self._wait_until(lambda: message.step in self._log, 2 * self._hop_seconds)
        committed = self._log.get(message.step)
        if committed is None:
            raise RefusedError(f"step {message.step} is not committed yet", kind="not_yet")
        return Response(
            head=encode(
                AggregateAnswer(
                    digest=committed.digest, microbatches=committed.microbatches, present=max(0, self._step)
                )
            ),
            body=encode_tensor(committed.mean, WireDtype.FP32),
        )

    def _check_round(self, step: int, attempt: int) -> None:
        """Only the present step and the next one may be prepared; the rest would fill the memory."""
        if step < self._step:
            raise RefusedError(f"step {step} is over; this is step {self._step}", kind="too_old")
        if step > self._step + 1:
            raise RefusedError(f"step {step} is not the present one ({self._step})", kind="wrong_step")
        if attempt > MAX_FOLLOWED_ATTEMPT + MAX_ATTEMPTS:
            raise MessageError(f"no round has {attempt} attempts", kind="attempt")
