"""Who may eject whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.quorum import ejects, neighbouring_stages

PEERS = [f"peer-{i}" for i in range(8)]
peer_sets = st.sets(st.sampled_from(PEERS))


@pytest.mark.parametrize(
    ("accusers", "neighbours", "expected"),
    [
        ("ab", "abc", True),
        ("ab", "abcd", False),
        ("abc", "abcd", True),
        ("ab", "ab", True),
        ("a", "ab", False),
        ("a", "a", False),
        ("", "abc", False),
        ("aaa", "abc", False),
        ("xyz", "abc", False),
    ],
)
def test_a_strict_majority_of_distinct_neighbours_ejects(accusers: str, neighbours: str, expected: bool) -> None:
    assert ejects(accused="z", accusers=list(accusers), neighbours=list(neighbours)) is expected


def test_the_accused_has_no_vote_for_or_against_itself() -> None:
    assert ejects(accused="z", accusers=["a", "b"], neighbours=["a", "b", "c", "z"])
    assert not ejects(accused="z", accusers=["a", "z"], neighbours=["a", "b", "z"])


def test_one_neighbour_alone_never_ejects() -> None:
    assert not ejects(accused="z", accusers=["a"], neighbours=["a", "z"])


@given(accusers=peer_sets, neighbours=peer_sets)
def test_a_minority_never_ejects(accusers: set[str], neighbours: set[str]) -> None:
    voters = neighbours - {PEERS[0]}
    if 2 * len(accusers & voters) <= len(voters):
        assert not ejects(accused=PEERS[0], accusers=accusers, neighbours=neighbours)


@given(data=st.data(), accusers=st.lists(st.sampled_from(PEERS)), neighbours=st.lists(st.sampled_from(PEERS)))
def test_order_and_repetition_are_irrelevant(data: st.DataObject, accusers: list[str], neighbours: list[str]) -> None:
    expected = ejects(accused=PEERS[0], accusers=accusers, neighbours=neighbours)
    shuffled = data.draw(st.permutations(accusers + accusers))
    others = data.draw(st.permutations(neighbours))
    assert ejects(accused=PEERS[0], accusers=shuffled, neighbours=others) is expected


@given(accusers=peer_sets, neighbours=peer_sets, more=st.sampled_from(PEERS))
def test_one_more_accuser_never_saves_the_accused(accusers: set[str], neighbours: set[str], more: str) -> None:
    if ejects(accused=PEERS[0], accusers=accusers, neighbours=neighbours):
        assert ejects(accused=PEERS[0], accusers=accusers | {more}, neighbours=neighbours)


@pytest.mark.parametrize(("stage", "num_stages", "expected"), [(0, 1, ()), (0, 3, (1,)), (1, 3, (0, 2)), (2, 3, (1,))])
def test_neighbouring_stages(stage: int, num_stages: int, expected: tuple[int, ...]) -> None:
    assert neighbouring_stages(stage, num_stages) == expected


@pytest.mark.parametrize("stage", [-1, 3])
def test_a_stage_that_does_not_exist_has_no_neighbours(stage: int) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        neighbouring_stages(stage, 3)
