"""A node's feet on the ground: p2pd, transport and DHT, and the first contact with a swarm."""

from __future__ import annotations

import asyncio
import logging
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
from protocol.transports.base import Observer
from protocol.transports.dht import RecordStore
from protocol.transports.p2p import P2PTransport
from protocol.transports.p2pd import Daemon, DaemonOptions
from protocol.transports.sessions import SessionOptions

log = logging.getLogger(__name__)

MAX_MANIFEST_BYTES = 64 * 1024
CONTACT_SECONDS = 6.0
FIRST_PAUSE_SECONDS = 0.5
LONGEST_PAUSE_SECONDS = 15.0


class Network:
    """Owns p2pd, the transport and the record store, and closes them in the right order."""

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
        self._identity = identity
        self._swarm = swarm
        self._agent = agent
        self._observer = observer
        self.daemon = Daemon(daemon_options, on_exit=on_daemon_exit)
        self.store = store
        self._transport: P2PTransport | None = None
        self.addresses: tuple[str, ...] = ()

    @property
    def transport(self) -> P2PTransport:
        """The transport, once started."""
        assert self._transport is not None, "start() comes first"
        return self._transport

    async def start(self) -> None:
        """Start p2pd and serve this node's streams."""
        await self.daemon.start()
        if str(self.daemon.p2p.peer_id) != self._identity.peer_id:
            raise LocalError("p2pd came up with another identity; remove the key file and start again")
        self._transport = P2PTransport(
            self.daemon,
            options=SessionOptions(swarm=self._swarm, agent=self._agent),
            observer=self._observer,
        )
        await self._transport.start()
        self.addresses = tuple(await self.daemon.addresses())[:8]

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

    async def join_dht(self, peer: str, addresses: list[str]) -> None:
        """Join the DHT through a peer that answers."""
        mine = [address for address in addresses if parse_multiaddr(address).peer_id == peer]
        for attempt in range(3):
            try:
                await self.store.start(self.daemon.p2p, mine)
                return
            except TransportError as error:
                if attempt == 2:
                    raise
                log.warning("%s; trying again", error)
                await asyncio.sleep(1.0)

    async def close(self) -> None:
        """Leave: streams first, then the DHT, then p2pd."""
        if self._transport is not None:
            await self._transport.close()
        await self.store.stop()
        await self.daemon.stop()
