"""A command of ``sentinel`` on a terminal of its own, as a person would see it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
_ESCAPES = re.compile(r"\x1b(?:\[[0-9;?]*[A-Za-z]|\][^\x07]*\x07|[()][A-Z0-9])")


class Terminal:
    """The process and what it has written so far; use ``on_terminal``."""

    def __init__(self, process: subprocess.Popen[bytes], master: int) -> None:
        self.process = process
        self.raw = b""
        self._master = master

    @property
    def text(self) -> str:
        """What was written, without colours and movements of the cursor."""
        return _ESCAPES.sub("", self.raw.decode(errors="replace")).replace("\r\n", "\n")

    def type(self, keys: str) -> None:
        """Press keys."""
        os.write(self._master, keys.encode())

    def until(self, words: str, *, after: int = 0, seconds: float = 60.0) -> str:
        """Read on until the words have come after so many characters; returns all text."""
        deadline = time.monotonic() + seconds
        while words not in self.text[after:]:
            left = deadline - time.monotonic()
            assert left > 0, f"{words!r} did not come: {self.text[-2000:]}"
            assert self._read(left) or words in self.text[after:], f"it ended without {words!r}: {self.text[-2000:]}"
        return self.text

    def end(self, *, seconds: float = 60.0) -> int:
        """Read on until the process has ended; returns its exit code."""
        deadline = time.monotonic() + seconds
        while self._read(max(0.0, deadline - time.monotonic())):
            assert time.monotonic() < deadline, f"it goes on: {self.text[-2000:]}"
        return self.process.wait(timeout=seconds)

    def _read(self, seconds: float) -> bool:
        """Take what comes; False once nothing can come any more."""
        if not select.select([self._master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other side is closed
            return False
        self.raw += data
        return bool(data)


def _take_terminal() -> None:
    """Make it the process's own terminal, so that Ctrl-C gets there."""
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@contextlib.contextmanager
def on_terminal(*arguments: str, folder: Path, columns: int = 120, rows: int = 50) -> Iterator[Terminal]:
    """Run ``sentinel ARGUMENTS`` on a terminal; it is gone when the block ends."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SENTINEL_")}
    process = subprocess.Popen(
        [sys.executable, "-m", "node", *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=folder,
        env={**environment, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color"},
        start_new_session=True,
        preexec_fn=_take_terminal,
    )
    os.close(slave)
    try:
        yield Terminal(process, master)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(master)
