"""Copies of other stages' checkpoints, so that a stage whose nodes are all gone is not lost with them.

For each stage a few nodes of other stages are drawn by hash; each fetches the stage's newest checkpoint from one of its
replicas now and then, and gives it to whoever asks. Copies lie beside the node's own checkpoints, in a folder of their
own, so that a node that comes back does not take a copy for its own stage's.
"""

from __future__ import annotations

import hashlib
import logging
import random
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from node.checkpoint_fetch import NoCheckpointError, ask_offers, best_offer, fetch, largest_file
from node.checkpoints import Checkpoint, find_checkpoints, stage_and_step
from node.common_step import TRAINS
from node.membership import Membership
from node.metrics import Metrics
from node.state_folder import remove_unfinished
from node.wording import many
from protocol.errors import SentinelError
from protocol.manifest import Manifest
from protocol.records import Claim
from protocol.transports.sessions import Transport

log = logging.getLogger(__name__)

COPIES = 3
"""Of each stage, where there are so many nodes in other stages: of three, one alone cannot lead anybody astray."""
LOOK_SECONDS = 15.0
"""At least so often a node looks whether there is something to copy."""
REST = 9.0
"""After a copy, times as long as it took: copying takes a tenth of the line at most."""
SOON_SECONDS = 2.0
"""Before a stage is looked at again whose replicas have not written their checkpoint yet."""
RETRY_SECONDS = 30.0
"""At most, before a stage is tried again whose copy could not be had; the first time it is soon."""
MAX_ASKED = 12


def custodians(swarm: bytes, stage: int, claims: Iterable[Claim], copies: int = COPIES) -> tuple[str, ...]:
    """Who keeps copies of a stage: of the nodes that train other stages those with the lowest hashes."""

    def drawn(peer: str) -> bytes:
        return hashlib.sha256(b"sentinel:custody" + swarm + stage.to_bytes(4, "big") + peer.encode()).digest()

    others = {claim.peer for claim in claims if claim.stage != stage and claim.state in TRAINS}
    return tuple(sorted(others, key=drawn)[:copies])


def due(
    me: str, swarm: bytes, claims: Collection[Claim], held: Mapping[int, int], *, num_stages: int, interval: int
) -> list[int]:
    """The stages of which this node should fetch a copy now, those first whose copy is oldest.

    ``held``: stage -> step of the copy that is here. Replicas write a checkpoint whenever ``interval`` steps are over.
    """
    found = []
    for stage in range(num_stages):
        steps = [claim.step for claim in claims if claim.stage == stage and claim.state in TRAINS]
        newest = max(steps, default=0) // interval * interval
        if newest > held.get(stage, 0) and me in custodians(swarm, stage, claims):
            found.append(stage)
    return sorted(found, key=lambda stage: held.get(stage, 0))


def retry_pause(failures: int) -> float:
    """Seconds until a stage is tried again of which so many copies in a row could not be had: soon, then ever later."""
    return min(SOON_SECONDS * 2.0 ** min(failures - 1, 10), RETRY_SECONDS)


@dataclass(frozen=True, slots=True)
class CopyStore:
    """The copies on this machine, of one swarm; the newest one of each stage."""

    folder: Path
    most_bytes: int
    """That all of them may take."""

    @classmethod
    def of(cls, folder: Path, manifest: Manifest, gib: float) -> Self:
        """Those of a swarm in the folder of all swarms' copies."""
        return cls(folder / manifest.swarm_id[:16], int(gib * (1 << 30)))

    def held(self) -> dict[int, int]:
        """Stage -> step of the newest copy."""
        steps: dict[int, int] = {}
        for path in find_checkpoints(self.folder):
            stage, step = stage_and_step(path)
            steps[stage] = max(step, steps.get(stage, 0))
        return steps

    def size(self) -> int:
        """Bytes of all copies."""
        return sum(path.stat().st_size for path in find_checkpoints(self.folder))

    def room(self, stage: int, size: int) -> bool:
        """Whether a copy of this size may be taken in: within the limit once older ones of the stage are gone, and
        with as much of the disk left over."""
        others = [path for path in find_checkpoints(self.folder) if stage_and_step(path)[0] != stage]
        taken = sum(path.stat().st_size for path in others)
        return taken + size <= self.most_bytes and shutil.disk_usage(self.folder).free > 2 * size

    def drop_older(self, stage: int, step: int) -> None:
        """Remove the copies of a stage but that of ``step``."""
        for path in find_checkpoints(self.folder):
            if stage_and_step(path)[0] == stage and stage_and_step(path)[1] != step:
                path.unlink(missing_ok=True)


