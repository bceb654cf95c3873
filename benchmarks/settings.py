"""What each setting of the checker is worth: ``python -m benchmarks.settings [--steps N] [--json FILE] [--docs FILE]``.

A small model of four stages trains honestly on real text, for two learning rates and two seeds, and every tensor that
crosses a boundary is kept as the wire has it (bf16). Then the checker judges these tensors under each setting, one
varied at a time around the defaults: once as they are, and, for the first seed, once for each attack of the drill with
the first of the step's four microbatches falsified during the last quarter of the steps. What the checker accepts
enters its baseline, also of a falsified tensor, as in a swarm.

Three kinds of rows (``kind``) make up the JSON list. ``honest``: messages judged after the warm-up, and how many were
flagged. ``attack``: falsified messages, how many were flagged, and of how many attackers (one for each boundary,
direction and learning rate) the strikes reached the limit. ``strikes``, under the defaults: for each strike limit, how
soon attackers reach it and whether honest senders do. ``inner`` senders have a stage before them, so that sketches can
be compared; ``ends`` are the first stage's activations and the last stage's gradients.

With ``--docs`` the tables replace those between the markers ``<!-- table NAME -->`` and ``<!-- end NAME -->``.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from node.data import open_source
from node.drill import Drill, parse_drill
from node.drill_names import TENSOR_ATTACKS
from node.model import StageModule
from node.optimizer import StepOptimizer
from node.stage import StageRunner
from node.tokenizer import load_tokenizer
from protocol.manifest import Manifest
from verifier.config import AXES, CheckerConfig
from verifier.distances import Reduction
from verifier.ledger import BARRED, Ledger
from verifier.sentinel import BoundaryChecker
from verifier.sketch import sketch
from verifier.verdicts import Direction, Reason

STAGES = 4
MICROBATCHES = 4
STEPS = 72
LEAST_STEPS = 32
"""The warm-up takes 16, and an attack of fewer than eight steps shows little."""

LEARNING_RATES = (3e-3, 1e-2)
SEEDS = (0, 1)
"""Attacks are tried on the first only: they cost four times what honest traffic does."""

ATTACKED = 0
"""Microbatch of each step that the attacker computes."""

LIMITS = (1.0, 2.0, 3.0, 4.0, 5.0)
LONG_RUN = 10_000
"""Steps for which the chance of a false quarantine is given."""

DEFAULTS = CheckerConfig()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One setting at one value, all others at their defaults."""

    setting: str
    value: str
    config: CheckerConfig


def trials() -> list[Trial]:
    """The defaults, then one setting varied at a time; last the paper's distances under the other reductions."""
    changes: list[tuple[str, str, dict[str, Any]]] = [("default", "", {})]
    changes += [("reduction", axes, {"reduction": axes}) for axes in AXES if axes != DEFAULTS.reduction]
    changes += [("votes", str(votes), {"votes": votes}) for votes in (1, 2, 3)]
    changes += [("window", str(window), {"window": window}) for window in (64, 128, 256, 512)]
    changes += [("fence_multiplier", f"{k:g}", {"fence_multiplier": k}) for k in (1.5, 3.0, 6.0)]
    changes += [("ema", f"{ema:g}", {"ema_activation": ema, "ema_gradient": ema}) for ema in (0.6, 0.8, 0.9, 0.99)]
    changes += [("sketches", "off", {"sketches": False})]
    changes += [
        ("sketches, reduction", f"off, {axes}", {"sketches": False, "reduction": axes})
        for axes in AXES
        if axes != DEFAULTS.reduction
    ]
    made = [Trial(setting=name, value=value, config=replace(DEFAULTS, **change)) for name, value, change in changes]
    return [trial for number, trial in enumerate(made) if number == 0 or trial.config != DEFAULTS]


# the honest run -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """What a stage sends for one microbatch."""

    tensor: Tensor
    """bf16 [B, T, d]"""
    sketch: Tensor
    received: Message | None
    """What its sender got from the stage before; None at the ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """All that one stage sends over one boundary in one direction, by step and microbatch."""

    boundary: int
    """Between this stage and the next."""
    direction: Direction
    messages: list[list[Message]] = field(default_factory=list)

    @property
    def inner(self) -> bool:
        """Whether the sender has a stage before it."""
        return self.boundary != (0 if self.direction is Direction.ACTIVATION else STAGES - 2)

    @property
    def place(self) -> str:
        """inner or ends"""
        return "inner" if self.inner else "ends"


def run_manifest(rate: float, seed: int, steps: int) -> Manifest:
    """Four stages of one layer, microbatches of 4 x 64 tokens and width 64, on the standard library's sources."""
    return Manifest.from_mapping(
        {
            "name": "settings",
            "model": {
                **{"width": 64, "layers": STAGES, "heads": 4, "kv_heads": 2, "ffn": 160, "context": 64},
                "seed": seed,
            },
            "stages": {"layers_per_stage": [1] * STAGES},
            "training": {
                "steps": steps,
                "learning_rate": rate,
                "warmup_steps": 10,
                "decay_steps": steps,
                "sequences_per_step": 4 * MICROBATCHES,
                "sequences_per_microbatch": 4,
            },
            "data": {"seed": seed},
        }
    )


