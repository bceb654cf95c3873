"""The training of one stage, step after step: share, barrier, average, apply.

Knows the order of things; how a microbatch travels is the pipeline's matter, how siblings
agree the averager's, what a peer is worth the guard's.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable

import torch

from node.averaging import Averager, Committed, Contribution, OutOfSyncError
from node.barrier import Coverage, Deadline
from node.baselines import Baselines
from node.data import TokenStream
from node.digest import parameter_digest
from node.drill import Drill
from node.guard import Guard
from node.history import ParameterHistory
from node.membership import Membership
from node.optimizer import StepOptimizer
from node.pipeline import Pipeline
from node.stage import StageRunner
from node.statesync import StageState, StateServer, fetch_state
from node.telemetry import Telemetry
from node.wiring import Wire, assign_microbatches, shares, shuffled, wire
from node.work import Step, UnfinishedError
from node.worker import ComputeWorker, Priority
from protocol.errors import LocalError, RemoteError, SentinelError
from protocol.fields import decode, encode
from protocol.manifest import Manifest
from protocol.messages import Method, ShareAnswer, ShareDone
from protocol.records import NodeState
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport
from verifier.verdicts import Reason

log = logging.getLogger(__name__)

FIRST_LIMIT_SECONDS = 180.0
ACTIVE_AHEAD_STEPS = 2
"""A joiner that has caught up takes work two steps later, so that everybody has heard of it by then."""
FINISHED_ROUND = 64


class Trainer:
    """Trains the stage that this node has claimed."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        stage: int,
        transport: Transport,
        membership: Membership,
        guard: Guard,
        pipeline: Pipeline,
        runner: StageRunner,
        optimizer: StepOptimizer,
        worker: ComputeWorker,
        telemetry: Telemetry,
        history: ParameterHistory,
        data: TokenStream | None,
        set_state: Callable[[NodeState, str], None],
        drill: Drill | None = None,
    ) -> None:
        """``data`` is needed at stage 0 only. ``set_state`` tells the state and why the node is in it."""
        self._manifest = manifest
        self._swarm = bytes.fromhex(manifest.swarm_id)
        self._stage = stage
        self._transport = transport
        self._membership = membership
        self._guard = guard
        self._pipeline = pipeline
        self._runner = runner
        self._optimizer = optimizer
        self._worker = worker
        self._telemetry = telemetry
        self._history = history
        self._drill = drill
        self._data = data
        self._set_state = set_state
        self._deadline = Deadline(first_limit=FIRST_LIMIT_SECONDS)
        self._coverages: dict[int, Coverage] = {}
        self._covered = -1
        self._ends: set[asyncio.Task[None]] = set()
        self._between_steps = asyncio.Lock()
        self.step = 0
        """Steps applied; also the number of the step that comes next, or is under way."""
        self.parameters = history.digest_at(0) or b""
        self.averager = Averager(
            me=membership.me,
            transport=transport,
            parameters=runner.flat_parameters().numel(),
            siblings=self._siblings,
            is_sibling=self._is_sibling,
            wait_until=membership.wait_until,
            notify=membership.notify,
            on_stalled=self._stalled,
            hop_seconds=manifest.network.hop_timeout_seconds,
            on_failed_round=telemetry.round_failed,
        )
        self.baselines = Baselines(
            transport=transport,
            membership=membership,
            guard=guard,
            siblings=self._siblings,
            is_sibling=self._is_sibling,
        )
        self.state_server = StateServer(transport, freeze=self._freeze, is_sibling=self._is_sibling)
        if stage == 0:
            transport.serve(Method.SHARE_DONE, Route(handler=self._serve_share_done, admits=self._is_sibling))

    # life ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Train until the manifest's last step (for ever if it has none).

        Raises:
            SentinelError: training cannot go on; says why.
        """
        if self._membership.view.begun_step(without={self._membership.me}):
            await self._synchronise()
        last = self._manifest.training.steps
        while last == 0 or self.step < last:
            try:
                await self._train_step()
            except OutOfSyncError as error:
                self._telemetry.out_of_sync(self.step, str(error))
                await self._synchronise()

    async def close(self) -> None:
        """Stop what runs beside the steps."""
        for task in list(self._ends):
            task.cancel()
        await asyncio.gather(*self._ends, return_exceptions=True)
        await self.baselines.close()

    # one step ------------------------------------------------------------------------

    async def _train_step(self) -> None:
        started = time.monotonic()
        number = self.step
        self.averager.stand_at(number)
        self._set_state(NodeState.TRAINING, f"step {number}")
        step = self._pipeline.begin(number, self.parameters, self._wires(number))
        if self._stage == 0:
            losses = await self._train_share(step)
            loss, microbatches = sum(losses.values()) / max(1, len(losses)), len(losses)
        else:
            barrier = await self._serve_until_over(step)
            loss, microbatches = barrier, len(step.losses)
        self._pipeline.finish(step)
        if self._stage < self._manifest.num_stages - 1:
            self._spawn_end(number, loss, microbatches)
        gradient, count = await self._worker.run(Priority.BACKWARD, self._runner.take_gradient)
        averaging = time.monotonic()
        with self._telemetry.phase("average"):
            committed = await self.averager.run(
                Contribution(step=number, gradient=gradient, microbatches=count, parameters=self.parameters)
            )
        self._telemetry.averaged("refetched" if committed.fetched else "committed", time.monotonic() - averaging)
        await self._apply(committed)
        self._guard.end_step(number)
        self._telemetry.step_done(number, loss, time.monotonic() - started)

    def _wires(self, number: int) -> tuple[Wire, ...]:
        """This node's wires into the next stage."""
        view = self._membership.view
        excluded = self._guard.excluded()
        if self._stage == self._manifest.num_stages - 1:
            return ()
        upstream = shares(view.roster(self._stage, number, without=self._guard.ejected()))
        downstream = shares(view.roster(self._stage + 1, number, without=excluded))
        return wire(self._swarm, number, self._stage, upstream, downstream).get(self._membership.me, ())

    async def _serve_until_over(self, step: Step) -> float:
        """Serve upstream until no more work of the step can come; returns the step's loss."""
        barrier = self._pipeline.notices.barrier(step.number)

        def upstream() -> list[str]:
            return self._pipeline.peers(self._stage - 1, step.number)

        def over() -> bool:
            return barrier.passed(upstream()) and self._pipeline.quiet(step)

        with self._telemetry.phase("idle"):
            while not await self._membership.wait_until(over, self._deadline.limit()):
                if not self._pipeline.quiet(step) or not barrier.ended:
                    continue  # work is under way, or the whole stage above is held up: nobody's fault yet
                for peer in barrier.waiting_for(upstream()):
                    self._stalled(peer)
                    barrier.excused.add(peer)
        self._deadline.learn(time.monotonic() - step.started)
        return barrier.loss()

    def _spawn_end(self, number: int, loss: float, microbatches: int) -> None:
        task = asyncio.get_running_loop().create_task(self._pipeline.notices.send_end(number, loss, microbatches))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    # stage 0 -------------------------------------------------------------------------

    async def _train_share(self, step: Step) -> dict[int, float]:
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
        assert self._data is not None
        data = self._data
        training = self._manifest.training

        async def train(microbatch: int) -> None:
            tokens = data.sequences(
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

        async def tell(peer: str) -> None:
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
                    break
            if time.monotonic() - started > self._deadline.limit():
                for peer in pending():
                    self._stalled(peer)
                    absent.add(peer)
        self._deadline.learn(time.monotonic() - step.started)

    async def _serve_share_done(self, request: Request) -> Response:
        message = decode(ShareDone, request.head)
        if not self.step <= message.step <= self.step + 1:
            return Response(head=encode(ShareAnswer(finished=message.step < self.step)))
        coverage = self._coverage(message.step)
        coverage.announce(request.peer, message.round, dict(message.losses), message.failed)
        self._membership.notify()
        return Response(head=encode(ShareAnswer(finished=message.step <= self._covered)))

    def _coverage(self, number: int) -> Coverage:
        return self._coverages.setdefault(number, Coverage(count=self._manifest.microbatches_per_step))

    # siblings ------------------------------------------------------------------------

    def _siblings(self, number: int) -> list[str]:
        roster = self._membership.view.roster(self._stage, number, without=self._guard.ejected())
        return [claim.peer for claim in roster if claim.peer != self._membership.me]

    def _is_sibling(self, peer: str) -> bool:
        return self._membership.view.stage_of(peer) == self._stage and peer not in self._guard.ejected()

    def _stalled(self, peer: str) -> None:
        self._guard.strike(peer, Reason.STALLED, self.step, detail="it holds the step up")

    # state ---------------------------------------------------------------------------

    async def _apply(self, committed: Committed) -> None:
        """Apply an agreed aggregate: the same bits on every sibling."""
        async with self._between_steps:
            self.parameters = await self._worker.run(
                Priority.BACKWARD, self._apply_in_worker, committed.mean, committed.step
            )
            self.step = committed.step + 1
        self._telemetry.applied(committed.step, self.parameters)
        self.averager.remember(committed)
        self.baselines.share(committed.step)
        self.state_server.forget_old(self.step)
        self._membership.update_claim(step=self.step, digest=self.parameters)

    def _apply_in_worker(self, mean: torch.Tensor, number: int) -> bytes:
        with self._telemetry.phase("optimizer"):
            flat = self._runner.flat_parameters()
            self._history.about_to_change()
            if self._drill is not None:
                self._drill.withdraw(flat)
            self._optimizer.apply(flat, mean, number)
            digest = parameter_digest(flat)
            self._history.changed(number + 1, digest)
            if self._drill is not None:
                self._drill.inject(flat, number + 1)
        self._guard.end_step_checkers(number)
        return digest

    def _state(self) -> StageState:
        return StageState(
            step=self.step,
            parameters=self._runner.flat_parameters().detach().clone(),
            optimizer={name: tensor.clone() for name, tensor in self._optimizer.state().items()},
        )

    async def _freeze(self) -> StageState:
        async with self._between_steps:
            return await self._worker.run(Priority.CHECK, self._state)

    async def _synchronise(self) -> None:
        """Get the state from a sibling, follow its aggregates, and take work again."""
        while True:
            try:
                await self._download()
                await self._follow()
                return
            except SentinelError as error:
                self._set_state(NodeState.SYNCING, f"trying another sibling: {error}")
                await self._membership.wait_until(lambda: False, 1.0)

    async def _download(self) -> None:
        # Whatever was accumulated belongs to parameters that are about to be replaced.
        await self._worker.run(Priority.BACKWARD, self._runner.take_gradient)
        self._membership.update_claim(urgent=True, state=NodeState.SYNCING)
        donors = [
            claim.peer
            for claim in self._membership.view.replicas(self._stage, without=self._guard.ejected())
            if claim.state is NodeState.TRAINING and claim.peer != self._membership.me
        ]
        if not donors:
            self._set_state(
                NodeState.SYNCING,
                f"training has begun and no replica of stage {self._stage} is there to give its state; waiting for one",
            )
            await self._membership.wait_until(lambda: False, 2.0)
            raise LocalError("no sibling has the state of this stage")
        donor = random.choice(donors)
        self._set_state(NodeState.SYNCING, f"downloading the stage's state from {donor[-8:]}")
        await self._membership.introduce(donor)

        def progress(done: int, total: int) -> None:
            self._set_state(NodeState.SYNCING, f"downloading the stage's state: {done >> 20} of {total >> 20} MiB")

        like = await self._freeze()
        state = await fetch_state(self._transport, donor, like=like, on_progress=progress)
        async with self._between_steps:
            self.parameters = await self._worker.run(Priority.CHECK, self._load, state)
            self.step = state.step
        self.averager.stand_at(self.step)
        self._pipeline.expect(self.step)

    def _load(self, state: StageState) -> bytes:
        """Take a state over; returns the digest of its parameters."""
        self._runner.load_flat(state.parameters)
        self._optimizer.load(state.optimizer)
        digest = parameter_digest(state.parameters)
        self._history.replaced(state.step, digest)
        return digest

    async def _follow(self) -> None:
        """Apply what the siblings commit until this node's own first step comes."""
        active_from: int | None = None
        while active_from is None or self.step < active_from:
            self._set_state(NodeState.SYNCING, f"following the siblings at step {self.step}")
            self.averager.stand_at(self.step)
            self._pipeline.expect(self.step)
            committed = await self.averager.fetch(self.step, self._givers())
            await self._apply(committed)
            self._guard.end_step(committed.step)
            if active_from is None and committed.present <= self.step:
                active_from = self.step + ACTIVE_AHEAD_STEPS
                self._membership.update_claim(
                    urgent=True, state=NodeState.PROBATION, active_from=active_from, step=self.step
                )
                await self._membership.announce()
        self._pipeline.expect(self.step)

    def _givers(self) -> list[str]:
        givers = self._siblings(self.step)
        random.shuffle(givers)
        return givers
