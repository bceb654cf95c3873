"""``sentinel doctor``: what it looks at on this machine, and what it makes of it."""

from __future__ import annotations

import json
import os
import resource
import socket
from pathlib import Path

import pytest

from node import doctor
from node.admission_file import AdmissionFile
from node.bandwidth import Rate, judge
from node.cli import main
from node.doctor import Plan, disk, examine, open_files, ports, software, state_folder
from node.doctor_swarm import admission, clock, dials, fit, listening, peers, reachability
from node.estimate import stage_memory
from node.findings import Finding, Level, as_dict, bad, good, note, render, works
from protocol.admissions import DAY_SECONDS, Admission, sign_admission
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.messages import DialBackAnswer
from tests.node.claims import claim


def levels(findings: list[Finding]) -> dict[str, Level]:
    return {finding.name: finding.level for finding in findings}


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    return Plan(state_dir=tmp_path / "state", host="127.0.0.1")


def test_this_machine_would_do(plan: Plan) -> None:
    found = examine(plan)
    assert works(found), render(found)
    assert {"software", "p2pd", "state", "disk", "open files", "device", "memory", "port", "HTTP port"} <= set(
        levels(found)
    )
    assert levels(found)["swarm"] is Level.NOTE
    assert not plan.state_dir.exists()


def test_what_is_wrong_has_a_remedy_and_exit_code_5(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SENTINEL_INVITE", raising=False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        arguments = ["doctor", "--state-dir", str(tmp_path), "--host", "127.0.0.1", "--port", str(port)]
        assert main(arguments) == 5
        text = capsys.readouterr().out
        assert f"BAD  port: cannot listen on 127.0.0.1 port {port}" in text
        assert "-> stop what uses it, or choose another with --port" in text
        assert text.endswith("a node would not work here: 1 problem\n")
        assert main([*arguments, "--json"]) == 5
        told = json.loads(capsys.readouterr().out)
        assert told["works"] is False
        assert [one["name"] for one in told["findings"] if one["level"] == "bad"] == ["port"]
    assert main(arguments) == 0


@pytest.mark.parametrize("arguments", [["--device", "tpu"], ["--device", "cpu:1"]])
def test_a_device_that_is_none_is_said(
    tmp_path: Path, arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--state-dir", str(tmp_path), *arguments]) == 5
    assert "BAD  device:" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [["--port", "99999"], ["--timeout", "0"], ["not-an-invite"], ["--device"]])
def test_wrong_use_is_one_line_and_exit_code_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *arguments]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_the_state_folder_and_its_key_are_looked_at(plan: Plan) -> None:
    plan.state_dir.mkdir(mode=0o700)
    key = plan.state_dir / "identity.key"
    identity = Identity.generate()
    identity.save(key)
    (found,) = state_folder(plan)
    assert found.level is Level.GOOD and identity.peer_id in found.text
    left = plan.state_dir / "sentinel-left"
    left.mkdir()
    (plan.state_dir / "sockets").write_text(str(left))
    assert levels(state_folder(plan))["leftovers"] is Level.NOTE
    key.write_bytes(b"nonsense")
    assert levels(state_folder(plan))["state"] is Level.BAD


def test_a_file_in_place_of_the_folder_is_bad(plan: Plan) -> None:
    plan.state_dir.write_text("x")
    assert levels(state_folder(plan)) == {"state": Level.BAD}


def test_a_key_that_others_may_read_is_bad(plan: Plan) -> None:
    plan.state_dir.mkdir()
    key = plan.state_dir / "identity.key"
    Identity.generate().save(key)
    key.chmod(0o644)
    assert levels(state_folder(plan))["state"] is Level.BAD


@pytest.mark.parametrize(("free", "level"), [(1 << 20, Level.BAD), (1 << 30, Level.NOTE), (1 << 40, Level.GOOD)])
def test_room_on_the_disk(plan: Plan, free: int, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.statvfs

    class Usage:
        def __init__(self) -> None:
            self.free = free

    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: real(path) and Usage())
    assert levels(disk(plan)) == {"disk": level}


@pytest.mark.parametrize(("soft", "level"), [(100, Level.BAD), (500, Level.NOTE), (2000, Level.GOOD), (-1, Level.GOOD)])
def test_open_files_of_this_process(plan: Plan, soft: int, level: Level, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, -1))
    assert levels(open_files(plan)) == {"open files": level}


def test_an_open_http_port_is_noted(tmp_path: Path) -> None:
    found = ports(Plan(state_dir=tmp_path, host="127.0.0.1", http_host="0.0.0.0"))
    assert [finding.level for finding in found] == [Level.GOOD, Level.GOOD, Level.NOTE]


def test_a_p2pd_that_may_not_run_is_bad(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "p2pd"
    program.write_text("")
    monkeypatch.setattr(doctor, "_p2pd", lambda: program)
    assert levels(software(plan))["p2pd"] is Level.BAD
    monkeypatch.setattr(doctor, "_p2pd", lambda: None)
    assert levels(software(plan))["p2pd"] is Level.BAD


# the swarm -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("offset", "level", "word"),
    [(0.2, Level.GOOD, "behind"), (-2.0, Level.NOTE, "ahead"), (5.0, Level.BAD, "behind"), (-5.0, Level.BAD, "ahead")],
)
def test_clocks(offset: float, level: Level, word: str) -> None:
    found = clock(offset)
    assert found.level is level and word in found.text


