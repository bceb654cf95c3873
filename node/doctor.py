"""``sentinel doctor``: whether a node would work on this machine. Starts none, and leaves nothing behind."""

from __future__ import annotations

import importlib.metadata
import os
import resource
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.estimate import PROCESS_BYTES
from node.findings import Finding, bad, good, note
from node.version import VERSION
from protocol.errors import SentinelError
from protocol.identity import Identity
from protocol.invite import Invite

LEAST_OPEN_FILES, GOOD_OPEN_FILES = 256, 1024
"""Each connected peer takes about four."""
LEAST_FREE_BYTES, GOOD_FREE_BYTES = 200 << 20, 2 << 30
DRIVER_SECONDS = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How the node would be started."""

    state_dir: Path
    host: str = "0.0.0.0"
    port: int = 0
    http_host: str = "127.0.0.1"
    http_port: int = 0
    device: str = "auto"
    invite: Invite | None = None
    seconds: float = 10.0
    """For each question to the swarm."""


def examine(plan: Plan) -> list[Finding]:
    """Look at everything; what cannot be looked at is a finding too."""
    checks: list[Callable[[Plan], Iterable[Finding]]] = [
        software,
        state_folder,
        disk,
        open_files,
        compute,
        memory,
        ports,
    ]
    found = [finding for check in checks for finding in check(plan)]
    if plan.invite is None:
        found.append(note("swarm", "not looked at", "name an invite: sentinel doctor INVITE"))
        return found
    from node.doctor_swarm import swarm

    return found + swarm(plan, plan.invite)


def software(plan: Plan) -> list[Finding]:
    """Versions, and p2pd."""
    found = [
        good("software", f"sentinel {VERSION}, Python {sys.version.split()[0]}, torch {_version('torch')}"),
    ]
    program = _p2pd()
    if program is None:
        found.append(bad("p2pd", "hivemind's p2pd is missing", "install sentinel-swarm again in a new environment"))
    elif not os.access(program, os.X_OK):
        found.append(bad("p2pd", f"{program} may not be executed", f"chmod +x {program}"))
    else:
        found.append(good("p2pd", str(program)))
    return found


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def _p2pd() -> Path | None:
    """Where hivemind's p2pd is; without an import of hivemind, which takes seconds."""
    try:
        hivemind = importlib.metadata.distribution("hivemind")
    except importlib.metadata.PackageNotFoundError:
        return None
    path = Path(str(hivemind.locate_file("hivemind/hivemind_cli/p2pd")))
    return path if path.exists() else None


def state_folder(plan: Plan) -> list[Finding]:
    """The folder for identity and state, and what an earlier run left in it."""
    folder = plan.state_dir
    if not folder.exists():
        parent = next(path for path in folder.absolute().parents if path.exists())
        if not os.access(parent, os.W_OK | os.X_OK):
            return [bad("state", f"{folder} cannot be made in {parent}", "choose another folder with --state-dir")]
        return [good("state", f"{folder} would be made, with a new identity")]
    if not folder.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        return [bad("state", f"{folder} is no folder that you may write to", "choose another with --state-dir")]
    found = [_identity(folder / "identity.key")]
    try:
        left = Path((folder / "sockets").read_text(encoding="utf-8"))
        if left.exists():
            found.append(
                note(
                    "leftovers",
                    f"a node runs with this folder, or one was killed and left {left}",
                    "a node that starts removes it",
                )
            )
    except (OSError, ValueError):
        pass
    return found


def _identity(path: Path) -> Finding:
    if not path.exists():
        return good("state", f"{path.parent} is there; the identity would be new")
    try:
        peer = Identity.load(path).peer_id
    except SentinelError as error:
        return bad("state", str(error), "restore the key from a backup: sentinel identity import, or move it away")
    if stat.S_IMODE(path.stat().st_mode) & 0o077:
        return bad("state", f"others may read {path}", f"chmod 600 {path}")
    return good("state", f"{path.parent}, identity {peer}")


