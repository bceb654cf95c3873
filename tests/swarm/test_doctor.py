"""``sentinel doctor`` against a real swarm."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from protocol.identity import Identity
from tests.swarm.harness import running, sentinel, small_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(120)]


async def test_a_swarm_is_looked_at_and_dials_back(tmp_path: Path) -> None:
    async with running(tmp_path, small_manifest()) as swarm:
        coordinator = await swarm.coordinate()
        invite = (await swarm.status(coordinator))["invite"]
        state = tmp_path / "mine"
        code, text, errors = await sentinel(
            "doctor", invite, "--json", "--host", "127.0.0.1", "--state-dir", str(state), heavy=True
        )
        assert code == 0, (text, errors)
        found = {one["name"]: one for one in json.loads(text)["findings"]}
        assert found["swarm"]["level"] == found["reachable"]["level"] == found["clock"]["level"] == "good", found
        assert "nobody holds 0, 1, 2" in found["stages"]["text"]
        assert found["reachable"]["text"] == "a node of the swarm connected to 127.0.0.1"
        assert found["bandwidth"]["text"].startswith("not measured")
        assert not state.exists()
        wrong = invite.replace(swarm.manifest.swarm_id, "0" * 64)
        code, text, _ = await sentinel("doctor", wrong, "--host", "127.0.0.1", "--state-dir", str(state), heavy=True)
        assert code == 5 and "BAD  swarm:" in text


async def test_the_line_to_a_swarm_that_trains_is_measured(tmp_path: Path) -> None:
    async with running(tmp_path, small_manifest(training={"steps": 0, "checkpoint_steps": 50})) as swarm:
        await swarm.coordinate()
        nodes = await swarm.fill(1)
        await swarm.until(nodes[0], lambda status: (status["checkpoint"] or {}).get("step", 0) > 0)
        code, text, errors = await sentinel(
            *("doctor", swarm.invite, "--json", "--host", "127.0.0.1", "--state-dir", str(tmp_path / "mine")),
            heavy=True,
        )
        assert code == 0, (text, errors)
        found = {one["name"]: one for one in json.loads(text)["findings"]}
        assert "/s from a node" in found["bandwidth"]["text"], found
        assert found["peers"]["text"] == "3 of 3 nodes can be connected to from here"


async def test_an_invite_that_nobody_answers_is_bad(tmp_path: Path) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        place = f"/ip4/127.0.0.1/tcp/{nobody.getsockname()[1]}/p2p/{Identity.generate().peer_id}"
        invite = f"sentinel://{'0' * 64}{place}"
        code, text, _ = await sentinel(
            "doctor", invite, "--state-dir", str(tmp_path / "s"), "--host", "127.0.0.1", heavy=True
        )
    assert code == 5
    assert "BAD  swarm: no node of the invite answers" in text