def test_an_invited_swarm_says_who_has_to_admit_this_machine(tmp_path: Path) -> None:
    coordinator = Identity.generate()
    manifest = Manifest.from_mapping(
        {"name": "test", "admission": {"mode": "invited", "coordinator": coordinator.peer_id}}
    )
    found = admission(manifest, tmp_path, now=1000.0)
    assert found.level is Level.NOTE and "no identity here yet" in found.text
    peer = Identity.create(tmp_path / "identity.key").peer_id
    found = admission(manifest, tmp_path, now=1000.0)
    assert found.level is Level.NOTE and found.fix.endswith(f"sentinel admit {peer}")
    words = {"swarm": bytes.fromhex(manifest.swarm_id), "peer": peer, "serial": 1, "issued": 1000.0}
    AdmissionFile(tmp_path).add([sign_admission(coordinator, Admission(expires=1000.0 + 3 * DAY_SECONDS, **words))])
    found = admission(manifest, tmp_path, now=1001.0)
    assert found.level is Level.GOOD and found.text == "admitted for 3 days"
    assert admission(manifest, tmp_path, now=1000.0 + 4 * DAY_SECONDS).level is Level.NOTE


def test_stages_that_fit_and_those_that_need_somebody() -> None:
    manifest = Manifest.from_mapping({"name": "t", "model": {"layers": 3}, "stages": {"layers_per_stage": [1, 1, 1]}})
    (found,) = fit(manifest, (claim("a", 0), claim("b", 2)), 1 << 40)
    assert found.level is Level.GOOD and "nobody holds 1" in found.text
    assert fit(manifest, (), None)[0].level is Level.GOOD
    assert fit(manifest, (), 1 << 20)[0].level is Level.BAD
    on_gpus = min(stage_memory(manifest, stage).device for stage in range(3))
    assert fit(manifest, (), on_gpus - 1, gpu=True)[0].level is Level.BAD
    assert fit(manifest, (), on_gpus, gpu=True)[0].level is Level.GOOD
    needed = sorted(stage_memory(manifest, stage).total for stage in range(3))
    found = fit(manifest, (), needed[0])  # type: ignore[assignment]
    assert [one.level for one in found] == [Level.GOOD, Level.NOTE]  # type: ignore[attr-defined]


def test_being_reachable() -> None:
    there, not_there = DialBackAnswer(host="192.0.2.1", reached=True), DialBackAnswer(host="192.0.2.1", reached=False)
    assert reachability(there, reached=True, chosen=True).level is Level.GOOD
    assert "something else" in reachability(there, reached=False, chosen=True).text
    assert "every start" in reachability(not_there, reached=False, chosen=False).text
    assert "nobody could" in reachability(not_there, reached=False, chosen=True).text
    assert "busy" in reachability("busy", reached=False, chosen=True).text


def test_peers_that_can_be_reached() -> None:
    three = tuple(claim(name, 0, addresses=(f"/ip4/192.0.2.{name}/tcp/1",)) for name in "123")
    assert peers((), lambda _: False).level is Level.GOOD
    assert peers(three, lambda _: True).level is Level.GOOD
    assert peers(three, lambda address: "192.0.2.1" in address).level is Level.NOTE
    assert peers(three, lambda _: False).level is Level.BAD


def test_listening_sees_the_token_and_nothing_else() -> None:
    with listening("127.0.0.1", 0) as (port, token, shown):
        with socket.create_connection(("127.0.0.1", port)) as other:
            other.sendall(b"x" * 16)
        assert not shown()
        with socket.create_connection(("127.0.0.1", port)) as other:
            other.sendall(token)
        assert shown()
        assert dials(f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.generate().peer_id}")
        with listening("127.0.0.1", port) as (second, _, _):
            assert second == 0
    assert not dials(f"/ip4/127.0.0.1/tcp/{port}/p2p/{Identity.generate().peer_id}")
    assert not dials("nonsense")


def test_findings_read_well() -> None:
    found = [good("one", "is good"), note("two", "could be better", "improve it"), bad("three", "is bad", "mend it")]
    assert render(found).splitlines() == [
        "ok   one: is good",
        "note two: could be better",
        "     -> improve it",
        "BAD  three: is bad",
        "     -> mend it",
        "a node would not work here: 1 problem",
    ]
    assert as_dict(found[:2])["works"] is True and not works(found)


# bandwidth -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "level", "words"),
    [
        (None, Level.GOOD, "not measured"),
        (Rate(bytes=0, seconds=1.0), Level.GOOD, "not measured"),
        (Rate(bytes=32 << 20, seconds=1.0), Level.GOOD, "32 MiB/s from a node"),
        (Rate(bytes=1000, seconds=1.0), Level.NOTE, "s for a microbatch"),
    ],
)
def test_a_slow_line_is_told_of(rate: Rate | None, level: Level, words: str) -> None:
    found = judge(rate, Manifest.from_mapping({"name": "test"}))
    assert found.level is level and words in found.text
