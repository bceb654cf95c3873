"""Who is in the swarm, as this node knows it, and what the swarm knows of this node.

Keeps the view up to date from the DHT, from pushes and from connections that end; renews
and releases this node's own claim; holds control streams to siblings and neighbours, whose
end is the quickest sign of a death. What the view means is decided elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, replace
from typing import Any

from node.admissions import Admissions
from node.view import TAKES_WORK, View
from node.wakefulness import TICK_SECONDS, Wakefulness
from protocol.errors import RecordError, RefusedError, SentinelError
from protocol.fields import decode
from protocol.identity import Identity
from protocol.messages import Empty, Method, Push
from protocol.record_cache import check_record
from protocol.records import (
    Accusation,
    Claim,
    NodeState,
    Record,
    Verdict,
    accusation_key,
    claim_key,
    sign_claim,
    verdict_key,
)
from protocol.transports.base import RecordKeeper, Request, Response, Route
from protocol.transports.sessions import DialingTransport

log = logging.getLogger(__name__)

PUSH_SECONDS = 5.0
RECORDS_PER_PUSH = 32
"""Records of 4 KiB that fit the head of one frame with room to spare."""
MAX_TOLD = 64
"""Peers of a swarm that are all told of news directly. In a larger one, where that would take a connection for
each pair of nodes, those are told who deal with this node or with the accused; the others read the DHT."""
POLL_FORMING_SECONDS = 1.0
POLL_SECONDS = 5.0
REDIAL_SECONDS = 4.0
MAX_LOST = 256
"""Peers that are looked for after they vanished; of more, those that vanished first are given up."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Seconds of a lease and of its renewal, from the manifest."""

    lease: float
    renew: float


