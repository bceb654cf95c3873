"""The parts of the churn benchmark that decide what happens and what its numbers mean."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.churning.leaks import FILES_PER_PEER, FileCount, OpenFiles, claims_of_the_dead
from benchmarks.churning.report import build_report, failures, table
from benchmarks.churning.runs import Leaks, Options, Outcome
from benchmarks.churning.schedule import (
    ARRIVALS,
    COORDINATOR,
    ENDINGS,
    LASTING,
    Cast,
    Fault,
    Kind,
    Rules,
    Schedule,
    ScheduleError,
    check,
    draw,
    in_order,
    node_name,
    parse_fault,
    parse_schedule,
    stage_of,
)
from benchmarks.churning.watch import Digests, Divergence, Stall, StepClock, Watch, comparable_steps, mean_loss

TENTHS = st.integers(1, 99_999).map(lambda tenths: tenths / 10)
NAMES = st.one_of(st.just(COORDINATOR), st.builds(node_name, st.integers(0, 127), st.integers(0, 99)))
SEEDS = st.integers(0, 2**32)
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 4))


@st.composite
def faults(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(Kind))
    when: dict[str, Any] = draw(st.one_of(st.builds(dict, step=st.integers(0, 10**8)), st.builds(dict, second=TENTHS)))
    return Fault(kind=kind, node=draw(NAMES), length=draw(TENTHS) if kind in LASTING else 0.0, **when)


def kill(node: str, second: float) -> Fault:
    return Fault(kind=Kind.KILL, node=node, second=second)


# schedules as text -------------------------------------------------------------------------------


@given(st.lists(faults(), max_size=8))
def test_a_schedule_reads_as_it_was_written(schedule: list[Fault]) -> None:
    text = "\n\n".join(f"  {fault}  # why" for fault in schedule) + "\n# the end\n"
    assert parse_schedule(text) == in_order(schedule)


@given(st.lists(faults(), max_size=8))
def test_a_schedule_is_in_the_order_in_which_it_is_due(schedule: list[Fault]) -> None:
    for earlier, later in itertools.pairwise(in_order(schedule)):
        assert (earlier.second, earlier.step) <= (later.second, later.step)
    assert Counter(in_order(schedule)) == Counter(schedule)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("kill s1r0", "write 'at step 12"),
        ("at step 12, on s1r0, do kill now", "write 'at step 12"),
        ("at step 12 s, on s1r0, do kill", "write 'at step 12"),
        ("at step 12, on s1r0, do murder", "there are kill, freeze, cut, slow"),
        ("at step 12, on bob, do kill", "'bob' is no node"),
        ("at step 12, on s1r0, do freeze", "lasts for some seconds"),
        ("at step 12, on s1r0, do kill for 3 s", "lasts for some seconds"),
        ("at step 12, on s1r0, do freeze for 0 s", "lasts for some seconds"),
    ],
)
def test_what_is_no_fault_is_refused_with_what_to_write(line: str, said: str) -> None:
    with pytest.raises(ScheduleError, match=said):
        parse_fault(line)


def test_a_fault_is_due_at_its_step_or_its_second() -> None:
    at_step, at_second = parse_fault("at step 12, on s1r0, do kill"), parse_fault("at 9.5 s, on s1r0, do term")
    assert not at_step.due(11, 1e6) and at_step.due(12, 0.0)
    assert not at_second.due(10**6, 9.4) and at_second.due(0, 9.5)
    with pytest.raises(ScheduleError, match="not at both"):
        Fault(kind=Kind.KILL, node="s0r0", step=1, second=1.0)


# drawn schedules ---------------------------------------------------------------------------------


drawing = settings(deadline=None, max_examples=50)
"""A schedule takes some milliseconds to draw, on a busy machine many."""


def drawn(seed: int, shape: tuple[int, int], rules: Rules, seconds: float = 300.0) -> Schedule:
    stages, replicas = shape
    return draw(seed, Cast.of(stages, replicas, rules), stages=stages, seconds=seconds)


@drawing
@given(SEEDS, SHAPES)
def test_the_same_seed_draws_the_same_schedule(seed: int, shape: tuple[int, int]) -> None:
    assert drawn(seed, shape, Rules()) == drawn(seed, shape, Rules())


@drawing
@given(SEEDS, SHAPES)
def test_a_drawn_schedule_is_one_that_can_be_played(seed: int, shape: tuple[int, int]) -> None:
    schedule = drawn(seed, shape, Rules())
    check(schedule, Cast.of(*shape, Rules()))
    assert parse_schedule("\n".join(map(str, schedule))) == schedule


@drawing
@given(SEEDS, SHAPES, st.integers(0, 3), st.floats(0.0, 60.0))
def test_no_drawn_fault_takes_the_last_replica_that_its_stage_can_rely_on(
    seed: int, shape: tuple[int, int], least: int, settle: float
) -> None:
    """Told anew, without the code that draws: who is there, since when, and who is frozen until when."""
    rules = Rules(least=least, settle=settle)
    since = dict.fromkeys(itertools.starmap(node_name, itertools.product(range(shape[0]), range(shape[1]))), 0.0)
    frozen: dict[str, float] = {}
    for fault in drawn(seed, shape, rules):
        now, stage = fault.second, stage_of(fault.node)
        if fault.kind in ARRIVALS and stage is not None:
            since[fault.node] = now + settle
            frozen.pop(fault.node, None)
        elif stage is not None:
            assert frozen.get(fault.node, 0.0) <= now, "a frozen node is left in peace"
            left = [
                name
                for name, ready in since.items()
                if stage_of(name) == stage and name != fault.node and ready <= now and frozen.get(name, 0.0) <= now
            ]
            assert len(left) >= least, f"{fault} leaves {left}"
            if fault.kind in LASTING:
                assert all(until <= now for until in frozen.values()), "one is frozen at a time"
                frozen[fault.node] = now + fault.length
                since[fault.node] = now + fault.length + settle
            else:
                del since[fault.node]
        assert shape[0] * shape[1] - rules.most_away <= len(since) <= shape[0] * shape[1]


@drawing
@given(SEEDS)
def test_faults_come_about_every_ten_seconds(seed: int) -> None:
    schedule = drawn(seed, (3, 3), Rules())
    gaps = [later.second - earlier.second for earlier, later in itertools.pairwise(schedule)]
    assert 18 <= len(schedule) <= 40
    assert min(gaps) >= 5.9 and sum(gaps) / len(gaps) < 15


def test_every_kind_is_drawn() -> None:
    kinds = Counter(fault.kind for seed in range(20) for fault in drawn(seed, (3, 3), Rules()))
    assert kinds.keys() == set(Kind)
    assert min(kinds.values()) > 10


@pytest.mark.parametrize(
    ("schedule", "problem"),
    [
        ([kill("s0r0", 1.0), kill("s0r0", 2.0)], "s0r0 is gone"),
        ([kill("s0r0", 1.0), kill("s0r1", 2.0)], "would keep 0 replicas"),
        ([kill("s0r2", 1.0)], "there is no s0r2"),
        ([kill(COORDINATOR, 1.0)], "seed-death is for the coordinator"),
        ([Fault(kind=Kind.SEED_DEATH, node="s0r0", second=1.0)], "seed-death is for the coordinator"),
        ([Fault(kind=Kind.REJOIN, node="s0r0", second=1.0)], "s0r0 is there"),
        ([Fault(kind=Kind.JOIN, node="s0r0", second=1.0)], "has been there before"),
        ([Fault(kind=Kind.JOIN, node="s0r2", second=1.0)], "4 nodes are there already"),
        ([Fault(kind=Kind.FREEZE, node="s0r0", second=1.0, length=9.0), kill("s0r0", 2.0)], "s0r0 is frozen"),
        (
            [Fault(kind=Kind.FREEZE, node=f"s{stage}r0", second=1.0, length=9.0) for stage in range(2)],
            "1 frozen already",
        ),
        # Who has just come back is not one to rely on.
        ([kill("s0r0", 1.0), Fault(kind=Kind.REJOIN, node="s0r0", second=2.0), kill("s0r1", 3.0)], "keep 0 replicas"),
    ],
)
def test_what_no_swarm_could_do_or_should_bear_is_refused(schedule: list[Fault], problem: str) -> None:
    with pytest.raises(ScheduleError, match=problem):
        check(tuple(schedule), Cast.of(2, 2))


def test_a_kill_is_no_ending_of_the_identity() -> None:
    cast = Cast.of(1, 2)
    cast.apply(kill("s0r0", 1.0), 1.0)
    assert (cast.here(), cast.away(), cast.next_name(0)) == (["s0r1"], ["s0r0"], "s0r2")
    assert Kind.KILL in ENDINGS and Kind.FREEZE not in ENDINGS


# what is watched ---------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 6), st.floats(0.0, 50.0)), min_size=1, max_size=40), st.floats(0.0, 50.0))
def test_the_longest_stall_is_the_longest_time_without_a_new_step(seen: list[tuple[int, float]], rest: float) -> None:
    clock, now = StepClock(), 0.0
    first: dict[int, float] = {}
    for step, gap in seen:
        now += gap
        clock.see(step, now)
        if step > max(first, default=0):
            first[step] = now
    clock.look(now + rest)
    moments = [*first.values(), now + rest]
    longest = max((later - earlier for earlier, later in itertools.pairwise(moments)), default=0.0)
    assert clock.longest.seconds == pytest.approx(longest if first else 0.0)
    assert clock.step == max(first, default=0)


def status(step: int, *, stage: int = 1, **more: Any) -> dict[str, Any]:
    return {"coordinator": False, "stage": stage, "step": step, **more}


def test_siblings_that_differ_in_a_step_are_a_divergence() -> None:
    digests = Digests()
    digests.take("s1r0", 1, [(4, "aa"), (5, "bb")])
    digests.take("s1r1", 1, [(4, "aa"), (5, "cc")])
    digests.take("s2r0", 2, [(5, "dd")])  # another stage: other parameters
    digests.take("s1r2", 1, [(6, "ee")])
    assert digests.divergences() == [Divergence(stage=1, step=5, one="s1r0", other="s1r1")]
    assert digests.compared() == 2
    digests.take("s1r1", 1, [(5, "bb")])  # it was put right, and has diverged nonetheless
    assert len(digests.divergences()) == 1


@given(st.integers(1, 5), st.integers(1, 8))
def test_equal_siblings_are_no_divergence(replicas: int, steps: int) -> None:
    digests = Digests()
    for replica in range(replicas):
        digests.take(f"s0r{replica}", 0, [(step, str(step)) for step in range(steps)])
    assert digests.divergences() == []
    assert digests.compared() == steps * replicas * (replicas - 1) // 2


def event(kind: str, step: int, text: str = "", *, peer: str = "", time: float = 1.0) -> dict[str, Any]:
    return {"kind": kind, "step": step, "peer": peer, "text": text, "time": time, "stage": None}


def test_a_lost_microbatch_counts_once_however_many_tell_of_it() -> None:
    watch = Watch()
    for name in ("s0r0", "s0r1"):
        told = [event("lost", 3, "microbatch 1 was refused"), event("lost", 3, "microbatch 2 was refused", time=2.0)]
        watch.take(name, f"{name}#1", status(4, stage=0, events=told, microbatches_lost=2, microbatches_retried=5), 1.0)
        watch.take(name, f"{name}#1", status(4, stage=0, events=told, microbatches_lost=2, microbatches_retried=6), 2.0)
    assert watch.lost() == 2
    assert watch.total("retried") == 12
    watch.take("s0r2", "s0r2#1", status(4, stage=0, microbatches_lost=3), 3.0)  # its events have been pushed out
    assert watch.lost() == 3


def test_the_ejected_are_named_and_the_coordinator_tells_nothing() -> None:
    watch = Watch(names={"PEER": "s1r0"})
    watch.take("s0r0", "s0r0#1", status(4, events=[event("ejected", 3, peer="PEER"), event("strike", 3)]), 1.0)
    watch.take(COORDINATOR, "c#1", {"coordinator": True, "stage": None, "step": 99}, 1.0)
    assert watch.ejected() == ["s1r0"]
    assert watch.notable("ejected")[0].node == "s0r0" and not watch.notable("strike")
    assert watch.clock.step == 4


def test_the_first_stage_knows_the_loss_best() -> None:
    watch = Watch()
    watch.take("s2r0", "s2r0#1", status(2, stage=2, losses=[[0, 5.0], [1, 4.0]]), 1.0)
    watch.take("s0r0", "s0r0#1", status(2, stage=0, losses=[[0, 5.5]]), 1.0)
    watch.take("s2r1", "s2r1#1", status(2, stage=2, losses=[[0, 7.0]]), 1.0)
    assert watch.losses == {0: 5.5, 1: 4.0}


@given(st.sets(st.integers(0, 40)), st.sets(st.integers(0, 40)))
@settings(max_examples=200)
def test_losses_are_compared_over_the_same_steps(one: set[int], other: set[int]) -> None:
    steps = comparable_steps(dict.fromkeys(one, 2.0), dict.fromkeys(other, 3.0))
    assert set(range(max(0, steps - 10), steps)) <= one & other
    if steps:
        assert mean_loss(dict.fromkeys(one, 2.0), steps) == 2.0
    later = [most for most in range(steps + 1, 43) if set(range(max(0, most - 10), most)) <= one & other]
    assert not later


# leaks -------------------------------------------------------------------------------------------


def counts(*samples: tuple[float, int], peers: int = 8) -> list[FileCount]:
    return [FileCount(second=second, files=files, peers=peers) for second, files in samples]


STARTING = counts(*((float(second), 9 * second) for second in range(30)))


def test_open_files_are_compared_once_a_process_is_at_work() -> None:
    steady = counts(*((30.0 + second, 400 + second % 2) for second in range(60)))
    assert OpenFiles([*STARTING, *steady]).growth(10.0) in (0, 1)
    assert OpenFiles(steady[:3]).growth(0.0) is None
    leaking = counts(*((30.0 + second, 400 + second) for second in range(60)))
    assert OpenFiles([*STARTING, *leaking]).growth(10.0) == 40


def test_further_peers_may_need_further_files_and_fewer_peers_excuse_nothing() -> None:
    few, many = (counts(*((40.0 + second, 400 + second) for second in range(60)), peers=peers) for peers in (5, 8))
    assert OpenFiles(few[:30] + many[30:]).growth(10.0) == 40 - 3 * FILES_PER_PEER
    assert OpenFiles(many[:30] + few[30:]).growth(10.0) == 40


def test_a_claim_whose_owner_is_gone_is_one_of_the_dead() -> None:
    replicas = [{"peer": "one", "state": "training"}, {"peer": "two", "state": "draining"}]
    assert claims_of_the_dead(replicas, {"one", "three"}) == ["two"]


# the verdict -------------------------------------------------------------------------------------

OPTIONS = Options(minutes=1.0, seed=3, stages=3, replicas=3)
LOSSES = {step: 3.0 - step / 100 for step in range(20)}


def outcome(**changes: Any) -> Outcome:
    values: dict[str, Any] = {
        "minutes": 1.0,
        "steps": 20,
        "faults": {kind.value: 1 for kind in Kind},
        "skipped": [],
        "happened": ["9.0 s: at 9.0 s, on s0r0, do kill"],
        "longest": Stall(began=4.0, seconds=12.0, step=7),
        "stalls": [],
        "lost": 0,
        "retried": 4,
        "divergences": [],
        "compared": 60,
        "ejected": [],
        "notable": [],
        "arrivals": [],
        "losses": LOSSES,
        "leaks": Leaks(open_files={"s0r0#1": 12}),
        "problems": [],
    }
    return Outcome(**{**values, **changes})


def judged(undisturbed: dict[int, float] = LOSSES, **changes: Any) -> tuple[list[str], str]:
    report = build_report(OPTIONS, outcome(**changes), undisturbed)
    found = failures(report)
    return found, table(report, found)


def test_a_run_that_meets_every_criterion_passes() -> None:
    found, text = judged()
    assert found == []
    assert "All as it should be." in text and "1 kill, 1 freeze" in text and "12.0 s (at most 30 s)" in text


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"longest": Stall(began=4.0, seconds=30.5, step=7)}, "no new step for 30 s, from 4 s on, at step 7"),
        ({"lost": 1}, "1 microbatches were lost"),
        ({"divergences": [Divergence(stage=1, step=5, one="s1r0", other="s1r1")]}, "siblings differ in 1 pairs"),
        ({"compared": 0}, "no two siblings could be compared"),
        ({"losses": {step: 1.03 * loss for step, loss in LOSSES.items()}}, r"the loss is \+3.0 % off"),
        ({"losses": {step: 0.97 * loss for step, loss in LOSSES.items()}}, "the loss is -3.0 % off"),
        ({"losses": {}}, "the losses could not be compared"),
        ({"undisturbed": {}}, "the losses could not be compared"),
        ({"ejected": ["s2r1"]}, "honest nodes were ejected: s2r1"),
        ({"leaks": Leaks(processes=["p2pd 12"])}, "processes left: p2pd 12"),
        ({"leaks": Leaks(folders=["sentinel-abc"])}, "socket folders left: sentinel-abc"),
        ({"leaks": Leaks(claims=["s0r0: s1r1"])}, "claims of the dead left: s0r0: s1r1"),
        ({"leaks": Leaks(open_files={"s0r0#1": 13})}, "open files grew: s0r0#1 by 13"),
        ({"problems": ["3.0 s: s0r0#1 ended by itself"]}, "1 problems with single nodes"),
    ],
)
def test_each_criterion_fails_a_run_by_itself(changes: dict[str, Any], said: str) -> None:
    found, text = judged(**changes)
    assert len(found) == 1
    with pytest.raises(AssertionError, match=said):
        raise AssertionError(found[0])
    assert f"NOT AS IT SHOULD BE: {found[0]}" in text
