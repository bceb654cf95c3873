"""Containers from a mounted image, for check.py: start, ask, stop.

A container here is a process that run_rootfs.py gives its own mounts and process numbers. Its root is the image,
read-only; only /tmp (in memory) and the volumes can be written. It gets the user, the environment and the entry point
that the image's configuration names. The network is this machine's: nodes use loopback alone.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

RUNNER: Final = Path(__file__).resolve().parent / "run_rootfs.py"
GRACE_SECONDS: Final = 45.0
"""What the compose files and the unit give a node to leave; a drain takes 25 s at most."""
START_SECONDS: Final = 240.0
"""For a node to say where its page is, on a slow machine that reads torch for the first time."""

T = TypeVar("T")


class CheckError(Exception):
    """The image does not do what it has to."""


@dataclass(slots=True)
class Image:
    """A mounted image and its configuration."""

    root: Path
    config: dict[str, Any]
    work: Path
    containers: list[Container] = field(default_factory=list)

    @property
    def user(self) -> tuple[int, int]:
        """User and group id."""
        user, _, group = str(self.config.get("User", "")).partition(":")
        if not user.isdigit() or not group.isdigit():
            raise CheckError(f"the image's user is {user}:{group}; it has to be two numbers")
        return int(user), int(group)

    def start(self, name: str, arguments: list[str], **options: Any) -> Container:
        """Start a container in the background."""
        container = Container(self, name, arguments, **options)
        self.containers.append(container)
        return container

    def run(self, arguments: list[str], *, code: int = 0, **options: Any) -> str:
        """Run a container to its end; returns what it printed."""
        container = self.start("run", arguments, **options)
        if (found := container.wait(START_SECONDS)) != code:
            raise CheckError(f"{' '.join(arguments)[:80]} ended with code {found}: {container.log()}")
        return container.log()

    def volume(self, name: str) -> Path:
        """A folder that a container may write to, as a named volume is made from the image's own folder."""
        folder = self.work / name
        folder.mkdir(mode=0o700, exist_ok=True)
        folder.chmod(0o700)
        subprocess.run(["chown", ":".join(map(str, self.user)), str(folder)], check=True)
        return folder


class Container:
    """One container, running or ended."""

    def __init__(
        self,
        image: Image,
        name: str,
        arguments: list[str],
        *,
        entrypoint: list[str] | None = None,
        volumes: dict[Path, str] | None = None,
        environment: dict[str, str] | None = None,
    ) -> None:
        self.name = name
        self.log_path = image.work / f"{len(image.containers):02}-{name}.log"
        values = dict(entry.split("=", 1) for entry in image.config.get("Env") or ())
        plan = {
            "root": str(image.root),
            "user": image.user,
            "folder": image.config.get("WorkingDir") or "/",
            "command": [*(entrypoint or image.config["Entrypoint"]), *arguments],
            # Containers share this machine's network here, so their ports cannot be the same.
            "environment": values | {"SENTINEL_HTTP_PORT": "0", "SENTINEL_PORT": "0"} | (environment or {}),
            "volumes": {str(path): inside for path, inside in (volumes or {}).items()},
        }
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(RUNNER), json.dumps(plan)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def facts(self) -> dict[str, str]:
        """What the kernel says of its first process: /proc/PID/status."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children").read_text().split()
        if not children:
            return {}
        lines = Path(f"/proc/{children[0]}/status").read_text().splitlines()
        return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}

    def log(self) -> str:
        """All that it has printed."""
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    def wait(self, seconds: float) -> int:
        """Its exit code."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise CheckError(f"{self.name} still runs after {seconds:.0f} s: {self.log()[-2000:]}") from None

    def stop(self) -> tuple[int, float]:
        """End it as a runtime does: SIGTERM to its first process. Returns the exit code and the seconds."""
        begun = time.monotonic()
        self._process.send_signal(signal.SIGTERM)
        return self.wait(GRACE_SECONDS), time.monotonic() - begun

    def kill(self) -> None:
        """End it at once: its first process dies with the runner, and all others with that one."""
        if self.running:
            self._process.kill()
            self._process.wait()

    def until(self, ask: Callable[[], T | None], what: str, seconds: float) -> T:
        """Ask until there is an answer other than None: containers can only be polled."""
        deadline = time.monotonic() + seconds
        while (answer := ask()) is None:
            if not self.running:
                raise CheckError(f"{self.name} ended instead of {what}: {self.log()[-2000:]}")
            if time.monotonic() > deadline:
                raise CheckError(f"{self.name}: {seconds:.0f} s without {what}: {self.log()[-2000:]}")
            time.sleep(0.2)
        return answer

    def page(self) -> str:
        """Where its HTTP pages are, once it says so."""

        def said() -> str | None:
            match = re.search(r"metrics and status at (http://\S+)", self.log())
            return match.group(1) if match else None

        return self.until(said, "saying where its page is", START_SECONDS)

    def status(self) -> dict[str, Any]:
        """What its page says; empty if it does not answer."""
        try:
            with urllib.request.urlopen(f"{self.page()}/status", timeout=5) as answer:
                said: dict[str, Any] = json.load(answer)
                return said
        except (OSError, ValueError):
            return {}

    def until_status(self, condition: Callable[[dict[str, Any]], bool], what: str, seconds: float) -> dict[str, Any]:
        """Its status, once it meets the condition."""

        def met() -> dict[str, Any] | None:
            status = self.status()
            return status if status and condition(status) else None

        return self.until(met, what, seconds)
