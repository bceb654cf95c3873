"""A node from its start to its goodbye, in swarms over memory: what ends it, what it waits for, where it goes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from node import daemon
from node.assembly import StageParts
from node.coordinator import PeerReport, fetch_status
from node.simulated_swarm import Member, simulated
from node.status import build_status
from protocol.errors import (
    DataSourceError,
    InviteError,
    ManifestError,
    MemoryTooSmallError,
    MessageError,
    PreflightError,
    ProtocolVersionError,
    SettingsError,
    SwarmMismatchError,
)
from protocol.identity import Identity
from protocol.invite import Invite, parse_invite
from protocol.manifest import Manifest
from protocol.messages import Method
from protocol.records import Claim, NodeState
from protocol.transports.base import Request, Response, Route
from tests.swarm.harness import small_manifest

PATIENCE = 60.0


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE):
        while not condition():  # noqa: ASYNC110 - nothing tells of a state from outside
            await asyncio.sleep(0.01)


async def outcome(member: Member) -> Exception | None:
    async with asyncio.timeout(PATIENCE):
        return await member.outcome()


def addresses_of(*members: Member) -> tuple[str, ...]:
    return tuple(f"/ip4/127.0.0.1/tcp/1/p2p/{member.peer}" for member in members)


def invite_to(*members: Member, swarm_id: str = "") -> Invite:
    return Invite(swarm_id or members[0].node.swarm.hex(), addresses_of(*members))


def claims(member: Member) -> dict[str, Claim]:
    return member.node.membership.view.claims if member.node.membership is not None else {}


def set_options(member: Member, **changes: Any) -> None:
    transport = member.node.network.transport
    transport.options = replace(transport.options, **changes)


# seeds that are not what the invite promises ----------------------------------------------


async def test_a_seed_of_another_swarm_ends_the_start_with_a_sentence(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest()) as swarm:
        coordinator = await swarm.coordinate()
        error = await outcome(swarm.join("node", invite=invite_to(coordinator, swarm_id="ab" * 32)))
    assert isinstance(error, SwarmMismatchError)
    assert str(error) == "the seed belongs to another swarm than the invite names; ask for a new invite"


async def test_another_protocol_version_ends_the_start_with_a_sentence(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest()) as swarm:
        set_options(await swarm.coordinate(), version=2)
        error = await outcome(swarm.join("node"))
    assert isinstance(error, ProtocolVersionError)
    assert "another protocol version than this software (version 1); upgrade the older of the two" in str(error)


@pytest.mark.parametrize(("shift", "side"), [(10.0, "behind"), (-10.0, "ahead of")])
async def test_a_clock_that_is_off_ends_the_start_and_names_the_offset(tmp_path: Path, shift: float, side: str) -> None:
    async with simulated(tmp_path, small_manifest()) as swarm:
        set_options(await swarm.coordinate(), wall_clock=lambda: time.time() + shift)
        error = await outcome(swarm.join("node"))
    assert isinstance(error, PreflightError) and error.exit_code == 5
    assert f"clock is {abs(shift):.1f} s {side} the swarm's; set it" in str(error)


async def test_a_clock_that_is_off_a_little_is_no_reason(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest()) as swarm:
        set_options(await swarm.coordinate(), wall_clock=lambda: time.time() + 2.0)
        node = swarm.join("node")
        await until(lambda: node.node.state is NodeState.WAITING)


async def test_a_manifest_that_does_not_match_the_invite_is_refused(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest()) as swarm:
        coordinator = await swarm.coordinate()
        coordinator.node.manifest = small_manifest(training={"learning_rate": 1.0})
        error = await outcome(swarm.join("node"))
    assert isinstance(error, ManifestError) and error.exit_code == 2


async def test_a_lying_seed_is_passed_over_for_an_honest_one(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest()) as swarm:
        honest = await swarm.coordinate()
        liar = swarm.join("liar")
        await until(lambda: liar.node.state is NodeState.WAITING)
        liar.node.manifest = small_manifest(training={"learning_rate": 1.0})
        node = swarm.join("node", invite=invite_to(liar, honest))
        await until(lambda: node.node.state is NodeState.WAITING)
        assert node.node.manifest == swarm.manifest


async def test_a_seed_that_is_not_ready_is_asked_again(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest()) as swarm:
        coordinator = await swarm.coordinate()
        coordinator.node.manifest = None
        node = swarm.join("node")
        await until(lambda: "no seed answers yet" in node.node.reason)
        assert node.node.state is NodeState.BOOTSTRAPPING and "no manifest yet" in node.node.reason
        coordinator.node.manifest = swarm.manifest
        await until(lambda: node.node.state is NodeState.WAITING)


async def test_a_seed_that_comes_late_is_found(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest()) as swarm:
        coordinator = await swarm.coordinate()
        early = swarm.join("early", invite=invite_to(coordinator))
        await until(lambda: early.node.state is NodeState.WAITING)
        early.node.stop()
        await outcome(early)
        node = swarm.join("node", invite=invite_to(early))
        await until(lambda: "no seed answers yet" in node.node.reason)
        again = swarm.join("early")  # the same state folder, so the same peer
        assert again.peer == early.peer
        await until(lambda: node.node.state is NodeState.WAITING)


async def test_cached_peers_lead_back_and_those_of_another_swarm_do_no_harm(tmp_path: Path) -> None:
    manifest, other = small_manifest(), small_manifest(training={"learning_rate": 1.0})
    gone = f"/ip4/127.0.0.1/tcp/1/p2p/{Identity.generate().peer_id}"
    async with simulated(tmp_path / "other", other) as elsewhere, simulated(tmp_path / "here", manifest) as swarm:
        elsewhere.fabric = swarm.fabric
        stranger, coordinator = await elsewhere.coordinate(), await swarm.coordinate()
        first = swarm.join("first")
        await until(lambda: first.node.state is NodeState.WAITING)
        node = swarm.join("node", invite=Invite(manifest.swarm_id, (gone,)))
        node.node.folder.save_peers(addresses_of(stranger, first, coordinator))
        await until(lambda: node.node.state is NodeState.WAITING)


async def test_an_invite_to_oneself_says_so(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest()) as swarm:
        await swarm.coordinate()
        node = swarm.join("node")
        await until(lambda: node.node.state is NodeState.WAITING)
        node.node.stop()
        await outcome(node)
        (tmp_path / "node" / "peers.json").unlink(missing_ok=True)
        error = await outcome(swarm.join("node", invite=invite_to(node)))
    assert isinstance(error, InviteError) and "names this node itself" in str(error)


# what a node cannot do ---------------------------------------------------------------------


async def test_a_drill_is_refused_where_the_manifest_allows_none(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest(verifier={"allow_drills": False})) as swarm:
        await swarm.coordinate()
        error = await outcome(swarm.join("node", attack="random"))
    assert isinstance(error, SettingsError) and error.exit_code == 2
    assert "allows no drills" in str(error) and "leave out --drill" in str(error)


async def test_a_stage_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest()) as swarm:
        await swarm.coordinate()
        error = await outcome(swarm.join("node", stage=3))
    assert isinstance(error, SettingsError) and "has stages 0 to 2" in str(error)


async def test_stages_that_fit_no_machine_are_refused(tmp_path: Path) -> None:
    manifest = small_manifest(
        model={"width": 65536, "layers": 192, "heads": 64, "kv_heads": 64, "ffn": 262144},
        stages={"layers_per_stage": [64, 64, 64]},
    )
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        error = await outcome(swarm.join("node"))
    assert isinstance(error, MemoryTooSmallError) and error.exit_code == 5
    assert "no stage fits: it needs" in str(error) and "MiB are free" in str(error)


@pytest.mark.parametrize(("content", "says"), [(None, "No such file"), ("", "holds no text"), ("short", "fewer than")])
async def test_data_that_is_missing_or_empty_ends_a_node_of_the_first_stage(
    tmp_path: Path, content: str | None, says: str
) -> None:
    path = tmp_path / "data.txt"
    if content is not None:
        path.write_text(content)
    async with simulated(tmp_path, small_manifest(data={"source": f"file:{path}"})) as swarm:
        coordinator = await swarm.coordinate()
        error = await outcome(swarm.join("node", stage=0))
        assert isinstance(error, DataSourceError) and error.exit_code == 5
        assert "data.source" in str(error)
        assert says in str(error) or content is None
        assert claims(coordinator) == {}  # nobody was led to wait for it


async def test_a_node_without_the_data_holds_another_stage(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest(data={"source": f"file:{tmp_path}/none.txt"})) as swarm:
        await swarm.coordinate()
        nodes = [swarm.join(f"node{number}") for number in range(3)]
        await until(lambda: {build_status(node.node)["stage"] for node in nodes} == {1, 2})
        await until(lambda: nodes[0].node.reason.endswith("waiting for more volunteers: 1 for stage 0"))


# where nodes go ------------------------------------------------------------------------------


@pytest.mark.timeout(240)
async def test_twelve_nodes_that_start_at_once_spread_evenly_over_four_stages(tmp_path: Path) -> None:
    manifest = small_manifest(
        model={"layers": 4, "width": 32, "ffn": 64},
        stages={"layers_per_stage": [1, 1, 1, 1]},
        training={"steps": 1, "sequences_per_step": 12},
    )
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        nodes = [swarm.join(f"node{number}") for number in range(12)]
        outcomes = await asyncio.gather(*(member.outcome() for member in nodes))
    assert outcomes == [None] * 12
    assert Counter(member.node.stage for member in nodes) == {0: 3, 1: 3, 2: 3, 3: 3}
    # One swarm, not several; who got ready too late for the only step has fetched what it made of the stage.
    held = {(member.node.stage, member.node.trainer.parameters) for member in nodes if member.node.trainer is not None}
    assert len(held) == 4
    assert len({round(loss, 9) for member in nodes for _, loss in member.node.telemetry.losses}) == 1


@pytest.mark.parametrize(("stage", "method"), [(0, "share_done"), (1, "round_join"), (2, "round_join")])
async def test_a_replica_that_gets_ready_last_is_told_what_it_could_not_hear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: int, method: str
) -> None:
    """Its siblings must not go on to wait for it while it waits for them, for as long as a step may take."""
    manifest = small_manifest(stages={"min_replicas": 2}, training={"steps": 3})
    others_wait = asyncio.Event()
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        members = swarm.fill(2)
        sibling, late = (member for member in members if member.stage == stage)
        heard = sibling.node.telemetry.request_done

        def request_done(asked: str, outcome: str) -> None:
            heard(asked, outcome)
            if (asked, outcome) == (method, "method"):
                others_wait.set()

        async def assemble(**parts: Any) -> StageParts:
            if parts["identity"].peer_id == late.peer:
                await others_wait.wait()
            return await daemon.assemble_stage(**parts)

        monkeypatch.setattr(sibling.node.telemetry, "request_done", request_done)
        monkeypatch.setattr(daemon, "assemble_stage", daemon.assemble, raising=False)
        monkeypatch.setattr(daemon, "assemble", assemble)
        async with asyncio.timeout(PATIENCE):
            assert await asyncio.gather(*(member.outcome() for member in members)) == [None] * len(members)
        assert others_wait.is_set()
        assert all(
            member.node.metrics.averaging_rounds.labels(outcome="failed")._value.get() == 0 for member in members
        )


async def test_a_stage_that_the_one_to_move_cannot_hold_is_taken_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.forming.STUCK_SECONDS", 0.5)

    async def unfit(manifest: Manifest) -> dict[int, str]:
        return {0: "data.source: not here"}

    async with simulated(tmp_path, small_manifest(training={"steps": 1})) as swarm:
        coordinator = await swarm.coordinate()
        monkeypatch.setattr("node.forming.choose_stage", lambda claims, **_: 1 + len(claims) % 2)
        nodes: list[Member] = []
        for number in range(4):  # one after another, so that they take the stages 1, 2, 1, 2
            nodes.append(swarm.join(f"node{number}"))
            if number < 3:
                nodes[-1].node._unfit = unfit  # type: ignore[method-assign]
            await until(lambda: len(claims(coordinator)) == len(nodes))
        outcomes = await asyncio.gather(*map(outcome, nodes))
    assert outcomes == [None] * 4
    assert [node.node.stage for node in nodes].count(0) == 1 and nodes[3].node.stage == 0


async def test_a_node_that_comes_back_does_not_count_what_it_left_behind(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest()) as swarm:
        await swarm.coordinate()
        for stage in (0, 2):
            swarm.join(f"node{stage}", stage=stage)
        gone = swarm.join("gone")
        await until(lambda: gone.node.state is NodeState.TRAINING)
        assert gone.node.stage == 1
        gone.node.stop()
        assert await outcome(gone) is None
        again = swarm.join("gone")
        assert again.peer == gone.peer
        await until(lambda: again.node.stage is not None)
        assert again.node.stage == 1


async def test_one_node_alone_says_what_it_waits_for(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest(stages={"min_replicas": 2})) as swarm:
        coordinator = await swarm.coordinate()
        node = swarm.join("node", stage=1)
        lacks = "2 for stage 0, 1 for stage 1, 2 for stage 2"
        await until(lambda: node.node.reason == f"holding stage 1; waiting for more volunteers: {lacks}")
        await until(lambda: coordinator.node.reason.endswith(f"waiting for volunteers: {lacks}"))
        assert build_status(node.node)["state"] == "waiting"
        assert parse_invite(node.node.invite_line) == invite_to(node)  # any node has one to hand out


# life and goodbye ------------------------------------------------------------------------------


async def test_a_node_that_leaves_gives_its_claim_up(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest()) as swarm:
        coordinator = await swarm.coordinate()
        node = swarm.join("node")
        await until(lambda: node.peer in claims(coordinator))
        node.node.stop()
        assert await outcome(node) is None
        assert claims(coordinator)[node.peer].state is NodeState.DRAINING


async def test_training_is_told_in_the_log_now_and_then(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("node.daemon.PROGRESS_SECONDS", 0.05)
    caplog.set_level(logging.INFO, "node")
    async with simulated(tmp_path, small_manifest(training={"steps": 6})) as swarm:
        await swarm.coordinate()
        nodes = swarm.fill(1)
        await asyncio.gather(*map(outcome, nodes))
    progress = [record.getMessage() for record in caplog.records if "tokens/s in the swarm" in record.getMessage()]
    assert progress and all(line.startswith("[training] step ") and ", loss " in line for line in progress)
    summary = (tmp_path / "s0r0" / "summary.json").read_text()
    assert '"finished": true' in summary


async def test_a_coordinator_survives_what_nodes_say_of_themselves(tmp_path: Path) -> None:
    async with simulated(tmp_path, small_manifest()) as swarm:
        coordinator = await swarm.coordinate()
        nodes = [swarm.join(f"node{number}") for number in range(3)]
        await until(lambda: all(node.node.state is not NodeState.PREFLIGHT for node in nodes))
        answers = (b'{"loss": "low", "step": []}', b"[" * 100_000, b'{"loss": NaN, "step": 1e400}')
        for node, answer in zip(nodes, answers, strict=True):

            async def lie(request: Request, answer: bytes = answer) -> Response:
                return Response(body=(answer,))

            await until(lambda node=node: node.node.membership is not None)  # type: ignore[misc]
            node.node.network.transport.serve(Method.STATUS, Route(handler=lie))
        watch = coordinator.node.watch
        assert watch is not None
        known = watch.reports
        await until(lambda: len(watch.reports) == 3 and watch.reports is not known)
        assert {report.loss for report in watch.reports.values()} == {None}
        transport = coordinator.node.network.transport
        with pytest.raises(MessageError, match="not JSON"):
            await fetch_status(transport, nodes[1].peer)
        assert not coordinator.task.done() and coordinator.node.loss is None


@pytest.mark.parametrize(
    ("status", "report"),
    [
        ({"step": 7, "loss": 2.5}, PeerReport(step=7, loss=2.5)),
        ({}, PeerReport()),
        ({"step": -1, "loss": float("nan")}, PeerReport()),
        ({"step": 10**30, "loss": float("inf")}, PeerReport()),
        ({"step": True, "loss": "2.5"}, PeerReport()),
        ({"step": [], "loss": {}}, PeerReport()),
    ],
)
def test_of_a_peers_status_only_numbers_in_range_are_kept(status: dict[str, Any], report: PeerReport) -> None:
    assert PeerReport.of(status) == report
