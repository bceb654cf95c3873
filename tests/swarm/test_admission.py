"""An invited swarm of real processes: who is not admitted waits outside, and who is revoked has to leave."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from node.demo_processes import Child
from protocol.errors import AdmissionError
from protocol.identity import Identity
from tests.swarm.harness import LOOPBACK, ROOT, Swarm, running, sentinel, small_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

STRANGER = ROOT / "tests" / "swarm" / "stranger.py"
PATIENCE = 120.0


async def admit(swarm: Swarm, *arguments: str) -> str:
    """``sentinel admit`` as the coordinator's person runs it, beside the running coordinator."""
    where = ("--manifest", str(swarm.folder / "swarm.toml"), "--state-dir", str(swarm.folder / "coordinator"))
    code, said, errors = await sentinel("admit", *arguments, *where)
    assert code == 0, errors
    return said


async def trains(swarm: Swarm, node: Child, steps: int) -> None:
    """Wait until a node has trained so many more steps than it has now."""
    begun = max(0, (await swarm.status(node)).get("step", 0))
    await swarm.until(
        node,
        lambda status: status["state"] == "training" and status["step"] >= begun + steps,
        seconds=PATIENCE,
    )


async def waits(swarm: Swarm, node: Child) -> None:
    """Wait until a node says that it waits, and for what."""
    status = await swarm.until(node, lambda status: "sentinel admit" in status["reason"], seconds=PATIENCE)
    assert status["state"] == "bootstrapping" and status["reason"].endswith(f"sentinel admit {node.peer}")


async def test_an_invited_swarm_forms_lets_in_whom_it_admits_and_goes_on_without_the_revoked(tmp_path: Path) -> None:
    coordinator = Identity.load_or_create(tmp_path / "coordinator" / "identity.key")
    manifest = small_manifest(
        model={"layers": 2},
        stages={"layers_per_stage": [1, 1]},
        training={"steps": 0},
        admission={"mode": "invited", "coordinator": coordinator.peer_id},
    )
    async with running(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        pair = await swarm.fill(1)
        for node in pair:
            await waits(swarm, node)
            said = await admit(swarm, node.peer)
            assert "a node that waits then goes on" in said
        for node in pair:
            await trains(swarm, node, 3)

        stranger = await swarm.join("stranger", stage=1)
        await waits(swarm, stranger)
        found = json.loads((await sentinel("status", swarm.invite, "--json"))[1])
        assert {claim["peer"] for claim in found["claims"]} == {node.peer for node in pair}
        through = (await swarm.status(pair[0]))["invite"]
        answers = json.loads((await sentinel(through, program=STRANGER))[1])
        assert answers["train"].startswith("not_admitted") and answers["body"].startswith("not_admitted")

        await admit(swarm, stranger.peer)
        await trains(swarm, stranger, 3)
        for node in pair:
            await swarm.until(node, lambda status: stranger.peer in peers(status))
        assert "revoked" in await admit(swarm, stranger.peer, "--revoke")
        await swarm.all_end([stranger], seconds=PATIENCE)
        assert stranger.process.returncode == AdmissionError.exit_code
        words = (stranger.folder / "log.txt").read_text(encoding="utf-8").splitlines()[-1]
        assert words.startswith("sentinel: the coordinator revoked this node's admission")
        for node in pair:
            await swarm.until(node, lambda status: stranger.peer not in peers(status))
            await trains(swarm, node, 3)
            assert (await swarm.status(node))["admission"]["standing"] == "admitted"

        arguments = ("join", through, *LOOPBACK, "--state-dir", str(stranger.folder))
        code, _, errors = await sentinel(*arguments, heavy=True)
        assert code == AdmissionError.exit_code, errors
        assert f"sentinel admit {stranger.peer}" in errors.splitlines()[-1]


def peers(status: dict[str, object]) -> set[str]:
    """Whom a node counts among the swarm."""
    replicas = status["replicas"]
    assert isinstance(replicas, list)
    return {replica["peer"] for replica in replicas}
