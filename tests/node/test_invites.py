"""Invites that outlive some of the nodes that they name."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.invites import MORE_NODES, invite_by
from protocol.identity import Identity
from protocol.invite import MAX_INVITE_ADDRESSES, parse_invite
from protocol.records import Claim, NodeState
from tests.node.claims import claim

SWARM = "ab" * 32
PEERS = [Identity.generate().peer_id for _ in range(8)]


def address(number: int) -> str:
    return f"/ip4/192.0.2.{number + 1}/tcp/31330/p2p/{PEERS[number]}"


def holder(number: int, *, generation: int = 1, state: NodeState = NodeState.TRAINING, where: str = "") -> Claim:
    return claim(PEERS[number], 0, generation=generation, state=state, addresses=(where or address(number),))


def named(invite: str) -> tuple[str, ...]:
    return parse_invite(invite).addresses


def test_it_names_the_node_itself_and_those_that_were_there_first() -> None:
    others = [holder(number, generation=10 - number) for number in range(1, 7)]
    assert named(invite_by(SWARM, (address(0),), others)) == (address(0), address(6), address(5), address(4))


def test_whoever_is_leaving_or_at_no_address_is_not_named() -> None:
    others = [
        holder(1, state=NodeState.DRAINING),
        holder(2, state=NodeState.SYNCING),
        holder(3, where="/ip4/0.0.0.0/tcp/1/p2p/x"),
        holder(4),
    ]
    assert named(invite_by(SWARM, (address(0),), others)) == (address(0), address(4))


def test_without_anybody_there_is_no_invite() -> None:
    assert invite_by(SWARM, (), []) == ""


@given(own=st.integers(0, 20), others=st.integers(0, 7))
def test_it_is_always_one_that_can_be_read(own: int, others: int) -> None:
    mine = tuple(f"/ip4/198.51.100.{number + 1}/tcp/31330/p2p/{PEERS[0]}" for number in range(own))
    invite = invite_by(SWARM, mine, [holder(number) for number in range(1, 1 + others)])
    if own or others:
        assert len(named(invite)) <= min(MAX_INVITE_ADDRESSES, own + MORE_NODES)
