"""Invites that name several nodes, so that they work when some of those are gone. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from protocol.errors import InviteError
from protocol.invite import MAX_INVITE_ADDRESSES, Invite
from protocol.records import Claim, NodeState

MORE_NODES = 3
"""Named besides the node itself. Each makes the line longer by an address."""


def invite_by(swarm_id: str, addresses: Sequence[str], claims: Iterable[Claim]) -> str:
    """An invite to a node at ``addresses`` and to the nodes that have been there longest; empty if nobody is known.

    ``claims`` may be anybody's: an address that is none is left out.
    """
    lasting = sorted(
        (claim for claim in claims if claim.state in (NodeState.TRAINING, NodeState.WAITING)),
        key=lambda claim: (claim.generation, claim.peer),
    )
    found = list(addresses[:MAX_INVITE_ADDRESSES])
    named = 0
    for claim in lasting:
        if named == MORE_NODES or len(found) >= MAX_INVITE_ADDRESSES:
            break
        for address in claim.addresses[:1]:
            if address not in found and _usable(swarm_id, address):
                found.append(address)
                named += 1
    return str(Invite(swarm_id=swarm_id, addresses=tuple(found))) if found else ""


def _usable(swarm_id: str, address: str) -> bool:
    try:
        Invite(swarm_id=swarm_id, addresses=(address,))
    except InviteError:
        return False
    return True
