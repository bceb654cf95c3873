"""Admissions: what the coordinator signed reads back, nothing else is believed, and the newest word counts."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import admissions
from protocol.admissions import (
    DAY_SECONDS,
    MAX_ADMISSION_SECONDS,
    MAX_ISSUED_AHEAD_SECONDS,
    Admission,
    Roll,
    Standing,
    open_admission,
    peek_admission,
    sign_admission,
)
from protocol.errors import RecordError
from protocol.identity import Identity
from protocol.messages import MAX_ADMISSION_BYTES, MAX_SERIAL
from protocol.packing import pack, unpack
from protocol.records import Accusation, Claim, NodeState, Verdict

COORDINATOR = Identity(bytes(range(32)))
SELF, OTHER = Identity(bytes(range(1, 33))), Identity(bytes(range(2, 34)))
SWARM = bytes(range(32))
NOW = 1_750_000_000.0
ADMISSION = Admission(swarm=SWARM, peer=SELF.peer_id, serial=7, issued=NOW, expires=NOW + 30 * DAY_SECONDS)

GOLDEN = (
    "92c49686a765787069726573cb41da1d9ba0000000a6697373756564cb41da13b860000000a470656572d934313244334b6f"
    "6f574a315473696a48374835463734686641443558697368517a337378726d41745659333747744e643943715966a7726576"
    "6f6b6564c2a673657269616c07a5737761726dc420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c"
    "1d1e1fc44049ba345488ecc666d926225e8f566b3abe8773954630f4291c982b6ba728c0e45a4e740d45eab4cab8db2e7236"
    "2d97ef508eb02d2fb6664f9abb8a307b95ae0f"
)


def sign(**changes: Any) -> bytes:
    return sign_admission(COORDINATOR, dataclasses.replace(ADMISSION, **changes))


def read(data: bytes, **changes: Any) -> Admission:
    return open_admission(data, **{"swarm": SWARM, "coordinator": COORDINATOR.peer_id, "now": NOW} | changes)


def refused(data: bytes, **changes: Any) -> str:
    with pytest.raises(RecordError) as caught:
        read(data, **changes)
    assert "\n" not in str(caught.value)
    return caught.value.kind


def envelope(values: object, *, identity: Identity = COORDINATOR) -> bytes:
    """An admission whose signature is right, whatever it says."""
    payload = values if isinstance(values, bytes) else pack(values)
    return pack([payload, identity.sign("admission", payload)])


def roll(*signed: bytes, now: float = NOW) -> Roll:
    made = Roll(swarm=SWARM, coordinator=COORDINATOR.peer_id)
    for data in signed:
        made.take(data, now)
    return made


seeds = st.binary(min_size=32, max_size=32)
words = st.builds(
    dict,
    swarm=seeds,
    peer=seeds.map(lambda seed: Identity(seed).peer_id),
    serial=st.integers(1, MAX_SERIAL),
    issued=st.floats(1.0, 1e11),
    revoked=st.booleans(),
)


# one admission ---------------------------------------------------------------------------


@given(words, st.floats(60.0, MAX_ADMISSION_SECONDS / 2), seeds)
def test_what_was_signed_reads_back_and_is_small(values: dict[str, Any], seconds: float, seed: bytes) -> None:
    admission = Admission(expires=values["issued"] + seconds, **values)
    data = sign_admission(Identity(seed), admission)
    assert len(data) <= MAX_ADMISSION_BYTES // 2
    about = {"swarm": admission.swarm, "coordinator": Identity(seed).peer_id, "now": admission.issued}
    assert open_admission(data, **about) == admission == peek_admission(data)  # type: ignore[arg-type]


@given(st.data())
def test_no_flipped_bit_gets_through(data: st.DataObject) -> None:
    signed = bytearray(sign())
    place = data.draw(st.integers(0, 8 * len(signed) - 1))
    signed[place // 8] ^= 1 << place % 8
    refused(bytes(signed))


@given(st.binary(max_size=MAX_ADMISSION_BYTES + 8))
def test_no_bytes_crash_the_reader(data: bytes) -> None:
    refused(data)


@given(
    st.recursive(st.none() | st.integers(-1, 2**63) | st.binary(max_size=70), lambda inner: st.lists(inner, max_size=3))
)
def test_no_msgpack_crashes_the_reader(value: object) -> None:
    refused(pack(value))
    refused(envelope(value))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"swarm": bytes(31)}, "range"),
        ({"swarm": "text"}, "type"),
        ({"peer": "12D3KooW"}, "range"),
        ({"peer": b"bytes"}, "type"),
        ({"serial": 0}, "range"),
        ({"serial": 2**63}, "range"),
        ({"serial": True}, "type"),
        ({"issued": int(NOW)}, "type"),
        ({"issued": float("nan")}, "range"),
        ({"expires": NOW}, "range"),
        ({"expires": NOW - 1.0}, "range"),
        ({"expires": NOW + MAX_ADMISSION_SECONDS + 1.0}, "range"),
        ({"expires": float("inf")}, "range"),
        ({"revoked": 1}, "type"),
    ],
)
def test_a_signed_admission_that_breaks_a_rule_is_refused_and_never_signed(changes: dict[str, Any], kind: str) -> None:
    values = dataclasses.asdict(ADMISSION) | changes
    assert refused(envelope(values)) == kind
    if changes != {"issued": int(NOW)}:  # which the signer writes as a float
        with pytest.raises(ValueError, match=r"record field|lasts"):
            sign(**changes)


def test_every_field_is_required_and_unknown_fields_are_ignored() -> None:
    values = dataclasses.asdict(ADMISSION)
    for name in values:
        assert refused(envelope({key: values[key] for key in values if key != name})) == "shape"
    assert read(envelope(values | {"new": {"field": [1]}})) == ADMISSION


def test_another_swarm_another_signer_and_another_purpose_are_refused() -> None:
    assert refused(sign(), swarm=bytes(32)) == "foreign_swarm"
    assert refused(sign(), coordinator=OTHER.peer_id) == "signature"
    assert refused(sign_admission(SELF, ADMISSION)) == "signature"
    payload, _ = unpack(sign())  # type: ignore[misc]
    for context in ("record/1", "receipt", "admission2", ""):
        assert refused(pack([payload, COORDINATOR.sign(context, payload)])) == "signature"


def test_a_clock_a_minute_off_still_works_and_not_more() -> None:
    assert read(sign(), now=NOW - MAX_ISSUED_AHEAD_SECONDS) == ADMISSION
    assert refused(sign(), now=NOW - MAX_ISSUED_AHEAD_SECONDS - 1.0) == "too_far_ahead"


def test_a_longer_spelling_is_refused() -> None:
    payload, signature = unpack(sign())  # type: ignore[misc]
    long = b"\xdc\x00\x02" + sign()[1:]  # a list of two in three bytes instead of one
    assert unpack(long) == [payload, signature]
    assert refused(long) == "shape"
    assert refused(b"") == "shape"
    assert refused(bytes(MAX_ADMISSION_BYTES + 1)) == "size"


def test_the_bytes_of_an_admission_never_change() -> None:
    assert sign().hex() == GOLDEN
    assert read(bytes.fromhex(GOLDEN)) == ADMISSION


# the roll --------------------------------------------------------------------------------


def test_it_says_what_the_coordinator_says() -> None:
    known = roll(sign())
    assert known.standing(SELF.peer_id, NOW) is Standing.ADMITTED
    assert known.standing(SELF.peer_id, ADMISSION.expires) is Standing.EXPIRED
    assert known.standing(OTHER.peer_id, NOW) is Standing.UNKNOWN
    assert known.standing(COORDINATOR.peer_id, NOW) is Standing.ADMITTED
    known.take(sign(serial=8, revoked=True), NOW)
    assert known.standing(SELF.peer_id, NOW) is Standing.REVOKED
    assert known.take(sign(serial=9), NOW)
    assert known.admits(SELF.peer_id, NOW)


@given(st.permutations(range(1, 7)), st.integers(1, 6))
def test_in_whatever_order_they_arrive_the_newest_counts_and_older_ones_change_nothing(
    order: list[int], revoked: int
) -> None:
    signed = {serial: sign(serial=serial, revoked=serial == revoked) for serial in order}
    known = roll(*(signed[serial] for serial in order))
    for serial in order:  # and all of them played once more
        assert not known.take(signed[serial], NOW)
    assert known.signed(SELF.peer_id) == signed[6]
    assert known.admits(SELF.peer_id, NOW) == (revoked != 6)


def test_of_two_with_one_serial_everybody_keeps_the_same() -> None:
    one, two = sign(), sign(revoked=True)
    assert roll(one, two).signed(SELF.peer_id) == roll(two, one).signed(SELF.peer_id) == max(one, two)


def test_news_is_told_once() -> None:
    told: list[int] = []
    known = Roll(swarm=SWARM, coordinator=COORDINATOR.peer_id, on_news=lambda admission: told.append(admission.serial))
    for serial in (3, 3, 2, 5):
        known.take(sign(serial=serial), NOW)
    assert told == [3, 5]


def test_nobody_but_the_coordinator_can_fill_it_and_full_it_keeps_what_lasts_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admissions, "MAX_KNOWN", 4)
    peers = [Identity(bytes([number]) * 32).peer_id for number in range(1, 8)]
    signed = [sign(peer=peer, serial=9 - n, expires=NOW + (n + 1) * DAY_SECONDS) for n, peer in enumerate(peers)]
    with pytest.raises(RecordError):
        roll().take(sign_admission(SELF, ADMISSION), NOW)
    for order in (signed, signed[::-1]):
        known = roll(*order)
        assert set(known.peers()) == set(peers[3:]) and len(known) == 4
    assert not known.take(signed[0], NOW)  # no news, or two full nodes would tell each other for ever


def test_pages_hold_everything_in_order_of_the_serial() -> None:
    peers = [Identity(bytes([number]) * 32).peer_id for number in range(1, 8)]
    signed = [sign(peer=peer, serial=serial) for serial, peer in enumerate(peers, 1)]
    known = roll(*signed[::-1])
    found: list[bytes] = []
    after, more = 0, True
    while more:
        page, more = known.after(after, 3)
        found += page
        after = read(page[-1]).serial
    assert found == signed == known.all_signed()
    assert known.after(7, 3) == ((), False)
    assert known.digest() == roll(*signed).digest() != roll(*signed[1:]).digest()


# records ---------------------------------------------------------------------------------


def claim(admission: bytes, identity: Identity = SELF) -> Claim:
    return Claim(
        swarm=SWARM,
        peer=identity.peer_id,
        stage=0,
        addresses=(),
        capacity=1.0,
        state=NodeState.TRAINING,
        step=0,
        digest=b"",
        active_from=0,
        generation=1,
        sequence=0,
        expires=NOW + 30.0,
        admission=admission,
    )


def kind_of(known: Roll, record: Any, now: float = NOW) -> str:
    with pytest.raises(RecordError) as caught:
        known.check(record, now)
    return caught.value.kind


def test_a_claim_brings_its_admission_and_needs_one() -> None:
    known = roll()
    assert kind_of(known, claim(b"")) == "not_admitted"
    known.check(claim(sign()), NOW)
    assert known.signed(SELF.peer_id) == sign()
    known.check(claim(b""), NOW)  # it is known by now
    known.check(claim(b"", COORDINATOR), NOW)
    assert kind_of(known, claim(sign()), ADMISSION.expires) == "not_admitted"


def test_no_admission_but_its_own_and_the_newest_lets_a_claim_in() -> None:
    known = roll()
    assert kind_of(known, claim(sign(), OTHER)) == "not_admitted"
    assert kind_of(known, claim(sign(swarm=bytes(32)))) == "foreign_swarm"
    assert kind_of(known, claim(sign(issued=NOW + 100.0))) == "too_far_ahead"
    assert kind_of(known, claim(sign_admission(SELF, ADMISSION))) == "signature"
    assert kind_of(known, claim(b"noise")) == "shape"
    assert len(known) == 0
    known.take(sign(serial=8, revoked=True), NOW)
    assert kind_of(known, claim(sign())) == "not_admitted"  # the older one, played again
    assert kind_of(known, claim(sign(serial=9, revoked=True))) == "not_admitted"
    known.check(claim(sign(serial=10)), NOW)


def test_accusations_and_verdicts_need_an_admitted_writer() -> None:
    accusation = Accusation(
        swarm=SWARM,
        accuser=SELF.peer_id,
        accuser_stage=0,
        accused=OTHER.peer_id,
        accused_stage=1,
        kind="strikes",
        reason="l2",
        step=1,
        evidence=bytes(32),
        expires=NOW + 100.0,
    )
    verdict = Verdict(
        swarm=SWARM,
        writer=SELF.peer_id,
        accused=OTHER.peer_id,
        accused_stage=1,
        reason="gradient",
        step=1,
        subject=bytes(32),
        draw=bytes(64),
        votes=(),
        expires=NOW + 100.0,
    )
    for record in (accusation, verdict):
        assert kind_of(roll(), record) == "not_admitted"
        roll(sign()).check(record, NOW)
