"""The record store on the DHT: hivemind's DHTNode in this process's own loop.

Only well-formed records of this swarm, signed by the owner of the subkey and stored under
the key that they themselves name, are accepted; whatever else arrives is dropped here,
on store and on read.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from protocol.errors import RecordError, TransportError
from protocol.records import Record, parse_record, record_key, record_subkey
from protocol.transports.base import RecordKeeper
from protocol.transports.hivemind_parts import (
    DHTID,
    DHTNode,
    DHTRecord,
    MSGPackSerializer,
    Multiaddr,
    PeerID,
    RecordValidatorBase,
)

WAIT_SECONDS = 2.0
SHUTDOWN_SECONDS = 2.0
"""How long a DHT peer may take to answer; a frozen one costs this once, then it is avoided."""

EXPIRY_TOLERANCE_SECONDS = 1e-3


class RecordStore(RecordKeeper):
    """Claims and accusations in the DHT."""

    def __init__(
        self,
        swarm: bytes,
        *,
        on_reject: Callable[[str], None] = lambda kind: None,
        on_operation: Callable[[str, float, bool], None] = lambda operation, seconds, ok: None,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._swarm = swarm
        self._validator = SignedRecordValidator(swarm, on_reject, wall_clock)
        self._on_operation = on_operation
        self._wall_clock = wall_clock
        self._node: Any = None

    async def start(self, p2p: Any, initial_peers: Sequence[str] = ()) -> None:
        """Join the DHT through peers to which p2pd is connected already (multiaddrs with peer id).

        May be called again, with other peers, if it failed, or to join the DHT that they belong to as well.

        Raises:
            TransportError: none of them answered as a DHT peer.
        """
        try:
            if self._node is None:
                # Without peers: a creation that fails leaves its handlers behind, and none could follow it.
                self._node = await DHTNode.create(
                    p2p=p2p,
                    record_validator=self._validator,
                    wait_timeout=WAIT_SECONDS,
                    # Claims change every few seconds, so a cached one is worth little, and cached reads
                    # would hide a released claim.
                    cache_locally=False,
                    cache_nearest=0,
                    cache_on_store=False,
                )
            if initial_peers:
                await self._meet({PeerID.from_base58(Multiaddr(address)["p2p"]) for address in initial_peers})
        except TransportError:
            raise
        except Exception as error:  # hivemind raises bare Exceptions here
            text = " ".join(str(error).split())[:200]
            raise TransportError(f"the DHT could not be joined: {text}") from None

    async def _meet(self, peers: set[Any]) -> None:
        """Get known to the peers, and through them to this node's neighbours in the DHT."""
        node = self._node
        pings = (node.protocol.call_ping(peer, validate=True, strict=False) for peer in peers)
        if all(answer is None for answer in await asyncio.gather(*pings)):
            raise TransportError("the DHT could not be joined: no peer answered")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WAIT_SECONDS):
                await node.find_nearest_nodes([node.node_id])

    def restrict(self, check: Callable[[Record], None]) -> None:
        """Keep and believe only records for which ``check`` does not raise RecordError."""
        self._validator.check_writer = check

    async def stop(self) -> None:
        """Leave the DHT."""
        if self._node is not None:
            node, self._node = self._node, None
            # Taking back each handler waits for p2pd, which may be dead; what it held ends with it.
            with contextlib.suppress(TimeoutError, OSError):
                async with asyncio.timeout(SHUTDOWN_SECONDS):
                    await node.shutdown()

    async def store(self, data: bytes) -> bool:
        """Publish one signed record under its own key; false if no DHT peer took it."""
        record = parse_record(data, swarm=self._swarm, now=self._wall_clock())
        started = time.monotonic()
        ok = False
        try:
            ok = bool(await self._node.store(record_key(record), data, record.expires, subkey=record_subkey(record)))
        finally:
            self._on_operation("store", time.monotonic() - started, ok)
        return ok

    async def fetch(self, keys: Sequence[str]) -> list[tuple[Record, bytes]]:
        """Read every valid record under the keys, with its signed bytes."""
        if not keys:
            return []
        started = time.monotonic()
        ok = False
        try:
            found = await self._node.get_many(list(keys), sufficient_expiration_time=float("inf"))
            ok = True
        finally:
            self._on_operation("get", time.monotonic() - started, ok)
        records: list[tuple[Record, bytes]] = []
        for entry in found.values():
            if entry is None or not isinstance(entry.value, dict):
                continue
            for value in entry.value.values():
                try:
                    record = parse_record(value.value, swarm=self._swarm, now=self._wall_clock())
                    records.append((record, value.value))
                except RecordError:
                    continue  # it expired between the read and here; the validator has seen it before
        return records


class SignedRecordValidator(RecordValidatorBase):  # type: ignore[misc]
    """Refuses every DHT record that is not a signed record of this swarm in its own place."""

    def __init__(self, swarm: bytes, on_reject: Callable[[str], None], wall_clock: Callable[[], float]) -> None:
        self._swarm = swarm
        self._on_reject = on_reject
        self._wall_clock = wall_clock
        self.check_writer: Callable[[Record], None] = lambda record: None
        """Raises RecordError for a record of somebody who may not write here."""

    def validate(self, record: DHTRecord) -> bool:
        """Whether hivemind may store, or believe, this record."""
        try:
            self._check(record)
        except RecordError as error:
            self._on_reject(error.kind)
            return False
        return True

    def _check(self, record: DHTRecord) -> None:
        try:
            value = MSGPackSerializer.loads(record.value)
            subkey = MSGPackSerializer.loads(record.subkey)
        except Exception:  # msgpack raises several unrelated types for hostile bytes
            raise RecordError("a DHT record is not msgpack", kind="shape") from None
        if not isinstance(value, bytes):
            raise RecordError("a DHT record does not hold bytes", kind="shape")
        parsed = parse_record(value, swarm=self._swarm, now=self._wall_clock())
        if subkey != record_subkey(parsed):
            raise RecordError("a DHT record stands under another peer's subkey", kind="owner")
        if record.key != DHTID.generate(source=record_key(parsed)).to_bytes():
            raise RecordError("a DHT record stands under a key that is not its own", kind="key")
        # Written so that an expiry that is not a number is refused too.
        if not abs(record.expiration_time - parsed.expires) <= EXPIRY_TOLERANCE_SECONDS:
            raise RecordError("a DHT record was given another expiry than its writer signed", kind="expiry")
        self.check_writer(parsed)

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """Two validators of the same swarm are one."""
        return isinstance(other, SignedRecordValidator) and other._swarm == self._swarm
