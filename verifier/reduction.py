"""What the owner of a slice answers with, and how the others see that it is that.

The owner of a slice alone sees everybody's part of it. What it answers is a sum of the members' means, each times a
coefficient that follows from them (``aggregation``), and it tells the coefficients. So the others need not see the
parts: they ask each member for a *projection* of its own, with signs that they have drawn after the answers came, so
that nobody could have made an answer that fits them. Projections are linear, and true to inner products on average:

* The projection of the answer is the sum of coefficient times projection, up to rounding. If not, the owner has
  answered with something else, or a member has told of another part than it sent.
* The rule, applied to the inner products of the projections, gives about the coefficients that the owner told. If not,
  the owner may have chosen others, to count its friends alone.

Neither proves whose doing it is. The parts themselves do, which their members signed: whoever holds them reduces them
again, to the bit, and looks whose projection fits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from verifier.aggregation import Rule, capped_weights, coefficients, combine, partial_gram, rule_for

KEY_BYTES = 32

WIDTH = 1024
"""Entries of a projection, or as many as the slice has if these are fewer: then it is the slice itself, with other
signs. Cosines err by about 1/32, so that honest coefficients are told from others; sums need far less."""

SUM_TOLERANCE = 1e-4
"""Of the lengths of all that is added up. Rounding to float32 makes less than 1e-6 of it."""

RULE_TOLERANCE = 0.5
"""How far, in its own length, an aggregate may be from that which the projections' coefficients give. Who chooses the
coefficients can reach 2 with a flipped sign. A miss is no proof, and an alarm costs a look at the parts, so it is
well above what honest owners make: at most 0.36 with honest cosines of 0.1 and more, up to 1 with 0.02."""

_ROWS = 256
"""Of a vector, folded at a time: bounds the memory, and float32 adds up so many without harm."""


class Doubt(StrEnum):
    """Why the parts of a slice should be looked at."""

    SUM = "sum"
    """It is not the sum of coefficient times part."""

    RULE = "rule"
    """The coefficients are not those that the rule gives."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reduced:
    """A slice of the aggregate."""

    mean: Tensor
    """float32 [n]."""

    coefficients: tuple[float, ...]
    """What each member's mean gradient was multiplied with, in the order of the members; 0 without microbatches."""


def reduce_parts(parts: Sequence[Tensor], counts: Sequence[int], *, robust: bool) -> Reduced:
    """The aggregate of one slice: the same bits wherever it is computed, whoever's part arrived first.

    Args:
        parts: float32 [n] for each member, in their order; the gradient summed over its microbatches, all finite.
        counts: microbatches of each; the part of a member with none counts for nothing.
        robust: outliers among three members or more count less; else it is the mean over all microbatches.

    Returns:
        Zeros if nobody has trained a microbatch.

    Raises ValueError if there are not as many counts as parts.
    """
    means = _means(torch.stack(list(parts)), counts)
    found = _coefficients(means, counts, partial_gram, robust=robust)
    return Reduced(mean=combine(means, found), coefficients=tuple(found.tolist()))