def record(manifest: Manifest) -> tuple[list[Stream], list[float]]:
    """Train, and keep what crosses the boundaries; also the mean loss of each step."""
    cut = manifest.stages.layers_per_stage
    runners = [StageRunner(StageModule(manifest.model, cut, stage), torch.device("cpu")) for stage in range(STAGES)]
    optimizers = [StepOptimizer(runner.layout, manifest.training) for runner in runners]
    tokens = open_source(
        manifest.data,
        load_tokenizer(manifest.data.tokenizer),
        vocab_size=manifest.model.vocab_size,
        sequences_per_step=manifest.training.sequences_per_step,
    )
    streams = {
        (boundary, direction): Stream(boundary=boundary, direction=direction)
        for boundary in range(STAGES - 1)
        for direction in Direction
    }
    losses = []
    for step in range(manifest.training.steps):
        for stream in streams.values():
            stream.messages.append([])
        key, total = step_key(step), 0.0
        for microbatch in range(MICROBATCHES):
            rows = tokens.sequences(
                step,
                microbatch,
                per_microbatch=manifest.training.sequences_per_microbatch,
                context=manifest.model.context,
            )
            value, sent = rows[:, :-1], None
            for boundary in range(STAGES - 1):
                sent = _message(runners[boundary].forward(0, value), key, sent)
                streams[boundary, Direction.ACTIVATION].messages[step].append(sent)
                value = sent.tensor.float()
            loss, value = runners[-1].forward_backward(0, value, rows[:, 1:])
            sent = None
            for boundary in reversed(range(STAGES - 1)):
                sent = _message(value, key, sent)
                streams[boundary, Direction.GRADIENT].messages[step].append(sent)
                upstream = runners[boundary].backward(0, sent.tensor.float())
                value = value if upstream is None else upstream  # the first stage has nobody to send one to
            total += loss
        losses.append(total / MICROBATCHES)
        for runner, optimizer in zip(runners, optimizers, strict=True):
            gathered, count = runner.take_gradient()
            optimizer.apply(runner.flat_parameters(), gathered / count, step)
    return list(streams.values()), losses


def step_key(step: int) -> bytes:
    """The sketches' key of a step."""
    return hashlib.sha256(step.to_bytes(8, "big")).digest()


def _message(tensor: Tensor, key: bytes, received: Message | None) -> Message:
    rounded = tensor.bfloat16()
    picture = sketch(rounded, key=key, size=DEFAULTS.sketch_size)
    return Message(tensor=rounded, sketch=picture, received=received)


def falsify(stream: Stream, attack: str, from_step: int) -> dict[int, Message]:
    """What an attacker sends instead of the honest message of ``ATTACKED``, in the steps in which it differs."""
    prefix = "gradient-" if stream.direction is Direction.GRADIENT else ""
    drill = Drill(parse_drill(prefix + attack, from_step), seed=f"settings {stream.boundary}".encode())
    found = {}
    for step, messages in enumerate(stream.messages):
        honest = messages[ATTACKED]
        received = None if honest.received is None else honest.received.tensor
        sent = drill.apply(honest.tensor, stream.direction, step, received=received)
        if sent is not honest.tensor:
            found[step] = _message(sent, step_key(step), honest.received)
    return found


# judging it -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A message, reduced: all that the checker needs."""

    reduction: Reduction
    sketch: Tensor
    input_sketch: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A stream and the attacks on it, reduced."""

    stream: Stream
    honest: list[list[Item]]
    fakes: dict[str, dict[int, Item]]


@dataclass(frozen=True, slots=True, kw_only=True)
class HonestResult:
    """Messages judged after the warm-up, those flagged, and for each step whether any was."""

    judged: int
    flagged: int
    flagged_steps: list[bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttackResult:
    """Falsified messages, those flagged, and the attacker's steps."""

    sent: int
    caught: int
    caught_steps: list[bool]
    """For each step since the attack began: whether the attacker was flagged."""


