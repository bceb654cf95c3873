"""Claims for the tests of pure decisions: peers are short names, since nothing here checks a signature."""

from __future__ import annotations

from typing import Any

from protocol.records import Accusation, Claim, NodeState

SWARM = b"\x01" * 32
NOW = 1000.0


def claim(peer: str, stage: int = 0, **changes: Any) -> Claim:
    """A live claim of a training node."""
    values: dict[str, Any] = {
        "swarm": SWARM,
        "addresses": (),
        "capacity": 1.0,
        "state": NodeState.TRAINING,
        "step": 0,
        "digest": b"",
        "active_from": 0,
        "generation": 1,
        "sequence": 0,
        "expires": NOW + 30,
    }
    return Claim(peer=peer, stage=stage, **(values | changes))


def accusation(accuser: str, accused: str, **changes: Any) -> Accusation:
    """An accusation that holds for a while."""
    values: dict[str, Any] = {
        "swarm": SWARM,
        "accuser_stage": 0,
        "accused_stage": 1,
        "kind": "strikes",
        "reason": "l2",
        "step": 1,
        "evidence": bytes(32),
        "expires": NOW + 100,
    }
    return Accusation(accuser=accuser, accused=accused, **(values | changes))


def names(count: int) -> list[str]:
    """Peer names."""
    return [f"peer{index:03}" for index in range(count)]
