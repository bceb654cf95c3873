"""What came out of a demo: collected from the nodes' own last words, judged, and told."""

from __future__ import annotations

from typing import Any

from node.demo_processes import Child
from protocol.manifest import Manifest

EJECTED_EXIT_CODE = 3
EDGE_LOSSES = 5
"""The loss has fallen if the mean of the last five is below that of the first five."""


def build_report(
    manifest: Manifest,
    children: list[Child],
    *,
    seconds: float,
    first_step_seconds: float | None,
) -> dict[str, Any]:
    """The result as JSON; the fields are those of docs/demo.md."""
    workers = [child for child in children if child.stage is not None]
    summaries = {child.name: child.summary() for child in workers}
    honest = [child for child in workers if not child.attack]
    losses = _losses([summaries[child.name] for child in honest])
    events = [event for child in honest for event in summaries[child.name].get("events", [])]
    training_seconds = _training_seconds([summaries[child.name] for child in honest])
    tokens = len(losses) * manifest.training.sequences_per_step * manifest.model.context
    return {
        "swarm": manifest.swarm_id,
        "steps": len(losses),
        "stages": manifest.num_stages,
        "nodes": [_node(child, summaries[child.name]) for child in workers],
        "loss": losses,
        "tokens_per_second": tokens / training_seconds if training_seconds else 0.0,
        "adversaries": [_adversary(child, summaries[child.name], events) for child in workers if child.attack],
        "honest_ejected": [
            child.peer
            for child in honest
            if child.process.returncode == EJECTED_EXIT_CODE or _first(events, child.peer, "ejected") is not None
        ],
        "microbatches_retried": sum(summary.get("microbatches_retried", 0) for summary in summaries.values()),
        "microbatches_lost": max((summaries[child.name].get("microbatches_lost", 0) for child in honest), default=0),
        "first_step_seconds": first_step_seconds,
        "seconds": seconds,
    }


def _node(child: Child, summary: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": child.name,
        "peer": child.peer,
        "stage": child.stage,
        "attack": child.attack,
        "exit_code": child.process.returncode,
        "microbatches": summary.get("contribution", {}).get("microbatches", 0),
        "peak_memory_bytes": summary.get("peak_memory_bytes", 0),
        "parameters_digest": summary.get("parameters_digest", ""),
    }


def _losses(summaries: list[dict[str, Any]]) -> list[float]:
    """One loss a step, as the node that saw most of them reports it."""
    best: list[list[float]] = max((summary.get("losses", []) for summary in summaries), key=len, default=[])
    return [loss for _, loss in best]


def _training_seconds(summaries: list[dict[str, Any]]) -> float:
    rates = [summary.get("steps_per_second", 0.0) for summary in summaries]
    steps = max((summary.get("contribution", {}).get("steps", 0) for summary in summaries), default=0)
    best = max(rates, default=0.0)
    return steps / best if best else 0.0


def _adversary(child: Child, summary: dict[str, Any], events: list[dict[str, Any]]) -> dict[str, Any]:
    drill = summary.get("drill") or {}
    return {
        "peer": child.peer,
        "stage": child.stage,
        "attack": child.attack,
        "first_attack_step": drill.get("first_attack_step"),
        "quarantined_step": _first(events, child.peer, "quarantined", "ejected"),
        "ejected_step": _first(events, child.peer, "ejected"),
        "exit_code": child.process.returncode,
    }


def _first(events: list[dict[str, Any]], peer: str, *kinds: str) -> int | None:
    steps = [event["step"] for event in events if event["peer"] == peer and event["kind"] in kinds]
    return min(steps, default=None)


def verdict(report: dict[str, Any], *, steps: int) -> list[str]:
    """What a demo should have shown and did not, as sentences; empty if all is well."""
    failures = []
    losses = report["loss"]
    if report["steps"] != steps:
        failures.append(f"{report['steps']} of {steps} steps were trained")
    edge = min(EDGE_LOSSES, max(1, len(losses) // 2))
    if len(losses) > 1 and not sum(losses[-edge:]) < sum(losses[:edge]):
        failures.append("the loss did not fall")
    for adversary in report["adversaries"]:
        if adversary["ejected_step"] is None:
            failures.append(f"the attacker in stage {adversary['stage']} ({adversary['attack']}) was not ejected")
    if report["honest_ejected"]:
        failures.append(f"{len(report['honest_ejected'])} honest node(s) were ejected")
    if report["microbatches_lost"]:
        failures.append(f"{report['microbatches_lost']} microbatches were lost")
    return failures


def summary_text(report: dict[str, Any], failures: list[str]) -> str:
    """The end of the demo for a person."""
    losses = report["loss"]
    lines = [""]
    if losses:
        lines.append(
            f"Trained {report['steps']} steps over {report['stages']} stages and {len(report['nodes'])} nodes: "
            f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {report['tokens_per_second']:.0f} tokens/s."
        )
    for adversary in report["adversaries"]:
        lines.append(_adversary_text(adversary))
    honest = [node for node in report["nodes"] if not node["attack"]]
    lines.append(
        f"{len(honest)} honest nodes, {len(report['honest_ejected'])} of them ejected; "
        f"{report['microbatches_retried']} microbatches retried on another path, "
        f"{report['microbatches_lost']} lost."
    )
    peak = max((node["peak_memory_bytes"] for node in report["nodes"]), default=0)
    lines.append(f"Largest node: {peak / 2**20:.0f} MiB. The whole demo took {report['seconds']:.0f} s.")
    lines += [f"NOT AS IT SHOULD BE: {failure}." for failure in failures]
    if not failures:
        lines.append("All as it should be.")
    return "\n".join(lines)


def _adversary_text(adversary: dict[str, Any]) -> str:
    text = f"Attacker in stage {adversary['stage']} ({adversary['attack']})"
    if adversary["first_attack_step"] is None:
        return f"{text} never attacked."
    text += f": attacked from step {adversary['first_attack_step']}"
    if adversary["quarantined_step"] not in (None, adversary["ejected_step"]):
        text += f", quarantined by a neighbour in step {adversary['quarantined_step']}"
    if adversary["ejected_step"] is None:
        return f"{text}, NOT ejected."
    return f"{text}, ejected by the swarm in step {adversary['ejected_step']}."
