"""How a node reaches others: transport and record store, and the first contact with a swarm."""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace

from protocol.errors import (
    AddressError,
    LocalError,
    ManifestError,
    ProtocolVersionError,
    SentinelError,
    SwarmMismatchError,
    TransportError,
)
from protocol.identity import Identity
from protocol.invite import parse_multiaddr
from protocol.manifest import Manifest
from protocol.messages import Empty, Method
from protocol.transports.base import Observer, RecordKeeper
from protocol.transports.dht import RecordStore
from protocol.transports.p2p import P2PTransport
from protocol.transports.p2pd import Daemon, DaemonOptions
from protocol.transports.sessions import DialingTransport, SessionOptions

log = logging.getLogger(__name__)

MAX_MANIFEST_BYTES = 64 * 1024
CONTACT_SECONDS = 6.0
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0


class Network(ABC):
    """How a node reaches others. Subclasses provide transport and record store."""

    def __init__(self, *, identity: Identity, swarm: bytes) -> None:
        self._identity = identity
        self._swarm = swarm
        self.addresses: tuple[str, ...] = ()
        """Multiaddrs under which others reach this node, once started."""

    @property
    @abstractmethod
    def transport(self) -> DialingTransport:
        """The transport, once started."""

    @property
    @abstractmethod
    def store(self) -> RecordKeeper:
        """The record store, once started."""

    @property
    @abstractmethod
    def helper_pid(self) -> int | None:
        """Process id of the helper process below the transport while it runs; None if there is none."""

    @property
    @abstractmethod
    def up(self) -> bool:
        """Whether others can be reached at all."""

    @abstractmethod
    async def start(self) -> None:
        """Make this node reachable."""

    @abstractmethod
    async def join_records(self, peer: str | None, addresses: list[str]) -> None:
        """Join the record store through a peer that answers, or begin a new one."""

    @abstractmethod
    async def close(self) -> None:
        """Leave."""

    @abstractmethod
    def kill_now(self) -> None:
        """Leave nothing behind of a node that ends at once."""

    def tune(self, manifest: Manifest) -> None:
        """Take the heartbeat of the manifest for sessions opened from now on."""
        network = manifest.network
        self.transport.options = replace(
            self.transport.options,
            heartbeat_seconds=network.heartbeat_seconds,
            dead_after_seconds=network.dead_after_seconds,
        )

    async def contact(self, addresses: list[str], report: Callable[[str], None]) -> str:
        """Reach any of the seeds, trying for ever with growing pauses; returns its peer id.

        Raises:
            SwarmMismatchError, ProtocolVersionError: a seed answered and is not one of ours; waiting will not help.
        """
        pause = FIRST_PAUSE_SECONDS
        seeds = [address for address in addresses if self._identity.peer_id not in address]
        for seed in seeds:
            try:
                self.transport.learn(parse_multiaddr(seed).peer_id, [seed])
            except AddressError:
                continue  # a cached address that this version does not know
        peers = list(dict.fromkeys(parse_multiaddr(seed).peer_id for seed in seeds))
        while True:
            reasons: list[str] = []
            for peer in peers:
                try:
                    await self.transport.connect(peer, timeout=CONTACT_SECONDS)
                    return peer
                except (SwarmMismatchError, ProtocolVersionError):
                    raise
                except SentinelError as error:
                    reasons.append(str(error))
            report(f"no seed answers, trying again in {pause:.0f} s: {'; '.join(reasons)[:300]}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    async def fetch_manifest(self, peer: str) -> Manifest:
        """Get the swarm's manifest from any peer; its hash is the swarm's id, so nobody is trusted.

        Raises:
            ManifestError: what came does not match.
        """
        response = await self.transport.call(
            peer, Method.MANIFEST, Empty(), timeout=CONTACT_SECONDS, reply_limit=MAX_MANIFEST_BYTES
        )
        manifest = Manifest.from_bytes(bytes(response.data), expected_swarm_id=self._swarm.hex())
        if bytes.fromhex(manifest.swarm_id) != self._swarm:
            raise ManifestError("the manifest does not match the swarm id of the invite; ask for a new invite")
        return manifest


class P2PNetwork(Network):
    """The real one. Owns p2pd, the transport and the DHT, and closes them in the right order."""

    def __init__(
        self,
        *,
        identity: Identity,
        swarm: bytes,
        daemon_options: DaemonOptions,
        agent: str,
        observer: Observer,
        on_daemon_exit: Callable[[int], None],
        store: RecordStore,
    ) -> None:
        super().__init__(identity=identity, swarm=swarm)
        self._agent = agent
        self._observer = observer
        self._daemon = Daemon(daemon_options, on_exit=on_daemon_exit)
        self._store = store
        self._transport: P2PTransport | None = None

    @property
    def transport(self) -> P2PTransport:
        assert self._transport is not None, "start() comes first"
        return self._transport

    @property
    def store(self) -> RecordStore:
        return self._store

    @property
    def helper_pid(self) -> int | None:
        return self._daemon.pid

    @property
    def up(self) -> bool:
        return self._daemon.pid is not None

    async def start(self) -> None:
        await self._daemon.start()
        if str(self._daemon.p2p.peer_id) != self._identity.peer_id:
            raise LocalError("p2pd came up with another identity; remove the key file and start again")
        self._transport = P2PTransport(
            self._daemon,
            options=SessionOptions(swarm=self._swarm, agent=self._agent),
            observer=self._observer,
        )
        await self._transport.start()
        self.addresses = tuple(await self._daemon.addresses())[:8]

    async def join_records(self, peer: str | None, addresses: list[str]) -> None:
        mine = [address for address in addresses if peer is not None and parse_multiaddr(address).peer_id == peer]
        for attempt in range(3):
            try:
                await self._store.start(self._daemon.p2p, mine)
                return
            except TransportError as error:
                if attempt == 2:
                    raise
                log.warning("%s; trying again", error)
                await asyncio.sleep(1.0)

    async def close(self) -> None:
        if self._transport is not None:
            await self._transport.close()
        await self._store.stop()
        await self._daemon.stop()

    def kill_now(self) -> None:
        self._daemon.kill_now()
