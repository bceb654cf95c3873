"""Ports of this machine."""

from __future__ import annotations

import errno
import socket

from protocol.errors import PortInUseError, SettingsError


def check_port_free(host: str, port: int) -> int:
    """Return the port to listen on; chooses one when ``port`` is 0.

    p2pd listens with port reuse and does not report a clash, so this is asked first.

    Raises:
        PortInUseError: another process listens there.
        SettingsError: this machine does not have that address, or this user may not use that port.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((host, port))
            chosen: int = probe.getsockname()[1]
    except OSError as error:
        problem = f"cannot listen on {host} port {port}: {error.strerror}"
        if error.errno == errno.EADDRINUSE:
            raise PortInUseError(f"{problem}; choose another with --port") from None
        if error.errno == errno.EACCES:
            raise SettingsError(f"{problem}; choose one above 1023 with --port") from None
        raise SettingsError(f"{problem}; correct --host") from None
    return chosen
