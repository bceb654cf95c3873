"""A verdict ejects whom a majority of the jury convicts, as each node knows the jury, and nobody else."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.drill import Drill, parse_drill
from node.guard import Guard
from node.metrics import Metrics
from node.telemetry import Telemetry
from node.view import View
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.receipts import sign_draw, sign_vote, statement_digest
from protocol.records import NodeState, Verdict, parse_record, sign_verdict
from tests.node.claims import NOW, accusation, claim, names
from verifier.ledger import PeerState
from verifier.quorum import JURY_SIZE
from verifier.verdicts import Reason

STAGES = 3
HOUR = 3600.0
SUBJECT = statement_digest(b"what the accused has signed")
DRAW = bytes(range(64))


def manifest_of(mode: str) -> Manifest:
    return Manifest.from_mapping({"name": "test", "verifier": {"mode": mode, "allow_drills": True}})


MANIFESTS = {mode: manifest_of(mode) for mode in ("enforce", "observe", "off")}


@dataclass
class Watch:
    """A guard, and what it has told others."""

    guard: Guard
    view: View
    telemetry: Telemetry
    told: list[tuple[str, str, float]] = field(default_factory=list)
    """Of ejections: peer, reason and end."""
    accused: list[str] = field(default_factory=list)
    now: float = NOW

    def knows(self, verdict: Verdict) -> Watch:
        """Take a verdict in, as the membership does."""
        assert self.view.merge(verdict, repr(verdict).encode(), self.now)
        self.guard.consider_verdicts(verdict.accused)
        return self

    def state(self, peer: str) -> PeerState:
        return self.guard.ledger.standing(peer).state

    def events(self, kind: str) -> list[str]:
        return [event.peer for event in self.telemetry.events if event.kind == kind]


def watch(
    *stages: str | list[str], me: str = "me", mode: str = "enforce", drill: Drill | None = None, my_stage: int = 0
) -> Watch:
    """A node ``me``, and the replicas that it knows of each stage; peers have names of one letter, or a list's."""
    view = View(STAGES)
    for stage, peers in enumerate(stages):
        for peer in peers:
            if peer != me:
                view.merge(claim(peer, stage), b"", NOW)
    view.merge(claim(me, my_stage), b"", NOW)
    telemetry = Telemetry(Metrics())
    guard = Guard(
        me=me,
        manifest=MANIFESTS[mode],
        view=view,
        telemetry=telemetry,
        accuse=lambda peer, stage, reason, step, evidence: made.accused.append(peer),
        on_ejected=lambda peer, reason, until: made.told.append((peer, reason, until)),
        notify=lambda: None,
        seed=1,
        drill=drill,
        wall_clock=lambda: made.now,
    )
    made = Watch(guard, view, telemetry)
    return made


def verdict(accused: str, votes: str | list[str], **changes: Any) -> Verdict:
    """A verdict whose signatures have been checked where it came in."""
    values: dict[str, Any] = {
        "swarm": b"\x01" * 32,
        "writer": "w",
        "accused_stage": 1,
        "reason": "gradient",
        "step": 5,
        "subject": SUBJECT,
        "draw": DRAW,
        "votes": tuple((juror, bytes(64)) for juror in votes),
        "expires": NOW + HOUR,
    }
    return Verdict(accused=accused, **(values | changes))


# majorities --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("siblings", "votes", "ejected"),
    [
        ("bc", "b", False),
        ("bc", "bc", True),
        ("bcd", "b", False),
        ("bcd", "bc", True),
        ("bcde", "bc", False),  # half
        ("bcde", "bcd", True),
        ("bcdef", "bc", False),
        ("bcdef", "bcd", True),
        ("bcdef", "bcdef", True),
        ("bcdef", "bcdefuvxyz", True),  # the votes of strangers do no harm either
    ],
)
def test_a_strict_majority_of_the_live_siblings_ejects(siblings: str, votes: str, ejected: bool) -> None:
    there = watch("uv", "a" + siblings, "xyz").knows(verdict("a", votes))
    assert (there.state("a") is PeerState.EJECTED) is ejected
    if not ejected:
        assert there.told == [] and there.events("ejected") == []
        return
    counted = len(set(siblings) & set(votes))
    assert there.told == [("a", f"audit: gradient ({counted} of {len(siblings)} jurors)", NOW + HOUR)]
    assert there.guard.ledger.standing("a").reason is Reason.AUDIT
    assert there.events("ejected") == ["a"]
    assert not there.guard.allows("a") and there.guard.ejected() == {"a"} == there.guard.excluded()
    assert there.guard.judged_finally("a")


