"""Runs one node in this process: logging, limits, event loop."""

from __future__ import annotations

import resource

import uvloop

from node.daemon import Node
from node.device import choose_device, limit_threads
from node.log import configure_logging
from node.settings import NodeSettings
from node.state_folder import StateFolder
from protocol.identity import Identity


def run_node(
    settings: NodeSettings, folder: StateFolder, identity: Identity, *, log_format: str, log_level: str
) -> None:
    """Run a node until it is done or leaves. ``folder`` is open, and stays so.

    Raises:
        SentinelError: why it ended, where that was not wanted.
    """
    configure_logging(log_format, log_level)
    raise_file_limit()
    limit_threads(settings.threads)
    if not settings.coordinates:
        choose_device(settings.device)  # a wrong word is told before anything else is done

    async def main() -> None:
        node = Node(settings, folder, identity)
        node.handle_signals()
        await node.run()

    uvloop.run(main())


def raise_file_limit() -> None:
    """Allow as many open files as the system lets this process have: each peer costs a few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
