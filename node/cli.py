"""The ``sentinel`` command. Parses, and hands over; heavy imports happen inside the commands."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from node.admit_cli import admit
from node.cli_options import (
    device_option,
    invite_file_option,
    invited,
    node_options,
    option,
    read_manifest,
    state_option,
)
from node.drill_names import CONDUCT_ATTACKS, TENSOR_ATTACKS
from node.init_cli import init
from node.malloc import one_pool
from node.version import VERSION
from protocol.errors import PreflightError, SentinelError, UsageError

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(context_settings=CONTEXT)
@click.version_option(VERSION, prog_name="sentinel", message="%(prog)s %(version)s")
def cli() -> None:
    """Train one language model together with strangers, some of whom cheat.

    \b
    Example:  sentinel demo                          see it all on this machine
              sentinel init && sentinel coordinate   start a swarm
              sentinel join INVITE                   take part in one
    """


@cli.command()
@option("--stages", type=click.IntRange(2, 16), default=3, help="Pipeline stages.")
@option("--replicas", type=click.IntRange(1, 16), default=2, help="Honest replicas of each stage.")
@option("--steps", type=click.IntRange(1, 100000), default=60, help="Training steps.")
@option(
    "--drill",
    "drills",
    multiple=True,
    metavar="ATTACK:STAGE",
    show_default=False,
    help="An extra node of STAGE that attacks; may be repeated. [default: sign-flip in the middle stage]",
)
@option("--no-drill", is_flag=True, help="No attacker at all.")
@option("--drill-from", type=click.IntRange(0), default=20, help="Step at which attacks begin.")
@option(
    "--json",
    "json_path",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default=False,
    help="Write the result to this file.",
)
@option("--keep", is_flag=True, help="Keep the nodes' state folders and logs.")
@option("--plain", is_flag=True, help="Lines instead of a live view.")
def demo(**options: Any) -> None:
    """Run a real swarm on this machine, with a cheating node that gets thrown out.

    Starts a coordinator and node processes that talk over encrypted loopback streams, shows
    what happens, and cleans up after itself. Exits 0 only if every step was trained, the
    loss fell, every attacker was ejected and no honest node was.

    \b
    Example:  sentinel demo --steps 30 --drill random:1 --json result.json
    """
    from node.demo import DemoOptions, run_demo

    target = options["json_path"]
    if target is not None and not target.absolute().parent.is_dir():
        raise UsageError(f"--json: the folder {target.absolute().parent} does not exist; make it first")
    if options.pop("no_drill"):
        if options["drills"]:
            raise UsageError("--drill and --no-drill contradict each other; leave one out")
        options["drills"] = None
    raise SystemExit(run_demo(DemoOptions(**options)))


cli.add_command(init)


@cli.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), default=Path("swarm.toml"))
@node_options
@invite_file_option("Write the invite to this file as well, for join --invite-file.")
def coordinate(path: Path, **options: Any) -> None:
    """Start a swarm from its manifest, and print the invite for volunteers.

    The coordinator trains nothing; once nodes have joined, training goes on without it.

    \b
    Example:  sentinel coordinate swarm.toml --port 31330
    """
    _run_node(manifest=read_manifest(path), **options)


cli.add_command(admit)


@cli.command()
@click.argument("invite", required=False, envvar="SENTINEL_INVITE")
@node_options
@option(
    "--stage",
    type=click.IntRange(0, 127),
    show_default=False,
    help="Claim this stage [default: the one that needs a node most].",
)
@device_option
@option(
    "--threads",
    envvar="SENTINEL_THREADS",
    type=click.IntRange(0, 1024),
    default=0,
    help="Compute threads; 0 lets torch choose.",
)
@option(
    "--drill",
    default="",
    metavar="ATTACK",
    show_default=False,
    help=f"Attack the swarm on purpose, where its manifest allows drills: {', '.join(TENSOR_ATTACKS)}, also with "
    f"gradient- or both- before it; {', '.join(CONDUCT_ATTACKS)}.",
)
@option("--drill-from", type=click.IntRange(0), default=0, help="Step at which the attack begins.")
@option(
    "--checkpoints",
    envvar="SENTINEL_CHECKPOINTS",
    type=click.IntRange(0, 1000),
    default=2,
    help="Newest checkpoints of the stage to keep in the state folder; 0 writes none.",
)
@option(
    "--copies-gib",
    envvar="SENTINEL_COPIES_GIB",
    type=click.FloatRange(0, 1e6),
    default=4.0,
    help="Disk, in GiB, for copies of other stages' checkpoints; 0 keeps none.",
)
@option("--exit-when-done", is_flag=True, help="Leave after the last step instead of holding the model.")
@invite_file_option("Take the invite from this file.")
def join(invite: str | None, invite_file: Path | None, **options: Any) -> None:
    """Join a swarm with an invite, and train.

    INVITE is the line that the coordinator printed (or set SENTINEL_INVITE). Ctrl-C leaves
    politely; a second Ctrl-C leaves at once.

    \b
    Example:  sentinel join sentinel://SWARM_ID/ip4/192.0.2.7/tcp/31330/p2p/PEER_ID
    """
    from node.drill_names import check_drill_name

    parsed = invited(invite, invite_file)
    if options["drill"]:
        check_drill_name(options["drill"])
    _run_node(invite=parsed, **options)


def _hear_sigterm() -> None:
    """End at once on SIGTERM, until the event loop has its own handler.

    Until then the first process of a container would not even hear it, for which the kernel wants a handler; there is
    nothing to undo yet.
    """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))


def _run_node(*, state_dir: Path | None, log_format: str, log_level: str, **options: Any) -> None:
    from node.admit import check_coordinator
    from node.settings import NodeSettings
    from node.state_folder import StateFolder
    from protocol.identity import Identity

    settings = NodeSettings(state_dir=StateFolder.resolve(state_dir), **options)
    with StateFolder(settings.state_dir) as folder:
        identity = Identity.load_or_create(folder.identity_path)
        if settings.manifest is not None:
            check_coordinator(settings.manifest, identity, folder.path)
        _hear_sigterm()
        one_pool()
        # This takes in torch and hivemind: seconds, for which no mistake above need wait.
        from node.run import run_node

        run_node(settings, folder, identity, log_format=log_format, log_level=log_level)


@cli.command()
@click.argument("invite", required=False, envvar="SENTINEL_INVITE")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
@option("--timeout", "seconds", type=click.FloatRange(0.1, 600), default=5.0, help="Seconds to wait for an answer.")
@option("--watch", is_flag=True, help="Ask all nodes again and again and show a live table, until Ctrl-C.")
@option("--interval", type=click.FloatRange(0.5, 3600), default=2.0, help="Seconds between pictures of --watch.")
@invite_file_option("Take the invite from this file.")
def status(
    invite: str | None, invite_file: Path | None, as_json: bool, seconds: float, watch: bool, interval: float
) -> None:
    """Show a swarm: stages, replicas, steps, loss, accusations.

    Without --watch one node is asked, once. With it all are, and on no terminal each round is one line.

    \b
    Example:  sentinel status sentinel://SWARM_ID/ip4/192.0.2.7/tcp/31330/p2p/PEER_ID
              sentinel status "$INVITE" --watch
    """
    if watch and as_json:
        raise UsageError("--watch and --json contradict each other; sentinel observe serves JSON all the time")
    parsed = invited(invite, invite_file)
    if watch:
        from node.observing.watching import watch_swarm

        watch_swarm(parsed, interval=interval)
        return
    from node.swarm_status import look, render

    found = look(parsed, seconds=seconds)
    click.echo(json.dumps(found, indent=2) if as_json else render(found))


@cli.command()
@click.argument("invite", required=False, envvar="SENTINEL_INVITE")
@option("--http-host", envvar="SENTINEL_HTTP_HOST", default="127.0.0.1", help="Address for the page and the metrics.")
@option(
    "--http-port",
    envvar="SENTINEL_HTTP_PORT",
    type=click.IntRange(0, 65535),
    default=0,
    help="TCP port for the page and the metrics; 0 chooses a free one.",
)
@option("--interval", type=click.FloatRange(1, 3600), default=5.0, help="Seconds between rounds of questions.")
@option("--log-format", type=click.Choice(["text", "json"]), default="text", help="How to log.")
@option(
    "--log-level", type=click.Choice(["debug", "info", "warning", "error"]), default="info", help="How much to log."
)
@invite_file_option("Take the invite from this file.")
def observe(invite: str | None, invite_file: Path | None, **options: Any) -> None:
    """Watch a whole swarm from outside: a live page, and metrics for Prometheus.

    Asks all nodes how far they are and joins nothing, so it needs no GPU and little memory. Prints the address of the
    page; /metrics and /status are there too. Ctrl-C ends it.

    \b
    Example:  sentinel observe "$INVITE" --http-port 9465
    """
    parsed = invited(invite, invite_file)
    _hear_sigterm()
    from node.observing.run import observe as run_observer

    run_observer(parsed, **options)


@cli.command()
@click.argument("invite", required=False, envvar="SENTINEL_INVITE")
@state_option
@option("--host", envvar="SENTINEL_HOST", default="0.0.0.0", help="Address that the node would listen on.")
@option(
    "--port", envvar="SENTINEL_PORT", type=click.IntRange(0, 65535), default=0, help="TCP port for peers; 0 for any."
)
@option("--http-host", envvar="SENTINEL_HTTP_HOST", default="127.0.0.1", help="Address for metrics and status.")
@option(
    "--http-port",
    envvar="SENTINEL_HTTP_PORT",
    type=click.IntRange(0, 65535),
    default=0,
    help="TCP port for metrics and status; 0 for any.",
)
@device_option
@option("--timeout", "seconds", type=click.FloatRange(0.1, 600), default=20.0, help="Seconds for the swarm's answers.")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
@invite_file_option("Take the invite from this file.")
def doctor(invite: str | None, invite_file: Path | None, state_dir: Path | None, as_json: bool, **options: Any) -> None:
    """Look whether a node would work on this machine, and say what to do where not.

    Changes nothing and joins nothing. With an INVITE the swarm is asked as well: whether it is there, whether its
    nodes can connect to this machine, whether its stages fit. Exits 5 if a node would not work.

    \b
    Example:  sentinel doctor
              sentinel doctor sentinel://SWARM_ID/ip4/192.0.2.7/tcp/31330/p2p/PEER_ID --port 31331
    """
    parsed = invited(invite, invite_file) if invite or invite_file else None
    from node.doctor import Plan, examine
    from node.findings import as_dict, render, works
    from node.state_folder import StateFolder

    found = examine(Plan(state_dir=StateFolder.resolve(state_dir), invite=parsed, **options))
    click.echo(json.dumps(as_dict(found), indent=2) if as_json else render(found))
    if not works(found):
        raise SystemExit(PreflightError.exit_code)


@cli.command()
@click.argument("invite", required=False)
@option(
    "--state-dir",
    "state_dirs",
    envvar="SENTINEL_STATE_DIR",
    multiple=True,
    type=click.Path(path_type=Path),
    show_default=False,
    help="State folder of a node, of which checkpoints/ is enough; may be repeated, until every stage is there "
    "[default: the platform's data folder].",
)
@option("--out", type=click.Path(path_type=Path), required=True, help="Folder to make.")
@option("--step", type=click.IntRange(1), show_default=False, help="[default: the newest that every stage has]")
@option("--swarm", default="", show_default=False, help="Beginning of the swarm's id, where there are several.")
@option("--timeout", type=click.FloatRange(0.1, 600), default=10.0, help="Seconds for the swarm's first answer.")
@option("--json", "as_json", is_flag=True, help="Print JSON.")
@option(
    "--invite-file",
    type=click.Path(path_type=Path, dir_okay=False),
    show_default=False,
    help="Take the invite from this file.",
)
def export(
    invite: str | None,
    invite_file: Path | None,
    state_dirs: tuple[Path, ...],
    out: Path,
    step: int | None,
    swarm: str,
    timeout: float,
    as_json: bool,
) -> None:
    """Put the checkpoints of all stages together as a model that transformers loads.

    Makes a folder with config.json, model.safetensors and the tokenizer. With an INVITE the checkpoints are fetched
    from the nodes of a live swarm; without one they are taken from state folders on this machine. The nodes may go
    on meanwhile.

    \b
    Example:  sentinel export sentinel://SWARM_ID/ip4/192.0.2.7/tcp/31330/p2p/PEER_ID --out model
              sentinel export --state-dir /data/node1 --state-dir /data/node2 --out model
    """
    from node.state_folder import StateFolder

    parsed = invited(invite, invite_file) if invite or invite_file else None
    named = click.get_current_context().get_parameter_source("state_dirs") is ParameterSource.COMMANDLINE
    if parsed is not None and (named or swarm):
        raise UsageError("an invite and --state-dir or --swarm exclude each other; leave one out")
    folders = [StateFolder.resolve(path) for path in state_dirs or (None,)]
    if parsed is None and (missing := [path for path in folders if not path.is_dir()]):
        raise UsageError(
            f"--state-dir: there is no folder {missing[0]}; name the state folder of a node, or give an invite to fetch"
            " the checkpoints of a live swarm"
        )
    from node.export import check_free, export_model

    def tell(text: str) -> None:
        click.echo(text, err=True)

    check_free(out)
    with contextlib.ExitStack() as stack:
        if parsed is not None:
            from node.export_live import fetch_swarm

            # Beside the model, since there is room there for something as large.
            place = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=out.absolute().parent, prefix=".export-")))
            folders = [fetch_swarm(parsed, place / "state", step=step, seconds=timeout, tell=tell).path]
        done = export_model(folders, out, swarm=swarm, step=step, tell=tell if parsed is None else lambda text: None)
    if as_json:
        facts = {"folder": str(done.folder), "swarm": done.swarm, "name": done.name, "step": done.step}
        sources = [] if parsed is not None else list(map(str, done.sources))  # fetched ones are gone by now
        click.echo(json.dumps(facts | {"parameters": done.parameters, "checkpoints": sources}))
        return
    click.echo(f"wrote {done.folder}: {done.name} after {done.step} steps, {done.parameters:,} parameters")
    click.echo(f"load it with transformers.AutoModelForCausalLM.from_pretrained({str(done.folder)!r})")


@cli.group()
def identity() -> None:
    """Show, export or import this machine's node identity.

    \b
    Example:  sentinel identity show
    """


@identity.command("show")
@state_option
def identity_show(state_dir: Path | None) -> None:
    """Print the peer id and where its key is.

    \b
    Example:  sentinel identity show
    """
    from node.state_folder import StateFolder
    from protocol.identity import Identity

    path = StateFolder.resolve(state_dir) / "identity.key"
    click.echo(f"{Identity.load(path).peer_id}  {path}")


@identity.command("export")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@state_option
def identity_export(path: Path, state_dir: Path | None) -> None:
    """Copy the key to a file that only you can read. Whoever has it is this node.

    \b
    Example:  sentinel identity export backup.key
    """
    from node.state_folder import StateFolder
    from protocol.identity import Identity

    found = Identity.load(StateFolder.resolve(state_dir) / "identity.key")
    found.save(path)
    click.echo(f"exported {found.peer_id} to {path}; keep it secret")


@identity.command("import")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False, exists=True))
@state_option
def identity_import(path: Path, state_dir: Path | None) -> None:
    """Use an exported key on this machine; refuses to replace one.

    \b
    Example:  sentinel identity import backup.key
    """
    from node.state_folder import StateFolder
    from protocol.identity import Identity

    found = Identity.load(path)
    target = StateFolder.resolve(state_dir) / "identity.key"
    found.save(target)
    click.echo(f"imported {found.peer_id} to {target}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code. Errors are one line on stderr."""
    try:
        result = cli.main(args=arguments, prog_name="sentinel", standalone_mode=False)
    except click.exceptions.Abort:
        return 130
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return error.exit_code
    except click.ClickException as error:
        print(f"sentinel: {' '.join(error.format_message().split())}", file=sys.stderr)
        return error.exit_code
    except SentinelError as error:
        print(f"sentinel: {' '.join(str(error).split())}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever reads has enough, as in `sentinel status ... | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        logging.getLogger(__name__).debug("ended by an error of the system", exc_info=True)
        where = f": {error.filename}" if error.filename else ""
        print(f"sentinel: {error.strerror or error}{where}", file=sys.stderr)
        return 1
    except SystemExit as leave:
        return leave.code if isinstance(leave.code, int) else 1
    return result if isinstance(result, int) else 0