class Custodian:
    """Keeps this node's copies fresh, and gets a lost stage's checkpoint from those of others."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        transport: Transport,
        membership: Membership,
        metrics: Metrics,
        store: CopyStore,
        own: Path,
        rng: random.Random | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``own``: where this node's own checkpoints lie, and those of a lost stage are put."""
        self._manifest = manifest
        self._swarm = bytes.fromhex(manifest.swarm_id)
        self._transport = transport
        self._membership = membership
        self._metrics = metrics
        self._store = store
        self._own = own
        self._rng = rng or random.Random()
        self._clock = clock
        self._rests_until = 0.0
        self._not_before: dict[int, float] = {}
        self._failures: dict[int, int] = {}
        """Of each stage since its last copy."""
        self._kept: set[int] = set()

    def folders(self) -> list[Path]:
        """Where checkpoints lie: this node's own, then copies."""
        return [self._own, self._store.folder]

    async def run(self) -> None:
        """Fetch copies for as long as this node lives; without any room for them, do nothing."""
        if self._store.most_bytes <= 0:
            return
        self._store.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_unfinished(self._store.folder)
        while True:
            self._metrics.copies_bytes.set(self._store.size())
            seen = self._checkpoints_written()
            for stage in self._due(self._store.held())[:1]:
                await self._copy(stage)
            wakes = [self._rests_until, *self._not_before.values()]
            pause = min((wake - self._clock() for wake in wakes if wake > self._clock()), default=LOOK_SECONDS)
            await self._membership.wait_until(
                lambda: self._checkpoints_written() != seen,  # noqa: B023
                min(max(pause, 0.1), LOOK_SECONDS),
            )

    def _checkpoints_written(self) -> int:
        """Changes whenever a replica claims to be past the step of another checkpoint; cheap, as it is asked often."""
        interval = self._manifest.training.checkpoint_steps
        return sum(claim.step // interval for claim in self._membership.view.claims.values())

    def _due(self, held: Mapping[int, int]) -> list[int]:
        now = self._clock()
        if now < self._rests_until:
            return []
        stages = due(
            self._membership.me,
            self._swarm,
            list(self._membership.view.claims.values()),
            held,
            num_stages=self._manifest.num_stages,
            interval=self._manifest.training.checkpoint_steps,
        )
        return [stage for stage in stages if self._not_before.get(stage, 0.0) <= now]

    async def _copy(self, stage: int) -> None:
        started = self._clock()
        outcome = "failed"
        try:
            claims = self._membership.view.replicas(stage)
            replicas = [claim.peer for claim in claims if claim.state in TRAINS]
            present = max((claim.step for claim in claims), default=0) + 1
            asked = self._rng.sample(replicas, min(3, len(replicas)))
            largest = largest_file(self._manifest, stage)
            offer = best_offer(await ask_offers(self._transport, asked, stage), at_most=present, largest=largest)
            if offer is None or offer.step <= self._store.held().get(stage, 0):
                outcome = ""
                raise NoCheckpointError(f"no replica of stage {stage} has a newer checkpoint yet")
            if not self._store.room(stage, offer.size):
                outcome = "skipped"
                raise NoCheckpointError(
                    f"no copy of stage {stage} is kept: it takes {offer.size >> 20} MiB; allow more with --copies-gib,"
                    " or make room on the disk"
                )
            copy = await fetch(self._transport, offer, manifest=self._manifest, stage=stage, folder=self._store.folder)
            self._store.drop_older(stage, copy.step)
            # Once a stage for people; there is another one every few minutes.
            level = logging.DEBUG if stage in self._kept else logging.INFO
            self._kept.add(stage)
            log.log(level, "keeping a copy of stage %d, step %d", stage, copy.step)
            self._metrics.copies.labels(outcome="fetched").inc()
            self._failures.pop(stage, None)
            self._rests_until = self._clock() + REST * (self._clock() - started)
        except (SentinelError, OSError) as error:
            pause = SOON_SECONDS
            if outcome:
                self._failures[stage] = self._failures.get(stage, 0) + 1
                pause = RETRY_SECONDS if outcome == "skipped" else retry_pause(self._failures[stage])
                log.info("%s", error)
                self._metrics.copies.labels(outcome=outcome).inc()
            self._not_before[stage] = self._clock() + pause

    async def restore(self, stage: int, at_most: int, tell: Callable[[str], None]) -> Checkpoint | None:
        """A lost stage's newest checkpoint from those who keep copies; None if nobody has one now."""
        claims = [claim for claim in self._membership.view.claims.values() if claim.peer != self._membership.me]
        likely = [peer for peer in custodians(self._swarm, stage, claims) if peer != self._membership.me]
        others = [claim.peer for claim in claims if claim.peer not in likely]
        asked = (likely + self._rng.sample(others, len(others)))[:MAX_ASKED]
        told = await ask_offers(self._transport, asked, stage)
        offer = best_offer(told, at_most=at_most, largest=largest_file(self._manifest, stage))
        if offer is None:
            return None
        tell(
            f"no replica of stage {stage} is there; fetching its checkpoint of step {offer.step} from "
            f"{many(len(offer.peers), 'node')} that keep copies"
        )
        try:
            return await fetch(self._transport, offer, manifest=self._manifest, stage=stage, folder=self._own)
        except (SentinelError, OSError) as error:
            log.warning("%s", error)
            return None
