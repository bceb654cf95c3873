"""The rules of the tree: who may import whom, what must never be called, and what is listed once."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pytest

from node.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("verifier", "protocol", "node")

FORBIDDEN_IMPORTS = {
    "verifier": {"protocol", "node"},
    "protocol": {"node"},
    "node": {"benchmarks", "tests"},
}

VERIFIER_THIRD_PARTY = {"torch"}
"""All that the checker may use besides the standard library."""

IMPURE = {"asyncio", "os", "pathlib", "random", "secrets", "selectors", "socket", "subprocess", "threading", "time"}
"""Time, randomness and files come to the checker as arguments."""

WITHOUT_TORCH = {
    "protocol": (
        *("protocol.errors", "protocol.identity", "protocol.manifest", "protocol.invite"),
        *("protocol.records", "protocol.framing", "protocol.messages", "protocol.admissions"),
    ),
    "verifier": ("verifier.verdicts", "verifier.ledger", "verifier.quorum", "verifier.config"),
    "node": (
        "node.metrics",
        "node.http",
        "node.log",
        "node.state_folder",
        "node.cli",
        "node.observing.run",
        "node.admit",
        "node.estimate",
        "node.init_cli",
        "node.initialise",
    ),
}
HEAVY = ("torch", "hivemind", "libp2p", "transformers", "pyarrow")

FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "os.system", "marshal.loads"}
FORBIDDEN_MODULES = {"pickle", "dill", "cloudpickle", "shelve", "marshal"}


def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"the package {package} is empty"
    return found


def imports(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every imported module with its line, wherever in the file it stands."""
    for part in ast.walk(tree):
        if isinstance(part, ast.Import):
            yield from ((alias.name, part.lineno) for alias in part.names)
        elif isinstance(part, ast.ImportFrom):
            assert not part.level, f"line {part.lineno}: imports here are absolute"
            yield part.module or "", part.lineno


def parsed(package: str) -> Iterator[tuple[str, ast.AST]]:
    for path in sources(package):
        name = str(path.relative_to(ROOT))
        yield name, ast.parse(path.read_text(encoding="utf-8"), filename=name)


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_imports_against_the_arrow(package: str) -> None:
    wrong = [
        f"{name}:{line} imports {module}"
        for name, tree in parsed(package)
        for module, line in imports(tree)
        if module.partition(".")[0] in FORBIDDEN_IMPORTS[package]
    ]
    assert not wrong


def test_the_checker_is_pure() -> None:
    allowed = (sys.stdlib_module_names | VERIFIER_THIRD_PARTY | {"verifier"}) - IMPURE
    wrong = [
        f"{name}:{line} imports {module}"
        for name, tree in parsed("verifier")
        for module, line in imports(tree)
        if module.partition(".")[0] not in allowed
    ]
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_runs_or_unpickles_what_it_was_sent(package: str) -> None:
    wrong = []
    for name, tree in parsed(package):
        wrong += [
            f"{name}:{line} imports {module}"
            for module, line in imports(tree)
            if module.partition(".")[0] in FORBIDDEN_MODULES
        ]
        wrong += [
            f"{name}:{part.lineno} calls {ast.unparse(part.func)}"
            for part in ast.walk(tree)
            if isinstance(part, ast.Call) and ast.unparse(part.func) in FORBIDDEN_CALLS
        ]
    assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_are_cheap_to_import(package: str) -> None:
    """An ``__init__`` holds a docstring and nothing that runs."""
    for path in (ROOT / package).rglob("__init__.py"):
        body = ast.parse(path.read_text(encoding="utf-8")).body
        assert all(isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant) for part in body), path


@pytest.mark.parametrize("module", [name for names in WITHOUT_TORCH.values() for name in names])
def test_light_modules_stay_light(module: str) -> None:
    code = f"import sys, {module}; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    ran = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == []


def test_the_distribution_lists_every_package() -> None:
    listed = project()["tool"]["setuptools"]["packages"]
    found = [
        ".".join(path.parent.relative_to(ROOT).parts)
        for package in PACKAGES
        for path in (ROOT / package).rglob("__init__.py")
    ]
    assert sorted(listed) == sorted(found)
    assert all((ROOT / package / "py.typed").exists() for package in PACKAGES)


def test_the_version_is_the_same_everywhere() -> None:
    assert project()["project"]["version"] == VERSION
    assert f"## [{VERSION}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_direct_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert all(line.count("==") == 1 and "+" not in line for line in pins)
    assert pins == sorted(pins, key=str.lower)
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in pins}
    declared = project()["project"]
    wanted = [*declared["dependencies"], *chain.from_iterable(declared["optional-dependencies"].values())]
    assert {requirement_name(text) for text in wanted} <= pinned


def test_no_file_names_a_package_registry() -> None:
    """Where packages come from is the business of whoever installs. The names are joined here to pass this test."""
    hosts = [
        "pypi" + ".org",
        "pythonhosted" + ".org",
        "download.pytorch" + ".org",
        "anaconda" + ".org",
        "npmjs" + ".org",
        "--index" + "-url",
        "--extra-index" + "-url",
        "--find" + "-links",
    ]
    wrong = []
    for path in project_files():
        try:
            text = path.read_text(encoding="utf-8").lower()
        except UnicodeDecodeError:
            continue
        wrong += [f"{path.relative_to(ROOT)} names {host}" for host in hosts if host in text]
    assert not wrong


def project() -> dict[str, dict[str, dict[str, object]]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def requirement_name(text: str) -> str:
    for mark in "<>=!~[; ":
        text = text.partition(mark)[0]
    return text.lower().replace("_", "-")


def project_files() -> list[Path]:
    """What git tracks or would; without git (an unpacked archive) everything but hidden folders."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0 and listed.stdout:
        paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    else:
        paths = [
            path for path in ROOT.rglob("*") if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
        ]
    return [path for path in paths if path.is_file()]