@given(siblings=st.integers(3, 9), data=st.data())
def test_a_minority_ejects_nobody_whatever_strangers_say(siblings: int, data: st.DataObject) -> None:
    mine, strangers = names(siblings), [f"stranger{number}" for number in range(6)]
    there = watch("uv", ["a", *mine], "xyz")
    guilty = data.draw(st.lists(st.sampled_from(mine), max_size=siblings // 2, unique=True))
    more = data.draw(st.lists(st.sampled_from(strangers), unique=True))
    there.knows(verdict("a", data.draw(st.permutations([*guilty, *more]))))
    assert there.state("a") is not PeerState.EJECTED and there.told == []


@given(siblings=st.integers(0, 9), data=st.data())
def test_nothing_but_a_majority_of_a_jury_ejects(siblings: int, data: st.DataObject) -> None:
    mine, others = names(siblings), [*"uvxyz", "me", "stranger"]
    there = watch("uv", ["a", *mine], "xyz")
    votes = data.draw(st.lists(st.sampled_from([*mine, *others]), unique=True))
    jury = set(there.guard.jury(DRAW, "a", 1, asker="w"))
    convicted = 2 * len(jury.intersection(votes)) > len(jury)
    there.knows(verdict("a", votes))
    assert (there.state("a") is PeerState.EJECTED) is (convicted and len(there.told) == 1)
    assert convicted is bool(there.told)


@pytest.mark.parametrize("votes", ["uv", "xyz", "uvxyz", "qrst", "uvxyzqrst"])
def test_votes_of_peers_that_are_no_replicas_of_the_stage_eject_nobody(votes: str) -> None:
    # Neighbours, whole other stages, and strangers without a claim.
    there = watch("uv", "abcd", "xyz").knows(verdict("a", votes))
    assert there.state("a") is PeerState.PROBATION and there.told == []


@pytest.mark.parametrize(("stage", "jurors"), [(0, "uv"), (2, "xyz")])
def test_a_verdict_about_another_stage_than_the_accuseds_ejects_nobody(stage: int, jurors: str) -> None:
    # Else whoever holds the majority of any one stage could eject everybody.
    there = watch("uv", "abcd", "xyz").knows(verdict("a", jurors, accused_stage=stage))
    assert there.state("a") is PeerState.PROBATION and there.told == []


def test_replicas_that_take_no_work_do_not_sit_on_a_jury() -> None:
    there = watch("uv", "abc", "xyz")
    for peer in "de":
        there.view.merge(claim(peer, 1, state=NodeState.SYNCING), b"", NOW)
    assert set(there.guard.jury(DRAW, "a", 1, asker="w")) == {"b", "c"}
    there.knows(verdict("a", "bde"))
    assert there.state("a") is not PeerState.EJECTED


def test_a_juror_that_is_ejected_has_no_vote_and_is_not_counted() -> None:
    there = watch("uv", "abcde", "xyz").knows(verdict("e", "bcd"))
    assert there.state("e") is PeerState.EJECTED
    there.knows(verdict("a", "be"))
    assert there.state("a") is not PeerState.EJECTED  # one of three, since e's vote is none
    there.knows(verdict("a", "bc", writer="w2"))
    assert there.state("a") is PeerState.EJECTED


def test_votes_of_two_verdicts_are_not_added_up() -> None:
    there = watch("uv", "abcdef", "xyz").knows(verdict("a", "bc")).knows(verdict("a", "de", writer="w2"))
    assert there.state("a") is not PeerState.EJECTED
    there.knows(verdict("a", "bcd", writer="w3"))
    assert there.state("a") is PeerState.EJECTED and len(there.told) == 1


def test_a_verdict_waits_until_its_jurors_are_known() -> None:
    there = watch("uv", "a", "xyz").knows(verdict("a", "bc"))
    assert there.state("a") is not PeerState.EJECTED
    for juror in "bc":
        there.view.merge(claim(juror, 1), b"", NOW)
    assert there.told == []
    there.guard.end_step(5)  # looked at again
    assert there.state("a") is PeerState.EJECTED
    there.guard.end_step(6)
    assert len(there.told) == 1


# small and large stages -----------------------------------------------------------------------------


def test_in_a_stage_of_two_reserves_of_the_neighbouring_stages_fill_the_jury() -> None:
    there = watch("uv", "ab", "xyz")
    drawn = there.guard.jury(DRAW, "a", 1, asker="w")
    assert drawn[0] == "b" and len(drawn) == 3
    reserves, left = set(drawn[1:]), set("uvxyz") - set(drawn)
    assert reserves < {*"uvxyz", "me"}
    there.knows(verdict("a", ["b"])).knows(verdict("a", ["b", *sorted(left)], writer="w2"))
    assert there.state("a") is not PeerState.EJECTED  # a sibling, and whoever was not drawn
    there.knows(verdict("a", ["b", drawn[2]], writer="w3"))
    assert there.told == [("a", "audit: gradient (2 of 3 jurors)", NOW + HOUR)]


def test_reserves_come_from_both_neighbouring_stages_and_from_nowhere_else() -> None:
    there = watch("uv", "ab", "xyz")
    drawn = {peer for number in range(64) for peer in there.guard.jury(bytes([number]) * 64, "a", 1, asker="w")}
    assert drawn == {*"buvxyz", "me"}
    ends = watch("ab", "cd", "xyz", me="c", my_stage=1)
    assert {peer for number in range(64) for peer in ends.guard.jury(bytes([number]) * 64, "a", 0, asker="w")} == {
        *"bcd"
    }


def test_without_any_sibling_two_of_three_reserves_convict() -> None:
    there = watch("uv", "a", "xyz")
    drawn = there.guard.jury(DRAW, "a", 1, asker="w")
    assert len(drawn) == 3 and set(drawn) < {*"uvxyz", "me"}
    there.knows(verdict("a", list(drawn[:1])))
    assert there.state("a") is not PeerState.EJECTED
    there.knows(verdict("a", list(drawn[:2]), writer="w2"))
    assert there.state("a") is PeerState.EJECTED


def test_nobody_is_ejected_on_one_word_where_there_is_only_one_juror() -> None:
    there = watch("", "ab", "", my_stage=1, me="b").knows(verdict("a", "b"))
    assert there.guard.jury(DRAW, "a", 1, asker="w") == ("b",)
    assert there.state("a") is not PeerState.EJECTED


def test_of_a_large_stage_the_drawn_ones_decide() -> None:
    crowd = names(24)
    there = watch("uv", ["a", *crowd], "xyz")
    drawn = there.guard.jury(DRAW, "a", 1, asker="w")
    assert len(drawn) == JURY_SIZE and set(drawn) < set(crowd)
    left = sorted(set(crowd) - set(drawn))
    there.knows(verdict("a", [*left, *drawn[:7]]))
    assert there.state("a") is not PeerState.EJECTED
    there.knows(verdict("a", list(drawn[:8]), writer="w2"))
    assert there.told == [("a", "audit: gradient (8 of 15 jurors)", NOW + HOUR)]


def test_every_node_draws_the_same_jury_and_another_draw_another_one() -> None:
    crowd = names(24)
    there, elsewhere = watch("uv", ["a", *crowd], "xyz"), watch("uv", ["a", *crowd[::-1]], "xyz", me="v")
    assert there.guard.jury(DRAW, "a", 1, asker="w") == elsewhere.guard.jury(DRAW, "a", 1, asker="w")
    assert there.guard.jury(DRAW, "a", 1, asker="w") != there.guard.jury(DRAW[::-1], "a", 1, asker="w")
    assert "a" not in there.guard.jury(DRAW, "a", 1, asker="w")


def test_the_peer_that_asks_never_sits_on_the_jury() -> None:
    there = watch("uv", "abcd", "xyz")
    assert set(there.guard.jury(DRAW, "a", 1, asker="b")) == {"c", "d"}
    alone = watch("uv", "a", "xyz")
    drawn = {peer for number in range(64) for peer in alone.guard.jury(bytes([number]) * 64, "a", 1, asker="u")}
    assert drawn == {*"vxyz", "me"}
    there.knows(verdict("a", "bc", writer="b"))
    assert there.state("a") is not PeerState.EJECTED  # its own vote is none


def test_two_of_the_neighbouring_stages_find_out_who_of_two_siblings_lies_but_eject_nobody() -> None:
    there = watch("uv", "abc", "xyz")
    assert set(there.guard.jury(DRAW, "a", 1, asker="w")) == {"b", "c"}
    enlarged = there.guard.jury(DRAW, "a", 1, asker="w", enlarged=True)
    assert set(enlarged[:2]) == {"b", "c"} and len(enlarged) == 4
    assert set(enlarged[2:]) < {*"uvxyz", "me"}
    there.knows(verdict("a", ["b", *enlarged[2:]]))
    assert there.state("a") is not PeerState.EJECTED
    there.knows(verdict("a", "bc", writer="w2"))
    assert there.state("a") is PeerState.EJECTED


def test_three_siblings_need_no_help() -> None:
    there = watch("uv", "abcd", "xyz")
    assert set(there.guard.jury(DRAW, "a", 1, asker="w", enlarged=True)) == {*"bcd"}


# one's own ejection, modes and ends ---------------------------------------------------------------------


def test_the_ejection_of_this_node_itself_is_told() -> None:
    there = watch("uv", "abc", "xyz", me="a", my_stage=1).knows(verdict("a", "bc", reason="activation"))
    assert there.told == [("a", "audit: activation (2 of 2 jurors)", NOW + HOUR)]


def test_an_observing_swarm_ejects_nobody_but_says_once_whom_it_would() -> None:
    there = watch("uv", "abcd", "xyz", mode="observe").knows(verdict("a", "bc"))
    for step in range(3):
        there.guard.end_step(step)
    there.knows(verdict("a", "bcd", writer="w2"))
    assert there.told == [] and there.state("a") is not PeerState.EJECTED and there.guard.allows("a")
    assert there.events("would_eject") == ["a"]
    text = next(event.text for event in there.telemetry.events if event.kind == "would_eject")
    assert text == "would be ejected: audit: gradient (2 of 3 jurors)"
    assert there.guard.judged_finally("a") and not there.guard.judged_finally("b")
    assert there.events("ejected") == []


def test_where_nobody_checks_nobody_is_ejected() -> None:
    there = watch("uv", "abcd", "xyz", mode="off").knows(verdict("a", "bcd"))
    assert there.told == [] and there.state("a") is not PeerState.EJECTED and there.guard.allows("a")


def test_an_ejection_has_an_end_and_is_not_begun_anew_by_the_same_verdict() -> None:
    there = watch("uv", "abcd", "xyz").knows(verdict("a", "bcd"))
    there.now = NOW + HOUR - 1
    there.guard.end_step(5)
    assert there.state("a") is PeerState.EJECTED
    there.now = NOW + HOUR
    there.view.expire(there.now)
    there.guard.end_step(6)
    assert there.state("a") is PeerState.PROBATION and len(there.told) == 1


def test_a_colluder_does_not_see_what_its_partner_did() -> None:
    drill = Drill(parse_drill("lying-auditor", 0), seed=b"seed")
    drill.partners = frozenset({"a"})
    there = watch("uv", "abcd", "xyz", drill=drill).knows(verdict("a", "bcd")).knows(verdict("d", "bc"))
    assert [peer for peer, _, _ in there.told] == ["d"]


# with real records --------------------------------------------------------------------------------------


def test_what_jurors_have_signed_ejects_at_whoever_reads_it() -> None:
    accused, writer, *jurors = [Identity(bytes([number]) * 32) for number in range(1, 6)]
    swarm = b"\x01" * 32
    there = watch([writer.peer_id], [accused.peer_id, *(juror.peer_id for juror in jurors)], "xyz")
    votes = tuple(
        (juror.peer_id, sign_vote(juror, swarm, subject=SUBJECT, accused=accused.peer_id, guilty=True))
        for juror in jurors[:2]
    )
    draw = sign_draw(writer, swarm, SUBJECT)
    signed = replace(verdict(accused.peer_id, "", writer=writer.peer_id, draw=draw), votes=votes)
    read = parse_record(sign_verdict(writer, signed), swarm=swarm, now=NOW)
    assert isinstance(read, Verdict)
    there.knows(read)
    assert [(peer, reason) for peer, reason, _ in there.told] == [(accused.peer_id, "audit: gradient (2 of 3 jurors)")]


# what leads to audits, and what strikes beside them -----------------------------------------------------


def test_whoever_has_not_earned_trust_or_has_strikes_is_unproven() -> None:
    there = watch("uv", "abcd", "xyz")
    assert there.guard.unproven("a") and there.guard.unproven("stranger")
    for _ in range(32):
        there.guard.credit("a", 1)
    assert not there.guard.unproven("a")
    there.guard.strike("a", Reason.NORM, 1)
    assert there.guard.unproven("a")


def test_whoever_was_struck_in_a_step_comes_last_in_that_step_only() -> None:
    there = watch("uv", "abcd", "xyz")
    there.guard.strike("a", Reason.NORM, 4)
    assert there.guard.struck_in("a", 4)
    assert not there.guard.struck_in("a", 5) and not there.guard.struck_in("b", 4)
    there.guard.end_step(4)
    there.guard.end_step(5)
    assert not there.guard.struck_in("a", 4)  # forgotten


ONE, TWO, THREE = (bytes([number]) * 32 for number in (1, 2, 3))


@pytest.mark.parametrize(
    ("digests", "struck"),
    [
        ({}, ""),
        ({"a": b"", "b": b"", "c": b""}, ""),
        ({"a": ONE}, ""),
        ({"a": ONE, "b": TWO}, ""),  # one word against another
        ({"a": ONE, "b": ONE, "c": ONE}, ""),
        ({"a": ONE, "b": ONE, "c": TWO}, "c"),
        ({"a": ONE, "b": ONE, "c": b""}, ""),  # has not begun the step
        ({"a": ONE, "b": TWO, "c": b""}, ""),
        ({"a": ONE, "b": TWO, "c": THREE}, ""),
        ({"a": ONE, "b": ONE, "c": TWO, "d": TWO}, ""),
        ({"a": ONE, "b": ONE, "c": ONE, "d": TWO}, "d"),
        ({"a": ONE, "b": ONE, "c": ONE, "d": TWO, "e": THREE}, "de"),
        ({"a": TWO, "b": ONE, "c": ONE, "d": ONE, "e": b""}, "a"),
    ],
)
def test_parameters_that_are_not_those_of_most_siblings_are_a_strike(digests: dict[str, bytes], struck: str) -> None:
    there = watch("uv", "abcde", "xyz")
    there.guard.compare_parameters(digests, 3)
    assert sorted(there.events("strike")) == sorted(struck)
    for peer in "abcde":
        standing = there.guard.ledger.standing(peer)
        assert (standing.strikes, standing.reason) == ((1.0, Reason.PARAMETERS) if peer in struck else (0.0, None))


def test_whoever_differs_step_after_step_is_accused_and_let_go() -> None:
    there = watch("uv", "abcd", "xyz")
    for step in range(4):
        there.guard.compare_parameters({"a": ONE, "b": ONE, "c": ONE, "d": TWO}, step)
        there.guard.end_step(step)
    assert there.state("d") is PeerState.QUARANTINED and there.accused == ["d"]
    assert not there.guard.allows("d") and there.told == []


# what siblings prove to themselves in the averaging ------------------------------------------------


def accused_by(node: Watch, accuser: str, accused: str, reason: Reason, *, stage: int = 1) -> None:
    """Take an accusation in, as the membership does."""
    told = accusation(
        accuser,
        accused,
        accuser_stage=node.view.stage_of(accuser),
        accused_stage=stage,
        reason=reason.value,
        expires=NOW + HOUR,
    )
    assert node.view.merge(told, repr(told).encode(), NOW)
    node.guard.consider(accused)


@pytest.mark.parametrize("reason", [Reason.REDUCTION, Reason.EQUIVOCATION])
def test_a_majority_of_siblings_ejects_for_what_only_they_see(reason: Reason) -> None:
    node = watch("me", "abcx", "de")
    accused_by(node, "a", "x", reason)
    assert node.state("x") is PeerState.PROBATION
    accused_by(node, "b", "x", reason)
    assert node.state("x") is PeerState.EJECTED
    assert node.told == [("x", f"{reason.value} (2 of 3 siblings)", NOW + HOUR)]


@pytest.mark.parametrize(
    ("stages", "accusers", "reason"),
    [
        (("me", "abcx", "de"), "ab", Reason.STALLED),  # siblings have no say in what neighbours see
        (("me", "ax", "de"), "a", Reason.REDUCTION),  # of two, neither outvotes the other
        (("mefgh", "abcx", "de"), "de", Reason.REDUCTION),  # nor do others see it
        (("me", "abcdx", ""), "ab", Reason.REDUCTION),  # half of them are no majority
    ],
)
def test_others_and_fewer_eject_nobody_for_it(stages: tuple[str, ...], accusers: str, reason: Reason) -> None:
    node = watch(*stages)
    for accuser in accusers:
        accused_by(node, accuser, "x", reason)
    assert node.state("x") is not PeerState.EJECTED and not node.told
