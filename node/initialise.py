"""A new manifest from a few choices, as ``sentinel init`` makes it."""

from __future__ import annotations

from typing import Any

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
) -> tuple[Manifest, str]:
    """The manifest and its commented text.

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
    }
    manifest = Manifest.from_mapping(values)
    return manifest, render(manifest)
