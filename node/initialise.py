"""A new manifest from a few choices, as ``sentinel init`` makes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from node.state_folder import StateFolder
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.manifest_template import render


def new_manifest(
    *,
    name: str,
    stages: int,
    layers: int,
    width: int,
    heads: int,
    kv_heads: int,
    steps: int,
    data: str,
    min_replicas: int,
    allow_drills: bool,
    coordinator: str = "",
) -> tuple[Manifest, str]:
    """The manifest and its commented text. ``coordinator``: peer id of whoever admits; empty if all may join.

    Raises:
        ManifestError: the choices contradict each other.
    """
    floor, extra = divmod(layers, stages)
    per_stage = [floor + (1 if stage < extra else 0) for stage in range(stages)]
    values: dict[str, Any] = {
        "name": name,
        "model": {
            "layers": layers,
            "width": width,
            "heads": heads,
            "kv_heads": kv_heads,
            # SwiGLU's usual 8/3 of the width, rounded up to a multiple of 32.
            "ffn": -(-8 * width // 3 // 32) * 32,
        },
        "stages": {"layers_per_stage": per_stage, "min_replicas": min_replicas},
        "training": {"steps": steps},
        "data": {"source": data},
        "verifier": {"allow_drills": allow_drills},
        "admission": {"mode": "invited" if coordinator else "open", "coordinator": coordinator},
    }
    manifest = Manifest.from_mapping(values)
    return manifest, render(manifest)


def coordinator_here(state_dir: Path | None) -> str:
    """The peer id of this machine's identity, which is made if there is none.

    Raises:
        IdentityError, StateFolderError: it cannot be read or made.
    """
    folder = StateFolder.resolve(state_dir)
    return Identity.load_or_create(StateFolder(folder).identity_path).peer_id
