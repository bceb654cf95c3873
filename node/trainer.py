"""The training of one stage, step after step: share, barrier, average, apply.

Knows the order of things; how a microbatch travels is the pipeline's matter, how siblings
agree the averager's, what a peer is worth the guard's.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable, Collection

import torch

from node.averaging import Averager, Checking, Committed, OutOfSyncError
from node.backlog import Backlog, BacklogLimits
from node.barrier import Deadline, left_behind
from node.baselines import Baselines
from node.butterfly import Contribution
from node.checkpointer import Checkpointer
from node.data import TokenStream
from node.digest import parameter_digest
from node.donors import NoDonorError
from node.drill import Drill
from node.guard import Guard
from node.history import ParameterHistory
from node.inquiry import Inquiry
from node.joiner import Joiner
from node.membership import Membership
from node.optimizer import StepOptimizer
from node.pipeline import Pipeline
from node.sharing import Sharing
from node.snapshot import Layout, StageState
from node.stage import StageRunner
from node.statesync import StateServer
from node.survivors import Witnesses
from node.telemetry import Telemetry
from node.wiring import Wire, shares, wire
from node.work import Step
from node.worker import ComputeWorker, Priority
from protocol.errors import MessageError, SentinelError
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.parts import PartSigner
from protocol.records import NodeState
from protocol.transports.sessions import Transport
from verifier.quorum import neighbouring_stages
from verifier.verdicts import Reason

log = logging.getLogger(__name__)

LEFT_BEHIND = "the swarm has gone on without this node; fetching the siblings' state"
FIRST_LIMIT_SECONDS = 180.0
ACTIVE_AHEAD_STEPS = 2
"""A joiner that has caught up takes work two steps later, so that everybody has heard of it by then."""
FIRST_PAUSE_SECONDS = 1.0
LONGEST_PAUSE_SECONDS = 30.0
"""Between attempts to get the state of the stage; doubled after each."""
BACKLOG_AGGREGATES = 9
LEAST_BACKLOG_BYTES = 64 << 20
"""How much of what siblings commit meanwhile a joiner holds: as much as three states, or this where those are small."""


class Trainer:
    """Trains the stage that this node has claimed."""

    def __init__(
        self,
        *,
        identity: Identity,
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
        checkpointer: Checkpointer,
        drill: Drill | None = None,
    ) -> None:
        """``data`` is needed at stage 0 only. ``set_state`` tells the state and why the node is in it. ``history``
        knows of which step the runner's parameters are."""
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
        self._set_state = set_state
        self._checkpointer = checkpointer
        self._deadline = Deadline(first_limit=FIRST_LIMIT_SECONDS)
        self._ends: set[asyncio.Task[None]] = set()
        self._between_steps = asyncio.Lock()
        self.step = history.step
        """Steps applied; also the number of the step that comes next, or is under way."""
        self.parameters = history.digest_at(self.step) or b""
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
            robust=manifest.training.aggregation == "robust",
            checking=Checking(
                signer=PartSigner(identity, self._swarm),
                mode=manifest.verifier.mode,
                chance=manifest.verifier.audit_rate,
                on_false=self._proven_false,
                barred=lambda peer: not guard.allows(peer),
                on_examined=telemetry.slice_examined,
                falsify=None if drill is None else drill.reduce,
            ),
            on_failed_round=telemetry.round_failed,
            alive=self._alive,
            check_present=self._check_present,
            tell=lambda text: set_state(NodeState.TRAINING, text),
            slept_since=membership.wakefulness.slept_since,
        )
        self._witnesses = Witnesses(
            neighbours=self._neighbours, ask=membership.fetch_view, needed=manifest.num_stages > 1
        )
        self.baselines = Baselines(
            transport=transport,
            membership=membership,
            guard=guard,
            siblings=self._siblings,
            is_sibling=self._is_sibling,
        )
        layout = Layout.of(self._state())
        self.state_server = StateServer(
            transport, layout=layout, freeze=self._freeze, digest=self.parameters, is_sibling=self._is_sibling
        )
        self._inquiry = Inquiry(transport=transport, siblings=self._donors, introduce=membership.introduce)
        self._joiner = Joiner(
            transport=transport,
            layout=layout,
            inquiry=self._inquiry,
            claimed=self._claimed,
            tell=lambda text: set_state(NodeState.SYNCING, text),
            progress=telemetry.state_fetched,
            on_false=self._gave_false_state,
        )
        if self.step > 0:
            # Before a message can come: one that is refused as too early is not sent again.
            self.averager.stand_at(self.step)
            pipeline.expect(self.step)
            self.state_server.stands_at(self.step, self.parameters)
        checkpointer.attach(stage, self._freeze)
        self._sharing = None if data is None else self._first_stage(data)

    def _first_stage(self, data: TokenStream) -> Sharing:
        return Sharing(
            manifest=self._manifest,
            transport=self._transport,
            membership=self._membership,
            guard=self._guard,
            pipeline=self._pipeline,
            telemetry=self._telemetry,
            data=data,
            deadline=self._deadline,
            present=lambda: self.step,
            siblings=self._siblings,
            is_sibling=self._is_sibling,
            on_stalled=self._stalled,
        )

    # life ----------------------------------------------------------------------------

    async def run(self, *, behind: bool) -> None:
        """Train until the manifest's last step (for ever if it has none).

        Args:
            behind: siblings are further, or have other parameters.

        Raises:
            SentinelError: training cannot go on; says why.
        """
        begun = self._membership.view.begun_step(without={self._membership.me})
        if behind or ((begun or 0) > self.step and self._donors()):
            await self._catch_up()
        elif self.step > 0 and self._stage < self._manifest.num_stages - 1:
            # It may have left before all of the next stage heard of the end of the step before.
            self._spawn_end(self.step - 1, 0.0, 0)
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
        await self.averager.close()
        await self.baselines.close()

    # one step ------------------------------------------------------------------------

    async def _train_step(self) -> None:
        started = time.monotonic()
        number = self.step
        self.averager.stand_at(number)
        self._set_state(NodeState.TRAINING, f"step {number}")
        step = self._pipeline.begin(number, self.parameters, self._wires(number))
        if self._sharing is not None:
            losses = await self._sharing.train(step)
            loss, microbatches = sum(losses.values()) / max(1, len(losses)), len(losses)
        else:
            loss, microbatches = await self._serve_until_over(step), len(step.losses)
            if not loss and microbatches:  # the stage above has come back, and knows of no loss
                loss = sum(step.losses.values()) / microbatches
        self._pipeline.finish(step)
        if self._stage < self._manifest.num_stages - 1:
            self._spawn_end(number, loss, microbatches)
        gradient, count = await self._worker.run(Priority.BACKWARD, self._runner.take_gradient)
        averaging = time.monotonic()
        with self._telemetry.phase("average"):
            committed = await self.averager.run(
                Contribution(step=number, gradient=gradient, microbatches=count, parameters=self.parameters)
            )
        if (missing := self._manifest.microbatches_per_step - committed.microbatches) > 0:
            self._telemetry.unaveraged(number, missing)
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

        def alone() -> bool:
            return self._left_behind(step.number)

        with self._telemetry.phase("idle"):
            while (
                not await self._membership.wait_until(lambda: over() or alone(), self._deadline.limit()) or not over()
            ):
                self._check_present(step.number)
                if not self._pipeline.quiet(step) or not barrier.ended:
                    continue  # work is under way, or the whole stage above is held up: nobody's fault yet
                for peer in barrier.waiting_for(upstream()):
                    self._stalled(peer)
                    barrier.excused.add(peer)
        self._deadline.learn(time.monotonic() - step.started)
        return barrier.loss()

    def _left_behind(self, number: int) -> bool:
        """Whether most siblings and upstream peers are in much later steps than this one."""

        def steps(stage: int) -> dict[str, int]:
            replicas = self._membership.view.replicas(stage, without={self._membership.me, *self._guard.ejected()})
            return {
                claim.peer: max(claim.step, self._pipeline.notices.ended(claim.peer) + 1)
                for claim in replicas
                if claim.state is NodeState.TRAINING
            }

        return left_behind(number, steps(self._stage), steps(self._stage - 1))

    def _check_present(self, number: int) -> None:
        if self._left_behind(number):
            raise OutOfSyncError(LEFT_BEHIND)

    def _neighbours(self) -> list[str]:
        view, ejected = self._membership.view, self._guard.ejected()
        near = neighbouring_stages(self._stage, self._manifest.num_stages)
        return [claim.peer for stage in near for claim in view.replicas(stage, without=ejected)]

    async def _alive(self, lost: Collection[str]) -> set[str] | None:
        return await self._witnesses.alive(set(lost) - self._guard.all_ejected())

    def _spawn_end(self, number: int, loss: float, microbatches: int) -> None:
        task = asyncio.get_running_loop().create_task(self._pipeline.notices.send_end(number, loss, microbatches))
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)

    # siblings ------------------------------------------------------------------------

    def _siblings(self, number: int) -> list[str]:
        roster = self._membership.view.roster(self._stage, number, without=self._guard.ejected())
        return [claim.peer for claim in roster if claim.peer != self._membership.me]

    def _is_sibling(self, peer: str) -> bool:
        return self._membership.view.stage_of(peer) == self._stage and peer not in self._guard.ejected()

    def _stalled(self, peer: str) -> None:
        self._guard.strike(peer, Reason.STALLED, self.step, detail="it holds the step up")

    def _proven_false(self, peer: str, reason: Reason, text: str) -> None:
        self._guard.condemn(peer, reason, self.step, detail=text)

    # state ---------------------------------------------------------------------------

    async def _apply(self, committed: Committed) -> None:
        """Apply an agreed aggregate: the same bits on every sibling."""
        async with self._between_steps:
            update = asyncio.ensure_future(
                self._worker.run(Priority.BACKWARD, self._apply_in_worker, committed.mean, committed.step)
            )
            try:
                self.parameters = await asyncio.shield(update)
            except asyncio.CancelledError:
                # A node that leaves just now must not write a checkpoint of half an update.
                self.parameters, self.step = await update, committed.step + 1
                raise
            self.step = committed.step + 1
        self._telemetry.applied(committed.step, self.parameters)
        self.averager.remember(committed)
        self.baselines.share(committed.step)
        self.state_server.stands_at(self.step, self.parameters)
        self._membership.update_claim(step=self.step, digest=self.parameters)
        self._checkpointer.step_begins(self.step)

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
        """The live state; not a copy."""
        return StageState(
            step=self.step, parameters=self._runner.flat_parameters().detach(), optimizer=self._optimizer.state()
        )

    async def _freeze(self, copy: Callable[[StageState], None]) -> tuple[int, bytes]:
        """Run ``copy`` on the state while no step can change it; returns step and digest of the parameters.

        In a thread of its own: the compute thread goes on, since it only reads the state while a step is under way.
        """
        async with self._between_steps:
            await asyncio.to_thread(lambda: copy(self._state()))
            return self.step, self.parameters

    async def _catch_up(self) -> None:
        """Follow the siblings from this node's own checkpoint on, where they know the way from there; else fetch their
        state."""
        if self.step > 0:
            try:
                await self._resume()
                return
            except SentinelError as error:
                log.info("the checkpoint of step %d is of no use: %s", self.step, error)
        await self._synchronise()

    async def _resume(self) -> None:
        self.state_server.withhold()
        self._membership.update_claim(urgent=True, state=NodeState.SYNCING)
        await self._joiner.check(self.step, self.parameters)
        backlog = self._backlog()
        try:
            backlog.start(self.step)
            await self._follow(backlog)
        finally:
            await backlog.close()

    def _backlog(self) -> Backlog:
        return Backlog(
            fetch=lambda step: self.averager.fetch(step, self._givers(step)),
            reached=self._inquiry.reached,
            limits=BacklogLimits(
                size=max(LEAST_BACKLOG_BYTES, BACKLOG_AGGREGATES * self._runner.flat_parameters().nbytes)
            ),
        )

    async def _synchronise(self) -> None:
        """Get the state from siblings, follow their aggregates, and take work again. Tries until it has worked."""
        pause = FIRST_PAUSE_SECONDS
        while True:
            backlog = self._backlog()
            try:
                await self._download(backlog)
                await self._follow(backlog)
                return
            except SentinelError as error:
                log.debug("joining failed", exc_info=error)
                self._set_state(NodeState.SYNCING, f"{error}; trying again in {pause:.0f} s")
            finally:
                await backlog.close()
            nobody = not self._donors()
            await self._membership.wait_until(lambda: nobody and bool(self._donors()), pause)  # noqa: B023
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def _download(self, backlog: Backlog) -> None:
        # Whatever was accumulated belongs to parameters that are about to be replaced.
        await self._worker.run(Priority.BACKWARD, self._runner.take_gradient)
        self.state_server.withhold()
        self._membership.update_claim(urgent=True, state=NodeState.SYNCING)
        if not self._donors():
            raise NoDonorError(
                f"training has begun and no replica of stage {self._stage} is there to give its state; waiting for one"
            )
        state = await self._joiner.fetch(backlog)
        async with self._between_steps:
            try:
                self.parameters = await self._worker.run(Priority.CHECK, self._load, state)
            except ValueError as error:  # values that no optimizer can have
                raise MessageError(f"a sibling's state is not used: {error}", kind="snapshot") from None
            self.step = state.step
        self.state_server.stands_at(self.step, self.parameters)

    def _donors(self) -> list[str]:
        """Siblings that say that they have the state of the stage."""
        return [
            claim.peer
            for claim in self._membership.view.replicas(self._stage, without=self._guard.ejected())
            if claim.state is NodeState.TRAINING and claim.peer != self._membership.me
        ]

    def _claimed(self, step: int) -> dict[str, bytes]:
        """What siblings claim as the digest of their parameters before this step."""
        claims = self._membership.view.claims
        return {peer: claims[peer].digest for peer in self._donors() if claims[peer].step == step}

    def _gave_false_state(self, peer: str, error: SentinelError) -> None:
        self._transport.observer.remote_error(peer, error)
        self._guard.strike(peer, Reason.PROTOCOL, self.step, detail=str(error))

    def _load(self, state: StageState) -> bytes:
        """Take a state over; returns the digest of its parameters."""
        self._runner.load_flat(state.parameters)
        self._optimizer.load(state.optimizer)
        digest = parameter_digest(state.parameters)
        self._history.replaced(state.step, digest)
        return digest

    async def _follow(self, backlog: Backlog) -> None:
        """Apply what the siblings commit until this node's own first step comes."""
        last = self._manifest.training.steps
        active_from: int | None = None
        while (active_from is None or self.step < active_from) and not 0 < last <= self.step:
            self._set_state(NodeState.SYNCING, f"following the siblings at step {self.step}")
            self.averager.stand_at(self.step)
            self._pipeline.expect(self.step)
            if not backlog.holds(self.step):  # what is here can be applied before anybody is asked
                present = await self._joiner.check(self.step, self.parameters)
                if active_from is None and present is not None and present <= self.step + 1:
                    active_from = max(self.step, present) + ACTIVE_AHEAD_STEPS
                    backlog.stop_before(active_from)
                    self._membership.update_claim(
                        urgent=True, state=NodeState.PROBATION, active_from=active_from, step=self.step
                    )
                    await self._membership.announce()
            committed = await backlog.take(self.step)
            await self._apply(committed)
            self._guard.end_step(committed.step)
        self.averager.stand_at(self.step)
        self._pipeline.expect(self.step)

    def _givers(self, step: int) -> list[str]:
        givers = self._siblings(step)
        random.shuffle(givers)
        return givers
