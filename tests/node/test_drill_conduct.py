"""Drills whose tensors are honest: what they sign, say, accuse and do to their own parameters; and colluders."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.drill import INJECT_CHUNK, INJECT_NORM, Drill, parse_drill
from node.drill_names import Attack

SEED = b"seed"
PEERS = tuple(f"peer-{index}" for index in range(5))


def drill_of(name: str, *, from_step: int = 0, seed: bytes = SEED) -> Drill:
    return Drill(parse_drill(name, from_step), seed=seed)


def counts(drill: Drill) -> tuple[int, int | None]:
    return drill.attacked, drill.first_attack_step


@pytest.mark.parametrize("attack", Attack)
def test_a_drill_is_honest_in_what_is_not_its_attack_and_before_its_step(attack: Attack) -> None:
    flat = torch.ones(8)
    for from_step in (0, 10):
        drill = drill_of(attack, from_step=from_step)
        begun = from_step == 0
        assert (drill.receipt_digest(b"digest", 3) == b"digest") != (begun and attack is Attack.FALSE_RECEIPT)
        assert drill.vote(True, "peer", 3) != (begun and attack is Attack.LYING_AUDITOR)
        assert drill.vote(False, "peer", 3) == (begun and attack is Attack.LYING_AUDITOR)
        assert (drill.victim(PEERS, 3) is not None) == (begun and attack is Attack.FRAME)
        assert drill.inject(flat.clone(), 3) == (begun and attack is Attack.INJECT)
        assert not drill.spares("peer", 3)
        if not begun:
            assert counts(drill) == (0, None)


@given(st.binary(min_size=1, max_size=64))
def test_a_false_receipt_has_another_digest_of_the_same_length(digest: bytes) -> None:
    drill = drill_of("false-receipt", from_step=2)
    assert drill.receipt_digest(digest, 1) == digest
    false = drill.receipt_digest(digest, 2)
    assert false != digest and len(false) == len(digest)
    assert drill.receipt_digest(digest, 3) == false
    assert counts(drill) == (2, 2)


def test_a_lying_auditor_says_the_contrary() -> None:
    drill = drill_of("lying-auditor", from_step=2)
    assert [drill.vote(differs, "peer", 1) for differs in (True, False)] == [True, False]
    assert [drill.vote(differs, "peer", 2) for differs in (True, False)] == [False, True]
    assert counts(drill) == (2, 2)


def test_a_false_reduction_is_turned_round() -> None:
    drill = drill_of("false-reduction", from_step=2)
    mean = torch.tensor([1.0, -2.0, 0.0])
    assert torch.equal(drill.reduce(mean, 1), mean)
    assert torch.equal(drill.reduce(torch.zeros(3), 2), torch.zeros(3)) and counts(drill) == (0, None)
    assert torch.equal(drill.reduce(mean, 2), -mean) and counts(drill) == (1, 2)


@pytest.mark.parametrize("attack", Attack)
def test_partners_are_vouched_for_and_spared(attack: Attack) -> None:
    drill = drill_of(attack, from_step=5)
    drill.partners = frozenset({"friend"})
    assert [drill.vote(differs, "friend", step) for step in (4, 5) for differs in (True, False)] == [False] * 4
    assert counts(drill) == (2, 4)  # to vouch for an honest partner is no lie
    assert drill.spares("friend", 0) and drill.spares("friend", 9) and not drill.spares("other", 9)
    assert counts(drill) == (2, 4)


def test_a_framer_accuses_another_neighbour_in_every_step() -> None:
    drill = drill_of("frame", from_step=3)
    assert drill.victim(PEERS, 2) is None
    victims = [drill.victim(PEERS, step) for step in range(3, 8)]
    assert sorted(map(str, victims)) == sorted(PEERS)
    assert drill.victim(PEERS, 4) == victims[1]  # asked again
    assert drill.victim(PEERS, 8) is None
    assert drill.victim((*PEERS, "new"), 9) == "new"
    assert counts(drill) == (6, 3)


def test_a_framer_goes_by_its_seed_and_not_by_the_order_of_the_list() -> None:
    def order(seed: bytes, peers: tuple[str, ...]) -> list[str | None]:
        drill = drill_of("frame", seed=seed)
        return [drill.victim(peers, step) for step in range(5)]

    assert order(SEED, PEERS) == order(SEED, PEERS[::-1])
    assert len({tuple(order(bytes([seed]), PEERS)) for seed in range(8)}) > 1


def test_a_framer_spares_its_partners_and_waits_for_neighbours() -> None:
    drill = drill_of("frame")
    drill.partners = frozenset(PEERS[:4])
    assert drill.victim((), 0) is None
    assert drill.victim(PEERS, 0) == PEERS[4]
    assert drill.victim(PEERS, 1) is None
    assert counts(drill) == (1, 0)


def test_injections_add_up_and_the_honest_parameters_come_back_for_every_update() -> None:
    drill = drill_of("inject", from_step=2)
    flat = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    norm = float(flat.norm())
    added, times = [], 0
    for step in range(10):
        drill.withdraw(flat)
        honest = flat.clone()
        more = drill.inject(flat, step)
        added += [step] * more
        times += more
        assert float((flat - honest).norm()) == pytest.approx(times * INJECT_NORM * norm, rel=1e-4, abs=1e-9)
        drill.withdraw(flat)
        assert torch.equal(flat, honest)
    assert added == [2, 5, 8]
    assert counts(drill) == (3, 2)


def test_an_injection_belongs_to_its_node() -> None:
    def injected(seed: bytes) -> torch.Tensor:
        flat = torch.ones(64)
        assert drill_of("inject", seed=seed).inject(flat, 0)
        return flat

    assert torch.equal(injected(SEED), injected(SEED))
    assert not torch.equal(injected(SEED), injected(b"other"))


def test_a_long_vector_is_injected_whole() -> None:
    flat = torch.ones(INJECT_CHUNK + 5)
    assert drill_of("inject").inject(flat, 0)
    assert torch.allclose((flat - 1.0).abs(), torch.tensor(INJECT_NORM), rtol=1e-4)
    assert not torch.equal(flat[:5], flat[-5:])  # the chunks are not alike


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_nothing_is_injected_into_parameters_without_a_size(value: float) -> None:
    drill = drill_of("inject")
    flat = torch.full((8,), value)
    before = flat.clone()
    assert not drill.inject(flat, 0)
    assert torch.equal(flat.nan_to_num(), before.nan_to_num())
    assert counts(drill) == (0, None)


def test_parameters_that_need_gradients_can_be_injected() -> None:
    flat = torch.ones(64)
    parameter = torch.nn.Parameter(flat.view(8, 8))
    assert drill_of("inject").inject(flat, 0)
    assert not torch.equal(parameter.detach(), torch.ones(8, 8))
