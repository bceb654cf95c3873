"""What siblings make of each other's baselines, and that a minority of them cannot bend it."""

import math
import struct
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verifier.baselines import MIN_BASELINES, median_reduction, pack_reduction, unpack_reduction
from verifier.distances import Reduction, reduce, unit_directions

WIDTH, QUANTILES, DIRECTIONS = 2, 2, 1
COUNT = WIDTH + QUANTILES * DIRECTIONS

finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
anything = st.floats(width=32)


def reduction(values: Sequence[float]) -> Reduction:
    tensor = torch.tensor(values, dtype=torch.float32)
    return Reduction(mean=tensor[:WIDTH], quantiles=tensor[WIDTH:].view(QUANTILES, DIRECTIONS))


def entries(found: Reduction) -> Tensor:
    return torch.cat([found.mean, found.quantiles.flatten()])


def same(one: Reduction, other: Reduction) -> bool:
    return torch.equal(one.mean, other.mean) and torch.equal(one.quantiles, other.quantiles)


def reductions(values: st.SearchStrategy[float] = finite) -> st.SearchStrategy[Reduction]:
    return st.lists(values, min_size=COUNT, max_size=COUNT).map(reduction)


# the median ----------------------------------------------------------------------------


@given(honest=st.lists(reductions(), min_size=2, max_size=6), data=st.data())
def test_a_minority_moves_no_coordinate_beyond_the_honest_ones(honest: list[Reduction], data: st.DataObject) -> None:
    liars = data.draw(st.lists(reductions(anything), max_size=len(honest) - 1))
    shared = median_reduction(honest[0], data.draw(st.permutations(honest[1:] + liars)))
    stacked = torch.stack([entries(each) for each in honest])
    found = entries(shared.reduction)
    assert bool((stacked.min(dim=0).values <= found).all())
    assert bool((found <= stacked.max(dim=0).values).all())


@given(own=reductions(), others=st.lists(reductions(anything), max_size=7), data=st.data())
def test_the_median_does_not_depend_on_the_order(own: Reduction, others: list[Reduction], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(others))))
    first, second = median_reduction(own, others), median_reduction(own, [others[place] for place in order])
    assert same(first.reduction, second.reduction)
    assert sorted(first.ignored) == sorted(order[place] for place in second.ignored)


@given(own=reductions(), count=st.integers(0, 6))
def test_siblings_that_agree_keep_what_they_have(own: Reduction, count: int) -> None:
    shared = median_reduction(own, [own] * count)
    assert same(shared.reduction, own)
    assert shared.ignored == ()


@pytest.mark.parametrize(
    ("values", "expected"),
    [([5.0, 1.0, 3.0], 3.0), ([4.0, 1.0, 2.0, 9.0], 3.0), ([3e38, 3e38, 2e38, 3e38], 3e38), ([-7.0, 2.0, 2.0], 2.0)],
)
def test_the_median_of_an_even_number_lies_between_the_two_in_the_middle(values: list[float], expected: float) -> None:
    own, *others = [reduction([value] * COUNT) for value in values]
    assert same(median_reduction(own, others).reduction, reduction([expected] * COUNT))


def test_the_smallest_numbers_do_not_vanish_when_they_are_halved() -> None:
    tiny = reduction([1.401298464324817e-45] * COUNT)
    assert same(median_reduction(tiny, [tiny] * 3).reduction, tiny)


def test_two_baselines_have_no_median_worth_the_name() -> None:
    own, other = reduction([1.0] * COUNT), reduction([9.0] * COUNT)
    for others in ([], [other]):
        shared = median_reduction(own, others)
        assert shared.reduction is own
        assert shared.ignored == ()
    assert median_reduction(own, [other, other]).reduction is not own
    assert MIN_BASELINES == 3


OWN = reduction([1.0] * COUNT)


@pytest.mark.parametrize(
    "wrong",
    [
        Reduction(mean=torch.ones(WIDTH + 1), quantiles=OWN.quantiles),
        Reduction(mean=OWN.mean, quantiles=torch.ones(QUANTILES, DIRECTIONS + 1)),
        Reduction(mean=OWN.mean.double(), quantiles=OWN.quantiles),
        Reduction(mean=OWN.mean, quantiles=OWN.quantiles.half()),
        Reduction(mean=OWN.mean * math.nan, quantiles=OWN.quantiles),
        Reduction(mean=OWN.mean, quantiles=OWN.quantiles * math.inf),
    ],
)
def test_what_no_honest_sibling_sends_is_ignored_and_named(wrong: Reduction) -> None:
    one, other = reduction([2.0] * COUNT), reduction([3.0] * COUNT)
    shared = median_reduction(OWN, [wrong, one, wrong, other])
    assert shared.ignored == (0, 2)
    assert same(shared.reduction, one)
    alone = median_reduction(OWN, [one, wrong])  # too few are left
    assert alone.reduction is OWN
    assert alone.ignored == (1,)


def test_a_baseline_of_ones_own_that_is_not_finite_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="not finite"):
        median_reduction(reduction([math.nan] * COUNT), [OWN, OWN])


def test_the_median_of_real_baselines_still_has_ascending_quantiles() -> None:
    generator = torch.Generator().manual_seed(0)
    directions = unit_directions(16, seed=1)
    found = [reduce(torch.randn(2, 32, 16, generator=generator), directions) for _ in range(4)]
    shared = median_reduction(found[0], found[1:])
    assert bool((shared.reduction.quantiles.diff(dim=0) >= 0).all())


# on the wire ---------------------------------------------------------------------------


@given(own=reductions())
def test_a_baseline_survives_the_wire_to_the_bit(own: Reduction) -> None:
    data = pack_reduction(own)
    assert len(data) == 4 * COUNT
    found = unpack_reduction(data, like=OWN)
    assert same(found, own)
    assert (found.mean.shape, found.quantiles.shape) == (own.mean.shape, own.quantiles.shape)
    assert found.mean.dtype == found.quantiles.dtype == torch.float32
    assert pack_reduction(found) == data


def test_the_bytes_are_little_endian_and_row_by_row() -> None:
    quantiles = torch.tensor([[2.0, 3.0], [4.0, 5.0]])
    data = pack_reduction(Reduction(mean=torch.tensor([1.0]), quantiles=quantiles))
    assert data == struct.pack("<5f", 1, 2, 3, 4, 5)


@given(data=st.binary(max_size=6 * COUNT))
def test_whatever_a_sibling_sends_is_a_baseline_or_refused(data: bytes) -> None:
    try:
        found = unpack_reduction(data, like=OWN)
    except ValueError:
        return
    assert len(data) == 4 * COUNT
    assert found.is_finite()


@pytest.mark.parametrize("size", [0, 4 * COUNT - 1, 4 * COUNT + 1, 8 * COUNT])
def test_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"has {4 * COUNT} bytes, got {size}"):
        unpack_reduction(bytes(size), like=OWN)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, COUNT - 1])
def test_what_is_not_finite_is_neither_sent_nor_taken(value: float, place: int) -> None:
    values = [1.0] * COUNT
    values[place] = value
    with pytest.raises(ValueError, match="not finite"):
        unpack_reduction(struct.pack(f"<{COUNT}f", *values), like=OWN)
    with pytest.raises(ValueError, match="not finite"):
        pack_reduction(reduction(values))
