"""What many nodes' views and statuses add up to: who is there, where the swarm is, and that no single one decides."""

from __future__ import annotations

import math

import pytest

from node.observing import picture as module
from node.observing.curve import WINDOW_STEPS, Curve
from node.observing.picture import FORGET_SECONDS, MAX_ASKED, MAX_KNOCKED, VIEWS, Picture, Presence
from node.observing.reports import Outline, read_report
from node.observing.told import judged, tell
from protocol.records import NodeState
from tests.node.observed import NOW, SWARM, accused, address, claimed, event, peer, replica, status

OUTLINE = Outline(name="tiny", stages=3, steps=40)


def fresh(*seeds: int) -> Picture:
    made = Picture(swarm=SWARM)
    made.add_seeds([(peer(seed), address(seed)) for seed in seeds], NOW)
    return made


def seen(count: int = 3, **changes: object) -> Picture:
    """Nodes 0, 1, ... of stages 0, 1, 2, 0, ..., all of which answer."""
    made = fresh()
    made.know(OUTLINE)
    made.merge([[claimed(number, number % 3) for number in range(count)]], NOW)
    made.meet(NOW)
    for number in range(count):
        made.answered(peer(number), read_report(status(**changes)), NOW)
    made.settle(NOW)
    return made


# who is there ---------------------------------------------------------------------------


def test_the_union_of_views_counts_so_that_one_seed_hides_nobody() -> None:
    made = fresh()
    made.merge([[claimed(0)], [claimed(1), claimed(2)], []], NOW)
    made.settle(NOW)
    assert set(made.nodes) == {peer(0), peer(1), peer(2)}
    assert {node.presence for node in made.nodes.values()} == {Presence.UNASKED}


def test_a_node_is_answering_then_silent_then_gone_then_forgotten() -> None:
    made = seen(1)
    node = made.nodes[peer(0)]
    assert (node.presence, node.since) == (Presence.ANSWERING, NOW)
    made.failed(peer(0), NOW + 5)
    made.settle(NOW + 5)
    assert (node.presence, node.since) == (Presence.SILENT, NOW + 5)
    made.settle(NOW + 20)
    assert (node.presence, node.since) == (Presence.SILENT, NOW + 5)
    made.settle(NOW + 31)  # its lease is over
    assert (node.presence, node.since) == (Presence.GONE, NOW + 31)
    told = tell(made, NOW + 41, started=NOW)
    assert [(entry["state"], entry["for_seconds"]) for entry in told["replicas"]] == [("gone", 10)]
    made.settle(NOW + 32 + FORGET_SECONDS)
    assert made.nodes == {}


def test_a_node_that_comes_back_answers_again() -> None:
    made = seen(1)
    made.failed(peer(0), NOW + 5)
    made.settle(NOW + 40)
    assert made.nodes[peer(0)].presence is Presence.GONE and made.to_ask() == []
    made.merge([[claimed(0, now=NOW + 50, generation=2)]], NOW + 50)
    made.settle(NOW + 50)
    assert [node.peer for node in made.to_ask()] == [peer(0)]
    made.answered(peer(0), read_report(status()), NOW + 51)
    made.settle(NOW + 51)
    assert made.nodes[peer(0)].presence is Presence.ANSWERING


def test_a_node_without_a_claim_is_there_as_long_as_it_answers() -> None:
    made = fresh(9)
    made.settle(NOW)
    assert made.shown() == []  # a seed that never was there is nothing to show
    made.answered(peer(9), read_report(status(coordinator=True)), NOW)
    made.settle(NOW)
    assert [node.presence for node in made.shown()] == [Presence.ANSWERING]
    made.failed(peer(9), NOW + 1)
    made.settle(NOW + 1)
    assert [node.presence for node in made.shown()] == [Presence.GONE]
    made.settle(NOW + 2 * FORGET_SECONDS)
    assert [node.peer for node in made.to_ask()] == [peer(9)]  # a seed is tried for ever


