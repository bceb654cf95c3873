"""The documents point at things that exist and name what the code names."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

WORDS = (
    *("Swarm", "Manifest", "Invite", "Coordinator", "Node", "Peer", "Stage", "Replica", "Sibling"),
    *("Upstream, downstream", "Microbatch", "Step", "Activation", "Activation gradient", "View", "Claim", "Wiring"),
    *("Receipt", "Flag", "Strike", "Quarantine", "Accusation", "Ejection", "Audit"),
)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_within_the_project_lead_somewhere(path: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", path.read_text(encoding="utf-8"))
    wrong = [link for link in links if "://" not in link and not (path.parent / link).exists()]
    assert not wrong


def test_the_glossary_has_every_word() -> None:
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    assert [word for word in WORDS if f"**{word}.**" not in text] == []


def test_the_readme_names_every_environment_variable() -> None:
    declared = set(re.findall(r'envvar="(SENTINEL_[A-Z_]+)"', (ROOT / "node" / "cli.py").read_text(encoding="utf-8")))
    assert declared
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert {name for name in declared if name not in readme} == set()


def test_the_readme_gives_the_exit_codes_of_the_errors() -> None:
    from protocol import errors

    codes = {kind.exit_code for kind in vars(errors).values() if isinstance(kind, type)}
    rows = re.findall(r"^\| (\d) \|", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert {0, *codes} == {int(row) for row in rows}


def test_the_licence_is_the_unmodified_apache_2_0() -> None:
    digest = hashlib.sha256((ROOT / "LICENSE").read_bytes()).hexdigest()
    assert digest == "cfc7749b96f63bd31c3c42b5c471bf756814053e847c10f3eb003417bc523d30"
