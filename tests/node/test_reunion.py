"""A swarm that was cut in two becomes one again, by itself and whichever side looks first."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from node.membership import Membership, Timing
from node.reunion import Reunion, by_peer
from protocol.fields import encode
from protocol.identity import Identity
from protocol.messages import Method, Push
from protocol.records import Claim, NodeState
from protocol.transports.base import Request, Response, Route
from protocol.transports.memory import MemoryNetwork, MemoryRecords, MemoryTransport
from protocol.transports.sessions import SessionOptions

SWARM = b"\x05" * 32
PATIENCE = 20.0


class Member:
    """A peer with a real membership, whose record store is its own: nobody is found through the DHT."""

    def __init__(self, group: Group, stage: int) -> None:
        self.identity = Identity.generate()
        self.peer = self.identity.peer_id
        self.transport = MemoryTransport(group.network, self.peer, options=SessionOptions(swarm=SWARM))
        self.membership = Membership(
            identity=self.identity,
            swarm=SWARM,
            num_stages=2,
            timing=Timing(lease=60.0, renew=30.0),
            transport=self.transport,
            store=MemoryRecords(SWARM),
            on_finding=lambda finding: None,
        )
        self.transport.serve(Method.VIEW, Route(handler=self._view))
        self.isolated: list[bool] = []
        self.joined: list[str] = []
        self.reunion = Reunion(
            membership=self.membership,
            transport=self.transport,
            seeds=lambda: [(other.peer, ()) for other in group.members if other is not self],
            join_records=self._join_records,
            on_isolated=lambda why: self._note(bool(why)),
            first_pause=0.02,
            longest_pause=0.1,
            isolated_after=0.05,
            rng=random.Random(1),
        )
        self.membership.claim_stage(
            Claim(
                peer=self.peer,
                swarm=SWARM,
                stage=stage,
                addresses=(),
                capacity=1.0,
                state=NodeState.TRAINING,
                step=0,
                digest=b"",
                active_from=0,
                generation=1,
                sequence=0,
                expires=0.0,
            )
        )
        self.running: asyncio.Task[None] | None = None

    def _note(self, isolated: bool) -> None:
        self.isolated.append(isolated)
        self.membership.notify()

    async def _join_records(self, peer: str, addresses: list[str]) -> None:
        self.joined.append(peer)

    async def _view(self, request: Request) -> Response:
        return Response(head=encode(Push(records=tuple(self.membership.view.records()))))

    def knows(self) -> set[str]:
        """The peers in its view."""
        return set(self.membership.view.claims)

    async def until(self, predicate: Callable[[], bool]) -> None:
        """Wait for something that this member would notice."""
        async with asyncio.timeout(PATIENCE):
            await self.membership.wait_until(predicate)


class Group:
    """Some members on one network."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.members: list[Member] = []

    async def start(self, stages: str) -> list[Member]:
        """Members of these stages, who all know each other."""
        self.members = [Member(self, int(stage)) for stage in stages]
        for member in self.members:
            member.membership.start()
            member.running = asyncio.ensure_future(member.reunion.run())
        for one, other in itertools.permutations(self.members, 2):
            await one.membership.introduce(other.peer)
        everybody = {member.peer for member in self.members}
        for member in self.members:
            others = everybody - {member.peer}
            await member.until(lambda member=member, others=others: member.transport.connected() >= others)  # type: ignore[misc]
            assert member.knows() == everybody
        return self.members

    def cut(self, sides: tuple[list[Member], list[Member]], *, healed: bool = False) -> None:
        """Cut the network between two sides, or heal it."""
        for one, other in itertools.product(*sides):
            (self.network.heal if healed else self.network.cut)(one.peer, other.peer)

    async def close(self) -> None:
        for member in self.members:
            assert member.running is not None
            member.running.cancel()
            await asyncio.gather(member.running, return_exceptions=True)
            await member.membership.stop()
            await member.transport.close()


@pytest.fixture
async def group(no_tasks_left: None, tmp_path: Path) -> AsyncIterator[Group]:
    """No members yet."""
    made = Group()
    yield made
    await made.close()


@pytest.mark.parametrize("smaller", [1, 2])
async def test_the_sides_of_a_cut_find_each_other_again(group: Group, smaller: int) -> None:
    members = await group.start("00111")
    everybody = {member.peer for member in members}
    sides = members[:smaller], members[smaller:]
    group.cut(sides)
    for side in sides:
        for member in side:
            await member.until(lambda member=member, side=side: member.knows() == {other.peer for other in side})  # type: ignore[misc]
            assert set(member.membership.lost) == everybody - member.knows()
    group.cut(sides, healed=True)
    for member in members:
        await member.until(lambda member=member: member.knows() == everybody)  # type: ignore[misc]
        assert not member.membership.lost
    assert any(member.joined for member in members), "the two DHTs stay apart"


async def test_a_node_that_is_alone_says_so_and_says_when_it_is_over(group: Group) -> None:
    members = await group.start("01")
    one, other = members
    group.cut(([one], [other]))
    await one.until(lambda: one.isolated[-1:] == [True])
    group.cut(([one], [other]), healed=True)
    await one.until(lambda: one.isolated[-1:] == [False])
    assert other.peer in one.knows()


async def test_without_anybody_lost_a_lonely_node_asks_its_seeds(group: Group) -> None:
    one, other = await group.start("01")
    group.cut(([one], [other]))
    await one.until(lambda: other.peer in one.membership.lost)
    one.membership.lost.clear()
    await one.until(lambda: one.isolated[-1:] == [True])
    group.cut(([one], [other]), healed=True)
    await one.until(lambda: other.peer in one.knows())


async def test_a_peer_that_gave_its_claim_up_is_not_looked_for(group: Group) -> None:
    one, other, third = await group.start("011")
    await other.membership.release()
    await other.transport.close()
    await one.until(lambda: other.peer not in one.transport.connected())
    await one.membership.wait_until(lambda: other.peer not in one.knows(), 5.0)
    assert other.peer not in one.membership.lost
    assert third.peer in one.knows()


def test_addresses_are_sorted_by_peer_and_unreadable_ones_left_out() -> None:
    one, other = Identity.generate().peer_id, Identity.generate().peer_id
    addresses = [
        f"/ip4/127.0.0.1/tcp/1/p2p/{one}",
        "nonsense",
        f"/ip4/127.0.0.1/tcp/2/p2p/{other}",
        f"/ip4/10.0.0.1/tcp/1/p2p/{one}",
    ]
    assert by_peer(addresses) == [(one, (addresses[0], addresses[3])), (other, (addresses[2],))]


async def test_whoever_was_taken_for_dead_is_known_again_as_soon_as_it_shows_itself(group: Group) -> None:
    """As a node that was frozen until others had found it gone: the claim that they knew is buried with it."""
    one, other, _ = await group.start("001")
    other.membership.view.mark_gone(one.peer)
    assert one.peer not in other.knows()
    assert await one.membership.introduce(other.peer)
    assert one.peer in other.knows()
