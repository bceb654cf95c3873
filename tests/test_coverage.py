"""The checker decides about people's machines: its tests take every branch of it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
RUNNING = "SENTINEL_MEASURING_COVERAGE"
"""Set in the run that is measured, so that it can never start another."""


@pytest.mark.skipif(RUNNING in os.environ, reason="this run is the one that is measured")
@pytest.mark.timeout(600)  # half a minute on an idle core
def test_the_tests_of_the_checker_take_every_branch(tmp_path: Path) -> None:
    environment = os.environ | {RUNNING: "1", "COVERAGE_FILE": str(tmp_path / "coverage")}

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "coverage", *words],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )

    # The profile draws the same examples every time, so what is covered is no matter of luck.
    pytest_words = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "--hypothesis-profile=ci", "tests/verifier")
    tested = run("run", "--branch", "--source=verifier", *pytest_words)
    assert tested.returncode == 0, tested.stdout[-3000:]
    report = run("report", "--show-missing", "--skip-covered", "--fail-under=100")
    assert report.returncode == 0, f"not tested (line, or line->line that is never taken):\n{report.stdout}"