def projection_width(entries: int, members: int) -> int:
    """Entries of a projection of each of ``members`` slices of a vector."""
    return max(1, min(WIDTH, -(-entries // members)))


def projections(vector: Tensor, members: int, *, key: bytes) -> Tensor:
    """A projection of each member's slice of a vector, float32 [members, width]; width is at most ``WIDTH``.

    Entry i of a slice, whichever, gets the sign of bit i of SHAKE-256 over the key and is added to entry i mod width.
    What float32 cannot hold becomes its largest value.

    Args:
        vector: float32 [n], on the CPU.
        members: slices; the first consists of the entries 0, ``members``, 2 ``members`` and so on.
        key: 32 bytes.
    """
    if len(key) != KEY_BYTES:
        raise ValueError(f"the key of a projection has {KEY_BYTES} bytes, got {len(key)}")
    length = -(-len(vector) // members)
    width = projection_width(len(vector), members)
    rows = -(-length // width)
    signs = _signs(key, rows * width).view(rows, width, 1)
    total = torch.zeros(width, members, dtype=torch.float64)
    for start in range(0, rows, _ROWS):
        chunk = vector[start * width * members : (start + _ROWS) * width * members]
        held = -(-len(chunk) // (width * members))
        if len(chunk) < held * width * members:  # the end of the vector
            chunk = torch.nn.functional.pad(chunk, (0, held * width * members - len(chunk)))
        total += (chunk.view(held, width, members) * signs[start : start + held]).sum(dim=0)
    largest = torch.finfo(torch.float32).max
    return total.T.clamp(-largest, largest).float()


def doubt(
    answer: Tensor, told: Tensor, counts: Sequence[int], coefficients: Sequence[float], *, robust: bool
) -> Doubt | None:
    """Whether what the owner of a slice answered is what it should be, as far as projections tell.

    Args:
        answer: float32 [width], the projection of what it answered.
        told: float32 [members, width], projections of the parts, as their members told them; sums, like these.
        counts, robust: as in ``reduce_parts``.
        coefficients: which the owner told, one for each member.

    Raises ValueError if there are not as many counts or coefficients as members.
    """
    if len(coefficients) != len(told):
        raise ValueError(f"{len(coefficients)} coefficients for {len(told)} members")
    means = _means(told, counts).double()
    chosen = torch.tensor(coefficients, dtype=torch.float64)
    if not bool((chosen >= 0.0).all()) or float(chosen.sum()) > 1.0 + SUM_TOLERANCE:
        return Doubt.SUM
    total = chosen @ means
    scale = chosen @ torch.linalg.vector_norm(means, dim=1) + torch.linalg.vector_norm(answer.double())
    if not bool(torch.linalg.vector_norm(answer.double() - total) <= SUM_TOLERANCE * scale):
        return Doubt.SUM
    expected = _coefficients(means, counts, lambda rows: rows @ rows.T, robust=robust) @ means
    size = max(float(torch.linalg.vector_norm(total)), float(torch.linalg.vector_norm(expected)))
    off = float(torch.linalg.vector_norm(total - expected))
    return None if off <= RULE_TOLERANCE * size else Doubt.RULE


def fits(told: Tensor, part: Tensor, *, key: bytes) -> bool:
    """Whether what a member told as the projection of its part [n] is that, up to rounding."""
    padded = torch.nn.functional.pad(part, (0, max(0, len(told) - len(part))))  # others' slices may have one more
    true = projections(padded, 1, key=key)[0].double()
    off = torch.linalg.vector_norm(told.double() - true)
    return bool(off <= SUM_TOLERANCE * torch.linalg.vector_norm(true))


def _means(sums: Tensor, counts: Sequence[int]) -> Tensor:
    """Mean gradients from sums over microbatches, [members, n]; zeros for a member without any."""
    if len(sums) != len(counts):
        raise ValueError(f"{len(counts)} counts for {len(sums)} members")
    means = sums / torch.tensor([max(1, count) for count in counts], dtype=sums.dtype).unsqueeze(1)
    means[torch.tensor(counts) <= 0] = 0.0
    return means


def _coefficients(means: Tensor, counts: Sequence[int], gram: Callable[[Tensor], Tensor], *, robust: bool) -> Tensor:
    """What each mean is multiplied with, float64 [members]."""
    active = [index for index, count in enumerate(counts) if count > 0]
    found = torch.zeros(len(counts), dtype=torch.float64)
    if not active:
        return found
    if not robust or rule_for(len(active)) is Rule.MEAN:
        total = sum(counts[index] for index in active)
        found[active] = torch.tensor([counts[index] / total for index in active], dtype=torch.float64)
    else:
        found[active] = coefficients(gram(means[active]), capped_weights([counts[index] for index in active]))
    return found


def _signs(key: bytes, count: int) -> Tensor:
    """+-1 as float32 [count]."""
    packed = torch.frombuffer(bytearray(hashlib.shake_256(key).digest(-(-count // 8))), dtype=torch.uint8)
    bits = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.reshape(-1)[:count].float() * 2 - 1
