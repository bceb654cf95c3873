"""What every transport promises, asked of memory and of libp2p alike."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import pytest

from protocol.errors import (
    CallTimeoutError,
    FrameError,
    LocalError,
    MessageError,
    PeerGoneError,
    PeerUnreachableError,
    ProtocolVersionError,
    RefusedError,
    SentinelError,
    SwarmMismatchError,
    TensorError,
)
from protocol.framing import FrameKind
from protocol.messages import Aggregate, Chunk, Empty, Method, Part, StreamKind
from protocol.transports.base import Request, Response
from protocol.transports.sessions import MAX_SERVED_AT_ONCE, Transport
from tests.protocol.peers import NOBODY, PATIENCE, SWARM, Peers, RawPeer, becomes, recorder, serve, until

MIB = 1 << 20
PART = Part(step=1, attempt=0, members=(), microbatches=1, signature=bytes(64))


async def ask(
    caller: Transport, callee: Transport | str, method: Method = Method.VIEW, *body: bytes, **more: Any
) -> Response:
    """One call with a message that fits the method."""
    peer = callee if isinstance(callee, str) else callee.peer_id
    message = {Method.PART: PART, Method.AGGREGATE: Aggregate(step=1)}.get(method, Empty())
    return await caller.call(peer, method, message, body, **{"timeout": PATIENCE, **more})


class Stuck:
    """A handler that waits until it is told to go on, and tells when it was cancelled."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.go_on = asyncio.Event()
        self.running = 0

    async def __call__(self, request: Request) -> Response:
        self.running += 1
        self.started.set()
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        finally:
            self.running -= 1
        return Response()


class Gone:
    """Waits for a transport to report that a peer is gone."""

    def __init__(self, transport: Transport) -> None:
        self.peers: list[str] = []
        self.event = asyncio.Event()
        transport.on_peer_gone(self._note)

    def _note(self, peer: str) -> None:
        self.peers.append(peer)
        self.event.set()


# asking and answering --------------------------------------------------------------------


async def test_a_request_arrives_with_its_peer_message_and_body_and_the_answer_comes_back(peers: Peers) -> None:
    one, two = await peers.pair()
    seen: list[Request] = []

    async def handler(request: Request) -> Response:
        seen.append(request)
        return Response(head={"step": 7}, body=(b"ab", b"", memoryview(b"cd")))

    serve(two, Method.PART, handler)
    response = await ask(one, two, Method.PART, b"12", b"", b"345", reply_limit=10)
    (request,) = seen
    assert (request.peer, request.method, request.body) == (one.peer_id, Method.PART, b"12345")
    assert request.head["step"] == 1 and request.head["members"] == []
    assert response.data == b"abcd" and response.head["step"] == 7
    assert recorder(one).outcomes == [("part", "ok")]


async def test_an_answer_may_be_empty(peers: Peers) -> None:
    one, two = await peers.pair()

    async def handler(request: Request) -> Response:
        assert request.body == b""
        return Response()

    serve(two, Method.VIEW, handler)
    assert (await ask(one, two)).data == b""


async def test_large_bodies_arrive_whole_both_ways_while_small_calls_go_on(peers: Peers) -> None:
    one, two = await peers.pair()
    for transport in (one, two):
        serve(transport, Method.PART)
        serve(transport, Method.VIEW)
    body = os.urandom(8 * MIB)
    large = [
        asyncio.create_task(ask(*way, Method.PART, body, reply_limit=8 * MIB))
        for way in ((one, two), (two, one), (one, two))
    ]
    for _ in range(20):
        await ask(one, two)
        await ask(two, one)
    assert all(response.data == body for response in await asyncio.gather(*large))
    assert recorder(one).moved["out"] > 3 * 8 * MIB  # two requests and an answer


