"""What several commands of ``sentinel`` share: options, and how an invite is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from protocol.errors import InviteError, ManifestError, UsageError

if TYPE_CHECKING:
    from protocol.invite import Invite
    from protocol.manifest import Manifest


def option(*names: str, **keywords: Any) -> Callable[[Any], Any]:
    """An option whose help names its default."""
    return click.option(*names, show_default=keywords.pop("show_default", True), **keywords)


state_option = option(
    "--state-dir",
    envvar="SENTINEL_STATE_DIR",
    type=click.Path(path_type=Path),
    show_default=False,
    help="Folder for identity and state [default: the platform's data folder].",
)
device_option = option("--device", envvar="SENTINEL_DEVICE", default="auto", help="auto, cpu, cuda or cuda:N.")


def node_options(command: Any) -> Any:
    """Options that every long-running node takes."""
    for add in reversed(
        (
            state_option,
            option("--host", envvar="SENTINEL_HOST", default="0.0.0.0", help="Address to listen on for peers."),
            option(
                "--port",
                envvar="SENTINEL_PORT",
                type=click.IntRange(0, 65535),
                default=0,
                help="TCP port for peers; 0 chooses a free one.",
            ),
            option(
                "--announce",
                envvar="SENTINEL_ANNOUNCE",
                multiple=True,
                show_default=False,
                help="Multiaddr (/ip4/…/tcp/…) to announce instead of the listening ones; may be repeated.",
            ),
            option("--reach/--no-reach", default=True, help="Use NAT port mapping and relays."),
            option(
                "--http-host", envvar="SENTINEL_HTTP_HOST", default="127.0.0.1", help="Address for metrics and status."
            ),
            option(
                "--http-port",
                envvar="SENTINEL_HTTP_PORT",
                type=click.IntRange(0, 65535),
                default=0,
                help="TCP port for metrics and status; 0 chooses a free one.",
            ),
            option(
                "--label",
                envvar="SENTINEL_LABEL",
                default="",
                show_default=False,
                help="A name for this node that people see.",
            ),
            option("--log-format", type=click.Choice(["text", "json"]), default="text", help="How to log."),
            option(
                "--log-level",
                type=click.Choice(["debug", "info", "warning", "error"]),
                default="info",
                help="How much to log.",
            ),
            click.option("--ready-fd", type=click.IntRange(3), hidden=True),
        )
    ):
        command = add(command)
    return command


def invite_file_option(what: str) -> Callable[[Any], Any]:
    """The file of the invite, which ``coordinate`` writes and the others read."""
    return option(
        "--invite-file",
        envvar="SENTINEL_INVITE_FILE",
        type=click.Path(path_type=Path, dir_okay=False),
        show_default=False,
        help=what,
    )


def invited(invite: str | None, file: Path | None) -> Invite:
    """The invite: the argument, else SENTINEL_INVITE, else the file's."""
    from protocol.invite import parse_invite

    context = click.get_current_context()
    spoken = [context.get_parameter_source(name) is ParameterSource.COMMANDLINE for name in ("invite", "invite_file")]
    if all(spoken):
        raise UsageError("INVITE and --invite-file contradict each other; leave one out")
    if file is not None and (not invite or spoken[1]):
        from node.invite_file import read_invite_file

        invite = read_invite_file(file)
    if not invite:
        raise InviteError(
            f"an invite is needed: sentinel {context.info_name} INVITE, or set SENTINEL_INVITE or SENTINEL_INVITE_FILE"
        )
    return parse_invite(invite)


def read_manifest(path: Path) -> Manifest:
    """The manifest in a file. Raises ManifestError if it cannot be read, or is none."""
    from protocol.manifest import Manifest

    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ManifestError(f"cannot read {path}: {reason}; write one with: sentinel init {path}") from None
    return Manifest.from_toml(text)
