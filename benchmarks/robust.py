"""What lying siblings do to a gradient: ``python -m benchmarks.robust [--seeds N] [--json FILE] [--docs FILE]``.

Eight replicas average their gradients and three of them lie, knowing what the five others send. Each attack meets the
plain mean, the rule of ``verifier.aggregation``, and nearest-neighbour mixing before CenteredClip (NNM + CC; Allouah et
al., AISTATS 2023; Karimireddy, He and Jaggi, ICML 2021), the best of the rules that go by distances.

*Retained signal*, <aggregate, m> / <m, m> with m the mean of the honest gradients, and the cosine of the two: on
made-up gradients whose honest pairs have a given cosine, and on those of a small model during honest training. *Loss*:
that model is trained with the liars in every step, and judged on text that it was not trained on.

The model has two stages of one layer (width 32), and each stage is averaged by itself, as in a swarm. A worker's
gradient is of 32 sequences of 32 tokens of the standard library's sources. With ``--momentum`` it is also trained with
workers that send running means of their gradients, while the optimizer keeps none. A seed takes four minutes of one
core, twice that with momentum; ``--steps`` and ``--sequences`` make it shorter.

The JSON is a list of ``{case, ours, rival, rival_name, unit, ratio}``; above 1, ``ratio`` says that ours is better.
With ``--docs`` the tables replace those between the markers ``<!-- table NAME -->`` and ``<!-- end NAME -->``. The exit
code is 1 if the rule retains less than 0.9 where the mean has less than 0.6, or a loss is over 2 % above that without
liars.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from benchmarks.settings import inserted, markdown
from node.data import TokenStream, open_source
from node.model import StageModule
from node.optimizer import StepOptimizer
from node.rounds import strides
from node.tokenizer import load_tokenizer
from protocol.manifest import Manifest
from verifier.aggregation import (
    agreement,
    capped_weights,
    tolerated,
)

REPLICAS = 8
LIARS = tolerated(REPLICAS)
MEAN, OURS, NEIGHBOURS = "plain mean", "ours", "NNM + CC"
NEIGHBOUR_ROUNDS = 3
"""Of CenteredClip in NNM + CC."""

COSINES = (0.1, 0.3, 0.9)
"""Of made-up honest gradients."""
LENGTH = 10_000
"""Of made-up gradients."""

REAL_GROUPS = ("real, first half", "real, second half")
"""Of an honest training."""
KEEP_EVERY = 4
"""Steps of it between those whose gradients are attacked."""

OTHER_NUMBERS = (3, 4, 5, 6, 7, 16)
OTHER_ATTACKS = ("sign flip", "zeros", "ALIE, z = 1.5")
OTHER_COSINE = 0.3
"""Other numbers of members are tried less thoroughly."""

HELD_OUT_STEP = 1_000_000
"""Sequences from this step on are judged, not trained on."""
HELD_OUT = 16
"""Microbatches judged."""

GOAL_RETAINED, GOAL_BELOW = 0.9, 0.6
"""What our rule has to retain wherever the mean retains less than the second."""
GOAL_LOSS = 1.02
"""Times the loss without attack."""
MOMENTUM = 0.9


# attackers -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """What the liars send."""

    name: str
    send: Callable[[Tensor, Tensor], Tensor]
    """From the honest gradients [h, n] and the liars' own [f, n], what they send instead, [f, n] or [n]."""
    trains: bool = True
    """Whether a training under this attack is measured."""
    promised: bool = True
    """Whether the goal is for it."""
    slices: int = 0
    """Of how many owners' slices it is sent, all others being honest; 0 for all. Signal is measured in these alone."""


def little(replicas: int, liars: int) -> float:
    """How many standard deviations "a little is enough" allows (Baruch et al., NeurIPS 2019): 0.25 for 3 liars of 8.

    So many that with those honest values which lie still further out, the liars' one would be the majority.
    """
    needed = replicas // 2 + 1 - liars
    return statistics.NormalDist().inv_cdf((replicas - liars - needed) / (replicas - liars))


