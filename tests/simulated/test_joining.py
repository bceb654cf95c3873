"""A node joins a swarm that trains: it arrives with the bits of its siblings, whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from node import averaging, daemon, snapshot
from node.membership import Membership
from node.simulated_swarm import Member, SimulatedSwarm, simulated
from node.trainer import Trainer
from protocol.fields import decode
from protocol.messages import Chunk, Method
from protocol.records import NodeState
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport
from tests.swarm.harness import small_manifest

pytestmark = pytest.mark.timeout(300)

PATIENCE = 120.0
ENDLESS = {"steps": 100_000}
Handler = Callable[[Request], Awaitable[Response]]
MANY_CHUNKS = 1 << 14
"""Bytes of a chunk that make some thirty of the small model's state."""


async def until_trained(member: Member, steps: int) -> None:
    """Wait until a node has trained so many steps."""
    async with asyncio.timeout(PATIENCE):
        while member.node.telemetry.counters.steps < steps:
            assert not member.task.done(), member.node.reason
            await asyncio.sleep(0.02)


async def training(swarm: SimulatedSwarm, replicas: int) -> list[Member]:
    """Starts so many replicas of every stage; returns those of stage 1 once they train."""
    await swarm.coordinate()
    members = swarm.fill(replicas)
    for member in members:
        await until_trained(member, 2)
    return [member for member in members if member.stage == 1]


def trainer_of(member: Member) -> Trainer:
    assert member.node.trainer is not None
    return member.node.trainer


def assert_same_bits(*members: Member) -> None:
    """Wherever they know the digest of one step's parameters, it is the same."""
    digests = [dict(member.node.telemetry.digests) for member in members]
    common = set.intersection(*(set(each) for each in digests))
    assert len(common) >= 3
    assert all(len({each[step] for each in digests}) == 1 for step in common)


def said(member: Member) -> list[str]:
    """Notes from now on why a node is in its state."""
    reasons: list[str] = []
    set_state = member.node.set_state

    def note(state: NodeState, reason: str) -> None:
        reasons.append(reason)
        set_state(state, reason)

    member.node.set_state = note  # type: ignore[method-assign]
    return reasons


@pytest.mark.parametrize("replicas", [1, 2])
async def test_nodes_that_join_arrive_with_the_bits_of_their_siblings(tmp_path: Path, replicas: int) -> None:
    async with simulated(tmp_path, small_manifest(training=ENDLESS)) as swarm:
        siblings = await training(swarm, replicas)
        joined = time.time()
        late = [swarm.join(f"late{number}", stage=1) for number in range(2)]
        reasons = said(late[0])
        for member in late:
            await until_trained(member, 3)
            assert member.node.state is NodeState.TRAINING
        assert_same_bits(*late, *siblings)
        assert reasons.index(next(reason for reason in reasons if reason.startswith("downloading"))) > 0
        assert any(reason.startswith("following the siblings at step") for reason in reasons)
        # In this stage, and since they joined: elsewhere, and before, a busy machine may have kept somebody waiting.
        here = {member.node.membership.me for member in (*late, *siblings)}
        events = [
            event
            for member in (*late, *siblings)
            for event in member.node.telemetry.events
            if event.time >= joined and (event.kind == "out_of_sync" or (event.kind == "strike" and event.peer in here))
        ]
        assert not events


