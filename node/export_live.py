"""Fetches a live swarm's checkpoints for ``sentinel export INVITE``, over py-libp2p: this process joins nothing.

All nodes are asked which checkpoints they have on their disks, own ones and copies of other stages'. The newest step
that every stage has is fetched, in the form that most nodes name, and checked as every checkpoint is.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from node.checkpoint_fetch import Offer, checked, largest_file
from node.checkpoints import CheckpointError, checkpoint_name
from node.common_checkpoints import MovedOnError, common_step
from node.progress import Meter, file_progress_text
from node.state_folder import StateFolder, replacing
from node.wording import many
from protocol.errors import CallTimeoutError, MessageError, RefusedError, SentinelError
from protocol.fields import decode
from protocol.framing import Frame
from protocol.invite import Invite
from protocol.light import LightSession, open_session, run_light, with_host
from protocol.manifest import Manifest
from protocol.messages import (
    MAX_CHECKPOINT_PART_BYTES,
    CheckpointOffers,
    CheckpointPart,
    CheckpointQuery,
    Method,
)
from protocol.records import Claim

ASK_SECONDS = 10.0
PART_SECONDS = 30.0
BUSY_SECONDS = 0.5
MAX_BUSY = 60
MAX_ASKED = 64
"""Nodes that are asked, at random where there are more."""
AT_ONCE = 8
TELL_SECONDS = 1.0
AGAIN_SECONDS = 60.0
"""For so long it is tried again when the nodes, which train on, have removed what they offered."""
PAUSE_SECONDS = (0.2, 1.0)
"""Before that, at random."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swarm:
    """What the first node that answers tells of the swarm."""

    manifest: Manifest
    addresses: Mapping[str, Sequence[str]]
    """Of each node that claims a stage."""
    stages: Mapping[str, int]


def fetch_swarm(
    invite: Invite, into: Path, *, step: int | None, seconds: float, tell: Callable[[str], None]
) -> StateFolder:
    """Fetch one checkpoint of each stage into a folder that looks like a node's state folder.

    Args:
        seconds: for the first answer.
        tell: hears how far it is.

    Raises:
        ExportError: no step of which every stage can be had.
        SentinelError: nobody answers.
        OSError: the files cannot be written.
    """
    swarm = look(invite, seconds=seconds)
    state = StateFolder(into)
    folder = state.checkpoints_path / swarm.manifest.swarm_id[:16]
    folder.mkdir(mode=0o700, parents=True)
    with_host(lambda host: _fetch_all(host, swarm, folder, step, tell))
    return state


def look(invite: Invite, *, seconds: float) -> Swarm:
    """The manifest, and who is there. Raises SentinelError if nobody of the invite answers."""
    swarm_id = bytes.fromhex(invite.swarm_id)

    async def ask(session: LightSession) -> Swarm:
        await session.hello(swarm_id, agent="sentinel-export")
        frame = await session.request(Method.MANIFEST)
        manifest = Manifest.from_bytes(bytes(frame.body), invite.swarm_id)
        claims = [record for record in await session.records(swarm_id) if isinstance(record, Claim)]
        return Swarm(
            manifest=manifest,
            addresses={claim.peer: claim.addresses for claim in claims},
            stages={claim.peer: claim.stage for claim in claims},
        )

    return run_light(ask, invite.addresses, seconds=seconds)


async def _fetch_all(host: Any, swarm: Swarm, folder: Path, step: int | None, tell: Callable[[str], None]) -> None:
    fetcher = _Fetcher(host, swarm, tell)
    sizes = [largest_file(swarm.manifest, stage) for stage in range(swarm.manifest.num_stages)]
    until = trio.current_time() + AGAIN_SECONDS
    while True:
        try:
            offers = common_step(await fetcher.ask_everybody(), sizes, step)
            await fetcher.fetch_all(offers, folder)
            return
        except MovedOnError as error:
            if trio.current_time() > until:
                raise
            tell(f"{error}; once more")
            await trio.sleep(random.uniform(*PAUSE_SECONDS))  # they write checkpoints without telling anybody


