"""What the checker says: directions, reasons and verdicts. Plain data, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Direction(StrEnum):
    """Which way a tensor crosses a stage boundary."""

    ACTIVATION = "activation"
    """Downstream: the output of a stage."""

    GRADIENT = "gradient"
    """Upstream: the gradient of the loss by that activation."""


class Reason(StrEnum):
    """Why a peer was flagged, struck or ejected. A closed set, so it can be a metric label."""

    # Guards: facts about one message, true or false without any history.
    SHAPE = "shape"
    DTYPE = "dtype"
    NON_FINITE = "non_finite"
    NORM = "norm"
    SIZE = "size"
    WRONG_STEP = "wrong_step"
    REPEATED = "repeated"
    ORIGIN = "origin"
    SKETCH = "sketch"
    RECEIPT = "receipt"

    # Statistics: one message against what the boundary has carried so far.
    L1 = "l1"
    L2 = "l2"
    SIGN_FLIP = "sign_flip"
    WASSERSTEIN = "wasserstein"
    CONTINUITY = "continuity"
    GAIN = "gain"

    # Conduct: how a peer behaves over time.
    UNFINISHED = "unfinished"
    CONTRADICTED = "contradicted"
    STALLED = "stalled"
    PARAMETERS = "parameters"
    FALSE_VOTE = "false_vote"
    REDUCTION = "reduction"
    EQUIVOCATION = "equivocation"
    PROTOCOL = "protocol"

    # Findings of the swarm: the kinds of an accusation.
    STRIKES = "strikes"
    AUDIT = "audit"


STATISTICS = frozenset({Reason.L1, Reason.L2, Reason.SIGN_FLIP, Reason.WASSERSTEIN, Reason.CONTINUITY, Reason.GAIN})
"""Reasons that come from a fence and can therefore hit an honest peer now and then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one tensor."""

    accepted: bool
    """False when the tensor must be neither used nor counted."""

    reasons: tuple[Reason, ...] = ()
    """Every test that failed; empty when accepted."""

    scores: Mapping[str, float] = field(default_factory=dict)
    """Distance over its fence, by the name of the statistic: above 1 is a flag. Statistics whose fence has
    too little history are left out."""

    warming_up: bool = False
    """True while the baseline is being built: only the guards can refuse a tensor yet."""
