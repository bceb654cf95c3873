"""From what a swarm showed to numbers. Pure: plain values in, plain values out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

LAST_LOSSES = 5
"""The final loss is the mean over the last five steps: single steps differ by their text."""

Row = dict[str, Any]
"""One run as it stands in the JSON file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFact:
    """How one node fared. Steps and counts are None where it did not happen."""

    attacker: bool
    ejected: bool
    """By the swarm: it ended with the ejection, or most of its live neighbours hold it for ejected."""
    quarantined_by: int
    """Live nodes of the neighbouring stages that bar it at the end."""
    neighbours: int
    """Live nodes of the neighbouring stages at the end."""
    barred_on_one_side: bool = False
    """Whether a strict majority of the live nodes of one neighbouring stage bar it at the end. Only the stage before
    sees its gradients, so this is all that a false gradient alone can lead to."""
    first_attack_step: int | None = None
    quarantined_step: int | None = None
    """When the first honest node barred it."""
    ejected_step: int | None = None
    attacked_at_quarantine: int | None = None
    """Falsified tensors (or receipts, votes, accusations) until then."""
    attacked_at_ejection: int | None = None

    @property
    def detected(self) -> bool:
        """Ejected, or barred by a strict majority of its live neighbours."""
        return self.ejected or 2 * self.quarantined_by > self.neighbours > 0

    @property
    def isolated(self) -> bool:
        """Detected, or cut off from one neighbouring stage."""
        return self.detected or self.barred_on_one_side


@dataclass(frozen=True, slots=True, kw_only=True)
class Detection:
    """Of nodes, not of messages; shares in [0, 1]."""

    precision: float
    recall: float
    f1: float


def detection(nodes: Sequence[NodeFact], *, found: Callable[[NodeFact], bool]) -> Detection:
    """How well ``found`` tells attackers from honest nodes.

    Where nobody is found precision is 1, and where nobody attacks recall is 1: neither made a mistake.
    """
    true = sum(node.attacker and found(node) for node in nodes)
    false = sum(not node.attacker and found(node) for node in nodes)
    attackers = sum(node.attacker for node in nodes)
    precision = true / (true + false) if true + false else 1.0
    recall = true / attackers if attackers else 1.0
    f1 = 2 * precision * recall / (precision + recall) if precision + recall else 0.0
    return Detection(precision=precision, recall=recall, f1=f1)


def mean_delay(nodes: Sequence[NodeFact], when: Callable[[NodeFact], int | None]) -> float | None:
    """Steps from an attacker's first attack until ``when``, averaged over those to which it happened."""
    delays = [
        step - node.first_attack_step
        for node in nodes
        if node.attacker and node.first_attack_step is not None and (step := when(node)) is not None
    ]
    return statistics.fmean(delays) if delays else None


def mean_of(values: Sequence[float | None]) -> float | None:
    """The mean of those that are there; None if none is."""
    present = [value for value in values if value is not None]
    return statistics.fmean(present) if present else None


def agreed_losses(told: Sequence[Sequence[tuple[int, float]]]) -> list[float]:
    """The loss of each step, in order: the median of what honest nodes noted, each as (step, loss)."""
    by_step: dict[int, list[float]] = {}
    for losses in told:
        for step, loss in losses:
            by_step.setdefault(step, []).append(loss)
    return [statistics.median(by_step[step]) for step in sorted(by_step)]


def final_loss(losses: Sequence[float]) -> float | None:
    """Mean of the last steps' losses; None if there are none."""
    return statistics.fmean(losses[-LAST_LOSSES:]) if losses else None


def joined(rows: Sequence[Row], undefended: Mapping[str, str]) -> list[Row]:
    """The rows with what follows from other rows of the same suite and seed.

    ``loss_attack_free`` is that of the attack-free swarm without defence, ``loss_undefended`` that of the same attack
    without defence, and ``extra_traffic_share`` the bytes sent beyond the attack-free swarm without defence.
    ``undefended`` names the cell whose run without defence counts, for cells that have none of their own.
    """
    known = {(row["cell"], row["defence"], row["seed"]): row for row in rows}
    out: list[Row] = []
    for row in rows:
        free = known.get((f"{row['suite']}/none/none/none", "off", row["seed"]), {})
        bare = known.get((undefended.get(row["cell"]) or row["cell"], "off", row["seed"]), {})
        sent, usual = row.get("bytes_out"), free.get("bytes_out")
        out.append(
            {
                **row,
                "loss_attack_free": free.get("loss"),
                "loss_undefended": bare.get("loss"),
                "extra_traffic_share": sent / usual - 1.0 if sent and usual else None,
            }
        )
    return out
