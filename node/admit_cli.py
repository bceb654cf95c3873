"""``sentinel admit``: who may take part in an invited swarm."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from node.cli_options import option, read_manifest, state_option
from protocol.errors import UsageError


@click.command()
@click.argument("peer_id", required=False)
@option("--days", type=click.IntRange(1, 365), default=30, help="Days until the admission ends; renew it before.")
@option("--revoke", is_flag=True, help="Take the admission back; the swarm drops the node within seconds.")
@option("--list", "show", is_flag=True, help="Show whom this coordinator has admitted.")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
@option(
    "--manifest",
    "path",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("swarm.toml"),
    help="The swarm's manifest.",
)
@state_option
def admit(
    peer_id: str | None, days: int, revoke: bool, show: bool, as_json: bool, path: Path, state_dir: Path | None
) -> None:
    """Admit a volunteer to an invited swarm, by the peer id that its `sentinel join` prints.

    Run it on the coordinator's machine, with its state folder; the coordinator may be running. Admitting a peer again
    renews its admission.

    \b
    Example:  sentinel admit 12D3KooWA4Xop1JaT3MHwxYMkCepYsv4iPVopMXwCz5iHYdBfeSB --days 60
              sentinel admit 12D3KooWA4Xop1JaT3MHwxYMkCepYsv4iPVopMXwCz5iHYdBfeSB --revoke
              sentinel admit --list
    """
    from node.state_folder import StateFolder

    if show and (peer_id or revoke):
        raise UsageError("--list takes no PEER_ID and no --revoke; leave them out")
    if not show and not peer_id:
        raise UsageError("a peer id is needed: sentinel admit PEER_ID, as `sentinel join` prints it on the volunteer's")
    folder = StateFolder.resolve(state_dir)
    if show:
        _show(folder, path, as_json=as_json)
    elif peer_id:
        _sign(folder, path, peer_id, days=days, revoke=revoke, as_json=as_json)


def _sign(folder: Path, path: Path, peer: str, *, days: int, revoke: bool, as_json: bool) -> None:
    from node import admit as work
    from node.state_folder import StateFolder
    from protocol.identity import public_key_of

    public_key_of(peer)  # says what is wrong with a peer id that is none
    manifest = read_manifest(path)
    signed = work.sign(folder, manifest, peer, days=days, revoke=revoke, now=time.time())
    running = StateFolder(folder).in_use()
    if as_json:
        click.echo(json.dumps(_facts(signed.admission, "revoked" if revoke else "admitted") | {"running": running}))
        return
    if revoke:
        click.echo(f"revoked the admission of {peer} to swarm {manifest.name!r}; it was {signed.before} before")
    else:
        click.echo(f"admitted {peer} to swarm {manifest.name!r} until {_local(signed.admission.expires)}")
    if not running:
        click.echo(f"next: start the coordinator, which tells the swarm: sentinel coordinate {path}")
    elif revoke:
        click.echo(
            "the coordinator that runs here tells the swarm within seconds, and the node leaves with exit code 4"
        )
    else:
        click.echo("the coordinator that runs here tells the swarm within seconds; a node that waits then goes on")


def _show(folder: Path, path: Path, *, as_json: bool) -> None:
    from node import admit as work

    found = work.listed(folder, read_manifest(path), now=time.time())
    if as_json:
        click.echo(json.dumps([_facts(admission, standing) for admission, standing in found], indent=2))
        return
    if not found:
        click.echo("nobody is admitted yet; next: sentinel admit PEER_ID, as `sentinel join` prints it")
    for admission, standing in found:
        ends = f"since {_local(admission.issued)}" if admission.revoked else f"until {_local(admission.expires)}"
        click.echo(f"{admission.peer}  {standing:<8}  {ends}")


def _facts(admission: object, standing: str) -> dict[str, object]:
    from protocol.admissions import Admission

    assert isinstance(admission, Admission)
    return {
        "peer": admission.peer,
        "standing": str(standing),
        "serial": admission.serial,
        "issued": admission.issued,
        "expires": admission.expires,
    }


def _local(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment))
