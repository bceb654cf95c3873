"""The share of a step that a replica of the first stage trains: its own part, and what siblings could not.

Siblings tell each other, in rounds, what they have trained; what nobody has is dealt out again. A step is over for this
stage once every live sibling has told of a round after which nothing is missing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from node.barrier import Coverage, Deadline
from node.data import TokenStream
from node.guard import Guard
from node.membership import Membership
from node.pipeline import Pipeline
from node.refusal_kinds import NOT_READY
from node.telemetry import Telemetry
from node.wiring import assign_microbatches, shares, shuffled
from node.work import Step, UnfinishedError
from protocol.errors import RefusedError, RemoteError, SentinelError
from protocol.fields import decode, encode
from protocol.manifest import Manifest
from protocol.messages import Method, ShareAnswer, ShareDone
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport

log = logging.getLogger(__name__)

FINISHED_ROUND = 64


class Sharing:
    """Trains this node's share of each step of the first stage."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        transport: Transport,
        membership: Membership,
        guard: Guard,
        pipeline: Pipeline,
        telemetry: Telemetry,
        data: TokenStream,
        deadline: Deadline,
        present: Callable[[], int],
        siblings: Callable[[int], list[str]],
        is_sibling: Callable[[str], bool],
        on_stalled: Callable[[str], None],
    ) -> None:
        """``present()`` is the step that this node is in; ``siblings(step)`` are those that take part in a step."""
        self._manifest = manifest
        self._swarm = bytes.fromhex(manifest.swarm_id)
        self._transport = transport
        self._membership = membership
        self._guard = guard
        self._pipeline = pipeline
        self._telemetry = telemetry
        self._data = data
        self._deadline = deadline
        self._present = present
        self._siblings = siblings
        self._on_stalled = on_stalled
        self._coverages: dict[int, Coverage] = {}
        self._covered = -1
        transport.serve(Method.SHARE_DONE, Route(handler=self._serve_share_done, admits=is_sibling))

    async def train(self, step: Step) -> dict[int, float]:
        """Train this node's share, and what siblings could not; returns every microbatch's loss."""
        coverage = self._coverage(step.number)
        me = self._membership.me
        assigned = assign_microbatches(
            self._swarm,
            step.number,
            self._manifest.microbatches_per_step,
            shares(self._membership.view.roster(0, step.number, without=self._guard.ejected())),
        ).get(me, [])
        failed: set[int] = set()
        absent: set[str] = set()
        for round_number in range(FINISHED_ROUND):
            await self._train_microbatches(step, assigned, failed)
            coverage.announce(me, round_number, dict(step.losses), failed)
            await self._await_siblings(step, coverage, round_number, failed, absent)
            live = self._covering(step.number, absent)
            if not coverage.missing(live):
                break
            dealt = coverage.deal(shuffled(self._swarm, step.number, 0, live))
            if not any(dealt.values()):
                for microbatch in coverage.missing(live):
                    self._telemetry.lost(step.number, microbatch)
                break
            assigned = dealt[me]
        self._covered = step.number
        losses = coverage.losses(self._covering(step.number, absent))
        for old in [number for number in self._coverages if number < step.number]:
            del self._coverages[old]
        self._membership.notify()
        return losses

    async def _train_microbatches(self, step: Step, assigned: list[int], failed: set[int]) -> None:
        training = self._manifest.training

        async def train(microbatch: int) -> None:
            tokens = self._data.sequences(
                step.number,
                microbatch,
                per_microbatch=training.sequences_per_microbatch,
                context=self._manifest.model.context,
            )
            try:
                await self._pipeline.train_tokens(step, microbatch, tokens)
            except UnfinishedError as error:
                log.warning("microbatch %d of step %d goes to a sibling: %s", microbatch, step.number, error)
                failed.add(microbatch)

        await asyncio.gather(*map(train, assigned))

    def _covering(self, number: int, absent: set[str]) -> list[str]:
        """This node and its live siblings, less those that stalled in this step."""
        return [self._membership.me, *(peer for peer in self._siblings(number) if peer not in absent)]

    async def _await_siblings(
        self, step: Step, coverage: Coverage, round_number: int, failed: set[int], absent: set[str]
    ) -> None:
        """Tell the siblings what is trained, and wait until each has told the same of this round."""
        message = ShareDone(
            step=step.number,
            round=round_number,
            losses=tuple(sorted(step.losses.items())),
            failed=tuple(sorted(failed)),
        )
        told: set[str] = set()
        unready: set[str] = set()

        async def tell(peer: str) -> None:
            unready.discard(peer)
            try:
                response = await self._transport.call(
                    peer, Method.SHARE_DONE, message, timeout=self._manifest.network.hop_timeout_seconds
                )
                told.add(peer)
                if decode(ShareAnswer, response.head).finished:
                    known = coverage.announced.get(peer, (0, {}, frozenset()))
                    coverage.announce(peer, FINISHED_ROUND, known[1], known[2])
            except RemoteError as error:
                log.debug("sibling %s refused the share of step %d: %s", peer[-8:], step.number, error)
                if error.kind == "wrong_step":  # it is in a much earlier one, and finds that out by itself
                    absent.add(peer)
                elif error.kind in NOT_READY:
                    unready.add(peer)
            except SentinelError as error:
                log.debug("sibling %s did not take the share of step %d: %s", peer[-8:], step.number, error)

        def pending() -> list[str]:
            return coverage.waiting_for(self._covering(step.number, absent), round_number)

        started = time.monotonic()
        while True:
            untold = [peer for peer in self._covering(step.number, absent) if peer not in told]
            await asyncio.gather(*(tell(peer) for peer in untold if peer != self._membership.me))
            with self._telemetry.phase("idle"):
                if await self._membership.wait_until(lambda: not pending(), 1.0):
                    # Whoever was not ready to hear of it has told its own since, and waits to hear this.
                    await asyncio.gather(*(tell(peer) for peer in sorted(unready)))
                    break
            if time.monotonic() - started > self._deadline.limit():
                for peer in pending():
                    self._on_stalled(peer)
                    absent.add(peer)
        self._deadline.learn(time.monotonic() - step.started)

    async def _serve_share_done(self, request: Request) -> Response:
        message = decode(ShareDone, request.head)
        present = self._present()
        if message.step > present + 1:
            raise RefusedError(f"step {message.step} is not the present one ({present})", kind="wrong_step")
        if message.step < present:
            return Response(head=encode(ShareAnswer(finished=True)))
        coverage = self._coverage(message.step)
        coverage.announce(request.peer, message.round, dict(message.losses), message.failed)
        self._membership.notify()
        return Response(head=encode(ShareAnswer(finished=message.step <= self._covered)))

    def _coverage(self, number: int) -> Coverage:
        return self._coverages.setdefault(number, Coverage(count=self._manifest.microbatches_per_step))
