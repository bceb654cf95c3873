"""When a flagged tensor is the microbatch's fault and nobody's lie. Pure.

Replicas of a stage have equal parameters, so from equal inputs they compute equal outputs. A tensor
that looks strange, but that a majority of the stage's replicas have sent alike, is what an honest
computation gives for this microbatch: a table of numbers in the middle of prose, say. One liar cannot
produce such agreement, and a majority of liars is beyond what any vote can repair.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

LIKENESS = 0.05
"""Largest relative distance of two sketches of the same tensor. Rounding on different hardware stays below
1 % even in bfloat16; two different microbatches, or a tensor and its corrupted copy, are near or above 100 %."""


def alike(one: Tensor, other: Tensor) -> bool:
    """Whether two sketches [size] describe the same tensor up to rounding."""
    scale = max(float(one.norm()), float(other.norm()))
    return bool((one - other).norm() <= LIKENESS * scale)


def contradicted(suspect: tuple[Tensor, Tensor | None], accepted: tuple[Tensor, Tensor | None]) -> bool:
    """Whether an accepted tensor shows that a flagged one of the same microbatch was wrong.

    Both are (sketch of the tensor, sketch of what its sender received, None at an end of the pipeline). Replicas
    that received the same and sent something else cannot both be right, and the flagged one is not the one to believe.
    """
    (output, received), (other_output, other_received) = suspect, accepted
    if (received is None) != (other_received is None):
        return False
    if received is not None and other_received is not None and not alike(received, other_received):
        return False
    return not alike(output, other_output)


def corroborated(sketches: Sequence[tuple[str, Tensor]], *, peer: str, replicas: int) -> tuple[str, ...]:
    """The peers, ``peer`` among them, that sent what it sent, if they are a majority; else nothing.

    ``sketches`` holds (sender, sketch) of every flagged tensor of one microbatch and direction, at least
    ``peer``'s own; ``replicas`` is the number of live replicas of the senders' stage. Two are needed in any case.
    """
    own = next(sketch for sender, sketch in reversed(sketches) if sender == peer)
    peers = tuple(sorted({sender for sender, sketch in sketches if alike(own, sketch)}))
    return peers if len(peers) >= 2 and 2 * len(peers) > replicas else ()
