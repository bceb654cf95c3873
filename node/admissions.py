"""Admissions at work in a node of an invited swarm: strangers are refused, and what the coordinator says gets around.

Nobody has to ask the coordinator: a claim carries its writer's admission, and every member keeps and hands out all
admissions and revocations that it knows. News is pushed from node to node; now and then a node asks another one
whether it missed any.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable, Collection, Coroutine, Iterable
from typing import Any

from node.admission_file import AdmissionFile
from node.metrics import Metrics
from protocol.admissions import DAY_SECONDS, MAX_KNOWN, Admission, Roll, Standing
from protocol.errors import AdmissionError, RecordError, RefusedError, SentinelError
from protocol.fields import decode, encode
from protocol.messages import MAX_ADMISSIONS, PUBLIC_METHODS, Method
from protocol.messages import Admissions as Question
from protocol.messages import AdmissionsAnswer as Answer
from protocol.records import Record
from protocol.transports.base import RecordKeeper, Request, Response, Route
from protocol.transports.sessions import DialingTransport

log = logging.getLogger(__name__)

ASK_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 10.0
"""Between two questions of a volunteer that waits. Mostly the coordinator tells it first."""
SYNC_SECONDS = 30.0
"""Between two questions to some peer whether there is news that did not get here."""
FEW = 16
"""So many are told on when another node brought them; more are what a newcomer or a healed cut catches up with."""
WARN_SECONDS = 2 * DAY_SECONDS
"""Before its end an admission's volunteer is reminded of it."""
PAGES = MAX_KNOWN // MAX_ADMISSIONS + 1


