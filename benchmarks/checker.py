"""What the checker costs a node for one microbatch and direction, on one thread."""

from __future__ import annotations

import torch

from benchmarks._timing import median_seconds
from verifier.config import CheckerConfig
from verifier.guards import check_tensor
from verifier.sentinel import BoundaryChecker
from verifier.sketch import KEY_BYTES, sketch
from verifier.verdicts import Direction

SHAPE = (4, 1024, 1024)
"""Sequences, tokens, width."""

SKETCH_VALUES = 256


def run() -> dict[str, float]:
    """Milliseconds of the guards, of the sketch, and of the statistics with a baseline in place."""
    generator = torch.Generator().manual_seed(0)
    checker = BoundaryChecker(CheckerConfig(warmup_steps=1), Direction.ACTIVATION, seed=1)
    tensor = torch.randn(SHAPE, generator=generator)
    key = bytes(KEY_BYTES)
    mine = sketch(tensor, key=key, size=SKETCH_VALUES)
    for step in range(2):
        judgement = checker.judge(tensor, step=step, sketch=mine, input_sketch=mine)
        checker.accept(judgement.observation)
        checker.end_step(step)
    work = {
        "guards_ms": lambda: check_tensor(tensor, shape=SHAPE, dtype=torch.float32),
        "sketch_ms": lambda: sketch(tensor, key=key, size=SKETCH_VALUES),
        "statistics_ms": lambda: checker.judge(tensor, step=2, sketch=mine, input_sketch=mine),
    }
    return {name: round(1000 * median_seconds(call), 2) for name, call in work.items()}
