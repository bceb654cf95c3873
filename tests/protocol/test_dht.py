"""Two real DHT nodes: honest records pass, and no hostile one is stored or believed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord
from hivemind.utils import MSGPackSerializer

from protocol.admissions import Admission, Roll, sign_admission
from protocol.errors import RecordError, TransportError
from protocol.identity import Identity
from protocol.packing import pack, unpack
from protocol.records import (
    Accusation,
    Claim,
    NodeState,
    accusation_key,
    claim_key,
    parse_record,
    sign_accusation,
    sign_claim,
)
from protocol.transports.dht import RecordStore, SignedRecordValidator
from tests.protocol.peers import PATIENCE, SWARM, P2PPeers

FOREIGN = b"\x02" * 32
SELF, OTHER = Identity(bytes(range(32))), Identity(bytes(range(1, 33)))
NOW = 1_750_000_000.0


def claim_of(identity: Identity, now: float = NOW, **changes: Any) -> Claim:
    claim = Claim(
        swarm=SWARM,
        peer=identity.peer_id,
        stage=1,
        addresses=(f"/ip4/203.0.113.7/tcp/31337/p2p/{identity.peer_id}",),
        capacity=1.0,
        state=NodeState.TRAINING,
        step=3,
        digest=b"\x07" * 32,
        active_from=0,
        generation=1,
        sequence=1,
        expires=now + 30.0,
    )
    return replace(claim, **changes)


def accusation_of(identity: Identity, accused: Identity, now: float = NOW) -> Accusation:
    return Accusation(
        swarm=SWARM,
        accuser=identity.peer_id,
        accuser_stage=0,
        accused=accused.peer_id,
        accused_stage=1,
        kind="strikes",
        reason="sign_flip",
        step=3,
        evidence=b"\x09" * 32,
        expires=now + 3600.0,
    )


def dht_record(
    data: bytes, *, key: str | None = None, subkey: object = SELF.peer_id, expires: float = NOW + 30.0
) -> DHTRecord:
    """The record as hivemind hands it to a validator."""
    return DHTRecord(
        key=DHTID.generate(source=key or claim_key(SWARM.hex(), 1)).to_bytes(),
        subkey=MSGPackSerializer.dumps(subkey),
        value=MSGPackSerializer.dumps(data),
        expiration_time=expires,
    )


def judged(record: DHTRecord) -> tuple[bool, list[str]]:
    kinds: list[str] = []
    validator = SignedRecordValidator(SWARM, kinds.append, lambda: NOW)
    return validator.validate(record), kinds


# the validator ---------------------------------------------------------------------------


def test_an_own_claim_and_an_own_accusation_are_believed() -> None:
    assert judged(dht_record(sign_claim(SELF, claim_of(SELF)))) == (True, [])
    accusation = dht_record(
        sign_accusation(SELF, accusation_of(SELF, OTHER)),
        key=accusation_key(SWARM.hex(), OTHER.peer_id),
        expires=NOW + 3600.0,
    )
    assert judged(accusation) == (True, [])


def unsigned(signature: bytes) -> bytes:
    kind, payload, _ = unpack(sign_claim(SELF, claim_of(SELF)))  # type: ignore[misc]
    return pack([kind, payload, signature])


GOOD = sign_claim(SELF, claim_of(SELF))


@pytest.mark.parametrize(
    ("record", "kind"),
    [
        (dht_record(GOOD, subkey=OTHER.peer_id), "owner"),
        (dht_record(GOOD, subkey=SELF.peer_id.encode()), "owner"),
        (dht_record(GOOD, subkey=0), "owner"),
        (dht_record(GOOD, key=claim_key(SWARM.hex(), 0)), "key"),
        (dht_record(GOOD, key=claim_key(FOREIGN.hex(), 1)), "key"),
        (dht_record(GOOD, expires=NOW + 60.0), "expiry"),
        (dht_record(GOOD, expires=NOW + 29.9), "expiry"),
        (dht_record(GOOD, expires=float("inf")), "expiry"),
        (dht_record(GOOD, expires=float("nan")), "expiry"),
        (dht_record(unsigned(bytes(64))), "signature"),
        (dht_record(unsigned(OTHER.sign("record/1", b"anything"))), "signature"),
        (dht_record(unsigned(b"")), "shape"),
        (dht_record(sign_claim(SELF, claim_of(SELF, swarm=FOREIGN))), "foreign_swarm"),
        (dht_record(sign_claim(SELF, claim_of(SELF, expires=NOW - 1.0)), expires=NOW - 1.0), "expired"),
        (dht_record(sign_claim(SELF, claim_of(SELF, expires=NOW + 999.0)), expires=NOW + 999.0), "too_far_ahead"),
        (dht_record(b"noise"), "shape"),
        (dht_record(b""), "shape"),
        (dht_record(bytes(5000)), "size"),
        (dht_record("text"), "shape"),  # type: ignore[arg-type]
        (dht_record({"a": 1}), "shape"),  # type: ignore[arg-type]
        (dht_record(None), "shape"),  # type: ignore[arg-type]
        (replace(dht_record(GOOD), value=b"\xc1"), "shape"),
        (replace(dht_record(GOOD), value=b""), "shape"),
        (replace(dht_record(GOOD), subkey=b""), "shape"),  # a plain value without subkeys
        (replace(dht_record(GOOD), subkey=b"\xff\xff"), "shape"),
        (replace(dht_record(GOOD), key=b""), "key"),
    ],
)
def test_a_hostile_record_is_rejected_with_its_kind(record: DHTRecord, kind: str) -> None:
    assert judged(record) == (False, [kind])


def test_in_an_invited_swarm_nobody_writes_without_an_admission() -> None:
    roll = Roll(swarm=SWARM, coordinator=OTHER.peer_id)
    kinds: list[str] = []
    validator = SignedRecordValidator(SWARM, kinds.append, lambda: NOW)
    validator.check_writer = lambda record: roll.check(record, NOW)
    accusation = dht_record(
        sign_accusation(SELF, accusation_of(SELF, OTHER)),
        key=accusation_key(SWARM.hex(), OTHER.peer_id),
        expires=NOW + 3600.0,
    )
    assert not validator.validate(accusation)
    assert not validator.validate(dht_record(GOOD))
    assert kinds == ["not_admitted"] * 2

    def admission(**changes: Any) -> bytes:
        words = {"serial": 1, "peer": SELF.peer_id, **changes}
        return sign_admission(OTHER, Admission(swarm=SWARM, issued=NOW, expires=NOW + 60.0, **words))

    admitted = dht_record(sign_claim(SELF, claim_of(SELF, admission=admission())))
    assert validator.validate(admitted) and validator.validate(accusation)
    roll.take(admission(serial=2, revoked=True), NOW)
    assert not validator.validate(admitted) and not validator.validate(accusation)


def test_validators_of_one_swarm_merge_and_those_of_two_do_not() -> None:
    one = SignedRecordValidator(SWARM, lambda kind: None, time.time)
    assert one.merge_with(SignedRecordValidator(SWARM, lambda kind: None, time.time))
    assert not one.merge_with(SignedRecordValidator(FOREIGN, lambda kind: None, time.time))


# two nodes -------------------------------------------------------------------------------


class Node:
    """A DHT node with the identity of its p2pd."""

    def __init__(self, identity: Identity, swarm: bytes = SWARM) -> None:
        self.identity = identity
        self.rejected: list[str] = []
        self.operations: list[tuple[str, bool]] = []
        self.store = RecordStore(
            swarm,
            on_reject=self.rejected.append,
            on_operation=lambda operation, seconds, ok: self.operations.append((operation, ok)),
        )

    async def raw_store(self, key: str, subkey: object, value: object, expires: float) -> bool:
        """Store anything, as a peer with hivemind and bad intentions would, without a check of its own."""
        node = self.store._node
        node.protocol.record_validator = None
        async with asyncio.timeout(PATIENCE):
            return bool(await node.store(key, value, expires, subkey=subkey))

    async def fetched(self, *keys: str) -> list[bytes]:
        async with asyncio.timeout(PATIENCE):
            return [data for _, data in await self.store.fetch(keys)]


@pytest.fixture
async def nodes(p2p_peers: P2PPeers) -> AsyncIterator[tuple[Node, Node]]:
    """A seed and one that joined through it."""
    made: list[Node] = []
    seeds: list[str] = []
    transports = [await p2p_peers.peer() for _ in range(2)]
    await transports[1].connect(transports[0].peer_id, timeout=PATIENCE)
    for index, transport in enumerate(transports):
        daemon = p2p_peers.daemons[transport.peer_id]
        node = Node(Identity.load(p2p_peers.folder / f"{index}.key"))
        await node.store.start(daemon.p2p, seeds)
        seeds = await daemon.addresses()
        made.append(node)
    yield made[0], made[1]
    for node in made:
        await node.store.stop()
        await node.store.stop()  # twice does no harm


KEY = claim_key(SWARM.hex(), 1)


async def test_a_claim_that_one_stores_is_read_by_the_other_until_it_is_replaced(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    claim = claim_of(one.identity, time.time())
    data = sign_claim(one.identity, claim)
    assert await one.store.store(data)
    assert await two.fetched(KEY) == [data]
    assert await two.fetched(claim_key(SWARM.hex(), 0), accusation_key(SWARM.hex(), OTHER.peer_id)) == []
    assert await two.store.fetch([]) == []
    renewed = sign_claim(one.identity, replace(claim, sequence=2, expires=claim.expires + 10))
    assert await one.store.store(renewed)
    assert await two.fetched(KEY) == [renewed]
    assert one.operations == [("store", True)] * 2
    assert two.operations == [("get", True)] * 3
    assert one.rejected == two.rejected == []


async def test_claims_and_accusations_of_many_writers_stand_side_by_side(nodes: tuple[Node, Node]) -> None:
    one, two = nodes
    now = time.time()
    stored = [
        sign_claim(one.identity, claim_of(one.identity, now)),
        sign_claim(two.identity, claim_of(two.identity, now)),
        sign_accusation(one.identity, accusation_of(one.identity, OTHER, now)),
    ]
    assert await one.store.store(stored[0])
    assert await two.store.store(stored[1])
    assert await one.store.store(stored[2])
    for node in nodes:
        assert sorted(await node.fetched(KEY, accusation_key(SWARM.hex(), OTHER.peer_id))) == sorted(stored)


async def test_a_node_publishes_no_record_that_others_would_refuse(nodes: tuple[Node, Node]) -> None:
    one, _ = nodes
    with pytest.raises(RecordError):
        await one.store.store(b"noise")
    with pytest.raises(RecordError) as caught:
        await one.store.store(sign_claim(one.identity, claim_of(one.identity, time.time() - 100)))
    assert caught.value.kind == "expired"


async def test_hostile_stores_are_refused_by_the_other_node(nodes: tuple[Node, Node]) -> None:
    one, mallory = nodes
    now = time.time()
    honest = sign_claim(one.identity, claim_of(one.identity, now))
    assert await one.store.store(honest)
    own = claim_of(mallory.identity, now)
    data = sign_claim(mallory.identity, own)
    hostile: list[tuple[str, object, object, float, str]] = [
        (KEY, one.identity.peer_id, data, own.expires, "owner"),  # over another's claim
        (KEY, mallory.identity.peer_id, data, own.expires + 3600, "expiry"),
        (claim_key(SWARM.hex(), 2), mallory.identity.peer_id, data, own.expires, "key"),
        (KEY, mallory.identity.peer_id, data[:-1] + bytes([data[-1] ^ 1]), own.expires, "signature"),
        (KEY, mallory.identity.peer_id, b"x" * 100_000, own.expires, "size"),
        (KEY, mallory.identity.peer_id, {"not": "bytes"}, own.expires, "shape"),
    ]
    for key, subkey, value, expires, kind in hostile:
        one.rejected.clear()
        await mallory.raw_store(key, subkey, value, expires)
        assert one.rejected == [kind]
    assert await one.fetched(KEY, claim_key(SWARM.hex(), 2)) == [honest]


async def test_what_a_hostile_node_has_kept_is_not_believed_on_reading(nodes: tuple[Node, Node]) -> None:
    one, mallory = nodes
    own = claim_of(mallory.identity, time.time())
    data = sign_claim(mallory.identity, own)
    await mallory.raw_store(KEY, OTHER.peer_id, data, own.expires)  # kept by mallory itself
    one.rejected.clear()
    assert await one.fetched(KEY) == []
    assert "owner" in one.rejected


async def test_a_record_that_expired_is_not_read() -> None:
    claim = claim_of(SELF)
    data = sign_claim(SELF, claim)
    assert parse_record(data, swarm=SWARM, now=claim.expires - 0.1) == claim
    with pytest.raises(RecordError):
        parse_record(data, swarm=SWARM, now=claim.expires)


async def test_a_start_that_failed_can_be_repeated_and_a_lone_node_can_join_others(p2p_peers: P2PPeers) -> None:
    one, other = await p2p_peers.pair()
    lone, joining = (Node(Identity.load(p2p_peers.folder / f"{index}.key")) for index in range(2))
    daemons = [p2p_peers.daemons[peer.peer_id] for peer in (one, other)]
    await lone.store.start(daemons[0].p2p)
    for _ in range(2):
        with pytest.raises(TransportError, match="no peer answered"):
            await joining.store.start(daemons[1].p2p, [f"/ip4/127.0.0.1/tcp/9/p2p/{SELF.peer_id}"])
    data = sign_claim(joining.identity, claim_of(joining.identity, time.time()))
    await joining.store.store(data)  # which it keeps for itself, having met nobody
    assert await lone.fetched(KEY) == []
    await one.connect(other.peer_id, timeout=PATIENCE)
    await lone.store.start(daemons[0].p2p, await daemons[1].addresses())
    assert await lone.fetched(KEY) == [data]
    for node in (lone, joining):
        await node.store.stop()


async def test_a_seed_that_is_no_dht_peer_is_reported(p2p_peers: P2PPeers) -> None:
    daemon = await p2p_peers.daemon()
    with pytest.raises(TransportError, match="could not be joined") as caught:
        store = RecordStore(SWARM)
        await store.start(daemon.p2p, [f"/ip4/127.0.0.1/tcp/9/p2p/{SELF.peer_id}"])
    assert "\n" not in str(caught.value)
