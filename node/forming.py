"""From nothing to a place in the swarm: choose a stage, claim it, and wait until training can begin."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from node.membership import Membership
from node.placement import choose_stage, should_move
from protocol.errors import DataSourceError, MemoryTooSmallError, SettingsError
from protocol.manifest import Manifest
from protocol.records import Claim, NodeState

SETTLE_SECONDS = 2.5
"""How long the set of claims must have been unchanged before step 0 begins."""
STUCK_SECONDS = 5.0
"""How long it must have been unchanged, with stages lacking replicas, before nodes move out of turn."""
STUCK_CHANCE = 0.25
"""With which a node then does so at each look, so that rarely two do at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Applicant:
    """What a node brings when it claims a stage."""

    addresses: tuple[str, ...]
    capacity: float
    generation: int
    label: str
    agent: str
    drill: str
    memory_bytes: int
    pinned: int | None
    """The stage that the volunteer chose, if any."""
    unfit: Mapping[int, str] = field(default_factory=dict)
    """Stages that this node cannot hold for another reason than its memory: stage -> why."""


class Forming:
    """Finds this node its stage."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        membership: Membership,
        applicant: Applicant,
        excluded: Callable[[], set[str]],
        set_state: Callable[[NodeState, str], None],
        rng: random.Random,
    ) -> None:
        self._manifest = manifest
        self._swarm = bytes.fromhex(manifest.swarm_id)
        self._membership = membership
        self._applicant = applicant
        self._excluded = excluded
        self._set_state = set_state
        self._rng = rng

    def fits(self, stage: int) -> bool:
        """Whether this node can hold a stage."""
        return stage not in self._applicant.unfit and self._fits_memory(stage)

    def _fits_memory(self, stage: int) -> bool:
        return self._manifest.stage_memory_bytes(stage) <= self._applicant.memory_bytes

    async def claim(self) -> int:
        """Choose a stage and claim it.

        Raises:
            MemoryTooSmallError: no stage fits.
            DataSourceError: the only stages that would fit need data that this node cannot read.
            SettingsError: the pinned stage does not exist.
        """
        self._set_state(NodeState.CLAIMING, "choosing a stage")
        await self._membership.refresh()
        stage = self._choose()
        begun = self._begun()
        claim = Claim(
            swarm=self._swarm,
            peer=self._membership.me,
            stage=stage,
            addresses=self._applicant.addresses,
            capacity=self._applicant.capacity,
            state=NodeState.SYNCING if begun else NodeState.WAITING,
            step=0,
            digest=b"",
            active_from=0,
            generation=self._applicant.generation,
            sequence=0,
            expires=time.time() + self._manifest.network.lease_seconds,
            label=self._applicant.label,
            agent=self._applicant.agent,
            drill=self._applicant.drill,
            pinned=self._applicant.pinned is not None,
        )
        self._membership.claim_stage(claim)
        await self._membership.publish()
        return stage

    async def wait_for_start(self, stage: int) -> int:
        """Wait until every stage has its replicas, or training is under way; may move meanwhile.

        Returns:
            The stage in which this node ends up.
        """
        view = self._membership.view
        known = self._claims()
        changed = time.monotonic()
        while True:
            if self._begun():
                return stage
            started = view.begun_step(without={self._membership.me}) is not None
            # Once the first nodes train, those that still wait are no measure of how the swarm is spread.
            if self._applicant.pinned is None and not started:
                stuck = time.monotonic() - changed > STUCK_SECONDS
                moved = self._spare_stage(stage) if stuck else self._better_stage()
                if moved is not None:
                    stage = moved
                    self._membership.update_claim(urgent=True, stage=stage)
                    await self._membership.announce()
            claims = self._claims()
            if claims != known:
                known, changed = claims, time.monotonic()
            missing = view.missing(self._manifest.stages.min_replicas, without=self._excluded())
            if not missing and (started or time.monotonic() - changed > SETTLE_SECONDS):
                return stage
            if missing:
                lacks = ", ".join(f"{count} for stage {place}" for place, count in sorted(missing.items()))
                self._set_state(NodeState.WAITING, f"holding stage {stage}; waiting for more volunteers: {lacks}")
            else:
                self._set_state(NodeState.WAITING, f"holding stage {stage}; every stage is held, about to start")
            await self._membership.wait_until(lambda: self._claims() != known, SETTLE_SECONDS / 4)  # noqa: B023

    def _choose(self) -> int:
        pinned = self._applicant.pinned
        if pinned is not None and pinned >= self._manifest.num_stages:
            raise SettingsError(
                f"stage {pinned} does not exist: this swarm has stages 0 to {self._manifest.num_stages - 1}"
            )
        if pinned is not None and self.fits(pinned):
            return pinned
        # An earlier run of this very node may have left a claim behind, and who is leaving holds nothing for long.
        claims = [
            claim
            for claim in self._membership.view.claims.values()
            if claim.peer not in {*self._excluded(), self._membership.me} and claim.state is not NodeState.DRAINING
        ]
        stage = None
        if pinned is None:
            stage = choose_stage(claims, num_stages=self._manifest.num_stages, fits=self.fits, rng=self._rng)
        if stage is None:
            if any(self._fits_memory(unfit) for unfit in self._applicant.unfit):
                raise DataSourceError(next(iter(self._applicant.unfit.values())))
            smallest = min(map(self._manifest.stage_memory_bytes, range(self._manifest.num_stages)))
            needed = smallest if pinned is None else self._manifest.stage_memory_bytes(pinned)
            raise MemoryTooSmallError(
                f"{'no stage' if pinned is None else f'stage {pinned}'} fits: it needs {needed >> 20} MiB "
                f"and {self._applicant.memory_bytes >> 20} MiB are free; close other programs or use a larger machine"
            )
        return stage

    def _better_stage(self) -> int | None:
        claims = [
            claim
            for claim in self._membership.view.claims.values()
            if claim.state is NodeState.WAITING and claim.peer not in self._excluded()
        ]
        return should_move(
            claims,
            me=self._membership.me,
            swarm=self._swarm,
            num_stages=self._manifest.num_stages,
            fits=self.fits,
        )

    def _spare_stage(self, mine: int) -> int | None:
        """A stage that lacks replicas and that this node can hold, where its own stage can do without it.

        The even spread is computed as if every node could hold every stage. Where it names one that cannot, nobody
        moves, so after a while others do, at random.
        """
        least = self._manifest.stages.min_replicas
        view, excluded = self._membership.view, self._excluded()
        lacking = [stage for stage in view.missing(least, without=excluded) if self.fits(stage)]
        if not lacking or len(view.roster(mine, 0, without=excluded)) <= least or self._rng.random() > STUCK_CHANCE:
            return None
        return self._rng.choice(lacking)

    def _begun(self) -> bool:
        return bool(self._membership.view.begun_step(without={self._membership.me}))

    def _claims(self) -> frozenset[tuple[str, int]]:
        return frozenset((claim.peer, claim.stage) for claim in self._membership.view.claims.values())
