"""Rows as tables: for the terminal and for docs/arena.md. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.arena.cells import BEYOND, COLLUDING_SHARE, DEFENCES, PAPER, QUICK, Setting, runs, suite_cells
from benchmarks.arena.score import Row, mean_of

SUITE_TITLES = {
    "paper": "The paper's attacks in the paper's mesh",
    "beyond": "Beyond the paper: the ends, attacks that mimic, conduct, collusion, and no honest warm-up",
    "quick": "Quick",
}

SETTINGS = {"quick": QUICK, "paper": PAPER, "beyond": BEYOND}

DEFENCE_WORDS = {
    "off": "no checker",
    "sentinel": "statistics, flags, and the votes of neighbours; no audits",
    "all": "the same, and audits: work is computed again by siblings",
}

PAPER_F1: Mapping[str, tuple[str, str]] = {
    "constant": ("100.0 %", "second-hand"),
    "random": ("100.0 %", "second-hand"),
    "sign-flip": ("100.0 %, as scaling by -1; some gradient flips have recall 0", "second-hand"),
    "noise": ("100.0 %, elsewhere at least 85.7 %", "second-hand"),
    "delay": ("94.1 %", "second-hand"),
    "mixed": ("87.8 %", "second-hand"),
    "random-sign": ("some gradient cells have recall 0", "second-hand"),
    "bias": ("missed in some cells on a larger model", "second-hand"),
}
"""What summaries and reviews report of the paper's tables; the tables themselves have not been seen."""


def line(row: Row) -> str:
    """One run, for whoever watches."""
    died = f", {len(row['died'])} nodes DIED" if row["died"] else ""
    return (
        f"{row['cell']:<44} {row['defence']:<9} seed {row['seed']}: recall {_share(row['recall'])}, "
        f"precision {_share(row['precision'])}, loss {_number(row['loss'])}, {row['seconds']:.0f} s{died}"
    )


def averaged(rows: Sequence[Row]) -> list[Row]:
    """One row for each cell and defence, in order of appearance: means over the seeds, and the least recall."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["cell"], row["defence"]), []).append(row)
    return [_average(group) for group in groups.values()]


def _average(group: Sequence[Row]) -> Row:
    names = [
        *(
            "precision",
            "recall",
            "f1",
            "f1_ejected",
            "f1_isolated",
            "recall_ejected",
            "steps_to_quarantine",
            "steps_to_ejection",
        ),
        *("attacked_microbatches_to_quarantine", "attacked_microbatches_to_ejection", "honest_refused_share"),
        *("loss", "loss_attack_free", "loss_undefended", "extra_compute_share", "extra_traffic_share"),
        *("check_share", "seconds"),
    ]
    first = group[0]
    same = {name: first[name] for name in ("suite", "cell", "attack", "direction", "stage_role", "defence")}
    return {
        **same,
        **{name: mean_of([row.get(name) for row in group]) for name in names},
        "min_recall": min(row["recall"] for row in group),
        "seeds": len(group),
        "honest_ejected": sum(row["honest_ejected"] for row in group),
        "honest_detected": sum(row["honest_detected"] for row in group),
        "died": sum(len(row["died"]) for row in group),
    }


HEADINGS = (
    *("attack", "on", "stages", "defence", "F1", "recall (least)", "precision", "F1, ejected only", "F1, one side"),
    *("steps to quarantine / ejection", "honest detected", "loss", "undefended", "attack-free"),
)


def _cells(row: Row) -> list[str]:
    """The columns of a row, in order of the headings."""
    free = row["attack"] == "none"
    steps = f"{_number(row['steps_to_quarantine'], 1)} / {_number(row['steps_to_ejection'], 1)}"
    died = f"{row['honest_detected']}" + (f" ({row['died']} died)" if row["died"] else "")
    return [
        *(row["attack"], row["direction"], row["stage_role"], row["defence"]),
        "-" if free else _share(row["f1"]),
        "-" if free else f"{_share(row['recall'])} ({_share(row['min_recall'])})",
        _share(row["precision"]),
        "-" if free else _share(row["f1_ejected"]),
        "-" if free else _share(row["f1_isolated"]),
        "-" if free else steps,
        died,
        *(_number(row["loss"]), _number(row["loss_undefended"]), _number(row["loss_attack_free"])),
    ]


def table(rows: Sequence[Row]) -> str:
    """For the terminal, in columns."""
    lines = [list(HEADINGS), *(_cells(row) for row in averaged(rows))]
    widths = [max(len(line[column]) for line in lines) for column in range(len(HEADINGS))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) for line in lines)


def markdown(rows: Sequence[Row], failures: Sequence[Mapping[str, str]], about: Mapping[str, Any]) -> str:
    """All of docs/arena.md."""
    means = averaged(rows)
    suites = [suite for suite in SUITE_TITLES if any(row["suite"] == suite for row in means)]
    parts = [_introduction(suites, about)]
    for suite in suites:
        of_suite = [row for row in means if row["suite"] == suite]
        parts += [f"## {SUITE_TITLES[suite]}", _setting(suite, of_suite), _markdown_table(HEADINGS, of_suite)]
        here, all_of_it = len(of_suite), len(runs(suite_cells(suite), 1))
        if here < all_of_it:
            parts.append(f"{here} of the suite's {all_of_it} rows are in this table; the others have not been run.")
        if suite == "paper":
            parts += ["### Beside the paper", _beside_paper(of_suite)]
        parts += ["### What it cost", _cost(of_suite)]
    parts += ["## What went wrong", _trouble(rows, failures)]
    return "\n\n".join(parts) + "\n"


def _introduction(suites: Sequence[str], about: Mapping[str, Any]) -> str:
    commands = "\n".join(
        f"python -m benchmarks.arena --suite {suite} --json arena-{suite}.json --docs docs/arena.md" for suite in suites
    )
    defences = "\n".join(f"- **{name}**: {DEFENCE_WORDS[name]}." for name in DEFENCES)
    return f"""# The arena