def reduced(stream: Stream, fakes: Mapping[str, Mapping[int, Message]], config: CheckerConfig) -> Case:
    """Reduce every message as ``config`` says."""
    checker = BoundaryChecker(config, stream.direction, seed=stream.boundary)

    def item(message: Message) -> Item:
        source = None if message.received is None else message.received.sketch
        return Item(reduction=checker.reduce(message.tensor), sketch=message.sketch, input_sketch=source)

    return Case(
        stream=stream,
        honest=[[item(message) for message in messages] for messages in stream.messages],
        fakes={name: {step: item(message) for step, message in found.items()} for name, found in fakes.items()},
    )


def judge(case: Case, config: CheckerConfig, from_step: int) -> tuple[HonestResult, dict[str, AttackResult]]:
    """The stream without an attack, and from ``from_step`` on with each.

    At first the falsified messages are only shown to the checker of the honest run. That settles the matter where
    it flags all of them, since then none enters a baseline, and where it flags none, since those that enter make the
    later ones look more usual yet. Where it flags some, the steps are gone through again with the attack in place.
    """
    checker = BoundaryChecker(config, case.stream.direction, seed=case.stream.boundary)
    before = checker
    judged = flagged = 0
    flagged_steps = []
    shown: dict[str, list[bool]] = {name: [] for name in case.fakes}
    for step, items in enumerate(case.honest):
        if step == from_step:
            before = copy.deepcopy(checker)
        if step >= from_step:
            for name, fakes in case.fakes.items():
                shown[name].append(step in fakes and _flags(checker, fakes[step], step, learn=False))
        ready = not checker.warming_up
        wrong = [_flags(checker, item, step) for item in items]
        checker.end_step(step)
        judged += ready * len(items)
        flagged += sum(wrong)
        flagged_steps.append(any(wrong))
    for name, fakes in case.fakes.items():
        if 0 < sum(shown[name]) < len(fakes):
            shown[name] = _attacked(case, copy.deepcopy(before), fakes, from_step)
    return HonestResult(judged=judged, flagged=flagged, flagged_steps=flagged_steps), {
        name: AttackResult(sent=len(fakes), caught=sum(shown[name]), caught_steps=shown[name])
        for name, fakes in case.fakes.items()
    }


def _attacked(case: Case, checker: BoundaryChecker, fakes: Mapping[int, Item], from_step: int) -> list[bool]:
    """For each step from ``from_step`` on, whether the falsified message in place of the honest one was flagged."""
    caught = []
    for step in range(from_step, len(case.honest)):
        items = list(case.honest[step])
        items[ATTACKED] = fakes.get(step, items[ATTACKED])
        wrong = [_flags(checker, item, step) for item in items]
        checker.end_step(step)
        caught.append(step in fakes and wrong[ATTACKED])
    return caught


def _flags(checker: BoundaryChecker, item: Item, step: int, *, learn: bool = True) -> bool:
    """Judge, and learn from what is accepted."""
    judgement = checker.judge_reduced(item.reduction, step=step, sketch=item.sketch, input_sketch=item.input_sketch)
    if learn and judgement.verdict.accepted:
        checker.accept(judgement.observation)
    return not judgement.verdict.accepted


def steps_until(flagged_steps: Sequence[bool], config: CheckerConfig) -> int | None:
    """Steps, counted from the first of the sequence, until the ledger bars who was flagged in these; None: never."""
    ledger = Ledger(config)
    for step, flagged in enumerate(flagged_steps):
        if flagged:
            ledger.strike("peer", Reason.L1, step=step)
            if ledger.standing("peer").state in BARRED:
                return step + 1
        ledger.end_step(step)
    return None


def chance_of_limit(share: float, *, limit: float, decay: float, steps: int) -> float:
    """Chance that strikes of one reach ``limit`` within ``steps``, if a step brings one with chance ``share``.

    Each step takes ``decay`` of them away. Steps are taken as independent.
    """
    counts, reached = {0.0: 1.0}, 0.0
    for _ in range(steps):
        later: defaultdict[float, float] = defaultdict(float)
        for strikes, chance in counts.items():
            if strikes + 1.0 >= limit:
                reached += chance * share
            else:
                later[round(max(0.0, strikes + 1.0 - decay), 6)] += chance * share
            later[round(max(0.0, strikes - decay), 6)] += chance * (1.0 - share)
        counts = later
    return reached


# all of it ------------------------------------------------------------------------------------


