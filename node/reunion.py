"""Finding peers again that vanished without a word: after a cut of the network, the swarm becomes one again.

A peer that cannot be reached leaves the view, and whoever is cut off drops everybody. Nothing in the DHT brings the two
sides together again, since each side's DHT has forgotten the other. So the lost are dialled again, for ever, with
growing pauses; the first that answers tells what its side knows, and joins the two DHTs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence

from node.membership import Membership
from protocol.errors import AddressError, SentinelError
from protocol.invite import parse_multiaddr
from protocol.transports.sessions import DialingTransport

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 20.0
DIAL_SECONDS = 4.0
DIALS = 4
"""Peers that are tried at a time."""
ISOLATED_SECONDS = 10.0
"""Without any connection before a node says that it is isolated."""


class Reunion:
    """Looks for the lost as long as there are any, or while nobody at all is connected."""

    def __init__(
        self,
        *,
        membership: Membership,
        transport: DialingTransport,
        seeds: Callable[[], Sequence[tuple[str, tuple[str, ...]]]],
        join_records: Callable[[str, list[str]], Awaitable[None]],
        on_isolated: Callable[[str], None],
        first_pause: float = FIRST_PAUSE_SECONDS,
        longest_pause: float = LONGEST_PAUSE_SECONDS,
        isolated_after: float = ISOLATED_SECONDS,
        rng: random.Random | None = None,
    ) -> None:
        """``seeds()``: peers with their addresses that may be asked when no other is known.
        ``join_records(peer, addresses)`` joins the DHT that a peer belongs to. ``on_isolated`` is told that nobody can
        be reached, in words for people, and an empty text once somebody can."""
        self._membership = membership
        self._transport = transport
        self._seeds = seeds
        self._join_records = join_records
        self._on_isolated = on_isolated
        self._first_pause = first_pause
        self._longest_pause = longest_pause
        self._rng = rng or random.Random()
        self._isolated_after = isolated_after
        self._alone_since: float | None = None
        self._isolated = False

    @property
    def alone(self) -> bool:
        """Whether this node has a claim, needs others for its work, and nobody is connected."""
        membership = self._membership
        return membership.claim is not None and membership.view.num_stages > 1 and not self._transport.connected()

    async def run(self) -> None:
        """Look for ever."""
        pause = self._first_pause
        while True:
            await self._membership.wait_until(lambda: bool(self._membership.lost) or self.alone)
            if await self._look():
                pause = self._first_pause
            self._tell(pause)
            changed = len(self._transport.connected())
            # Whoever comes by itself is as good as one that is found.
            await self._membership.wait_until(
                lambda before=changed: len(self._transport.connected()) > before,  # type: ignore[misc]
                pause * self._rng.uniform(0.8, 1.2),
            )
            self._tell(pause)
            pause = min(2 * pause, self._longest_pause)

    async def _look(self) -> bool:
        """Try some of the lost, or some seeds; true if one was found."""
        lost = self._membership.lost
        known = dict(lost) or dict(self._seeds())
        known.pop(self._membership.me, None)
        tried = self._rng.sample(sorted(known), min(DIALS, len(known)))
        found = await asyncio.gather(*(self._meet(peer, known[peer]) for peer in tried))
        return any(found)

    async def _meet(self, peer: str, addresses: tuple[str, ...]) -> bool:
        """Dial a peer; if it answers, learn what it knows and show this node's claim."""
        try:
            self._transport.learn(peer, addresses)
            await self._transport.connect(peer, timeout=DIAL_SECONDS)
            self._membership.update_claim()  # a new number: the peer has buried the claim that it knew
            await self._membership.introduce(peer)
            await self._membership.fetch_view(peer)
        except SentinelError as error:
            log.debug("%s is not there: %s", peer[-8:], error)
            return False
        self._membership.lost.pop(peer, None)  # it may be there without a claim
        try:
            await self._join_records(peer, list(addresses))
        except SentinelError as error:
            log.warning("the DHT of %s could not be joined: %s", peer[-8:], error)
        return True

    def _tell(self, pause: float) -> None:
        now = time.monotonic()
        if not self.alone:
            self._alone_since = None
            if self._isolated:
                self._on_isolated("")
            self._isolated = False
            return
        self._alone_since = self._alone_since if self._alone_since is not None else now
        if now - self._alone_since >= self._isolated_after:
            self._isolated = True
            lost = len(self._membership.lost)
            self._on_isolated(f"no peer can be reached; looking for {lost} lost ones, again in {pause:.0f} s")


def by_peer(addresses: Sequence[str]) -> list[tuple[str, tuple[str, ...]]]:
    """Multiaddrs by the peer that they lead to; those that this version cannot read are left out."""
    found: dict[str, list[str]] = {}
    for address in addresses:
        with contextlib.suppress(AddressError):
            found.setdefault(parse_multiaddr(address).peer_id, []).append(address)
    return [(peer, tuple(places)) for peer, places in found.items()]
