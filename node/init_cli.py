"""``sentinel init``: a manifest from a few questions or from flags, and what it will ask of volunteers."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from node.cli_options import option, state_option
from protocol.errors import ManifestError, UsageError

if TYPE_CHECKING:
    from protocol.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One of the choices, as it is asked on a terminal."""

    name: str
    text: str
    why: str


QUESTIONS = (
    Question(name="name", text="Name", why="What volunteers see."),
    Question(name="width", text="Width", why="Numbers that stand for one token: more makes a larger, slower model."),
    Question(name="layers", text="Layers", why="Transformer layers in all; they are spread over the stages."),
    Question(
        name="stages",
        text="Stages",
        why="Parts that the model is cut into. More means less memory for each node, and more traffic.",
    ),
    Question(name="heads", text="Attention heads", why="Divides the width; 32 to 128 numbers a head are usual."),
    Question(
        name="data", text="Data", why="stdlib for a try without download, or file:PATH, the same file on every node."
    ),
    Question(name="steps", text="Steps", why="Optimizer steps until the training ends; 0 has no end."),
    Question(
        name="min_replicas",
        text="Replicas of each stage",
        why="Nodes that each stage waits for before the start; from 3 on, one that lies is outvoted.",
    ),
)


@click.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False), default=Path("swarm.toml"))
@option("--name", default="my-swarm", help="The swarm's name.")
@option("--stages", type=click.IntRange(1, 128), default=3, help="Pipeline stages.")
@option("--layers", type=click.IntRange(1, 512), default=6, help="Layers of the model.")
@option("--width", type=click.IntRange(2, 65536), default=128, help="Width of the model.")
@option("--heads", type=click.IntRange(1, 1024), default=4, help="Attention heads.")
@option("--kv-heads", type=click.IntRange(1, 1024), default=2, help="Key/value heads.")
@option("--steps", type=click.IntRange(0), default=0, help="Training steps; 0 has no end.")
@option("--data", default="stdlib", help="stdlib, or file:PATH.")
@option("--min-replicas", type=click.IntRange(1, 256), default=1, help="Replicas of each stage before the start.")
@option("--allow-drills", is_flag=True, help="Let nodes join as attackers for practice.")
@option("--invited", is_flag=True, help="Admit only peers for whom this machine's identity has run `sentinel admit`.")
@state_option
@option("--force", is_flag=True, help="Overwrite the file.")
@option("--yes", is_flag=True, help="Ask nothing; what is not given takes its default.")
@option("--json", "as_json", is_flag=True, help="Print what the swarm asks as JSON; asks nothing.")
def init(
    path: Path, invited: bool, state_dir: Path | None, force: bool, yes: bool, as_json: bool, **choices: Any
) -> None:
    """Write a commented swarm.toml, the manifest of a new swarm, and say what it asks of volunteers.

    On a terminal and without options it asks what matters; with any option of the model, or --yes, it asks nothing.

    \b
    Example:  sentinel init
              sentinel init --name tiny --stages 3 --layers 6
              sentinel init --invited
              sentinel init large.toml --width 1024 --layers 24 --heads 16 --json
    """
    from node.estimate import describe, estimate
    from node.initialise import coordinator_here, new_manifest

    if path.exists() and not force:
        raise UsageError(f"{path} exists already; use --force to overwrite it, or name another file")
    coordinator = coordinator_here(state_dir) if invited else ""
    make = partial(new_manifest, coordinator=coordinator)
    asks = not (yes or as_json or _chosen(choices)) and sys.stdin.isatty() and sys.stdout.isatty()
    manifest, text = _ask(choices, make) if asks else make(**choices)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}; name another file") from None
    found = estimate(manifest)
    if as_json:
        click.echo(json.dumps({"file": str(path), **found.as_dict()}, indent=2))
        return
    click.echo(f"wrote {path}")
    click.echo(describe(found))
    click.echo(f"next: edit it if you like, then run: sentinel coordinate {path}")
    if invited:
        click.echo(
            f"only {coordinator}, the identity here, can coordinate it; for each volunteer: sentinel admit PEER_ID"
        )


def _chosen(choices: dict[str, Any]) -> bool:
    """Whether any of the choices was made on the command line."""
    context = click.get_current_context()
    return any(context.get_parameter_source(name) is not ParameterSource.DEFAULT for name in choices)


def _ask(choices: dict[str, Any], new_manifest: Callable[..., tuple[Manifest, str]]) -> tuple[Manifest, str]:
    """Ask until the answers fit together; what was answered is the default of the next round."""
    kinds = {parameter.name: parameter.type for parameter in click.get_current_context().command.params}
    click.echo("A new swarm. Enter takes what is in brackets; everything else can be edited in the file.")
    while True:
        for question in QUESTIONS:
            click.secho(f"\n{question.why}", dim=True)
            choices[question.name] = click.prompt(
                question.text, default=choices[question.name], type=kinds[question.name]
            )
        # Half as many key and value heads as heads, as the defaults have it, where that is possible.
        heads = choices["heads"]
        choices["kv_heads"] = heads // 2 if heads % 2 == 0 else heads
        click.echo()
        try:
            return new_manifest(**choices)
        except ManifestError as error:
            click.secho(f"That does not work: {error}. Once more:", fg="yellow")
