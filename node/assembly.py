"""Builds the parts that train one stage, and connects them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import torch

from node.auditor import Auditor
from node.boundary import Boundary
from node.checkpointer import Checkpointer
from node.checkpoints import CheckpointError
from node.data import TokenStream
from node.device import autocast_dtype
from node.digest import parameter_digest
from node.drill import Drill
from node.evidence import EvidenceStore
from node.guard import Guard
from node.history import ParameterHistory
from node.juror import Juror
from node.membership import Membership
from node.model import StageModule
from node.optimizer import StepOptimizer
from node.pipeline import Pipeline
from node.replay import Replayer
from node.snapshot import StageState
from node.stage import StageError, StageRunner
from node.telemetry import Telemetry
from node.trainer import Trainer
from node.worker import ComputeWorker
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.records import NodeState, Verdict
from protocol.transports.sessions import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class StageParts:
    """What trains a stage."""

    trainer: Trainer
    pipeline: Pipeline
    auditor: Auditor
    juror: Juror

    async def close(self) -> None:
        """Stop what runs beside the steps."""
        await self.trainer.close()
        await self.auditor.close()


async def assemble(
    *,
    identity: Identity,
    manifest: Manifest,
    stage: int,
    device: torch.device,
    transport: Transport,
    membership: Membership,
    guard: Guard,
    worker: ComputeWorker,
    telemetry: Telemetry,
    checkpointer: Checkpointer,
    in_flight: int,
    start: StageState | None,
    drill: Drill | None,
    data: TokenStream | None,
    set_state: Callable[[NodeState, str], None],
    publish: Callable[[bytes, Verdict], None],
) -> StageParts:
    """Build the parts of a stage, all of which stand at one step before any of them can be asked.

    Args:
        in_flight: microbatches that may be inside this node at a time.
        start: a state to go on from; None for the stage's first parameters.
        data: needed at stage 0.
        publish: tells the swarm of a verdict.

    Raises:
        CheckpointError: the state does not fit this software.
    """

    def runner_of(place: int) -> StageRunner:
        module = StageModule(manifest.model, manifest.stages.layers_per_stage, place)
        return StageRunner(module, device, autocast_dtype(device, manifest.wire))

    runner = await asyncio.to_thread(runner_of, stage)
    optimizer = StepOptimizer(runner.layout, manifest.training)
    if start is not None:
        await asyncio.to_thread(_load, runner, optimizer, start)
    audits = manifest.verifier.audits
    digest = await asyncio.to_thread(parameter_digest, runner.flat_parameters())
    history = ParameterHistory(runner, digest=digest, keep=audits)
    history.replaced(0 if start is None else start.step, digest)
    evidence = EvidenceStore(keep=audits)
    auditor = Auditor(
        identity=identity,
        manifest=manifest,
        transport=transport,
        membership=membership,
        guard=guard,
        telemetry=telemetry,
        drill=drill,
        publish=publish,
    )
    juror = Juror(
        identity=identity,
        manifest=manifest,
        stage=stage,
        transport=transport,
        membership=membership,
        guard=guard,
        worker=worker,
        replayer=Replayer(manifest=manifest, stage=stage, runner=runner, history=history, data=data, build=runner_of),
        history=history,
        evidence=evidence,
        telemetry=telemetry,
        drill=drill,
    )
    boundary = Boundary(
        identity=identity, manifest=manifest, stage=stage, stage_of=membership.view.stage_of, drill=drill
    )
    pipeline = Pipeline(
        identity=identity,
        manifest=manifest,
        stage=stage,
        transport=transport,
        membership=membership,
        boundary=boundary,
        guard=guard,
        auditor=auditor,
        evidence=evidence,
        runner=runner,
        worker=worker,
        telemetry=telemetry,
        digest_at=history.digest_at,
        in_flight=in_flight,
        drill=drill,
    )
    trainer = Trainer(
        identity=identity,
        manifest=manifest,
        stage=stage,
        transport=transport,
        membership=membership,
        guard=guard,
        pipeline=pipeline,
        runner=runner,
        optimizer=optimizer,
        worker=worker,
        telemetry=telemetry,
        history=history,
        data=data,
        set_state=set_state,
        checkpointer=checkpointer,
        drill=drill,
    )
    return StageParts(trainer=trainer, pipeline=pipeline, auditor=auditor, juror=juror)


def _load(runner: StageRunner, optimizer: StepOptimizer, state: StageState) -> None:
    try:
        runner.load_flat(state.parameters)
        optimizer.load(state.optimizer)
    except (StageError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint of step {state.step} does not fit this software: {error}; use the one that wrote it, or"
            " move the folder checkpoints/ away"
        ) from None
