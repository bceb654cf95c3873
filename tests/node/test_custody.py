"""Who keeps copies of whose checkpoints, and what is believed of those who offer them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.checkpoint_fetch import best_offer
from node.checkpoints import CheckpointStore, find_checkpoints
from node.custody import COPIES, RETRY_SECONDS, SOON_SECONDS, CopyStore, custodians, due, retry_pause
from protocol.messages import CheckpointOffers
from protocol.records import NodeState
from tests.node.claims import SWARM, claim, names
from tests.node.test_checkpoints import MANIFEST, NOW, state_of

D, E = b"\x01" * 32, b"\x02" * 32


def told(**offers: Mapping[int, bytes]) -> dict[str, CheckpointOffers]:
    """What peers tell: step -> digest; every file has 100 bytes."""
    return {
        peer: CheckpointOffers(steps=tuple(steps), sizes=tuple(100 for _ in steps), parameters=tuple(steps.values()))
        for peer, steps in offers.items()
    }


# who keeps copies ------------------------------------------------------------------------


@given(st.lists(st.integers(0, 4), min_size=1, max_size=40), st.integers(0, 4))
def test_a_stage_is_kept_by_a_few_nodes_of_other_stages(stages: list[int], stage: int) -> None:
    claims = [claim(peer, place) for peer, place in zip(names(len(stages)), stages, strict=True)]
    found = custodians(SWARM, stage, claims)
    there = {entry.peer: entry.stage for entry in claims}
    assert all(there[peer] != stage for peer in found) and len(set(found)) == len(found)
    assert len(found) == min(COPIES, sum(place != stage for place in stages))
    assert custodians(SWARM, stage, claims[::-1]) == found


def test_a_node_that_comes_or_goes_changes_little() -> None:
    claims = [claim(peer, 1) for peer in names(20)]
    before = custodians(SWARM, 0, claims)
    assert custodians(SWARM, 0, [entry for entry in claims if entry.peer != before[0]])[:2] == before[1:]
    assert len({custodians(SWARM, stage, claims) for stage in range(2, 12)}) > 5, "not the same ones for every stage"


def test_only_those_who_train_keep_copies() -> None:
    claims = [claim("a", 1, state=NodeState.WAITING), claim("b", 1, state=NodeState.SYNCING), claim("c", 1)]
    assert custodians(SWARM, 0, claims) == ("c",)


def test_a_copy_is_due_when_replicas_are_past_another_interval() -> None:
    claims = [claim("me", 1, step=120), claim("a", 0, step=119), claim("b", 2, step=99)]

    def stages(held: Mapping[int, int]) -> list[int]:
        return due("me", SWARM, claims, held, num_stages=3, interval=50)

    assert stages({}) == [0, 2]
    assert stages({0: 50}) == [2, 0], "the oldest copy first"
    assert stages({0: 100, 2: 50}) == []
    assert stages({0: 50, 2: 50}) == [0]
    assert due("a", SWARM, [claim("a", 0, step=120)], {}, num_stages=1, interval=50) == []


# what is believed ------------------------------------------------------------------------


def test_the_newest_checkpoint_that_most_offer() -> None:
    found = best_offer(told(a={100: D, 50: D}, b={100: D}, c={50: D}), at_most=120, largest=1000)
    assert found is not None and (found.step, found.parameters, found.peers) == (100, D, ("a", "b"))


def test_one_of_three_can_neither_invent_a_step_nor_a_digest() -> None:
    honest = {"a": {100: D}, "b": {100: D}}
    for lie in ({119: E}, {100: E}, {10**9: E}, {50: E}, {}):
        found = best_offer(told(**honest, liar=lie), at_most=120, largest=1000)
        assert found is not None and (found.step, found.parameters) == (100, D), lie
        assert "liar" not in found.peers


def test_offers_that_cannot_be_are_none() -> None:
    assert best_offer({}, at_most=10, largest=1000) is None
    assert best_offer(told(a={11: D}), at_most=10, largest=1000) is None
    assert best_offer(told(a={0: D}), at_most=10, largest=1000) is None
    assert best_offer(told(a={5: D}), at_most=10, largest=99) is None
    uneven = {"a": CheckpointOffers(steps=(5, 4), sizes=(100,), parameters=(D, D))}
    found = best_offer(uneven, at_most=10, largest=1000)
    assert found is not None and found.step == 5


@given(st.dictionaries(st.sampled_from("abcdefg"), st.dictionaries(st.integers(0, 9), st.sampled_from([D, E]))))
def test_whatever_is_chosen_was_offered(offers: dict[str, dict[int, bytes]]) -> None:
    found = best_offer(told(**offers), at_most=8, largest=1000)
    possible = [(step, digest) for steps in offers.values() for step, digest in steps.items() if 0 < step <= 8]
    assert (found is None) == (not possible)
    if found is not None:
        assert found.peers
        assert all(offers[peer].get(found.step) == found.parameters for peer in found.peers)


# on the disk -----------------------------------------------------------------------------


@pytest.fixture
def copies(tmp_path: Path) -> CopyStore:
    """Three copies: two of stage 0, one of stage 1."""
    for stage, step in ((0, 10), (0, 20), (1, 10)):
        CheckpointStore(tmp_path, MANIFEST, keep=9).save(stage, state_of(step, stage), now=NOW)
    return CopyStore.of(tmp_path, MANIFEST, 1.0)


def test_the_newest_copy_of_each_stage_stays(copies: CopyStore) -> None:
    assert copies.held() == {0: 20, 1: 10}
    before = copies.size()
    copies.drop_older(0, 20)
    assert copies.held() == {0: 20, 1: 10}
    assert len(find_checkpoints(copies.folder)) == 2 and 0 < copies.size() < before


def test_copies_take_no_more_room_than_they_may(copies: CopyStore) -> None:
    one = copies.folder / "stage-1-step-10.safetensors"
    limited = CopyStore(copies.folder, one.stat().st_size + 1000)
    assert limited.room(0, 1000), "the older ones of the stage make room"
    assert not limited.room(0, 1001)
    assert not CopyStore(copies.folder, 1 << 60).room(0, 1 << 59), "the disk has no such room"


def test_a_copy_that_could_not_be_had_is_tried_again_soon_and_ever_later() -> None:
    pauses = [retry_pause(failures) for failures in range(1, 50)]
    assert pauses[0] == SOON_SECONDS and pauses[-1] == RETRY_SECONDS
    assert pauses == sorted(pauses)