async def test_who_joins_asks_where_the_others_are_when_their_claims_are_old(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Claims are renewed now and then: those of a swarm that has just begun say step 0 for a while."""
    asked = asyncio.Event()
    update_claim, fetch_step = Membership.update_claim, daemon.fetch_step

    def say_step_0(membership: Membership, **changes: Any) -> None:
        if not asked.is_set() and "step" in changes:
            changes |= {"step": 0}
        update_claim(membership, **changes)

    async def fetch(transport: Transport, peer: str) -> int | None:
        step = await fetch_step(transport, peer)
        asked.set()
        return step

    monkeypatch.setattr(Membership, "update_claim", say_step_0)
    monkeypatch.setattr(daemon, "fetch_step", fetch)
    network = {"renew_seconds": 2.0, "lease_seconds": 30.0}
    async with simulated(tmp_path, small_manifest(training=ENDLESS, network=network)) as swarm:
        siblings = await training(swarm, 2)
        for member in siblings:
            await until_trained(member, 6)
        late = swarm.join("late", stage=1)
        await until_trained(late, 3)
        assert_same_bits(late, *siblings)
        assert not [event for event in late.node.telemetry.events if event.kind == "out_of_sync"]


async def test_a_state_that_takes_many_steps_to_fetch_is_caught_up_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Siblings keep one aggregate only, as they do where a stage is large."""
    monkeypatch.setattr(averaging, "MAX_LOGGED_STEPS", 1)
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", MANY_CHUNKS)
    async with simulated(tmp_path, small_manifest(training=ENDLESS)) as swarm:
        siblings = await training(swarm, 2)
        for member in siblings:
            _one_chunk_a_step(member, until=10)
        late = swarm.join("late", stage=1)
        await until_trained(late, 3)
        assert_same_bits(late, *siblings)
        replayed = late.node.telemetry.digests[0][0], late.node.telemetry.losses[0][0]
        assert replayed[1] - replayed[0] >= 5, "it had missed some steps"


async def test_when_a_donor_dies_in_the_middle_the_other_gives_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", MANY_CHUNKS)
    async with simulated(tmp_path, small_manifest(training=ENDLESS)) as swarm:
        dying, living = await training(swarm, 2)
        served = _count_chunks(living)
        _die_at_chunk(swarm, dying, 5)
        late = swarm.join("late", stage=1)
        await until_trained(late, 3)
        assert dying.task.done() and living.node.state is NodeState.TRAINING
        assert_same_bits(late, living)
        assert len(served) == len(set(served)), "nothing came twice from one donor"


async def test_a_node_waits_for_its_turn_with_a_reason_and_strikes_a_donor_that_lies(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest(training=ENDLESS)) as swarm:
        liar, honest = await training(swarm, 2)
        servers = [trainer_of(member).state_server for member in (liar, honest)]
        for server in servers:
            server._may_freeze_at = float("inf")
        late = swarm.join("late", stage=1)
        reasons = said(late)

        async def lie(request: Request) -> Response:
            response = await servers[0]._serve_chunk(request)
            return Response(body=(bytes(len(response.data)),))

        async def wait(request: Request) -> Response:
            while not late.node.telemetry.counters.refused:  # noqa: ASYNC110 - nothing tells of it from outside
                await asyncio.sleep(0.01)
            return await servers[1]._serve_chunk(request)

        _serve_chunks(liar, lie)
        _serve_chunks(honest, wait)
        async with asyncio.timeout(PATIENCE):
            while not any("waiting for a turn" in reason for reason in reasons):  # noqa: ASYNC110 - as above
                await asyncio.sleep(0.01)
        for server in servers:
            server._may_freeze_at = 0.0
        await until_trained(late, 3)
        assert_same_bits(late, honest)
        strikes = [event for event in late.node.telemetry.events if event.kind == "strike"]
        assert {event.peer for event in strikes} == {liar.peer} and "not what most donors hold" in strikes[0].text
        assert any(reason.endswith("; trying again in 1 s") for reason in reasons)


def _serve_chunks(member: Member, handler: Handler) -> None:
    transport = member.node.network.transport
    transport.serve(Method.CHUNK, Route(handler=handler, admits=trainer_of(member)._is_sibling))


def _count_chunks(member: Member) -> list[int]:
    served: list[int] = []

    async def count(request: Request) -> Response:
        served.append(decode(Chunk, request.head).index)
        return await trainer_of(member).state_server._serve_chunk(request)

    _serve_chunks(member, count)
    return served


def _one_chunk_a_step(member: Member, *, until: int) -> None:
    """Give the first chunks slowly."""
    given = 0

    async def slowly(request: Request) -> Response:
        nonlocal given
        given += 1
        trainer = trainer_of(member)
        step = trainer.step
        while given < until and trainer.step == step:  # noqa: ASYNC110 - nothing tells of it from outside
            await asyncio.sleep(0.01)
        return await trainer.state_server._serve_chunk(request)

    _serve_chunks(member, slowly)


def _die_at_chunk(swarm: SimulatedSwarm, member: Member, chunk: int) -> None:
    """Let a node vanish without a word when it is asked for its n-th chunk."""
    given = 0

    async def serve(request: Request) -> Response:
        nonlocal given
        given += 1
        if given < chunk:
            return await trainer_of(member).state_server._serve_chunk(request)
        swarm.fabric.remove(member.peer)
        for other in swarm.members:
            other.node.network.transport.drop_links(member.peer)  # type: ignore[attr-defined]
        member.task.cancel()
        raise AssertionError("nobody hears it")

    _serve_chunks(member, serve)
