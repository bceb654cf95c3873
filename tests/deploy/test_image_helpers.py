"""The programs around the image: its health check, and how pip's settings get into a build."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from deploy.image.pip_settings import MOUNTED_AT, pip_conf, settings

ROOT = Path(__file__).parents[2]
ANSWERS = {"/healthz": (200, b"training\n"), "/readyz": (503, b"waiting: for stage 1\n")}


class Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, text = ANSWERS[self.path]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving() -> Iterator[int]:
    """A node's pages; gives the port."""
    with HTTPServer(("127.0.0.1", 0), Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def health(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the check as the image does, with proxy settings that it must not follow."""
    return subprocess.run(
        [sys.executable, "-I", str(ROOT / "deploy" / "image" / "healthcheck.py"), *arguments],
        env={"PATH": os.environ["PATH"], "http_proxy": "http://127.0.0.1:9", **variables},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("host", [{}, {"SENTINEL_HTTP_HOST": "0.0.0.0"}, {"SENTINEL_HTTP_HOST": ""}])
def test_the_health_check_asks_the_node(host: dict[str, str]) -> None:
    with serving() as port:
        well = health(SENTINEL_HTTP_PORT=str(port), **host)
        idle = health("/readyz", SENTINEL_HTTP_PORT=str(port), **host)
    assert (well.returncode, well.stdout, well.stderr) == (0, "training\n", "")
    assert (idle.returncode, idle.stdout, idle.stderr) == (1, "waiting: for stage 1\n", "")


def test_the_health_check_fails_where_nobody_answers() -> None:
    with socket.socket() as bound:  # and nobody listens
        bound.bind(("127.0.0.1", 0))
        checked = health(SENTINEL_HTTP_PORT=str(bound.getsockname()[1]))
    assert checked.returncode == 1 and checked.stderr.startswith("no answer from 127.0.0.1 port ")
    assert checked.stderr.count("\n") == 1


def test_the_health_check_fails_where_something_else_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def answer() -> None:
            caller, _ = listener.accept()
            with caller:
                caller.recv(1000)
                caller.sendall(b"what?\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        checked = health(SENTINEL_HTTP_PORT=str(port))
        thread.join()
    assert checked.returncode == 1 and checked.stderr.count("\n") == 1


@pytest.mark.parametrize("port", ["", "0", "many", "70000"])
def test_the_health_check_needs_a_fixed_port(port: str) -> None:
    checked = health(SENTINEL_HTTP_PORT=port)
    assert (checked.returncode, checked.stderr) == (1, "SENTINEL_HTTP_PORT has to be a fixed port\n")


def test_pip_settings_of_the_environment_come_over_those_of_files() -> None:
    listing = "\n".join(
        (
            "global.cert='/one.pem'",
            "global.cache-dir='/cache'",
            "install.find-links='/wheels'",
            ":env:.cert='/two.pem'",
            ":env:.default-timeout='9'",
            "freeze.timeout='1'",
        )
    )
    assert settings(listing) == {"cert": "/two.pem", "find-links": "/wheels", "timeout": "9"}


def test_local_paths_of_pip_settings_are_mounted(tmp_path: Path) -> None:
    certificate, wheels, index = tmp_path / "ca.pem", tmp_path / "wheels", tmp_path / "index" / "simple"
    certificate.touch()
    wheels.mkdir()
    index.mkdir(parents=True)
    text, mounts = pip_conf(
        {
            "cert": str(certificate),
            "extra-index-url": f"file://{index} https://packages.example/simple",
            "find-links": f"{wheels}\n{tmp_path}/none",
        }
    )
    # An index's pages point to files beside its folder.
    assert mounts == {
        str(certificate): f"{MOUNTED_AT}/0",
        str(index.parent): f"{MOUNTED_AT}/1",
        str(wheels): f"{MOUNTED_AT}/2",
    }
    assert text.splitlines() == [
        "[global]",
        f"cert = {MOUNTED_AT}/0",
        f"extra-index-url = file://{MOUNTED_AT}/1/simple",
        "    https://packages.example/simple",
        f"find-links = {MOUNTED_AT}/2",
        f"    {tmp_path}/none",
    ]


def test_the_list_of_modules_that_an_image_imports_at_once_is_right() -> None:
    """Found out here in seconds, and not by a build of many minutes."""
    parts = re.search(
        r'^PARTS: Final = """(.*?)"""',
        (ROOT / "deploy" / "image" / "check.py").read_text(encoding="utf-8"),
        re.M | re.S,
    )
    assert parts is not None
    imports = parts[1].partition("import pyarrow")[0]
    ran = subprocess.run([sys.executable, "-c", imports], capture_output=True, text=True, cwd=ROOT, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