class Admissions:
    """Who may take part, as far as this node knows."""

    def __init__(
        self,
        *,
        me: str,
        swarm: bytes,
        coordinator: str,
        transport: DialingTransport,
        store: RecordKeeper,
        file: AdmissionFile,
        metrics: Metrics,
        on_excluded: Callable[[AdmissionError], None],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``on_excluded`` hears why this node, once admitted, may take part no longer."""
        self.me = me
        self.targets: Callable[[], Collection[str]] = frozenset
        """Whom to tell news directly."""
        self._transport = transport
        self._file = file
        self._metrics = metrics
        self._on_excluded = on_excluded
        self._wall_clock = wall_clock
        self._warned = 0
        self._news = asyncio.Event()
        self._unsaved = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self.roll = Roll(swarm=swarm, coordinator=coordinator, on_news=self._on_news)
        self._read_file()
        self._unsaved.clear()
        transport.restrict(self.may_ask)
        transport.serve(Method.ADMISSIONS, Route(handler=self._serve))
        store.restrict(self.check)

    # who may do what -----------------------------------------------------------------

    def admits(self, peer: str) -> bool:
        """Whether a peer may take part."""
        return self.roll.admits(peer, self._wall_clock())

    def may_ask(self, peer: str, method: Method) -> bool:
        """Whether a peer may ask for this: strangers only for what joining and looking need."""
        if method in PUBLIC_METHODS or self.admits(peer):
            return True
        self._metrics.strangers.labels(where="stream").inc()
        return False

    def check(self, record: Record) -> None:
        """Refuse a record whose writer is not admitted.

        Raises:
            RecordError: kind "not_admitted", or what is wrong with the admission in a claim.
        """
        try:
            self.roll.check(record, self._wall_clock())
        except RecordError:
            self._metrics.strangers.labels(where="record").inc()
            raise

    def refuse_stranger(self, peer: str) -> None:
        """Say so to a peer that pushes records without being admitted.

        Raises:
            RefusedError: kind "not_admitted".
        """
        standing = self.roll.standing(peer, self._wall_clock())
        if standing is not Standing.ADMITTED:
            raise RefusedError(f"this swarm admits whom its coordinator has invited ({standing})", kind="not_admitted")

    def look(self, peers: Iterable[str]) -> list[str]:
        """Those of these peers that are no longer admitted; tells this node if it is itself."""
        if (error := self.excluded()) is not None:
            self._on_excluded(error)
        self._warn_before_the_end()
        return [peer for peer in peers if peer != self.me and not self.admits(peer)]

    def excluded(self) -> AdmissionError | None:
        """Why the coordinator does not want this node, if it said so."""
        known = self.roll.of(self.me)
        standing = self.roll.standing(self.me, self._wall_clock())
        if known is None or standing in (Standing.ADMITTED, Standing.UNKNOWN):
            return None
        remedy = f"ask the coordinator to run: sentinel admit {self.me}"
        if standing is Standing.REVOKED:
            return AdmissionError(f"the coordinator revoked this node's admission at {_local(known.issued)}; {remedy}")
        return AdmissionError(f"this node's admission ended at {_local(known.expires)}; {remedy}")

    def _warn_before_the_end(self) -> None:
        known = self.roll.of(self.me)
        if known is not None and known.serial > self._warned and known.expires - self._wall_clock() < WARN_SECONDS:
            self._warned = known.serial
            log.warning(
                "this node's admission ends at %s; ask the coordinator to run: sentinel admit %s",
                _local(known.expires),
                self.me,
            )

    @property
    def own(self) -> bytes:
        """This node's signed admission, for its claim; empty if it has or needs none."""
        return self.roll.signed(self.me)

    def status(self) -> dict[str, Any]:
        """For /status."""
        known = self.roll.of(self.me)
        return {
            "standing": self.roll.standing(self.me, self._wall_clock()).value,
            "expires": None if known is None else known.expires,
            "known": len(self.roll),
        }

    # getting admitted ----------------------------------------------------------------

    async def obtain(self, seed: str, others: Collection[str], report: Callable[[str], None]) -> None:
        """Wait until this node is admitted, for ever, asking the seed and perhaps others.

        Raises:
            AdmissionError: the coordinator has revoked its admission, or it has expired.
            SentinelError: the seed does not answer.
        """
        pause = FIRST_PAUSE_SECONDS
        while True:
            self._news.clear()
            await self.ask(seed)
            await asyncio.gather(*(self._ask_quietly(peer) for peer in others if peer not in (seed, self.me)))
            if self.admits(self.me):
                return
            if (error := self.excluded()) is not None:
                raise error
            report(
                "this swarm admits whom its coordinator has invited; waiting until the coordinator runs: "
                f"sentinel admit {self.me}"
            )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._news.wait()
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def ask(self, peer: str) -> list[bytes]:
        """Learn what a peer knows of this node, and of all if it admits this node; then tell it what it lacks.

        Returns what was news here.

        Raises:
            SentinelError: it does not answer, or not with admissions.
        """
        news: list[bytes] = []
        theirs: set[bytes] = set()
        after = 0
        for _ in range(PAGES):
            own = (self.own,) if self.own else ()  # it may not know it, as after a restart of all
            question = Question(news=own, after=after, digest=self.roll.digest())
            response = await self._transport.call(peer, Method.ADMISSIONS, question, timeout=ASK_SECONDS)
            answer = decode(Answer, response.head)
            news += self._take(answer.admissions)
            theirs.update(answer.admissions)
            if not answer.more or not answer.admissions:
                break
            last = self.roll.open(answer.admissions[-1], self._wall_clock()).serial
            if last <= after:
                break
            after = last
        if answer.digest and answer.digest != self.roll.digest():
            lacking = [data for data in self.roll.all_signed() if data not in theirs][-MAX_ADMISSIONS:]
            if lacking:
                await self._tell(peer, Question(news=tuple(lacking)))
        return news

    async def _ask_quietly(self, peer: str) -> None:
        with contextlib.suppress(SentinelError):
            await self.ask(peer)

    def refused_by(self, peer: str) -> None:
        """A peer does not admit this node: ask it for the coordinator's word, which alone counts."""
        self._spawn(self._ask_quietly(peer))

    # news ----------------------------------------------------------------------------

    def reread(self) -> None:
        """Take in what ``sentinel admit`` has written since the last look, and tell others."""
        self._spread(self._read_file())

    def _read_file(self) -> list[bytes]:
        news: list[bytes] = []
        if not self._file.changed():
            return news
        try:
            admissions = self._file.read()
        except SentinelError as error:
            log.warning("%s", error)
            return news
        for data in admissions:
            with contextlib.suppress(RecordError):  # of another swarm, or damaged
                news += self._take([data])
        return news

    async def run(self) -> None:
        """Keep what is new, and ask others now and then for what did not get here."""
        while True:
            try:
                async with asyncio.timeout(SYNC_SECONDS * random.uniform(0.8, 1.2)):
                    await self._unsaved.wait()
            except TimeoutError:
                await self._sync()
                continue
            self._unsaved.clear()
            try:
                await asyncio.to_thread(self._file.add, self.roll.all_signed())
            except (SentinelError, OSError) as error:
                log.warning("admissions could not be kept in the state folder: %s", error)

    async def _sync(self) -> None:
        peers = sorted({peer for peer in self.targets() if self.admits(peer)} - {self.me})
        if not peers:
            return
        with contextlib.suppress(SentinelError):
            news = await self.ask(random.choice(peers))
            self._spread(news if len(news) <= FEW else [])

    async def stop(self) -> None:
        """Stop telling."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _take(self, admissions: Iterable[bytes]) -> list[bytes]:
        """Keep what is new, and return it. Raises RecordError for what the coordinator has not signed."""
        return [data for data in admissions if self.roll.take(data, self._wall_clock())]

    def _on_news(self, admission: Admission) -> None:
        self._metrics.admissions_known.set(len(self.roll))
        self._unsaved.set()
        if admission.peer == self.me:
            self._news.set()

    def _spread(self, news: list[bytes], *, without: str = "") -> None:
        """Tell others, and those whom the news is about, who may wait for it."""
        few = [self.roll.open(data, self._wall_clock()) for data in news[:FEW]]
        for admission in few:
            word = "revoked" if admission.revoked else f"admitted until {_local(admission.expires)}"
            log.info("the coordinator says: %s is %s", admission.peer, word)
        about = {admission.peer for admission in few}
        for start in range(0, len(news), MAX_ADMISSIONS):
            message = Question(news=tuple(news[start : start + MAX_ADMISSIONS]))
            for peer in {*self.targets(), *about} - {self.me, without}:
                self._spawn(self._tell(peer, message))

    async def _tell(self, peer: str, message: Question) -> None:
        with contextlib.suppress(SentinelError):  # it will ask, or is not there
            await self._transport.call(peer, Method.ADMISSIONS, message, timeout=ASK_SECONDS)

    async def _serve(self, request: Request) -> Response:
        question = decode(Question, request.head)
        fresh = self._take(question.news)  # the first one that the coordinator has not signed ends it
        self._spread(fresh if len(fresh) <= FEW else [], without=request.peer)
        known = self.roll.signed(request.peer)
        own = (known,) if known else ()
        if not self.admits(request.peer):
            return Response(head=encode(Answer(admissions=own, more=False)))
        digest = self.roll.digest()
        page, more = ((), False) if question.digest == digest else self.roll.after(question.after, MAX_ADMISSIONS - 1)
        return Response(head=encode(Answer(admissions=(*own, *page), more=more, digest=digest)))

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _local(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
