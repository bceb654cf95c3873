"""Make the virtual environment and install the project with its pinned dependencies into it.

Runs on a bare Python 3.11, before anything is installed, so it uses the standard library alone.
pip's many lines become a few; when pip fails, the end of what it said is shown.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PROGRESS_EVERY = 25
LINES_SHOWN_ON_FAILURE = 25


def main() -> int:
    """Install; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--venv", type=Path, required=True, help="folder of the virtual environment")
    parser.add_argument("--extras", default="test,lint", help="extras of the project, by commas")
    options = parser.parse_args()
    python = options.venv / "bin" / "python"
    # pip comes last when an environment is made, so one without it was interrupted.
    ready = python.exists() and (options.venv / "bin" / "pip").exists()
    if not ready and not make_venv(options.venv):
        return 1
    return pip_install(python, options.extras)


def make_venv(folder: Path) -> bool:
    """Create the virtual environment; say what is missing if that fails."""
    say(f"creating {folder} with Python {sys.version.split()[0]}")
    made = subprocess.run([sys.executable, "-m", "venv", str(folder)], capture_output=True, text=True, check=False)
    if made.returncode:
        lines = (made.stdout + made.stderr).strip().splitlines()
        print("\n".join(lines[-LINES_SHOWN_ON_FAILURE:]), file=sys.stderr)
        say("the virtual environment could not be made; does this Python have its venv module?")
        return False
    return True


def pip_install(python: Path, extras: str) -> int:
    """Run pip, telling how far it is."""
    started = time.monotonic()
    say("installing the dependencies; the first time takes some minutes, most of them for torch")
    command = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off"]
    command += ["-e", f".[{extras}]", "-c", "constraints.txt"]
    tail: deque[str] = deque(maxlen=LINES_SHOWN_ON_FAILURE)
    collected = 0
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        for line in pip.stdout:
            tail.append(line.rstrip())
            if line.startswith("Collecting "):
                collected += 1
                if collected % PROGRESS_EVERY == 0:
                    say(f"{collected} packages found ({time.monotonic() - started:.0f} s)")
            elif line.startswith("Installing collected packages"):
                say(f"unpacking ({time.monotonic() - started:.0f} s)")
    if pip.returncode:
        print("\n".join(tail), file=sys.stderr)
        say(f"pip failed with exit code {pip.returncode}; what it said stands above")
        return 1
    say(f"installed in {time.monotonic() - started:.0f} s")
    return 0


def say(text: str) -> None:
    """One short line, at once."""
    print(f"install: {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        say("stopped; run it again to go on")
        sys.exit(130)
