"""How a joiner gets its stage's state: whom it asks, whom it believes, and what it does when donors fail.

The decisions are in ``donors``, the transfer in ``download``; here they meet the network.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from node.backlog import Backlog
from node.digest import parameter_digest
from node.donors import (
    Agreement,
    DisagreementError,
    DonorsBusyError,
    LostPaceError,
    NoDonorError,
    Plan,
    agree,
    choose,
    contradicts,
    reached,
)
from node.download import Download, DownloadLimits, FalseChunkError
from node.inquiry import Inquiry, collect, told
from node.progress import progress_text
from node.snapshot import Layout, StageState
from protocol.errors import MessageError, RemoteError, SentinelError
from protocol.fields import decode
from protocol.messages import Method, Release, Snapshot, SnapshotAnswer
from protocol.transports.sessions import Transport

log = logging.getLogger(__name__)

WAITS = frozenset({"busy", "too_old", "not_yet"})
"""Refusals that say nothing against a donor."""
LEADS = 3
"""How many steps a joiner leads donors that move on while they are asked; see ``donors.choose``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinLimits:
    """Seconds that each part of joining may take."""

    late: float = 1.0
    """How much longer than ``slower`` allows the others may take."""
    describe: float = 60.0
    """For a donor to reach the step, to copy its state, and to hash it."""
    slower: float = 2.0
    """How many times as long as the first donor the others may take for that."""
    resume: float = 30.0
    """Without any donor, before what has been fetched is given up."""
    look: float = 1.0
    """Between two looks for donors, and between two lines that tell of progress."""
    release: float = 2.0
    download: DownloadLimits = field(default_factory=DownloadLimits)


