"""Fuzz the decoders for long: ``python -m tests.fuzz.run [TARGET ...] --executions N --json FILE``.

With atheris (``pip install atheris``) inputs are guided by what code they reach; without it they are drawn from the
seeds by ``tests.fuzz.mutate`` alone. Each target runs in a process of its own with 2 GiB of memory at most, and one
input may take ten seconds. A finding is written to ``--findings`` (``fuzz-findings`` where nothing is said), and ends
its target; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import logging
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.mutate import MAX_BYTES, mutated
from tests.fuzz.targets import TARGETS

MEMORY_BYTES = 2 << 30
SECONDS_PER_INPUT = 10
MAX_POOL = 200
"""Inputs that were taken, and so are changed further."""


BLIND = "from tests.fuzz.run import child; child(guided=False)"
GUIDED = """
import atheris
with atheris.instrument_imports(include=["node", "protocol", "verifier"]):
    import tests.fuzz.targets
from tests.fuzz.run import child
child(guided=True)
"""
"""The code of the libraries is not watched: what it does would hide what ours does."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the targets one after another; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.run", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}; all if none is named")
    parser.add_argument("--executions", type=int, default=100_000, help="of each target (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the results to this file")
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"), help="a folder (default: %(default)s)")
    parser.add_argument("--blind", action="store_true", help="without atheris, even if it is there")
    options = parser.parse_args(arguments)
    if unknown := [name for name in options.targets if name not in TARGETS]:
        parser.error(f"no target is called {unknown[0]}; there are {', '.join(TARGETS)}")
    if options.executions < 1:
        parser.error("--executions is at least 1")
    guided = not options.blind and importlib.util.find_spec("atheris") is not None
    results = []
    for name in options.targets or TARGETS:
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="fuzz-") as corpus:
            command = [sys.executable, "-c", GUIDED if guided else BLIND]
            command += [name, str(options.executions), str(options.seed), str(options.findings), corpus]
            code = subprocess.run(command, check=False).returncode
        seconds = time.monotonic() - began
        results.append(
            {"target": name, "executions": options.executions, "finding": code != 0, "guided": guided}
            | {"seconds": round(seconds, 1)}
        )
        print(f"{name:14} {options.executions:>9} executions  {'FINDING' if code else 'no finding'}  {seconds:6.1f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    return int(any(result["finding"] for result in results))


def child(*, guided: bool) -> None:
    """One target, in this process; ends it."""
    name, executions, seed, findings, corpus = sys.argv[1:6]
    logging.disable()  # what is refused is no news here
    if guided:
        _guided(name, int(executions), int(seed), Path(findings), Path(corpus))
    else:
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        sys.exit(blind(name, int(executions), int(seed), Path(findings)))


def blind(name: str, executions: int, seed: int, findings: Path) -> int:
    """Change valid inputs so many times; returns the exit code."""
    signal.signal(signal.SIGALRM, _too_slow)
    target = TARGETS[name]
    rng = random.Random(f"{name} {seed}")
    pool = list(target.seeds())
    first = len(pool)
    for _ in range(executions):
        data = mutated(rng.choice(pool), rng)
        signal.alarm(SECONDS_PER_INPUT)
        try:
            taken = target.try_out(data)
        except Exception:  # whatever a decoder did not promise
            _keep(findings, name, data)
            return 1
        finally:
            signal.alarm(0)
        if taken and len(data) <= MAX_BYTES:
            if len(pool) < MAX_POOL:
                pool.append(data)
            elif rng.random() < 0.01:
                pool[rng.randrange(first, MAX_POOL)] = data
    return 0


def _too_slow(number: int, frame: object) -> None:
    raise TimeoutError(f"one input took {SECONDS_PER_INPUT} s")


def _keep(findings: Path, name: str, data: bytes) -> None:
    findings.mkdir(parents=True, exist_ok=True)
    path = findings / f"{name}-{hashlib.sha256(data).hexdigest()[:16]}"
    path.write_bytes(data)
    traceback.print_exc()
    print(f"the input is in {path}", file=sys.stderr)


def _guided(name: str, executions: int, seed: int, findings: Path, corpus: Path) -> None:
    import atheris

    target = TARGETS[name]
    findings.mkdir(parents=True, exist_ok=True)
    for index, data in enumerate(target.seeds()):
        (corpus / str(index)).write_bytes(data)
    options = {
        "runs": executions,
        "seed": seed + 1,
        "timeout": SECONDS_PER_INPUT,
        "rss_limit_mb": MEMORY_BYTES >> 20,
        "max_len": MAX_BYTES,
        "artifact_prefix": f"{findings}/{name}-",
        "verbosity": 0,
    }
    flags = [f"-{option}={value}" for option, value in options.items()]
    atheris.Setup([name, *flags, str(corpus)], target.attempt)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
