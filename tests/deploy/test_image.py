"""The image for real: built, and a swarm run from it. `make image-test`; some ten minutes on two cores."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "deploy" / "build-test.sh"
MISSING = 69
"""What the script ends with where something has to be installed first."""
SECONDS = 3000


def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the script to its end."""
    return subprocess.run(
        [str(SCRIPT), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **variables},
        timeout=SECONDS,
        check=False,
    )


@pytest.mark.slow
@pytest.mark.image
@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.skipif(os.geteuid() != 0, reason="a root file system can be made only by root")
def test_an_image_is_built_and_a_swarm_runs_from_it(tmp_path: Path) -> None:
    done = run(TMPDIR=str(tmp_path))
    print(done.stdout)
    if done.returncode == MISSING:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout
    assert done.stdout.endswith("build-test: passed\n")
    assert list(tmp_path.iterdir()) == []
    mounts = Path("/proc/mounts").read_text(encoding="utf-8")
    assert str(tmp_path) not in mounts


@pytest.mark.skipif(os.geteuid() != 0, reason="the script asks for root first")
def test_the_script_names_the_packages_that_are_missing(tmp_path: Path) -> None:
    for name in ("bash", "dirname"):
        program = shutil.which(name)
        assert program
        (tmp_path / name).symlink_to(program)
    done = run(PATH=str(tmp_path))
    assert done.returncode == MISSING
    assert done.stdout == (
        "build-test: needs the Debian packages buildah debootstrap: install them, or pass --install\n"
    )


def test_the_script_knows_its_options() -> None:
    assert run("--help").stdout.startswith("Build the image for real and try it out")
    wrong = run("--bogus")
    assert (wrong.returncode, wrong.stdout) == (2, "build-test: unknown option --bogus; --help lists them\n")