def deviating(z: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The honest mean less ``z`` standard deviations of each coordinate."""

    def send(honest: Tensor, own: Tensor) -> Tensor:
        return honest.mean(dim=0) - z * honest.std(dim=0, correction=0)

    return send


def opposing(share: float) -> Callable[[Tensor, Tensor], Tensor]:
    """The honest mean times ``-share``: inner-product manipulation (Xie, Koyejo and Gupta, UAI 2019)."""
    return lambda honest, own: -share * honest.mean(dim=0)


NONE = "none"
ATTACKS = (
    Attack(name="sign flip", send=lambda honest, own: -own),
    Attack(name="x 1000", send=lambda honest, own: 1000 * own),
    Attack(name="x -1000", send=lambda honest, own: -1000 * own, trains=False),
    Attack(name="zeros", send=lambda honest, own: torch.zeros_like(own)),
    Attack(name="ALIE", send=deviating(little(REPLICAS, LIARS))),
    Attack(name="ALIE, z = 1.5", send=deviating(1.5)),
    Attack(name="IPM, 0.1", send=opposing(0.1), trains=False),
    Attack(name="IPM, 0.5", send=opposing(0.5)),
    Attack(name="sign flip in 3 slices", send=lambda honest, own: -own, slices=3),
    Attack(name="x -1000 in 3 slices", send=lambda honest, own: -1000 * own, slices=3, trains=False),
    Attack(
        name="ALIE in own noise, z = 1",
        send=lambda honest, own: own - honest.std(dim=0, correction=0),
        trains=False,
        promised=False,
    ),
)
"""Those that are not promised against look like honest gradients of slightly other data."""


def attacked(gradients: Tensor, attack: Attack | None, liars: int = LIARS) -> Tensor:
    """All members' gradients [k, n] with those of the last ``liars`` replaced."""
    if attack is None:
        return gradients
    honest, own = gradients[:-liars], gradients[-liars:]
    sent = torch.where(reach(attack, gradients), attack.send(honest, own), own)
    return torch.cat((honest, sent.expand_as(own)))


def reach(attack: Attack | None, gradients: Tensor) -> Tensor:
    """The entries that an attack on members' gradients [k, n] changes, bool [n]."""
    members, length = gradients.shape
    slices = attack.slices if attack is not None else 0
    return torch.arange(length) % members < (slices or members)


# rules ---------------------------------------------------------------------------------------


def plain_mean(vectors: Tensor) -> Tensor:
    """The mean of [k, n]."""
    return vectors.mean(dim=0)


def ours(vectors: Tensor) -> Tensor:
    """The project's rule for three members or more, with equal weights, slice by slice, [k, n] -> [n]."""
    aggregate = torch.empty(vectors.shape[1])
    weights = capped_weights([1] * len(vectors))
    for cut in strides(len(vectors)):
        aggregate[cut] = agreement(vectors[:, cut].contiguous(), weights)
    return aggregate


def mixed_neighbours(vectors: Tensor) -> Tensor:
    """NNM + CC: each member's mean with its nearest others, then CenteredClip from the most central of these."""
    members = len(vectors)
    near = torch.cdist(vectors.double(), vectors.double()).topk(members - tolerated(members), largest=False).indices
    mixed = vectors.double()[near].mean(dim=1)
    centre = mixed[torch.cdist(mixed, mixed).median(dim=1).values.argmin()]
    for _ in range(NEIGHBOUR_ROUNDS):
        distances = torch.linalg.vector_norm(mixed - centre, dim=1, keepdim=True)
        factors = (distances.median() / distances.clamp_min(1e-30)).clamp_max(1.0)
        centre = centre + ((mixed - centre) * factors).mean(dim=0)
    aggregate: Tensor = centre.float()
    return aggregate


RULES: Mapping[str, Callable[[Tensor], Tensor]] = {MEAN: plain_mean, OURS: ours, NEIGHBOURS: mixed_neighbours}


# retained signal -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What an aggregate has of the honest mean."""

    retained: float
    cosine: float


def kept(aggregate: Tensor, honest_mean: Tensor) -> Kept:
    """Of two vectors [n]."""
    found, wanted = aggregate.double(), honest_mean.double()
    inner, square = float(found @ wanted), float(wanted @ wanted)
    length = float(torch.linalg.vector_norm(found)) * square**0.5
    return Kept(retained=inner / square, cosine=inner / length if length > 0 else 0.0)


def retention(
    groups: Sequence[Tensor],
    attack: Attack | None,
    rules: Mapping[str, Callable[[Tensor], Tensor]],
    liars: int = LIARS,
) -> dict[str, Kept]:
    """For each rule, means over groups of members' gradients, each [k, n]."""
    seen: dict[str, list[Kept]] = {name: [] for name in rules}
    for gradients in groups:
        sent = attacked(gradients, attack, liars)
        honest = gradients if attack is None else gradients[:-liars]
        reached = reach(attack, gradients)
        for name, rule in rules.items():
            seen[name].append(kept(rule(sent)[reached], honest.mean(dim=0)[reached]))
    return {
        name: Kept(
            retained=statistics.fmean(one.retained for one in found),
            cosine=statistics.fmean(one.cosine for one in found),
        )
        for name, found in seen.items()
    }


def made_up(cosine: float, seed: int, members: int = REPLICAS) -> Tensor:
    """Gradients [members, LENGTH]: the same normal vector in each, and noise so that pairs have this cosine."""
    generator = torch.Generator().manual_seed(seed)
    signal = torch.randn(LENGTH, generator=generator)
    return signal + math.sqrt(1 / cosine - 1) * torch.randn(members, LENGTH, generator=generator)


def mean_cosine(groups: Sequence[Tensor]) -> float:
    """Of all pairs of members, [k, n] for each group."""
    found = []
    for gradients in groups:
        unit = gradients / torch.linalg.vector_norm(gradients, dim=1, keepdim=True)
        pairs = len(unit) * (len(unit) - 1)
        found.append((float((unit @ unit.T).sum()) - len(unit)) / pairs)
    return statistics.fmean(found)


# training ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """What is trained."""

    steps: int = 100
    sequences: int = 32
    """A step and worker, one microbatch."""
    width: int = 32
    context: int = 32
    momentum: float = 0.0
    """Share of the old mean that workers keep of their own gradients; then the optimizer keeps none."""

    def manifest(self, seed: int) -> Manifest:
        """Two stages of one layer on the standard library's sources."""
        return Manifest.from_mapping(
            {
                "name": "robust",
                "model": {
                    **{"width": self.width, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 2 * self.width},
                    **{"context": self.context, "seed": seed},
                },
                "stages": {"layers_per_stage": [1, 1], "min_replicas": REPLICAS},
                "training": {
                    **{"steps": self.steps, "learning_rate": 5e-3, "warmup_steps": min(10, self.steps - 1)},
                    **{"sequences_per_microbatch": self.sequences, "min_lr_ratio": 0.1},
                    **{"sequences_per_step": REPLICAS * self.sequences, "decay_steps": self.steps},
                    **({"beta1": 0.0} if self.momentum else {}),
                },
                "data": {"seed": seed},
            }
        )


class Trainer:
    """The small model, trained by workers whose gradients are averaged for each stage."""

    def __init__(self, size: Size, seed: int, data: TokenStream) -> None:
        self._manifest = size.manifest(seed)
        self._data = data
        self._momentum = size.momentum
        cut = self._manifest.stages.layers_per_stage
        self._stages = [StageModule(self._manifest.model, cut, index) for index in range(len(cut))]
        self._optimizers = [StepOptimizer(stage.layout(), self._manifest.training) for stage in self._stages]
        self._running: list[Tensor] = []
        self.step = 0

    def gradients(self) -> list[Tensor]:
        """Of each stage what the workers of this step send if they are honest, [REPLICAS, parameters]."""
        found: list[list[Tensor]] = [[] for _ in self._stages]
        for worker in range(REPLICAS):
            for stage in self._stages:
                stage.zero_grad()
            torch.autograd.backward(self._loss(self.step, worker))
            for stage, rows in zip(self._stages, found, strict=True):
                rows.append(_flat(stage, gradients=True))
        fresh = [torch.stack(rows) for rows in found]
        if self._momentum and self._running:
            fresh = [old.lerp(new, 1 - self._momentum) for old, new in zip(self._running, fresh, strict=True)]
        self._running = fresh
        return fresh

    def apply(self, aggregates: Sequence[Tensor]) -> None:
        """Update each stage with its aggregate [parameters]."""
        for stage, optimizer, aggregate in zip(self._stages, self._optimizers, aggregates, strict=True):
            flat = _flat(stage)
            optimizer.apply(flat, aggregate, self.step)
            for slot in stage.layout():
                stage.get_parameter(slot.name).data.copy_(slot.view(flat))
        self.step += 1

    @torch.no_grad()
    def judge(self) -> float:
        """Mean loss on text held out."""
        return statistics.fmean(float(self._loss(HELD_OUT_STEP, number)) for number in range(HELD_OUT))

    def _loss(self, step: int, microbatch: int) -> Tensor:
        training = self._manifest.training
        tokens = self._data.sequences(
            step,
            microbatch,
            per_microbatch=training.sequences_per_microbatch,
            context=self._manifest.model.context,
        )
        value = tokens[:, :-1]
        for stage in self._stages[:-1]:
            value = stage(value)
        loss: Tensor = self._stages[-1](value, tokens[:, 1:])
        return loss


def _flat(stage: StageModule, *, gradients: bool = False) -> Tensor:
    """A stage's parameters or their gradients [parameters], in the order of its layout."""
    found = []
    for slot in stage.layout():
        parameter = stage.get_parameter(slot.name)
        value = parameter.grad if gradients else parameter.detach()
        assert value is not None
        found.append(value.reshape(-1))
    return torch.cat(found)


@functools.cache
def open_data(size: Size, seed: int) -> TokenStream:
    """The standard library's sources, in the order of a seed."""
    manifest = size.manifest(seed)
    return open_source(
        manifest.data,
        load_tokenizer(manifest.data.tokenizer, manifest.data.tokenizer_sha256),
        vocab_size=manifest.model.vocab_size,
        sequences_per_step=manifest.training.sequences_per_step,
    )


def train(
    size: Size,
    seed: int,
    data: TokenStream,
    attack: Attack | None,
    rule: Callable[[Tensor], Tensor],
    keep: Callable[[int, Sequence[Tensor]], None] = lambda step, gradients: None,
) -> float:
    """Train with liars in every step; returns the loss at the end. ``keep`` gets each step's honest gradients."""
    trainer = Trainer(size, seed, data)
    for step in range(size.steps):
        gradients = trainer.gradients()
        keep(step, gradients)
        trainer.apply([rule(attacked(of_stage, attack)) for of_stage in gradients])
    return trainer.judge()


# measuring -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """What each rule retains under one attack, of one group of gradients."""

    group: str
    attack: str
    kept: Mapping[str, Kept]
    promised: bool = True

    @property
    def good(self) -> bool:
        """Whether the goal is reached, where there is one."""
        needed = self.promised and self.kept[MEAN].retained < GOAL_BELOW
        return not needed or self.kept[OURS].retained >= GOAL_RETAINED


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """Losses at the end of training under one attack, means over seeds."""

    attack: str
    ours: float
    mean: float
    free: float
    """The plain mean's without liars."""
    momentum: bool = False

    @property
    def good(self) -> bool:
        """Whether the goal is reached; there is none with momentum."""
        return self.momentum or self.ours <= GOAL_LOSS * self.free


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """All that was measured."""

    size: Size
    seeds: int
    cosines: Mapping[str, float]
    """Of honest pairs, of each group of gradients."""
    retentions: Sequence[Retention]
    numbers: Sequence[tuple[int, Retention]]
    """Other numbers of members than eight, with as many liars as are tolerated."""
    losses: Sequence[Loss]

    @property
    def good(self) -> bool:
        """Whether every goal is reached."""
        return all(one.good for one in self.retentions) and all(one.good for one in self.losses)


def retentions(groups: Mapping[str, Sequence[Tensor]]) -> list[Retention]:
    """Every attack, and none, on every group of gradients."""
    return [
        Retention(
            group=group,
            attack=NONE if attack is None else attack.name,
            kept=retention(gradients, attack, RULES),
            promised=attack is None or attack.promised,
        )
        for group, gradients in groups.items()
        for attack in (None, *ATTACKS)
    ]


def other_numbers(seeds: int) -> list[tuple[int, Retention]]:
    """Stages of other sizes, on made-up gradients."""
    found = []
    for members in OTHER_NUMBERS:
        groups = [made_up(OTHER_COSINE, seed, members) for seed in range(seeds)]
        for attack in (None, *(attack for attack in ATTACKS if attack.name in OTHER_ATTACKS)):
            name = NONE if attack is None else attack.name
            kept_by = retention(groups, attack, RULES, tolerated(members))
            found.append((members, Retention(group=f"{members} members", attack=name, kept=kept_by)))
    return found


def losses(size: Size, seeds: int, free: float, attacks: Sequence[Attack | None]) -> list[Loss]:
    """Train under each attack with the plain mean and with our rule; None is without liars."""
    found = []
    for attack in attacks:
        name = NONE if attack is None else attack.name

        def trained(rule: str, attack: Attack | None = attack) -> float:
            return statistics.fmean(
                train(size, seed, open_data(size, seed), attack, RULES[rule]) for seed in range(seeds)
            )

        mean = free if attack is None else trained(MEAN)
        found.append(Loss(attack=name, ours=trained(OURS), mean=mean, free=free, momentum=size.momentum > 0))
        print(f"trained against {name}: {found[-1]}", file=sys.stderr, flush=True)
    return found


def honest_training(size: Size, seeds: int) -> tuple[float, dict[str, list[Tensor]]]:
    """The loss without liars, and the gradients on the way there, of both stages, by halves of the training."""
    groups: dict[str, list[Tensor]] = {name: [] for name in REAL_GROUPS}

    def keep(step: int, gradients: Sequence[Tensor]) -> None:
        if step % KEEP_EVERY == 0 or step == size.steps - 1:
            groups[REAL_GROUPS[int(2 * step >= size.steps)]].extend(gradients)

    found = [train(size, seed, open_data(size, seed), None, plain_mean, keep) for seed in range(seeds)]
    return statistics.fmean(found), groups


def measure(size: Size, seeds: int, *, momentum: bool = False) -> Results:
    """All of it."""
    free, groups = honest_training(size, seeds)
    made = {f"made up, {cosine}": [made_up(cosine, seed) for seed in range(seeds)] for cosine in COSINES}
    all_groups = made | groups
    trained: list[Attack | None] = [None, *(attack for attack in ATTACKS if attack.trains)]
    found = losses(size, seeds, free, trained)
    if momentum:
        running = replace(size, momentum=MOMENTUM)
        found += losses(running, seeds, honest_training(running, seeds)[0], trained)
    return Results(
        size=size,
        seeds=seeds,
        cosines={name: mean_cosine(gradients) for name, gradients in all_groups.items()},
        retentions=retentions(all_groups),
        numbers=other_numbers(seeds),
        losses=found,
    )


def run() -> dict[str, float]:
    """The part that takes seconds: what our rule retains of made-up gradients, in most noise."""
    gradients = [made_up(min(COSINES), 0)]
    return {attack.name: retention(gradients, attack, {OURS: ours})[OURS].retained for attack in ATTACKS}


# the report ----------------------------------------------------------------------------------


def row(case: str, ours: float, rival: float, rival_name: str, unit: str) -> dict[str, object]:
    """One comparison."""
    ratio = rival / ours if unit == "loss" else closeness(ours) / closeness(rival)
    return {
        **{"case": case, "ours": round(ours, 4), "rival": round(rival, 4), "rival_name": rival_name},
        **{"unit": unit, "ratio": round(ratio, 4)},
    }


def closeness(retained: float) -> float:
    """How near to 1, by factors: twice too much is as bad as half. Never below a hundredth."""
    return max(0.01, min(retained, 1 / retained)) if retained > 0 else 0.01


def rows(results: Results) -> list[dict[str, object]]:
    """Everything as comparisons of our rule with the plain mean, and of retained signal also with NNM + CC."""
    found = []
    for one in results.retentions:
        for rival in (MEAN, NEIGHBOURS):
            case = f"{one.group}, {one.attack}"
            found.append(row(case, one.kept[OURS].retained, one.kept[rival].retained, rival, "retained signal"))
            found.append(row(case, one.kept[OURS].cosine, one.kept[rival].cosine, rival, "cosine"))
    for loss in results.losses:
        case = f"trained{' with momentum' if loss.momentum else ''}, {loss.attack}"
        found.append(row(case, loss.ours, loss.mean, MEAN, "loss"))
        found.append(row(case, loss.ours, loss.free, "plain mean without liars", "loss"))
    return found


def cell(kept: Kept) -> str:
    """Retained signal and cosine."""
    retained = f"{kept.retained:.0f}" if abs(kept.retained) >= 10 else f"{kept.retained:.2f}"
    return f"{retained} ({kept.cosine:.2f})"


def retained_table(results: Results, group: str) -> str:
    """One group of gradients: attacks by rules."""
    lines = [
        [one.attack, *(cell(one.kept[rule]) for rule in RULES), met(one.good)]
        for one in results.retentions
        if one.group == group
    ]
    return markdown([[f"cosine {results.cosines[group]:.2f}", *RULES, "goal"], *lines])


def numbers_table(results: Results) -> str:
    """Other numbers of members."""
    rules = tuple(RULES)
    lines = [
        [str(members), str(tolerated(members)), one.attack, *(cell(one.kept[rule]) for rule in rules)]
        for members, one in results.numbers
    ]
    return markdown([["members", "liars", "they send", *rules], *lines])


def loss_table(results: Results, *, momentum: bool) -> str:
    """Losses, and by how much they are above that without liars."""

    def above(loss: float, free: float) -> str:
        return f"{loss:.3f} ({100 * (loss / free - 1):+.1f} %)"

    lines = [
        [one.attack, above(one.mean, one.free), above(one.ours, one.free), met(one.good)]
        for one in results.losses
        if one.momentum == momentum
    ]
    return markdown([["liars send", MEAN, OURS, "goal"], *lines])


def met(good: bool) -> str:
    """A word for a goal that was missed, and none else."""
    return "" if good else "missed"


def tables(results: Results) -> dict[str, str]:
    """By the names of their places in the document."""
    found = {group: retained_table(results, group) for group in results.cosines}
    found |= {"losses": loss_table(results, momentum=False), "numbers": numbers_table(results)}
    if any(loss.momentum for loss in results.losses):
        found["losses with momentum"] = loss_table(results, momentum=True)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.robust", description="What lying siblings can do.")
    parser.add_argument("--seeds", type=int, default=1, help="models, and orders of the data")
    parser.add_argument("--steps", type=int, default=Size().steps, help="of each training")
    parser.add_argument("--sequences", type=int, default=Size().sequences, help="a step and worker")
    parser.add_argument("--momentum", action="store_true", help="also train with running means of gradients")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="replace the tables of a document")
    options = parser.parse_args(arguments)
    if min(options.seeds, options.sequences) < 1 or options.steps < 2:
        parser.error("--seeds and --sequences are at least 1, --steps at least 2")
    torch.set_num_threads(1)
    size = Size(steps=options.steps, sequences=options.sequences)
    results = measure(size, options.seeds, momentum=options.momentum)
    found = tables(results)
    for name, table in found.items():
        print(f"{name}\n\n{table}\n")
    if options.json is not None:
        options.json.write_text(json.dumps(rows(results), indent=1) + "\n", encoding="utf-8")
    if options.docs is not None:
        options.docs.write_text(inserted(options.docs.read_text(encoding="utf-8"), found), encoding="utf-8")
    return 0 if results.good else 1


if __name__ == "__main__":
    sys.exit(main())
