"""An invited swarm in one process: strangers wait outside, the revoked leave, the rest go on without a coordinator."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node.admissions import Admissions
from node.admit import sign
from node.simulated_swarm import Member, SimulatedSwarm, simulated
from protocol.admissions import DAY_SECONDS, Standing
from protocol.errors import AdmissionError, RefusedError
from protocol.identity import Identity
from protocol.invite import parse_invite
from protocol.manifest import Manifest
from protocol.messages import Empty, Method, Push, Snapshot
from protocol.records import NodeState, sign_claim
from protocol.transports.memory import MemoryTransport
from protocol.transports.sessions import SessionOptions
from tests.node.claims import claim
from tests.swarm.harness import small_manifest

pytestmark = pytest.mark.timeout(300)

PATIENCE = 90.0


def invited(folder: Path, **sections: Any) -> Manifest:
    """A manifest of two stages whose coordinator's key is in ``folder``/coordinator."""
    coordinator = Identity.load_or_create(folder / "coordinator" / "identity.key")
    return small_manifest(
        model={"layers": 2},
        stages={"layers_per_stage": [1, 1]},
        admission={"mode": "invited", "coordinator": coordinator.peer_id},
        **sections,
    )


class Office:
    """The coordinator's machine, where a person runs ``sentinel admit``."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self._folder = folder
        self._manifest = manifest

    def identity(self, name: str) -> Identity:
        """The key of a node that has not started yet."""
        return Identity.load_or_create(self._folder / name / "identity.key")

    def admit(self, peer: str, *, days: int = 30, revoke: bool = False) -> None:
        sign(self._folder / "coordinator", self._manifest, peer, days=days, revoke=revoke, now=time.time())


async def becomes(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells of."""
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.02)


def trains(member: Member, step: int) -> Callable[[], bool]:
    return lambda: member.node.state is NodeState.TRAINING and member.node.step >= step


async def under_way(members: list[Member]) -> None:
    """Wait until they train."""
    for member in members:
        await becomes(trains(member, 2))


def knows(member: Member, peer: str) -> bool:
    return member.node.membership is not None and peer in member.node.membership.view.claims


def admissions_of(member: Member) -> Admissions:
    assert member.node.admissions is not None
    return member.node.admissions


async def admitted_pair(swarm: SimulatedSwarm, office: Office) -> list[Member]:
    for stage in range(2):
        office.admit(office.identity(f"s{stage}r0").peer_id)
    return swarm.fill(1)


async def test_a_volunteer_waits_visibly_and_goes_on_by_itself_once_it_is_admitted(tmp_path: Path) -> None:
    manifest = invited(tmp_path, training={"steps": 0})
    office = Office(tmp_path, manifest)
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        pair = await admitted_pair(swarm, office)
        late = swarm.join("late", stage=1)
        await becomes(lambda: "waiting until the coordinator runs" in late.node.reason)
        assert late.node.reason.endswith(f"sentinel admit {late.peer}")
        await under_way(pair)
        assert late.node.membership is None and not any(knows(member, late.peer) for member in pair)
        office.admit(late.peer)
        await becomes(trains(late, 3))
        for member in pair:
            await becomes(lambda member=member: knows(member, late.peer))  # type: ignore[misc]
            assert admissions_of(member).admits(late.peer)


async def test_a_revoked_node_is_dropped_by_all_and_leaves_with_exit_code_4_while_the_rest_go_on(
    tmp_path: Path,
) -> None:
    manifest = invited(tmp_path, training={"steps": 0})
    office = Office(tmp_path, manifest)
    async with simulated(tmp_path, manifest) as swarm:
        coordinator = await swarm.coordinate()
        office.admit(office.identity("bad").peer_id)
        pair = await admitted_pair(swarm, office)
        await under_way(pair)
        bad = swarm.join("bad", stage=1)
        await becomes(trains(bad, 2))
        office.admit(bad.peer, revoke=True)
        async with asyncio.timeout(PATIENCE):
            error = await bad.outcome()
        assert isinstance(error, AdmissionError) and error.exit_code == 4
        assert "revoked" in str(error) and f"sentinel admit {bad.peer}" in str(error)
        for member in (coordinator, *pair):
            await becomes(lambda member=member: not knows(member, bad.peer))  # type: ignore[misc]
            assert admissions_of(member).roll.standing(bad.peer, time.time()) is Standing.REVOKED
        step = max(member.node.step for member in pair)
        for member in pair:
            await becomes(trains(member, step + 2))

        again = swarm.join("bad", stage=1)  # what it has in its state folder opens no door
        async with asyncio.timeout(PATIENCE):
            assert isinstance(await again.outcome(), AdmissionError)


