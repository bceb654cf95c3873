"""A swarm computes what one process computes, and siblings never differ in a bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.reference import train_reference
from tests.swarm.harness import running, small_manifest

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(300)]


async def test_three_stages_of_two_replicas_match_one_process_for_twenty_steps(tmp_path: Path) -> None:
    # The fences stay in their warm-up: an honest but unusual microbatch that one of them flags is trained a
    # second time elsewhere, and then counts twice, which is right but not exact.
    manifest = small_manifest(stages={"min_replicas": 2}, verifier={"warmup_steps": 20})
    async with running(tmp_path, manifest) as swarm:
        await swarm.coordinate()
        nodes = await swarm.fill(2, "--exit-when-done")
        summaries = await swarm.all_end(nodes)
    assert [node.process.returncode for node in nodes] == [0] * 6
    losses = dict(max((summary["losses"] for summary in summaries), key=len))
    expected = train_reference(manifest, 20)
    assert sorted(losses) == list(range(20))
    for step, loss in enumerate(expected):
        assert losses[step] == pytest.approx(loss, rel=1e-6), f"step {step}"
    for stage in range(3):
        one, other = (dict(summary["digests"]) for summary in summaries if summary["stage"] == stage)
        assert len(one) == 20
        assert one == other, f"the replicas of stage {stage} differ"
    assert all(summary["microbatches_lost"] == 0 for summary in summaries)
