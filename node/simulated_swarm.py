"""A whole swarm in one process: real nodes over MemoryTransport, for tests and measurements."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node.daemon import Node
from node.settings import NodeSettings
from node.simulation import SimulatedNetwork
from node.state_folder import StateFolder
from node.worker import InlineWorker
from protocol.errors import SentinelError
from protocol.identity import Identity
from protocol.invite import Invite, parse_invite
from protocol.manifest import Manifest
from protocol.transports.memory import MemoryNetwork, MemoryRecords


@dataclass(slots=True, eq=False)
class Member:
    """One node and the task that runs it."""

    name: str
    node: Node
    task: asyncio.Task[None]
    stage: int | None
    attack: str

    @property
    def peer(self) -> str:
        """Its peer id."""
        return self.node.identity.peer_id

    async def outcome(self) -> SentinelError | None:
        """How it ended; None if it ended well."""
        try:
            await self.task
        except SentinelError as error:
            return error
        return None


class SimulatedSwarm:
    """Nodes on one fabric; use ``simulated``."""

    def __init__(self, folder: Path, manifest: Manifest, *, inline: bool = False) -> None:
        self.manifest = manifest
        self._make_worker = InlineWorker if inline else None
        self.fabric = MemoryNetwork()
        self.members: list[Member] = []
        self._folder = folder
        self._swarm = bytes.fromhex(manifest.swarm_id)
        self._records = MemoryRecords(self._swarm)
        self._invite = ""

    async def coordinate(self) -> Member:
        """Start the coordinator."""
        member = self._start("coordinator", manifest=self.manifest)
        async with asyncio.timeout(10):
            await member.node.invited.wait()
        self._invite = member.node.invite_line
        return member

    def join(
        self, name: str, *, stage: int | None = None, attack: str = "", invite: Invite | None = None, **settings: Any
    ) -> Member:
        """Start a node. ``invite``: another one than the coordinator's. It keeps no copies unless told to."""
        settings.setdefault("copies_gib", 0.0)
        return self._start(
            name,
            invite=invite if invite is not None else parse_invite(self._invite),
            stage=stage,
            drill=attack,
            label=name,
            exit_when_done=True,
            **settings,
        )

    def fill(self, replicas: int, **settings: Any) -> list[Member]:
        """Pinned nodes for every stage."""
        return [
            self.join(f"s{stage}r{replica}", stage=stage, **settings)
            for stage in range(self.manifest.num_stages)
            for replica in range(replicas)
        ]

    def _start(self, name: str, **settings: Any) -> Member:
        path = self._folder / name
        folder = StateFolder(path).open()
        identity = Identity.load_or_create(folder.identity_path)
        invite: Invite | None = settings.get("invite")
        swarm = self._swarm if invite is None else bytes.fromhex(invite.swarm_id)
        network = SimulatedNetwork(identity=identity, swarm=swarm, fabric=self.fabric, records=self._records)
        node = Node(
            NodeSettings(state_dir=path, http_port=None, **settings),
            folder,
            identity,
            network=network,
            make_worker=self._make_worker,
        )
        network.observer = node.telemetry
        task = asyncio.get_running_loop().create_task(node.run())
        task.add_done_callback(lambda _: folder.close())
        member = Member(name=name, node=node, task=task, stage=settings.get("stage"), attack=settings.get("drill", ""))
        self.members.append(member)
        return member


@contextlib.asynccontextmanager
async def simulated(folder: Path, manifest: Manifest, *, inline: bool = False) -> AsyncIterator[SimulatedSwarm]:
    """A swarm whose nodes have all ended when the block does.

    ``inline``: compute in the event loop instead of in a thread for each node, which is faster where many nodes
    share one core.
    """
    swarm = SimulatedSwarm(folder, manifest, inline=inline)
    try:
        yield swarm
    finally:
        for member in swarm.members:
            member.node.stop()
        await asyncio.gather(*(member.outcome() for member in swarm.members), return_exceptions=True)