def disk(plan: Plan) -> list[Finding]:
    """Room for checkpoints."""
    folder = next(path for path in (plan.state_dir.absolute(), *plan.state_dir.absolute().parents) if path.exists())
    free = shutil.disk_usage(folder).free
    text = f"{free / 2**30:.1f} GiB free for {plan.state_dir}"
    if free < LEAST_FREE_BYTES:
        return [bad("disk", text, "make room, or choose another folder with --state-dir")]
    if free < GOOD_FREE_BYTES:
        return [note("disk", text, "checkpoints of a large stage will not fit; make room, or use --checkpoints 0")]
    return [good("disk", text)]


def open_files(plan: Plan) -> list[Finding]:
    """The limit of open files."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = "no limit" if soft == resource.RLIM_INFINITY else str(soft)
    if soft != resource.RLIM_INFINITY and soft < LEAST_OPEN_FILES:
        return [bad("open files", f"at most {limit}", f"ulimit -n {GOOD_OPEN_FILES * 4}")]
    if soft != resource.RLIM_INFINITY and soft < GOOD_OPEN_FILES:
        return [note("open files", f"at most {limit}, enough for a small swarm", f"ulimit -n {GOOD_OPEN_FILES * 4}")]
    return [good("open files", f"at most {limit}")]


def compute(plan: Plan) -> list[Finding]:
    """The device, and a GPU that torch does not see."""
    from node.device import choose_device

    try:
        device = choose_device(plan.device)
    except SentinelError as error:
        return [bad("device", str(error), "correct --device")]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if device.type == "cuda":
        return [good("device", f"{device}, {_gpu_name(device)}, driver {_driver() or 'unknown'}")]
    driver = _driver()
    if driver and plan.device == "auto":
        text = f"cpu with {cores} cores, although a GPU driver is here ({driver})"
        return [note("device", text, "install a CUDA build of torch to use the GPU")]
    return [good("device", f"cpu with {cores} cores")]


def _gpu_name(device: Any) -> str:
    import torch

    return str(torch.cuda.get_device_name(device))


def _driver() -> str:
    """What nvidia-smi says; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        done = subprocess.run(
            [program, "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=DRIVER_SECONDS,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.split("\n", 1)[0].strip()[:40]


def available_bytes(plan: Plan) -> int | None:
    """Memory that a stage could take; None where the device cannot be used."""
    from node.device import available_memory_bytes, choose_device

    try:
        return available_memory_bytes(choose_device(plan.device))
    except SentinelError:
        return None


def on_gpu(plan: Plan) -> bool:
    """Whether the node would compute on a GPU."""
    from node.device import choose_device

    try:
        return choose_device(plan.device).type == "cuda"
    except SentinelError:
        return False


def memory(plan: Plan) -> list[Finding]:
    """Memory within the container's limit."""
    from node.device import cgroup_available_bytes

    free = available_bytes(plan)
    if free is None:
        return []
    limited = cgroup_available_bytes()
    text = f"{free / 2**30:.1f} GiB free" + ("" if limited is None else ", within this container's limit")
    if free < PROCESS_BYTES:
        return [bad("memory", text, f"a node needs {PROCESS_BYTES >> 20} MiB and its stage; give it more")]
    return [good("memory", text)]


def ports(plan: Plan) -> list[Finding]:
    """Whether the ports can be listened on."""
    from protocol.transports.ports import check_port_free

    found = []
    for name, host, port, option in (
        ("port", plan.host, plan.port, "--port"),
        ("HTTP port", plan.http_host, plan.http_port, "--http-port"),
    ):
        try:
            check_port_free(host, port)
        except SentinelError as error:
            found.append(bad(name, str(error).partition(";")[0], f"stop what uses it, or choose another with {option}"))
        else:
            found.append(good(name, f"{host} port {port or 'chosen at the start'} can be listened on"))
    if plan.http_host not in ("127.0.0.1", "::1", "localhost"):
        text = f"metrics and status are served on {plan.http_host}, to whoever can reach it"
        found.append(note("HTTP port", text, "leave --http-host at 127.0.0.1, or let only your scraper through"))
    return found