@dataclass(slots=True, kw_only=True)
class HonestRow:
    """Honest messages under one setting, over all runs."""

    kind: str = "honest"
    setting: str
    value: str
    direction: str
    place: str
    judged: int = 0
    flagged: int = 0


@dataclass(slots=True, kw_only=True)
class AttackRow:
    """One attack under one setting, over all streams of its kind."""

    kind: str = "attack"
    setting: str
    value: str
    direction: str
    place: str
    attack: str
    sent: int = 0
    caught: int = 0
    attackers: int = 0
    barred: int = 0

    @property
    def recall(self) -> float:
        """Share of the falsified messages that were flagged."""
        return self.caught / self.sent if self.sent else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StrikesRow:
    """One strike limit, under the defaults."""

    kind: str = "strikes"
    limit: float
    attackers: int
    """Streams times attacks."""
    barred: int
    median_steps: float | None
    """Of those barred, from the first step of the attack."""
    slowest_steps: int | None
    honest: int
    """Senders, each with all messages of its boundary and direction."""
    honest_barred: int
    honest_share: float
    """Of the steps, those in which a sender was flagged."""
    honest_chance: float
    """To reach the limit within ``LONG_RUN`` steps, if flags were independent."""


@dataclass(slots=True)
class Tally:
    """Adds up results."""

    honest: dict[tuple[str, ...], HonestRow] = field(default_factory=dict)
    attacks: dict[tuple[str, ...], AttackRow] = field(default_factory=dict)
    honest_steps: list[list[bool]] = field(default_factory=list)
    caught_steps: list[list[bool]] = field(default_factory=list)

    def add(self, trial: Trial, stream: Stream, honest: HonestResult, attacks: Mapping[str, AttackResult]) -> None:
        """One stream under one setting."""
        key = (trial.setting, trial.value, str(stream.direction), stream.place)
        row = self.honest.setdefault(key, HonestRow(setting=key[0], value=key[1], direction=key[2], place=key[3]))
        row.judged += honest.judged
        row.flagged += honest.flagged
        for name, result in attacks.items():
            empty = AttackRow(setting=key[0], value=key[1], direction=key[2], place=key[3], attack=name)
            found = self.attacks.setdefault((*key, name), empty)
            found.sent += result.sent
            found.caught += result.caught
            found.attackers += 1
            found.barred += steps_until(result.caught_steps, trial.config) is not None
        if trial.config == DEFAULTS:
            self.honest_steps.append(honest.flagged_steps)
            self.caught_steps.extend(result.caught_steps for result in attacks.values())

    def strikes(self) -> list[StrikesRow]:
        """A row for each limit."""
        return [self._strikes(limit) for limit in LIMITS]

    def _strikes(self, limit: float) -> StrikesRow:
        config = replace(DEFAULTS, strike_limit=limit)
        lasted = [steps for flags in self.caught_steps if (steps := steps_until(flags, config)) is not None]
        after = [flags[DEFAULTS.warmup_steps :] for flags in self.honest_steps]
        share = sum(map(sum, after)) / sum(map(len, after))
        return StrikesRow(
            limit=limit,
            attackers=len(self.caught_steps),
            barred=len(lasted),
            median_steps=statistics.median(lasted) if lasted else None,
            slowest_steps=max(lasted, default=None),
            honest=len(after),
            honest_barred=sum(steps_until(flags, config) is not None for flags in after),
            honest_share=share,
            honest_chance=chance_of_limit(share, limit=limit, decay=config.strike_decay, steps=LONG_RUN),
        )


def measure(steps: int, say: Callable[[str], None]) -> Tally:
    """Record and judge; ``say`` hears of the progress."""
    tally, from_step, start = Tally(), steps * 3 // 4, time.monotonic()
    for seed in SEEDS:
        for rate in LEARNING_RATES:
            streams, losses = record(run_manifest(rate, seed, steps))
            say(f"{time.monotonic() - start:4.0f} s: trained at {rate:g}, loss {losses[0]:.2f} to {losses[-1]:.2f}")
            for stream in streams:
                names = [str(attack) for attack in TENSOR_ATTACKS] if seed == SEEDS[0] else []
                fakes = {name: falsify(stream, name, from_step) for name in names}
                for axes in AXES:
                    case = reduced(stream, fakes, replace(DEFAULTS, reduction=axes))
                    for trial in trials():
                        if trial.config.reduction == axes:
                            tally.add(trial, stream, *judge(case, trial.config, from_step))
            say(f"{time.monotonic() - start:4.0f} s: judged")
    return tally


# tables ---------------------------------------------------------------------------------------

PLACES = (("activation", "inner"), ("gradient", "inner"), ("activation", "ends"), ("gradient", "ends"))


