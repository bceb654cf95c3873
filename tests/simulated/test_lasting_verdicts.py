"""What a node knows against its peers is there again when it starts again: a restart is no amnesty."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from node.simulated_swarm import simulated
from node.state_folder import StateFolder
from node.verdicts import load_verdicts
from protocol.records import Verdict, parse_record
from tests.swarm.harness import small_manifest
from verifier.ledger import PeerState

pytestmark = pytest.mark.timeout(300)


async def test_an_ejection_and_its_proof_are_in_the_state_folders_of_the_others(tmp_path: Path) -> None:
    manifest = small_manifest(
        stages={"min_replicas": 3},
        training={"steps": 6, "sequences_per_step": 36},
        verifier={"allow_drills": True, "audit_rate": 1.0},
    )
    async with simulated(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        attacker = swarm.join("attacker", stage=1, attack="sign-flip", drill_from=2)
        honest = [
            swarm.join(f"s{stage}r{replica}", stage=stage) for stage in range(3) for replica in range(2 + (stage != 1))
        ]
        await asyncio.gather(*(member.outcome() for member in honest))
        swarm_hex = attacker.node.swarm.hex()
        for member in honest:
            folder = StateFolder(tmp_path / member.name).open()
            standings, records = load_verdicts(folder, swarm_hex)
            folder.close()
            states = {entry.peer: entry.state for entry in standings}
            assert states.pop(attacker.peer) is PeerState.EJECTED
            assert PeerState.EJECTED not in states.values()
            found = [parse_record(data, swarm=bytes.fromhex(swarm_hex), now=time.time()) for data in records]
            assert any(isinstance(record, Verdict) and record.accused == attacker.peer for record in found)

        again = swarm.join("s0r0", stage=0)  # the same folder, so the same identity
        async with asyncio.timeout(60):
            while again.node.guard is None or again.node.guard.allows(attacker.peer):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert again.node.guard.ledger.standing(attacker.peer).state is PeerState.EJECTED
