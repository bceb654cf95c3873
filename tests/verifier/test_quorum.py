"""Who may eject whom, who audits whom, and what convicts."""

import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.quorum import MIN_VOTERS, convicts, ejects, jury, neighbouring_stages, seconds

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


# joining others ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strikes", "others", "expected"),
    [
        (0.0, 9, False),
        (0.4, 9, False),
        (0.5, 3, True),
        (0.5, 2, False),
        (1.0, 2, True),
        (2.9, 0, False),
        (2.0, 1, True),
    ],
)
def test_a_peer_joins_on_strikes_of_its_own_and_never_on_hearsay(strikes: float, others: int, expected: bool) -> None:
    assert seconds(strikes=strikes, others=others, limit=3.0) is expected


# the jury ------------------------------------------------------------------------------

ACCUSED = "accused"
draws = st.binary(max_size=64)
stages = st.sets(st.text(min_size=1, max_size=8), max_size=24)


@given(draw=draws, replicas=stages, reserves=stages, size=st.integers(2, 20), data=st.data())
def test_a_jury_is_drawn_alike_by_all_whatever_order_they_know_the_peers_in(
    draw: bytes, replicas: set[str], reserves: set[str], size: int, data: st.DataObject
) -> None:
    least = data.draw(st.integers(1, size - 1))
    drawn = jury(draw=draw, accused=ACCUSED, replicas=replicas, reserves=reserves, size=size, least=least)
    others = jury(
        draw=draw,
        accused=ACCUSED,
        replicas=[*data.draw(st.permutations(sorted(replicas))), ACCUSED],
        reserves=[*data.draw(st.permutations(sorted(reserves))), *replicas, ACCUSED],
        size=size,
        least=least,
    )
    assert drawn == others
    assert len(set(drawn)) == len(drawn) <= size
    assert ACCUSED not in drawn
    siblings = replicas - {ACCUSED}
    if len(siblings) >= least:
        assert set(drawn) <= siblings
        assert len(drawn) == min(size, len(siblings))
    else:
        assert set(drawn[: len(siblings)]) == siblings
        assert set(drawn) <= siblings | reserves
        assert len(drawn) == min(least + 1, len((siblings | reserves) - {ACCUSED}))


@given(draw=draws, replicas=stages, leaver=st.text(min_size=1, max_size=8))
def test_a_sibling_that_leaves_moves_nobody_else(draw: bytes, replicas: set[str], leaver: str) -> None:
    everybody = jury(draw=draw, accused=ACCUSED, replicas=replicas | {leaver}, size=50)
    without = jury(draw=draw, accused=ACCUSED, replicas=replicas - {leaver}, size=50)
    assert tuple(peer for peer in everybody if peer != leaver) == without


def test_another_draw_is_another_jury_and_every_sibling_gets_its_turn() -> None:
    replicas = [f"replica-{number}" for number in range(30)]
    juries = [jury(draw=bytes([number]), accused="replica-0", replicas=replicas, size=5) for number in range(60)]
    assert len(set(juries)) == 60
    assert {peer for drawn in juries for peer in drawn} == set(replicas[1:])


def test_the_draw_is_the_hash_that_other_software_would_compute() -> None:
    replicas = ["a", "b", "c", "d"]
    expected = sorted(replicas, key=lambda peer: hashlib.sha256(b"sentinel:jury" + b"draw" + peer.encode()).digest())
    assert jury(draw=b"draw", accused=ACCUSED, replicas=replicas) == tuple(expected)


@pytest.mark.parametrize(
    ("replicas", "reserves", "siblings", "length"),
    [
        ("", "", 0, 0),
        ("", "wxyz", 0, 3),
        ("a", "wxyz", 1, 3),
        ("a", "w", 1, 2),
        ("ab", "wxyz", 2, 2),
        ("abc", "", 3, 3),
    ],
)
def test_neighbouring_stages_help_out_where_siblings_are_too_few(
    replicas: str, reserves: str, siblings: int, length: int
) -> None:
    drawn = jury(draw=b"", accused=ACCUSED, replicas=list(replicas), reserves=list(reserves))
    assert len(drawn) == length
    assert set(drawn[:siblings]) == set(replicas)


@pytest.mark.parametrize(("size", "least"), [(2, 2), (1, 1), (15, 0), (0, -1)])
def test_a_jury_that_cannot_be_filled_up_is_a_mistake(size: int, least: int) -> None:
    with pytest.raises(ValueError, match="choose 1 <= least < size"):
        jury(draw=b"", accused=ACCUSED, replicas=[], size=size, least=least)


# the conviction ------------------------------------------------------------------------

