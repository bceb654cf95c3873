"""Who sends to whom: everybody gets its share, everything is sent once, and all compute the same."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.wiring import MAX_SHARE_FACTOR, Dealer, Wire, assign_microbatches, shares, shuffled, wire
from tests.node.claims import SWARM, claim, names

CAPACITIES = st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=12)
STEPS = st.integers(0, 2**40)


def shared(capacities: list[float], prefix: str = "") -> dict[str, float]:
    return shares([claim(prefix + peer, capacity=each) for peer, each in zip(names(99), capacities, strict=False)])


@given(CAPACITIES)
def test_shares_sum_to_one_and_follow_the_capacities(capacities: list[float]) -> None:
    given_shares = shared(capacities)
    assert sum(given_shares.values()) == pytest.approx(1.0)
    median = sorted(capacities)[(len(capacities) - 1) // 2]
    total = sum(min(each, MAX_SHARE_FACTOR * median) for each in capacities)
    for (_, share), capacity in zip(given_shares.items(), capacities, strict=True):
        assert share == pytest.approx(min(capacity, MAX_SHARE_FACTOR * median) / total)


@given(st.floats(1.0, 1e6), st.integers(2, 12))
def test_an_absurd_capacity_gets_at_most_the_cap(claimed: float, honest: int) -> None:
    given_shares = shared([1.0] * honest + [claimed])
    liar = given_shares[names(honest + 1)[-1]]
    assert liar <= MAX_SHARE_FACTOR / (honest + MAX_SHARE_FACTOR) + 1e-9


def test_of_two_replicas_the_slower_one_sets_the_cap() -> None:
    assert shared([1.0, 1e6]) == {"peer000": 0.25, "peer001": 0.75}
    assert shares([]) == {}


@given(CAPACITIES, CAPACITIES, STEPS)
def test_every_upstream_spends_its_share_and_every_downstream_gets_its_own(
    up: list[float], down: list[float], step: int
) -> None:
    upstream, downstream = shared(up, "up"), shared(down, "down")
    wires = wire(SWARM, step, 0, upstream, downstream)
    assert set(wires) == set(upstream)
    received: Counter[str] = Counter()
    for peer, entries in wires.items():
        assert sum(entry.share for entry in entries) == pytest.approx(1.0, abs=1e-6)
        assert len({entry.peer for entry in entries}) == len(entries)
        assert all(entry.share > 0 for entry in entries)
        for entry in entries:
            received[entry.peer] += entry.share * upstream[peer]  # type: ignore[assignment]
    for peer, share in downstream.items():
        assert received[peer] == pytest.approx(share, abs=1e-6)
    assert sum(len(entries) for entries in wires.values()) <= len(up) + len(down) - 1


@given(CAPACITIES, CAPACITIES, STEPS, st.randoms(use_true_random=False))
def test_the_wiring_does_not_depend_on_the_order_of_the_peers(
    up: list[float], down: list[float], step: int, rng: random.Random
) -> None:
    upstream, downstream = shared(up, "up"), shared(down, "down")
    mixed_up, mixed_down = list(upstream.items()), list(downstream.items())
    rng.shuffle(mixed_up)
    rng.shuffle(mixed_down)
    assert wire(SWARM, step, 0, upstream, downstream) == wire(SWARM, step, 0, dict(mixed_up), dict(mixed_down))


def test_the_wiring_is_drawn_anew_for_each_step_stage_and_swarm() -> None:
    upstream, downstream = shared([1.0] * 8, "up"), shared([1.0] * 8, "down")
    drawn = [
        wire(swarm, step, stage, upstream, downstream)
        for swarm, step, stage in ((SWARM, 0, 0), (SWARM, 1, 0), (SWARM, 0, 1), (bytes(32), 0, 0))
    ]
    assert all(one != two for index, one in enumerate(drawn) for two in drawn[:index])
    partners = {wire(SWARM, step, 0, upstream, downstream)["uppeer000"][0].peer for step in range(200)}
    assert len(partners) == 8


def test_nobody_downstream_means_no_wires() -> None:
    assert wire(SWARM, 0, 0, {"a": 1.0}, {}) == {"a": ()}
    assert wire(SWARM, 0, 0, {}, {"a": 1.0}) == {}
    assert wire(SWARM, 0, 0, {"a": 1.0}, {"b": 1.0}) == {"a": (Wire(peer="b", share=1.0),)}


def test_a_tiny_upstream_replica_still_has_somebody_to_send_to() -> None:
    wires = wire(SWARM, 0, 0, shared([1.0, 1.0, 1e-6]), shared([1.0, 1.0], "down"))
    assert all(sum(entry.share for entry in entries) == pytest.approx(1.0) for entries in wires.values())
    tiny = wire(SWARM, 0, 0, {"big": 1.0 - 1e-12, "tiny": 1e-12}, {"down": 1.0})
    assert tiny["tiny"] == (Wire(peer="down", share=1.0),)


@given(CAPACITIES, st.integers(0, 300), STEPS)
def test_every_microbatch_is_assigned_exactly_once(capacities: list[float], count: int, step: int) -> None:
    stage0 = shared(capacities)
    assigned = assign_microbatches(SWARM, step, count, stage0)
    assert set(assigned) == set(stage0)
    assert sorted(index for part in assigned.values() for index in part) == list(range(count))
    for peer, part in assigned.items():
        assert abs(len(part) - stage0[peer] * count) < 1 + 1e-6
        assert part == list(range(part[0], part[0] + len(part))) if part else True
    mixed = dict(reversed(stage0.items()))
    assert assign_microbatches(SWARM, step, count, mixed) == assigned


def test_without_replicas_nothing_is_assigned() -> None:
    assert assign_microbatches(SWARM, 0, 8, {}) == {}


def test_the_order_of_a_stage_is_a_permutation_that_nobody_chooses() -> None:
    peers = names(6)
    order = shuffled(SWARM, 3, 1, peers)
    assert sorted(order) == peers and shuffled(SWARM, 3, 1, peers[::-1]) == order
    assert {shuffled(SWARM, step, 1, peers)[0] for step in range(100)} == set(peers)


@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6), st.integers(1, 60))
def test_a_dealer_keeps_every_wire_within_one_microbatch_of_its_share(parts: list[float], count: int) -> None:
    wires = [Wire(peer=peer, share=part / sum(parts)) for peer, part in zip(names(6), parts, strict=False)]
    dealer = Dealer(wires)
    dealt: Counter[str] = Counter()
    for _ in range(count):
        first = dealer.order([entry.peer for entry in wires])[0]
        dealer.deal(first)
        dealt[first] += 1
    for entry in wires:
        assert abs(dealt[entry.peer] - entry.share * count) < len(wires)
    assert sum(dealt.values()) == count


def test_a_dealer_offers_every_candidate_and_the_wired_ones_first() -> None:
    dealer = Dealer([Wire(peer="a", share=0.9), Wire(peer="b", share=0.1), Wire(peer="dead", share=0.0)])
    assert dealer.order(["x", "b", "a", "y"]) == ["a", "b", "x", "y"]
    for _ in range(9):
        dealer.deal("a")
    assert dealer.order(["x", "b", "a"]) == ["b", "a", "x"]
    dealer.deal("x")  # a candidate that is not wired counts as work done
    assert dealer.order(["x"]) == ["x"] and dealer.order([]) == []
