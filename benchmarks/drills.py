"""Every attack of the drill against one replica of the middle stage of 3 x 3, on activations and on gradients.

``python -m benchmarks.drills [--json FILE] [ATTACK ...]`` prints a row per attack. The losses of all rows can be
compared: model, data and schedule are the same, and training is exact.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from benchmarks._drills import DrillResult, run_drill
from node.drill_names import TENSOR_ATTACKS, Attack


def all_attacks() -> list[str]:
    """Activations first, then gradients."""
    return [*map(str, Attack), *(f"gradient-{attack}" for attack in Attack if attack in TENSOR_ATTACKS)]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.drills", description=__doc__)
    parser.add_argument("attacks", nargs="*", default=all_attacks(), metavar="ATTACK")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    base = run_drill("")
    results = [base]
    print("attack                 attacked  quarantined (by)  ejected  honest ejected  loss against none")
    print(row(base, base), flush=True)
    for attack in options.attacks:
        results.append(run_drill(attack))
        print(row(results[-1], base), flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps([result.as_dict() for result in results], indent=2) + "\n")


def row(result: DrillResult, base: DrillResult) -> str:
    """One line of the table."""
    change = 100 * (result.loss / base.loss - 1)
    return (
        f"{result.attack:<22} {_step(result.first_attack_step):>8}  {_step(result.quarantined_step):>11} "
        f"({result.quarantined_by})  {_step(result.ejected_step):>9}  {result.honest_ejected:>14}  {change:>+16.2f} %"
    )


def _step(step: int | None) -> str:
    return "-" if step is None else str(step)


if __name__ == "__main__":
    main()
