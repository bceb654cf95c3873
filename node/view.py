"""The view: every live claim and accusation that this node knows. Pure; time is an argument.

Claims come from the DHT, from pushes and from the writers themselves, in any order. The
newest one of a peer counts. A peer found dead is out at once, until it claims anew.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

from protocol.records import Accusation, Claim, NodeState, Record, Verdict

TAKES_WORK = frozenset({NodeState.WAITING, NodeState.PROBATION, NodeState.TRAINING})
HOLDS = TAKES_WORK | {NodeState.SYNCING}
"""States in which a claim's owner serves its stage from ``active_from`` on."""

STALE_WAIT_STEPS = 2
"""A claim that says "waiting" is believed for this many steps: news of the start may be under way."""

MAX_CLAIMS = 4096
MAX_ACCUSATIONS = 4096
MAX_VERDICTS = 1024


@dataclass(slots=True)
class View:
    """Claims by peer, accusations by (accused, accuser), with their signed bytes."""

    num_stages: int
    claims: dict[str, Claim] = field(default_factory=dict)
    signed: dict[str, bytes] = field(default_factory=dict)
    accusations: dict[tuple[str, str], Accusation] = field(default_factory=dict)
    signed_accusations: dict[tuple[str, str], bytes] = field(default_factory=dict)
    verdicts: dict[tuple[str, str], Verdict] = field(default_factory=dict)
    """By accused and writer."""
    signed_verdicts: dict[tuple[str, str], bytes] = field(default_factory=dict)
    _newest: dict[str, tuple[int, int]] = field(default_factory=dict)
    _held: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Every stage that a peer has claimed."""
    _by_stage: dict[int, list[Claim]] = field(default_factory=dict, repr=False, compare=False)
    """Claims of each stage in order of peer id; dropped whenever a claim changes, made again when asked for."""

    def merge(self, record: Record, data: bytes, now: float) -> bool:
        """Take a checked record in; true if it says anything new that matters to others."""
        if isinstance(record, Claim):
            return self._merge_claim(record, data, now)
        if record.accused_stage >= self.num_stages:  # a stage without neighbours: nobody could judge there
            return False
        if isinstance(record, Verdict):
            return self._merge_verdict(record, data)
        key = (record.accused, record.accuser)
        known = self.accusations.get(key)
        if known is not None and known.expires >= record.expires:
            return False
        if known is None and not self._room(self.accusations, self.signed_accusations, MAX_ACCUSATIONS):
            return False
        self.accusations[key] = record
        self.signed_accusations[key] = data
        return known is None

    def _merge_claim(self, claim: Claim, data: bytes, now: float) -> bool:
        if claim.stage >= self.num_stages or claim.expires <= now:
            return False
        version = (claim.generation, claim.sequence)
        known = self.claims.get(claim.peer)
        # Two different claims with one number: the larger bytes count, so that everybody sees the same one.
        two_faced = (
            known is not None and version == (known.generation, known.sequence) and data > self.signed[claim.peer]
        )
        if not two_faced and version <= self._newest.get(claim.peer, (0, -1)):
            return False
        if known is None and len(self.claims) >= MAX_CLAIMS:
            return False
        self._newest[claim.peer] = version
        self._held[claim.peer] = (
            *(stage for stage in self._held.get(claim.peer, ()) if stage != claim.stage),
            claim.stage,
        )
        self._by_stage.pop(claim.stage, None)
        if known is not None:
            self._by_stage.pop(known.stage, None)
        self.claims[claim.peer] = claim
        self.signed[claim.peer] = data
        return known is None or (
            (known.stage, known.state, known.active_from, known.addresses)
            != (claim.stage, claim.state, claim.active_from, claim.addresses)
        )

    def _merge_verdict(self, verdict: Verdict, data: bytes) -> bool:
        key = (verdict.accused, verdict.writer)
        known = self.verdicts.get(key)
        if known is not None and known.expires >= verdict.expires:
            return False
        if known is None and not self._room(self.verdicts, self.signed_verdicts, MAX_VERDICTS):
            return False
        self.verdicts[key] = verdict
        self.signed_verdicts[key] = data
        return True

    def _room(self, table: dict[tuple[str, str], Any], signed: dict[tuple[str, str], bytes], most: int) -> bool:
        """Make room in a full table: words of those who hold no claim go first. Anybody can write those."""
        if len(table) < most:
            return True
        stranger = next((key for key in table if key[1] not in self.claims), None)
        if stranger is None:
            return False
        del table[stranger], signed[stranger]
        return True

    def mark_gone(self, peer: str) -> Claim | None:
        """Note that a peer cannot be reached: its present claim no longer counts, and is returned if there was one."""
        self.signed.pop(peer, None)
        self._by_stage.clear()
        return self.claims.pop(peer, None)

    def expire(self, now: float) -> list[Claim]:
        """Drop what has run out; return the claims whose lease ended."""
        ended = [claim for claim in self.claims.values() if claim.expires <= now]
        for claim in ended:
            del self.claims[claim.peer]
            del self.signed[claim.peer]
            self._by_stage.clear()
        for key in [key for key, accusation in self.accusations.items() if accusation.expires <= now]:
            del self.accusations[key]
            del self.signed_accusations[key]
        for key in [key for key, verdict in self.verdicts.items() if verdict.expires <= now]:
            del self.verdicts[key]
            del self.signed_verdicts[key]
        if len(self._newest) > 4 * MAX_CLAIMS:  # strangers who came and went
            self._newest = {peer: version for peer, version in self._newest.items() if peer in self.claims}
            self._held = {peer: stages for peer, stages in self._held.items() if peer in self.claims}
        return ended

    def stage_of(self, peer: str) -> int | None:
        """The stage that a live peer has claimed."""
        claim = self.claims.get(peer)
        return None if claim is None else claim.stage

    def last_stage(self, peer: str) -> int | None:
        """The stage that a peer claimed last, also if it has left, as far as this node remembers."""
        held = self._held.get(peer, ())
        return held[-1] if held else None

    def has_held(self, peer: str, stage: int) -> bool:
        """Whether a peer has, or once had, a claim on a stage, as far as this node remembers."""
        return stage in self._held.get(peer, ())

    def replicas(self, stage: int, *, without: Collection[str] = ()) -> list[Claim]:
        """Live claims of a stage in any state, in order of peer id."""
        held = self._by_stage.get(stage)
        if held is None:
            found = [claim for claim in self.claims.values() if claim.stage == stage]
            held = self._by_stage[stage] = sorted(found, key=lambda claim: claim.peer)
        return [claim for claim in held if claim.peer not in without]

    def roster(self, stage: int, step: int, *, without: Collection[str] = ()) -> list[Claim]:
        """The replicas of a stage that take work in this step, in order of peer id."""
        return [
            claim
            for claim in self.replicas(stage, without=without)
            if claim.state in TAKES_WORK
            and claim.active_from <= step
            # Whoever still waits for the start long after it has not heard of it, and takes no work.
            and (claim.state is not NodeState.WAITING or step <= claim.active_from + STALE_WAIT_STEPS)
        ]

    def missing(self, min_replicas: int, *, without: Collection[str] = ()) -> dict[int, int]:
        """How many replicas each stage lacks to begin: stage -> count, only where some lack.

        Those that fetch their siblings' state are there as well: with other parameters than most they wait for their
        siblings to begin, who must not wait for them.
        """
        lacking = {
            stage: min_replicas - sum(claim.state in HOLDS for claim in self.replicas(stage, without=without))
            for stage in range(self.num_stages)
        }
        return {stage: count for stage, count in lacking.items() if count > 0}

    def begun_step(self, *, without: Collection[str] = ()) -> int | None:
        """The newest step that any live peer says it has reached, if training has begun."""
        steps = [
            claim.step
            for claim in self.claims.values()
            if claim.state in (NodeState.TRAINING, NodeState.PROBATION) and claim.peer not in without
        ]
        return max(steps, default=None)

    def accusers(self, accused: str) -> dict[str, Accusation]:
        """Who accuses a peer: accuser -> accusation."""
        return {who: entry for (whom, who), entry in self.accusations.items() if whom == accused}

    def verdicts_on(self, accused: str) -> list[Verdict]:
        """What juries have found of a peer."""
        return [verdict for (whom, _), verdict in self.verdicts.items() if whom == accused]

    def records(self) -> Iterable[bytes]:
        """The signed bytes of everything known, claims first."""
        yield from self.signed.values()
        yield from self.signed_accusations.values()
        yield from self.signed_verdicts.values()