class Joiner:
    """Fetches the state of this node's stage, as often as it takes."""

    def __init__(
        self,
        *,
        transport: Transport,
        layout: Layout,
        inquiry: Inquiry,
        claimed: Callable[[int], Mapping[str, bytes]],
        tell: Callable[[str], None],
        progress: Callable[[int, int], None] = lambda done, size: None,
        on_false: Callable[[str, SentinelError], None],
        limits: JoinLimits | None = None,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``claimed(step)``: the siblings' parameter digests before a step, as far as their claims say. ``tell`` says
        what is going on, ``progress`` how many bytes are here, of how many; ``on_false`` hears who gave what it had
        not described."""
        self._transport = transport
        self._layout = layout
        self._inquiry = inquiry
        self._claimed = claimed
        self._tell = tell
        self._progress = progress
        self._on_false = on_false
        self._limits = limits or JoinLimits()
        self._rng = rng or random.Random()
        self._clock = clock
        self._avoid: set[str] = set()
        """Who failed in an earlier attempt."""
        self._liars: set[str] = set()
        """Who gave something else than it had described."""
        self._used: tuple[str, ...] = ()
        """Whose state was taken last."""

    # the state -----------------------------------------------------------------------

    async def fetch(self, backlog: Backlog) -> StageState:
        """The state before some step that most siblings have reached; ``backlog`` listens from that step on.

        Raises:
            SentinelError: it could not be got now; says why.
        """
        plan, answers = await self._descriptions()
        try:
            votes = {**self._claimed(plan.step), **told(await self._inquiry.standings(plan.step))}
            agreement = agree(answers, votes, avoid=self._avoid)
            for peer in agreement.outvoted:
                log.info("%s describes another state of step %d than most", peer[-8:], plan.step)
                self._avoid.add(peer)
            backlog.start(plan.step)
            download = await self._download(agreement, backlog)
        except SentinelError:
            await self._release(plan.step, answers)
            raise
        await self._release(plan.step, answers)
        self._used = agreement.donors
        return await self._unpack(download, agreement)

    async def _descriptions(self) -> tuple[Plan, dict[str, SnapshotAnswer]]:
        """What the donors offer, all of one step."""
        errors: dict[str, SentinelError] = {}
        for ahead in range(LEADS):
            plan = choose(await self._inquiry.standings(), ahead=ahead, avoid=self._avoid, rng=self._rng)
            count = len(plan.donors)
            self._tell(f"asking {count} sibling{'s' * (count != 1)} for the state before step {plan.step}")
            answers, errors = await collect(
                {peer: self._describe(peer, plan.step) for peer in plan.donors},
                enough=1,
                patience=lambda seconds: self._limits.slower * seconds + self._limits.late,
            )
            self._avoid.update(peer for peer, error in errors.items() if _kind(error) not in WAITS)
            if answers:
                return plan, answers
            if not any(_kind(error) == "too_old" for error in errors.values()):
                break
        if errors and all(_kind(error) == "busy" for error in errors.values()):
            raise DonorsBusyError(f"all siblings are busy with other joiners; waiting for a turn ({_any(errors)})")
        raise NoDonorError(f"no sibling gives its state: {_any(errors)}")

    async def _describe(self, peer: str, step: int) -> SnapshotAnswer:
        response = await self._transport.call(peer, Method.SNAPSHOT, Snapshot(step=step), timeout=self._limits.describe)
        try:
            answer = decode(SnapshotAnswer, response.head)
            self._layout.check(answer, step)
        except RemoteError as error:
            self._transport.observer.remote_error(peer, error)
            raise
        return answer

    async def _download(self, agreement: Agreement, backlog: Backlog) -> Download:
        download = Download(
            self._transport,
            agreement.answer,
            self._layout,
            limits=self._limits.download,
            on_dropped=self._dropped,
            clock=self._clock,
        )
        # An aggregate that is missed makes the rest of the download useless.
        tasks: list[asyncio.Task[None]] = [
            asyncio.get_running_loop().create_task(work)
            for work in (self._transfer(download, agreement), backlog.lost(), self._tell_progress(download))
        ]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()
        self._progress(download.meter.done, download.meter.total)
        return download

    async def _transfer(self, download: Download, agreement: Agreement) -> None:
        """Fetch all chunks, from whoever gives this same snapshot."""
        donors: Collection[str] = agreement.donors
        useless: set[str] = set()
        try:
            async with asyncio.timeout(download.longest):
                while True:
                    before = download.meter.done
                    await download.run(donors)
                    if download.complete:
                        return
                    if download.meter.done == before:
                        useless.update(donors)
                    donors = await self._other_donors(download, without=useless | self._liars)
        except TimeoutError:
            self._avoid.update(agreement.donors)
            raise LostPaceError(
                f"the state was not here after {download.longest:.0f} s; a faster connection is needed"
            ) from None

    async def _other_donors(self, download: Download, *, without: Collection[str]) -> list[str]:
        """Whoever keeps the same snapshot; waits a while for one to appear."""
        step = download.answer.step
        try:
            async with asyncio.timeout(self._limits.resume):
                while True:
                    self._tell(f"all donors are gone; looking for another one of the state before step {step}")
                    keep = [each.peer for each in await self._inquiry.standings() if each.frozen == step]
                    answers, _ = await collect(
                        {peer: self._describe(peer, step) for peer in keep if peer not in without},
                        enough=1,
                        patience=lambda _: self._limits.late,
                    )
                    if same := [peer for peer, answer in answers.items() if answer == download.answer]:
                        return same
                    await asyncio.sleep(self._limits.look)
        except TimeoutError:
            percent = 100 * download.meter.done // max(1, download.meter.total)
            raise NoDonorError(f"all donors left when {percent} % were here; beginning anew with others") from None

    async def _tell_progress(self, download: Download) -> None:
        while True:
            self._progress(download.meter.done, download.meter.total)
            if download.donors:
                text = progress_text(download.meter, self._clock(), siblings=download.donors, busy=download.busy)
                self._tell(text)
            await asyncio.sleep(self._limits.look)

    def _dropped(self, peer: str, error: SentinelError) -> None:
        log.info("donor %s is dropped: %s", peer[-8:], error)
        self._avoid.add(peer)
        if isinstance(error, FalseChunkError):
            self._liars.add(peer)
            self._on_false(peer, error)

    async def _unpack(self, download: Download, agreement: Agreement) -> StageState:
        answer = agreement.answer
        state = await asyncio.to_thread(self._layout.unpack, download.image, answer.step)
        if await asyncio.to_thread(parameter_digest, state.parameters) != answer.parameters:
            error = MessageError("a snapshot's parameters do not have the digest that it names", kind="snapshot")
            for peer in agreement.donors:  # each of them has described both
                self._avoid.add(peer)
                self._on_false(peer, error)
            raise error
        return state

    async def check(self, step: int, digest: bytes) -> int | None:
        """Compare this node's parameters before ``step`` with the siblings'; returns the step that most are in.

        Raises:
            DisagreementError: they have others.
        """
        standings = await self._inquiry.standings(step)
        if contradicts(told(standings), digest):
            self._avoid.update(self._used)
            raise DisagreementError(
                f"this node's parameters of step {step} are not those of its siblings, so it fetches their state again;"
                " if that does not help, compare versions and hardware with theirs"
            )
        return reached(standings) if standings else None

    async def _release(self, step: int, donors: Collection[str]) -> None:
        """Tell donors that they can let go of the snapshot. Those that do not hear it find out by themselves."""
        await collect(
            {
                peer: self._transport.call(peer, Method.RELEASE, Release(step=step), timeout=self._limits.release)
                for peer in donors
            },
            enough=len(donors),
            patience=lambda _: 0.0,
        )


def _kind(error: SentinelError) -> str:
    return error.kind if isinstance(error, RemoteError) else ""


def _any(errors: Mapping[str, SentinelError]) -> str:
    return str(next(iter(errors.values()), "none answers"))
