"""How siblings combine their gradients: what holds for all vectors, and what liars achieve against honest ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from verifier.aggregation import (
    MAX_LENGTH,
    MAX_WEIGHT,
    Rule,
    _core,
    agreement,
    capped_weights,
    coefficients,
    combine,
    faulty_members,
    partial_gram,
    rule_for,
    tolerated,
)

NAN, INF = float("nan"), float("inf")
SEEDS = st.integers(0, 2**32 - 1)
MEMBERS = st.integers(4, 9)


def honest(members: int, seed: int = 0, *, cosine: float = 0.3, length: int = 2000) -> Tensor:
    """Gradients [members, length]: a common signal, and noise so that pairs of them have this cosine."""
    generator = torch.Generator().manual_seed(seed)
    signal = torch.randn(length, generator=generator)
    return signal + math.sqrt(1 / cosine - 1) * torch.randn(members, length, generator=generator)


def equal(members: int) -> Tensor:
    return torch.full((members,), 1 / members, dtype=torch.float64)


def aggregate(parts: Tensor) -> Tensor:
    return agreement(parts, equal(len(parts)))


def kept(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Retained signal and cosine."""
    found, wanted = found.double(), wanted.double()
    inner = float(found @ wanted)
    return inner / float(wanted @ wanted), inner / float(found.norm() * wanted.norm())


class TestRule:
    @pytest.mark.parametrize(
        ("members", "rule", "liars"),
        [
            (1, Rule.MEAN, 0),
            (2, Rule.MEAN, 0),
            (3, Rule.AGREEMENT, 1),
            (4, Rule.AGREEMENT, 1),
            (5, Rule.AGREEMENT, 2),
            (8, Rule.AGREEMENT, 3),
            (16, Rule.AGREEMENT, 7),
        ],
    )
    def test_numbers_of_members_have_a_rule_that_tolerates_every_minority(
        self, members: int, rule: Rule, liars: int
    ) -> None:
        assert rule_for(members) is rule
        assert tolerated(members) == liars

    def test_there_is_none_for_nobody(self) -> None:
        assert tolerated(0) == 0
        with pytest.raises(ValueError, match="without members"):
            rule_for(0)


