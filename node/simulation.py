"""Many nodes in one process, over memory: the node's own code with nothing but the wire replaced."""

from __future__ import annotations

from node.network import Network
from protocol.identity import Identity
from protocol.transports.base import Observer
from protocol.transports.memory import MemoryNetwork, MemoryRecords, MemoryTransport
from protocol.transports.sessions import SessionOptions


class SimulatedNetwork(Network):
    """One node's place in a :class:`MemoryNetwork`."""

    def __init__(
        self,
        *,
        identity: Identity,
        swarm: bytes,
        fabric: MemoryNetwork,
        records: MemoryRecords,
    ) -> None:
        super().__init__(identity=identity, swarm=swarm)
        self._fabric = fabric
        self._records = records
        self.observer: Observer | None = None
        """Who hears of bytes, errors and clocks; set it before the start."""
        self._transport: MemoryTransport | None = None

    @property
    def transport(self) -> MemoryTransport:
        assert self._transport is not None, "start() comes first"
        return self._transport

    @property
    def store(self) -> MemoryRecords:
        return self._records

    @property
    def helper_pid(self) -> int | None:
        return None

    @property
    def up(self) -> bool:
        return self._transport is not None

    async def start(self) -> None:
        self._transport = MemoryTransport(
            self._fabric,
            self._identity.peer_id,
            options=SessionOptions(swarm=self._swarm, agent="simulation"),
            observer=self.observer,
        )
        # An address that nobody dials, but that claims and invites may carry.
        self.addresses = (f"/ip4/127.0.0.1/tcp/1/p2p/{self._identity.peer_id}",)

    async def join_records(self, peer: str | None, addresses: list[str]) -> None:
        """Everybody shares one store."""

    async def close(self) -> None:
        if self._transport is not None:
            await self._transport.close()

    def kill_now(self) -> None:
        """Nothing outlives the process."""