class Membership:
    """The living side of the view."""

    def __init__(
        self,
        *,
        identity: Identity,
        swarm: bytes,
        num_stages: int,
        timing: Timing,
        transport: DialingTransport,
        store: RecordKeeper,
        on_finding: Callable[[Accusation | Verdict], None],
        admissions: Admissions | None = None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``admissions``: who may take part, in an invited swarm."""
        self.view = View(num_stages)
        self._identity = identity
        self._swarm = swarm
        self._timing = timing
        self._transport = transport
        self._store = store
        self._on_finding = on_finding
        self._wall_clock = wall_clock
        self._admissions = admissions
        if admissions is not None:
            admissions.targets = self._push_targets
        self._claim: Claim | None = None
        self._changed = asyncio.Event()
        self._publish_now = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._dialling: set[str] = set()
        self._introduced: set[str] = set()
        """Connected peers that have been shown this node's claim since."""
        self._extra_peers: dict[str, None] = {}
        self.lost: dict[str, tuple[str, ...]] = {}
        """Peers that vanished without giving their claim up, with their addresses, oldest first."""
        self.wakefulness = Wakefulness()
        self.forming = True
        """Whether the swarm is still forming: the DHT is then read more often."""
        transport.on_peer_gone(self._peer_gone)
        transport.serve(Method.PUSH, Route(handler=self._serve_push))

    @property
    def claim(self) -> Claim | None:
        """This node's own claim."""
        return self._claim

    @property
    def me(self) -> str:
        """This node's peer id."""
        return self._identity.peer_id

    def start(self) -> None:
        """Begin to poll, renew and connect."""
        for coroutine in (self._poll_loop(), self._publish_loop(), self._connect_loop(), self._tick_loop()):
            self._spawn(coroutine)

    async def stop(self) -> None:
        """Stop; does not release the claim."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # waiting -------------------------------------------------------------------------

    def notify(self) -> None:
        """Wake everyone who waits for a change."""
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    async def wait_until(self, predicate: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until the predicate holds, looking whenever anything changes; false on timeout."""
        try:
            async with asyncio.timeout(seconds):
                while not predicate():
                    await self._changed.wait()
        except TimeoutError:
            return predicate()
        return True

    # this node's claim ---------------------------------------------------------------

    def claim_stage(self, claim: Claim) -> None:
        """Hold a claim from now on; replaces an earlier one."""
        self._claim = claim
        self._sign_and_merge()

    def update_claim(self, *, urgent: bool = False, **changes: object) -> None:
        """Change fields of the claim; ``urgent`` publishes at once instead of at the next renewal."""
        if self._claim is None:
            return
        self._claim = replace(self._claim, **changes)  # type: ignore[arg-type]
        self._sign_and_merge()
        if urgent:
            self._publish_now.set()

    def _sign_and_merge(self) -> bytes:
        assert self._claim is not None
        self._claim = replace(
            self._claim,
            sequence=self._claim.sequence + 1,
            expires=self._wall_clock() + self._timing.lease,
            admission=b"" if self._admissions is None else self._admissions.own,
        )
        data = sign_claim(self._identity, self._claim)
        if self.view.merge(self._claim, data, self._wall_clock()):
            self.notify()
        return data

    async def publish(self) -> None:
        """Write the claim to the DHT and push it to every connected peer."""
        if self._claim is None:
            return
        data = self._sign_and_merge()
        await asyncio.gather(self._store_quietly(data), self.push([data], self._push_targets()))

    async def release(self) -> None:
        """Give the claim up: others see at once that this node takes no more work."""
        if self._claim is None:
            return
        self._claim = replace(self._claim, state=NodeState.DRAINING)
        data = self._sign_and_merge()
        try:
            async with asyncio.timeout(PUSH_SECONDS):
                await asyncio.gather(self._store_quietly(data), self.push([data], self._push_targets()))
        except TimeoutError:
            log.warning("the claim could not be released everywhere; it ends by itself in %d s", self._timing.lease)
        self._claim = None

    async def push(self, records: Iterable[bytes], peers: Iterable[str]) -> list[str]:
        """Send records to peers directly; return those that took them."""
        data = tuple(records)
        messages = [
            Push(records=data[start : start + RECORDS_PER_PUSH]) for start in range(0, len(data), RECORDS_PER_PUSH)
        ]
        targets = [peer for peer in peers if peer != self.me]

        async def push_one(peer: str) -> bool:
            try:
                for message in messages:
                    await self._transport.call(peer, Method.PUSH, message, timeout=PUSH_SECONDS)
            except SentinelError as error:
                if self._admissions is not None and isinstance(error, RefusedError) and error.kind == "not_admitted":
                    self._admissions.refused_by(peer)
                return False  # it will read the DHT, or is gone, which its control stream tells
            return True

        taken = await asyncio.gather(*(push_one(peer) for peer in targets))
        return [peer for peer, ok in zip(targets, taken, strict=True) if ok]

    async def introduce(self, peer: str) -> bool:
        """Show this node's claim to a peer that does not know it.

        With a new number: the peer may have found this node gone, as after a freeze, and has buried the one it knew.
        """
        return self._claim is not None and bool(await self.push([self._sign_and_merge()], [peer]))

    async def announce(self) -> None:
        """Show this node's claim to everyone who has one, and wait until they took it or turned out gone."""
        mine = self.view.signed.get(self.me)
        if mine is not None:
            await self.push([mine], self._push_targets())

    async def publish_finding(self, data: bytes, finding: Accusation | Verdict) -> None:
        """Write an accusation or verdict to the DHT, and push it to everyone concerned, the accused among them."""
        self.take(finding, data)
        targets = {*self._push_targets(finding.accused_stage), finding.accused}
        await asyncio.gather(self._store_quietly(data), self.push([data], targets))

    def _push_targets(self, *stages: int) -> set[str]:
        """Whom to tell directly: everybody, or in a large swarm who is near this node or near one of ``stages``."""
        known = {*self.view.claims, *self._transport.connected(), *self._extra_peers}
        if len(known) <= MAX_TOLD or self._claim is None:
            return known
        near = {stage + way for stage in (self._claim.stage, *stages) for way in (-1, 0, 1)}
        return {*self._extra_peers, *(claim.peer for stage in near for claim in self.view.replicas(stage))}

    async def _store_quietly(self, data: bytes) -> None:
        try:
            await self._store.store(data)
        except (SentinelError, OSError) as error:
            log.warning("a record could not be stored in the DHT, it goes by push only: %s", error)

    # what others say -----------------------------------------------------------------

    def take(self, record: Record, data: bytes) -> bool:
        """Merge one checked record; true if it was news."""
        if isinstance(record, Claim) and self.view.signed.get(record.peer) == data:
            return False  # most of what the DHT holds is known
        if self._admissions is not None:
            try:
                self._admissions.check(record)
            except RecordError as error:
                log.debug("a record is not taken: %s", error)
                return False
        stood = self.view.claims.get(record.peer) if isinstance(record, Claim) else None
        news = self.view.merge(record, data, self._wall_clock())
        if isinstance(record, Claim):
            if record.peer != self.me:
                self._transport.learn(record.peer, record.addresses)
            if stood is not None and record.step > stood.step:
                self.notify()  # whoever waits may find that the others have gone on without it
            if record.peer in self.view.claims and self.lost.pop(record.peer, None) is not None:
                self._publish_now.set()  # it has lost this node as well, and takes only a claim with a new number
        elif news:
            self._on_finding(record)
        if news:
            self.notify()
        return news

    async def _serve_push(self, request: Request) -> Response:
        message = decode(Push, request.head)
        for data in message.records:
            try:
                record = check_record(data, swarm=self._swarm, now=self._wall_clock())
            except RecordError as error:
                if error.kind != "expired":
                    raise
                continue  # it ran out on the way; the rest is still good
            self.take(record, data)
        if self._admissions is not None:  # whose claim, among these, has brought its admission
            self._admissions.refuse_stranger(request.peer)
        return Response()

    def remember_peer(self, peer: str) -> None:
        """Push to this peer too, though it has no claim (a coordinator)."""
        self._extra_peers[peer] = None

    async def refresh(self) -> None:
        """Read the claims of every stage, and the accusations and verdicts against whoever is in the view."""
        swarm = self._swarm.hex()
        keys = [claim_key(swarm, stage) for stage in range(self.view.num_stages)]
        peers = {*self.view.claims, self.me}
        keys += [key(swarm, peer) for peer in peers for key in (accusation_key, verdict_key)]
        try:
            records = await self._store.fetch(keys)
        except (SentinelError, OSError) as error:
            log.warning("the DHT could not be read, going on with what is known: %s", error)
            return
        for record, data in records:
            self.take(record, data)

    async def fetch_view(self, peer: str) -> set[str]:
        """Ask a peer for everything that it knows; returns the peers that it knows to take work."""
        known: set[str] = set()
        response = await self._transport.call(peer, Method.VIEW, Empty(), timeout=PUSH_SECONDS)
        for data in decode(Push, response.head).records:
            try:
                record = check_record(data, swarm=self._swarm, now=self._wall_clock())
            except RecordError:
                continue  # expired on the way; whoever wrote it will write it anew
            self.take(record, data)
            if isinstance(record, Claim) and record.state in TAKES_WORK:
                known.add(record.peer)
        return known

    # loops ---------------------------------------------------------------------------

    async def _poll_loop(self) -> None:
        while True:
            await self.refresh()
            seconds = POLL_FORMING_SECONDS if self.forming else POLL_SECONDS
            await asyncio.sleep(seconds * random.uniform(0.8, 1.2))

    async def _publish_loop(self) -> None:
        while True:
            self._publish_now.clear()
            await self.publish()
            try:
                async with asyncio.timeout(self._timing.renew):
                    await self._publish_now.wait()
            except TimeoutError:
                continue

    async def _tick_loop(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.wakefulness.tick()
            self._part_with_strangers()
            if ended := self.view.expire(self._wall_clock()):
                for claim in ended:
                    self._lose(claim)
                self.notify()

    def _part_with_strangers(self) -> None:
        """Drop whoever was admitted and is so no longer: its claim, its streams, and the search for it."""
        if self._admissions is None:
            return
        for peer in self._admissions.look({*self.view.claims, *self.lost}):
            self.lost.pop(peer, None)
            if self.view.mark_gone(peer) is not None:
                log.info("peer %s is admitted no longer", peer[-8:])
                self._transport.drop(peer)
                self.notify()

    async def _connect_loop(self) -> None:
        while True:
            connected = self._transport.connected()
            self._introduced &= connected
            for peer in self._wanted():
                if peer in self._dialling:
                    continue
                if peer not in connected:
                    self._dialling.add(peer)
                    self._spawn(self._dial(peer))
                elif peer not in self._introduced:  # connected for another reason, before it had a claim
                    self._introduced.add(peer)
                    self._spawn(self.introduce(peer))
            await self._changed.wait()

    def _wanted(self) -> list[str]:
        """Siblings and the replicas of the neighbouring stages."""
        if self._claim is None:
            return []
        near = range(self._claim.stage - 1, self._claim.stage + 2)
        return [claim.peer for stage in near for claim in self.view.replicas(stage) if claim.peer != self.me]

    async def _dial(self, peer: str) -> None:
        try:
            for attempt in range(2):
                try:
                    await self._transport.connect(peer, timeout=REDIAL_SECONDS)
                    break
                except SentinelError as error:
                    if attempt == 1:
                        self._mark_gone(peer, str(error))
        finally:
            self._dialling.discard(peer)
        if peer in self._transport.connected():
            self._introduced.add(peer)
            await self.introduce(peer)

    def _peer_gone(self, peer: str) -> None:
        if self.view.stage_of(peer) is None or peer in self._dialling:
            self.notify()
            return
        self._dialling.add(peer)
        self._spawn(self._dial(peer))
        self.notify()

    def _mark_gone(self, peer: str, why: str) -> None:
        if (claim := self.view.mark_gone(peer)) is not None:
            self._lose(claim)
            left = claim.state is NodeState.DRAINING
            log.info("%s of stage %d %s", peer[-8:], claim.stage, "has left" if left else "cannot be reached any more")
            log.debug("peer %s is gone: %s", peer[-8:], why)
            self.notify()

    def _lose(self, claim: Claim) -> None:
        if claim.peer == self.me or claim.state in (NodeState.DRAINING, NodeState.EJECTED):
            return
        self.lost.pop(claim.peer, None)
        self.lost[claim.peer] = claim.addresses
        while len(self.lost) > MAX_LOST:
            del self.lost[next(iter(self.lost))]

    def reachable(self, peer: str) -> bool:
        """Whether a peer has a live claim and is connected, or is being dialled for the first time."""
        return peer == self.me or peer in self.view.claims

    def _spawn(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
