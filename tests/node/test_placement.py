"""Nodes that decide alone, at the same moment and from the same view, end up evenly spread."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from node.placement import choose_stage, rank, should_move, stage_loads
from protocol.records import Claim
from tests.node.claims import SWARM, claim, names

MAX_ROUNDS = 5


def anywhere(stage: int) -> bool:
    """Every stage fits."""
    return True


def settle(stages: dict[str, int], pinned: set[str], num_stages: int) -> int:
    """Let all nodes decide at once, again and again; returns the rounds until nobody moves."""
    for round_number in range(MAX_ROUNDS):
        claims = [claim(peer, stage, pinned=peer in pinned) for peer, stage in stages.items()]
        moves = {
            peer: target
            for peer in stages
            if (target := should_move(claims, me=peer, swarm=SWARM, num_stages=num_stages, fits=anywhere)) is not None
        }
        if not moves:
            return round_number
        assert all(stages[peer] != target for peer, target in moves.items())
        assert not pinned & moves.keys()
        stages.update(moves)
    pytest.fail(f"still moving after {MAX_ROUNDS} rounds: {stages}")


@given(st.integers(1, 60), st.integers(1, 8), st.data())
@settings(max_examples=60)
def test_nodes_that_start_anywhere_spread_evenly_and_then_stay(
    count: int, num_stages: int, data: st.DataObject
) -> None:
    placed = data.draw(st.lists(st.integers(0, num_stages - 1), min_size=count, max_size=count))
    stages = dict(zip(names(count), placed, strict=True))
    assert settle(stages, set(), num_stages) <= 1
    counts = Counter(stages.values())
    held = [counts[stage] for stage in range(num_stages)]
    assert max(held) - min(held) <= 1


@given(st.integers(1, 40), st.integers(1, 8), st.data())
@settings(max_examples=60)
def test_those_who_may_move_fill_up_around_those_who_are_pinned(
    count: int, num_stages: int, data: st.DataObject
) -> None:
    placed = data.draw(st.lists(st.integers(0, num_stages - 1), min_size=count, max_size=count))
    stages = dict(zip(names(count), placed, strict=True))
    pinned = set(data.draw(st.lists(st.sampled_from(names(count)), unique=True)))
    fixed = Counter(stages[peer] for peer in pinned)
    settle(stages, pinned, num_stages)
    counts = Counter(stages.values())
    held = [counts[stage] for stage in range(num_stages)]
    # A stage with a movable node in it is at most one above the emptiest: else that node would move there.
    movable = {stages[peer] for peer in stages if peer not in pinned}
    assert all(counts[stage] - min(held) <= 1 for stage in movable)
    assert all(counts[stage] >= fixed[stage] for stage in range(num_stages))


def test_few_move_where_few_suffice() -> None:
    stages = dict(zip(names(7), [0, 0, 0, 0, 1, 1, 2], strict=True))
    before = dict(stages)
    settle(stages, set(), 3)
    assert sum(stages[peer] != before[peer] for peer in stages) == 1


def test_a_node_without_a_claim_a_pinned_one_and_one_in_balance_stay() -> None:
    crowded = [claim(peer, 0) for peer in names(4)]

    def move(claims: list[Claim], me: str) -> int | None:
        return should_move(claims, me=me, swarm=SWARM, num_stages=2, fits=anywhere)

    assert move(crowded, "stranger") is None
    assert sum(move(crowded, peer) == 1 for peer in names(4)) == 2
    assert all(move([claim(peer, 0, pinned=True) for peer in names(4)], peer) is None for peer in names(4))
    assert all(move([claim("a", 0), claim("b", 1)], peer) is None for peer in "ab")


def test_a_node_does_not_move_where_it_does_not_fit() -> None:
    crowded = [claim(peer, 0) for peer in names(4)]
    assert all(
        should_move(crowded, me=peer, swarm=SWARM, num_stages=2, fits=lambda stage: stage == 0) is None
        for peer in names(4)
    )


@given(st.integers(0, 5), st.floats(1e-3, 1e6))
def test_one_claim_of_absurd_speed_keeps_nobody_off_its_stage(seed: int, capacity: float) -> None:
    claims = [claim("liar", 0, capacity=capacity), *(claim(peer, 1) for peer in names(4))]
    assert stage_loads(claims, 2)[0] <= 3.0
    assert choose_stage(claims, num_stages=2, fits=anywhere, rng=random.Random(seed)) == 0


def test_a_claim_of_a_stage_that_does_not_exist_counts_nowhere() -> None:
    claims = [claim("a", 0), claim("b", 1), claim("mad", 9, capacity=1e6)]
    assert stage_loads(claims, 2) == [1.0, 1.0]
    assert all(
        should_move(claims, me=peer, swarm=SWARM, num_stages=2, fits=anywhere) is None for peer in ("a", "b", "mad")
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.1, 10.0)), max_size=12), st.integers(0, 99))
def test_the_first_choice_is_a_least_loaded_stage_that_fits(held: list[tuple[int, float]], seed: int) -> None:
    claims = [claim(peer, stage, capacity=capacity) for peer, (stage, capacity) in zip(names(12), held, strict=False)]
    fitting = {1, 2, 3}
    chosen = choose_stage(claims, num_stages=4, fits=fitting.__contains__, rng=random.Random(seed))
    loads = stage_loads(claims, 4)
    assert chosen in fitting and loads[chosen] == min(loads[stage] for stage in fitting)


def test_among_equals_the_first_choice_is_random() -> None:
    chosen = {choose_stage([], num_stages=5, fits=anywhere, rng=random.Random(seed)) for seed in range(60)}
    assert chosen == set(range(5))
    assert choose_stage([], num_stages=5, fits=lambda stage: False, rng=random.Random(0)) is None


def test_ranks_differ_by_stage_and_swarm() -> None:
    assert len({rank(swarm, stage, "a") for swarm in (SWARM, bytes(32)) for stage in (0, 1)}) == 4
