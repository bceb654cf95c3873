"""``sentinel admit`` and ``init --invited``: what a coordinator types, and what it is told."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from node import admit, cli
from node.admission_file import AdmissionFile
from node.state_folder import StateFolder
from protocol.admissions import DAY_SECONDS, Roll, Standing
from protocol.errors import UsageError
from protocol.identity import Identity
from protocol.manifest import Manifest

pytestmark = pytest.mark.usefixtures("elsewhere")

VOLUNTEER = Identity(bytes(range(32))).peer_id
OTHER = Identity(bytes(range(1, 33))).peer_id


@pytest.fixture
def manifest(capsys: pytest.CaptureFixture[str]) -> Manifest:
    """An invited swarm of this machine, in ./swarm.toml."""
    assert cli.main(["init", "--invited"]) == 0
    capsys.readouterr()
    return Manifest.from_toml(Path("swarm.toml").read_text())


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert cli.main(arguments) == 0
    said = capsys.readouterr()
    assert said.err == ""
    return said.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 2) -> str:
    assert cli.main(arguments) == code
    said = capsys.readouterr()
    assert said.out == "" and said.err.startswith("sentinel: ") and said.err.count("\n") == 1, said
    return said.err


def roll(manifest: Manifest) -> Roll:
    """What a node would take from the file."""
    made = Roll(swarm=bytes.fromhex(manifest.swarm_id), coordinator=manifest.admission.coordinator)
    for data in AdmissionFile(StateFolder.resolve()).read():
        made.take(data, time.time())
    return made


def test_init_makes_the_identity_and_names_it_in_the_manifest(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "init", "--invited", "mine.toml")
    manifest = Manifest.from_toml(Path("mine.toml").read_text())
    peer = Identity.load(StateFolder.resolve() / "identity.key").peer_id
    assert (manifest.admission.mode, manifest.admission.coordinator) == ("invited", peer)
    assert peer in said and "sentinel admit PEER_ID" in said
    run(capsys, "init", "--invited", "again.toml")  # with the identity that is there
    assert Manifest.from_toml(Path("again.toml").read_text()) == manifest
    run(capsys, "init", "--invited", "--state-dir", "elsewhere", "other.toml")
    there = Identity.load(Path("elsewhere") / "identity.key").peer_id
    assert Manifest.from_toml(Path("other.toml").read_text()).admission.coordinator == there != peer


def test_init_without_it_makes_an_open_swarm_and_no_identity(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "init")
    assert Manifest.from_toml(Path("swarm.toml").read_text()).admission.mode == "open"
    assert not StateFolder.resolve().exists()


def test_admitting_renewing_and_revoking(manifest: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "admit", VOLUNTEER)
    assert said.startswith(f"admitted {VOLUNTEER} to swarm 'my-swarm' until ")
    assert "next: start the coordinator, which tells the swarm: sentinel coordinate swarm.toml" in said
    first = roll(manifest).of(VOLUNTEER)
    assert first is not None and first.expires - first.issued == pytest.approx(30 * DAY_SECONDS)

    run(capsys, "admit", VOLUNTEER, "--days", "60")
    renewed = roll(manifest).of(VOLUNTEER)
    assert renewed is not None and renewed.serial > first.serial and renewed.expires > first.expires

    said = run(capsys, "admit", VOLUNTEER, "--revoke")
    assert f"revoked the admission of {VOLUNTEER}" in said and "it was admitted before" in said
    assert roll(manifest).standing(VOLUNTEER, time.time()) is Standing.REVOKED
    assert "it was unknown before" in run(capsys, "admit", OTHER, "--revoke")
    run(capsys, "admit", VOLUNTEER)
    assert roll(manifest).admits(VOLUNTEER, time.time())


def test_a_clock_that_went_back_does_not_make_a_new_admission_old(manifest: Manifest) -> None:
    folder, now = StateFolder.resolve(), time.time()
    admit.sign(folder, manifest, VOLUNTEER, days=30, revoke=False, now=now)
    admit.sign(folder, manifest, VOLUNTEER, days=30, revoke=True, now=now - 30.0)
    assert roll(manifest).standing(VOLUNTEER, now) is Standing.REVOKED


def test_the_list_tells_the_newest_first(manifest: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nobody is admitted yet" in run(capsys, "admit", "--list")
    assert json.loads(run(capsys, "admit", "--list", "--json")) == []
    run(capsys, "admit", VOLUNTEER)
    run(capsys, "admit", OTHER)
    run(capsys, "admit", VOLUNTEER, "--revoke")
    lines = run(capsys, "admit", "--list").splitlines()
    assert [line.split()[:3] for line in lines] == [[VOLUNTEER, "revoked", "since"], [OTHER, "admitted", "until"]]
    found = json.loads(run(capsys, "admit", "--list", "--json"))
    assert [(entry["peer"], entry["standing"]) for entry in found] == [(VOLUNTEER, "revoked"), (OTHER, "admitted")]


def test_as_json_it_says_what_it_signed(manifest: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    said = json.loads(run(capsys, "admit", VOLUNTEER, "--json"))
    known = roll(manifest).of(VOLUNTEER)
    assert known is not None
    assert said == {
        "peer": VOLUNTEER,
        "standing": "admitted",
        "serial": known.serial,
        "issued": known.issued,
        "expires": known.expires,
        "running": False,
    }


def test_it_knows_whether_the_coordinator_runs(manifest: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    with StateFolder(StateFolder.resolve()):  # as the coordinator holds it
        assert "a node that waits then goes on" in run(capsys, "admit", VOLUNTEER)
        assert "leaves with exit code 4" in run(capsys, "admit", VOLUNTEER, "--revoke")
        assert json.loads(run(capsys, "admit", VOLUNTEER, "--json"))["running"] is True
    assert "next: start the coordinator" in run(capsys, "admit", VOLUNTEER)


def test_mistakes_are_told_with_their_remedy(manifest: Manifest, capsys: pytest.CaptureFixture[str]) -> None:
    assert "a peer id is needed" in refused(capsys, "admit")
    assert "--list takes no PEER_ID" in refused(capsys, "admit", VOLUNTEER, "--list")
    assert "is not a peer id" in refused(capsys, "admit", VOLUNTEER[:-1])
    assert "always admitted" in refused(capsys, "admit", manifest.admission.coordinator)
    assert "cannot read missing.toml" in refused(capsys, "admit", VOLUNTEER, "--manifest", "missing.toml")
    assert "--days" in refused(capsys, "admit", VOLUNTEER, "--days", "0")
    assert "no key file" in refused(capsys, "admit", VOLUNTEER, "--state-dir", "nowhere", code=1)
    assert not AdmissionFile(StateFolder.resolve()).path.exists()


def test_an_open_swarm_admits_nobody_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    run(capsys, "init")
    for arguments in (["admit", VOLUNTEER], ["admit", "--list"]):
        assert "is open: whoever has its invite may join" in refused(capsys, *arguments)


def test_another_identity_neither_admits_nor_coordinates(
    manifest: Manifest, capsys: pytest.CaptureFixture[str]
) -> None:
    Identity.create(Path("other") / "identity.key")
    for arguments in (["admit", VOLUNTEER], ["coordinate"]):
        said = refused(capsys, *arguments, "--state-dir", "other")
        assert f"the manifest names the coordinator {manifest.admission.coordinator}" in said
        assert "sentinel identity import" in said


def test_no_more_are_admitted_than_nodes_keep(manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admit, "MAX_KNOWN", 1)
    folder, now = StateFolder.resolve(), time.time()
    admit.sign(folder, manifest, VOLUNTEER, days=30, revoke=False, now=now)
    with pytest.raises(UsageError, match="let some end"):
        admit.sign(folder, manifest, OTHER, days=30, revoke=False, now=now)
    admit.sign(folder, manifest, VOLUNTEER, days=30, revoke=False, now=now)
    admit.sign(folder, manifest, OTHER, days=30, revoke=True, now=now)
