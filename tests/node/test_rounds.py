"""Decisions of an averaging round: the same on every member, whatever the order of arrival."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from node.rounds import (
    Announcement,
    aggregate_digest,
    agreed,
    insisted_on,
    joinable,
    majority_digest,
    next_attempt,
    settle_members,
    slice_length,
    strides,
)

PEERS = "abcd"
SETS = st.sets(st.sampled_from(PEERS), min_size=1).map(lambda peers: tuple(sorted(peers)))


def says(members: str | tuple[str, ...], attempt: int = 0, microbatches: int = 1) -> Announcement:
    return Announcement(members=tuple(members), attempt=attempt, microbatches=microbatches, parameters=bytes(32))


ANNOUNCED = st.dictionaries(st.sampled_from(PEERS), st.builds(says, SETS, st.integers(0, 3)))


def test_a_round_is_agreed_once_every_member_has_announced_the_same() -> None:
    mine = says("abc", 1)
    everyone = {"b": says("abc", 1), "c": says("abc", 1), "d": says("d", 5)}
    assert agreed("a", mine, everyone)
    assert agreed("a", says("a"), {})
    for changed in ({"b": says("ab", 1)}, {"b": says("abc", 0)}, {"b": says("abc", 2)}):
        assert not agreed("a", mine, everyone | changed)
    assert not agreed("a", mine, {"b": says("abc", 1)})
    assert agreed("a", mine, everyone | {"a": says("x", 9)})  # what others say in my name does not count


@given(ANNOUNCED, st.sampled_from(PEERS), st.data())
def test_settled_members_hold_me_and_only_live_peers_or_an_announced_set(
    announced: dict[str, Announcement], me: str, data: st.DataObject
) -> None:
    live = sorted({me, *data.draw(st.sets(st.sampled_from(PEERS)))})
    members = settle_members(me, live, announced)
    assert me in members and list(members) == sorted(set(members))
    assert set(members) <= set(live) or members in {entry.members for entry in announced.values()}


def test_the_set_with_most_votes_settles_a_difference() -> None:
    announced = {"a": says("abcd"), "b": says("abc"), "c": says("abc"), "d": says("abcd")}
    assert settle_members("a", "abcd", announced) == tuple("abcd")  # two each: the larger
    announced["d"] = says("abc")  # names others only
    assert settle_members("a", "abcd", announced) == tuple("abc")
    assert settle_members("a", "ab", {"b": says("ab")}) == tuple("ab")


def test_with_no_agreement_those_who_count_on_me_stay() -> None:
    announced = {"b": says("ab"), "c": says("ac"), "d": says("bd")}
    assert settle_members("a", "abcd", announced) == tuple("abc")
    assert settle_members("a", "abcd", {}) == ("a",)


def test_members_that_are_further_on_are_followed() -> None:
    announced = {"b": says("ab", 3), "x": says("x", 9)}
    assert next_attempt(1, announced, ("a", "b"), 5) == 3
    assert next_attempt(4, announced, ("a", "b"), 5) == 4
    assert next_attempt(0, {}, ("a", "b"), 5) == 0
    assert next_attempt(1, announced, ("a", "b"), 2) == 1  # no rule leads so far: it must not drag others along


@given(st.integers(0, 10_000), st.integers(1, 40))
def test_slices_share_the_vector_out_and_differ_by_one_at_most(length: int, members: int) -> None:
    cuts = strides(members)
    places = [place for cut in cuts for place in range(length)[cut]]
    assert len(cuts) == members and sorted(places) == list(range(length))
    sizes = [slice_length(length, cut) for cut in cuts]
    assert sizes == [len(torch.zeros(length)[cut]) for cut in cuts]
    assert max(sizes) - min(sizes) <= 1


ROUND = Announcement(members=("a", "b", "c"), attempt=1, microbatches=1, parameters=bytes(32))


@pytest.mark.parametrize(
    ("others", "insisted"),
    [
        ({}, set()),
        ({"b": ("abcx", 1)}, set()),
        ({"b": ("abcx", 1), "c": ("abcx", 2)}, {"x"}),
        ({"b": ("abcx", 1), "c": ("abcx", 0)}, set()),  # c has not come to this attempt yet
        ({"b": ("abcx", 1), "c": ("abc", 1)}, set()),
        ({"b": ("abcx", 1), "x": ("abcx", 1)}, set()),  # x has no say in it
    ],
)
def test_who_is_left_out_comes_back_when_most_others_average_with_it(
    others: dict[str, tuple[str, int]], insisted: set[str]
) -> None:
    announced = {
        peer: Announcement(members=tuple(members), attempt=attempt, microbatches=1, parameters=bytes(32))
        for peer, (members, attempt) in others.items()
    }
    assert insisted_on({"x"}, ROUND, announced) == insisted
    assert insisted_on(set(), ROUND, announced) == set()


def test_the_digest_covers_the_bytes_and_the_count() -> None:
    data = memoryview(b"12345678")
    digests = {aggregate_digest(data, 1), aggregate_digest(data, 2), aggregate_digest(memoryview(b"1234567x"), 1)}
    assert len(digests) == 3 and all(len(digest) == 32 for digest in digests)


def test_a_majority_is_more_than_half() -> None:
    assert majority_digest({"a": b"x"}) == b"x"
    assert majority_digest({"a": b"x", "b": b"y"}) is None
    assert majority_digest({"a": b"x", "b": b"y", "c": b"x"}) == b"x"
    assert majority_digest({"a": b"x", "b": b"y", "c": b"x", "d": b"y"}) is None
    assert majority_digest({"a": b"x", "b": b"x"}, of=4) is None
    assert majority_digest({"a": b"x", "b": b"x"}, of=3) == b"x"


def said(members: str, attempt: int = 1) -> Announcement:
    return Announcement(members=tuple(members), attempt=attempt, microbatches=1, parameters=b"")


def test_a_sibling_that_dropped_a_stuck_one_first_is_followed_and_not_dropped() -> None:
    announced = {"b": said("ab"), "c": said("abc", attempt=0)}
    assert joinable("a", said("abc"), announced, ["b", "c"]) == ("a", "b")


def test_nobody_is_talked_out_of_a_round_in_which_somebody_agrees_with_it() -> None:
    announced = {"b": said("abc"), "c": said("ac")}
    assert joinable("a", said("abc"), announced, ["c"]) is None


@pytest.mark.parametrize(
    "announced",
    [{"b": said("bc"), "c": said("bc")}, {"b": said("abd")}, {"b": said("ab", attempt=0)}, {"b": said("abc")}, {}],
    ids=["without me", "with a stranger", "of an earlier attempt", "not smaller", "silent"],
)
def test_only_a_smaller_present_set_with_this_node_can_be_joined(announced: dict[str, Announcement]) -> None:
    assert joinable("a", said("abc"), announced, ["b", "c"]) is None