async def test_an_admission_that_ends_ends_the_node_and_one_that_is_renewed_does_not(tmp_path: Path) -> None:
    manifest = invited(tmp_path, training={"steps": 0})
    office = Office(tmp_path, manifest)
    async with simulated(tmp_path, manifest) as swarm:
        coordinator = await swarm.coordinate()
        for name, days in (("s0r0", 30), ("s1r0", 1), ("brief", 1)):
            office.admit(office.identity(name).peer_id, days=days)
        pair = swarm.fill(1)
        await under_way(pair)
        brief = swarm.join("brief", stage=1)
        await becomes(trains(brief, 3))
        first = admissions_of(pair[1]).own
        office.admit(pair[1].peer, days=30)
        await becomes(lambda: admissions_of(pair[0]).roll.signed(pair[1].peer) != first)
        await becomes(lambda: admissions_of(pair[1]).own != first)
        for member in (coordinator, *pair, brief):  # two days pass
            admissions_of(member)._wall_clock = lambda: time.time() + 2 * DAY_SECONDS
        async with asyncio.timeout(PATIENCE):
            error = await brief.outcome()
        assert isinstance(error, AdmissionError) and "admission ended at" in str(error)
        for member in pair:
            await becomes(lambda member=member: not knows(member, brief.peer))  # type: ignore[misc]
        step = pair[0].node.step
        for member in pair:
            await becomes(trains(member, step + 2))
        membership = pair[0].node.membership
        assert membership is not None
        await becomes(lambda: membership.view.claims[pair[1].peer].admission == admissions_of(pair[1]).own != first)


async def test_members_hand_out_admissions_when_the_coordinator_has_left(tmp_path: Path) -> None:
    manifest = invited(tmp_path, training={"steps": 0})
    office = Office(tmp_path, manifest)
    async with simulated(tmp_path, manifest) as swarm:
        coordinator = await swarm.coordinate()
        late, gone = office.identity("late").peer_id, office.identity("gone").peer_id
        office.admit(late)
        office.admit(gone)
        office.admit(gone, revoke=True)
        pair = await admitted_pair(swarm, office)
        for member in pair:
            await becomes(trains(member, 1))
            await becomes(lambda member=member: {late, gone} <= set(admissions_of(member).roll.peers()))  # type: ignore[misc]
        await under_way(pair)
        coordinator.node.stop()
        await coordinator.outcome()
        through = pair[0].node.status()["invite"]
        joined = swarm.join("late", stage=1, invite=parse_invite(through))
        refused = swarm.join("gone", stage=1, invite=parse_invite(through))
        await becomes(trains(joined, 2))
        async with asyncio.timeout(PATIENCE):
            assert isinstance(await refused.outcome(), AdmissionError)


async def test_a_stranger_gets_only_what_joining_and_looking_need(tmp_path: Path) -> None:
    manifest = invited(tmp_path, training={"steps": 0})
    office = Office(tmp_path, manifest)
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        pair = await admitted_pair(swarm, office)
        for member in pair:
            await becomes(trains(member, 1))
        mallory = Identity.generate()
        options = SessionOptions(swarm=bytes.fromhex(manifest.swarm_id))
        transport = MemoryTransport(swarm.fabric, mallory.peer_id, options=options)
        host = pair[0]
        metrics = host.node.metrics
        try:
            for method in (Method.MANIFEST, Method.VIEW, Method.STATUS):
                await transport.call(host.peer, method, Empty(), timeout=5, reply_limit=1 << 20)
            known = await transport.call(host.peer, Method.ADMISSIONS, Empty(), timeout=5)
            assert list(known.head["admissions"]) == [] and known.head["more"] is False

            own = claim(mallory.peer_id, 0, swarm=host.node.swarm, expires=time.time() + 30.0)
            for admission in (b"", admissions_of(host).own, b"noise"):
                data = sign_claim(mallory, replace(own, admission=admission))
                with pytest.raises(RefusedError) as caught:
                    await transport.call(host.peer, Method.PUSH, Push(records=(data,)), timeout=5)
                assert caught.value.kind == "not_admitted"
            assert not knows(host, mallory.peer_id)

            for method, message, body in (
                (Method.SNAPSHOT, Snapshot(step=1), ()),
                (Method.TRAIN, Empty(), (b"x" * 4096,)),
                (Method.AUDIT, Empty(), (b"x" * 4096,)),
                (Method.PARAMETERS, Empty(), ()),
            ):
                with pytest.raises(RefusedError) as caught:
                    await transport.call(host.peer, method, message, body, timeout=5)
                assert caught.value.kind == "not_admitted"
            text = metrics.render().decode()
            assert 'sentinel_strangers_refused_total{where="stream"} 4.0' in text
            assert 'sentinel_strangers_refused_total{where="record"} 3.0' in text
            assert "sentinel_admissions_known 2.0" in text
        finally:
            await transport.close()
