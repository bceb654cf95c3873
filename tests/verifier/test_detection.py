"""Calibration on real training: honest stages pass, attackers do not.

A small pre-norm transformer in three stages learns the next byte of Python source. A checker watches each
boundary in each direction. At some steps every attack is tried on it as a probe: judged, never accepted.
"""

import hashlib
import inspect
import math
import tarfile
import threading
import typing
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from verifier.config import CheckerConfig
from verifier.ledger import Ledger, PeerState
from verifier.sentinel import BoundaryChecker
from verifier.sketch import sketch
from verifier.verdicts import Direction, Reason

BATCH, TOKENS, WIDTH, HEADS, BLOCKS, STAGES = 4, 64, 64, 4, 2, 3
STEPS, MICROBATCHES, LR_WARMUP = 64, 6, 10
PROBED_STEPS = (32, 38, 44, 50, 56)
SKETCH_SIZE = CheckerConfig().sketch_size

Attack = Callable[[Tensor, Tensor, torch.Generator], Tensor]


def _noise(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(x.shape, generator=generator) * x.std()


def _signs(x: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, x.shape, generator=generator) * 2.0 - 1.0


ATTACKS: dict[str, Attack] = {
    "zeros": lambda x, earlier, g: torch.zeros_like(x),
    "constant": lambda x, earlier, g: torch.full_like(x, float(x.std())),
    "random": lambda x, earlier, g: _noise(x, g),
    "scale": lambda x, earlier, g: x * 10.0,
    "shrink": lambda x, earlier, g: x / 10.0,
    "flip": lambda x, earlier, g: -x,
    "signs": lambda x, earlier, g: x * _signs(x, g),
    "bias": lambda x, earlier, g: x + x.std(),
    "noise": lambda x, earlier, g: x + _noise(x, g),
    "delay": lambda x, earlier, g: earlier,
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.down = nn.Linear(3 * WIDTH, WIDTH, bias=False)
        for linear in (self.qkv, self.up, self.out, self.down):
            nn.init.normal_(linear.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x))
        q, k, v = qkv.view(BATCH, TOKENS, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        change: Tensor = self.down(functional.silu(self.up(self.before_mlp(x))))
        return x + change


class Stage(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH) if index == 0 else None
        self.positions = nn.Parameter(torch.randn(TOKENS, WIDTH) * 0.02) if index == 0 else None
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        last = index == STAGES - 1
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)) if last else None
        if self.embedding is not None:
            nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None and self.positions is not None:
            x = self.embedding(x) + self.positions
        x = self.blocks(x)
        return x if self.head is None else self.head(x)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """A tensor that crosses a boundary, and what its sender had received (None at an end)."""

    boundary: int
    direction: Direction
    tensor: Tensor
    received: Tensor | None