Whole swarms with many attackers. Every node runs the code of a real one; only the wire is replaced by memory, and
all nodes of a swarm share one process. This page is written by the command:

```sh
{commands}
```

`--seeds N` repeats each cell, `--cells PATTERN` picks some, `--resume` goes on after an interruption. Made with Python
{about.get("python", "?")} on {about.get("cpus", "?")} CPUs ({about.get("machine", "?")}).

{defences}

A node counts as **detected** if the swarm has ejected it, or if a strict majority of the live nodes of its neighbouring
stages bar it at the end. Precision, recall and F1 are of nodes, not of messages; where nobody is detected precision is
100 %. **One side** also counts those that a majority of one neighbouring stage bars: only the stage before an attacker
sees its gradients. Steps are counted from an attacker's first falsified tensor to the first honest node that bars it,
or sees it ejected. **loss** is the mean training loss of the last five steps; beside it stands that of the same attack
without defence, and that of the swarm without attackers."""


def _setting(suite: str, rows: Sequence[Row]) -> str:
    setting: Setting = SETTINGS[suite]
    seeds = max(int(row["seeds"]) for row in rows)
    share = 100 * setting.attackers / setting.replicas
    text = (
        f"{setting.stages} stages x {setting.replicas} replicas = {setting.stages * setting.replicas} nodes, one "
        f"layer a stage, width {setting.width}, context {setting.context}, {setting.microbatches} microbatches of "
        f"{setting.sequences_per_microbatch} sequences a step, {setting.steps} steps, on Python's own sources. "
        f"{setting.attackers} of {setting.replicas} replicas ({share:.1f} %) of each attacked stage attack from step "
        f"{setting.attack_from} on; the checker warms up for {setting.warmup_steps} steps. Seeds: {seeds}."
    )
    if suite == "beyond":
        text += (
            f" `+collusion`: {100 * COLLUDING_SHARE:.0f} % of the attackers spare each other as judges and auditors."
            " `+early`: they attack from step 2 on, while the checker still learns."
        )
    return text


def _markdown_table(headings: Sequence[str], rows: Sequence[Row]) -> str:
    return _rows_of(headings, [_cells(row) for row in rows])


def _rows_of(headings: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(headings)
    return "\n".join(f"| {' | '.join(line)} |" for line in (headings, rule, *lines))


def _beside_paper(rows: Sequence[Row]) -> str:
    lines = []
    for attack, (theirs, trust) in PAPER_F1.items():
        for defence in ("sentinel", "all"):
            ours = [row for row in rows if row["attack"] == attack and row["defence"] == defence]
            if ours:
                by_direction = ", ".join(f"{row['direction']} {_share(row['f1'])}" for row in ours)
                lines.append([attack, theirs, trust, defence, by_direction])
    note = (
        "The paper's own tables were not seen: its numbers are taken from summaries and reviews of it, hence "
        "second-hand. Its runs are of 5,000 steps with 1,000 of warm-up, on a model of 0.6 billion parameters, and its "
        "verifiers are trusted machines; here the nodes check each other."
    )
    return note + "\n\n" + _rows_of(("attack", "paper, F1", "source", "defence", "ours, F1"), lines)


def _cost(rows: Sequence[Row]) -> str:
    lines = []
    for defence in DEFENCES:
        ours = [row for row in rows if row["defence"] == defence]
        if ours:
            lines.append(
                [
                    defence,
                    _share(mean_of([row["check_share"] for row in ours])),
                    _share(mean_of([row["extra_compute_share"] for row in ours])),
                    _share(mean_of([row["extra_traffic_share"] for row in ours])),
                    _share(mean_of([row["honest_refused_share"] for row in ours]), 3),
                    _number(mean_of([row["seconds"] for row in ours]), 0),
                ]
            )
    note = (
        "Checks and audits as shares of the time of forward and backward: with so narrow a model checks weigh far "
        "more than in a real one, where they grow with the width and the computation with its square. Traffic "
        "beyond that of the attack-free swarm without checker; it falls where attackers are expelled."
    )
    headings = ("defence", "checks", "audits", "traffic", "honest tensors refused", "seconds a swarm")
    return note + "\n\n" + _rows_of(headings, lines)


def _trouble(rows: Sequence[Row], failures: Sequence[Mapping[str, str]]) -> str:
    died = [
        f"- {row['cell']} ({row['defence']}, seed {row['seed']}): {entry['node']}"
        f"{' (attacker)' if entry['attacker'] else ''} ended with `{entry['error'][:200]}`"
        for row in rows
        for entry in row["died"]
    ]
    failed = [
        f"- {failure['key']} was not run to its end: `{failure['error'].splitlines()[0]}`" for failure in failures
    ]
    return (
        "\n".join([*died, *failed]) or "Nothing: every swarm ran to its end, and no node ended by an unexpected error."
    )


def _share(value: float | None, digits: int = 1) -> str:
    return "-" if value is None else f"{100 * value:.{digits}f} %"


def _number(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
