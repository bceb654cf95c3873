"""A stage with one replica left: what is a little strange is used, since nobody could do the work instead."""

from __future__ import annotations

import pytest
import torch

from node.boundary import Incoming
from node.guard import LONE_STRETCH, FlaggedError, Guard, Judged
from node.metrics import Metrics
from node.telemetry import Telemetry
from node.view import View
from protocol.manifest import Manifest
from tests.node.claims import NOW, claim
from verifier.ledger import PeerState
from verifier.verdicts import Direction

STEPS = 24
SHAPE = (2, 8, 16)


class Receiver:
    """A guard that has seen honest activations of ``a`` for some steps."""

    def __init__(self, mode: str = "enforce") -> None:
        verifier = {"mode": mode, "warmup_steps": 2, "minimum_history": 16, "window": 64, "sketches": False}
        manifest = Manifest.from_mapping({"name": "test", "verifier": verifier})
        self.view = View(3)
        self.view.merge(claim("a", 0), b"", NOW)
        self.telemetry = Telemetry(Metrics())
        self.guard = Guard(
            me="me",
            manifest=manifest,
            view=self.view,
            telemetry=self.telemetry,
            accuse=lambda *_: None,
            on_ejected=lambda *_: None,
            notify=lambda: None,
            seed=1,
        )
        self.generator = torch.Generator().manual_seed(7)
        self.bias = torch.randn(SHAPE, generator=self.generator)
        for step in range(STEPS):
            for microbatch in range(4):
                self.guard.accept(self.judge(self.honest(), step, microbatch, replicas=2))
            self.guard.end_step_checkers(step)
            self.guard.end_step(step)

    def honest(self) -> torch.Tensor:
        return self.bias + 0.3 * torch.randn(SHAPE, generator=self.generator)

    def judge(self, tensor: torch.Tensor, step: int = STEPS, microbatch: int = 0, *, replicas: int) -> Judged:
        incoming = Incoming(
            tensor=tensor,
            digest=bytes(32),
            hop=b"",
            sketch=tensor.flatten()[:8].clone(),
            input_sketch=None,
            rms=float(tensor.square().mean().sqrt()),
        )
        return self.guard.judge(
            incoming,
            sender="a",
            step=step,
            microbatch=microbatch,
            direction=Direction.ACTIVATION,
            replicas=replicas,
        )

    def times_its_fence(self, tensor: torch.Tensor) -> float:
        """By how much the strangest statistic of a tensor exceeds its fence."""
        judgement = self.guard._checkers[Direction.ACTIVATION].judge(
            tensor, step=STEPS, sketch=torch.zeros(8), input_sketch=None
        )
        return max(judgement.verdict.scores.values())

    def strange(self, least: float, most: float) -> torch.Tensor:
        """A tensor whose strangest statistic is so many fences away."""
        noise = torch.randn(SHAPE, generator=self.generator)
        for size in range(1, 400):
            tensor = self.honest() + 0.02 * size * noise
            if least < self.times_its_fence(tensor) < most:
                return tensor
        raise AssertionError(f"no tensor is {least} to {most} fences away")


def test_a_little_strange_tensor_of_the_only_replica_is_used_and_told() -> None:
    there = Receiver()
    tensor = there.strange(1.2, 0.9 * LONE_STRETCH)
    judged = there.judge(tensor, replicas=1)
    assert judged.borne is not None and judged.judgement is None
    there.guard.note(judged, STEPS, 0)
    there.guard.accept(judged)  # teaches nothing, and is no error
    assert [event.peer for event in there.telemetry.events if event.kind == "borne"] == ["a"]
    assert there.guard.ledger.standing("a").strikes == 0
    assert there.times_its_fence(tensor) > 1


def test_with_a_sibling_that_could_do_the_work_it_is_refused() -> None:
    there = Receiver()
    with pytest.raises(FlaggedError):
        there.judge(there.strange(1.2, 0.9 * LONE_STRETCH), replicas=2)


def test_what_is_far_from_honest_is_refused_of_the_only_replica_too() -> None:
    there = Receiver()
    with pytest.raises(FlaggedError) as raised:
        there.judge(there.strange(1.1 * LONE_STRETCH, 100 * LONE_STRETCH), replicas=1)
    for step in range(STEPS, STEPS + 10):
        there.guard.breach("a", raised.value, step, 0)
    assert there.guard.ledger.standing("a").state is PeerState.QUARANTINED


def test_what_is_too_large_is_refused_of_the_only_replica_too() -> None:
    there = Receiver()
    with pytest.raises(FlaggedError):
        there.judge(1e5 * there.honest(), replicas=1)


def test_observing_tells_it_as_a_flag() -> None:
    there = Receiver("observe")
    judged = there.judge(there.strange(1.2, 0.9 * LONE_STRETCH), replicas=1)
    assert judged.flag is not None and judged.borne is None
