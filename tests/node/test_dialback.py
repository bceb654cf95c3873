"""Dialling back whoever asks, and nobody else."""

from __future__ import annotations

import asyncio

import pytest

from node.dialback import AT_ONCE, MAX_REMEMBERED, PAUSE_SECONDS, DialBacks, ip_of
from protocol.errors import RefusedError
from protocol.fields import decode, encode
from protocol.messages import DialBack, DialBackAnswer, Method
from protocol.transports.base import Request

TOKEN = bytes(range(16))


def asking(port: int, address: str = "/ip4/127.0.0.1/tcp/5555") -> Request:
    head = encode(DialBack(port=port, token=TOKEN))
    return Request(peer="p", method=Method.DIAL_BACK, head=head, address=address)


class Clock:
    def __init__(self) -> None:
        self.time = 100.0

    def __call__(self) -> float:
        return self.time


async def answer(backs: DialBacks, request: Request) -> DialBackAnswer:
    return decode(DialBackAnswer, (await backs.serve(request)).head)


async def test_the_token_is_shown_where_the_question_came_from() -> None:
    seen: asyncio.Queue[bytes] = asyncio.Queue()

    async def take(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.put_nowait(await reader.read(100))
        writer.close()

    server = await asyncio.start_server(take, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        assert await answer(DialBacks(), asking(port)) == DialBackAnswer(host="127.0.0.1", reached=True)
        assert await seen.get() == TOKEN
    assert await answer(DialBacks(), asking(port)) == DialBackAnswer(host="127.0.0.1", reached=False)


@pytest.mark.parametrize(
    "address", ["", "/dns4/example.org/tcp/1", "/ip4/300.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/1/p2p/x/p2p-circuit", "junk"]
)
async def test_an_address_that_is_not_the_askers_own_is_refused(address: str) -> None:
    assert ip_of(address) is None
    with pytest.raises(RefusedError) as caught:
        await DialBacks().serve(asking(1, address))
    assert caught.value.kind == "unavailable"


async def test_each_address_may_ask_now_and_then() -> None:
    clock = Clock()
    backs = DialBacks(now=clock)
    await backs.serve(asking(1))
    with pytest.raises(RefusedError) as caught:
        await backs.serve(asking(1))
    assert caught.value.kind == "busy"
    await backs.serve(asking(1, "/ip6/::1/tcp/7"))
    clock.time += PAUSE_SECONDS
    await backs.serve(asking(1))


async def test_a_crowd_is_refused_and_forgotten() -> None:
    backs = DialBacks()
    backs._under_way = AT_ONCE
    with pytest.raises(RefusedError):
        await backs.serve(asking(1))
    backs._under_way = 0
    for number in range(MAX_REMEMBERED + 10):
        backs._admit(f"10.0.{number // 256}.{number % 256}")
    assert len(backs._asked) == MAX_REMEMBERED