PEERS_OF_A_STAGE = [f"replica-{number:02}" for number in range(16)]
juries = st.lists(st.sampled_from(PEERS[1:]), unique=True)


@pytest.mark.parametrize(
    ("jurors", "guilty", "live", "expected"),
    [
        ("abcde", "abc", "abcde", True),
        ("abcde", "ab", "abcde", False),
        ("abcd", "ab", "abcd", False),
        ("ab", "ab", "ab", True),
        ("a", "a", "a", False),
        ("abc", "a", "a", False),
        ("abc", "ab", "abc", True),
        ("abc", "aaz", "abc", False),
        ("abcde", "abxyz", "abcdexyz", False),
        ("abcde", "ab", "abc", True),  # two that left without a word do not acquit
        ("abcde", "ab", "cde", False),  # but the guilty votes of two that left are still two of five
        ("abcde", "abc", "de", True),
        ("", "", "", False),
        ("abz", "abz", "abz", True),
        ("abcdz", "abz", "abcdz", False),
    ],
)
def test_a_strict_majority_of_the_jurors_convicts(jurors: str, guilty: str, live: str, expected: bool) -> None:
    assert convicts(accused="z", jury=list(jurors), guilty=list(guilty), live=list(live)) is expected


@given(members=st.sets(st.text(min_size=1, max_size=8), min_size=6, max_size=24), data=st.data())
def test_one_or_two_liars_never_convict_an_honest_peer(members: set[str], data: st.DataObject) -> None:
    drawn = jury(draw=data.draw(draws), accused=ACCUSED, replicas=members)
    liars = data.draw(st.sets(st.sampled_from(drawn), max_size=2))
    leaving = data.draw(st.sets(st.sampled_from(sorted(liars) or [""])))
    strangers = data.draw(stages) - members
    assert not convicts(
        accused=ACCUSED, jury=drawn, guilty=liars | strangers | {ACCUSED}, live=(members | strangers) - leaving
    )


@given(members=stages, data=st.data())
def test_a_minority_of_liars_can_neither_convict_nor_acquit(members: set[str], data: st.DataObject) -> None:
    drawn = jury(draw=data.draw(draws), accused=ACCUSED, replicas=members)
    liars = set(data.draw(st.permutations(drawn))[: data.draw(st.integers(0, max(0, (len(drawn) - 1) // 2)))])
    honest = set(drawn) - liars
    leaving = data.draw(st.sets(st.sampled_from(sorted(liars) or [""])))
    live = set(drawn) - leaving
    assert not convicts(accused=ACCUSED, jury=drawn, guilty=liars, live=live)
    assert convicts(accused=ACCUSED, jury=drawn, guilty=honest, live=live) is (len(honest) >= MIN_VOTERS)


@given(draw=draws, honest=st.integers(3, 15), data=st.data())
def test_a_coalition_below_half_of_a_whole_stage_decides_nothing(draw: bytes, honest: int, data: st.DataObject) -> None:
    liars = data.draw(st.integers(1, min(honest - 1, 16 - honest)))
    stage = PEERS_OF_A_STAGE[: honest + liars]
    for accused, is_guilty in ((stage[0], False), (stage[-1], True)):
        drawn = jury(draw=draw, accused=accused, replicas=stage, reserves=PEERS)
        truthful, lying = set(stage[:honest]), set(stage[honest:])
        votes = truthful if is_guilty else lying
        assert convicts(accused=accused, jury=drawn, guilty=votes, live=stage) is is_guilty


@given(members=juries, guilty=peer_sets, live=peer_sets, strangers=stages, data=st.data())
def test_neither_order_nor_strangers_nor_the_accused_change_a_conviction(
    members: list[str], guilty: set[str], live: set[str], strangers: set[str], data: st.DataObject
) -> None:
    expected = convicts(accused=PEERS[0], jury=members, guilty=guilty, live=live)
    crowd = strangers - set(PEERS)
    assert expected is convicts(
        accused=PEERS[0],
        jury=[*data.draw(st.permutations(members)), PEERS[0]],
        guilty=[*guilty, *guilty, *crowd, PEERS[0]],
        live=[*live, *crowd, PEERS[0]],
    )


@given(members=juries, guilty=peer_sets, live=peer_sets, more=st.sampled_from(PEERS[1:]))
def test_one_more_guilty_vote_of_a_live_juror_never_acquits(
    members: list[str], guilty: set[str], live: set[str], more: str
) -> None:
    if convicts(accused=PEERS[0], jury=members, guilty=guilty, live=live | {more}):
        assert convicts(accused=PEERS[0], jury=members, guilty=guilty | {more}, live=live | {more})
