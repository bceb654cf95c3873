"""Asking nodes over py-libp2p: one host, one stream to each node that is kept from round to round. Runs on trio.

The library raises many unrelated types, and leaves with what went wrong in its own tasks: whatever it raises means
that a node did not answer, or that a new host is needed.
"""

from __future__ import annotations

import logging
import random
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import trio
from libp2p.peer.id import ID

from node.observing.counts import Counts
from node.observing.picture import Picture, Seen
from node.observing.reports import Report, read_outline, read_report
from protocol.errors import RemoteError
from protocol.light import LightSession, light_host, open_session
from protocol.messages import Method

log = logging.getLogger(__name__)

ASK_SECONDS: Final = 5.0
"""For one node: dial, greeting and answers."""

AT_ONCE: Final = 12
"""Nodes that are asked at a time. Each may send ``REPLY_BYTES``, and that is held in memory until it is read."""

REPLY_BYTES: Final = 256 * 1024
"""Longest answer; the status of a node of a large swarm has 100 KiB."""

MAX_SESSIONS: Final = 160
"""Streams that are kept open, the most recently used ones: more than are asked in a round."""

CLOSE_SECONDS: Final = 0.5


class Asker:
    """Asks the nodes of one swarm through one host, which has to be running."""

    def __init__(self, host: Any, swarm: bytes, counts: Counts) -> None:
        self._host = host
        self._swarm = swarm
        self._counts = counts
        self._sessions: OrderedDict[str, LightSession] = OrderedDict()

    async def round(self, picture: Picture) -> None:
        """Ask everybody whose turn it is, and take the answers in."""
        asked = picture.to_ask()
        in_view = {seen.peer for seen in picture.to_view(random.sample(asked, len(asked)))}
        views: list[Sequence[bytes]] = []
        limit = trio.CapacityLimiter(AT_ONCE)

        async def one(seen: Seen) -> None:
            async with limit:
                report = await self._ask(seen, picture, views if seen.peer in in_view else None)
            if report is None:
                self._counts.failed += 1
                picture.failed(seen.peer, time.time())
            else:
                self._counts.answered += 1
                picture.answered(seen.peer, report, time.time())

        async with trio.open_nursery() as nursery:
            for seen in asked:
                nursery.start_soon(one, seen)
        picture.merge(views, time.time())

    async def _ask(self, seen: Seen, picture: Picture, views: list[Sequence[bytes]] | None) -> Report | None:
        """What a node says; None if it does not answer. Its view is added to ``views``."""
        with trio.move_on_after(ASK_SECONDS):
            if (session := self._sessions.get(seen.peer)) is not None:
                try:
                    return await self._questions(session, seen, picture, views)
                except Exception as error:
                    # The node may have closed a stream that was idle for long, so one failure proves nothing.
                    log.debug("peer %s: %s: %s; once more", seen.peer[-8:], type(error).__name__, error)
            await self._leave(seen.peer)
            try:
                return await self._questions(await self._open(seen), seen, picture, views)
            except Exception as error:
                log.debug("peer %s does not answer: %s: %s", seen.peer[-8:], type(error).__name__, error)
        await self._leave(seen.peer)
        return None

    async def _questions(
        self, session: LightSession, seen: Seen, picture: Picture, views: list[Sequence[bytes]] | None
    ) -> Report:
        report = read_report(await session.status())
        # Whoever tells its status answers, also if it refuses the rest; a newcomer has no manifest yet.
        with suppress(RemoteError):
            if picture.outline is None:
                frame = await session.request(Method.MANIFEST)
                picture.know(read_outline(bytes(frame.body), self._swarm))
        with suppress(RemoteError):
            if views is not None:
                views.append(await session.signed_records())
        self._sessions[seen.peer] = session
        self._sessions.move_to_end(seen.peer)
        if len(self._sessions) > MAX_SESSIONS:
            await self._leave(next(iter(self._sessions)))
        return report

    async def _open(self, seen: Seen) -> LightSession:
        return await open_session(
            self._host, seen.peer, seen.addresses, self._swarm, agent="sentinel-observe", reply_limit=REPLY_BYTES
        )

    async def _leave(self, peer: str) -> None:
        """End what connects to a peer, in a moment or not at all."""
        self._sessions.pop(peer, None)
        known = ID.from_string(peer)
        with trio.CancelScope(shield=True, deadline=trio.current_time() + CLOSE_SECONDS), suppress(Exception):
            await self._host.disconnect(known)
        with suppress(Exception):
            self._host.get_peerstore().clear_peerdata(known)


async def watch(picture: Picture, counts: Counts, publish: Callable[[], None], *, interval: float) -> None:
    """Ask round after round until cancelled. ``publish`` is called without arguments after each; it must not block.

    interval: seconds from the end of a round to the next, on average.
    """
    while True:
        host = light_host()
        counts.hosts += 1
        try:
            async with host.run(listen_addrs=[]):
                asker = Asker(host, picture.swarm, counts)
                while True:
                    await asker.round(picture)
                    picture.settle(time.time())
                    counts.rounds += 1
                    publish()
                    # Not all observers of a swarm at once.
                    await trio.sleep(interval * random.uniform(0.8, 1.2))
        except Exception:
            log.exception("the libp2p host failed and took all streams with it; making a new one")
        await trio.sleep(interval)
