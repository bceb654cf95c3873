"""What the arena runs: the cells of each suite. Pure; nothing here starts a node.

A cell is one kind of attack in one kind of swarm. It is run once for each defence and seed.
"""

from __future__ import annotations

import fnmatch
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from node.drill_names import CONDUCT_ATTACKS, Attack

DEFENCES = ("off", "sentinel", "all")
"""No checker; statistics and votes of the neighbours; the same and audits."""

DIRECTIONS = ("activation", "gradient", "both")

PAPER_ATTACKS = (
    Attack.CONSTANT,
    Attack.RANDOM,
    Attack.SCALE,
    Attack.SIGN_FLIP,
    Attack.RANDOM_SIGN,
    Attack.DELAY,
    Attack.BIAS,
    Attack.NOISE,
)
"""The seven of the paper, and sign-flip, which is what it calls scaling by -1."""

COLLUDING_SHARE = 0.6
"""Of the attackers of a colluding cell, those that cover for each other: up to here the paper was stable."""

EARLY_STEP = 2
"""Where attackers begin that do not wait for the checker's warm-up to end."""

_PREFIXES = {"activation": "", "gradient": "gradient-", "both": "both-", "none": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The swarm of a suite. Small, since all nodes share one process."""

    stages: int
    replicas: int
    attackers: int
    """Of the replicas of each attacked stage."""
    steps: int
    attack_from: int
    warmup_steps: int
    """Of the checker; ends before the attack begins."""
    microbatches: int
    """In one step, of all replicas together."""
    width: int = 32
    context: int = 32
    sequences_per_microbatch: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One kind of attack in one setting. ``drill`` is what an attacker plays, "" for nobody, "mixed" for a draw."""

    suite: str
    attack: str
    drill: str
    direction: str
    """activation, gradient, both, or none where no tensor is falsified."""
    stage_role: str
    """first, middle (all but the ends), last, all, or none."""
    setting: Setting
    attack_from: int
    colluding: bool = False
    undefended: str = ""
    """The name of the cell whose run without defence is also this one's; "" for its own."""

    @property
    def name(self) -> str:
        """Unique in all suites."""
        return f"{self.suite}/{self.attack}/{self.direction}/{self.stage_role}"

    @property
    def attacked_stages(self) -> range:
        """Where the attackers sit."""
        last = self.setting.stages - 1
        return {
            "first": range(1),
            "middle": range(1, last),
            "last": range(last, last + 1),
            "all": range(last + 1),
            "none": range(0),
        }[self.stage_role]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A cell with a defence and a seed: one swarm."""

    cell: Cell
    defence: str
    seed: int

    @property
    def key(self) -> str:
        """Unique; names the run in messages."""
        return f"{self.cell.name}/{self.defence}/{self.seed}"

    @property
    def setting(self) -> Setting:
        """The swarm."""
        return self.cell.setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Runs that are one and the same until ``attack_from``: of one setting, defence and seed."""

    setting: Setting
    defence: str
    seed: int
    attack_from: int
    runs: tuple[Run, ...]


GROUP_RUNS = 12
"""Most runs of a group. Fewer spread better over processes, more share their beginning with more others."""


def groups(runs: Sequence[Run], *, most: int = GROUP_RUNS) -> list[Group]:
    """The runs, by what they share, in groups of at most ``most``; a run without attackers goes with any."""
    found: dict[tuple[Setting, str, int, int], list[Run]] = {}
    for run in runs:
        start = run.cell.attack_from if run.cell.drill else run.setting.attack_from
        found.setdefault((run.setting, run.defence, run.seed, start), []).append(run)
    return [
        Group(setting=setting, defence=defence, seed=seed, attack_from=start, runs=tuple(some))
        for (setting, defence, seed, start), all_of_them in found.items()
        for some in _evenly(all_of_them, most)
    ]


def _evenly(runs: Sequence[Run], most: int) -> list[Sequence[Run]]:
    parts = -(-len(runs) // most)
    return [runs[len(runs) * part // parts : len(runs) * (part + 1) // parts] for part in range(parts)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attacker:
    """Who attacks and how."""

    stage: int
    replica: int
    drill: str
    colluding: bool


def attackers(cell: Cell, seed: int) -> list[Attacker]:
    """The attackers of a run: the last replicas of each attacked stage. Draws follow from cell and seed."""
    if not cell.drill:
        return []
    rng = random.Random(f"{cell.name}/{seed}")
    setting = cell.setting
    places = [
        (stage, setting.replicas - 1 - number) for stage in cell.attacked_stages for number in range(setting.attackers)
    ]
    partners = set(rng.sample(places, round(COLLUDING_SHARE * len(places)))) if cell.colluding else set()
    return [
        Attacker(
            stage=stage,
            replica=replica,
            drill=_drawn(rng, cell.direction) if cell.drill == "mixed" else cell.drill,
            colluding=(stage, replica) in partners,
        )
        for stage, replica in places
    ]


def _drawn(rng: random.Random, direction: str) -> str:
    return f"{_PREFIXES[direction]}{rng.choice(PAPER_ATTACKS)}"


def suite_cells(suite: str) -> list[Cell]:
    """The cells of a suite, the attack-free one first. Raises KeyError for an unknown suite."""
    return {"quick": _quick, "paper": _paper, "beyond": _beyond}[suite]()


SUITES = ("quick", "paper", "beyond")


def runs(cells: Sequence[Cell], seeds: int) -> list[Run]:
    """Every run of these cells, seed by seed, so that a run that is cut short has whole seeds."""
    return [
        Run(cell=cell, defence=defence, seed=seed)
        for seed in range(seeds)
        for cell in cells
        for defence in DEFENCES
        if defence != "off" or not cell.undefended
    ]


def selected(cells: Sequence[Cell], pattern: str) -> list[Cell]:
    """The cells whose name meets a shell pattern, and the attack-free one, which the others are compared with."""
    return [cell for cell in cells if not cell.drill or fnmatch.fnmatch(cell.name, pattern)]


def _none(suite: str, setting: Setting) -> Cell:
    return Cell(
        suite=suite,
        attack="none",
        drill="",
        direction="none",
        stage_role="none",
        setting=setting,
        attack_from=0,
    )


def _cell(
    suite: str,
    setting: Setting,
    attack: str,
    direction: str,
    role: str,
    *,
    label: str = "",
    attack_from: int | None = None,
) -> Cell:
    return Cell(
        suite=suite,
        attack=f"{attack}{label}",
        drill=attack if attack == "mixed" else f"{_PREFIXES[direction]}{attack}",
        direction=direction,
        stage_role=role,
        setting=setting,
        attack_from=setting.attack_from if attack_from is None else attack_from,
    )


QUICK = Setting(stages=4, replicas=4, attackers=1, steps=26, attack_from=12, warmup_steps=9, microbatches=12)

PAPER = Setting(stages=16, replicas=8, attackers=3, steps=23, attack_from=15, warmup_steps=12, microbatches=16)
"""The paper's mesh of 128 workers and its 37.5 % of malicious ones; 23 steps instead of 5,000."""

BEYOND = Setting(stages=6, replicas=8, attackers=3, steps=36, attack_from=15, warmup_steps=12, microbatches=16)


def _quick() -> list[Cell]:
    cells = [
        _cell("quick", QUICK, "random", "activation", "middle"),
        _cell("quick", QUICK, "constant", "gradient", "middle"),
        _cell("quick", QUICK, "sign-flip", "activation", "first"),
    ]
    return [_none("quick", QUICK), *cells]


def _paper() -> list[Cell]:
    names = map(str, PAPER_ATTACKS)
    return [
        _none("paper", PAPER),
        *(_cell("paper", PAPER, attack, direction, "middle") for attack in names for direction in DIRECTIONS),
        _cell("paper", PAPER, "mixed", "both", "middle"),
    ]


def _beyond() -> list[Cell]:
    none = _none("beyond", BEYOND)
    ends = [
        # Stage 0 sends no gradient and the last stage no activation.
        _cell("beyond", BEYOND, attack, "activation" if role == "first" else "gradient", role)
        for attack in ("sign-flip", "bias", "random")
        for role in ("first", "last")
    ]
    hidden = [
        _cell("beyond", BEYOND, attack, direction, "middle")
        for attack in ("mimic", "identity", "stale", "drift", "intermittent")
        for direction in ("activation", "both")
    ]
    inject = _cell("beyond", BEYOND, str(Attack.INJECT), "none", "middle")
    # Without a checker nobody listens to accusations, receipts and auditors: these change nothing.
    words = [
        replace(_cell("beyond", BEYOND, str(attack), "none", "middle"), undefended=none.name)
        for attack in CONDUCT_ATTACKS
        if attack is not Attack.INJECT
    ]
    everywhere = _cell("beyond", BEYOND, "random", "both", "all")
    plain = [_cell("beyond", BEYOND, attack, "both", "middle") for attack in ("random", "sign-flip", "mixed")]
    colluding = [
        replace(cell, attack=f"{cell.attack}+collusion", colluding=True, undefended=cell.name) for cell in plain
    ]
    early = [
        _cell("beyond", BEYOND, attack, "both", "middle", label="+early", attack_from=EARLY_STEP)
        for attack in ("random", "sign-flip")
    ]
    return [none, *ends, *hidden, inject, *words, everywhere, *plain, *colluding, *early]