class TestWeights:
    @given(st.lists(st.integers(0, 10**12), min_size=1, max_size=20).filter(any))
    def test_they_add_up_to_one_and_none_is_above_the_cap(self, counts: list[int]) -> None:
        weights = capped_weights(counts).tolist()
        assert math.fsum(weights) == pytest.approx(1.0)
        assert all((weight > 0) == (count > 0) for weight, count in zip(weights, counts, strict=True))
        positive = sorted(weight for weight in weights if weight > 0)
        assert max(positive) <= MAX_WEIGHT * positive[(len(positive) - 1) // 2] * (1 + 1e-12)

    def test_a_claim_of_a_thousand_times_as_many_counts_as_two(self) -> None:
        assert capped_weights([4, 4, 4, 4000]).tolist() == pytest.approx([0.2, 0.2, 0.2, 0.4])

    def test_up_to_the_cap_they_are_in_proportion(self) -> None:
        weights = capped_weights([0, 2, 3, 4])
        assert weights.dtype == torch.float64
        assert weights.tolist() == pytest.approx([0, 2 / 9, 3 / 9, 4 / 9])

    @pytest.mark.parametrize("counts", [[], [0, 0], [3, -1]])
    def test_others_than_counts_are_refused(self, counts: list[int]) -> None:
        with pytest.raises(ValueError, match="counts"):
            capped_weights(counts)


class TestInnerProducts:
    @given(SEEDS, st.integers(1, 6), st.integers(0, 9000), st.data())
    def test_those_of_slices_add_up_to_those_of_the_whole(
        self, seed: int, members: int, length: int, data: st.DataObject
    ) -> None:
        parts = torch.randn(members, length, generator=torch.Generator().manual_seed(seed))
        cut = data.draw(st.integers(0, length))
        whole = partial_gram(parts)
        assert whole.dtype == torch.float64
        assert torch.equal(whole, whole.T)
        torch.testing.assert_close(partial_gram(parts[:, :cut]) + partial_gram(parts[:, cut:]), whole)
        torch.testing.assert_close(whole, parts.double() @ parts.double().T)

    def test_the_bits_do_not_depend_on_the_memory_that_the_parts_lie_in(self) -> None:
        parts = honest(5, length=10_001)
        elsewhere = torch.zeros(5, 10_004)[:, 3:].copy_(parts)
        assert torch.equal(partial_gram(parts), partial_gram(elsewhere))

    def test_the_largest_floats_do_not_overflow(self) -> None:
        parts = torch.full((2, 5000), torch.finfo(torch.float32).max)
        assert bool(partial_gram(parts).isfinite().all())

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_who_sent_what_is_not_finite_is_named(self, bad: float) -> None:
        parts = honest(5)
        parts[1, 7] = parts[3, 8] = bad
        gram = partial_gram(parts)
        assert faulty_members(gram) == (1, 3)
        with pytest.raises(ValueError, match=r"members \[1, 3\] are not finite"):
            coefficients(gram, equal(5))
        innocent = [0, 2, 4]
        assert faulty_members(gram[innocent][:, innocent]) == ()

    def test_an_inner_product_that_only_its_maker_can_have_spoilt_names_nobody(self) -> None:
        gram = partial_gram(honest(4))
        gram[0, 1] = NAN
        assert faulty_members(gram) == ()
        with pytest.raises(ValueError, match="whoever computed them"):
            coefficients(gram, equal(4))

    def test_a_negative_square_is_nobodys(self) -> None:
        gram = partial_gram(honest(4))
        gram[2, 2] = -1.0
        assert faulty_members(gram) == (2,)


class TestShapes:
    @pytest.mark.parametrize("parts", [torch.zeros(4), torch.zeros(4, 3).double(), torch.zeros(0, 3)])
    @pytest.mark.parametrize("use", [partial_gram, lambda parts: combine(parts, equal(4))])
    def test_parts_are_rows_of_float32(self, parts: Tensor, use: Callable[[Tensor], Tensor]) -> None:
        with pytest.raises(ValueError, match="parts are float32"):
            use(parts)

    @pytest.mark.parametrize("gram", [torch.zeros(4, 3).double(), torch.zeros(4, 4)])
    def test_inner_products_are_square_and_float64(self, gram: Tensor) -> None:
        with pytest.raises(ValueError, match="inner products are float64"):
            coefficients(gram, equal(4))

    @pytest.mark.parametrize("vector", [equal(3), equal(4).float()])
    def test_each_member_has_a_float64(self, vector: Tensor) -> None:
        with pytest.raises(ValueError, match="one for each member"):
            coefficients(partial_gram(honest(4)), vector)
        with pytest.raises(ValueError, match="one for each member"):
            combine(honest(4), vector)

    @pytest.mark.parametrize("weights", [[0.5, -0.5, 0.5, 0.5], [0.5, NAN, 0.5, 0.5], [1.0, INF, 1.0, 1.0], [0.0] * 4])
    def test_weights_are_of_some_use(self, weights: list[float]) -> None:
        with pytest.raises(ValueError, match="weights are"):
            coefficients(partial_gram(honest(4)), torch.tensor(weights, dtype=torch.float64))


class TestCombining:
    @given(SEEDS, st.integers(1, 6))
    def test_it_is_the_weighted_sum(self, seed: int, members: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        parts = torch.randn(members, 50, generator=generator)
        factors = torch.randn(members, dtype=torch.float64, generator=generator)
        combined = combine(parts, factors)
        assert combined.dtype == torch.float32
        torch.testing.assert_close(combined, (factors @ parts.double()).float())

    def test_what_a_member_without_coefficient_sent_is_not_looked_at(self) -> None:
        parts = honest(3)
        parts[1] = NAN
        combined = combine(parts, torch.tensor([0.5, 0.0, 0.5], dtype=torch.float64))
        assert torch.equal(combined, combine(parts[[0, 2]], equal(2)))


class TestProperties:
    @given(SEEDS, MEMBERS, st.randoms(use_true_random=False))
    def test_the_order_of_the_members_does_not_matter(self, seed: int, members: int, random: object) -> None:
        parts = honest(members, seed, length=50)
        order = list(range(members))
        random.shuffle(order)  # type: ignore[attr-defined]
        gram = partial_gram(parts)
        weights = capped_weights([1 + index % 3 for index in range(members)])
        assert torch.equal(coefficients(gram[order][:, order], weights[order]), coefficients(gram, weights)[order])

    @given(SEEDS, MEMBERS)
    def test_the_same_input_gives_the_same_bits(self, seed: int, members: int) -> None:
        gram = partial_gram(honest(members, seed, length=50))
        assert torch.equal(coefficients(gram, equal(members)), coefficients(gram.clone(), equal(members)))

    @given(SEEDS, MEMBERS)
    def test_equal_vectors_give_that_vector(self, seed: int, members: int) -> None:
        vector = honest(1, seed, length=50)
        torch.testing.assert_close(aggregate(vector.expand(members, -1).contiguous()), vector[0])

    @given(SEEDS, MEMBERS, st.floats(-1e6, 1e6))
    def test_no_size_of_one_member_moves_the_aggregate_far(self, seed: int, members: int, scale: float) -> None:
        parts = honest(members, seed, length=50)
        longest = float(parts[1:].norm(dim=1).max())
        parts[0] *= scale
        assert float(aggregate(parts).norm()) <= MAX_LENGTH * longest * (1 + 1e-5)

    @given(SEEDS, st.integers(1, 9), st.floats(1e-12, 1e12))
    def test_coefficients_are_shares_whatever_the_vectors(self, seed: int, members: int, scale: float) -> None:
        generator = torch.Generator().manual_seed(seed)
        sizes = 10 ** (6 * torch.rand(members, 1, generator=generator) - 3)
        parts = (scale * sizes * torch.randn(members, 3, generator=generator)).float()
        found = coefficients(partial_gram(parts), equal(members))
        assert bool((found >= 0).all())
        assert float(found.sum()) <= 1 + 1e-9

    @given(SEEDS, st.floats(1e-9, 1e9))
    def test_the_unit_of_the_gradients_does_not_matter(self, seed: int, unit: float) -> None:
        gram = partial_gram(honest(8, seed, length=50))
        torch.testing.assert_close(coefficients(gram * unit, equal(8)), coefficients(gram, equal(8)))

    @given(SEEDS, MEMBERS, st.data())
    def test_a_member_without_weight_has_no_say(self, seed: int, members: int, data: st.DataObject) -> None:
        parts = honest(members, seed, length=50)
        idle = data.draw(st.integers(0, members - 1))
        others = [index for index in range(members) if index != idle]
        weights = capped_weights([int(index != idle) for index in range(members)])
        parts[idle] = 0.0
        found = coefficients(partial_gram(parts), weights)
        assert float(found[idle]) == 0.0
        assert torch.equal(found[others], coefficients(partial_gram(parts[others]), weights[others]))

    @given(st.lists(st.floats(-1e300, 1e300), min_size=16, max_size=16))
    def test_inner_products_of_no_vectors_do_no_harm(self, values: list[float]) -> None:
        gram = torch.tensor(values, dtype=torch.float64).view(4, 4)
        gram = gram + gram.T
        assume(bool(gram.isfinite().all()))
        gram.fill_diagonal_(1.0)
        assert bool(coefficients(gram, equal(4)).isfinite().all())

    @given(SEEDS, st.integers(4, 8))
    def test_the_majority_is_hardly_ever_another_than_the_best_of_all(self, seed: int, members: int) -> None:
        noise = torch.randn(members, members, generator=torch.Generator().manual_seed(seed)).double()
        ties: list[list[float]] = (noise + noise.T).tolist()

        def strength(chosen: tuple[int, ...] | list[int]) -> float:
            return math.fsum(ties[i][j] for i, j in combinations(chosen, 2))

        size = members - tolerated(members)
        found = _core(ties, size)
        assert len(set(found)) == size
        best = max(map(strength, combinations(range(members), size)))
        assert strength(found) >= best - 0.25 * abs(best)


class TestHonestMembers:
    @pytest.mark.parametrize("members", [4, 5, 8, 16])
    @pytest.mark.parametrize("cosine", [0.1, 0.5, 0.95])
    def test_they_keep_what_the_plain_mean_keeps(self, members: int, cosine: float) -> None:
        parts = honest(members, cosine=cosine, length=10_000)
        retained, likeness = kept(aggregate(parts), parts.mean(dim=0))
        assert retained == pytest.approx(1.0, abs=0.02)
        assert likeness > 0.98

    def test_weights_count(self) -> None:
        parts = honest(8)
        weights = capped_weights([1, 1, 1, 1, 2, 2, 2, 2])
        torch.testing.assert_close(coefficients(partial_gram(parts), weights), weights, rtol=0.1, atol=0.0)

    def test_where_no_two_agree_all_count(self) -> None:
        parts = torch.eye(4)
        torch.testing.assert_close(aggregate(parts), torch.full((4,), 0.25))
        torch.testing.assert_close(
            aggregate(torch.cat((parts[:1], -parts[:1], parts[1:2], -parts[1:2]))), torch.zeros(4)
        )

    def test_no_gradient_at_all_stays_none(self) -> None:
        assert torch.equal(aggregate(torch.zeros(5, 10)), torch.zeros(10))
        mostly = torch.zeros(5, 10)
        mostly[0] = 1e6
        assert torch.equal(aggregate(mostly), torch.zeros(10))


def others_mean(parts: Tensor, liars: int) -> Tensor:
    return parts[:-liars].mean(dim=0)


def others_spread(parts: Tensor, liars: int) -> Tensor:
    return parts[:-liars].std(dim=0, correction=0)


ATTACKS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sign flip": lambda parts, liars: -parts[-liars:],
    "x 1000": lambda parts, liars: 1000 * parts[-liars:],
    "x -1000": lambda parts, liars: -1000 * parts[-liars:],
    "zeros": lambda parts, liars: torch.zeros_like(parts[-liars:]),
    "a little is enough": lambda parts, liars: others_mean(parts, liars) - 0.25 * others_spread(parts, liars),
    "a little more": lambda parts, liars: others_mean(parts, liars) - 1.5 * others_spread(parts, liars),
    "a tenth against": lambda parts, liars: -0.1 * others_mean(parts, liars),
    "as much against": lambda parts, liars: -others_mean(parts, liars),
}
"""What the goal is for."""

OTHER_ATTACKS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "copies of an honest one": lambda parts, liars: parts[:1],
    "noise of twice the length": lambda parts, liars: parts[-liars:] + 2 * parts[-liars:].flip(1),
}
"""What looks much like honest gradients where these are mostly noise: it costs signal, and does not take over."""


