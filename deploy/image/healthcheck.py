"""Exit 0 if the node in this container is healthy, else say why and exit 1: for HEALTHCHECK.

``healthcheck.py /readyz`` asks instead whether the node is at work. The address is that of SENTINEL_HTTP_HOST and
SENTINEL_HTTP_PORT. The image has no curl, and this imports nothing of weight.
"""

from __future__ import annotations

import http.client
import os
import sys
from collections.abc import Mapping

SECONDS = 5.0
ANSWER_BYTES = 300


def main(arguments: list[str], environment: Mapping[str, str]) -> int:
    """Ask once; returns the exit code."""
    path = arguments[0] if arguments else "/healthz"
    # The addresses that mean every network of a machine also lead to the machine itself.
    host = environment.get("SENTINEL_HTTP_HOST") or "127.0.0.1"
    port = environment.get("SENTINEL_HTTP_PORT") or "0"
    if not port.isdigit() or not 0 < int(port) < 65536:
        print("SENTINEL_HTTP_PORT has to be a fixed port", file=sys.stderr)
        return 1
    connection = http.client.HTTPConnection(host, int(port), timeout=SECONDS)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        print(answer.read(ANSWER_BYTES).decode(errors="replace").strip())
    except (OSError, http.client.HTTPException) as error:
        print(f"no answer from {host} port {port}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    finally:
        connection.close()
    return 0 if answer.status == http.client.OK else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
