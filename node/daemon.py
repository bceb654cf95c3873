"""The daemon: wires the parts of a node together and takes it through its life.

preflight -> bootstrapping -> claiming -> waiting -> (syncing -> probation ->) training -> draining.
A coordinator stops after bootstrapping: it serves manifest, view and DHT, and trains nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import random
import signal
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

from node.admission_file import AdmissionFile
from node.admissions import Admissions
from node.answers import Answers
from node.assembly import StageParts, assemble
from node.checkpoint_server import CheckpointServer
from node.checkpointer import Checkpointer
from node.checkpoints import CheckpointStore
from node.contribution import Contribution
from node.coordinator import SwarmWatch, fetch_step
from node.custody import CopyStore, Custodian
from node.device import available_memory_bytes, choose_device
from node.drill import Drill, DrillPlan, parse_drill
from node.forming import Applicant, Forming, Place
from node.guard import Guard
from node.http import HttpServer, finite
from node.invite_file import write_invite_file
from node.membership import Membership, Timing
from node.metrics import Metrics
from node.network import Network, P2PNetwork
from node.peer_findings import Findings
from node.pipeline import Pipeline
from node.probe import Prober
from node.reunion import Reunion, by_peer
from node.sampling import sample_disk_for_ever, sample_for_ever
from node.settings import MAX_CLOCK_OFFSET_SECONDS, NodeSettings
from node.stage_data import StageData
from node.state_folder import StateFolder
from node.status import build_status, farewell
from node.telemetry import Telemetry
from node.trainer import Trainer
from node.version import AGENT
from node.worker import ComputeWorker
from protocol.errors import (
    EjectedError,
    LocalError,
    PreflightError,
    SentinelError,
    SettingsError,
)
from protocol.identity import Identity
from protocol.invite import Invite
from protocol.manifest import Manifest
from protocol.records import NodeState
from protocol.transports.dht import RecordStore
from protocol.transports.p2pd import DaemonOptions

log = logging.getLogger(__name__)

DRAIN_SECONDS = 25.0
FINISH_SECONDS = 5.0
"""Of those, for microbatches that are under way when the node is told to leave."""
FAREWELL_SECONDS = 3.0
PROGRESS_SECONDS = 15.0
"""Between two lines of the log that say how far training is."""


class Node:
    """One node, from start to goodbye. All its parts are its own; many nodes can share a process."""

    def __init__(
        self,
        settings: NodeSettings,
        folder: StateFolder,
        identity: Identity,
        *,
        network: Network | None = None,
        make_worker: Callable[[], ComputeWorker] | None = None,
    ) -> None:
        """``network`` and ``make_worker`` replace the real ones in simulations."""
        self.settings = settings
        self._make_worker = make_worker or (lambda: ComputeWorker(threads=settings.threads))
        self.folder = folder
        self.identity = identity
        self.manifest: Manifest | None = settings.manifest
        self.metrics = Metrics()
        self.telemetry = Telemetry(self.metrics)
        self.state = NodeState.PREFLIGHT
        self.reason = ""
        self.started = time.time()
        self.invite_line = ""
        self.invited = asyncio.Event()
        """Set once this node has an invite to hand out."""
        self.http_address: tuple[str, int] | None = None
        self.membership: Membership | None = None
        self.admissions: Admissions | None = None
        """Who may take part; None in an open swarm."""
        self.guard: Guard | None = None
        self.trainer: Trainer | None = None
        self.pipeline: Pipeline | None = None
        self.parts: StageParts | None = None
        self.watch: SwarmWatch | None = None
        self.findings = Findings(self)
        self.drill: Drill | None = None
        self.checkpointer: Checkpointer | None = None
        self.checkpoint_server: CheckpointServer | None = None
        self.prober: Prober | None = None
        self.finished = False
        self.stage: int | None = None
        self._failure: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stop = asyncio.Event()
        self._entered = False
        self._leaving = False
        self._before_isolation = NodeState.BOOTSTRAPPING, ""
        self._signals = 0
        self._tasks: set[asyncio.Task[Any]] = set()
        self._worker: ComputeWorker | None = None
        self._http = HttpServer(self.metrics, self.status, self._ready, self._alive)
        manifest, invite = settings.manifest, settings.invite
        assert manifest is not None or invite is not None
        swarm_id = manifest.swarm_id if manifest is not None else invite.swarm_id if invite is not None else ""
        self.swarm = bytes.fromhex(swarm_id)
        self.contribution = Contribution(folder, swarm_id, self.telemetry.counters)
        self.network = network if network is not None else self._real_network()

    def _real_network(self) -> Network:
        settings = self.settings
        return P2PNetwork(
            identity=self.identity,
            swarm=self.swarm,
            daemon_options=DaemonOptions(
                identity_path=str(self.folder.identity_path),
                host=settings.host,
                port=settings.port,
                announce=settings.announce,
                reach=settings.reach,
                note_path=str(self.folder.path / "sockets"),
            ),
            agent=AGENT,
            observer=self.telemetry,
            on_daemon_exit=self._daemon_died,
            store=RecordStore(
                self.swarm,
                on_reject=self.metrics.record_rejected,
                on_operation=self.metrics.dht_operation,
            ),
        )

    @property
    def step(self) -> int:
        """The step that this node is in, or of a coordinator the one that its swarm is in."""
        if self.trainer is not None:
            return self.trainer.step
        return self.watch.step if self.watch is not None else 0

    @property
    def loss(self) -> float | None:
        """The training loss of the last step in nats per token, if it is known."""
        if self.telemetry.losses:
            return self.telemetry.losses[-1][1]
        return self.watch.loss if self.watch is not None else None

    # life ----------------------------------------------------------------------------

    async def run(self) -> None:
        """Live until the work is done, a signal comes, or something ends it.

        Raises:
            SentinelError: what ended it; its exit code is the command's.
        """
        loop = asyncio.get_running_loop()
        life = loop.create_task(self._live())
        stop = loop.create_task(self._stop.wait())
        politely = False
        try:
            ends: set[asyncio.Future[Any]] = {life, stop, self._failure}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            politely = self.state not in (NodeState.EJECTED, NodeState.SYNCING)
            if self._failure.done():
                self._failure.result()
            if life.done():
                life.result()
        finally:
            stop.cancel()
            await self._leave(life, politely=politely)

    def handle_signals(self) -> None:
        """Leave politely on the first SIGINT or SIGTERM, at once on the second."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled)

    def stop(self) -> None:
        """Leave politely."""
        self._stop.set()

    async def _live(self) -> None:
        await self._preflight()
        await self._bootstrap()
        if self.settings.coordinates:
            await self._coordinate()
        else:
            await self._train()

    async def _preflight(self) -> None:
        self.set_state(NodeState.PREFLIGHT, "starting")
        if self.settings.http_port is not None:
            self.http_address = await self._http.start(self.settings.http_host, self.settings.http_port)
            host, port = self.http_address
            self._say(f"metrics and status at http://{f'[{host}]' if ':' in host else host}:{port}")
        await self.network.start()
        self._entered = True
        self.metrics.p2pd_up.set(1)
        if self.settings.http_port is not None:
            self.spawn(sample_for_ever(self))
            self.spawn(sample_disk_for_ever(self.metrics, self.folder.path))
        Answers(self).serve()
        self._identify()
        if not self.settings.coordinates:
            self._tell_parent()

    def _tell_parent(self) -> None:
        """Say on the ready descriptor who this node is and where it can be asked."""
        descriptor = self.settings.ready_fd
        if descriptor is None:
            return
        facts = {"peer": self.identity.peer_id, "http": self.http_address, "invite": self.invite_line}
        with contextlib.suppress(OSError), os.fdopen(descriptor, "w") as parent:
            parent.write(json.dumps(facts) + "\n")

    async def _bootstrap(self) -> None:
        settings = self.settings
        if settings.coordinates:
            assert self.manifest is not None
            seeds = self.folder.load_peers()
            membership = self._begin_membership(self.manifest)
            await self.network.join_records(None, [])
            if seeds:
                self.spawn(self._rejoin(seeds))
        else:
            assert settings.invite is not None
            invited, cached = settings.invite.addresses, self.folder.load_peers()
            self.set_state(NodeState.BOOTSTRAPPING, "looking for the swarm")

            async def enter(seed: str) -> tuple[str, Manifest]:
                self._check_clock(seed)
                manifest = await self.network.fetch_manifest(seed)
                await self._obtain_admission(manifest, seed)
                await self.network.join_records(seed, [*invited, *cached])
                return seed, manifest

            seed, manifest = await self.network.contact(
                invited, cached, lambda why: self.set_state(NodeState.BOOTSTRAPPING, why), enter
            )
            self.manifest = manifest
            self.network.tune(manifest)
            self._check_drill(manifest)
            membership = self._begin_membership(manifest)
            membership.remember_peer(seed)
            try:
                await membership.fetch_view(seed)
            except SentinelError as error:
                log.info("the seed does not tell its view, the DHT will: %s", error)
        self.invite_line = str(Invite(swarm_id=self.swarm.hex(), addresses=self.network.addresses))
        self.invited.set()
        membership.start()
        self.spawn(self._look_for_the_lost(membership))
        await membership.refresh()

    async def _obtain_admission(self, manifest: Manifest, seed: str) -> None:
        """Wait, in an invited swarm, until this node is admitted."""
        if (admissions := self._begin_admissions(manifest)) is not None:
            others = {peer for peer, _ in by_peer(self.settings.invite.addresses if self.settings.invite else ())}
            await admissions.obtain(seed, others, lambda why: self.set_state(NodeState.BOOTSTRAPPING, why))

    def _begin_admissions(self, manifest: Manifest) -> Admissions | None:
        if self.admissions is None and manifest.admission.mode == "invited":
            self.admissions = Admissions(
                me=self.identity.peer_id,
                swarm=self.swarm,
                coordinator=manifest.admission.coordinator,
                transport=self.network.transport,
                store=self.network.store,
                file=AdmissionFile(self.folder.path),
                metrics=self.metrics,
                on_excluded=self._fail,
            )
            self.spawn(self.admissions.run())
        return self.admissions

    async def _look_for_the_lost(self, membership: Membership) -> None:
        invited = () if self.settings.invite is None else self.settings.invite.addresses
        await Reunion(
            membership=membership,
            transport=self.network.transport,
            seeds=lambda: by_peer([*invited, *self.folder.load_peers()]),
            join_records=self.network.join_records,
            on_isolated=self._isolated,
        ).run()

    def _isolated(self, why: str) -> None:
        """Say that nobody can be reached, or (empty) that this is over."""
        if why and self.state is not NodeState.ISOLATED:
            self._before_isolation = self.state, self.reason
        if why:
            self.set_state(NodeState.ISOLATED, why)
        elif self.state is NodeState.ISOLATED:
            self.set_state(*self._before_isolation)

    async def _rejoin(self, seeds: list[str]) -> None:
        """A coordinator that starts again looks for the swarm that went on without it."""

        async def enter(seed: str) -> None:
            await self.network.join_records(seed, seeds)

        await self.network.contact([], seeds, lambda why: log.debug("cached peers: %s", why), enter)

    def _begin_membership(self, manifest: Manifest) -> Membership:
        self.telemetry.set_tokens_per_microbatch(manifest.training.sequences_per_microbatch * manifest.model.context)
        self.membership = Membership(
            identity=self.identity,
            swarm=self.swarm,
            num_stages=manifest.num_stages,
            timing=Timing(lease=manifest.network.lease_seconds, renew=manifest.network.renew_seconds),
            transport=self.network.transport,
            store=self.network.store,
            on_finding=self.findings.heard,
            admissions=self._begin_admissions(manifest),
        )
        return self.membership

    async def _coordinate(self) -> None:
        """Serve the swarm; watch its nodes for the console and the metrics."""
        assert self.membership is not None and self.manifest is not None
        if self.settings.invite_file is not None:  # before this node is ready, so that whoever waits for that finds it
            write_invite_file(self.settings.invite_file, self.invite_line)
        self.set_state(NodeState.WAITING, "coordinating")
        self._say(f"invite: {self.invite_line}")
        self._tell_parent()
        self.spawn(self._tell_progress())
        self.watch = watch = SwarmWatch(
            transport=self.network.transport, membership=self.membership, metrics=self.metrics
        )
        await watch.run(self.manifest, self._told_by_watch)

    def _told_by_watch(self, who_is_there: str) -> None:
        self.folder.save_peers(self._peer_addresses())
        if self.admissions is not None:
            self.admissions.reread()
        self.set_state(NodeState.WAITING, who_is_there)

    async def _train(self) -> None:
        manifest, membership = self.manifest, self.membership
        assert manifest is not None and membership is not None
        device = choose_device(self.settings.device)
        self.guard = Guard(
            me=self.identity.peer_id,
            manifest=manifest,
            view=membership.view,
            telemetry=self.telemetry,
            accuse=self.findings.accuse,
            on_ejected=self._ejected,
            notify=membership.notify,
            seed=int.from_bytes(hashlib.sha256(b"sentinel:directions" + self.swarm).digest()[:4], "big"),
            drill=self.drill,
        )
        await self.findings.remember()
        await asyncio.to_thread(self.contribution.load)
        self.guard.consider(self.identity.peer_id)
        self.guard.consider_verdicts(self.identity.peer_id)
        self._raise_if_ejected()
        data = StageData(manifest)
        store = CheckpointStore(self.folder.checkpoints_path, manifest, keep=self.settings.checkpoints)
        self.checkpointer = checkpointer = Checkpointer(store, manifest=manifest, metrics=self.metrics)
        custodian = Custodian(
            manifest=manifest,
            transport=self.network.transport,
            membership=membership,
            metrics=self.metrics,
            store=CopyStore.of(self.folder.copies_path, manifest, self.settings.copies_gib),
            own=store.folder,
        )
        self.checkpoint_server = CheckpointServer(self.network.transport, custodian.folders)
        self._worker = self._make_worker()
        self.prober = prober = Prober(manifest, device, self.metrics, self._worker)
        forming = Forming(
            manifest=manifest,
            membership=membership,
            applicant=Applicant(
                addresses=self.network.addresses,
                capacity=1.0,
                generation=int(self.started * 1e6),
                label=self.settings.label,
                agent=AGENT,
                drill=self.drill.plan.name if self.drill is not None else "",
                memory_bytes=available_memory_bytes(device),
                gpu=device.type == "cuda",
                pinned=self.settings.stage,
                unfit=await self._unfit(data),
                checkpoints=await checkpointer.found(),
            ),
            excluded=self.guard.excluded,
            set_state=self.set_state,
            connected=self.network.transport.connected,
            try_out=prober.try_out,
            ask_step=partial(fetch_step, self.network.transport),
            restore=custodian.restore,
            rng=random.Random(),
        )
        self.stage = stage = await forming.claim()
        self._say(f"holding stage {stage} of {manifest.num_stages} in swarm {manifest.name!r}")
        if stage == 0:
            await data.open()  # now, since the others wait only for claims
        place = await forming.wait_for_start(stage)
        self.stage = place.stage
        trainer, whole = await self._build_trainer(place, device, data)
        membership.forming = False
        self.spawn(self._tell_progress())
        self.spawn(custodian.run())
        await trainer.run(behind=place.behind or not whole)
        await self._finish()

    async def _unfit(self, data: StageData) -> dict[int, str]:
        """Stages that this node cannot hold for another reason than its memory, and why."""
        return await data.unfit(self.settings.stage)

    async def _build_trainer(self, place: Place, device: Any, data: StageData) -> tuple[Trainer, bool]:
        """The trainer of a place, and whether it has the checkpoint that belongs to it."""
        manifest, membership, guard, checkpointer = self.manifest, self.membership, self.guard, self.checkpointer
        assert manifest is not None and membership is not None and guard is not None and checkpointer is not None
        stage = place.stage
        start = await checkpointer.load(place.checkpoint) if place.checkpoint is not None else None
        if start is not None and place.step is not None:
            start = replace(start, step=place.step)
        assert self._worker is not None
        self._identify(stage=str(stage))
        self.parts = await assemble(
            identity=self.identity,
            manifest=manifest,
            stage=stage,
            device=device,
            transport=self.network.transport,
            membership=membership,
            guard=guard,
            worker=self._worker,
            telemetry=self.telemetry,
            drill=self.drill,
            data=await data.open() if stage == 0 else None,
            checkpointer=checkpointer,
            in_flight=self.prober.in_flight(stage) if self.prober is not None else manifest.network.in_flight,
            start=start,
            set_state=self.set_state,
            publish=lambda data, verdict: self.spawn(membership.publish_finding(data, verdict)),
        )
        self.trainer, self.pipeline = self.parts.trainer, self.parts.pipeline
        if place.checkpoint is not None and start is not None:
            self.telemetry.restored(place.checkpoint.step, start.step)
        self.spawn(self._keep_peers())
        return self.trainer, start is not None or place.checkpoint is None

    async def _finish(self) -> None:
        assert self.manifest is not None
        self.finished = True
        self._say(f"training is complete after {self.manifest.training.steps} steps")
        if self.settings.exit_when_done:
            # Siblings that are one message behind still need this node's last aggregate.
            await self._farewell()
            return
        self.set_state(NodeState.TRAINING, "training is complete; holding the model until you stop this node")
        await self._stop.wait()

    async def _farewell(self) -> None:
        membership, trainer = self.membership, self.trainer
        assert membership is not None and trainer is not None
        await membership.publish()
        await membership.wait_until(
            lambda: all(
                claim.step >= trainer.step or claim.state is NodeState.DRAINING
                for claim in membership.view.claims.values()
            ),
            FAREWELL_SECONDS,
        )

    async def _leave(self, life: asyncio.Task[None], *, politely: bool) -> None:
        """Drain within a time limit; a second signal cuts it short."""
        if self.state is not NodeState.EJECTED and self._entered:
            self.set_state(NodeState.DRAINING, "finishing what is under way")
        self._leaving = True
        try:
            async with asyncio.timeout(DRAIN_SECONDS):
                if self.membership is not None:
                    await self.membership.release()
                if not life.done():
                    await self._finish_work()
                await _cancelled(life)
                if politely and self.checkpointer is not None:
                    await self.checkpointer.save()
        except TimeoutError:
            log.warning("leaving took more than %.0f s; what is left ends by itself", DRAIN_SECONDS)
        await _cancelled(life)
        if self.checkpointer is not None:
            await self.checkpointer.close()
        if self.parts is not None:
            await self.parts.close()
        await self.findings.keep()
        self._write_summary()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self.membership is not None:
            await self.membership.stop()
        if self.admissions is not None:
            await self.admissions.stop()
        await self.network.close()
        if self.checkpoint_server is not None:
            self.checkpoint_server.close()
        if self._worker is not None:
            await asyncio.to_thread(self._worker.close)
        if self._failure.done():
            await self._http.last_scrape(self._stop)
        await self._http.close()

    async def _finish_work(self) -> None:
        """Let microbatches that others wait for end here; no new ones come once the claim is released.

        Those of the first stage are begun anew by its siblings, and those that wait for a stage without replicas
        do not end.
        """
        pipeline = self.pipeline
        if pipeline is None or self.stage == 0:
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FINISH_SECONDS):
                while self.telemetry.microbatches_in_flight and not pipeline.waiting_reason:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)  # nothing tells of it, and it is over in moments

    def _signalled(self) -> None:
        self._signals += 1
        if self._signals > 1:
            log.warning("second signal: leaving at once")
            self.network.kill_now()
            os._exit(1)
        self._say("leaving; press Ctrl-C again to leave at once")
        self._stop.set()

    # what ends a node ----------------------------------------------------------------

    def _fail(self, error: SentinelError) -> None:
        if not self._failure.done():
            self._failure.set_exception(error)
            self._failure.exception()  # what comes while the node leaves already is nobody's news

    def _daemon_died(self, code: int) -> None:
        self.metrics.p2pd_up.set(0)
        self._fail(LocalError(f"p2pd ended unexpectedly with code {code}; start the node again"))

    def _ejected(self, peer: str, reason: str, until: float) -> None:
        if peer != self.identity.peer_id:
            return
        self.metrics.ejections.labels(kind="self").inc()
        self.set_state(NodeState.EJECTED, reason)
        self._raise_if_ejected(reason, until)

    def _raise_if_ejected(self, reason: str = "", until: float = 0.0) -> None:
        if self.state is NodeState.EJECTED:
            ends = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(until)) if until else "later"
            self._fail(EjectedError(f"the swarm has ejected this node: {reason}; the ejection ends {ends}"))

    # checks --------------------------------------------------------------------------

    def _check_clock(self, seed: str) -> None:
        offset = self.telemetry.clock_offsets.get(seed, 0.0)
        if abs(offset) > MAX_CLOCK_OFFSET_SECONDS:
            side = "behind" if offset > 0 else "ahead of"
            raise PreflightError(
                f"this machine's clock is {abs(offset):.1f} s {side} the swarm's; "
                f"set it (for example by NTP): at most {MAX_CLOCK_OFFSET_SECONDS:.0f} s are allowed"
            )

    def _check_drill(self, manifest: Manifest) -> None:
        if not self.settings.drill:
            return
        plan: DrillPlan = parse_drill(self.settings.drill, self.settings.drill_from)
        if not manifest.verifier.allow_drills:
            raise SettingsError("this swarm's manifest allows no drills (verifier.allow_drills); leave out --drill")
        self.drill = Drill(plan, seed=self.identity.seed)
        self.metrics.drill(plan.name)
        log.warning("DRILL: this node attacks the swarm on purpose (%s from step %d)", plan.name, plan.from_step)

    # reporting -----------------------------------------------------------------------

    def set_state(self, state: NodeState, reason: str) -> None:
        """Enter a state, or say anew why the node is in it: the same words in log, status, metrics, claim."""
        if self._leaving and state is not NodeState.EJECTED:
            return
        changed = state is not self.state
        if changed or reason != self.reason:
            self.reason = reason
            if state is not NodeState.TRAINING or changed:
                begins = state is NodeState.TRAINING and reason.startswith("step ")
                self._say(f"training from {reason} on" if begins else reason, state)
        if changed:
            self.state = state
            self.metrics.set_state(state.value)
            # Nobody hears that this node is isolated, and it must not leave its own roster for it.
            silent = (NodeState.DRAINING, NodeState.PROBATION, NodeState.ISOLATED)
            if self.membership is not None and state not in silent:
                self.membership.update_claim(urgent=True, state=state)

    def _identify(self, stage: str = "") -> None:
        self.metrics.identify(
            peer=self.identity.peer_id,
            swarm=self.swarm.hex(),
            stage=stage,
            label=self.settings.label,
            coordinates=self.settings.coordinates,
        )

    def _say(self, text: str, state: NodeState | None = None) -> None:
        state = state or self.state
        fetching = self.telemetry.download if state is NodeState.SYNCING else None
        log.info("[%s] %s", state.value, text, extra=None if fetching is None else {"progress": fetching})

    def status(self, *, brief: bool = False) -> dict[str, Any]:
        """What /status and `sentinel status` show."""
        return build_status(self, brief=brief)

    def _ready(self) -> tuple[bool, str]:
        ready = self.state is NodeState.TRAINING or (self.settings.coordinates and self.state is NodeState.WAITING)
        return ready, f"{self.state.value}: {self.reason}"

    def _alive(self) -> tuple[bool, str]:
        if self._entered and not self.network.up:
            return False, "p2pd is down"
        return True, self.state.value

    def _write_summary(self) -> None:
        if self.trainer is None and not (self.settings.coordinates and self._entered):
            return  # there is nothing to tell, and the last run's is worth keeping
        self.contribution.save()
        self.metrics.set_contribution(self.contribution.total)
        summary = self.status()
        with contextlib.suppress(OSError):
            self.folder.write_json("summary.json", finite(summary))
        self._say(farewell(self))

    async def _tell_progress(self) -> None:
        """Say now and then how far training is, or what it waits for."""
        said = ""
        while True:
            await asyncio.sleep(PROGRESS_SECONDS)
            text = self._progress()
            if text and text != said:
                self._say(text)
                said = text

    def _progress(self) -> str:
        if self.finished or self.state is NodeState.SYNCING:  # says by itself what it does
            return ""
        if self.pipeline is not None and self.pipeline.waiting_reason:
            return self.pipeline.waiting_reason
        step, loss = self.step, self.loss
        if step == 0:
            return ""
        text = f"step {step}" + (f", loss {loss:.3f}" if loss is not None else "")
        if self.trainer is not None and self.manifest is not None:
            training = self.manifest.training
            rate = self.telemetry.steps_per_second() * training.sequences_per_step * self.manifest.model.context
            text += f", {rate:,.0f} tokens/s in the swarm, {self.telemetry.counters.microbatches:,} microbatches here"
        return text

    async def _keep_peers(self) -> None:
        """Remember who was there, so that a restart finds the swarm when every seed is gone."""
        while True:
            await asyncio.to_thread(self.folder.save_peers, self._peer_addresses())
            await asyncio.to_thread(self.contribution.save)
            await self.findings.keep()
            await asyncio.sleep(15)

    def _peer_addresses(self) -> list[str]:
        claims = self.membership.view.claims.values() if self.membership is not None else ()
        return [address for claim in claims if claim.peer != self.identity.peer_id for address in claim.addresses]

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        """Run something beside this node's life; it ends with the node, and what it raises ends the node."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_done)

    def _task_done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, SentinelError):
                log.error("a background task failed", exc_info=error)
            self._fail(error if isinstance(error, SentinelError) else LocalError(f"internal failure: {error!r}"))


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end, whatever that is."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
