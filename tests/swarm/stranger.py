"""A stranger on py-libp2p who sends a node what it should not; run as a program, since hivemind and libp2p cannot be
imported into one process.

Usage: python tests/swarm/stranger.py INVITE. Prints one JSON object: trick -> what the node answered.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Awaitable, Callable

from protocol import fields
from protocol.errors import RemoteError, SentinelError
from protocol.framing import FRAMING_VERSION, MAGIC, PREAMBLE, FrameKind, encode_head
from protocol.invite import parse_invite
from protocol.light import LightSession, run_light
from protocol.messages import CONTROL_PROTOCOL, PROTOCOL_VERSION, TENSOR_PROTOCOL, Hello, Method

SECONDS = 30.0
INVITE = parse_invite(sys.argv[1])
SWARM = bytes.fromhex(INVITE.swarm_id)


async def truncated_frame(session: LightSession) -> str:
    hello = fields.encode(Hello(version=PROTOCOL_VERSION, swarm=SWARM, agent="stranger", time=time.time()))
    await session.send_bytes(encode_head(FrameKind.HELLO, hello, 0)[:20])
    return "sent"  # and the stream ends here


async def huge_body(session: LightSession) -> str:
    await session.hello(SWARM)
    await session.send_bytes(PREAMBLE.pack(MAGIC, FRAMING_VERSION, FrameKind.REQUEST, 10, 1 << 40))
    return await refusal(session)


async def huge_head(session: LightSession) -> str:
    await session.hello(SWARM)
    await session.send_bytes(PREAMBLE.pack(MAGIC, FRAMING_VERSION, FrameKind.REQUEST, 1 << 31, 0))
    return await refusal(session)


async def wrong_magic(session: LightSession) -> str:
    await session.send_bytes(b"GET / HTTP/1.1\r\nHost: node\r\n\r\n")
    return await refusal(session)


async def request_before_hello(session: LightSession) -> str:
    await session.request(Method.STATUS)
    return "answered"


async def foreign_swarm(session: LightSession) -> str:
    await session.hello(bytes(32))
    return "answered"


async def other_version(session: LightSession) -> str:
    await session.hello(SWARM, version=PROTOCOL_VERSION + 1)
    return "answered"


async def train_from_a_stranger(session: LightSession) -> str:
    await session.hello(SWARM)
    await session.request(Method.TRAIN)
    return "answered"


async def body_from_a_stranger(session: LightSession) -> str:
    await session.hello(SWARM)
    await session.request(Method.TRAIN, body=b"x" * 4096)
    return "answered"


async def train_on_the_control_stream(session: LightSession) -> str:
    await session.hello(SWARM)
    await session.request(Method.TRAIN)
    return "answered"


TRICKS: dict[str, tuple[Callable[[LightSession], Awaitable[str]], str]] = {
    "truncated frame": (truncated_frame, CONTROL_PROTOCOL),
    "huge body": (huge_body, CONTROL_PROTOCOL),
    "huge head": (huge_head, CONTROL_PROTOCOL),
    "wrong magic": (wrong_magic, CONTROL_PROTOCOL),
    "request before hello": (request_before_hello, CONTROL_PROTOCOL),
    "foreign swarm": (foreign_swarm, CONTROL_PROTOCOL),
    "other version": (other_version, CONTROL_PROTOCOL),
    "train": (train_from_a_stranger, TENSOR_PROTOCOL),
    "body": (body_from_a_stranger, TENSOR_PROTOCOL),
    "train on control": (train_on_the_control_stream, CONTROL_PROTOCOL),
}


async def refusal(session: LightSession) -> str:
    """What the node says of what it got; it ends the stream afterwards."""
    head = (await session.receive()).head
    return f"{head.get('kind')}: {head.get('message')}"


def play(trick: Callable[[LightSession], Awaitable[str]], protocol: str) -> str:
    try:
        return run_light(trick, INVITE.addresses, seconds=SECONDS, protocol=protocol)
    except RemoteError as error:
        return f"{error.kind}: {error}"
    except SentinelError as error:
        return f"{type(error).__name__}: {error}"


if __name__ == "__main__":
    print(json.dumps({name: play(trick, protocol) for name, (trick, protocol) in TRICKS.items()}))