async def test_200_requests_at_once_get_their_own_answers_in_any_order(peers: Peers) -> None:
    one, two = await peers.pair()
    turn = {index: asyncio.Event() for index in range(200)}
    served = 0
    most = 0

    async def handler(request: Request) -> Response:
        nonlocal served, most
        index = int.from_bytes(request.body, "big")
        served += 1
        most = max(most, served)
        turn[index].set()
        if index % 2 == 0:
            await turn[index + 1].wait()  # so that each even one is answered after the odd one behind it
        served -= 1
        return Response(body=(request.body * 100,))

    serve(two, Method.PART, handler)
    bodies = [index.to_bytes(2, "big") for index in range(200)]
    answers = await asyncio.gather(*(ask(one, two, Method.PART, body, reply_limit=200) for body in bodies))
    assert [answer.data for answer in answers] == [body * 100 for body in bodies]
    assert 2 <= most <= MAX_SERVED_AT_ONCE
    assert len(two._servers) == 1  # all over one stream


async def test_more_requests_than_are_served_at_once_wait_and_are_served_later(peers: Peers) -> None:
    one, two = await peers.pair()
    stuck = Stuck()
    serve(two, Method.PART, stuck)
    serve(two, Method.VIEW)
    calls = [asyncio.create_task(ask(one, two, Method.PART)) for _ in range(MAX_SERVED_AT_ONCE + 10)]
    await until(stuck.started)
    while stuck.running < MAX_SERVED_AT_ONCE:
        await ask(one, two)  # the control stream is not held up
    assert stuck.running == MAX_SERVED_AT_ONCE
    stuck.go_on.set()
    await asyncio.gather(*calls)


async def test_first_calls_at_once_share_one_stream(peers: Peers) -> None:
    one, two = await peers.pair()
    serve(two, Method.VIEW)
    await asyncio.gather(*(ask(one, two) for _ in range(10)), one.connect(two.peer_id, timeout=PATIENCE))
    assert len(two._servers) == 1
    assert one.connected() == {two.peer_id} and two.connected() == frozenset()


# giving up -------------------------------------------------------------------------------


async def test_a_call_that_times_out_cancels_its_handler_and_leaves_the_stream_usable(peers: Peers) -> None:
    one, two = await peers.pair()
    stuck = Stuck()
    serve(two, Method.VIEW, stuck)
    serve(two, Method.STATUS)
    await one.connect(two.peer_id, timeout=PATIENCE)
    with pytest.raises(CallTimeoutError, match=two.peer_id):
        await ask(one, two, timeout=0.1)
    await until(stuck.cancelled)
    await ask(one, two, Method.STATUS)
    assert len(two._servers) == 1
    assert recorder(one).outcomes == [("view", "timeout"), ("status", "ok")]


async def test_a_caller_that_is_cancelled_cancels_its_handler(peers: Peers) -> None:
    one, two = await peers.pair()
    stuck = Stuck()
    serve(two, Method.PART, stuck)
    call = asyncio.create_task(ask(one, two, Method.PART))
    await until(stuck.started)
    call.cancel()
    await until(stuck.cancelled)
    assert (await asyncio.gather(call, return_exceptions=True))[0].__class__ is asyncio.CancelledError
    assert recorder(one).outcomes == [("part", "cancelled")]


async def test_an_answer_that_comes_too_late_does_no_harm(peers: Peers) -> None:
    one, two = await peers.pair()
    started, finish = asyncio.Event(), asyncio.Event()

    async def stubborn(request: Request) -> Response:
        started.set()
        while True:
            try:
                await finish.wait()
                return Response(body=(bytes(100),))
            except asyncio.CancelledError:
                continue  # answers although nobody waits any more

    serve(two, Method.AGGREGATE, stubborn)
    serve(two, Method.CHUNK)
    call = asyncio.create_task(ask(one, two, Method.AGGREGATE, reply_limit=100))
    await until(started)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    finish.set()
    await one.call(two.peer_id, Method.CHUNK, Chunk(step=1, index=0), timeout=PATIENCE)
    assert len(two._servers) == 1


