"""Dockerfile, compose files and systemd unit: what they promise, and that they agree with the node."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from deploy.image.fill_venv import torch_pin
from node import daemon
from node.cli import cli

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
COMPOSE_FILES = ("compose.yaml", "volunteer.compose.yaml")
LAST_WORDS_SECONDS = 15
"""What a node gets beyond its drain before it is killed."""
SECRETS = re.compile(r"sentinel://|12D3KooW|password|secret_|token|api_?key", re.IGNORECASE)
INSTRUCTION = re.compile(r"^([A-Z]+) (.*)$", re.MULTILINE)


def parse(name: str, arguments: list[str]) -> None:
    """Read arguments as the command line does; raises what click raises. Below the group: a command remembers the
    names of its help option from whoever asks first."""
    with cli.make_context("sentinel", [name, *arguments]) as group:
        cli.commands[name].make_context(name, list(arguments), parent=group)


def environment_variables(command: click.Command = cli) -> set[str]:
    """Every environment variable that the command line reads."""
    found = {
        name
        for parameter in command.params
        for name in ([parameter.envvar] if isinstance(parameter.envvar, str) else parameter.envvar or ())
    }
    for inner in command.commands.values() if isinstance(command, click.Group) else ():
        found |= environment_variables(inner)
    return found


def services(name: str) -> dict[str, dict[str, Any]]:
    found = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))["services"]
    assert isinstance(found, dict)
    return found


def nodes() -> list[tuple[str, dict[str, Any]]]:
    """The services of all compose files that are nodes of this project."""
    found = [
        (f"{file}:{name}", service)
        for file in COMPOSE_FILES
        for name, service in services(file).items()
        if "SENTINEL_IMAGE" in service["image"]
    ]
    assert len(found) == 3
    return found


NODES = pytest.mark.parametrize("service", [service for _, service in nodes()], ids=[name for name, _ in nodes()])


@pytest.fixture(scope="module")
def dockerfile() -> list[tuple[str, str]]:
    """Instructions of the last stage: those that are left in the image."""
    text = re.sub(r"\\\n\s*", "", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    found = INSTRUCTION.findall(text)
    last = max(number for number, (name, _) in enumerate(found) if name == "FROM")
    return found[last:]


def value(instructions: list[tuple[str, str]], name: str) -> str:
    """What the last instruction of that name says."""
    return [text for found, text in instructions if found == name][-1]


# Dockerfile -----------------------------------------------------------------------------


def test_the_image_runs_as_a_numbered_user_that_is_not_root(dockerfile: list[tuple[str, str]]) -> None:
    user, group = value(dockerfile, "USER").split(":")
    assert int(user) > 999 and int(group) > 999
    assert max(place for place, (name, _) in enumerate(dockerfile) if name == "USER") > max(
        place for place, (name, _) in enumerate(dockerfile) if name in ("RUN", "COPY")
    )


def test_the_node_gets_the_signals_itself(dockerfile: list[tuple[str, str]]) -> None:
    assert value(dockerfile, "ENTRYPOINT") == '["sentinel"]'
    assert value(dockerfile, "CMD") == '["join"]'
    assert value(dockerfile, "STOPSIGNAL") == "SIGTERM"
    assert re.search(r'CMD \["[^"]+/python", "-I", "[^"]+/healthcheck.py"\]$', value(dockerfile, "HEALTHCHECK"))


def test_the_environment_of_the_image_is_one_that_the_node_knows(dockerfile: list[tuple[str, str]]) -> None:
    values = dict(word.split("=", 1) for name, text in dockerfile if name == "ENV" for word in shlex.split(text))
    mine = {name for name in values if name.startswith("SENTINEL_")}
    assert mine and mine <= environment_variables()
    assert values["SENTINEL_STATE_DIR"] == value(dockerfile, "VOLUME") == values["HOME"]
    assert {values["SENTINEL_PORT"], values["SENTINEL_HTTP_PORT"]} == set(value(dockerfile, "EXPOSE").split())


def test_no_stage_takes_a_secret_as_an_argument_or_leaves_pip_settings() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    assert {name for name in re.findall(r"^ARG (\w+)", text, re.MULTILINE)} == {"BASE", "TORCH", "VERSION", "REVISION"}
    assert text.count("--mount=type=secret,id=pip,target=/etc/pip.conf") == 2
    assert not re.search(r"^(ADD|COPY \.)", text, re.MULTILINE)


def test_the_default_base_names_a_version() -> None:
    base = re.search(r"^ARG BASE=(\S+)$", (ROOT / "Dockerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert base and re.fullmatch(r"python:3\.11\.\d+-slim-bookworm(@sha256:[0-9a-f]{64})?", base[1])


def test_all_that_the_image_is_built_from_is_let_through_to_the_builder() -> None:
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    let_through = {line[1:] for line in ignored if line.startswith("!")}
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    copied = {word for words in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for word in words.split()[:-1]}
    assert copied == let_through
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    assert {package.partition(".")[0] for package in packages} <= copied


@pytest.mark.parametrize(
    ("pin", "torch", "pinned"),
    [
        ("torch==2.13.0", "auto", "torch==2.13.0"),
        ("torch==2.13.0", "cpu", "torch==2.13.0+cpu"),
        ("torch==2.13.0", "cuda", "torch===2.13.0"),
        ("torchvision==0.1", "cpu", "torchvision==0.1"),
    ],
)
def test_the_build_of_torch_can_be_chosen(pin: str, torch: str, pinned: str) -> None:
    assert torch_pin(pin, torch) == pinned


def test_the_constraints_pin_torch() -> None:
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert sum(torch_pin(pin, "cpu") != pin for pin in pins) == 1


# compose --------------------------------------------------------------------------------


@NODES
def test_a_node_in_compose_has_no_rights(service: dict[str, Any]) -> None:
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert "/tmp" in service["tmpfs"] and "privileged" not in service and "user" not in service


@NODES
def test_a_node_in_compose_may_drain(service: dict[str, Any]) -> None:
    grace = int(str(service["stop_grace_period"]).removesuffix("s"))
    assert grace >= daemon.DRAIN_SECONDS + LAST_WORDS_SECONDS


@NODES
def test_a_node_in_compose_is_started_as_the_command_line_allows(service: dict[str, Any]) -> None:
    name, *arguments = service["command"]
    parse(name, arguments)
    known = environment_variables()
    assert {variable for variable in service["environment"] if variable not in known} == set()
    assert "SENTINEL_INVITE_FILE" in service["environment"] and "SENTINEL_INVITE" not in service["environment"]


@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_no_compose_file_holds_a_secret(file: str) -> None:
    text = "\n".join(
        line for line in (DEPLOY / file).read_text(encoding="utf-8").splitlines() if not line.strip().startswith("#")
    )
    assert not SECRETS.search(text)
    for name, service in services(file).items():
        assert isinstance(service.get("command", []), list), f"{name} is started through no shell"


@pytest.mark.parametrize("file", COMPOSE_FILES)
def test_every_image_of_others_has_a_version_and_every_port_stays_on_this_machine(file: str) -> None:
    for name, service in services(file).items():
        assert "SENTINEL_IMAGE" in service["image"] or re.search(r":v?\d+\.\d+\.\d+$", service["image"]), name
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ())), name


def test_the_coordinator_hands_the_invite_to_the_volunteers() -> None:
    swarm = services("compose.yaml")
    coordinator, volunteer = swarm["coordinator"], swarm["volunteer"]
    written, read = (service["environment"]["SENTINEL_INVITE_FILE"] for service in (coordinator, volunteer))
    assert written == read == "/run/sentinel/invite"
    assert "invite:/run/sentinel" in coordinator["volumes"] and volunteer["volumes"] == ["invite:/run/sentinel:ro"]
    assert volunteer["depends_on"] == {"coordinator": {"condition": "service_healthy"}}
    assert coordinator["healthcheck"]["test"][-1] == "/readyz"
    assert "install -d -m 0755 -o 10001 -g 10001 /run/sentinel" in (ROOT / "Dockerfile").read_text(encoding="utf-8")


# systemd --------------------------------------------------------------------------------


def unit() -> dict[str, list[str]]:
    """Every setting of the unit, with all its values."""
    found: dict[str, list[str]] = {}
    for line in (DEPLOY / "sentinel.service").read_text(encoding="utf-8").splitlines():
        name, equals, text = line.partition("=")
        if equals and not line.startswith("#"):
            found.setdefault(name, []).append(text)
    return found


def test_the_unit_stops_the_node_politely() -> None:
    settings = unit()
    assert settings["KillSignal"] == ["SIGTERM"]
    assert settings["KillMode"] == ["mixed"]  # SIGTERM to p2pd as well would cut the node off
    assert int(settings["TimeoutStopSec"][0]) >= daemon.DRAIN_SECONDS + LAST_WORDS_SECONDS


def test_the_unit_starts_the_node_again_only_where_that_may_help() -> None:
    from protocol.errors import AdmissionError, EjectedError, PreflightError, UsageError

    settings = unit()
    assert settings["Restart"] == ["on-failure"]
    final = {int(code) for code in settings["RestartPreventExitStatus"][0].split()}
    assert final == {kind.exit_code for kind in (UsageError, EjectedError, AdmissionError)}
    assert PreflightError.exit_code not in final


def test_the_unit_knows_the_node() -> None:
    settings = unit()
    _, command, *arguments = settings["ExecStart"][0].split()
    parse(command, arguments)
    mine = set(re.findall(r"\bSENTINEL_\w+(?==)", "\n".join(settings["Environment"])))
    assert mine == {"SENTINEL_STATE_DIR", "SENTINEL_INVITE_FILE"} <= environment_variables()
    assert not SECRETS.search(settings["ExecStart"][0])


def test_systemd_finds_no_fault_in_the_unit(tmp_path: Path) -> None:
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is missing; the Debian package systemd has it")
    copy = tmp_path / "sentinel.service"
    text = (DEPLOY / "sentinel.service").read_text(encoding="utf-8")
    copy.write_text(text.replace("/opt/sentinel/bin/sentinel", sys.executable), encoding="utf-8")
    checked = subprocess.run([program, "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")
