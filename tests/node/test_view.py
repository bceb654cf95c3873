"""The view does not depend on the order in which claims arrive, and forgets in time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node import view as module
from node.view import STALE_WAIT_STEPS, TAKES_WORK, View
from protocol.records import Claim, NodeState, Record, Verdict
from tests.node.claims import NOW, SWARM, accusation, claim

CLAIMS = st.builds(
    claim,
    peer=st.sampled_from("abc"),
    stage=st.integers(0, 3),  # 3 is not a stage of the swarm
    generation=st.integers(1, 3),
    sequence=st.integers(0, 3),
    state=st.sampled_from([NodeState.TRAINING, NodeState.SYNCING]),
    expires=st.sampled_from([NOW - 1, NOW + 30, NOW + 60]),
)
ACCUSATIONS = st.builds(
    accusation,
    accuser=st.sampled_from("abc"),
    accused=st.sampled_from("xy"),
    expires=st.sampled_from([NOW + 10, NOW + 20, NOW + 30]),
)


def verdict(writer: str, accused: str, **changes: Any) -> Verdict:
    """A verdict that holds for a while; its proof is checked before it gets here."""
    values: dict[str, Any] = {
        "swarm": SWARM,
        "accused_stage": 1,
        "reason": "gradient",
        "step": 1,
        "subject": bytes(32),
        "draw": bytes(64),
        "votes": (("j", bytes(64)), ("k", bytes(64))),
        "expires": NOW + 100,
    }
    return Verdict(writer=writer, accused=accused, **(values | changes))


VERDICTS = st.builds(
    verdict,
    writer=st.sampled_from("abc"),
    accused=st.sampled_from("xy"),
    accused_stage=st.integers(0, 3),
    expires=st.sampled_from([NOW + 10, NOW + 20, NOW + 30]),
)


def data_of(record: Record) -> bytes:
    return repr(record).encode()


def viewing(records: Sequence[Record]) -> View:
    view = View(num_stages=3)
    for record in records:
        view.merge(record, data_of(record), NOW)
    return view


@given(st.lists(st.one_of(CLAIMS, ACCUSATIONS, VERDICTS), max_size=12), st.data())
def test_any_order_of_the_same_records_gives_the_same_view(records: list[Record], data: st.DataObject) -> None:
    one, two = viewing(records), viewing(data.draw(st.permutations(records)) + records[:3])
    assert one.claims == two.claims and one.signed == two.signed
    assert one.accusations == two.accusations and one.signed_accusations == two.signed_accusations
    assert {key: entry.expires for key, entry in one.verdicts.items()} == {
        key: entry.expires for key, entry in two.verdicts.items()
    }
    assert all(one.signed_verdicts[key] == data_of(entry) for key, entry in one.verdicts.items())
    assert one.signed_verdicts.keys() == one.verdicts.keys()
    assert set(one.signed) == set(one.claims) and set(one.signed_accusations) == set(one.accusations)
    assert all(one.signed[peer] == data_of(held) for peer, held in one.claims.items())


@given(st.lists(CLAIMS, max_size=12))
def test_the_newest_valid_claim_of_a_peer_counts(claims: list[Claim]) -> None:
    view = viewing(claims)
    valid = [entry for entry in claims if entry.stage < 3 and entry.expires > NOW]
    assert set(view.claims) == {entry.peer for entry in valid}
    for peer, held in view.claims.items():
        newest = max((entry.generation, entry.sequence) for entry in valid if entry.peer == peer)
        assert (held.generation, held.sequence) == newest


def test_a_peer_that_signs_two_claims_with_one_number_is_seen_alike_by_all() -> None:
    two_faced = [claim("a", stage) for stage in (0, 1)]
    assert viewing(two_faced).claims == viewing(two_faced[::-1]).claims
    assert len(viewing(two_faced).claims) == 1


def test_merge_tells_whether_a_claim_says_anything_new_to_others() -> None:
    view = View(num_stages=3)

    def merged(entry: Claim) -> bool:
        return view.merge(entry, data_of(entry), NOW)

    assert merged(claim("a"))
    assert not merged(claim("a"))
    assert not merged(claim("a", sequence=1, step=9))  # a renewal
    assert view.claims["a"].step == 9
    assert merged(claim("a", sequence=2, stage=1))
    assert merged(claim("a", 1, sequence=3, state=NodeState.DRAINING))
    assert merged(claim("a", 1, sequence=4, state=NodeState.DRAINING, active_from=4))
    assert not merged(claim("a", sequence=3, stage=2))  # older
    assert not merged(claim("b", 3)) and not merged(claim("b", expires=NOW))


def test_a_peer_found_dead_is_out_until_it_claims_anew() -> None:
    view = viewing([claim("a", sequence=5), claim("b")])
    assert view.mark_gone("a")
    assert not view.mark_gone("a") and not view.mark_gone("nobody")
    assert view.stage_of("a") is None and view.stage_of("b") == 0
    for old in (claim("a", sequence=5), claim("a", sequence=4), claim("a", 1, sequence=5)):
        assert not view.merge(old, data_of(old), NOW)
    newer = claim("a", sequence=6)
    assert view.merge(newer, data_of(newer), NOW) and view.stage_of("a") == 0
    view.mark_gone("a")
    restarted = claim("a", generation=2, sequence=0)
    assert view.merge(restarted, data_of(restarted), NOW)


def test_the_last_stage_of_a_peer_is_remembered_when_it_has_left() -> None:
    view = View(3)
    assert view.last_stage("a") is None
    for generation, stage in enumerate((0, 2, 0), start=1):
        view.merge(claim("a", stage, generation=generation), b"", NOW)
        assert view.last_stage("a") == stage
    view.mark_gone("a")
    assert view.stage_of("a") is None and view.last_stage("a") == 0


def test_leases_and_accusations_run_out() -> None:
    view = viewing(
        [
            claim("a"),
            claim("b", expires=NOW + 60),
            accusation("a", "x"),
            accusation("b", "x", expires=NOW + 200),
        ]
    )
    assert view.expire(NOW + 29) == []
    assert [claim.peer for claim in view.expire(NOW + 30)] == ["a"]
    assert set(view.claims) == set(view.signed) == {"b"}
    old = claim("a", expires=NOW + 500)
    assert not view.merge(old, data_of(old), NOW + 31)  # the same number again, with a longer lease
    assert [claim.peer for claim in view.expire(NOW + 100)] == ["b"]
    assert set(view.accusers("x")) == {"b"}
    view.expire(NOW + 200)
    assert view.accusers("x") == {} and list(view.records()) == []


def test_the_longest_accusation_of_an_accuser_counts_and_only_the_first_is_news() -> None:
    view = View(num_stages=3)
    for entry, new in (
        (accusation("a", "x"), True),
        (accusation("a", "x", expires=NOW + 50), False),
        (accusation("a", "x", expires=NOW + 300), False),
        (accusation("b", "x"), True),
        (accusation("a", "y"), True),
    ):
        assert view.merge(entry, data_of(entry), NOW) is new
    assert view.accusers("x")["a"].expires == NOW + 300
    assert set(view.accusers("x")) == {"a", "b"} and view.accusers("nobody") == {}


def test_the_longest_verdict_of_a_writer_counts_and_each_longer_one_is_news() -> None:
    view = View(num_stages=3)
    for entry, new in (
        (verdict("a", "x"), True),
        (verdict("a", "x", reason="activation"), False),  # as long as the one that is known
        (verdict("a", "x", expires=NOW + 50), False),
        (verdict("a", "x", expires=NOW + 300), True),
        (verdict("b", "x"), True),
        (verdict("a", "y"), True),
    ):
        assert view.merge(entry, data_of(entry), NOW) is new
    assert {entry.writer: entry.expires for entry in view.verdicts_on("x")} == {"a": NOW + 300, "b": NOW + 100}
    assert [entry.writer for entry in view.verdicts_on("y")] == ["a"] and view.verdicts_on("nobody") == []
    longest = verdict("a", "x", expires=NOW + 300)
    assert view.verdicts[("x", "a")] == longest and view.signed_verdicts[("x", "a")] == data_of(longest)
    assert view.accusations == {} and view.claims == {}


def test_a_finding_about_a_stage_that_does_not_exist_is_not_taken_in() -> None:
    view = View(num_stages=3)
    for finding in (verdict("a", "x", accused_stage=3), accusation("a", "x", accused_stage=127)):
        assert not view.merge(finding, data_of(finding), NOW)
    assert view.verdicts == {} and view.accusations == {} and list(view.records()) == []


def test_verdicts_run_out() -> None:
    view = viewing([claim("c"), verdict("a", "x"), verdict("b", "x", expires=NOW + 200)])
    assert [claim.peer for claim in view.expire(NOW + 99)] == ["c"]  # its lease is none of theirs
    assert len(view.verdicts_on("x")) == 2
    assert view.expire(NOW + 100) == []
    assert [entry.writer for entry in view.verdicts_on("x")] == ["b"]
    assert set(view.signed_verdicts) == {("x", "b")}
    view.expire(NOW + 200)
    assert not view.verdicts and not view.signed_verdicts and list(view.records()) == []


def test_whoever_asks_for_the_view_gets_claims_then_accusations_then_verdicts() -> None:
    known: list[Record] = [verdict("a", "x"), accusation("a", "x"), claim("a")]
    assert list(viewing(known).records()) == [data_of(record) for record in reversed(known)]


def test_the_roster_holds_those_who_take_work_in_a_step_in_order() -> None:
    view = viewing(
        [
            claim("d", active_from=5),
            claim("c"),
            claim("b", state=NodeState.WAITING),
            claim("a", state=NodeState.PROBATION),
            claim("e", 1),
            *(
                claim(f"idle-{state}", state=state)
                for state in NodeState
                if state not in (NodeState.TRAINING, NodeState.WAITING, NodeState.PROBATION)
            ),
        ]
    )

    def roster(step: int, without: set[str] = frozenset()) -> str:  # type: ignore[assignment]
        return "".join(entry.peer for entry in view.roster(0, step, without=without))

    assert roster(0) == "abc"
    assert roster(STALE_WAIT_STEPS) == "abc"
    assert roster(STALE_WAIT_STEPS + 1) == "ac"  # b still waits for a start that it has not heard of
    assert roster(4) == "ac" and roster(5) == "acd"
    renewed = claim("b", state=NodeState.WAITING, step=9, active_from=9, sequence=1)  # it has a checkpoint of step 9
    view.merge(renewed, data_of(renewed), NOW)
    assert [roster(step) for step in (8, 9, 9 + STALE_WAIT_STEPS, 10 + STALE_WAIT_STEPS)] == [
        "acd",
        "abcd",
        "abcd",
        "acd",
    ]
    assert roster(5, {"a", "c"}) == "d"
    assert [entry.peer for entry in view.roster(1, 0)] == ["e"] and view.roster(2, 0) == []
    assert len(view.replicas(0)) == 4 + len(NodeState) - len(TAKES_WORK)


def test_missing_names_the_stages_that_lack_replicas() -> None:
    waiting = {"state": NodeState.WAITING, "step": 9, "active_from": 9}  # with a checkpoint of step 9
    gone = {"state": NodeState.DRAINING}
    view = viewing([claim("a"), claim("b", **waiting), claim("c", 1, **waiting), claim("late", 1, **gone)])
    assert view.missing(2) == {1: 1, 2: 2}
    assert view.missing(1) == {2: 1}
    assert view.missing(1, without={"c"}) == {1: 1, 2: 1}
    assert View(num_stages=2).missing(1) == {0: 1, 1: 1}
    fetching = claim("d", 2, state=NodeState.SYNCING)  # it holds its stage, and waits for nobody but its siblings
    assert viewing([claim("a"), claim("c", 1), fetching]).missing(1) == {}


def test_the_begun_step_is_the_newest_of_those_who_train() -> None:
    view = viewing(
        [
            claim("a", step=3),
            claim("b", step=7, state=NodeState.PROBATION),
            claim("c", step=9, state=NodeState.WAITING),
            claim("d", step=9, state=NodeState.SYNCING),
        ]
    )
    assert view.begun_step() == 7
    assert view.begun_step(without={"b"}) == 3
    assert view.begun_step(without={"a", "b"}) is None


def test_the_view_does_not_grow_without_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_CLAIMS", 4)
    monkeypatch.setattr(module, "MAX_ACCUSATIONS", 4)
    monkeypatch.setattr(module, "MAX_VERDICTS", 4)
    crowd = [str(index) for index in range(6)]
    view = viewing([make for who in crowd for make in (claim(who), accusation(who, "x"), verdict(who, "x"))])
    assert len(view.claims) == len(view.accusations) == len(view.verdicts) == len(view.signed_verdicts) == 4
    longer = verdict("0", "x", expires=NOW + 200)
    assert view.merge(longer, data_of(longer), NOW)  # those who are in may prolong
    assert len(view.verdicts) == 4
    renewed = claim("0", sequence=1, step=5)
    view.merge(renewed, data_of(renewed), NOW)
    assert view.claims["0"].step == 5  # those who are in may renew
    for round_number in range(10):
        for index in range(4):
            entry = claim(f"{round_number}-{index}", expires=NOW + 31 + round_number)
            view.merge(entry, data_of(entry), NOW + 30 + round_number)
        view.expire(NOW + 31 + round_number)
    assert len(view._newest) <= 5 * 4