def tables(tally: Tally) -> dict[str, str]:
    """The tables by name, in Markdown."""
    return {
        "settings": _settings_table(tally),
        "reduction": _compared(
            tally, {"tokens": ("sketches", "off")} | {a: ("sketches, reduction", f"off, {a}") for a in AXES[1:]}
        ),
        "votes": _compared(tally, {"1 vote": ("default", ""), "2": ("votes", "2"), "3": ("votes", "3")}),
        "sketches": _compared(tally, {"with": ("default", ""), "without": ("sketches", "off")}),
        "ends": _compared(tally, {"tokens": ("default", "")} | {a: ("reduction", a) for a in AXES[1:]}, place="ends"),
        "strikes": _strikes_table(tally.strikes()),
    }


def _settings_table(tally: Tally) -> str:
    lines = [
        ["setting", "value", "honest flagged", "activations", "gradients", "first stage", "last stage", "barred"],
    ]
    for trial in trials():
        key = (trial.setting, trial.value)
        honest = [row for row in tally.honest.values() if (row.setting, row.value) == key]
        attacks = [row for row in tally.attacks.values() if (row.setting, row.value) == key]
        flagged, judged = sum(row.flagged for row in honest), sum(row.judged for row in honest)
        recalls = [
            statistics.fmean(row.recall for row in attacks if (row.direction, row.place) == place) for place in PLACES
        ]
        barred = sum(row.barred for row in attacks) / sum(row.attackers for row in attacks)
        lines.append(
            [
                trial.setting,
                trial.value,
                f"{flagged} of {judged} ({100 * flagged / judged:.2f} %)",
                *map(_percent, recalls),
                _percent(barred),
            ]
        )
    return markdown(lines)


def _compared(tally: Tally, columns: Mapping[str, tuple[str, str]], place: str = "inner") -> str:
    """Recall by attack, a column for each direction and setting."""
    lines = [["attack", *(f"{direction}s, {name}" for direction in Direction for name in columns)]]
    for attack in TENSOR_ATTACKS:
        lines.append(
            [
                str(attack),
                *(
                    _percent(tally.attacks[*key, str(direction), place, str(attack)].recall)
                    for direction in Direction
                    for key in columns.values()
                ),
            ]
        )
    return markdown(lines)


def _strikes_table(rows: Iterable[StrikesRow]) -> str:
    lines = [["limit", "attackers barred", "median steps", "slowest", "honest barred", f"chance in {LONG_RUN:,} steps"]]
    for row in rows:
        lines.append(
            [
                f"{row.limit:g}",
                f"{row.barred} of {row.attackers}",
                "-" if row.median_steps is None else f"{row.median_steps:g}",
                "-" if row.slowest_steps is None else str(row.slowest_steps),
                f"{row.honest_barred} of {row.honest}",
                f"{row.honest_chance:.1e}",
            ]
        )
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table: the first line is its head, and all columns but the first are set to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]

    def line(cells: Sequence[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        return "| " + " | ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]) + " |"

    rule = "|" + "|".join(["-" * (widths[0] + 2), *("-" * (width + 1) + ":" for width in widths[1:])]) + "|"
    return "\n".join([line(lines[0]), rule, *map(line, lines[1:])])


def inserted(text: str, found: Mapping[str, str]) -> str:
    """``text`` with each table between its markers replaced. Raises ValueError if a pair of markers is missing."""
    for name, table in found.items():
        start, end = f"<!-- table {name} -->", f"<!-- end {name} -->"
        before, opened, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not (opened and closed):
            raise ValueError(f"the document has no place for the table {name}: write {start} and {end}")
        text = f"{before}{start}\n\n{table}\n\n{end}{after}"
    return text


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.settings", description="What each setting of the checker is worth."
    )
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=f"of each run, {STEPS} unless told")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    parser.add_argument("--docs", type=Path, metavar="FILE", help="replace the tables of a document")
    options = parser.parse_args(arguments)
    if options.steps < LEAST_STEPS:
        parser.error(f"--steps is at least {LEAST_STEPS}")
    torch.set_num_threads(1)
    tally = measure(options.steps, lambda line: print(line, file=sys.stderr, flush=True))
    found = tables(tally)
    for name, table in found.items():
        print(f"{name}\n\n{table}\n")
    if options.json is not None:
        groups = (tally.honest.values(), tally.attacks.values(), tally.strikes())
        rows = [asdict(row) for group in groups for row in group]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if options.docs is not None:
        options.docs.write_text(inserted(options.docs.read_text(encoding="utf-8"), found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
