"""Signed records and statuses for the tests of the observer."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any

from protocol.identity import Identity
from protocol.records import Accusation, Claim, NodeState, sign_accusation, sign_claim

SWARM = b"\x01" * 32
NOW = 1_750_000_000.0


@cache
def person(number: int) -> Identity:
    """One of many identities, always the same."""
    return Identity(hashlib.sha256(number.to_bytes(8, "big")).digest())


def peer(number: int) -> str:
    return person(number).peer_id


def address(number: int) -> str:
    return f"/ip4/192.0.2.7/tcp/{1000 + number}/p2p/{peer(number)}"


def claimed(number: int, stage: int = 0, *, now: float = NOW, **changes: Any) -> bytes:
    """A signed claim of a training node."""
    values: dict[str, Any] = {
        **{"swarm": SWARM, "peer": peer(number), "stage": stage, "addresses": (address(number),), "capacity": 1.0},
        **{"state": NodeState.TRAINING, "step": 7, "digest": b"", "active_from": 0, "generation": 1},
        **{"sequence": int(now - NOW), "expires": now + 30, "label": f"node {number}"},
    }
    return sign_claim(person(number), Claim(**(values | changes)))


def accused(accuser: int, whom: int, **changes: Any) -> bytes:
    """A signed accusation."""
    values: dict[str, Any] = {
        **{"swarm": SWARM, "accuser": peer(accuser), "accuser_stage": 0, "accused": peer(whom), "accused_stage": 1},
        **{"kind": "strikes", "reason": "l2", "step": 5, "evidence": bytes(32), "expires": NOW + 1000},
    }
    return sign_accusation(person(accuser), Accusation(**(values | changes)))


def status(step: int = 7, loss: float | None = 3.5, **more: Any) -> dict[str, Any]:
    """What a node of a healthy swarm says."""
    return {
        **{"step": step, "loss": loss, "losses": [[step - 2, 4.0], [step - 1, loss]], "tokens_per_second": 100.0},
        **{"uptime_seconds": 60.0, "coordinator": False, "reason": "", "replicas": [], "events": []},
        "contribution": {"microbatches": 3, "tokens": 300, "steps": 2},
        **more,
    }


def replica(number: int, state: str = "trusted", trust: float = 0.9) -> dict[str, Any]:
    """A peer as a node's status shows it."""
    return {"peer": peer(number), "standing": {"state": state, "trust": trust, "strikes": 0.0}}


def event(kind: str, whom: int, **more: Any) -> dict[str, Any]:
    """Something in a status."""
    return {"time": NOW - 5, "step": 6, "kind": kind, "peer": peer(whom), "stage": 1, "text": "because", **more}
