"""Dialling somebody back who asks whether others can reach it: ``sentinel doctor`` before it joins.

A node that is asked connects to the address that the question came from, at the port that the question names, and shows
a token. So nobody can be sent to a third party, and nothing but the token of whoever asked is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Callable

from protocol.errors import AddressError, RefusedError
from protocol.fields import decode, encode
from protocol.invite import parse_multiaddr
from protocol.messages import DialBack, DialBackAnswer
from protocol.transports.base import Request, Response

CONNECT_SECONDS = 4.0
PAUSE_SECONDS = 5.0
"""Between two questions of one address."""
AT_ONCE = 4
"""Dials at a time, for everybody together."""
MAX_REMEMBERED = 1024
TOKEN_BYTES = 16


def ip_of(multiaddr: str) -> str | None:
    """The IP address of a multiaddr; None if there is none, or if it is that of a relay."""
    try:
        place = parse_multiaddr(multiaddr, need_peer=False)
    except AddressError:
        return None
    return place.host if place.host_protocol in ("ip4", "ip6") else None


class DialBacks:
    """Answers the questions of one node's peers."""

    def __init__(self, *, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._asked: OrderedDict[str, float] = OrderedDict()
        self._under_way = 0

    async def serve(self, request: Request) -> Response:
        """Dial back, and say whether it worked and where.

        Raises:
            RefusedError: asked too often, or from an address that is none.
        """
        message = decode(DialBack, request.head)
        host = ip_of(request.address)
        if host is None:
            raise RefusedError("the address that you ask from is not known here", kind="unavailable")
        self._admit(host)
        self._under_way += 1
        try:
            reached = await show_token(host, message.port, message.token)
        finally:
            self._under_way -= 1
        return Response(head=encode(DialBackAnswer(host=host, reached=reached)))

    def _admit(self, host: str) -> None:
        now = self._now()
        if self._under_way >= AT_ONCE or now - self._asked.get(host, -PAUSE_SECONDS) < PAUSE_SECONDS:
            raise RefusedError(f"too many dial-backs; ask again in {PAUSE_SECONDS:.0f} s", kind="busy")
        self._asked[host] = now
        self._asked.move_to_end(host)
        while len(self._asked) > MAX_REMEMBERED:
            self._asked.popitem(last=False)


async def show_token(host: str, port: int, token: bytes) -> bool:
    """Connect, write the token, and hang up; whether that worked."""
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(token)
                await writer.drain()
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except (OSError, TimeoutError):
        return False
    return True
