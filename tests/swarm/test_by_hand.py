"""What a newcomer does by hand, in separate processes: start a swarm, join, look, kill, come back, leave."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from node.demo_processes import Child
from protocol.invite import Invite
from protocol.manifest import Manifest
from tests.swarm.harness import Swarm, running, sentinel

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

SMALL = ["--stages", "3", "--layers", "3", "--width", "32", "--heads", "2", "--kv-heads", "1"]
STRANGER = Path(__file__).with_name("stranger.py")
PATIENCE = 120.0
LEAVE_SECONDS = 30.0


async def test_newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One swarm for all of it, since each process costs seconds of a small machine."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # the socket folders of killed nodes stay in here
    toml = tmp_path / "swarm.toml"
    code, text, _ = await sentinel("init", str(toml), "--name", "tiny", *SMALL)
    assert code == 0 and "3 to begin; 9 recommended" in text
    manifest = Manifest.from_toml(toml.read_text())
    async with running(tmp_path, manifest) as swarm:
        coordinator = await swarm.coordinate(path=toml)
        first = await swarm.join("first")
        await one_node_alone_waits_and_says_for_what(swarm, first)
        nodes = [first, *await asyncio.gather(swarm.join("second"), swarm.join("third"))]
        by_stage = await nodes_spread_over_the_stages_and_train(swarm, nodes)
        await status_shows_every_stage(swarm, by_stage)
        await metrics_tell_what_matters(swarm, by_stage[1])
        await strangers_are_refused(swarm, by_stage[1])
        living = await training_survives_the_coordinator(swarm, coordinator, by_stage)
        await the_coordinator_comes_back(swarm, coordinator, toml)
        late = await a_late_node_catches_up(swarm, living, by_stage[1])
        await training_survives_a_replica(swarm, by_stage, late)
        await a_node_leaves_politely(swarm, by_stage, late)


async def one_node_alone_waits_and_says_for_what(swarm: Swarm, node: Child) -> None:
    status = await swarm.until(node, lambda status: status["state"] == "waiting", seconds=PATIENCE)
    stage = status["stage"]
    others = ", ".join(f"1 for stage {other}" for other in range(3) if other != stage)
    assert status["reason"] == f"holding stage {stage}; waiting for more volunteers: {others}"
    code, text = await swarm.get(node, "/readyz")
    assert code == 503 and others in text
    assert (await swarm.get(node, "/healthz"))[0] == 200


async def nodes_spread_over_the_stages_and_train(swarm: Swarm, nodes: list[Child]) -> dict[int, Child]:
    statuses = [await steps_on(swarm, node, 3) for node in nodes]
    by_stage = {status["stage"]: node for node, status in zip(nodes, statuses, strict=True)}
    assert sorted(by_stage) == [0, 1, 2]
    return by_stage


async def status_shows_every_stage(swarm: Swarm, by_stage: dict[int, Child]) -> None:
    code, text, _ = await sentinel("status", swarm.invite, "--timeout", "30")
    assert code == 0
    lines = text.splitlines()
    assert lines[0].startswith("swarm tiny (") and "step" in lines[0]
    for stage, node in by_stage.items():
        place = lines.index(f"stage {stage}: 1 replica")
        assert node.peer[-8:] in lines[place + 1] and node.name in lines[place + 1]
    found = await look(swarm.invite)
    assert {claim["stage"]: claim["peer"] for claim in found["claims"]} == {
        stage: node.peer for stage, node in by_stage.items()
    }
    assert found["accusations"] == [] and found["seed"]["coordinator"] is True


async def metrics_tell_what_matters(swarm: Swarm, node: Child) -> None:
    await swarm.until(node, lambda status: status["loss"] is not None)
    code, text = await swarm.get(node, "/metrics")
    assert code == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    for name, family in families.items():
        assert family.documentation and family.type not in ("", "unknown"), name
        assert f"# HELP {name}" in text and f"# TYPE {name}" in text
    samples = {sample.name: sample.value for family in families.values() for sample in family.samples}
    assert samples["sentinel_step"] >= 3 and samples["sentinel_loss"] > 0
    assert samples["sentinel_p2pd_up"] == 1
    busy = {sample.labels["phase"]: sample.value for sample in families["sentinel_phase_seconds"].samples}
    assert all(busy[phase] > 0 for phase in ("forward", "backward", "wait", "average", "optimizer", "check"))
    moved = {
        (sample.labels["direction"], sample.labels["stream"]) for sample in families["sentinel_stream_bytes"].samples
    }
    assert moved == {(direction, stream) for direction in ("in", "out") for stream in ("control", "tensor")}
    assert all(sample.value > 0 for sample in families["sentinel_stream_bytes"].samples)
    trust = {sample.labels["stage"]: sample.value for sample in families["sentinel_peer_trust"].samples}
    assert set(trust) == {"0", "2"} and all(0 <= value <= 1 for value in trust.values())
    for name in ("flags", "strikes", "ejections", "quarantines", "accusations", "microbatches", "tokens"):
        assert f"sentinel_{name}" in families
    assert (await swarm.get(node, "/readyz"))[0] == 200


async def strangers_are_refused(swarm: Swarm, node: Child) -> None:
    """Hostile bytes from the other implementation of libp2p, and the node goes on."""
    code, text, errors = await sentinel(node.status["invite"], program=STRANGER)
    assert code == 0, errors
    said = json.loads(text)
    assert said.pop("truncated frame") == "sent"
    expected = {
        "huge body": "frame: a frame announces a body of 1099511627776 bytes",
        "huge head": "frame: a frame announces a head of 2147483648 bytes",
        "wrong magic": "frame: the stream does not speak this protocol",
        "request before hello": "frame: the first frame must be a hello",
        "foreign swarm": "swarm: the peer belongs to swarm 000000000000",
        "other version": "version: the peer speaks protocol version 2",
        "train": "not_admitted: train needs a claim",
        "body": "not_admitted: train needs a claim",
        "train on control": "method: this node does not answer train on this stream",
    }
    assert said.keys() == expected.keys()
    for trick, beginning in expected.items():
        assert said[trick].startswith(beginning), said[trick]
    _, text = await swarm.get(node, "/metrics")
    broken = next(family for family in text_string_to_metric_families(text) if family.name == "sentinel_remote_errors")
    assert {sample.labels["kind"] for sample in broken.samples} >= {"frame", "swarm", "version"}
    await steps_on(swarm, node, 2)


async def training_survives_the_coordinator(swarm: Swarm, coordinator: Child, by_stage: dict[int, Child]) -> str:
    """Returns an invite that names a living node."""
    found = await look(swarm.invite)
    addresses = next(claim["addresses"] for claim in found["claims"] if claim["stage"] == 2)
    kill(coordinator)
    await coordinator.process.wait()
    for node in by_stage.values():
        await steps_on(swarm, node, 4)
    invite = str(Invite(swarm.manifest.swarm_id, tuple(addresses)))
    others = by_stage[2].status["invite"].removeprefix(invite).split(",")[1:]
    assert by_stage[2].status["invite"].startswith(invite) and len(others) == 2  # each has one that names others too
    assert len((await look(invite))["claims"]) == 3
    code, _, errors = await sentinel("status", swarm.invite, "--timeout", "30")
    assert code == 1 and errors.count("\n") == 1 and "is one of them running?" in errors
    return invite


async def the_coordinator_comes_back(swarm: Swarm, before: Child, toml: Path) -> None:
    left_behind = Path((before.folder / "sockets").read_text())
    assert left_behind.is_dir()  # kill -9 gave it no chance
    again = await swarm.coordinate(path=toml)
    assert again.peer == before.peer
    assert not left_behind.exists()
    status = await swarm.until(again, lambda status: len(status["replicas"]) == 3 and status["step"] > 0)
    assert status["reason"].startswith("coordinating: 1 in stage 0, 1 in stage 1, 1 in stage 2")
    again.process.send_signal(signal.SIGINT)
    assert await ended(again) == 0


async def a_late_node_catches_up(swarm: Swarm, invite: str, sibling: Child) -> Child:
    swarm.invite = invite
    late = await swarm.join("late", stage=1)
    await swarm.until(late, lambda status: status["contribution"]["steps"] >= 3, seconds=PATIENCE)
    one, other = [dict((await swarm.status(node))["digests"]) for node in (sibling, late)]
    common = sorted(one.keys() & other.keys())
    assert len(common) >= 3
    assert [one[step] for step in common] == [other[step] for step in common]
    assert late.status["contribution"]["microbatches"] > 0
    return late


async def training_survives_a_replica(swarm: Swarm, by_stage: dict[int, Child], late: Child) -> None:
    kill(by_stage[1])
    await by_stage[1].process.wait()
    for node in (by_stage[0], late, by_stage[2]):
        await steps_on(swarm, node, 3)


async def a_node_leaves_politely(swarm: Swarm, by_stage: dict[int, Child], late: Child) -> None:
    sockets = Path((late.folder / "sockets").read_text())
    helpers = psutil.Process(late.process.pid).children()
    assert sockets.is_dir() and [helper.name() for helper in helpers] == ["p2pd"]
    late.process.send_signal(signal.SIGTERM)
    assert await ended(late) == 0
    claims = (await look(swarm.invite))["claims"]
    assert all(claim["state"] == "draining" for claim in claims if claim["peer"] == late.peer)
    assert {claim["stage"] for claim in claims if claim["state"] == "training"} == {0, 2}
    assert not any(helper.is_running() and helper.status() != psutil.STATUS_ZOMBIE for helper in helpers)
    assert not sockets.exists() and not (late.folder / "sockets").exists()
    await swarm.until(by_stage[0], lambda status: "stage 1 has no replica" in status["reason"], seconds=PATIENCE)


async def steps_on(swarm: Swarm, node: Child, steps: int) -> dict[str, Any]:
    """Wait until a node is so many steps further than now."""
    begun = (await swarm.until(node, lambda status: status["state"] == "training", seconds=PATIENCE))["step"]
    return await swarm.until(node, lambda status: status["step"] >= begun + steps, seconds=PATIENCE)


async def look(invite: str) -> dict[str, Any]:
    """``sentinel status --json``."""
    code, text, errors = await sentinel("status", invite, "--json", "--timeout", "30")
    assert code == 0, errors
    found = json.loads(text)
    assert isinstance(found, dict)
    return found


async def ended(child: Child) -> int:
    async with asyncio.timeout(LEAVE_SECONDS):
        return await child.process.wait()


def kill(child: Child) -> None:
    child.process.kill()