class Training:
    """Yields the messages of one microbatch after the other; the caller ends the steps."""

    def __init__(self, *, seed: int, learning_rate: float) -> None:
        torch.manual_seed(seed)
        source = "".join(inspect.getsource(module) for module in (tarfile, threading, typing))
        self.data = torch.tensor(list(source.encode()))
        self.generator = torch.Generator().manual_seed(seed)
        self.learning_rate = learning_rate
        self.stages = [Stage(index) for index in range(STAGES)]
        self.parameters = [p for stage in self.stages for p in stage.parameters()]
        self.optimizer = torch.optim.AdamW(self.parameters, betas=(0.9, 0.95), weight_decay=0.1)

    def microbatch(self) -> tuple[float, list[Message]]:
        starts = torch.randint(len(self.data) - TOKENS - 1, (BATCH, 1), generator=self.generator)
        rows = self.data[starts + torch.arange(TOKENS + 1)]
        sent: list[Tensor] = []
        received: list[Tensor] = []
        x = rows[:, :-1]
        for stage in self.stages[:-1]:
            sent.append(stage(x))
            x = sent[-1].detach().requires_grad_()
            received.append(x)
        logits = self.stages[-1](x)
        loss = functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        torch.autograd.backward(loss)
        for boundary in reversed(range(STAGES - 1)):
            torch.autograd.backward(sent[boundary], received[boundary].grad)
        return float(loss.detach()), list(self._messages(received))

    def end_step(self, step: int, microbatches: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * min(1.0, (step + 1) / LR_WARMUP)
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad /= microbatches
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _messages(self, activations: list[Tensor]) -> Iterator[Message]:
        values = [a.detach() for a in activations]
        gradients = [typing.cast(Tensor, a.grad) for a in activations]
        before, after = [None, *values[:-1]], [*gradients[1:], None]
        for boundary in range(STAGES - 1):
            make = partial(Message, boundary=boundary)
            yield make(direction=Direction.ACTIVATION, tensor=values[boundary], received=before[boundary])
            yield make(direction=Direction.GRADIENT, tensor=gradients[boundary], received=after[boundary])


@dataclass(slots=True, kw_only=True)
class Outcome:
    """Counts of a run. Keys of probes: (direction, whether the sender's input is known, attack)."""

    losses: list[float] = field(default_factory=list)
    judged: Counter[Direction] = field(default_factory=Counter)
    flagged: Counter[Direction] = field(default_factory=Counter)
    reasons: Counter[tuple[Direction, Reason]] = field(default_factory=Counter)
    probes: Counter[tuple[Direction, bool, str]] = field(default_factory=Counter)
    caught: Counter[tuple[Direction, bool, str]] = field(default_factory=Counter)
    caught_by: Counter[tuple[Direction, bool, str, Reason]] = field(default_factory=Counter)
    scores: dict[tuple[Direction, bool, str], list[float]] = field(default_factory=dict)
    ledger: Ledger = field(default_factory=lambda: Ledger(CheckerConfig()))

    def recall(self, direction: Direction, inner: bool, attack: str) -> float:
        return self.caught[direction, inner, attack] / self.probes[direction, inner, attack]


def train(
    *,
    seed: int,
    learning_rate: float = 3e-3,
    steps: int = STEPS,
    microbatches: int = MICROBATCHES,
    probed_steps: tuple[int, ...] = PROBED_STEPS,
    config: CheckerConfig | None = None,
) -> Outcome:
    """Train with a checker on each boundary and direction, and probe it with every attack."""
    training, outcome = Training(seed=seed, learning_rate=learning_rate), Outcome()
    config = config or CheckerConfig()
    checkers = {
        (boundary, direction): BoundaryChecker(config, direction, seed=boundary)
        for boundary in range(STAGES - 1)
        for direction in Direction
    }
    earlier: dict[tuple[int, Direction], Tensor] = {}
    generator = torch.Generator().manual_seed(seed + 1)
    for step in range(steps):
        picture = partial(sketch, key=hashlib.sha256(step.to_bytes(8, "big")).digest(), size=SKETCH_SIZE)
        for number in range(microbatches):
            loss, messages = training.microbatch()
            outcome.losses.append(loss)
            for message in messages:
                key = (message.boundary, message.direction)
                source = None if message.received is None else picture(message.received)
                look = partial(checkers[key].judge, step=step, input_sketch=source)
                if step in probed_steps and number < 2:
                    for name, attack in ATTACKS.items():
                        fake = attack(message.tensor, earlier[key], generator)
                        verdict = look(fake, sketch=picture(fake)).verdict
                        probe = (message.direction, source is not None, name)
                        outcome.probes[probe] += 1
                        outcome.caught[probe] += not verdict.accepted
                        outcome.caught_by.update((*probe, reason) for reason in verdict.reasons)
                        outcome.scores.setdefault(probe, []).append(max(verdict.scores.values()))
                judgement = look(message.tensor, sketch=picture(message.tensor))
                if judgement.verdict.accepted:
                    checkers[key].accept(judgement.observation)
                else:
                    outcome.flagged[message.direction] += 1
                    outcome.reasons.update((message.direction, r) for r in judgement.verdict.reasons)
                    outcome.ledger.strike(f"{key}", judgement.verdict.reasons[0], step=step)
                outcome.judged[message.direction] += not judgement.verdict.warming_up
                earlier[key] = message.tensor
        training.end_step(step, microbatches)
        for checker in checkers.values():
            checker.end_step(step)
        outcome.ledger.end_step(step)
    return outcome


@pytest.fixture(scope="module")
def outcome() -> Iterator[Outcome]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield train(seed=0)
    torch.set_num_threads(threads)


def test_the_network_learns(outcome: Outcome) -> None:
    assert outcome.losses[0] == pytest.approx(math.log(256), rel=0.05)
    assert sum(outcome.losses[-6:]) / 6 < 3.0


def test_honest_stages_pass(outcome: Outcome) -> None:
    # Measured over many seeds and rates: below 0.1 %. A run of a thousand messages resolves no less than this.
    assert sum(outcome.judged.values()) > 1000
    assert sum(outcome.flagged.values()) <= 3
    assert outcome.flagged[Direction.ACTIVATION] <= 1
    barred = {PeerState.QUARANTINED, PeerState.EJECTED}
    assert all(outcome.ledger.standing(peer).state not in barred for peer in outcome.ledger.peers())


@pytest.mark.parametrize("attack", ATTACKS)
def test_an_attack_on_activations_of_an_inner_stage_is_caught(outcome: Outcome, attack: str) -> None:
    assert outcome.recall(Direction.ACTIVATION, True, attack) >= 0.95


@pytest.mark.parametrize("attack", ["zeros", "constant", "random", "scale", "shrink", "flip", "signs", "delay"])
def test_an_attack_on_gradients_of_an_inner_stage_is_caught(outcome: Outcome, attack: str) -> None:
    assert outcome.recall(Direction.GRADIENT, True, attack) >= 0.95


@pytest.mark.parametrize("attack", ["flip", "signs", "delay"])
@pytest.mark.parametrize("direction", Direction)
def test_what_statistics_cannot_see_is_caught_by_continuity(
    outcome: Outcome, direction: Direction, attack: str
) -> None:
    probes = outcome.probes[direction, True, attack]
    assert outcome.caught_by[direction, True, attack, Reason.CONTINUITY] >= 0.95 * probes


@pytest.mark.parametrize("attack", ["scale", "flip"])
def test_blatant_attacks_are_caught_without_the_senders_input(outcome: Outcome, attack: str) -> None:
    assert outcome.recall(Direction.ACTIVATION, False, attack) >= 0.9


def test_a_flipped_gradient_of_the_last_stage_is_left_to_audits(outcome: Outcome) -> None:
    # Its mean is near zero, so the flipped one is as far from the baseline as the true one. If this ever
    # fails, the checker has learnt something new: write down what.
    assert outcome.recall(Direction.GRADIENT, False, "flip") < 0.5
