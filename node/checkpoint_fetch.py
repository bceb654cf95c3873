"""Fetches a checkpoint's file from peers that offer it, and believes nothing but what it has checked.

Which offer to take is a pure decision; what comes is hashed, read as a checkpoint of this swarm, and its parameters
hashed again, before it is used. A peer that fails is replaced by the next one that offers the same.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from node.checkpoints import (
    BYTES_PER_PARAMETER,
    MAX_HEADER_BYTES,
    Checkpoint,
    CheckpointError,
    checkpoint_name,
    read_parameters,
)
from node.digest import parameter_digest
from node.state_folder import replacing
from protocol.errors import LocalError, MessageError, RefusedError, SentinelError
from protocol.fields import DataclassInstance, decode
from protocol.framing import Buffer
from protocol.manifest import Manifest
from protocol.messages import (
    MAX_CHECKPOINT_PART_BYTES,
    CheckpointOffers,
    CheckpointPart,
    CheckpointQuery,
    Method,
)
from protocol.transports.base import Response

ASK_SECONDS = 5.0
PART_SECONDS = 30.0
"""For one part over a slow line."""
BUSY_SECONDS = 0.5
MAX_BUSY = 60
"""Times in a row that all peers may be busy."""


class NoCheckpointError(LocalError):
    """No peer gave a checkpoint of the stage that can be used."""


class Calls(Protocol):
    """As much of a transport as is needed here."""

    async def call(
        self, peer: str, method: Method, message: DataclassInstance, *, timeout: float, reply_limit: int = 0
    ) -> Response:
        """One request to a peer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """A checkpoint that peers say they have, all the same one. ``size`` is in bytes; ``parameters`` their digest."""

    step: int
    size: int
    parameters: bytes
    peers: tuple[str, ...]


def best_offer(told: Mapping[str, CheckpointOffers], *, at_most: int, largest: int) -> Offer | None:
    """What to fetch, of what each peer has told; None if nobody has anything.

    The newest step that at least half of the peers' newest ones reach, so that of three peers one alone can neither
    lead on with something invented nor hold back; of that step what most say, then the smaller digest.

    Args:
        at_most: steps beyond this one cannot be.
        largest: bytes that the file may have.
    """
    held: dict[str, dict[int, tuple[int, bytes]]] = {}
    for peer, offers in told.items():
        rows = zip(offers.steps, offers.sizes, offers.parameters, strict=False)
        if found := {step: (size, digest) for step, size, digest in rows if 0 < step <= at_most and size <= largest}:
            held[peer] = found
    if not held:
        return None
    newest = sorted(max(found) for found in held.values())
    step = newest[len(newest) // 2]
    votes = Counter(found[step] for found in held.values() if step in found)
    (size, parameters), _ = min(votes.items(), key=lambda item: (-item[1], item[0]))
    peers = tuple(sorted(peer for peer, found in held.items() if found.get(step) == (size, parameters)))
    return Offer(step=step, size=size, parameters=parameters, peers=peers)


def largest_file(manifest: Manifest, stage: int) -> int:
    """Bytes that a checkpoint's file of a stage can have at most."""
    return BYTES_PER_PARAMETER * manifest.stage_parameters(stage) + MAX_HEADER_BYTES + 1024


async def ask_offers(calls: Calls, peers: Collection[str], stage: int) -> dict[str, CheckpointOffers]:
    """What each peer offers of a stage; those that do not answer are left out."""

    async def ask(peer: str) -> CheckpointOffers:
        response = await calls.call(peer, Method.CHECKPOINTS, CheckpointQuery(stage=stage), timeout=ASK_SECONDS)
        return decode(CheckpointOffers, response.head)

    asked = sorted(peers)
    answers = await asyncio.gather(*map(ask, asked), return_exceptions=True)
    told = {}
    for peer, answer in zip(asked, answers, strict=True):
        if isinstance(answer, CheckpointOffers):
            told[peer] = answer
        elif not isinstance(answer, SentinelError):
            raise answer
    return told


async def fetch(
    calls: Calls,
    offer: Offer,
    *,
    manifest: Manifest,
    stage: int,
    folder: Path,
) -> Checkpoint:
    """The offered checkpoint, in a folder.

    Raises:
        NoCheckpointError: none of the peers gave all of it, or what they gave is not what they had offered.
        OSError: it cannot be written.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / checkpoint_name(stage, offer.step)
    last = ""
    # First from all of them, one taking over from another; if what came of that is false, from each alone.
    for peers in (offer.peers, *((peer,) for peer in offer.peers if len(offer.peers) > 1)):
        try:
            with replacing(path) as file:
                async for part in _parts(calls, offer, peers, stage):
                    await asyncio.to_thread(file.write, part)
            return await asyncio.to_thread(checked, path, offer, manifest)
        except (NoCheckpointError, CheckpointError) as error:
            last = str(error)
    raise NoCheckpointError(f"no checkpoint of stage {stage} could be fetched: {last}")


async def _parts(calls: Calls, offer: Offer, peers: Sequence[str], stage: int) -> AsyncIterator[Buffer]:
    """The parts of a file in order, from the first peer that gives the next one."""
    there = list(peers)
    done = busy = 0
    while done < offer.size:
        if not there:
            raise NoCheckpointError(f"those who offered step {offer.step} did not give it")
        message = CheckpointPart(
            stage=stage,
            step=offer.step,
            offset=done,
            length=min(MAX_CHECKPOINT_PART_BYTES, offer.size - done),
        )
        try:
            response = await calls.call(
                there[0], Method.CHECKPOINT_PART, message, timeout=PART_SECONDS, reply_limit=message.length
            )
            if len(response.data) != message.length:
                raise MessageError("a part of a checkpoint is of another size", kind="size")
        except RefusedError as error:
            if error.kind == "busy" and busy < MAX_BUSY:
                busy += 1
                there = there[1:] + there[:1]
                await asyncio.sleep(BUSY_SECONDS)  # it gives no sign when it is free
            else:
                there.pop(0)
            continue
        except SentinelError:
            there.pop(0)
            continue
        busy = 0
        done += message.length
        yield response.data


def checked(path: Path, offer: Offer, manifest: Manifest) -> Checkpoint:
    """Look whether a file is what was offered; removes it if it is not.

    Raises:
        NoCheckpointError: it is something else.
        CheckpointError: it is damaged.
    """
    try:
        checkpoint, parameters = read_parameters(path)
        if checkpoint.manifest != manifest or checkpoint.step != offer.step:
            raise NoCheckpointError("what came is a checkpoint of something else")
        if not checkpoint.parameters == offer.parameters == parameter_digest(parameters):
            raise NoCheckpointError("what came holds other parameters than were offered")
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return checkpoint
