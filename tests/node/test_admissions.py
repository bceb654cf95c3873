"""Admissions among nodes over memory: news gets around, gaps close, and strangers learn of themselves only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from node.admission_file import AdmissionFile
from node.admissions import Admissions
from node.metrics import Metrics
from protocol.admissions import DAY_SECONDS, Admission, Standing, sign_admission
from protocol.errors import AdmissionError, RefusedError, TransportError
from protocol.fields import decode
from protocol.identity import Identity
from protocol.messages import MAX_ADMISSIONS, AdmissionsAnswer, Empty, Method
from protocol.messages import Admissions as Question
from protocol.transports.base import Request, Response, Route
from protocol.transports.memory import MemoryNetwork, MemoryRecords, MemoryTransport
from protocol.transports.sessions import SessionOptions

SWARM = b"\x07" * 32
PATIENCE = 20.0
COORDINATOR = Identity(bytes(range(32)))


class Office:
    """Peers of one memory network, and the coordinator's signature."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = MemoryNetwork()
        self.peers: list[Peer] = []
        self._serial = 0

    def signed(self, peer: str, *, revoked: bool = False, since: float = 0.0, seconds: float = DAY_SECONDS) -> bytes:
        self._serial += 1
        issued = time.time() - since
        return sign_admission(
            COORDINATOR,
            Admission(
                swarm=SWARM,
                peer=peer,
                serial=self._serial,
                issued=issued,
                expires=issued + seconds,
                revoked=revoked,
            ),
        )

    def peer(self, name: str, *known: bytes, identity: Identity | None = None) -> Peer:
        """A node that has these admissions in its state folder; each knows all that came before it."""
        made = Peer(self, name, known, identity or Identity.generate())
        self.peers.append(made)
        return made

    def member(self, name: str) -> Peer:
        """A node that is admitted and knows of itself only."""
        identity = Identity.generate()
        return self.peer(name, self.signed(identity.peer_id), identity=identity)


class Peer:
    """One node's admissions."""

    def __init__(self, office: Office, name: str, known: tuple[bytes, ...], identity: Identity) -> None:
        self.id = identity.peer_id
        folder = office.folder / name
        folder.mkdir()
        self.file = AdmissionFile(folder)
        self.file.add(known)
        self.transport = MemoryTransport(office.network, self.id, options=SessionOptions(swarm=SWARM))
        self.metrics = Metrics()
        self.excluded: list[AdmissionError] = []
        self.admissions = Admissions(
            me=self.id,
            swarm=SWARM,
            coordinator=COORDINATOR.peer_id,
            transport=self.transport,
            store=MemoryRecords(SWARM),
            file=self.file,
            metrics=self.metrics,
            on_excluded=self.excluded.append,
        )

    def talks_to(self, *others: Peer) -> None:
        """Tells news to these."""
        self.admissions.targets = lambda: {other.id for other in others}

    def knows(self, *signed: bytes) -> bool:
        return set(signed) <= set(self.admissions.roll.all_signed())

    async def ask(self, other: Peer, **words: Any) -> AdmissionsAnswer:
        response = await self.transport.call(other.id, Method.ADMISSIONS, Question(**words), timeout=5)
        return decode(AdmissionsAnswer, response.head)


@pytest.fixture
async def office(tmp_path: Path) -> AsyncIterator[Office]:
    made = Office(tmp_path)
    yield made
    for peer in made.peers:
        await peer.admissions.stop()
        await peer.transport.close()


