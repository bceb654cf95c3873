"""How a node reaches others: transport and record store, and the first contact with a swarm."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from protocol.errors import (
    AddressError,
    InviteError,
    LocalError,
    ManifestError,
    PreflightError,
    ProtocolVersionError,
    RemoteError,
    SentinelError,
    SwarmMismatchError,
    TransportError,
)
from protocol.identity import Identity
from protocol.invite import parse_multiaddr
from protocol.manifest import Manifest
from protocol.messages import PROTOCOL_VERSION, Empty, Method
from protocol.transports.base import Observer, RecordKeeper
from protocol.transports.dht import RecordStore
from protocol.transports.p2p import P2PTransport
from protocol.transports.p2pd import Daemon, DaemonOptions
from protocol.transports.sessions import DialingTransport, SessionOptions

log = logging.getLogger(__name__)

Result = TypeVar("Result")

MAX_ADDRESSES = 8
"""As many as an invite and a claim may hold."""
MAX_MANIFEST_BYTES = 64 * 1024
CONTACT_SECONDS = 6.0
FIRST_PAUSE_SECONDS = 1.0
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

    async def contact(
        self,
        invited: Sequence[str],
        cached: Sequence[str],
        report: Callable[[str], None],
        use: Callable[[str], Awaitable[Result]],
    ) -> Result:
        """Reach any of the seeds and use it, trying for ever with growing pauses.

        Args:
            invited: addresses of the invite. ``cached``: those that this node remembers, perhaps of other swarms.
            report: told why it takes long.
            use: what is wanted of the seed, given its peer id. While it fails because that seed cannot be reached,
                is not ready or gives something else than was asked for, the next one is tried.

        Raises:
            SwarmMismatchError, ProtocolVersionError, ManifestError, PreflightError: every seed of the invite answered,
                and none as one of this swarm would; waiting will not help.
            SentinelError: as ``use`` raises it for a reason that lies with this node.
        """
        seeds = self._learn([*invited, *cached])
        wanted = {peer for peer in map(_peer_of, invited) if peer in seeds}
        if not seeds:
            raise InviteError("the invite names this node itself; use another --state-dir, or another node's invite")
        pause = FIRST_PAUSE_SECONDS
        while True:
            reasons: list[str] = []
            wrong: dict[str, SentinelError] = {}
            for peer in seeds:
                try:
                    await self.transport.connect(peer, timeout=CONTACT_SECONDS)
                    return await use(peer)
                except (SwarmMismatchError, ProtocolVersionError, ManifestError, PreflightError) as error:
                    wrong[peer] = _in_our_words(error)
                    reasons.append(f"{peer[-8:]}: {wrong[peer]}")
                except (TransportError, RemoteError) as error:
                    reasons.append(f"{peer[-8:]}: {_brief(error)}")
            if wanted and wanted <= wrong.keys():
                raise next(error for peer, error in wrong.items() if peer in wanted)
            report(f"no seed answers yet, trying for ever, next in {pause:.0f} s: {'; '.join(reasons)[:300]}")
            await asyncio.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)

    def _learn(self, addresses: Sequence[str]) -> list[str]:
        """Tell the transport where the seeds are; returns their peer ids, in order, without this node's own."""
        known: dict[str, list[str]] = {}
        for address in addresses:
            peer = _peer_of(address)
            if peer not in ("", self._identity.peer_id):
                known.setdefault(peer, []).append(address)
        for peer, places in known.items():
            self.transport.learn(peer, list(dict.fromkeys(places)))
        return list(known)

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
        self.addresses = _dialable(await self._daemon.addresses())

    async def join_records(self, peer: str | None, addresses: list[str]) -> None:
        mine = [address for address in addresses if peer is not None and parse_multiaddr(address).peer_id == peer]
        for attempt in range(3):
            try:
                await self._store.start(self._daemon.p2p, mine)
                return
            except TransportError as error:
                if attempt == 2:
                    raise
                log.info("%s; trying again", error)
                await asyncio.sleep(1.0)

    async def close(self) -> None:
        if self._transport is not None:
            await self._transport.close()
        await self._store.stop()
        await self._daemon.stop()

    def kill_now(self) -> None:
        self._daemon.kill_now()


def _peer_of(address: str) -> str:
    """The peer id of an address; empty if this version cannot read it (a cached one may be of another)."""
    try:
        return parse_multiaddr(address).peer_id
    except AddressError:
        return ""


def _dialable(addresses: Sequence[str]) -> tuple[str, ...]:
    """The addresses that others can use (no relays), those of this machine alone last.

    Raises:
        LocalError: there are none.
    """
    found: list[tuple[bool, str]] = []
    for address in addresses:
        try:
            parsed = parse_multiaddr(address)
        except AddressError:
            continue
        local = parsed.host_protocol.startswith("ip") and ipaddress.ip_address(parsed.host).is_loopback
        found.append((local, parsed.text))
    if not found:
        raise LocalError("p2pd names no address under which others could reach this node; give one with --announce")
    return tuple(dict.fromkeys(text for _, text in sorted(found, key=lambda entry: entry[0])))[:MAX_ADDRESSES]


def _in_our_words(error: SentinelError) -> SentinelError:
    """The refusals that end the start of a node: what the seed wrote is told from its side, and is free text."""
    if isinstance(error, SwarmMismatchError):
        return SwarmMismatchError("the seed belongs to another swarm than the invite names; ask for a new invite")
    if isinstance(error, ProtocolVersionError):
        return ProtocolVersionError(
            f"the swarm speaks another protocol version than this software (version {PROTOCOL_VERSION}); "
            f"upgrade the older of the two; the seed says: {error}"
        )
    return error


def _brief(error: SentinelError) -> str:
    """An error of a dial in few words: the transport's own list every address that was tried."""
    text = str(error)
    return "nobody answers at its addresses" if "failed to dial" in text else text[:120]
