"""What the Dockerfile runs in its build stage, with the Python of the virtual environment that the image gets.

``dependencies`` installs what the project needs at its pinned versions, ``project`` the project itself, and ``trim``
removes what a node never reads. Standard library alone, since nothing else is there yet.
"""

from __future__ import annotations

import argparse
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))

NOT_NEEDED = (
    # Headers and build files of torch and pyarrow, for those who compile against them.
    *("torch/include", "torch/share", "pyarrow/include", "pyarrow/src", "numpy/_core/include"),
    # Tests that packages ship within themselves.
    *("torch/test", "torch/bin/*[tT]est*", "torch/bin/protoc*", "pyarrow/tests", "numpy/**/tests", "sympy/**/tests"),
    *("networkx/**/tests", "Crypto/SelfTest"),
    # What links against the libraries, not what they are.
    *("torch/lib/*.a", "pyarrow/*.pxd", "pyarrow/**/*.pyx"),
    # Data is read from local parquet files; no Arrow servers and no buckets.
    *("pyarrow/*flight*", "pyarrow/*s3*"),
    # hivemind asks for SciPy for its averager, which a node never imports (docs/decisions/0011). build-test.sh imports
    # every module of the project in the image and reads a parquet file.
    *("scipy", "scipy.libs", "scipy-*.dist-info"),
    # The image is replaced, not changed.
    *("pip", "pip-*.dist-info", "setuptools", "setuptools-*.dist-info", "_distutils_hack", "distutils-precedence.pth"),
)
"""Below site-packages."""


def main() -> int:
    """Do one step; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("step", choices=["dependencies", "project", "trim"])
    parser.add_argument("--torch", choices=["auto", "cpu", "cuda"], default="auto")
    options = parser.parse_args()
    if options.step == "dependencies":
        return install_dependencies(options.torch)
    if options.step == "project":
        return pip("--no-deps", ".")
    trim()
    return 0


def install_dependencies(torch: str) -> int:
    """Install the project's dependencies, before the project, so that a change of code leaves their layer as it is."""
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = Path("constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = Path("image-constraints.txt")
    constraints.write_text("\n".join(torch_pin(pin, torch) for pin in pins) + "\n", encoding="utf-8")
    if code := pip("-c", str(constraints), *project["dependencies"]):
        return code
    cuda = torch_cuda()
    if torch != "auto" and (cuda is not None) != (torch == "cuda"):
        print(f"fill_venv: TORCH={torch}, but pip found a build for {cuda or 'CPUs'}", file=sys.stderr)
        return 1
    return 0


def torch_pin(pin: str, torch: str) -> str:
    """The pin as it is, but torch's with the build: ``==`` takes any, and prefers the one with a suffix."""
    if not pin.startswith("torch==") or torch == "auto":
        return pin
    version = pin.removeprefix("torch==")
    return f"torch=={version}+cpu" if torch == "cpu" else f"torch==={version}"


def torch_cuda() -> str | None:
    """The CUDA version of the installed torch, asked of its one light file."""
    cuda = runpy.run_path(str(SITE / "torch" / "version.py"))["cuda"]
    return str(cuda) if cuda else None


def pip(*arguments: str) -> int:
    """``pip install``, with the settings that it is given from outside."""
    return subprocess.run([sys.executable, "-m", "pip", "install", *arguments], check=False).returncode


def trim() -> None:
    """Remove what a node never reads, and say how much that was."""
    removed = 0
    for pattern in NOT_NEEDED:
        for path in list(SITE.glob(pattern)):
            removed += size(path)
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
    print(f"fill_venv: {removed >> 20} MiB removed, {size(SITE) >> 20} MiB are left")


def size(path: Path) -> int:
    """Bytes of a file, or of everything in a folder."""
    if path.is_dir():
        return sum(entry.lstat().st_size for entry in path.rglob("*") if not entry.is_dir())
    return path.lstat().st_size


if __name__ == "__main__":
    sys.exit(main())
