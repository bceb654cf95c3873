"""What came out of a run under churn: as JSON, as a verdict, and as a table. Pure."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from benchmarks.churning.leaks import MOST_GROWTH
from benchmarks.churning.runs import Options, Outcome
from benchmarks.churning.watch import comparable_steps, mean_loss

MOST_STALL_SECONDS = 30.0
MOST_LOSS_CHANGE = 0.02
"""As a share of the undisturbed loss."""


def build_report(options: Options, outcome: Outcome, undisturbed: dict[int, float]) -> dict[str, Any]:
    """The result as JSON; the fields are those of docs/churn.md."""
    steps = comparable_steps(outcome.losses, undisturbed)
    return {
        "faults": outcome.faults,
        "longest_stall_seconds": round(outcome.longest.seconds, 1),
        "microbatches_lost": outcome.lost,
        "divergences": len(outcome.divergences),
        "honest_ejected": outcome.ejected,
        "loss": mean_loss(outcome.losses, steps),
        "loss_undisturbed": mean_loss(undisturbed, steps),
        "loss_at_step": steps,
        "leaks": asdict(outcome.leaks),
        "steps": outcome.steps,
        "minutes": round(outcome.minutes, 2),
        "seed": options.seed,
        "stages": options.stages,
        "replicas": options.replicas,
        "problems": outcome.problems,
        "skipped": outcome.skipped,
        "happened": outcome.happened,
        "microbatches_retried": outcome.retried,
        "digests_compared": outcome.compared,
        "divergent": [asdict(divergence) for divergence in outcome.divergences],
        "longest_stall": asdict(outcome.longest),
        "stalls": outcome.stalls,
        "arrivals": outcome.arrivals,
        "events": [asdict(event) for event in outcome.notable],
        "losses": sorted(outcome.losses.items()),
        "losses_undisturbed": sorted(undisturbed.items()),
    }


def loss_change(report: dict[str, Any]) -> float | None:
    """The loss under churn against the undisturbed one, as a share of that; None if one is not known."""
    loss, base = report["loss"], report["loss_undisturbed"]
    return None if loss is None or base is None else loss / base - 1


def failures(report: dict[str, Any]) -> list[str]:
    """Which criteria are not met, as sentences; empty if all are."""
    found = []
    if report["longest_stall_seconds"] > MOST_STALL_SECONDS:
        stall = report["longest_stall"]
        where = f"from {stall['began']:.0f} s on, at step {stall['step']}"
        found.append(f"no new step for {stall['seconds']:.0f} s, {where}")
    if report["microbatches_lost"]:
        found.append(f"{report['microbatches_lost']} microbatches were lost")
    if report["divergences"]:
        found.append(f"siblings differ in {report['divergences']} pairs of replica and step")
    if not report["digests_compared"]:
        found.append("no two siblings could be compared")
    change = loss_change(report)
    if change is None:
        found.append("the losses could not be compared")
    elif abs(change) > MOST_LOSS_CHANGE:
        found.append(f"the loss is {100 * change:+.1f} % off the undisturbed one")
    if report["honest_ejected"]:
        found.append(f"honest nodes were ejected: {', '.join(report['honest_ejected'])}")
    found += _leaks(report["leaks"])
    if report["problems"]:
        found.append(f"{len(report['problems'])} problems with single nodes, listed above")
    return found


def _leaks(leaks: dict[str, Any]) -> list[str]:
    found = [
        f"{what} left: {', '.join(leaks[key])}"
        for key, what in (("processes", "processes"), ("folders", "socket folders"), ("claims", "claims of the dead"))
        if leaks[key]
    ]
    grown = {name: more for name, more in leaks["open_files"].items() if more > MOST_GROWTH}
    if grown:
        found.append(f"open files grew: {', '.join(f'{name} by {more}' for name, more in sorted(grown.items()))}")
    return found


def table(report: dict[str, Any], found: list[str]) -> str:
    """The result for a person."""
    change = loss_change(report)
    growth = report["leaks"]["open_files"].values()
    faults = ", ".join(f"{count} {kind}" for kind, count in report["faults"].items() if count) or "none"
    rows = [
        ("steps", f"{report['steps']} in {report['minutes']:.1f} minutes"),
        ("faults", faults),
        ("longest stall", f"{report['longest_stall_seconds']:.1f} s (at most {MOST_STALL_SECONDS:.0f} s)"),
        ("microbatches lost", f"{report['microbatches_lost']} ({report['microbatches_retried']} retried)"),
        ("divergences", f"{report['divergences']} of {report['digests_compared']} pairs of siblings and step"),
        ("honest ejected", ", ".join(report["honest_ejected"]) or "none"),
        (
            "loss",
            "not known"
            if change is None
            else f"{report['loss']:.4f}, undisturbed {report['loss_undisturbed']:.4f} ({100 * change:+.2f} %), "
            f"at step {report['loss_at_step']}",
        ),
        ("leaks", "; ".join(_leaks(report["leaks"])) or f"none (open files: {max(growth, default=0):+d} at most)"),
        ("problems", str(len(report["problems"]))),
        ("left out", f"{len(report['skipped'])} faults"),
    ]
    lines = ["", *(f"{name:<18} {text}" for name, text in rows)]
    lines += [f"NOT AS IT SHOULD BE: {failure}." for failure in found] or ["All as it should be."]
    return "\n".join(lines)
