"""Every decoder takes its seeds, and refuses what is nearly right by the errors that it promises and no others."""

from __future__ import annotations

import ast
import dataclasses
import json
import random
import signal
import tracemalloc
from pathlib import Path

import pytest

from tests.fuzz import run
from tests.fuzz.mutate import mutated
from tests.fuzz.targets import BODY_LIMIT, TARGETS

ROOT = Path(__file__).resolve().parents[2]
EXECUTIONS = 4000
MAX_TAKEN = 4 << 20
"""Bytes of memory that one input of at most 16 KiB may take at a time: far more than any needs, far less than it could
name. Tensors are not counted, which is why the body of a frame is: it is bytes."""

SPELLINGS = ("decode", "parse", "unpack", "open_", "read_", "peek")
FED = {"bytes", "Buffer", "bytes | None", "memoryview", "str"}
INNER = {
    "protocol.statements.open_statement": "every receipt and hop",
    "protocol.record_fields.read_payload": "every record and admission",
    "node.drill.parse_drill": "the command line",
    "node.cli_options.parse_multiaddr": "the command line",
}


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_nearly_right_is_refused_as_promised(name: str) -> None:
    target = TARGETS[name]
    rng = random.Random(f"fuzz {name}")
    seeds = target.seeds()
    for data in [b"", *(mutated(rng.choice(seeds), rng) for _ in range(EXECUTIONS))]:
        try:
            target.try_out(data)
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error} from {data[:2000]!r}")


@pytest.mark.parametrize("name", sorted(TARGETS.keys() - {"message", "evidence", "signatures"}))
def test_what_is_right_is_taken(name: str) -> None:
    assert all(TARGETS[name].try_out(data) for data in TARGETS[name].seeds())


def test_some_of_what_may_be_right_is_taken() -> None:
    """A message is read as each kind, evidence as each of both, and a signature of nothing is no error."""
    for name in ("message", "evidence", "signatures"):
        assert any([TARGETS[name].try_out(data) for data in TARGETS[name].seeds()])


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_takes_much_memory(name: str) -> None:
    target = TARGETS[name]
    rng = random.Random(f"memory {name}")
    seeds = target.seeds()
    inputs = [mutated(rng.choice(seeds), rng) for _ in range(EXECUTIONS // 100)]
    for data in inputs[:3]:
        target.try_out(data)  # what is made once
    tracemalloc.start()
    try:
        for data in inputs:
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            target.try_out(data)
            assert tracemalloc.get_traced_memory()[1] - before < MAX_TAKEN + BODY_LIMIT, data[:200]
    finally:
        tracemalloc.stop()


def test_every_decoder_is_a_target() -> None:
    reached = {f"{read.__module__}.{read.__name__}" for target in TARGETS.values() for read in target.reads}
    found = {
        name
        for path in (*(ROOT / "protocol").rglob("*.py"), *(ROOT / "node").rglob("*.py"))
        for name in _decoders(path)
    }
    assert found, "the search finds nothing"
    assert found - reached - INNER.keys() == set(), "these take bytes of others and are not fuzzed"


def _decoders(path: Path) -> list[str]:
    """Public functions of a module that are named like decoders and take bytes or text first."""
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return [
        f"{module}.{node.name}"
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith(SPELLINGS)
        and node.args.args
        and node.args.args[0].annotation is not None
        and ast.unparse(node.args.args[0].annotation) in FED
    ]


def test_the_runner_keeps_what_it_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(data: bytes) -> None:
        if len(data) > 3:
            raise ZeroDivisionError

    broken = dataclasses.replace(TARGETS["head"], run=faulty)
    monkeypatch.setattr(run, "TARGETS", {"head": broken})
    before = signal.getsignal(signal.SIGALRM)
    try:
        assert run.blind("head", 100, 0, tmp_path) == 1
    finally:
        signal.signal(signal.SIGALRM, before)
    (found,) = tmp_path.iterdir()
    assert len(found.read_bytes()) > 3 and found.name.startswith("head-")


def test_the_runner_says_what_it_did(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    arguments = ["head", "address", "--blind", "--executions", "50", "--findings", str(tmp_path / "found")]
    assert run.main([*arguments, "--json", str(out)]) == 0
    results = json.loads(out.read_text())
    assert [(each["target"], each["executions"], each["finding"]) for each in results] == [
        ("head", 50, False),
        ("address", 50, False),
    ]
    assert capfd.readouterr().out.count("no finding") == 2
    assert not (tmp_path / "found").exists()
    with pytest.raises(SystemExit):
        run.main(["nothing"])


def test_mutations_are_the_same_everywhere() -> None:
    rng = random.Random(1)
    found = [mutated(b"the quick brown fox", rng) for _ in range(50)]
    assert len(set(found)) > 40
    rng = random.Random(1)
    assert found == [mutated(b"the quick brown fox", rng) for _ in range(50)]
