"""What a membership tells others of its node, and when it wakes those who wait here."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from node.membership import Membership, Timing
from protocol.identity import Identity
from protocol.transports.memory import MemoryNetwork, MemoryRecords, MemoryTransport
from protocol.transports.sessions import SessionOptions
from tests.node.claims import SWARM, claim

PATIENCE = 20.0


class Member:
    """A node's membership, which finds nobody through the DHT and renews nothing during a test."""

    def __init__(self, network: MemoryNetwork) -> None:
        identity = Identity.generate()
        self.peer = identity.peer_id
        self.transport = MemoryTransport(network, self.peer, options=SessionOptions(swarm=SWARM))
        self.membership = Membership(
            identity=identity,
            swarm=SWARM,
            num_stages=2,
            timing=Timing(lease=60.0, renew=30.0),
            transport=self.transport,
            store=MemoryRecords(SWARM),
            on_finding=lambda finding: None,
        )
        self.membership.claim_stage(claim(self.peer, 0, expires=time.time() + 60.0))

    def knows(self, other: Member) -> bool:
        return other.peer in self.membership.view.claims


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Member, Member]]:
    """Two siblings who have not heard of each other."""
    network = MemoryNetwork()
    one, two = Member(network), Member(network)
    yield one, two
    for member in (one, two):
        await member.membership.stop()
        await member.transport.close()


async def test_a_sibling_that_was_connected_before_it_had_a_claim_is_shown_ours(pair: tuple[Member, Member]) -> None:
    one, two = pair
    one.membership.start()
    await one.transport.connect(two.peer, timeout=PATIENCE)
    await two.membership.introduce(one.peer)
    assert one.knows(two)
    async with asyncio.timeout(PATIENCE):
        await two.membership.wait_until(lambda: two.knows(one))


async def test_whoever_waits_looks_again_when_anothers_claim_is_further(pair: tuple[Member, Member]) -> None:
    one, two = pair
    await two.membership.introduce(one.peer)

    def gone_on() -> bool:
        return one.membership.view.claims[two.peer].step > 5

    waiting = asyncio.create_task(one.membership.wait_until(gone_on))
    two.membership.update_claim(step=7)
    await two.membership.introduce(one.peer)
    async with asyncio.timeout(PATIENCE):
        assert await waiting
