"""The memory that ``sentinel init`` promises is what a real node takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from node.estimate import stage_memory
from tests.swarm.harness import running, small_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]


async def test_the_peak_of_a_real_node_is_near_the_estimate(tmp_path: Path) -> None:
    """A stage large enough to outweigh the program: 24 million parameters."""
    model = {"width": 1024, "layers": 2, "heads": 8, "kv_heads": 8, "ffn": 2560, "context": 32}
    manifest = small_manifest(
        model=model,
        stages={"layers_per_stage": [2]},
        training={"steps": 3, "sequences_per_step": 4, "sequences_per_microbatch": 2},
    )
    async with running(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        (node,) = await swarm.fill(1, "--exit-when-done", "--checkpoints", "0")
        (summary,) = await swarm.all_end([node], seconds=240)
    memory = stage_memory(manifest, 0)
    assert memory.parameters > 90 << 20
    assert 0.7 * memory.total <= summary["peak_memory_bytes"] <= memory.total
    assert summary["probe"]["peak_bytes"] <= memory.stage
    assert summary["probe"]["in_flight"] == manifest.network.in_flight
