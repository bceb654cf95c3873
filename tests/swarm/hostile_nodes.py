"""A program for a process of its own: nodes that mistreat an observer, and what it makes of them, as JSON.

Everything is py-libp2p in one trio loop, which cannot be in a process with hivemind.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import multiaddr
import trio

from node.observing.asking import REPLY_BYTES, Asker
from node.observing.counts import Counts
from node.observing.picture import Picture
from protocol import fields
from protocol.framing import FrameKind, FrameReader, encode_head
from protocol.light import light_host, quiet_libraries
from protocol.messages import CONTROL_PROTOCOL, PROTOCOL_VERSION, Hello, Method
from tests.node.observed import SWARM, claimed, status

Answer = Callable[[Any, dict[str, Any]], Awaitable[None]]


async def reply(stream: Any, head: dict[str, Any], body: bytes = b"", *, announced: int | None = None) -> None:
    size = len(body) if announced is None else announced
    await stream.write(encode_head(FrameKind.REPLY, head, size) + body)


async def honest(stream: Any, head: dict[str, Any]) -> None:
    if head["method"] == Method.VIEW:
        await reply(stream, {"id": head["id"], "records": [claimed(1, now=time.time()), b"nonsense"]})
    elif head["method"] == Method.STATUS:
        await reply(stream, {"id": head["id"]}, json.dumps(status()).encode())
    else:
        await reply(stream, {"id": head["id"]}, b"no manifest of this swarm")


async def mute(stream: Any, head: dict[str, Any]) -> None:
    await trio.sleep_forever()


async def leaves(stream: Any, head: dict[str, Any]) -> None:
    await stream.reset()


async def huge(stream: Any, head: dict[str, Any]) -> None:
    await reply(stream, {"id": head["id"]}, announced=REPLY_BYTES + 1)


async def garbage(stream: Any, head: dict[str, Any]) -> None:
    await stream.write(b"\xff" * 4096)


async def no_json(stream: Any, head: dict[str, Any]) -> None:
    await reply(stream, {"id": head["id"]}, b"[" * 100_000)


async def other_answers(stream: Any, head: dict[str, Any]) -> None:
    while True:  # of questions that nobody asked
        await reply(stream, {"id": head["id"] + 1}, b"{}")


KINDS: dict[str, Answer] = {
    kind.__name__: kind for kind in (honest, mute, leaves, huge, garbage, no_json, other_answers)
}


def serve(answer: Answer) -> Callable[[Any], Awaitable[None]]:
    """A handler of streams that greets, and then answers like this."""

    async def handle(stream: Any) -> None:
        reader = FrameReader(lambda kind, head: 1 << 16)
        try:
            while data := await stream.read(1 << 16):
                for frame in reader.feed(data):
                    if frame.kind is FrameKind.HELLO:
                        mine = Hello(version=PROTOCOL_VERSION, swarm=SWARM, agent="hostile", time=time.time())
                        await stream.write(encode_head(FrameKind.HELLO, fields.encode(mine), 0))
                    else:
                        await answer(stream, dict(frame.head))
        except Exception:
            return  # the observer has had enough

    return handle


async def main() -> None:
    quiet_libraries()
    picture, counts = Picture(swarm=SWARM), Counts()
    names: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for name, answer in KINDS.items():
            host = light_host()
            await stack.enter_async_context(host.run(listen_addrs=[multiaddr.Multiaddr("/ip4/127.0.0.1/tcp/0")]))
            host.set_stream_handler(CONTROL_PROTOCOL, serve(answer))
            peer = str(host.get_id())
            address = next(str(text) for text in host.get_addrs() if "/tcp/" in str(text))
            names[peer] = name
            picture.add_seeds([(peer, address)], time.time())
        asking = light_host()
        await stack.enter_async_context(asking.run(listen_addrs=[]))
        asker = Asker(asking, SWARM, counts)
        for _ in range(2):
            await asker.round(picture)
            picture.settle(time.time())
        found = {
            "answers": {names.get(peer, "claimed"): seen.presence for peer, seen in picture.nodes.items()},
            "step": picture.step,
            "outline": picture.outline is not None,
            "counts": [counts.answered, counts.failed],
        }
        print(json.dumps(found))


if __name__ == "__main__":
    trio.run(main)
