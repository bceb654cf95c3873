"""The picture of a swarm that ``sentinel status`` draws: clear, and safe whatever the asked node says of itself."""

from __future__ import annotations

import json
from typing import Any

import pytest

from node.swarm_status import picture, render
from protocol.records import NodeState
from tests.node.claims import accusation, claim

SEED = {"name": "tiny", "swarm": "ab" * 32, "stages": 3, "steps": 40, "loss": 2.5, "peer": "coordinator"}
CLAIMS = [
    claim("long-name-of-one", 0, step=7, label="my GPU"),
    claim("long-name-of-two", 2, step=6, state=NodeState.SYNCING, drill="random"),
]


def test_every_stage_is_shown_with_its_replicas() -> None:
    assert render(picture(SEED, CLAIMS)).splitlines() == [
        "swarm tiny (abababababab), step 7 of 40, loss 2.500",
        "stage 0: 1 replica",
        "  e-of-one my GPU  training  step 7",
        "stage 1: 0 replicas",
        "stage 2: 1 replica",
        "  e-of-two  syncing  step 6  DRILL random",
    ]


def test_accusations_are_shown_at_the_accused_and_by_themselves() -> None:
    found = picture(SEED, [*CLAIMS, accusation("long-name-of-one", "long-name-of-two", accused_stage=2, step=5)])
    lines = render(found).splitlines()
    assert lines[5].endswith("DRILL random  accused")
    assert lines[-1] == "accused: e-of-two of stage 2 by e-of-one at step 5: l2"


def test_an_empty_swarm_says_what_the_asked_node_waits_for() -> None:
    text = render(picture({**SEED, "state": "waiting", "reason": "waiting for volunteers"}, []))
    assert "no replicas yet" in text
    assert text.splitlines()[-1] == "asked rdinator, which is waiting: waiting for volunteers"


@pytest.mark.parametrize("stages", [10**12, -1, "many", None, True, [3], 1e400])
def test_the_stages_of_claims_count_where_the_asked_node_tells_nonsense(stages: Any) -> None:
    lines = render(picture({"stages": stages}, CLAIMS)).splitlines()
    assert sum(line.startswith("stage ") for line in lines) == 3


@pytest.mark.parametrize(
    "seed",
    [
        {},
        {"name": ["x"], "swarm": 7, "steps": "forty", "loss": "low", "reason": {"a": 1}, "state": None, "peer": 1.5},
        {"name": "a\nb\x1b[2J" + "x" * 10_000, "reason": "r" * 10_000, "loss": float("nan"), "steps": 10**30},
        {"name": "\u202eevil", "reason": "\u2028", "loss": float("inf")},
    ],
)
def test_a_hostile_status_cannot_spoil_the_picture(seed: dict[str, Any]) -> None:
    text = render(picture(seed, CLAIMS))
    assert all(line.isprintable() and len(line) < 320 for line in text.splitlines())
    assert "stage 2: 1 replica" in text


def test_the_picture_is_json_with_an_address_for_everyone() -> None:
    found = json.loads(json.dumps(picture(SEED, [claim("one", addresses=("/ip4/192.0.2.1/tcp/1/p2p/one",))])))
    assert found["seed"] == SEED
    assert found["claims"][0]["addresses"] == ["/ip4/192.0.2.1/tcp/1/p2p/one"]