def test_only_signed_records_of_this_swarm_and_its_stages_count() -> None:
    made = fresh()
    made.know(OUTLINE)
    forged = bytearray(claimed(0))
    forged[-1] ^= 1
    foreign = claimed(1, swarm=b"\x02" * 32)
    old = claimed(2, expires=NOW - 1)
    late = claimed(3, expires=NOW + 10_000)
    made.merge([[bytes(forged), foreign, old, late, b"", b"\xc1", claimed(4, stage=3), claimed(5, stage=2)]], NOW)
    made.settle(NOW)
    assert set(made.nodes) == {peer(5)}


def test_claims_of_stages_that_the_manifest_does_not_have_go_once_it_is_known() -> None:
    made = fresh()
    made.merge([[claimed(0, stage=100), claimed(1, stage=1)]], NOW)
    made.know(OUTLINE)
    made.settle(NOW)
    assert set(made.nodes) == {peer(1)}


# limits ---------------------------------------------------------------------------------


def test_a_view_full_of_strangers_does_not_keep_out_those_of_other_views(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NODES", 20)
    made = fresh()
    made.merge([[claimed(number) for number in range(100, 160)], [claimed(0), claimed(1)]], NOW)
    made.settle(NOW)
    assert {peer(0), peer(1)} <= set(made.nodes) and len(made.nodes) == 20


def test_of_a_full_table_those_who_never_answered_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_NODES", 10)
    made = fresh()
    made.merge([[claimed(0), *(claimed(number) for number in range(100, 120))]], NOW)
    made.settle(NOW)
    made.answered(peer(0), read_report(status()), NOW)
    for number in range(100, 120):
        made.failed(peer(number), NOW)
    made.settle(NOW)
    made.merge([[claimed(number) for number in range(1, 6)]], NOW + 1)
    made.settle(NOW + 1)
    assert {peer(number) for number in range(6)} <= set(made.nodes) and len(made.nodes) == 10
    assert made.nodes[peer(0)].presence is Presence.ANSWERING


def test_a_round_asks_so_many_and_comes_to_everybody_in_the_end() -> None:
    made = fresh()
    made.merge([[claimed(number) for number in range(300)]], NOW)
    made.settle(NOW)
    met: set[str] = set()
    for turn in range(1, 40):
        asked = made.to_ask()
        assert len(asked) <= MAX_ASKED + MAX_KNOCKED
        met.update(node.peer for node in asked)
        for node in asked:
            made.answered(node.peer, read_report(status()), NOW + turn / 10)
    assert len(met) == 300


def test_some_of_the_answering_nodes_are_asked_for_their_view_and_at_first_everybody() -> None:
    made = seen(12)
    assert len(made.to_view(made.to_ask())) == VIEWS
    alone = fresh(1, 2, 3)
    assert len(alone.to_view(alone.to_ask())) == 3


# where the swarm is ---------------------------------------------------------------------


def test_step_and_loss_are_the_middle_of_what_those_who_train_tell() -> None:
    made = seen(5)
    made.answered(peer(0), read_report(status(step=10**9, loss=0.0)), NOW)
    made.answered(peer(1), read_report(status(step=0, loss=1e5)), NOW)
    made.settle(NOW)
    assert (made.step, made.loss) == (7, 3.5)


def test_newcomers_do_not_count_where_others_train() -> None:
    made = fresh()
    made.merge([[claimed(0), *(claimed(number, state=NodeState.SYNCING) for number in range(1, 5))]], NOW)
    made.meet(NOW)
    made.answered(peer(0), read_report(status(step=30)), NOW)
    for number in range(1, 5):
        made.answered(peer(number), read_report(status(step=0, loss=None)), NOW)
    made.settle(NOW)
    assert (made.step, made.loss) == (30, 3.5)


def test_the_curve_is_collected_over_time_and_each_step_is_the_middle_of_its_tellers() -> None:
    curve = Curve()
    for step in range(200):
        for teller, loss in (("a", 1.0), ("b", 2.0), ("c", 1e6)):
            curve.add(teller, [(step, loss), (max(step - 1, 0), loss)], step=step)
        curve.close(step=step)
    assert curve.points() == [(step, 2.0) for step in range(200)]
    curve.add("d", [(3, 9.0), (10**9, 9.0)], step=199)
    assert len(curve.points()) == 200 and len(curve._open) == WINDOW_STEPS


@pytest.mark.parametrize(
    ("step", "states", "word"),
    [
        (7, [NodeState.TRAINING], "training"),
        (40, [NodeState.TRAINING], "finished"),
        (0, [NodeState.WAITING], "waiting"),
    ],
)
def test_the_state_of_the_swarm_is_told_in_the_words_for_nodes(step: int, states: list[NodeState], word: str) -> None:
    made = fresh()
    assert tell(made, NOW, started=NOW)["state"] == "bootstrapping"
    made.settle(NOW)
    assert tell(made, NOW, started=NOW)["state"] == "isolated"
    made.know(OUTLINE)
    made.merge([[claimed(number, state=state) for number, state in enumerate(states)]], NOW)
    made.meet(NOW)
    made.answered(peer(0), read_report(status(step=step)), NOW)
    made.settle(NOW)
    told = tell(made, NOW, started=NOW - 9)
    assert (told["state"], told["name"], told["steps"], told["stages"]) == (word, "tiny", 40, 3)
    assert told["uptime_seconds"] == 9


# what nodes tell of each other ------------------------------------------------------------


def test_neighbours_judge_and_neither_a_node_itself_nor_those_far_away() -> None:
    made = fresh()
    made.know(Outline(name="", stages=5, steps=0))
    made.merge([[claimed(number, stage) for number, stage in enumerate((0, 1, 1, 2, 4))]], NOW)
    made.meet(NOW)
    bad, good = [replica(1, "ejected", 0.0)], [replica(1, "trusted", 1.0)]
    for number, standings in enumerate((bad, good, bad, bad, good)):
        made.answered(peer(number), read_report(status(replicas=standings)), NOW)
    made.settle(NOW)
    assert judged(made) == {peer(1): ("ejected", 0.0)}
    (row,) = [row for row in tell(made, NOW, started=NOW)["replicas"] if row["peer"] == peer(1)]
    assert row["standing"] == {"state": "ejected", "trust": 0.0}


def test_one_liar_among_the_neighbours_ejects_nobody() -> None:
    made = seen(6)
    made.answered(peer(0), read_report(status(replicas=[replica(1, "ejected", 0.0)])), NOW)
    for number in (2, 3):
        made.answered(peer(number), read_report(status(replicas=[replica(1)])), NOW)
    made.settle(NOW)
    assert judged(made)[peer(1)] == ("trusted", 0.9)


def test_records_and_statuses_tell_of_events_and_the_same_one_is_told_once() -> None:
    made = seen(3, events=[event("ejected", 1), event("dance", 1), event("strike", 2, text="x\n\x1b[2J" + "y" * 999)])
    made.merge([[accused(0, 1), accused(99, 2)]], NOW)  # 99 holds no claim: anybody could write that
    events = tell(made, NOW, started=NOW)["events"]
    assert [entry["kind"] for entry in events] == ["ejected", "strike", "accusation"]
    assert events[0]["text"] == "because (told by 3 nodes)"
    assert events[1]["text"].isprintable() and len(events[1]["text"]) < 160
    assert (events[2]["peer"], events[2]["stage"], events[2]["text"]) == (
        peer(1),
        1,
        f"{peer(0)[-8:]} accuses it: l2",
    )


def test_a_writer_of_many_accusations_does_not_fill_the_list() -> None:
    made = seen(2)
    made.merge([[accused(0, number) for number in range(100, 150)], [accused(1, 0)]], NOW)
    events = tell(made, NOW, started=NOW)["events"]
    assert len(events) == module.MAX_EVENTS + 1
    assert peer(0) in {entry["peer"] for entry in events}


def test_a_swarm_that_nobody_has_measured_has_no_loss() -> None:
    made = seen(2, loss=math.nan)
    assert made.loss is None and tell(made, NOW, started=NOW)["loss"] is None