class TestLiars:
    @pytest.mark.parametrize("attack", ATTACKS)
    @pytest.mark.parametrize("cosine", [0.1, 0.3, 0.9])
    @pytest.mark.parametrize("members", [3, 4, 5, 8, 15])
    def test_a_minority_changes_little(self, attack: str, cosine: float, members: int) -> None:
        liars = tolerated(members)
        parts = honest(members, seed=members, cosine=cosine, length=10_000)
        wanted = others_mean(parts, liars)
        parts[-liars:] = ATTACKS[attack](parts, liars)
        retained, likeness = kept(aggregate(parts), wanted)
        assert 0.65 < retained < 1.3
        assert likeness > 0.75

    @pytest.mark.parametrize("attack", OTHER_ATTACKS)
    @pytest.mark.parametrize("cosine", [0.1, 0.3, 0.9])
    @pytest.mark.parametrize("members", [3, 4, 5, 8, 15])
    def test_a_minority_that_hides_in_noise_does_not_take_over(self, attack: str, cosine: float, members: int) -> None:
        liars = tolerated(members)
        parts = honest(members, seed=members, cosine=cosine, length=10_000)
        wanted = others_mean(parts, liars)
        parts[-liars:] = OTHER_ATTACKS[attack](parts, liars)
        retained, likeness = kept(aggregate(parts), wanted)
        assert 0.4 < retained < 1.5
        assert likeness > 0.25  # a single honest gradient, where most copy it

    @pytest.mark.parametrize("attack", ["sign flip", "zeros", "a tenth against", "as much against", "x -1000"])
    def test_those_who_do_not_agree_are_left_out_even_in_noise(self, attack: str) -> None:
        parts = honest(8, cosine=0.1, length=10_000)
        parts[-3:] = ATTACKS[attack](parts, 3)
        found = coefficients(partial_gram(parts), equal(8))
        assert found[5:].tolist() == [0.0, 0.0, 0.0]
        torch.testing.assert_close(found[:5], torch.full((5,), 0.2, dtype=torch.float64), rtol=0.1, atol=0.0)

    def test_what_is_sent_three_times_counts_once(self) -> None:
        parts = honest(8, length=10_000)
        parts[-3:] = ATTACKS["a little is enough"](parts, 3)
        found = coefficients(partial_gram(parts), equal(8))
        assert float(found[5:].sum()) == pytest.approx(1 / 6, rel=0.1)

    def test_one_of_three_does_not_outvote_two(self) -> None:
        parts = honest(3, cosine=0.9)
        wanted = parts[:2].mean(dim=0)
        parts[2] *= -1000.0
        retained, likeness = kept(aggregate(parts), wanted)
        assert retained == pytest.approx(1.0, abs=0.05)
        assert likeness > 0.95

    def test_an_entry_that_only_one_of_three_has_stays(self) -> None:
        # As the gradient of a rare token's embedding: a median of each entry would be zero.
        parts = honest(3, cosine=0.9)
        rare = torch.zeros_like(parts)
        rare[0, :50] = 3.0
        torch.testing.assert_close(aggregate(parts + rare)[:50], (parts + rare).mean(dim=0)[:50], rtol=0.2, atol=0.2)
