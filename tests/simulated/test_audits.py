"""Audits in whole swarms: who cheats is convicted by its siblings at once, wherever it sits, and nobody else is."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from node.metric_words import AUDIT_OUTCOMES
from node.simulated_swarm import Member, simulated
from node.telemetry import Event
from protocol.errors import SentinelError
from tests.swarm.harness import small_manifest

pytestmark = pytest.mark.timeout(400)
"""Nine nodes train in one process: half a minute on an idle core, several times that on a busy one."""

STAGES = 3
REPLICAS = 3
FROM_STEP = 2
STEPS = 6


@dataclass(frozen=True, kw_only=True)
class Course:
    """What became of a swarm."""

    members: dict[str, Member]
    outcomes: dict[str, SentinelError | None]

    @property
    def honest(self) -> list[Member]:
        """Those who play no drill."""
        return [member for member in self.members.values() if not member.attack]

    def events(self, kind: str, about: str) -> list[Event]:
        """What the honest nodes noted about one member."""
        peer = self.members[about].peer
        found = [event for member in self.honest for event in member.node.telemetry.events]
        return [event for event in found if event.kind == kind and event.peer == peer]

    def named(self, kind: str) -> set[str]:
        """About whom any honest node noted something."""
        return {name for name in self.members if self.events(kind, name)}

    def total(self, metric: str, **labels: str) -> float:
        """A metric, added up over the honest members."""
        registries = [member.node.metrics.registry for member in self.honest]
        return sum(registry.get_sample_value(f"sentinel_{metric}", labels) or 0.0 for registry in registries)

    def first_attack(self, name: str) -> int:
        """The step in which a member first falsified something."""
        drill = self.members[name].node.drill
        assert drill is not None and drill.first_attack_step is not None, f"{name} never got to cheat"
        return drill.first_attack_step

    def losses(self, member: Member) -> list[float]:
        """Of every step that it took part in."""
        return [loss for _, loss in member.node.telemetry.losses]

    def kept(self) -> int:
        """Microbatches of which any member still keeps evidence."""
        pipelines = [member.node.pipeline for member in self.members.values()]
        return sum(len(pipeline._evidence._kept) for pipeline in pipelines if pipeline is not None)


def train(attacks: Mapping[str, str], **verifier: Any) -> Course:
    """Train a swarm; ``attacks`` by member, ``verifier`` as in the manifest."""
    manifest = small_manifest(
        stages={"min_replicas": REPLICAS},
        training={"steps": STEPS, "sequences_per_step": 36},
        verifier={"allow_drills": True, "audit_rate": 1.0, **verifier},
    )

    async def run(folder: Path) -> Course:
        async with simulated(folder, manifest) as swarm:
            await swarm.coordinate()
            members = {}
            for stage in range(STAGES):
                for replica in range(REPLICAS):
                    name = f"s{stage}r{replica}"
                    attack = attacks.get(name, "")
                    members[name] = swarm.join(name, stage=stage, attack=attack, drill_from=FROM_STEP if attack else 0)
            outcomes = await asyncio.gather(*(member.outcome() for member in members.values()))
        return Course(members=members, outcomes=dict(zip(members, outcomes, strict=True)))

    with tempfile.TemporaryDirectory(prefix="sentinel-audits-") as folder:
        return asyncio.run(run(Path(folder)))


CHEATS = {
    "s0r2": ("bias", "activation"),
    "s1r1": ("gradient-sign-flip", "gradient"),
    "s2r0": ("gradient-bias", "gradient"),
}
"""One in each stage: its drill, and what an audit finds to differ. No gradient shows the second one to statistics."""


@functools.cache
def with_cheats() -> Course:
    return train({name: drill for name, (drill, _) in CHEATS.items()})


@functools.cache
def observing() -> Course:
    return train({"s1r1": "gradient-sign-flip"}, mode="observe")


@functools.cache
def with_a_liar() -> Course:
    return train({"s1r1": "lying-auditor"})


@functools.cache
def with_zeros_in_the_warm_up() -> Course:
    """Zeros make everything below compute huge gradients, honestly. No audit but what a flag calls for."""
    return train({"s0r2": "constant"}, audit_rate=1e-9, norm_bound=1.0)


@functools.cache
def without_audits() -> Course:
    return train({}, audit_rate=0.0)


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_is_ejected_for_its_first_attack_by_those_who_computed_it_again(name: str) -> None:
    course = with_cheats()
    _, differs = CHEATS[name]
    first = course.first_attack(name)
    assert first == FROM_STEP
    verdicts, ejections = course.events("verdict", name), course.events("ejected", name)
    assert all(event.text.endswith(f"computed its work again: {differs}") for event in verdicts)
    # A case that another of the cheats has opened ends with its own ejection; then the next one convicts.
    assert {event.step for event in verdicts} <= {first, first + 1}
    assert {event.step for event in ejections} <= {first, first + 1}
    assert len(ejections) == len(course.honest)
    told = course.outcomes[name]
    assert told is not None and told.exit_code == 3
    assert f"audit: {differs} (2 of 2 jurors)" in str(told)


def test_nobody_else_is_ejected_or_struck_and_no_work_is_lost() -> None:
    course = with_cheats()
    assert course.named("ejected") == set(CHEATS)
    honest = {name for name in course.members if name not in CHEATS}
    assert not honest & course.named("quarantined") and not honest & course.named("strike")
    assert [course.outcomes[name] for name in honest] == [None] * len(honest)
    assert course.total("audits_total", outcome="honest") > 20
    assert course.total("audits_total", outcome="disputed") == 0
    assert course.total("votes_total", vote="guilty") >= 2 * len(CHEATS)  # two siblings convict
    for member in course.honest:
        assert len(member.node.telemetry.losses) == STEPS
        assert member.node.telemetry.counters.lost == 0
        assert course.losses(member) == pytest.approx(course.losses(without_audits().honest[0]), rel=0.02)
    assert course.kept() > 0


def test_an_observing_swarm_tells_whom_it_would_eject_and_ejects_nobody() -> None:
    course = observing()
    assert course.named("would_eject") == {"s1r1"} == course.named("verdict")
    assert {event.step for event in course.events("verdict", "s1r1")} == {course.first_attack("s1r1")}
    told = course.events("would_eject", "s1r1")
    assert {event.text for event in told} == {"would be ejected: audit: gradient (2 of 2 jurors)"}
    assert len(told) == len(course.honest)  # each says it once
    assert course.named("ejected") == set()
    assert set(course.outcomes.values()) == {None}
    assert all(len(member.node.telemetry.losses) == STEPS for member in course.members.values())
    assert course.first_attack("s1r1") == FROM_STEP


def test_a_lying_auditor_takes_the_blame_itself() -> None:
    course = with_a_liar()
    assert course.first_attack("s1r1") == FROM_STEP  # it was asked
    assert "false_vote" in {event.text.split(":")[-1].strip() for event in course.events("accusation", "s1r1")}
    assert course.named("quarantined") | course.named("accusation") | course.named("strike") == {"s1r1"}
    struck = [event.text for event in course.events("strike", "s1r1")]
    assert "it convicted whom its jury acquitted" in struck
    assert course.total("strikes_total", reason="false_vote") > 0
    assert course.total("strikes_total", reason="audit") == 0
    assert course.named("ejected") <= {"s1r1"} and course.named("verdict") == set()
    assert course.total("audits_total", outcome="guilty") == 0
    for name, told in course.outcomes.items():
        assert told is None or name == "s1r1"
        assert told is None or "false_vote" in str(told)


def test_without_audits_nobody_is_asked_and_nothing_is_kept() -> None:
    course = without_audits()
    for outcome in (*AUDIT_OUTCOMES, "other"):
        assert course.total("audits_total", outcome=outcome) == 0
    for vote in ("guilty", "honest"):
        assert course.total("votes_total", vote=vote) == 0
    for method in ("audit", "evidence", "parameters"):
        assert course.total("requests_total", method=method, outcome="ok") == 0
    assert course.kept() == 0
    for member in course.members.values():
        assert member.node.trainer is not None
        assert member.node.trainer._history._before is None  # no second copy of the parameters
        assert len(member.node.telemetry.losses) == STEPS
    assert set(course.outcomes.values()) == {None} and course.named("ejected") == set()


def test_nobody_is_blamed_for_a_huge_gradient_that_is_right() -> None:
    course = with_zeros_in_the_warm_up()
    assert course.total("flags_total", reason="norm", direction="gradient") > 0, "no gradient was over the bound"
    assert course.named("strike") == course.named("quarantined") == course.named("ejected") == set()
    assert sum(member.node.telemetry.counters.lost for member in course.honest) == 0