# refusals --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raised", "expected", "kind"),
    [
        (RefusedError("full", kind="busy"), RefusedError, "busy"),
        (TensorError("two by three", kind="shape"), RefusedError, "shape"),
        (MessageError("End lacks the field step"), MessageError, "message"),
        (LocalError("disk full\nreally"), RefusedError, "unavailable"),
        (ValueError("a secret"), RefusedError, "internal"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_an_error_of_a_handler_arrives_with_its_kind(
    memory_peers: Peers, raised: Exception, expected: type[SentinelError], kind: str
) -> None:
    one, two = await memory_peers.pair()

    async def handler(request: Request) -> Response:
        raise raised

    serve(two, Method.VIEW, handler)
    if kind == "internal":  # a bug is the loop's to report, with its traceback
        asyncio.get_running_loop().set_exception_handler(None)
    with pytest.raises(expected) as caught:
        await ask(one, two)
    assert caught.value.kind == kind  # type: ignore[attr-defined]
    assert "secret" not in str(caught.value) and "\n" not in str(caught.value)
    assert recorder(one).outcomes == [("view", kind)]
    blamed = kind not in ("unavailable", "internal")
    assert [peer for peer, _ in recorder(two).errors] == ([one.peer_id] if blamed else [])


async def test_a_refusal_crosses_the_network_and_the_stream_goes_on(peers: Peers) -> None:
    one, two = await peers.pair()

    async def handler(request: Request) -> Response:
        raise RefusedError("not now", kind="busy")

    serve(two, Method.VIEW, handler)
    serve(two, Method.STATUS)
    with pytest.raises(RefusedError, match="not now") as caught:
        await ask(one, two)
    assert caught.value.kind == "busy"
    await ask(one, two, Method.STATUS)
    assert len(two._servers) == 1


async def test_an_oversize_request_ends_the_stream_before_its_handler_sees_it(peers: Peers) -> None:
    one, two = await peers.pair()
    seen: list[int] = []

    async def handler(request: Request) -> Response:
        seen.append(len(request.body))
        return Response()

    serve(two, Method.PART, handler, body_limit=1000)
    # The peer is told why where the bytes under way leave it the time; else it sees the stream end.
    with pytest.raises((FrameError, PeerGoneError)):
        await ask(one, two, Method.PART, bytes(2000))
    assert [error.kind for _, error in recorder(two).errors if isinstance(error, FrameError)] == ["frame"]
    await ask(one, two, Method.PART, bytes(1000))  # over a new stream
    assert seen == [1000]


async def test_an_oversize_answer_ends_the_stream_and_the_next_call_opens_another(peers: Peers) -> None:
    one, two = await peers.pair()
    serve(two, Method.PART)
    with pytest.raises(FrameError, match="101 bytes where 100 are allowed"):
        await ask(one, two, Method.PART, bytes(101), reply_limit=100)
    assert [peer for peer, _ in recorder(one).errors] == [two.peer_id]
    assert (await ask(one, two, Method.PART, bytes(100), reply_limit=100)).data == bytes(100)


async def test_a_handler_whose_answer_fits_no_frame_answers_with_an_error(peers: Peers) -> None:
    one, two = await peers.pair()

    async def handler(request: Request) -> Response:
        return Response(head={"records": [bytes(4096)] * 100})

    serve(two, Method.VIEW, handler)
    with pytest.raises(RefusedError) as caught:
        await ask(one, two)
    assert caught.value.kind == "too_large"


async def test_a_method_that_is_not_served_is_refused(peers: Peers) -> None:
    one, two = await peers.pair()
    with pytest.raises(RefusedError) as caught:
        await ask(one, two, Method.STATUS)
    assert caught.value.kind == "method"


async def test_a_peer_that_is_not_admitted_is_refused_with_its_body_unread_and_can_ask_again(peers: Peers) -> None:
    one, two = await peers.pair()
    seen: list[Request] = []

    async def handler(request: Request) -> Response:
        seen.append(request)
        return Response()

    serve(two, Method.PART, handler, admits=lambda peer: peer != one.peer_id)
    with pytest.raises(RefusedError) as caught:
        await ask(one, two, Method.PART)
    assert caught.value.kind == "not_admitted"
    with pytest.raises(RefusedError) as caught:
        await ask(one, two, Method.PART, bytes(200_000))
    assert caught.value.kind == "not_admitted"
    assert seen == []
    serve(two, Method.PART, handler)
    await ask(one, two, Method.PART, b"body")
    assert [bytes(request.body) for request in seen] == [b"body"]


async def test_a_restricted_node_answers_strangers_only_what_they_may_ask(peers: Peers) -> None:
    one, two = await peers.pair()

    async def handler(request: Request) -> Response:
        return Response()

    for method in (Method.PART, Method.STATUS):
        serve(two, method, handler)
    two.restrict(lambda peer, method: peer != one.peer_id or method is Method.STATUS)
    serve(two, Method.END, handler)  # it makes no difference whether a method is served before or after
    await ask(one, two, Method.STATUS)
    for method, body in ((Method.PART, bytes(200_000)), (Method.PART, b""), (Method.END, b"")):
        with pytest.raises(RefusedError) as caught:
            await ask(one, two, method, body)
        assert caught.value.kind == "not_admitted"
    two.restrict(lambda peer, method: True)
    await ask(one, two, Method.PART, b"body")


async def test_a_peer_of_another_swarm_is_told_apart(peers: Peers) -> None:
    one, other = await peers.peer(), await peers.peer(swarm=b"\x02" * 32)
    serve(other, Method.VIEW)
    with pytest.raises(SwarmMismatchError):
        await ask(one, other)
    with pytest.raises(SwarmMismatchError):
        await one.connect(other.peer_id, timeout=PATIENCE)
    assert one.connected() == frozenset() and not other._servers
    assert {type(error) for _, error in recorder(other).errors} == {SwarmMismatchError}


async def test_a_peer_with_another_version_is_told_what_to_do(peers: Peers) -> None:
    old, new = await peers.peer(version=1), await peers.peer(version=2)
    with pytest.raises(ProtocolVersionError, match="upgraded"):
        await old.connect(new.peer_id, timeout=PATIENCE)
    with pytest.raises(ProtocolVersionError, match="upgraded"):
        await new.connect(old.peer_id, timeout=PATIENCE)


async def test_a_peer_that_is_not_there_is_unreachable(peers: Peers) -> None:
    one = await peers.peer()
    with pytest.raises(PeerUnreachableError, match=NOBODY):
        await ask(one, NOBODY)
    with pytest.raises(PeerUnreachableError):
        await one.connect(NOBODY, timeout=PATIENCE)
    assert recorder(one).outcomes == [("view", "unreachable")]


# the end of a peer -----------------------------------------------------------------------


async def test_a_peer_that_closes_fails_pending_calls_and_is_reported_gone(peers: Peers) -> None:
    one, two = await peers.pair()
    stuck = Stuck()
    serve(two, Method.PART, stuck)
    gone = Gone(one)
    await one.connect(two.peer_id, timeout=PATIENCE)
    call = asyncio.create_task(ask(one, two, Method.PART))
    await until(stuck.started)
    await two.close()
    with pytest.raises(PeerGoneError):
        await call
    await until(gone.event)
    assert gone.peers == [two.peer_id] and one.connected() == frozenset()
    assert stuck.cancelled.is_set() and stuck.running == 0


async def test_a_peer_that_crashes_fails_pending_calls_and_is_reported_gone(peers: Peers) -> None:
    one, two = await peers.pair()
    stuck = Stuck()
    serve(two, Method.PART, stuck)
    gone = Gone(one)
    await one.connect(two.peer_id, timeout=PATIENCE)
    calls = [asyncio.create_task(ask(one, two, Method.PART)) for _ in range(5)]
    await until(stuck.started)
    await peers.crash(two)
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert all(isinstance(outcome, PeerGoneError) for outcome in outcomes), outcomes
    await until(gone.event)
    assert gone.peers == [two.peer_id]
    with pytest.raises((PeerUnreachableError, PeerGoneError)):
        await ask(one, two)


async def test_a_silent_peer_is_noticed_by_its_missing_heartbeats(peers: Peers) -> None:
    one, two = await peers.pair(heartbeat_seconds=0.05, dead_after_seconds=0.4)
    stuck = Stuck()
    serve(two, Method.PART, stuck)
    gone = Gone(one)
    await one.connect(two.peer_id, timeout=PATIENCE)
    call = asyncio.create_task(ask(one, two, Method.PART))  # on the tensor stream, which has no heartbeat
    await until(stuck.started)
    peers.freeze(two)
    with pytest.raises(PeerGoneError, match="control stream"):
        await call
    await until(gone.event)
    assert gone.peers == [two.peer_id] and one.connected() == frozenset()


async def test_a_quiet_but_living_peer_keeps_its_session(peers: Peers) -> None:
    one, two = await peers.pair(heartbeat_seconds=0.02, dead_after_seconds=0.5)
    gone = Gone(one)
    await one.connect(two.peer_id, timeout=PATIENCE)
    session = one._clients[(two.peer_id, StreamKind.CONTROL)]
    start = recorder(one).moved["out"]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):  # twice the time in which a dead peer is given up
            await session.closed.wait()
    assert recorder(one).moved["out"] > start and not gone.peers


async def test_a_caller_that_does_not_read_its_answers_is_cut_off(peers: Peers) -> None:
    one, two = await peers.pair(write_seconds=0.3)
    answered = asyncio.Event()

    async def handler(request: Request) -> Response:
        answered.set()
        return Response(body=(bytes(64 * MIB),))

    serve(two, Method.AGGREGATE, handler)
    serve(two, Method.CHUNK)
    await one.call(two.peer_id, Method.CHUNK, Chunk(step=1, index=0), timeout=PATIENCE)
    link = one._clients[(two.peer_id, StreamKind.TENSOR)].link
    (server,) = two._servers
    call = asyncio.create_task(ask(one, two, Method.AGGREGATE, reply_limit=64 * MIB))
    link.pause()
    await until(answered)
    await becomes(lambda: server not in two._servers)
    link.resume()  # now the caller learns that the stream has ended, or gets what was still under way
    (outcome,) = await asyncio.gather(call, return_exceptions=True)
    assert isinstance(outcome, PeerGoneError | Response)


async def test_a_writer_waits_for_a_reader_that_is_slow(peers: Peers) -> None:
    one, two = await peers.pair()
    arrived = RawPeer.answer(two)
    near = await RawPeer.dial(one, two.peer_id, StreamKind.TENSOR)
    near.send(FrameKind.PING, {"id": 0})
    async with asyncio.timeout(PATIENCE):
        far = await arrived.get()
    await far.receive()
    far.link.pause()

    sent = 0

    async def write() -> None:
        nonlocal sent
        while sent < 256:
            near.send(FrameKind.REPLY, {"id": sent}, bytes(MIB))
            sent += 1
            await near.link.drain()

    writing = asyncio.create_task(write())
    before = -1
    while before != sent:  # until it stands still; kernel, p2pd and flow control hold a few MiB each
        before = sent
        await asyncio.sleep(0.3)
    assert 0 < sent < 128 and not writing.done()
    far.link.resume()
    for index in range(256):
        assert (await far.receive()).head["id"] == index
    await writing
    near.link.close()
    far.link.close()


# closing ---------------------------------------------------------------------------------


async def test_dropping_a_peer_ends_both_directions_and_it_can_come_back(peers: Peers) -> None:
    one, two = await peers.pair()
    for transport in (one, two):
        serve(transport, Method.VIEW)
        serve(transport, Method.PART)
    gone_one, gone_two = Gone(one), Gone(two)
    for caller, callee in ((one, two), (two, one)):
        await ask(caller, callee)
        await ask(caller, callee, Method.PART)
    one.drop(two.peer_id)
    await until(gone_one.event)
    await until(gone_two.event)
    assert gone_one.peers == [two.peer_id] and gone_two.peers == [one.peer_id]
    await ask(one, two)
    await ask(two, one, Method.PART)
    one.drop(NOBODY)  # nothing to do


async def test_closing_cancels_handlers_and_fails_own_calls(peers: Peers) -> None:
    one, two = await peers.pair()
    stuck = Stuck()
    serve(one, Method.PART, stuck)
    serve(two, Method.PART, stuck)
    calls = [asyncio.create_task(ask(*way, Method.PART)) for way in ((one, two), (two, one))]
    await until(stuck.started)
    await becomes(lambda: stuck.running == 2)
    await one.close()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [PeerGoneError, PeerGoneError]
    with pytest.raises(PeerGoneError):
        await ask(one, two)
    await one.close()  # twice does no harm


async def test_closing_while_a_stream_is_being_opened_fails_the_call_and_cancels_nobody(peers: Peers) -> None:
    one, two = await peers.pair()
    arrived = RawPeer.answer(two)  # takes the stream and never says hello
    call = asyncio.create_task(ask(one, two))
    async with asyncio.timeout(PATIENCE):
        silent = await arrived.get()
    await silent.receive()
    await one.close()
    with pytest.raises(PeerGoneError):
        await call
    silent.link.close()


async def test_links_that_have_ended_are_forgotten(peers: Peers) -> None:
    one, two = await peers.pair()
    serve(two, Method.VIEW)
    for _ in range(5):
        await ask(one, two)
        one.drop(two.peer_id)
    await becomes(lambda: not two._servers)
    await ask(one, two)
    assert len(one._links) <= 2 and len(two._links) <= 2  # type: ignore[attr-defined]


# hello -----------------------------------------------------------------------------------


async def test_each_side_learns_how_far_the_other_ones_clock_is_ahead(peers: Peers) -> None:
    one = await peers.peer(wall_clock=lambda: 1_000_000.0)
    two = await peers.peer(wall_clock=lambda: 1_000_100.0)
    await one.connect(two.peer_id, timeout=PATIENCE)
    assert recorder(one).offsets == {two.peer_id: 100.0}
    assert recorder(two).offsets == {one.peer_id: -100.0}


async def test_a_peer_that_never_says_hello_is_given_up(peers: Peers) -> None:
    one, two = await peers.peer(handshake_seconds=0.2), await peers.peer()
    arrived = RawPeer.answer(two)
    with pytest.raises(CallTimeoutError, match="hello"):
        await one.connect(two.peer_id, timeout=PATIENCE)
    assert (await arrived.get()).link is not None
    assert one.connected() == frozenset()


async def test_a_dial_that_takes_too_long_times_out(peers: Peers) -> None:
    one, two = await peers.pair()
    RawPeer.answer(two)
    with pytest.raises(CallTimeoutError, match="could not be dialled"):
        await one.connect(two.peer_id, timeout=0.2)
    with pytest.raises(CallTimeoutError):
        await ask(one, two, timeout=0.1)


# hostile peers ---------------------------------------------------------------------------


async def test_a_stranger_who_says_nothing_is_cut_off(peers: Peers) -> None:
    one, two = await peers.peer(), await peers.peer(handshake_seconds=0.2)
    raw = await RawPeer.dial(one, two.peer_id)
    assert (await raw.receive()).kind is FrameKind.ERROR
    await raw.ended()
    assert not two._servers


HOSTILE_FIRST: list[tuple[FrameKind, dict[str, Any], bytes]] = [
    (FrameKind.REQUEST, {"id": 1, "method": "view"}, b""),
    (FrameKind.REQUEST, {"id": 1, "method": "part"}, b"body before any hello"),
    (FrameKind.PING, {"id": 0}, b""),
    (FrameKind.HELLO, {}, b""),
    (FrameKind.HELLO, {"version": 1, "swarm": SWARM, "agent": "raw", "time": 1.0}, b"hello with a body"),
    (FrameKind.HELLO, {"version": 1, "swarm": SWARM, "agent": "raw", "time": float("nan")}, b""),
    (FrameKind.HELLO, {"version": "1", "swarm": SWARM, "agent": "raw", "time": 1.0}, b""),
    (FrameKind.BYE, {}, b""),
]


@pytest.mark.parametrize(("kind", "head", "body"), HOSTILE_FIRST)
async def test_a_hostile_first_frame_ends_the_stream(
    memory_peers: Peers, kind: FrameKind, head: dict[str, Any], body: bytes
) -> None:
    await _server_survives(memory_peers, [(kind, head, body)], hello=False)


HOSTILE_LATER: list[tuple[FrameKind, dict[str, Any], bytes]] = [
    (FrameKind.REQUEST, {}, b""),
    (FrameKind.REQUEST, {"id": -1, "method": "view"}, b""),
    (FrameKind.REQUEST, {"id": [1], "method": "view"}, b""),
    (FrameKind.REQUEST, {"id": 1, "method": ["part"]}, b"body"),
    (FrameKind.REQUEST, {"id": 1, "method": {"part": 1}}, b""),
    (FrameKind.REQUEST, {"id": 1, "method": "no such method"}, b"body"),
    (FrameKind.REQUEST, {"id": 1, "method": "status"}, b"body where none is allowed"),
    (FrameKind.CANCEL, {"id": {"a": []}}, b""),
    (FrameKind.CANCEL, {"id": 1}, b"a body"),
    (FrameKind.PING, {"id": 0}, b"a body"),
    (FrameKind.PONG, {"id": 0}, b""),
    (FrameKind.REPLY, {"id": 1}, b""),
    (FrameKind.ERROR, {"id": 1, "kind": "x", "message": "x"}, b""),
    (FrameKind.BYE, {}, b""),
]


@pytest.mark.parametrize(("kind", "head", "body"), HOSTILE_LATER)
async def test_a_hostile_frame_ends_the_stream_and_nothing_else(
    memory_peers: Peers, kind: FrameKind, head: dict[str, Any], body: bytes
) -> None:
    await _server_survives(memory_peers, [(kind, head, body)], hello=True)


async def test_two_requests_with_one_id_end_the_stream(memory_peers: Peers) -> None:
    await _server_survives(memory_peers, [(FrameKind.REQUEST, {"id": 1, "method": "push"}, b"")] * 2, hello=True)


async def test_hostile_frames_over_the_network(p2p_peers: Peers) -> None:
    await _server_survives(p2p_peers, [HOSTILE_LATER[2]], hello=True)


async def _server_survives(peers: Peers, frames: list[tuple[FrameKind, dict[str, Any], bytes]], *, hello: bool) -> None:
    one, two = await peers.pair()
    stuck = Stuck()
    serve(two, Method.VIEW)
    serve(two, Method.STATUS, body_limit=0)
    serve(two, Method.PUSH, stuck)
    raw = await RawPeer.dial(one, two.peer_id)
    if hello:
        raw.hello()
        assert (await raw.receive()).kind is FrameKind.HELLO
    for kind, head, body in frames:
        raw.send(kind, head, *([body] if body else []))
    await raw.ended()
    assert not two._servers and stuck.running == 0
    await ask(one, two)  # everybody else is served as before


async def test_harmless_oddities_are_answered(memory_peers: Peers) -> None:
    one, two = await memory_peers.pair()
    serve(two, Method.VIEW)
    serve(two, Method.PART)
    raw = await RawPeer.dial(one, two.peer_id)
    raw.hello()
    assert (await raw.receive()).kind is FrameKind.HELLO
    raw.send(FrameKind.CANCEL, {"id": 99})
    raw.send(FrameKind.PING, {})
    assert (await raw.receive()).kind is FrameKind.PONG
    raw.send(FrameKind.REQUEST, {"id": 5, "method": "nonsense", "new": 1})
    raw.send(FrameKind.REQUEST, {"id": 6, "method": "part"})  # a tensor method on the control stream
    for request_id in (5, 6):
        frame = await raw.receive()
        assert (frame.kind, frame.head["id"], frame.head["kind"]) == (FrameKind.ERROR, request_id, "method")
    raw.link.close()


HOSTILE_ANSWERS: list[tuple[FrameKind, dict[str, Any], bytes, type[SentinelError]]] = [
    (FrameKind.REPLY, {"id": 0}, bytes(11), FrameError),
    (FrameKind.REPLY, {"id": 7}, bytes(11), FrameError),
    (FrameKind.REPLY, {"id": [0]}, b"body", FrameError),
    (FrameKind.REPLY, {"id": {}}, b"", FrameError),
    (FrameKind.REPLY, {}, bytes(11), FrameError),
    (FrameKind.REQUEST, {"id": 0, "method": "view"}, b"", FrameError),
    (FrameKind.PING, {"id": 0}, b"", FrameError),
    (FrameKind.CANCEL, {"id": 0}, b"", FrameError),
    (FrameKind.PONG, {"id": 0}, b"a body", FrameError),
    (FrameKind.ERROR, {"id": 0}, b"", MessageError),
    (FrameKind.ERROR, {"id": 0, "kind": ["x"], "message": "x"}, b"", MessageError),
    (FrameKind.ERROR, {"id": -1, "kind": "busy", "message": "go away"}, b"", RefusedError),
    (FrameKind.HELLO, {"version": 1}, b"", MessageError),
    (FrameKind.BYE, {}, b"", PeerGoneError),
]


@pytest.mark.parametrize(("kind", "head", "body", "expected"), HOSTILE_ANSWERS)
async def test_a_hostile_answer_fails_the_call_with_a_typed_error(
    memory_peers: Peers, kind: FrameKind, head: dict[str, Any], body: bytes, expected: type[SentinelError]
) -> None:
    one, two = await memory_peers.pair()
    arrived = RawPeer.answer(two)
    call = asyncio.create_task(ask(one, two, reply_limit=10))
    raw = await arrived.get()
    assert (await raw.receive()).kind is FrameKind.HELLO
    raw.hello()
    while (await raw.receive()).kind is not FrameKind.REQUEST:
        continue  # a heartbeat
    raw.send(kind, head, *([body] if body else []))
    with pytest.raises(expected) as caught:
        await call
    assert type(caught.value) is expected
    await raw.ended()
    assert one.connected() == frozenset()


async def test_an_answer_to_nobodys_question_is_ignored(memory_peers: Peers) -> None:
    one, two = await memory_peers.pair()
    arrived = RawPeer.answer(two)
    call = asyncio.create_task(ask(one, two, reply_limit=10))
    raw = await arrived.get()
    raw.hello()
    while (await raw.receive()).kind is not FrameKind.REQUEST:
        continue
    raw.send(FrameKind.REPLY, {"id": 99}, b"other")
    raw.send(FrameKind.ERROR, {"id": 98, "kind": "x", "message": "x"})
    raw.send(FrameKind.REPLY, {"id": 0}, b"mine")
    raw.send(FrameKind.REPLY, {"id": 0}, b"again")
    assert (await call).data == b"mine"


# memory only -----------------------------------------------------------------------------


async def test_a_cut_network_ends_streams_and_refuses_new_ones_until_it_heals(memory_peers: Peers) -> None:
    one, two = await memory_peers.pair()
    three = await memory_peers.peer()
    stuck = Stuck()
    for transport in (one, two, three):
        serve(transport, Method.VIEW)
        serve(transport, Method.PART, stuck)
    gone_one, gone_two = Gone(one), Gone(two)
    await ask(one, two)
    await ask(two, one)
    await ask(one, three)
    call = asyncio.create_task(ask(one, two, Method.PART))
    await until(stuck.started)
    network = memory_peers.network  # type: ignore[attr-defined]
    network.cut(one.peer_id, two.peer_id)
    with pytest.raises(PeerGoneError):
        await call
    await until(gone_one.event)
    await until(gone_two.event)
    assert gone_one.peers == [two.peer_id] and gone_two.peers == [one.peer_id]
    for caller, callee in ((one, two), (two, one)):
        with pytest.raises(PeerUnreachableError):
            await ask(caller, callee)
        await ask(caller, three)
    network.heal(one.peer_id, two.peer_id)
    await ask(one, two)
    await ask(two, one)


async def test_a_receiver_owns_what_it_gets_from_memory(memory_peers: Peers) -> None:
    one, two = await memory_peers.pair()
    kept: list[Any] = []

    async def handler(request: Request) -> Response:
        kept.append(request.body)
        return Response(body=(request.body,))

    serve(two, Method.PART, handler)
    body = bytearray(b"original")
    response = await ask(one, two, Method.PART, body, reply_limit=8)  # type: ignore[arg-type]
    kept[0][:] = b"changed!"
    assert body == b"original" and response.data == b"original"


async def test_requests_under_way_when_a_stream_ends_are_not_begun(memory_peers: Peers) -> None:
    one, two = await memory_peers.pair()
    stuck = Stuck()
    serve(two, Method.PUSH, stuck)
    raw = await RawPeer.dial(one, two.peer_id)
    raw.hello()
    await raw.receive()
    raw.send(FrameKind.REQUEST, {"id": 1, "method": "push"})
    two.drop(one.peer_id)
    await raw.ended()
    await asyncio.sleep(0)
    assert stuck.running == 0 and not stuck.started.is_set()