async def becomes(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells of."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_what_the_coordinator_writes_reaches_everybody_and_whom_it_is_about(office: Office) -> None:
    coordinator = office.peer("coordinator", identity=COORDINATOR)
    one, two, waiting = office.member("one"), office.member("two"), office.peer("waiting")
    coordinator.talks_to(one)
    one.talks_to(two)
    news = office.signed(waiting.id)
    coordinator.file.add([news])
    coordinator.admissions.reread()
    await becomes(lambda: all(peer.knows(news) for peer in (coordinator, one, two, waiting)))
    assert waiting.admissions.own == news and waiting.admissions.admits(waiting.id)
    revoked = office.signed(two.id, revoked=True)
    coordinator.file.add([revoked])
    coordinator.admissions.reread()
    await becomes(lambda: bool(two.knows(revoked)))
    assert one.admissions.look([two.id, one.id]) == [two.id]
    assert two.admissions.look([]) == [] and "revoked" in str(two.excluded[0])


async def test_two_that_know_different_things_both_know_all_after_one_question(office: Office) -> None:
    peers = [Identity(number.to_bytes(32, "big")).peer_id for number in range(1, 40)]
    mine, theirs = [office.signed(peer) for peer in peers[:20]], [office.signed(peer) for peer in peers[20:]]
    one, two = office.member("one"), office.member("two")
    one.file.add([*mine, two.admissions.own])
    two.file.add([*theirs, one.admissions.own])
    one.admissions.reread()
    two.admissions.reread()
    await one.admissions.ask(two.id)
    assert one.knows(*mine, *theirs) and two.knows(*mine, *theirs)
    assert one.admissions.roll.digest() == two.admissions.roll.digest()
    assert await one.admissions.ask(two.id) == []


async def test_a_newcomer_learns_more_than_fit_one_message(office: Office) -> None:
    peers = [Identity(number.to_bytes(32, "big")).peer_id for number in range(1, 2 * MAX_ADMISSIONS + 20)]
    host = office.peer("host", *(office.signed(peer) for peer in peers), identity=COORDINATOR)
    newcomer = office.member("newcomer")  # of whom the host has not heard
    await newcomer.admissions.ask(host.id)
    assert newcomer.admissions.roll.digest() == host.admissions.roll.digest()
    assert set(newcomer.admissions.roll.peers()) == {*peers, newcomer.id}


async def test_a_stranger_learns_of_itself_only_and_brings_nothing_of_its_own(office: Office) -> None:
    host, stranger, gone = office.member("host"), office.peer("stranger"), office.peer("gone")
    assert await stranger.ask(host, after=0) == AdmissionsAnswer(admissions=(), more=False)
    revoked = office.signed(gone.id, revoked=True)
    host.file.add([revoked])
    host.admissions.reread()
    assert await gone.ask(host, after=0) == AdmissionsAnswer(admissions=(revoked,), more=False)
    own = Identity.generate()
    forged = sign_admission(
        own, Admission(swarm=SWARM, peer=stranger.id, serial=99, issued=time.time(), expires=time.time() + 9.0)
    )
    for news in (forged, b"noise"):
        with pytest.raises(RefusedError) as caught:
            await stranger.ask(host, news=(news,))
        assert caught.value.kind in ("signature", "shape")
    assert set(host.admissions.roll.peers()) == {host.id, gone.id}


async def test_a_stranger_is_refused_what_is_not_public_until_it_is_admitted(office: Office) -> None:
    host, other = office.member("host"), office.peer("other")

    async def answer(request: Request) -> Response:
        return Response()

    for method in (Method.AUDIT, Method.END, Method.STATUS):
        host.transport.serve(method, Route(handler=answer, body_limit=1 << 20))
    await other.transport.call(host.id, Method.STATUS, Empty(), timeout=5)
    for method, body in ((Method.AUDIT, (b"x" * 100_000,)), (Method.END, ())):
        with pytest.raises(RefusedError) as caught:
            await other.transport.call(host.id, method, Empty(), body, timeout=5)
        assert caught.value.kind == "not_admitted"
    await other.ask(host, news=(office.signed(other.id),))
    for method in (Method.AUDIT, Method.END):
        await other.transport.call(host.id, method, Empty(), timeout=5)
    text = host.metrics.render().decode()
    assert 'sentinel_strangers_refused_total{where="stream"} 2.0' in text
    assert "sentinel_admissions_known 2.0" in text


async def test_a_volunteer_waits_until_any_seed_has_its_admission(office: Office) -> None:
    seed, other, volunteer = office.member("seed"), office.member("other"), office.peer("volunteer")
    said: list[str] = []
    obtaining = asyncio.create_task(volunteer.admissions.obtain(seed.id, {other.id, seed.id}, said.append))
    await becomes(lambda: bool(said))
    assert said[0].endswith(f"sentinel admit {volunteer.id}")
    other.file.add([office.signed(volunteer.id)])  # nobody tells it: it has to ask
    other.admissions.reread()
    async with asyncio.timeout(PATIENCE):
        await obtaining
    assert volunteer.admissions.admits(volunteer.id)


async def test_one_that_is_revoked_or_over_is_told_and_one_that_was_renewed_is_not(office: Office) -> None:
    old = {"since": 3 * DAY_SECONDS}
    for name, last, ends in (
        ("revoked", {"revoked": True}, "revoked this node's admission"),
        ("over", {"since": 2 * DAY_SECONDS}, "admission ended at"),
        ("renewed", {}, ""),
    ):
        identity = Identity.generate()
        first = office.signed(identity.peer_id, **old)  # type: ignore[arg-type]
        seed = office.peer(f"seed of {name}", office.signed(identity.peer_id, **last), identity=Identity.generate())  # type: ignore[arg-type]
        volunteer = office.peer(name, first, identity=identity)
        assert volunteer.admissions.roll.standing(volunteer.id, time.time()) is Standing.EXPIRED
        async with asyncio.timeout(PATIENCE):
            if not ends:
                await volunteer.admissions.obtain(seed.id, (), lambda why: None)
                continue
            with pytest.raises(AdmissionError, match=f"{ends}.*; ask the coordinator to run: sentinel admit"):
                await volunteer.admissions.obtain(seed.id, (), lambda why: None)


async def test_a_seed_that_is_gone_is_the_callers_business(office: Office) -> None:
    volunteer = office.member("volunteer")
    with pytest.raises(TransportError):
        await volunteer.admissions.obtain(COORDINATOR.peer_id, (), lambda why: None)


async def test_what_is_news_is_in_the_state_folder_for_the_next_start(office: Office) -> None:
    host, other = office.member("host"), office.member("other")
    keeping = asyncio.create_task(host.admissions.run())
    try:
        await host.admissions.ask(other.id)
        await other.ask(host, news=(other.admissions.own,))
        await becomes(lambda: other.admissions.own in host.file.read())
    finally:
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


async def test_a_volunteer_is_reminded_before_the_end_once(office: Office, caplog: pytest.LogCaptureFixture) -> None:
    member = office.member("member")  # for a day
    for _ in range(3):
        member.admissions.look([])
    reminders = [record.getMessage() for record in caplog.records if "admission ends at" in record.getMessage()]
    assert len(reminders) == 1 and reminders[0].endswith(f"sentinel admit {member.id}")
    assert not member.excluded
