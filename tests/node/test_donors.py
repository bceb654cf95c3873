"""Whom a joiner asks, for which step, and whose word counts."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.donors import (
    MAX_DONORS,
    Agreement,
    DisagreementError,
    DonorsBusyError,
    NoDonorError,
    Plan,
    Standing,
    agree,
    choose,
    contradicts,
    reached,
    standing_digest,
)
from protocol.messages import SnapshotAnswer

A, B = b"\x0a" * 32, b"\x0b" * 32
STEPS = st.integers(0, 2**40)


def standings(*steps: int, frozen: dict[int, int] | None = None) -> list[Standing]:
    """Siblings named by their place."""
    return [Standing(peer=str(place), step=step, frozen=(frozen or {}).get(place)) for place, step in enumerate(steps)]


def plan(found: list[Standing], *, ahead: int = 0, avoid: tuple[str, ...] = (), seed: int = 0) -> Plan:
    return choose(found, ahead=ahead, avoid=avoid, rng=random.Random(seed))


def answer(parameters: bytes = A, chunk: bytes = A, step: int = 5) -> SnapshotAnswer:
    return SnapshotAnswer(step=step, size=10, parameters=parameters, chunk_bytes=10, chunks=(chunk,))


# which step ------------------------------------------------------------------------------


@given(st.lists(STEPS, min_size=1, max_size=15))
def test_more_than_half_have_reached_the_step(steps: list[int]) -> None:
    step = reached(standings(*steps))
    assert 2 * sum(other >= step for other in steps) > len(steps)
    assert 2 * sum(other > step for other in steps) <= len(steps)


@given(honest=st.lists(STEPS, min_size=2, max_size=10), lies=st.lists(STEPS, max_size=9))
def test_a_minority_cannot_move_the_step_beyond_the_honest_ones(honest: list[int], lies: list[int]) -> None:
    lies = lies[: len(honest) - 1]
    step = reached(standings(*honest, *lies))
    assert min(honest) <= step <= max(honest)


@given(
    steps=st.lists(st.integers(5, 8), min_size=1, max_size=8),
    frozen=st.dictionaries(st.integers(0, 7), st.integers(0, 9)),
    ahead=st.integers(0, 2),
    seed=st.integers(0, 99),
)
def test_whoever_is_asked_can_still_give_the_step(
    steps: list[int], frozen: dict[int, int], ahead: int, seed: int
) -> None:
    found = standings(*steps, frozen=frozen)
    try:
        chosen = plan(found, ahead=ahead, seed=seed)
    except DonorsBusyError:
        assert all(standing.frozen is not None or standing.step > reached(found) + 1 for standing in found)
        return
    assert 1 <= len(chosen.donors) <= MAX_DONORS
    assert len(set(chosen.donors)) == len(chosen.donors)
    assert chosen.step <= reached(found) + 1 + ahead
    for standing in found:
        if standing.peer in chosen.donors:
            able = standing.frozen is None and standing.step <= chosen.step
            assert able or standing.frozen == chosen.step


def test_siblings_of_one_step_are_asked_for_that_step() -> None:
    assert plan(standings(7, 7, 7)).step == 7
    assert sorted(plan(standings(7, 7, 7)).donors) == ["0", "1", "2"]


def test_between_two_steps_the_later_one_is_asked_for() -> None:
    chosen = plan(standings(7, 8))
    assert chosen.step == 8 and sorted(chosen.donors) == ["0", "1"]


def test_one_that_boasts_is_not_waited_for() -> None:
    chosen = plan(standings(7, 7, 7, 1_000_000))
    assert chosen.step == 8 and "3" not in chosen.donors


def test_after_donors_have_moved_on_they_are_led() -> None:
    assert plan(standings(7, 7), ahead=2).step == 9


def test_three_of_many_are_drawn_at_random() -> None:
    drawn = {plan(standings(*[7] * 9), seed=seed).donors for seed in range(30)}
    assert len(drawn) > 10 and all(len(donors) == MAX_DONORS for donors in drawn)


def test_who_failed_before_comes_last() -> None:
    for seed in range(10):
        donors = plan(standings(7, 7, 7, 7), avoid=("0", "2"), seed=seed).donors
        assert set(donors[:2]) == {"1", "3"}


def test_who_keeps_the_step_already_comes_first() -> None:
    for seed in range(10):
        assert plan(standings(7, 7, 7, 7, frozen={2: 7}), seed=seed).donors[0] == "2"


def test_if_all_keep_another_step_that_one_is_taken() -> None:
    chosen = plan(standings(7, 7, 7, frozen={0: 5, 1: 6, 2: 5}))
    assert chosen.step == 5 and sorted(chosen.donors) == ["0", "2"]


def test_one_that_is_free_is_asked_for_the_present_step() -> None:
    assert plan(standings(7, 7, 7, frozen={0: 5, 1: 5})) == Plan(step=7, donors=("2",))


def test_nobody_or_nobody_free_is_said() -> None:
    with pytest.raises(NoDonorError, match="waiting for one"):
        plan([])
    with pytest.raises(DonorsBusyError, match="waiting for a turn"):
        plan(standings(7, 7, frozen={0: 900, 1: 900}))


# whose word counts -----------------------------------------------------------------------


def test_the_description_that_most_donors_give_counts() -> None:
    found = agree({"a": answer(), "b": answer(chunk=B), "c": answer()}, {}, avoid=())
    assert found == Agreement(answer=answer(), donors=("a", "c"), outvoted=("b",))


def test_parameters_that_most_siblings_had_count_more_than_a_majority_of_the_donors() -> None:
    votes = {name: A for name in "defgh"}
    found = agree({"a": answer(), "b": answer(parameters=B), "c": answer(parameters=B)}, votes, avoid=())
    assert found.donors == ("a",) and found.outvoted == ("b", "c")


def test_a_donors_description_is_its_vote() -> None:
    votes = {"a": B, "b": B}  # what they claimed, or said before
    assert agree({"a": answer(), "b": answer()}, votes, avoid=()).donors == ("a", "b")


def test_donors_whose_parameters_nobody_else_had_are_refused() -> None:
    with pytest.raises(DisagreementError, match="step 5"):
        agree({"a": answer(parameters=B)}, {"d": A, "e": A}, avoid=())
    with pytest.raises(NoDonorError):
        agree({}, {"d": A}, avoid=())


def test_of_two_that_differ_the_smaller_parameters_count_as_when_they_average() -> None:
    assert agree({"a": answer(parameters=B), "b": answer()}, {}, avoid=()).donors == ("b",)


def test_of_two_with_equal_parameters_the_one_that_has_not_failed_before_counts() -> None:
    answers = {"a": answer(), "b": answer(chunk=B)}
    assert agree(answers, {}, avoid=("a",)).donors == ("b",)
    assert agree(answers, {}, avoid=("b",)).donors == ("a",)


@given(
    honest=st.integers(2, 8),
    liars=st.integers(0, 7),
    donors=st.integers(1, MAX_DONORS),
    seed=st.integers(0, 999),
)
def test_a_minority_of_liars_never_passes_other_parameters_off(honest: int, liars: int, donors: int, seed: int) -> None:
    liars = min(liars, honest - 1)
    words = {f"h{number}": A for number in range(honest)} | {f"l{number}": B for number in range(liars)}
    asked = random.Random(seed).sample(sorted(words), min(donors, len(words)))
    try:
        found = agree({peer: answer(parameters=words[peer]) for peer in asked}, words, avoid=())
    except DisagreementError:
        assert all(words[peer] == B for peer in asked)
    else:
        assert found.answer.parameters == A


def test_the_stages_digest_is_the_majoritys_or_else_the_smaller_one() -> None:
    assert standing_digest({"a": A, "b": B, "c": B}) == B
    assert standing_digest({"a": B, "b": A, "c": b""}) == A
    assert standing_digest({"a": b""}) is None


def test_only_a_majority_or_everybody_contradicts() -> None:
    assert contradicts({"a": B, "b": B, "c": A}, A)
    assert not contradicts({"a": A, "b": B}, A)
    assert contradicts({"a": B}, A)
    assert not contradicts({"a": A}, A)
    assert not contradicts({"a": b""}, A) and not contradicts({}, A)


def test_a_description_is_compared_whole() -> None:
    assert answer() == replace(answer()) and hash(answer()) == hash(answer())
