"""A member's signature over the part that it sends to the owner of a slice.

It binds swarm, step, attempt, members, owner and number of microbatches, so that the owner can show later what it was
sent, and cannot show anything else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from protocol.framing import Buffer
from protocol.hops import body_digest
from protocol.identity import Identity, verify
from protocol.packing import pack


@dataclass(frozen=True, slots=True, kw_only=True)
class PartClaim:
    """What a member says of a part."""

    step: int
    attempt: int
    members: tuple[str, ...]
    owner: str
    microbatches: int


class PartSigner:
    """Signs this node's parts, and checks those of others."""

    def __init__(self, identity: Identity, swarm: bytes) -> None:
        self._identity = identity
        self._swarm = swarm

    def sign(self, claim: PartClaim, body: Sequence[Buffer]) -> bytes:
        """64 bytes, over a part whose bytes are ``body``, one buffer after another."""
        return self._identity.sign("part", self._signed(claim, body))

    def check(self, peer: str, claim: PartClaim, body: Sequence[Buffer], signature: bytes) -> bool:
        """Whether a member has signed this part."""
        return verify(peer, "part", self._signed(claim, body), signature)

    def _signed(self, claim: PartClaim, body: Sequence[Buffer]) -> bytes:
        about = [claim.step, claim.attempt, list(claim.members), claim.owner, claim.microbatches]
        return pack([self._swarm, *about, body_digest(body)])
