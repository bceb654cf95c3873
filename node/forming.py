"""From nothing to a place in the swarm: choose a stage, claim it, and wait until training can begin."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from node.checkpoints import Checkpoint
from node.common_step import OFFERS, TRAINS, Meeting, Succession, meet, newest_at_most, succession, under_way
from node.estimate import stage_bytes
from node.membership import Membership
from node.placement import choose_stage, should_move, stage_loads
from protocol.errors import DataSourceError, MemoryTooSmallError, SettingsError
from protocol.manifest import Manifest
from protocol.records import Claim, NodeState

log = logging.getLogger(__name__)

SETTLE_SECONDS = 2.5
"""How long the set of claims must have been unchanged before the first step begins."""
STUCK_SECONDS = 5.0
"""How long it must have been unchanged, with stages lacking replicas, before nodes move out of turn."""
STUCK_CHANCE = 0.25
"""With which a node then does so at each look, so that rarely two do at once."""
MAX_ASKED = 7
"""Peers that are asked in which step they are."""
RESTORE_SECONDS = 2.0
"""How long claims must have been unchanged before a copy is fetched of a checkpoint that nobody offers."""
RESTORE_PAUSE_SECONDS = 5.0
"""Between two attempts."""
SUCCESSION_SECONDS = 5.0
"""How long claims must have been unchanged before a stage without replicas goes on from an old checkpoint."""
SUCCESSION_INTERVALS = 4
"""Between checkpoints: how old that may be. Beyond it the stage would hardly fit the others any more."""
RENEWALS = 1.5
"""While others train, what they claim may be as old as their last renewal: so many must have brought nothing new."""


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
    gpu: bool = False
    """Whether that is a GPU's."""
    pinned: int | None
    """The stage that the volunteer chose, if any."""
    unfit: Mapping[int, str] = field(default_factory=dict)
    """Stages that this node cannot hold for another reason than its memory: stage -> why."""
    checkpoints: Collection[Checkpoint] = ()
    """Of this swarm, all sound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a node takes part, and with what."""

    stage: int
    checkpoint: Checkpoint | None
    """What it goes on from; None for the stage's first parameters."""
    behind: bool
    """Whether its siblings are further, or have other parameters: it has to catch up with them first."""
    step: int | None = None
    """Where it goes on, if not at the step of its checkpoint: the stage's last replica is gone, and updates with it."""


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
        connected: Callable[[], Collection[str]],
        restore: Callable[[int, int, Callable[[str], None]], Awaitable[Checkpoint | None]],
        ask_step: Callable[[str], Awaitable[int | None]],
        try_out: Callable[[int], Awaitable[None]],
        rng: random.Random,
    ) -> None:
        """``connected()`` lists the peers that answer: a claim may outlive its node. ``ask_step(peer)`` tells in which
        step a peer says that it is, None if it does not answer. ``restore(stage, at_most, tell)`` gets the newest
        checkpoint of a stage, up to a step, from those who keep copies.
        ``try_out(stage)`` runs a step of it on this machine, and raises MemoryTooSmallError if it does not fit."""
        self._manifest = manifest
        self._swarm = bytes.fromhex(manifest.swarm_id)
        self._membership = membership
        self._applicant = applicant
        self._excluded = excluded
        self._set_state = set_state
        self._rng = rng
        self._connected = connected
        self._ask_step = ask_step
        self._restore = restore
        self._checkpoints = list(applicant.checkpoints)
        self._restore_after = 0.0
        self._try_out = try_out
        self._offer: Checkpoint | None = None
        self._too_large: dict[int, MemoryTooSmallError] = {}
        """Stages that did not fit when they were tried."""

    def fits(self, stage: int) -> bool:
        """Whether this node can hold a stage."""
        return stage not in self._applicant.unfit and self._fits_memory(stage)

    def _needs(self, stage: int) -> int:
        """With a single microbatch in flight; how many more fit is found out by trying."""
        return stage_bytes(self._manifest, stage, gpu=self._applicant.gpu, in_flight=1)

    def _fits_memory(self, stage: int) -> bool:
        return stage not in self._too_large and self._needs(stage) <= self._applicant.memory_bytes

    async def _fits_when_tried(self, stage: int) -> bool:
        try:
            await self._try_out(stage)
        except MemoryTooSmallError as error:
            self._too_large[stage] = error
            log.info("%s", error)
            return False
        return True

    async def claim(self) -> int:
        """Choose a stage and claim it.

        Raises:
            MemoryTooSmallError: no stage fits.
            DataSourceError: the only stages that would fit need data that this node cannot read.
            SettingsError: the pinned stage does not exist.
        """
        self._set_state(NodeState.CLAIMING, "choosing a stage")
        await self._membership.refresh()
        while not await self._fits_when_tried(stage := self._choose()):
            if stage == self._applicant.pinned or not any(map(self.fits, range(self._manifest.num_stages))):
                raise self._too_large[stage]
        self._offer = self._newest(stage)
        claim = Claim(
            swarm=self._swarm,
            peer=self._membership.me,
            stage=stage,
            addresses=self._applicant.addresses,
            capacity=self._applicant.capacity,
            state=self._waiting_state(),
            generation=self._applicant.generation,
            sequence=0,
            expires=time.time() + self._manifest.network.lease_seconds,
            label=self._applicant.label,
            agent=self._applicant.agent,
            drill=self._applicant.drill,
            **self._offered(),
        )
        self._membership.claim_stage(claim)
        await self._membership.publish()
        return stage

    async def wait_for_start(self, stage: int) -> Place:
        """Wait until every stage has its replicas and they have a step in common, or training is under way.

        Returns:
            Where this node ends up: it may move meanwhile, and take an older one of its checkpoints.
        """
        known = self._claims()
        changed = time.monotonic()
        while True:
            quiet = time.monotonic() - changed
            if (place := await self._place_under_way(stage, quiet)) is not None:
                return place
            moved = self._other_stage(stage, stuck=quiet > STUCK_SECONDS)
            if moved is not None and await self._fits_when_tried(moved):
                stage, self._offer = moved, self._newest(moved)
                await self._tell(stage=stage)
            claims = self._claims()
            if claims != known:
                known, changed, quiet = claims, time.monotonic(), 0.0
            meeting = meet(self._present(), self._manifest.num_stages)
            if quiet > RESTORE_SECONDS and await self._restored(stage, meeting):
                continue
            missing = self._membership.view.missing(self._manifest.stages.min_replicas, without=self._excluded())
            if not missing and (place := await self._place_at_start(stage, meeting, quiet)) is not None:
                return place
            self._set_state(self._waiting_state(), self._lack(stage, missing, meeting))
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
            stage = self._remembered_stage(claims)
        if pinned is None and stage is None:
            stage = choose_stage(claims, num_stages=self._manifest.num_stages, fits=self.fits, rng=self._rng)
        if stage is None:
            if any(self._fits_memory(unfit) for unfit in self._applicant.unfit):
                raise DataSourceError(next(iter(self._applicant.unfit.values())))
            smallest = min(map(self._needs, range(self._manifest.num_stages)))
            needed = smallest if pinned is None else self._needs(pinned)
            raise MemoryTooSmallError(
                f"{'no stage' if pinned is None else f'stage {pinned}'} fits: it needs {needed >> 20} MiB "
                f"and {self._applicant.memory_bytes >> 20} MiB are free; close other programs or use a larger machine"
            )
        return stage

    def _remembered_stage(self, claims: list[Claim]) -> int | None:
        """The stage of this node's newest checkpoint, unless the swarm trains and needs nodes elsewhere."""
        fitting = [checkpoint for checkpoint in self._checkpoints if self.fits(checkpoint.stage)]
        if not fitting:
            return None
        newest = max(fitting, key=lambda checkpoint: checkpoint.step)
        loads = stage_loads(claims, self._manifest.num_stages)
        return newest.stage if self._under_way() is None or loads[newest.stage] <= min(loads) else None

    def _other_stage(self, mine: int, *, stuck: bool) -> int | None:
        """The stage to move to, or None to stay. Whoever has a checkpoint of its stage stays, and so do all once the
        first nodes train: those that still wait are then no measure of how the swarm is spread."""
        if self._applicant.pinned is not None or self._offer is not None or self._training(mine):
            return None
        return self._spare_stage(mine) if stuck else self._better_stage()

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
        held = sum(claim.stage == mine and claim.state in OFFERS for claim in self._present())
        if not lacking or held <= least or self._rng.random() > STUCK_CHANCE:
            return None
        return self._rng.choice(lacking)

    # checkpoints ---------------------------------------------------------------------

    @property
    def _step(self) -> int:
        """The step that this node can go on from."""
        return 0 if self._offer is None else self._offer.step

    def _newest(self, stage: int, at_most: int | None = None) -> Checkpoint | None:
        """The newest checkpoint of a stage."""
        found = {checkpoint.step: checkpoint for checkpoint in self._checkpoints if checkpoint.stage == stage}
        step = newest_at_most(found, max(found, default=0) if at_most is None else at_most)
        return None if step is None else found[step]

    def _offered(self) -> dict[str, Any]:
        """The fields of the claim that say what this node can go on from."""
        return {
            "step": self._step,
            "digest": b"" if self._offer is None else self._offer.parameters,
            "active_from": self._step,
            "pinned": self._applicant.pinned is not None or self._offer is not None,
        }

    async def _restored(self, stage: int, meeting: Meeting) -> bool:
        """Where nobody has anything of a stage that others wait for: get its checkpoint from those who keep copies."""
        claims = [claim for claim in self._present() if claim.state in OFFERS and claim.peer != self._membership.me]
        there = [claim for claim in self._training(stage) + self._waiting() if claim.stage == stage and claim.step > 0]
        begun = any(claim.stage != stage and claim.step > 0 for claim in self._training(stage))
        lost = not there and (begun or stage in meeting.lacking)
        if self._offer is not None or not lost or time.monotonic() < self._restore_after:
            return False
        newest = max(claim.step for claim in claims) + 1
        found = await self._restore(stage, newest, lambda text: self._set_state(self._waiting_state(), text))
        self._restore_after = time.monotonic() + RESTORE_PAUSE_SECONDS
        if found is None:
            return False
        self._checkpoints.append(found)
        self._offer = found
        await self._tell()
        return True

    async def _tell(self, **changes: object) -> None:
        self._membership.update_claim(urgent=True, **changes, **self._offered())
        await self._membership.announce()

    def _lower(self, step: int) -> bool:
        """Offer an older checkpoint where a stage has nothing as new as this node's; true if there is one."""
        older = None if self._offer is None else self._newest(self._offer.stage, step)
        if older is None or self._step <= step:
            return False
        self._offer = older
        return True

    # what the others do --------------------------------------------------------------

    async def _place_under_way(self, stage: int, quiet: float) -> Place | None:
        """This node's place in a swarm that trains; None if none does, or this node has to wait still."""
        found = self._succession(stage)
        if found is not None and self._membership.me in found.heirs:
            if not found.late and await self._stand_still(stage):
                return Place(stage=stage, checkpoint=self._offer, behind=False)
            if found.late and quiet > SUCCESSION_SECONDS and (step := await self._forsaken_at(stage)) is not None:
                self._membership.update_claim(urgent=True, step=step, active_from=step)
                await self._membership.announce()
                return Place(stage=stage, checkpoint=self._offer, behind=False, step=step)
        begun = self._under_way()
        if begun is None or begun in (0, self._step) or not self._donors(stage):
            return None  # where it has only just begun, this node may still be one of those who begin
        return Place(stage=stage, checkpoint=self._newest(stage, begun), behind=True)

    async def _place_at_start(self, stage: int, meeting: Meeting, quiet: float) -> Place | None:
        """This node's place in a swarm that begins; None if it does not begin yet, or not for this node."""
        training = self._training(stage)
        settled = quiet > self._patience(training)
        elsewhere = {claim.stage for claim in training if claim.stage != stage}
        # Those who train never go back, so where every other stage does it is no use to offer less.
        if (
            settled
            and not meeting.lacking
            and len(elsewhere) < self._manifest.num_stages - 1
            and self._lower(meeting.step)
        ):
            await self._tell()
            return None
        begun = any(claim.step == meeting.step for claim in training)
        if not meeting.possible or not (settled or begun):
            return None
        if self._membership.me in meeting.founders[stage]:
            return Place(stage=stage, checkpoint=self._offer, behind=False) if await self._stand_still(stage) else None
        if meeting.step == 0:
            return None  # it begins anew, and this node has a checkpoint
        return Place(stage=stage, checkpoint=None, behind=True)

    async def _stand_still(self, stage: int) -> bool:
        """Whether those who train are no further than this node can begin: what they claim may be a renewal old.

        Asks siblings and neighbours, who stand still for as long as a stage lacks replicas.
        """
        near = [claim.peer for claim in self._training(stage) if abs(claim.stage - stage) <= 1]
        if not near:
            return True
        step = await self._step_of(self._rng.sample(near, min(MAX_ASKED, len(near))))
        return step is not None and abs(step - self._step) <= 1

    async def _step_of(self, peers: Collection[str]) -> int | None:
        """The step in which peers say that they are, as the middle of what they say; None if none answers."""
        steps = sorted(step for step in await asyncio.gather(*map(self._ask_step, peers)) if step is not None)
        return steps[len(steps) // 2] if steps else None

    def _succession(self, stage: int) -> Succession | None:
        return succession(
            self._training(stage) + self._waiting(), self._manifest.num_stages, stage, farthest=self._farthest
        )

    @property
    def _farthest(self) -> int:
        return SUCCESSION_INTERVALS * self._manifest.training.checkpoint_steps

    async def _forsaken_at(self, stage: int) -> int | None:
        """The step in which the others wait for a stage; None if it may have a replica, or that cannot be known now.

        This node alone may have lost the stage's replicas, so its neighbours, who are connected to all of them, have to
        say that there are none. Work comes from the stage above, so its step counts.
        """
        near = {claim.peer: claim.stage for claim in self._training(stage) if abs(claim.stage - stage) == 1}
        asked = self._rng.sample(sorted(near), min(MAX_ASKED, len(near)))
        answers = await asyncio.gather(*map(self._membership.fetch_view, asked), return_exceptions=True)
        known = [answer for answer in answers if isinstance(answer, set)]
        holders = {claim.peer for claim in self._present() if claim.stage == stage and claim.state in TRAINS}
        if not known or 2 * sum(not holders.isdisjoint(peers) for peers in known) >= len(known):
            return None
        step = await self._step_of([peer for peer in asked if near[peer] == (stage - 1 if stage else 1)])
        return step if step is not None and self._step <= step <= self._step + self._farthest else None

    def _lack(self, stage: int, missing: Mapping[int, int], meeting: Meeting) -> str:
        """What this node waits for, in words."""
        training = self._training(stage)
        if any(claim.step > self._step for claim in training) and all(claim.stage != stage for claim in training):
            text = f"training has begun and no replica of stage {stage} is there to give its state; waiting for one"
            if self._step and (found := self._succession(stage)) is not None:
                text += f", or to go on from the checkpoint of step {found.step}"
            elif self._step:
                text += f", or for a restart of all others, to go back to step {self._step}, which this node has"
            return text
        return f"holding stage {stage}; {self._lack_at_start(missing, meeting)}"

    def _lack_at_start(self, missing: Mapping[int, int], meeting: Meeting) -> str:
        if missing:
            lacks = ", ".join(f"{count} for stage {place}" for place, count in sorted(missing.items()))
            return f"waiting for more volunteers: {lacks}"
        if meeting.lacking:
            stages = ", ".join(map(str, meeting.lacking))
            return f"others have checkpoints and nobody has one of stage {stages}; waiting for a node that has"
        if meeting.step == 0 < self._step:
            return (
                f"most nodes are new and begin at step 0, this one has a checkpoint of step {self._step}; stop them to"
                " go on from it, or move it away to begin with them"
            )
        if not meeting.possible:
            stages = ", ".join(str(place) for place, founders in enumerate(meeting.founders) if not founders)
            return f"nobody has a checkpoint of stage {stages} of step {meeting.step}; waiting for a node that has"
        return "every stage is held, about to start" + (f" from step {meeting.step}" if meeting.step else "")

    def _waiting_state(self) -> NodeState:
        """Whether this node waits for the start, or for its siblings' state."""
        return NodeState.WAITING if self._under_way() in (None, 0, self._step) else NodeState.SYNCING

    def _under_way(self) -> int | None:
        return under_way(self._present(), self._manifest.num_stages, me=self._membership.me)

    def _donors(self, stage: int) -> bool:
        """Whether a sibling that trains can be reached."""
        return any(claim.stage == stage for claim in self._training(stage))

    def _training(self, stage: int) -> list[Claim]:
        """Others that train. A claim outlives a node that was killed, so siblings and neighbours of ``stage``, with
        whom this node keeps in touch, have to answer."""
        connected = self._connected()
        return [
            claim
            for claim in self._present()
            if claim.state in TRAINS
            and claim.peer != self._membership.me
            and (claim.peer in connected or abs(claim.stage - stage) > 1)
        ]

    def _waiting(self) -> list[Claim]:
        return [claim for claim in self._present() if claim.state is NodeState.WAITING]

    def _patience(self, training: Collection[Claim]) -> float:
        """Seconds for which claims must have been unchanged; what those who train claim may be a renewal old."""
        return max(SETTLE_SECONDS, RENEWALS * self._manifest.network.renew_seconds) if training else SETTLE_SECONDS

    def _present(self) -> list[Claim]:
        excluded = self._excluded()
        return [claim for claim in self._membership.view.claims.values() if claim.peer not in excluded]

    def _claims(self) -> frozenset[tuple[str, int, int]]:
        return frozenset((claim.peer, claim.stage, claim.step) for claim in self._membership.view.claims.values())
