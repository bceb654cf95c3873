"""Inputs that every decoder accepts, for a fuzzer to begin with."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import torch

from node.checkpoints import checkpoint_name, write_checkpoint
from node.snapshot import StageState
from protocol.framing import FrameKind, encode_head
from protocol.hops import body_digest, sign_hop
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.messages import Method
from protocol.receipts import sign_receipt
from scripts.protocol_vectors import ONE, TIME, TWO, vectors

SELF, OTHER, NOW = ONE, TWO, TIME
SWARM = bytes.fromhex(Manifest.from_mapping({"name": "golden"}).swarm_id)
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{SELF.peer_id}"
SKETCH_BYTES = 64
ACTIVATION, GRADIENT, RECEIVED = b"a" * 32, b"g" * 32, b"r" * 32

MANIFEST = Manifest.from_mapping(
    {
        "name": "fuzzed",
        "model": {"width": 16, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 16, "context": 16},
        "stages": {"layers_per_stage": [1, 1]},
        "training": {"sequences_per_step": 8, "sequences_per_microbatch": 2},
    }
)


@cache
def _published() -> dict[str, Any]:
    """The golden vectors, which are of the same identities, swarm and time."""
    return vectors()


def records() -> list[bytes]:
    """One signed record of each kind."""
    return [bytes.fromhex(record["bytes"]) for record in _published()["records"]]


def admission() -> bytes:
    """The coordinator, SELF, admits OTHER."""
    return bytes.fromhex(_published()["admission"]["bytes"])


def _receipt(identity: Identity, **about: Any) -> bytes:
    return sign_receipt(identity, SWARM, step=9, microbatch=4, parameters=body_digest((b"weights",)), **about)


def receipt() -> bytes:
    """OTHER, in stage 0, got RECEIVED, sent ACTIVATION on, got GRADIENT back."""
    sent, got = body_digest((ACTIVATION,)), body_digest((GRADIENT,))
    received, returned = body_digest((RECEIVED,)), body_digest((b"up",))
    return _receipt(OTHER, stage=0, received=received, sent=sent, got=got, returned=returned)


def receipt_below() -> bytes:
    """SELF, in stage 1, answers it."""
    received, returned = body_digest((ACTIVATION,)), body_digest((GRADIENT,))
    return _receipt(SELF, stage=1, received=received, sent=b"", got=b"", returned=returned)


def hop() -> bytes:
    """SELF, in stage 0, sends ACTIVATION."""
    return sign_hop(
        SELF,
        SWARM,
        stage=0,
        step=9,
        microbatch=4,
        direction="activation",
        digest=body_digest((ACTIVATION,)),
        source=body_digest((RECEIVED,)),
        sketch=bytes(SKETCH_BYTES),
    )


def frames() -> list[bytes]:
    """Streams of one frame each, and of several, one of them with a body."""
    published = [bytes.fromhex(frame["frame"]) for frame in _published()["frames"]]
    request = {"id": 1, "method": Method.PART.value, "step": 3}
    return [*published, encode_head(FrameKind.REQUEST, request, 5) + b"hello" + published[0]]


def saved() -> tuple[bytes, bytes]:
    """The files of verdicts and of contributions."""
    standing = {
        "peer": OTHER.peer_id,
        "state": "ejected",
        "trust": 0.0,
        "strikes": 1.5,
        "credits": 3,
        "reason": "audit",
        "until": NOW,
        "quarantined_at": 3,
    }
    verdicts = {"format": 1, "swarm": SWARM.hex(), "standings": [standing], "records": []}
    sums = {"microbatches": 1, "tokens": 2, "steps": 3, "updated": NOW}
    return json.dumps(verdicts).encode(), json.dumps({"format": 1, "swarms": {SWARM.hex(): sums}}).encode()


def status() -> bytes:
    """What a node says of itself."""
    return json.dumps(
        {
            "step": 4,
            "loss": 2.5,
            "label": "attic",
            "losses": [[1, 3.5], [2, 3.0]],
            "contribution": {"microbatches": 3, "tokens": 4, "steps": 2},
            "replicas": [{"peer": OTHER.peer_id, "standing": {"state": "trusted", "trust": 0.9}}],
            "events": [{"time": NOW, "step": 2, "kind": "verdict", "peer": OTHER.peer_id, "text": "computed again"}],
        }
    ).encode()


@cache
def checkpoint() -> bytes:
    """The file of a state of stage 0 before step 4."""
    count = MANIFEST.stage_parameters(0)
    state = StageState(step=4, parameters=torch.arange(count, dtype=torch.float32), optimizer={"m": torch.zeros(count)})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / checkpoint_name(0, 4)
        write_checkpoint(path, state, manifest=MANIFEST, stage=0, now=NOW)
        return path.read_bytes()
