"""Nodes that come back agree on a step that every stage can supply, and no single claim can lead them elsewhere."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from hypothesis import given
from hypothesis import strategies as st

from node.common_step import Meeting, meet, newest_at_most, succession, under_way
from protocol.records import Claim, NodeState
from tests.node.claims import claim

D, E = b"\x0d" * 32, b"\x0e" * 32


def waiting(peer: str, stage: int, step: int, digest: bytes = D) -> Claim:
    """A node that waits for the start and offers a checkpoint of this step; 0 for none."""
    return claim(peer, stage, state=NodeState.WAITING, step=step, digest=digest if step else b"", active_from=step)


def training(peer: str, stage: int, step: int, digest: bytes = D) -> Claim:
    return claim(peer, stage, state=NodeState.TRAINING, step=step, digest=digest if step else b"")


def offers(*stages: Sequence[int]) -> list[Claim]:
    """Waiting nodes by stage, with the steps of their checkpoints; named a, b, c, ... in order."""
    names = map(chr, itertools.count(ord("a")))
    return [waiting(next(names), stage, step) for stage, steps in enumerate(stages) for step in steps]


def names(meeting: Meeting) -> list[str]:
    return ["".join(sorted(founders)) for founders in meeting.founders]


def meet_all(claims: Iterable[Claim]) -> Meeting:
    found = list(claims)
    return meet(found, 1 + max(entry.stage for entry in found))


def test_a_new_swarm_begins_at_step_0_with_everybody() -> None:
    meeting = meet_all(offers([0, 0], [0], [0, 0]))
    assert meeting.possible and meeting.step == 0 and names(meeting) == ["ab", "c", "de"]


def test_all_go_on_from_the_newest_step_that_every_stage_has() -> None:
    meeting = meet_all(offers([50, 50], [50, 50], [50]))
    assert meeting.possible and meeting.step == 50 and names(meeting) == ["ab", "cd", "e"]


def test_a_stage_that_is_behind_decides_and_the_others_have_to_offer_older_ones() -> None:
    claims = offers([50, 50], [40, 40])
    meeting = meet_all(claims)
    assert meeting.step == 40 and not meeting.possible and names(meeting) == ["", "cd"]
    lowered = [waiting("a", 0, 40), waiting("b", 0, 40), *claims[2:]]
    assert meet_all(lowered).possible


def test_one_that_missed_the_last_checkpoint_does_not_hold_its_siblings_back() -> None:
    meeting = meet_all(offers([50, 40], [50, 50, 40], [50]))
    assert meeting.step == 50 and names(meeting) == ["a", "cd", "f"]


def test_most_of_a_stage_have_to_reach_a_step() -> None:
    assert meet_all(offers([40, 40, 50], [50])).step == 40
    assert meet_all(offers([40, 50, 50], [50])).step == 50


def test_one_liar_moves_no_stage_of_three() -> None:
    for lie in (1, 10**9):
        assert meet_all(offers([50, 50, lie], [50, 50, lie], [50, 50, lie])).step == 50


def test_newcomers_do_not_count_against_those_who_have_checkpoints() -> None:
    meeting = meet_all(offers([50, 0, 0, 0], [50, 0, 0], [50]))
    assert meeting.possible and meeting.step == 50 and names(meeting) == ["a", "e", "h"]


def test_siblings_with_other_parameters_do_not_begin_together() -> None:
    others = [waiting("x", 1, 50), waiting("y", 2, 50)]
    three = [waiting("a", 0, 50, D), waiting("b", 0, 50, E), waiting("c", 0, 50, E)]
    assert names(meet_all([*three, *others])) == ["bc", "x", "y"]
    assert names(meet_all([*three[:2], *others]))[0] == "a"  # the smaller digest, since one is as good as the other
    begun = training("b", 0, 50, E)
    assert names(meet_all([three[0], begun, *others]))[0] == "b"  # but not against one that has begun already


def test_before_the_first_step_digests_do_not_matter() -> None:
    fresh = claim("a", 0, digest=D)  # has begun, and names the digest of the first parameters
    assert names(meet_all([fresh, waiting("b", 0, 0)])) == ["ab"]


def test_a_stage_without_a_checkpoint_holds_up_a_swarm_that_has_some() -> None:
    meeting = meet_all(offers([50, 50], [0], [50]))
    assert meeting.lacking == (1,) and not meeting.possible and meeting.step == 0


def test_a_swarm_of_newcomers_begins_anew_whatever_a_few_claim() -> None:
    meeting = meet_all(offers([0, 50], [0, 0], [0]))
    assert meeting.lacking == () and meeting.possible and names(meeting) == ["a", "cd", "e"]
    assert meet_all(offers([50], [0, 0], [0])).possible is False  # nobody else holds the first stage


def test_those_who_leave_or_fetch_offer_nothing() -> None:
    silent = [
        claim(str(state), 0, state=state, step=50, digest=D)
        for state in NodeState
        if state not in (NodeState.WAITING, NodeState.TRAINING, NodeState.PROBATION)
    ]
    assert names(meet([*silent, waiting("z", 0, 50), waiting("a", 7, 50)], 1)) == ["z"]


def test_who_comes_late_to_a_start_joins_it() -> None:
    meeting = meet_all([training("a", 0, 50), training("b", 1, 50), waiting("c", 1, 50)])
    assert meeting.possible and meeting.step == 50 and names(meeting) == ["a", "bc"]


def test_the_last_replica_of_a_stage_comes_back_to_the_step_in_which_the_others_stand() -> None:
    others = [training("a", 0, 57), training("c", 2, 57)]
    assert meet_all([*others, waiting("b", 1, 57)]).possible
    assert not meet_all([*others, waiting("b", 1, 50)]).possible


def heirs(claims: list[Claim], *, farthest: int = 40) -> tuple[frozenset[str], int, bool] | None:
    found = succession(claims, 3, 1, farthest=farthest)
    return None if found is None else (found.heirs, found.step, found.late)


def test_the_heirs_of_a_lost_stage_have_what_the_others_wait_for() -> None:
    others = [training("a", 0, 57), training("c", 2, 57)]
    assert heirs([*others, waiting("b", 1, 57)]) == ({"b"}, 57, False)
    assert heirs([*others, waiting("b", 1, 0)]) is None
    assert heirs([*others, waiting("b", 1, 59)]) is None, "nobody goes back"
    assert heirs([*others, waiting("b", 1, 57), waiting("d", 1, 55)]) == ({"b"}, 57, False)
    assert heirs([*others, waiting("b", 1, 57), waiting("d", 1, 57, E)]) == ({"b"}, 57, False)
    # The stage before may have ended the step already, and the stage behind may still wait to hear of its end.
    assert heirs([training("a", 0, 58), waiting("b", 1, 57), training("c", 2, 56)]) == ({"b"}, 57, False)


def test_an_old_checkpoint_is_better_than_none_and_too_old_a_one_is_not() -> None:
    others = [training("a", 0, 57), training("c", 2, 56)]
    assert heirs([*others, waiting("b", 1, 50)]) == ({"b"}, 50, True)
    assert heirs([*others, waiting("b", 1, 50), waiting("d", 1, 20)]) == ({"b"}, 50, True)
    assert heirs([*others, waiting("b", 1, 17)]) == ({"b"}, 17, True)
    assert heirs([*others, waiting("b", 1, 16)]) is None
    assert heirs([training("a", 0, 59), waiting("b", 1, 57), training("c", 2, 57)]) == ({"b"}, 57, True)
    assert heirs([*others, waiting("b", 1, 55)], farthest=0) is None
    # Of three, one alone cannot lead the others on with something newer.
    assert heirs([*others, waiting("b", 1, 50), waiting("d", 1, 50), waiting("e", 1, 57)]) == ({"b", "d"}, 50, True)


def test_a_stage_that_is_held_or_stands_alone_has_no_heirs() -> None:
    here = waiting("b", 1, 57)
    assert heirs([training("a", 0, 57), here]) is None, "nobody knows where the third stage is"
    assert heirs([training("a", 0, 57), here, training("c", 1, 57), training("d", 2, 57)]) is None
    assert succession([waiting("a", 0, 57)], 1, 0, farthest=40) is None


def test_a_swarm_is_under_way_only_if_every_stage_trains() -> None:
    claims = [training("a", 0, 7), training("b", 1, 9), training("c", 2, 8)]
    assert under_way(claims, 3, me="x") == 9
    assert under_way(claims, 3, me="b") is None
    assert under_way([*claims[:2], waiting("c", 2, 9)], 3, me="x") is None
    assert under_way([claims[0], training("liar", 0, 10**9)], 3, me="x") is None
    assert under_way([], 3, me="x") is None


def test_the_newest_that_is_not_past_a_limit() -> None:
    assert newest_at_most({40, 50, 27}, 50) == 50
    assert newest_at_most({40, 50, 27}, 49) == 40
    assert newest_at_most({40}, 39) is None and newest_at_most((), 9) is None


stages = st.lists(st.lists(st.sets(st.integers(1, 6), max_size=3), min_size=1, max_size=4), min_size=1, max_size=4)


@given(stages)
def test_who_follows_the_rules_ends_where_all_can_begin_or_nobody_can(have: list[list[set[int]]]) -> None:
    """Nodes with any checkpoints offer their newest one, and lower the offer as long as a stage lacks it."""
    offered = [[max(steps, default=0) for steps in stage] for stage in have]
    for _ in range(100):
        claims = [
            waiting(f"{stage}-{index}", stage, step)
            for stage, row in enumerate(offered)
            for index, step in enumerate(row)
        ]
        meeting = meet(claims, len(have))
        changed = False
        for stage, row in enumerate(have):
            for index, steps in enumerate(row):
                older = newest_at_most(steps, meeting.step)
                if not meeting.lacking and offered[stage][index] > meeting.step and older is not None:
                    offered[stage][index], changed = older, True
        if not changed:
            break
    else:
        raise AssertionError("they never settle")
    if meeting.possible and meeting.step > 0:
        for stage, row in enumerate(have):
            holders = [f"{stage}-{index}" for index, steps in enumerate(row) if meeting.step in steps]
            assert meeting.founders[stage] and meeting.founders[stage] <= set(holders)
