"""Inputs that every decoder accepts, for a fuzzer to begin with."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import torch

from node.checkpoints import checkpoint_name, write_checkpoint
from node.snapshot import StageState
from protocol import messages
from protocol.admissions import Admission, sign_admission
from protocol.framing import FrameKind, encode_head
from protocol.hops import body_digest, sign_hop
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.receipts import sign_draw, sign_receipt, sign_vote, statement_digest
from protocol.records import Accusation, Claim, NodeState, Verdict, sign_accusation, sign_claim, sign_verdict

SELF, OTHER, JUROR = (Identity(bytes([number]) * 32) for number in (1, 2, 3))
SWARM = bytes(range(32))
NOW = 1_750_000_000.0
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{SELF.peer_id}"
SUBJECT = statement_digest(b"a statement")
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


def records() -> list[bytes]:
    """One signed record of each kind."""
    claim = Claim(
        swarm=SWARM,
        peer=SELF.peer_id,
        stage=1,
        addresses=(ADDRESS,),
        capacity=2.5,
        state=NodeState.TRAINING,
        step=41,
        digest=b"\x07" * 32,
        active_from=40,
        generation=1_749_990_000_000_000,
        sequence=3,
        expires=NOW + 30.0,
        label="attic",
        agent="sentinel-swarm/1",
        drill="",
        pinned=True,
    )
    accusation = Accusation(
        swarm=SWARM,
        accuser=SELF.peer_id,
        accuser_stage=0,
        accused=OTHER.peer_id,
        accused_stage=1,
        kind="strikes",
        reason="sign_flip",
        step=41,
        evidence=b"\x09" * 32,
        expires=NOW + 3600.0,
    )
    verdict = Verdict(
        swarm=SWARM,
        writer=SELF.peer_id,
        accused=OTHER.peer_id,
        accused_stage=1,
        reason="gradient",
        step=41,
        subject=SUBJECT,
        draw=sign_draw(SELF, SWARM, SUBJECT),
        votes=((JUROR.peer_id, sign_vote(JUROR, SWARM, subject=SUBJECT, accused=OTHER.peer_id, guilty=True)),),
        expires=NOW + 3600.0,
    )
    return [sign_claim(SELF, claim), sign_accusation(SELF, accusation), sign_verdict(SELF, verdict)]


def admission() -> bytes:
    """The coordinator, SELF, admits OTHER."""
    return sign_admission(
        SELF,
        Admission(swarm=SWARM, peer=OTHER.peer_id, serial=7, issued=NOW - 60, expires=NOW + 3600.0, revoked=False),
    )


def receipt() -> bytes:
    """OTHER, in stage 0, got RECEIVED, sent ACTIVATION on, got GRADIENT back."""
    return sign_receipt(
        OTHER,
        SWARM,
        stage=0,
        step=9,
        microbatch=4,
        received=body_digest((RECEIVED,)),
        sent=body_digest((ACTIVATION,)),
        got=body_digest((GRADIENT,)),
        returned=body_digest((b"up",)),
        parameters=body_digest((b"weights",)),
    )


def receipt_below() -> bytes:
    """SELF, in stage 1, answers it."""
    return sign_receipt(
        SELF,
        SWARM,
        stage=1,
        step=9,
        microbatch=4,
        received=body_digest((ACTIVATION,)),
        sent=b"",
        got=b"",
        returned=body_digest((GRADIENT,)),
        parameters=body_digest((b"weights",)),
    )


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
    """A hello, and a request with a body."""
    hello = {"version": 1, "swarm": SWARM, "agent": "sentinel/1", "time": NOW}
    request = {"id": 1, "method": messages.Method.PART.value, "step": 3}
    return [
        encode_head(FrameKind.HELLO, hello, 0),
        encode_head(FrameKind.REQUEST, request, 5) + b"hello" + encode_head(FrameKind.REQUEST, request, 0),
    ]


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