class _Fetcher:
    """Asks nodes through one host, which has to be running."""

    def __init__(self, host: Any, swarm: Swarm, tell: Callable[[str], None]) -> None:
        self._host = host
        self._swarm = swarm
        self._id = bytes.fromhex(swarm.manifest.swarm_id)
        self._tell = tell
        peers = list(swarm.addresses)
        self._asked = random.sample(peers, min(MAX_ASKED, len(peers)))
        self._sessions: dict[str, LightSession] = {}
        self._turns: dict[str, trio.Lock] = defaultdict(trio.Lock)

    async def ask_everybody(self) -> dict[int, dict[str, CheckpointOffers]]:
        """What each node offers of each stage, all at about the same time."""
        told: dict[int, dict[str, CheckpointOffers]] = defaultdict(dict)
        self._tell(f"asking {many(len(self._asked), 'node')} for their checkpoints")

        async def connect(peer: str) -> None:
            if peer not in self._sessions:
                with trio.move_on_after(ASK_SECONDS):
                    self._sessions[peer] = await self._open(peer)

        async def ask(peer: str) -> None:
            with trio.move_on_after(ASK_SECONDS) as limit:
                for stage in range(self._swarm.manifest.num_stages):
                    frame = await self._sessions[peer].request(Method.CHECKPOINTS, CheckpointQuery(stage=stage))
                    told[stage][peer] = decode(CheckpointOffers, frame.head)
            if limit.cancelled_caught:
                raise CallTimeoutError("it does not answer")

        # Dialling takes long, and unequally so; a swarm of small stages has other checkpoints a second later.
        await self._each(self._asked, connect)
        await self._each(self._sessions, ask)
        return told

    async def _each(self, peers: Iterable[str], do: Callable[[str], Awaitable[None]]) -> None:
        limit = trio.CapacityLimiter(AT_ONCE)

        async def one(peer: str) -> None:
            async with limit:
                try:
                    await do(peer)
                except Exception:  # the library raises many unrelated types: the node does not answer
                    self._sessions.pop(peer, None)

        async with trio.open_nursery() as nursery:
            for peer in list(peers):
                nursery.start_soon(one, peer)

    async def fetch_all(self, offers: Sequence[Offer], folder: Path) -> None:
        """One file of each stage, several at once.

        Raises:
            MovedOnError: nobody gives one of them any more.
            OSError: one cannot be written.
        """
        failures: list[Exception] = []
        limit = trio.CapacityLimiter(AT_ONCE)

        async def one(stage: int, offer: Offer) -> None:
            async with limit:
                try:
                    await self.fetch(stage, offer, folder)
                except Exception as error:
                    failures.append(error)
                    nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            for stage, offer in enumerate(offers):
                nursery.start_soon(one, stage, offer)
        if failures:
            raise failures[0]

    async def fetch(self, stage: int, offer: Offer, folder: Path) -> None:
        """One file, from any of those who offer it. Raises MovedOnError if nobody gives it."""
        path = folder / checkpoint_name(stage, offer.step)
        why = ""
        for peer in random.sample(offer.peers, len(offer.peers)):
            meter = Meter(total=offer.size, started=trio.current_time())
            told = trio.current_time()
            try:
                with replacing(path) as file:
                    while meter.done < offer.size:
                        part = await self._part(peer, stage, offer, meter.done)
                        await trio.to_thread.run_sync(file.write, part)
                        meter.add(len(part), trio.current_time())
                        if trio.current_time() - told > TELL_SECONDS:
                            told = trio.current_time()
                            self._tell(f"stage {stage}: {file_progress_text(meter, told)}")
                await trio.to_thread.run_sync(checked, path, offer, self._swarm.manifest)
            except OSError:
                raise
            except (CheckpointError, SentinelError) as error:
                why = str(error)
            except Exception as error:  # the library's own
                why = str(error) or type(error).__name__
            else:
                self._tell(f"stage {stage}: step {offer.step}, named by {many(len(offer.peers), 'node')}")
                return
        raise MovedOnError(f"the checkpoint of stage {stage}, step {offer.step}, could not be fetched: {why[:200]}")

    async def _part(self, peer: str, stage: int, offer: Offer, offset: int) -> bytes:
        length = min(MAX_CHECKPOINT_PART_BYTES, offer.size - offset)
        message = CheckpointPart(stage=stage, step=offer.step, offset=offset, length=length)
        for left in range(MAX_BUSY, -1, -1):
            try:
                frame = await self._request(peer, message)
            except RefusedError as error:
                if error.kind != "busy" or not left:
                    raise
                await trio.sleep(BUSY_SECONDS)  # it gives no sign when it is free
                continue
            if len(frame.body) != length:
                raise MessageError("a part of a checkpoint is of another size", kind="size")
            return bytes(frame.body)
        raise AssertionError("unreachable")

    async def _request(self, peer: str, message: CheckpointPart) -> Frame:
        """Ask for a part; stages that one node gives take turns. What fails may leave half an answer on the stream."""
        async with self._turns[peer]:
            try:
                if peer not in self._sessions:
                    self._sessions[peer] = await self._open(peer)
                with trio.fail_after(PART_SECONDS):
                    return await self._sessions[peer].request(Method.CHECKPOINT_PART, message)
            except RefusedError:
                raise
            except BaseException:
                self._sessions.pop(peer, None)
                raise

    async def _open(self, peer: str) -> LightSession:
        with trio.fail_after(ASK_SECONDS):
            return await open_session(
                self._host,
                peer,
                self._swarm.addresses[peer],
                self._id,
                agent="sentinel-export",
                reply_limit=MAX_CHECKPOINT_PART_BYTES,
            )
