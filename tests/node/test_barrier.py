"""When a step is over, who holds it up, and how no microbatch gets lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.barrier import HISTORY, MIN_LIMIT_SECONDS, Coverage, Deadline, EndBarrier
from tests.node.claims import names


def test_a_barrier_passes_once_every_live_upstream_replica_has_ended() -> None:
    barrier = EndBarrier()
    assert not barrier.passed(["a", "b"])
    barrier.end("a", 2.0)
    assert not barrier.passed(["a", "b"]) and barrier.waiting_for(["a", "b"]) == ["b"]
    barrier.end("b", 4.0)
    assert barrier.passed(["a", "b"]) and barrier.loss() == 3.0


def test_who_is_gone_or_excused_is_not_waited_for() -> None:
    barrier = EndBarrier()
    barrier.end("a", 1.0)
    assert barrier.passed(["a"])  # b's lease has ended
    barrier.excused.add("b")
    assert barrier.passed(["a", "b"])
    assert not barrier.passed(["a", "b", "c"])


def test_an_empty_or_wholly_excused_stage_ends_nothing() -> None:
    barrier = EndBarrier(excused={"a"})
    assert not barrier.passed([]) and not barrier.passed(["a"])


def test_the_first_end_counts_and_one_liar_does_not_move_the_median() -> None:
    barrier = EndBarrier()
    for peer, loss in (("a", 1.0), ("b", 1.1), ("liar", 1e9), ("a", 1e9)):
        barrier.end(peer, loss)
    assert barrier.loss() == 1.1


# coverage --------------------------------------------------------------------------------


def play(count: int, peers: list[str], fails: set[tuple[str, int]], deaths: dict[int, str]) -> Coverage:
    """Replicas train, fail and die, round after round; every live one keeps a coverage of its own."""
    views = {peer: Coverage(count=count) for peer in peers}
    trained: dict[str, dict[int, float]] = {peer: {} for peer in peers}
    failed: dict[str, set[int]] = {peer: set() for peer in peers}
    live = list(peers)
    assigned = {
        peer: [index for index in range(count) if index % len(peers) == place] for place, peer in enumerate(peers)
    }
    for round_number in range(count + len(peers) + 2):
        if deaths.get(round_number) in live and len(live) > 1:
            live.remove(deaths[round_number])
        for peer in live:
            for index in assigned[peer]:
                assert index not in trained[peer]
                if (peer, index) in fails:
                    failed[peer].add(index)
                else:
                    trained[peer][index] = float(index)
        for peer in live:
            for other in live:
                views[other].announce(peer, round_number, dict(trained[peer]), failed[peer])
        assert all(views[peer].waiting_for(live, round_number) == [] for peer in live)
        dealt = [views[peer].deal(live) for peer in live]
        assert all(entry == dealt[0] for entry in dealt)  # all of them compute alike
        missing = views[live[0]].missing(live)
        spread = sorted(index for part in dealt[0].values() for index in part)
        able = [index for index in missing if any(index not in failed[peer] for peer in live)]
        assert spread == able  # each to exactly one, and only what somebody can still do
        assert all(index not in failed[peer] for peer, part in dealt[0].items() for index in part)
        if not able:
            return views[live[0]]
        assigned = dealt[0]
    pytest.fail("the rounds do not end")


@given(st.integers(1, 12), st.integers(1, 5), st.data())
def test_whoever_fails_or_dies_every_microbatch_that_somebody_can_train_is_trained(
    count: int, size: int, data: st.DataObject
) -> None:
    peers = names(size)
    pairs = st.tuples(st.sampled_from(peers), st.integers(0, count - 1))
    fails = data.draw(st.sets(pairs, max_size=count * size))
    deaths = data.draw(st.dictionaries(st.integers(0, 4), st.sampled_from(peers), max_size=3))
    coverage = play(count, peers, fails, deaths)
    left = [peer for peer in peers if peer not in deaths.values()] or peers
    for index in range(count):
        if not deaths and any((peer, index) not in fails for peer in left):
            assert index in coverage.losses(peers)


def test_what_a_dead_replica_alone_had_trained_is_dealt_again() -> None:
    coverage = Coverage(count=4)
    coverage.announce("a", 0, {0: 0.5, 1: 0.5}, [])
    coverage.announce("b", 0, {2: 0.5, 3: 0.5}, [])
    assert coverage.missing(["a", "b"]) == []
    assert coverage.missing(["a"]) == [2, 3] and coverage.deal(["a"]) == {"a": [2, 3]}


def test_a_microbatch_at_which_all_have_failed_is_lost() -> None:
    coverage = Coverage(count=2)
    coverage.announce("a", 0, {0: 0.5}, [1])
    coverage.announce("b", 0, {}, [1])
    assert coverage.deal(["a", "b"]) == {"a": [], "b": []}
    assert coverage.deal(["a", "b", "new"]) == {"a": [], "b": [], "new": [1]}


def test_older_announcements_are_ignored_and_foreign_microbatches_do_not_count() -> None:
    coverage = Coverage(count=2)
    coverage.announce("a", 3, {0: 0.5}, [])
    coverage.announce("a", 2, {}, [0])
    coverage.announce("b", 3, {7: 0.1, -1: 0.1, 0: 9.0}, [])
    assert coverage.losses(["a", "b"]) == {0: 0.5} and coverage.losses(["b", "a"]) == {0: 0.5}
    assert coverage.waiting_for(["a", "b", "c"], 3) == ["c"]
    assert coverage.waiting_for(["a", "b"], 4) == ["a", "b"]


# deadline --------------------------------------------------------------------------------


def test_a_deadline_is_learnt_from_the_last_waits() -> None:
    deadline = Deadline(first_limit=60.0)
    for _ in range(2):
        deadline.learn(10.0)
        assert deadline.limit() == 60.0
    deadline.learn(10.0)
    assert deadline.limit() == 40.0
    deadline.learn(1000.0)  # one slow step does not make everybody patient
    assert deadline.limit() == 40.0


def test_a_deadline_forgets_old_waits_and_has_a_floor() -> None:
    deadline = Deadline(first_limit=60.0)
    for _ in range(HISTORY):
        deadline.learn(100.0)
    for _ in range(HISTORY):
        deadline.learn(0.01)
    assert deadline.limit() == MIN_LIMIT_SECONDS


@given(st.lists(st.floats(0.0, 1e4), min_size=3, max_size=60))
def test_a_usual_wait_is_never_overdue(waits: list[float]) -> None:
    deadline = Deadline(first_limit=60.0)
    for wait in waits:
        deadline.learn(wait)
    recent = sorted(waits[-HISTORY:])
    assert deadline.limit() >= max(MIN_LIMIT_SECONDS, recent[len(recent) // 2 - 1])
