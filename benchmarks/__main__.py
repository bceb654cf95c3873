"""Runs the benchmarks: ``python -m benchmarks [NAME ...]``, one JSON line each.

Those that take minutes are programs of their own: ``python -m benchmarks.drills``, ``.honest``, ``.cost``,
``.settings``, ``.churn``, ``.joining`` and ``.arena``.
"""

from __future__ import annotations

import importlib
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

PROGRAMS = {"churn", "cost", "drills", "honest", "joining", "settings"}
"""Modules with a ``main`` instead of a ``run``."""


def main(names: Sequence[str]) -> int:
    """Run the named benchmarks, or all; return the exit code."""
    folder = Path(__file__).parent
    known = sorted({path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")} - PROGRAMS)
    if unknown := sorted(set(names) - set(known)):
        print(f"benchmarks: there is no {', '.join(unknown)}; there are {', '.join(known)}", file=sys.stderr)
        return 2
    torch.set_num_threads(1)
    where = {"machine": platform.machine(), "python": platform.python_version(), "torch": torch.__version__}
    for name in names or known:
        numbers = importlib.import_module(f"benchmarks.{name}").run()
        print(json.dumps({"benchmark": name, **where, **numbers}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
