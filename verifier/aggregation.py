"""How siblings combine their gradients although some of them lie.

Each sibling owns a slice of the stage's vector, every k-th entry, gets everybody's part of it and judges these parts by
themselves. A judgement of whole vectors would need what others tell of their slices, and would let through whoever is
honest in most slices and sends anything in one. Everything here that judges members works on the Gram matrix of their
parts and ends in one coefficient for each member; the aggregate is the sum of coefficient times part.

What is known of honest members: their vectors are the same gradient plus noise of their own. Hence any two of them
have about the same, positive inner product, however large the noise is, and nothing else in common. Distances do not
show that much: where the noise is larger than the gradient, a vector of zeros is nearer to every honest member than
these are to each other, so rules that look for neighbours (Krum, nearest-neighbour mixing) choose it. The steps of
``coefficients``:

1. *Majority.* The strict majority whose directions agree best (the largest cosines among themselves) stands for the
   honest ones. Flipped, empty and opposing gradients are not in it, nor those with much noise added.
2. *One voice.* Honest members have noise of their own, so they lie apart. Those that sent the same share one vote.
3. *Length.* Whoever is longer than twice the median counts as of median length.
4. *Trust.* Whoever's inner products with the majority are less than a quarter of its own loses weight, and whoever has
   none or negative ones, all of it; so does whoever is far from it. The others keep theirs, in the majority or not,
   since a mean of more is less noisy.

Everybody gets the same bits from the same Gram matrix: Python floats, single operations that IEEE 754 rounds in one way
only, and ``math.fsum`` for sums, which is exact before it rounds. (The built-in ``sum`` rounds otherwise in Python 3.12
than in 3.11; matrix products and powers differ between machines.) Since no order of additions matters, neither does the
order of the members. ``python -m benchmarks.robust`` measures all of this; docs/averaging.md has the numbers, and
those of the rules from the literature.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from enum import StrEnum
from itertools import accumulate

import torch
from torch import Tensor

MAX_WEIGHT = 2.0
"""A member's microbatches count for at most this many times the median of its siblings': a share of the work that the
wiring may well give, while a claim of any size gains no more than one vote."""

SAME, APART = 0.1, 0.3
"""How far apart the directions of two members are (one less their cosine), in units of what is usual in the majority,
up to which they sent the same, and from which they did not. Copies are at 0, honest members rarely below a half."""

MAX_LENGTH = 2.0
"""Times the median length. Honest lengths are within a fifth of their median when a member has dozens of sequences, and
reach 2.5 times it with a handful; 1.5 and 3 measure the same."""

FULL_AGREEMENT = 0.25
"""Share of the majority's own agreement from which a member has its full weight; below it the weight falls in a line to
nothing at none. Honest members' agreements scatter, and each that is lost makes the mean noisier. 0.1 to 0.4 measure
the same, 1 loses honest members."""

NEAR, FAR = 2.0, 4.0
"""Mean squared distance from the majority, in units of what is usual there, up to which a member has its full weight,
and from which it has none. Lower bounds lose honest members of noisy steps; without them noise of the members' own
length, added to a gradient, counts in full."""

_LANES = 4096
"""Partial sums of an inner product. Part of the definition: another number gives another rounding."""
_CHUNK = 1 << 18
"""Elements combined at once; bounds the memory of float64 values, and changes no bits."""
_ROUNDING = 1e-9
"""Of a squared length: a smaller difference of two inner products is rounding."""

Matrix = list[list[float]]


class Rule(StrEnum):
    """How a number of members is combined."""

    MEAN = "mean"
    """Of one or two, none can outvote another."""
    AGREEMENT = "agreement"
    """By ``coefficients``."""


def rule_for(members: int) -> Rule:
    """The rule for so many members, of those that have microbatches; raises ValueError for none."""
    if members < 1:
        raise ValueError("there is nothing to combine without members")
    if members < 3:
        return Rule.MEAN
    return Rule.AGREEMENT


def tolerated(members: int) -> int:
    """How many liars among so many members the rules are made for: all that a strict majority outvotes, 3 of 8.

    The largest possible number, since it costs next to nothing when nobody lies, and a rule that is made for fewer
    than there are breaks.
    """
    return max(0, (members - 1) // 2)


def capped_weights(microbatches: Sequence[int]) -> Tensor:
    """Weights of members' mean gradients, float64 [k], that add up to 1: in proportion to their microbatches, capped.

    A mean over more microbatches is less noisy, but counts are taken on faith in part, so each counts for at
    most ``MAX_WEIGHT`` times the median of those that have any. A member without microbatches has no weight.

    Raises ValueError if nobody has a microbatch, or somebody fewer than none.
    """
    trained = sorted(count for count in microbatches if count > 0)
    if not trained or min(microbatches) < 0:
        raise ValueError(f"microbatches are counts of which one at least is positive, not {list(microbatches)}")
    cap = MAX_WEIGHT * trained[(len(trained) - 1) // 2]
    capped = [min(float(count), cap) for count in microbatches]
    total = math.fsum(capped)
    return torch.tensor([weight / total for weight in capped], dtype=torch.float64)


def partial_gram(parts: Tensor) -> Tensor:
    """Inner products of the members' parts of one slice.

    Element i goes to lane i mod 4096, each lane adds up in float64 from the front, and the lanes are folded in half
    until one is left: the same bits everywhere, so that whoever reduces a slice again can compare exactly. A product of
    two float32 is exact in float64 and cannot overflow, so what is not finite here was not finite in a part.

    Args:
        parts: float32 [k, n], one row for each member.

    Returns:
        float64 [k, k], symmetric to the bit; zeros for n = 0.

    Raises ValueError for another shape or dtype.
    """
    _check_parts(parts)
    members, length = parts.shape
    lanes = torch.zeros(members, members, _LANES, dtype=torch.float64, device=parts.device)
    for start in range(0, length, _LANES):
        chunk = parts[:, start : start + _LANES].double()
        width = chunk.shape[1]
        for row in range(members):
            lanes[row, row:, :width] += chunk[row] * chunk[row:]
    while lanes.shape[2] > 1:
        half = lanes.shape[2] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    upper = lanes.squeeze(2).triu()
    return (upper + upper.triu(1).T).cpu()


def faulty_members(gram: Tensor) -> tuple[int, ...]:
    """The members, in order, whose inner product with themselves is not finite or is negative.

    A vector with an infinity or a NaN makes every inner product with it that too, and the innocent ones' rows have
    finite diagonals still. So whoever is named here sent such a vector: leave it out, and compute the rest again.
    """
    return tuple(index for index, square in enumerate(gram.diagonal().tolist()) if not 0.0 <= square < math.inf)


def coefficients(gram: Tensor, weights: Tensor) -> Tensor:
    """How much of each member's part makes the aggregate: see the head of this file.

    Bounded whatever ``tolerated(k)`` members send: no coefficient is negative, they add up to at most 1, and the
    aggregate is at most ``MAX_LENGTH`` times as long as the longest honest part.

    Args:
        gram: float64 [k, k], inner products of the members' mean gradients over a slice; symmetric.
        weights: float64 [k], as from ``capped_weights``. A member of weight 0 has no say either.

    Returns:
        float64 [k].

    Raises ValueError naming the members of ``faulty_members``; also if other inner products are not finite (whoever
    computed those is wrong), for weights that are negative, not finite or all zero, and for other shapes or dtypes.
    """
    shares = _checked_weights(gram, weights)
    voters = [index for index, share in enumerate(shares) if share > 0.0]
    full: Matrix = gram.tolist()
    found = _aggregate([[full[i][j] for j in voters] for i in voters], [shares[i] for i in voters])
    result = [0.0] * len(shares)
    for index, coefficient in zip(voters, found, strict=True):
        result[index] = coefficient
    return torch.tensor(result, dtype=torch.float64)


def combine(parts: Tensor, coefficients: Tensor) -> Tensor:
    """The sum of coefficient times part, float32 [n].

    Each element is added up in float64 in the order of the members and rounded once: the same bits everywhere.

    Args:
        parts: float32 [k, n], a row for each member.
        coefficients: float64 [k]. What a member with coefficient 0 sent is not looked at.

    Raises ValueError for other shapes or dtypes.
    """
    _check_parts(parts)
    _check_vector(coefficients, len(parts))
    combined = torch.empty(parts.shape[1], device=parts.device)
    for start in range(0, parts.shape[1], _CHUNK):
        chunk = parts[:, start : start + _CHUNK]
        total = torch.zeros(chunk.shape[1], dtype=torch.float64, device=parts.device)
        for row, coefficient in zip(chunk, coefficients.tolist(), strict=True):
            if coefficient != 0.0:
                total += row.double() * coefficient
        combined[start : start + _CHUNK] = total
    return combined


def agreement(parts: Tensor, weights: Tensor) -> Tensor:
    """What most members agree on of one slice, float32 [n]; all of the rule.

    ``parts``: float32 [k, n], members' mean gradients. ``weights``: float64 [k], as from ``capped_weights``. Raises
    ValueError for other shapes or dtypes.
    """
    return combine(parts, coefficients(partial_gram(parts), weights))


# checks --------------------------------------------------------------------------------------


def _check_parts(parts: Tensor) -> None:
    if parts.ndim != 2 or parts.dtype != torch.float32 or len(parts) == 0:
        raise ValueError(f"parts are float32 [members, length], not {parts.dtype} {list(parts.shape)}")


def _check_vector(vector: Tensor, members: int) -> None:
    if vector.shape != (members,) or vector.dtype != torch.float64:
        raise ValueError(f"not float64 [{members}], one for each member: {vector.dtype} {list(vector.shape)}")


def _checked_weights(gram: Tensor, weights: Tensor) -> list[float]:
    """The weights as they are; raises ValueError if they or the inner products cannot be used."""
    if gram.shape != (len(gram), len(gram)) or gram.dtype != torch.float64:
        raise ValueError(f"inner products are float64 [members, members], not {gram.dtype} {list(gram.shape)}")
    _check_vector(weights, len(gram))
    if faulty := faulty_members(gram):
        raise ValueError(f"the vectors of the members {list(faulty)} are not finite; leave them out")
    if not bool(gram.isfinite().all()):
        raise ValueError("inner products are not finite although each member's own is: whoever computed them is wrong")
    shares: list[float] = weights.tolist()
    if not all(0.0 <= share < math.inf for share in shares) or not any(shares):
        raise ValueError(f"weights are finite, not negative, and not all zero: {shares}")
    return shares


# the rule ------------------------------------------------------------------------------------


def _aggregate(gram: Matrix, weights: Sequence[float]) -> list[float]:
    """The coefficients, of members that all have some weight."""
    lengths = [math.sqrt(row[index]) for index, row in enumerate(gram)]
    cosines = _cosines(gram, lengths)
    core = _majority(cosines)
    voices = _voices(cosines, core)
    factors, inner = _shortened(cosines, lengths)
    judged = [_agreement(inner, core, voices), _nearness(inner, core, voices)]
    shares = [math.prod(each) for each in zip(weights, voices, *judged, strict=True)]
    total = math.fsum(shares) or 1.0  # inner products of no vectors may leave nobody
    return [share / total * factor for share, factor in zip(shares, factors, strict=True)]


def _cosines(gram: Matrix, lengths: Sequence[float]) -> Matrix:
    """Of all pairs, in [-1, 1] even where no vectors have such inner products; 0 with an empty vector."""
    members = range(len(gram))

    def cosine(i: int, j: int) -> float:
        scale = lengths[i] * lengths[j]
        return max(-1.0, min(1.0, gram[i][j] / scale)) if scale > 0.0 else 0.0

    return [[cosine(i, j) for j in members] for i in members]


def _majority(cosines: Matrix) -> list[int]:
    """A strict majority of the members, those whose directions agree best, in order.

    A pair counts for as much as the largest that liars cannot have made by themselves, so that they gain nothing by
    agreeing with each other. If not even that is positive the noise hides everything, and all members are returned.
    """
    members = range(len(cosines))
    liars = tolerated(len(cosines))
    pairs = sorted((cosines[i][j] for i in members for j in range(i)), reverse=True)
    limit = pairs[liars * (liars - 1) // 2] if pairs else 0.0
    if limit <= 0.0:
        return list(members)
    return _core([[max(-limit, min(limit, cosine)) for cosine in row] for row in cosines], len(members) - liars)


def _core(ties: Matrix, size: int) -> list[int]:
    """The ``size`` members with the strongest ties among themselves, in order.

    From each member and those that it is most tied to, exchange one member for another while that helps; the best of
    these. Trying all sets takes seconds from twenty members on, and hardly ever finds a better one.
    """
    members = range(len(ties))

    def around(member: int) -> list[int]:
        nearest = sorted(members, key=lambda other: (other != member, -ties[member][other]))
        return _improved(ties, set(nearest[:size]))

    def strength(chosen: list[int]) -> float:
        return math.fsum(ties[i][j] for i in chosen for j in chosen if i < j)

    return max((around(member) for member in members), key=strength)


def _improved(ties: Matrix, chosen: set[int]) -> list[int]:
    """A set of members that no exchange of one for another improves, or that has been through many exchanges."""
    members = range(len(ties))
    exchanges = len(ties)
    while True:
        sums = [math.fsum(ties[i][j] for j in chosen if j != i) for i in members]
        swaps = [
            (sums[new] - ties[new][old] - sums[old], old, new)
            for old in sorted(chosen)
            for new in members
            if new not in chosen
        ]
        gain, old, new = max(swaps, default=(0.0, 0, 0))
        if gain <= _ROUNDING or exchanges == 0:
            return sorted(chosen)
        exchanges -= 1
        chosen = (chosen - {old}) | {new}


def _voices(cosines: Matrix, core: Sequence[int]) -> list[float]:
    """One over the number of members, itself included, that sent the same as a member, whatever its length."""
    members = range(len(cosines))
    usual = _weighted_mean([(1.0 - cosines[i][j], 1.0) for i in core for j in core if i < j])
    if usual <= _ROUNDING:  # all of the majority sent the same
        return [1.0 for _ in members]

    def sameness(i: int, j: int) -> float:
        return 1.0 - _ramp(1.0 - cosines[i][j], SAME * usual, APART * usual)

    return [1.0 / (1.0 + math.fsum(sameness(i, j) for j in members if j != i)) for i in members]


def _shortened(cosines: Matrix, lengths: Sequence[float]) -> tuple[list[float], Matrix]:
    """By what factor each vector is shortened, and the inner products thereafter, in units of the median length."""
    # Of the two in the middle the upper one: with an honest majority both are honest lengths or between such.
    median = sorted(lengths)[len(lengths) // 2]
    factors = [1.0 if length <= MAX_LENGTH * median else median / length for length in lengths]
    # Where most vectors are empty, the others are shortened to nothing, and there is no unit to measure in.
    sizes = [factor * length / (median or 1.0) for factor, length in zip(factors, lengths, strict=True)]
    members = range(len(lengths))
    inner = [[sizes[i] * sizes[j] * (cosines[i][j] if i != j else 1.0) for j in members] for i in members]
    return factors, inner


def _agreement(inner: Matrix, core: Sequence[int], voices: Sequence[float]) -> list[float]:
    """The share of its weight that each member keeps for its inner products with the majority.

    All of it, if the majority itself does not agree.
    """
    support = _seen_from(core, voices, inner)
    own = _weighted_mean([(support[index], voices[index]) for index in core])
    if own <= 0.0:
        return [1.0 for _ in inner]
    return [_ramp(each, 0.0, FULL_AGREEMENT * own) for each in support]


def _nearness(inner: Matrix, core: Sequence[int], voices: Sequence[float]) -> list[float]:
    """The share of its weight that each member keeps for its squared distance from the majority."""
    members = range(len(inner))
    squares = [[max(0.0, math.fsum((inner[i][i], inner[j][j], -2.0 * inner[i][j]))) for j in members] for i in members]
    distances = _seen_from(core, voices, squares)
    usual = max(_ROUNDING, _weighted_median([(distances[index], voices[index]) for index in core]))
    return [1.0 - _ramp(distance, NEAR * usual, FAR * usual) for distance in distances]


def _seen_from(core: Sequence[int], voices: Sequence[float], pairs: Matrix) -> list[float]:
    """For each member the mean of its pairs with the majority's others, by their voices."""
    return [
        _weighted_mean([(row[other], voices[other]) for other in core if other != index])
        for index, row in enumerate(pairs)
    ]


# small arithmetic ----------------------------------------------------------------------------


def _weighted_mean(values: Sequence[tuple[float, float]]) -> float:
    """Of (value, weight); 0 of none."""
    total = math.fsum(weight for _, weight in values)
    return math.fsum(value * weight for value, weight in values) / total if values else 0.0


def _weighted_median(values: Sequence[tuple[float, float]]) -> float:
    """Of (value, weight): the smallest value such that the weights of those up to it are half of all, or more."""
    ordered = sorted(values)
    sums = list(accumulate(weight for _, weight in ordered))
    return ordered[bisect_left(sums, 0.5 * sums[-1])][0]


def _ramp(value: float, low: float, high: float) -> float:
    """0 up to ``low``, 1 from ``high`` on, a line between."""
    if value <= low:
        return 0.0
    return 1.0 if value >= high else (value - low) / (high - low)
