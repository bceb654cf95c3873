"""Signed records: what is written reads back, and nothing else is ever accepted or crashes."""

from __future__ import annotations

import dataclasses
import string
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import records
from protocol.errors import RecordError
from protocol.identity import Identity
from protocol.messages import MAX_ADMISSION_BYTES, MAX_RECORD_BYTES
from protocol.packing import pack, unpack
from protocol.receipts import sign_draw, sign_vote, statement_digest
from protocol.records import (
    MAX_ACCUSATION_AHEAD_SECONDS,
    MAX_CLAIM_AHEAD_SECONDS,
    MAX_VOTES,
    Accusation,
    Claim,
    NodeState,
    Verdict,
    accusation_key,
    claim_key,
    parse_record,
    record_key,
    record_subkey,
    sign_accusation,
    sign_claim,
    sign_verdict,
    supersedes,
    verdict_key,
)

SELF = Identity(bytes(range(32)))
OTHER = Identity(bytes(range(1, 33)))
SWARM = bytes(range(32))
NOW = 1_750_000_000.0
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{SELF.peer_id}"

CLAIM = Claim(
    swarm=SWARM,
    peer=SELF.peer_id,
    stage=1,
    addresses=(ADDRESS,),
    capacity=2.5,
    state=NodeState.TRAINING,
    step=41,
    digest=b"\x07" * 32,
    active_from=40,
    generation=1_749_990_000_000_000,
    sequence=3,
    expires=NOW + 30.0,
    label="attic",
    agent="sentinel-swarm/1",
    drill="",
    pinned=True,
)
ACCUSATION = Accusation(
    swarm=SWARM,
    accuser=SELF.peer_id,
    accuser_stage=0,
    accused=OTHER.peer_id,
    accused_stage=1,
    kind="strikes",
    reason="sign_flip",
    step=41,
    evidence=b"\x09" * 32,
    expires=NOW + 3600.0,
)
JURORS = [Identity(bytes([number]) * 32) for number in range(1, 18)]
SUBJECT = statement_digest(b"the statement of the accused")


def voted(*jurors: Identity, **changes: Any) -> tuple[tuple[str, bytes], ...]:
    """Votes that OTHER is guilty."""
    about = {"subject": SUBJECT, "accused": OTHER.peer_id, "guilty": True, **changes}
    swarm = about.pop("swarm", SWARM)
    return tuple((juror.peer_id, sign_vote(juror, swarm, **about)) for juror in jurors)


VERDICT = Verdict(
    swarm=SWARM,
    writer=SELF.peer_id,
    accused=OTHER.peer_id,
    accused_stage=1,
    reason="gradient",
    step=41,
    subject=SUBJECT,
    draw=sign_draw(SELF, SWARM, SUBJECT),
    votes=voted(*JURORS[:2]),
    expires=NOW + 3600.0,
)

GOLDEN_CLAIM = (
    "9301c5018bde0010ab6163746976655f66726f6d28a961646472657373657391d9532f6970342f3230332e302e3131332e37"
    "2f7463702f33313333372f7032702f313244334b6f6f574134586f70314a6154334d487877594d6b43657059737634695056"
    "6f704d5877437a35694859644266655342a56167656e74b073656e74696e656c2d737761726d2f31a86361706163697479cb"
    "4004000000000000a6646967657374c4200707070707070707070707070707070707070707070707070707070707070707a5"
    "6472696c6ca0a765787069726573cb41da13b867800000aa67656e65726174696f6ecf0006379b4c4f7c00a56c6162656ca5"
    "6174746963a470656572d934313244334b6f6f574134586f70314a6154334d487877594d6b436570597376346950566f704d"
    "5877437a35694859644266655342a670696e6e6564c3a873657175656e636503a5737461676501a57374617465a874726169"
    "6e696e67a47374657029a5737761726dc420000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "c44093a355749a17be8008e794ce0ec46727c0960c97ff95a71d25380e1d4a2417dc02907798900ac474f0c32729162818b1"
    "526570a3c74c1dadbbd5fb6c65218d03"
)

GOLDEN_VERDICT = (
    "9303c502448aa761636375736564d934313244334b6f6f574a315473696a48374835463734686641443558697368517a3373"
    "78726d41745659333747744e643943715966ad616363757365645f737461676501a464726177c4403d05ba806727c1662958"
    "0fcca07b2f4d8df146255fc3a4ec4f0e7fb86e7d9d56ae4ce75b29f5c9a07b9e3c1142c1872226e76caf2a4585ae631ce18f"
    "148b4a0ea765787069726573cb41da13bbe4000000a6726561736f6ea86772616469656e74a47374657029a77375626a6563"
    "74c420acf836be1942856a943d50674fcf99728d1027008e4b7d5ffb94b14bbb997b68a5737761726dc42000010203040506"
    "0708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1fa5766f7465739292d934313244334b6f6f574b3939566f5678"
    "4e4537587a79427758457a573778684b37477076383572394633563366794b53554b504835c4405f0ee6ab0a1f2e0194fa2a"
    "37f2e1930dcd4ba3c91e2115aa3fc62798c255381ab0cfe1530296462e3d40df083af8c49f10ff96ba4ea444331341fd4812"
    "845d0692d934313244334b6f6f574a576f61715a6844616f454673684637526831627059396f68696846687a635736643639"
    "4c72324e41537571c4409777a5bac9c85f2b714a0d5f1dc3f987017ae44ecb99816bdfb293c07909a67020b9e999dadd7621"
    "8d7afa456b0c96225e74b8d809778a4ebabed5fe90c00e03a6777269746572d934313244334b6f6f574134586f70314a6154"
    "334d487877594d6b436570597376346950566f704d5877437a35694859644266655342c4403cf5aa7c7daa55377448e5e4f5"
    "6c3ab7f3eb82fe749d507f06d068aa9f640f9419ea0faa003078db5770420e7b1a6a75d87f1d37748b3d875f26e2398bc840"
    "09"
)


def read(data: bytes, **changes: Any) -> records.Record:
    return parse_record(data, **{"swarm": SWARM, "now": NOW} | changes)


def refused(data: bytes, **changes: Any) -> str:
    with pytest.raises(RecordError) as caught:
        read(data, **changes)
    assert "\n" not in str(caught.value)
    return caught.value.kind


def envelope(values: object, *, kind: object = 1, identity: Identity = SELF) -> bytes:
    """A record whose signature is right, whatever it says."""
    payload = values if isinstance(values, bytes) else pack(values)
    return pack([kind, payload, identity.sign(f"record/{kind}", payload)])


def payload_of(record: records.Record) -> dict[str, Any]:
    return {**dataclasses.asdict(record)}


printable = st.text(st.characters(codec="utf-8").filter(str.isprintable), max_size=40)
short = st.text(string.printable[:95], max_size=40)
seeds = st.binary(min_size=32, max_size=32)


@st.composite
def claims(draw: st.DrawFn) -> tuple[Identity, Claim]:
    identity = Identity(draw(seeds))
    ports = draw(st.lists(st.integers(1, 65535), max_size=8, unique=True))
    claim = Claim(
        swarm=SWARM,
        peer=identity.peer_id,
        stage=draw(st.integers(0, 127)),
        addresses=tuple(f"/dns4/node.example.org/tcp/{port}/p2p/{identity.peer_id}" for port in ports),
        capacity=draw(st.floats(0.0, 1e6, exclude_min=True)),
        state=draw(st.sampled_from(NodeState)),
        step=draw(st.integers(0, 2**40)),
        digest=draw(st.one_of(st.just(b""), seeds)),
        active_from=draw(st.integers(0, 2**40)),
        generation=draw(st.integers(1, 2**63 - 1)),
        sequence=draw(st.integers(0, 2**63 - 1)),
        expires=draw(st.floats(NOW, NOW + 120.0, exclude_min=True)),
        label=draw(printable),
        agent=draw(printable),
        drill=draw(printable),
        pinned=draw(st.booleans()),
    )
    return identity, claim


@st.composite
def accusations(draw: st.DrawFn) -> tuple[Identity, Accusation]:
    identity, accused = Identity(draw(seeds)), Identity(draw(seeds))
    accusation = Accusation(
        swarm=SWARM,
        accuser=identity.peer_id,
        accuser_stage=draw(st.integers(0, 127)),
        accused=accused.peer_id if accused.peer_id != identity.peer_id else SELF.peer_id,
        accused_stage=draw(st.integers(0, 127)),
        kind=draw(st.sampled_from(["strikes", "audit"])),
        reason=draw(printable.filter(bool)),
        step=draw(st.integers(0, 2**40)),
        evidence=draw(seeds),
        expires=draw(st.floats(NOW, NOW + MAX_ACCUSATION_AHEAD_SECONDS, exclude_min=True)),
    )
    return identity, accusation


@st.composite
def verdicts(draw: st.DrawFn) -> tuple[Identity, Verdict]:
    writer, accused, *jurors = [
        Identity(seed) for seed in draw(st.lists(seeds, min_size=3, max_size=2 + MAX_VOTES, unique=True))
    ]
    swarm, subject = draw(seeds), draw(seeds)
    verdict = Verdict(
        swarm=swarm,
        writer=writer.peer_id,
        accused=accused.peer_id,
        accused_stage=draw(st.integers(0, 127)),
        reason=draw(printable.filter(bool)),
        step=draw(st.integers(0, 2**40)),
        subject=subject,
        draw=sign_draw(writer, swarm, subject),
        votes=voted(*jurors, swarm=swarm, subject=subject, accused=accused.peer_id),
        expires=draw(st.floats(NOW, NOW + MAX_ACCUSATION_AHEAD_SECONDS, exclude_min=True)),
    )
    return writer, verdict


@given(claims())
def test_a_claim_reads_back_equal(signed: tuple[Identity, Claim]) -> None:
    identity, claim = signed
    assert read(sign_claim(identity, claim)) == claim


@given(accusations())
def test_an_accusation_reads_back_equal(signed: tuple[Identity, Accusation]) -> None:
    identity, accusation = signed
    assert read(sign_accusation(identity, accusation)) == accusation


@settings(max_examples=30)
@given(verdicts())
def test_a_verdict_reads_back_equal(signed: tuple[Identity, Verdict]) -> None:
    writer, verdict = signed
    assert read(sign_verdict(writer, verdict), swarm=verdict.swarm) == verdict


@pytest.mark.parametrize(
    "data", [sign_claim(SELF, CLAIM), sign_accusation(SELF, ACCUSATION), sign_verdict(SELF, VERDICT)]
)
def test_no_byte_of_a_record_can_be_changed(data: bytes) -> None:
    for position in range(len(data)):
        for mask in (0x01, 0x80, 0xFF):
            changed = bytearray(data)
            changed[position] ^= mask
            refused(bytes(changed))


@given(st.data())
def test_a_record_cut_extended_or_changed_is_refused(data: st.DataObject) -> None:
    original = sign_claim(SELF, CLAIM)
    start, end = sorted(data.draw(st.tuples(st.integers(0, len(original)), st.integers(0, len(original)))))
    changed = original[:start] + data.draw(st.binary(max_size=20)) + original[end:]
    if changed != original:
        refused(changed)


@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_crash(data: bytes) -> None:
    refused(data)


junk = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
        st.text(max_size=20),
        st.binary(),
    ),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=6,
)


FIELDS = [
    (record, kind, field)
    for kind, record in ((1, CLAIM), (2, ACCUSATION), (3, VERDICT))
    for field in sorted(payload_of(record))
]


@settings(deadline=None, max_examples=300)
@given(place=st.sampled_from(FIELDS), value=junk)
def test_any_signed_value_of_a_field_is_checked_or_refused(place: tuple[records.Record, int, str], value: Any) -> None:
    record, kind, field = place
    try:
        record = read(envelope(payload_of(record) | {field: value}, kind=kind))
    except RecordError:
        return
    assert getattr(record, field) == (tuple(value) if isinstance(value, list) else value)


@given(kind=st.integers(0, 4), values=junk)
def test_any_signed_payload_is_refused_without_a_crash(kind: int, values: object) -> None:
    refused(envelope(values, kind=kind))


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"swarm": b""}, "range"),
        ({"swarm": bytes(32)}, "foreign_swarm"),
        ({"swarm": "a" * 32}, "type"),
        ({"peer": b"12D3KooW"}, "type"),
        ({"peer": "12D3KooW"}, "range"),
        ({"peer": OTHER.peer_id, "addresses": []}, "signature"),
        ({"stage": -1}, "range"),
        ({"stage": 128}, "range"),
        ({"stage": 1.0}, "type"),
        ({"stage": True}, "type"),
        ({"addresses": ADDRESS}, "type"),
        ({"addresses": [1]}, "type"),
        ({"addresses": ["/ip4/1.2.3.4/tcp/80"]}, "range"),
        ({"addresses": [f"/ip4/1.2.3.4/tcp/80/p2p/{OTHER.peer_id}"]}, "range"),
        ({"addresses": [ADDRESS] * 9}, "range"),
        ({"capacity": 1}, "type"),
        ({"capacity": 0.0}, "range"),
        ({"capacity": -1.0}, "range"),
        ({"capacity": 1.1e6}, "range"),
        ({"capacity": float("nan")}, "range"),
        ({"capacity": float("inf")}, "range"),
        ({"state": "asleep"}, "range"),
        ({"state": 3}, "type"),
        ({"step": -1}, "range"),
        ({"step": 2**63}, "range"),
        ({"digest": b"\x01" * 31}, "range"),
        ({"digest": ""}, "type"),
        ({"active_from": -1}, "range"),
        ({"generation": 0}, "range"),
        ({"generation": 2**63}, "range"),
        ({"sequence": -1}, "range"),
        ({"expires": int(NOW) + 30}, "type"),
        ({"expires": float("inf")}, "range"),
        ({"expires": NOW}, "expired"),
        ({"expires": NOW + MAX_CLAIM_AHEAD_SECONDS + 1}, "too_far_ahead"),
        ({"label": "a" * 41}, "range"),
        ({"label": "two\nlines"}, "range"),
        ({"label": "\u202egnp.exe"}, "range"),
        ({"agent": None}, "type"),
        ({"drill": "\x1b[31m"}, "range"),
    ],
)
def test_a_signed_claim_that_breaks_a_rule_is_refused(changes: dict[str, object], kind: str) -> None:
    assert refused(envelope(payload_of(CLAIM) | changes)) == kind


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"accused": SELF.peer_id}, "range"),
        ({"accuser": OTHER.peer_id, "accused": SELF.peer_id}, "signature"),
        ({"kind": "rumour"}, "range"),
        ({"reason": ""}, "range"),
        ({"reason": "a" * 41}, "range"),
        ({"evidence": b""}, "range"),
        ({"accused_stage": 128}, "range"),
        ({"expires": NOW - 1.0}, "expired"),
        ({"expires": NOW + MAX_ACCUSATION_AHEAD_SECONDS + 1.0}, "too_far_ahead"),
    ],
)
def test_a_signed_accusation_that_breaks_a_rule_is_refused(changes: dict[str, object], kind: str) -> None:
    assert refused(envelope(payload_of(ACCUSATION) | changes, kind=2)) == kind


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"swarm": bytes(32)}, "foreign_swarm"),
        ({"swarm": b""}, "range"),
        ({"writer": "12D3KooW"}, "range"),
        ({"writer": JURORS[0].peer_id}, "signature"),
        ({"accused": b"12D3KooW"}, "type"),
        ({"accused": JURORS[5].peer_id}, "signature"),
        ({"accused": JURORS[0].peer_id}, "range"),  # one of its own jurors
        ({"accused": SELF.peer_id}, "range"),  # the writer
        ({"accused_stage": 128}, "range"),
        ({"accused_stage": True}, "type"),
        ({"reason": ""}, "range"),
        ({"reason": "a" * 41}, "range"),
        ({"reason": "two\nlines"}, "range"),
        ({"step": -1}, "range"),
        ({"subject": bytes(31)}, "range"),
        ({"subject": bytes(32)}, "signature"),
        ({"draw": bytes(63)}, "range"),
        ({"draw": bytes(64)}, "signature"),
        ({"draw": sign_draw(OTHER, SWARM, SUBJECT)}, "signature"),
        ({"draw": sign_draw(SELF, SWARM, bytes(32))}, "signature"),
        ({"draw": sign_draw(SELF, bytes(32), SUBJECT)}, "signature"),
        ({"draw": SELF.sign("vote", pack([SWARM, SUBJECT]))}, "signature"),
        ({"votes": ()}, "range"),
        ({"votes": voted(*JURORS)}, "range"),
        ({"votes": voted(JURORS[0], JURORS[0])}, "range"),
        ({"votes": voted(JURORS[0], OTHER)}, "range"),
        ({"votes": 1}, "type"),
        ({"votes": {JURORS[0].peer_id: bytes(64)}}, "type"),
        ({"votes": [JURORS[0].peer_id, bytes(64)]}, "type"),
        ({"votes": [(JURORS[0].peer_id, bytes(64), 1)]}, "type"),
        ({"votes": [(JURORS[0].peer_id,)]}, "type"),
        ({"votes": [(1, bytes(64))]}, "type"),
        ({"votes": [("12D3KooW", bytes(64))]}, "range"),
        ({"votes": [(JURORS[0].peer_id, "text")]}, "type"),
        ({"votes": [(JURORS[0].peer_id, bytes(63))]}, "range"),
        ({"votes": [*voted(JURORS[0]), (JURORS[1].peer_id, bytes(64))]}, "signature"),
        ({"votes": [*voted(JURORS[0]), (JURORS[1].peer_id, voted(JURORS[2])[0][1])]}, "signature"),
        ({"votes": voted(*JURORS[:2], guilty=False)}, "signature"),
        ({"votes": voted(*JURORS[:2], subject=bytes(32))}, "signature"),
        ({"votes": voted(*JURORS[:2], accused=JURORS[5].peer_id)}, "signature"),
        ({"votes": voted(*JURORS[:2], swarm=bytes(32))}, "signature"),
        ({"expires": NOW}, "expired"),
        ({"expires": NOW + MAX_ACCUSATION_AHEAD_SECONDS + 1.0}, "too_far_ahead"),
        ({"expires": int(NOW) + 1}, "type"),
    ],
)
def test_a_signed_verdict_that_breaks_a_rule_is_refused(changes: dict[str, object], kind: str) -> None:
    assert refused(envelope(payload_of(VERDICT) | changes, kind=3)) == kind


def test_whoever_asked_may_have_voted_too_and_one_vote_is_a_verdict_to_be_weighed_by_others() -> None:
    # How many votes convict is for the reader to say, who knows the jury.
    for jurors in ((JURORS[0],), (SELF, JURORS[0]), JURORS[:MAX_VOTES]):
        verdict = dataclasses.replace(VERDICT, votes=voted(*jurors))
        assert read(sign_verdict(SELF, verdict)) == verdict


@pytest.mark.parametrize(("record", "kind"), [(CLAIM, 1), (ACCUSATION, 2), (VERDICT, 3)])
def test_every_field_is_required_and_unknown_fields_are_ignored(record: records.Record, kind: int) -> None:
    values = payload_of(record)
    for name in values.keys() - {"admission"}:
        assert refused(envelope({key: values[key] for key in values if key != name}, kind=kind)) == "shape"
    assert read(envelope(values | {"new": {"field": [1]}}, kind=kind)) == record


def test_a_claim_has_room_for_an_admission_and_does_not_grow_without_one() -> None:
    with_one = dataclasses.replace(CLAIM, admission=b"a" * MAX_ADMISSION_BYTES)
    assert read(sign_claim(SELF, with_one)) == with_one
    assert b"admission" not in sign_claim(SELF, CLAIM)
    assert refused(envelope(payload_of(CLAIM) | {"admission": bytes(MAX_ADMISSION_BYTES + 1)})) == "range"
    assert refused(envelope(payload_of(CLAIM) | {"admission": "text"})) == "type"


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (None, "shape"),
        ("text", "shape"),
        (b"", "shape"),
        (b"\xc1", "shape"),
        (b"\x93", "shape"),
        (b"\xdd\xff\xff\xff\xff", "shape"),
        (b"\x91" * 3000, "shape"),
        (pack({}), "shape"),
        (pack([1, b""]), "shape"),
        (pack([1, b"", bytes(63)]), "shape"),
        (pack([1, "text", bytes(64)]), "type"),
        (pack([True, b"", bytes(64)]), "type"),
        (envelope(payload_of(CLAIM), kind=3), "shape"),
        (envelope(payload_of(CLAIM), kind=4), "unknown_kind"),
        (envelope(payload_of(CLAIM), kind=-1), "unknown_kind"),
        (envelope(b"\xc1"), "shape"),
        (envelope([1]), "shape"),
        (envelope({}), "shape"),
        (envelope(payload_of(CLAIM) | {"new": bytes(MAX_RECORD_BYTES)}), "size"),
        (bytes(MAX_RECORD_BYTES + 1), "size"),
        (sign_claim(SELF, CLAIM) + b"\0", "shape"),
    ],
)
def test_a_record_of_the_wrong_shape_is_refused(data: bytes, kind: str) -> None:
    assert refused(data) == kind


def test_a_second_spelling_of_the_same_record_is_refused() -> None:
    kind, payload, signature = unpack(sign_claim(SELF, CLAIM))  # type: ignore[misc]
    spelled_long = b"\x93\xcc\x01" + pack(payload) + pack(signature)
    assert unpack(spelled_long) == [kind, payload, signature]
    assert refused(spelled_long) == "shape"


def test_a_signature_of_one_kind_does_not_serve_for_another() -> None:
    payload = pack(payload_of(CLAIM))
    assert refused(pack([1, payload, SELF.sign("record/2", payload)])) == "signature"
    assert refused(pack([1, payload, SELF.sign("receipt", payload)])) == "signature"
    payload = pack(payload_of(VERDICT))
    for context in ("record/1", "record/2", "vote", "draw"):
        assert refused(pack([3, payload, SELF.sign(context, payload)])) == "signature"


def test_the_caller_chooses_how_far_ahead_a_claim_may_expire() -> None:
    data = sign_claim(SELF, CLAIM)
    assert refused(data, max_ahead=29.0) == "too_far_ahead"
    assert refused(data, swarm=bytes(32)) == "foreign_swarm"
    assert refused(data, now=NOW + 30.0) == "expired"
    assert read(sign_accusation(SELF, ACCUSATION), max_ahead=1.0) == ACCUSATION


def test_only_rule_abiding_records_of_its_own_does_an_identity_sign() -> None:
    with pytest.raises(ValueError, match="cannot sign"):
        sign_claim(OTHER, CLAIM)
    with pytest.raises(ValueError, match="cannot sign"):
        sign_accusation(OTHER, ACCUSATION)
    with pytest.raises(ValueError, match="stage"):
        sign_claim(SELF, dataclasses.replace(CLAIM, stage=128))
    with pytest.raises(ValueError, match="own writer"):
        sign_accusation(SELF, dataclasses.replace(ACCUSATION, accused=SELF.peer_id))
    with pytest.raises(ValueError, match="cannot sign"):
        sign_verdict(OTHER, VERDICT)
    with pytest.raises(ValueError, match="juror twice"):
        sign_verdict(SELF, dataclasses.replace(VERDICT, votes=voted(JURORS[0], JURORS[0])))
    with pytest.raises(ValueError, match="votes"):
        sign_verdict(SELF, dataclasses.replace(VERDICT, votes=voted(*JURORS)))


def test_whole_numbers_are_written_as_floats_where_floats_belong() -> None:
    assert read(sign_claim(SELF, dataclasses.replace(CLAIM, capacity=2))).capacity == 2.0  # type: ignore[union-attr]


def test_the_largest_claim_fits() -> None:
    names = [f"/dns4/{'.'.join([letter * 62] * 4)}/udp/65535/quic-v1/p2p/{SELF.peer_id}" for letter in "abcdefgh"]
    largest = dataclasses.replace(
        CLAIM,
        stage=127,
        addresses=tuple(names),
        state=NodeState.BOOTSTRAPPING,
        step=2**40,
        active_from=2**40,
        generation=2**63 - 1,
        sequence=2**63 - 1,
        label="\U0001f300" * 40,
        agent="\U0001f300" * 40,
        drill="\U0001f300" * 40,
    )
    assert len(sign_claim(SELF, largest)) <= MAX_RECORD_BYTES
    assert read(sign_claim(SELF, largest)) == largest


def test_the_largest_verdict_fits() -> None:
    largest = dataclasses.replace(
        VERDICT,
        accused_stage=127,
        reason="\U0001f300" * 40,
        step=2**40,
        votes=voted(*JURORS[:MAX_VOTES]),
    )
    assert len(sign_verdict(SELF, largest)) <= MAX_RECORD_BYTES
    assert read(sign_verdict(SELF, largest)) == largest


def test_keys_follow_from_swarm_stage_and_accused_and_the_subkey_is_the_writer() -> None:
    assert record_key(CLAIM) == claim_key(SWARM.hex(), 1) == f"sentinel/{SWARM.hex()}/claim/1"
    assert record_key(ACCUSATION) == accusation_key(SWARM.hex(), OTHER.peer_id)
    assert record_key(VERDICT) == verdict_key(SWARM.hex(), OTHER.peer_id)
    assert record_key(VERDICT) == f"sentinel/{SWARM.hex()}/verdict/{OTHER.peer_id}"
    assert record_subkey(CLAIM) == record_subkey(ACCUSATION) == record_subkey(VERDICT) == SELF.peer_id


def test_a_later_process_or_a_later_renewal_supersedes() -> None:
    renewed = dataclasses.replace(CLAIM, sequence=4)
    restarted = dataclasses.replace(CLAIM, generation=CLAIM.generation + 1, sequence=0)
    assert supersedes(renewed, CLAIM)
    assert supersedes(restarted, renewed)
    assert not supersedes(CLAIM, CLAIM)
    assert not supersedes(renewed, restarted)
    assert not supersedes(dataclasses.replace(restarted, peer=OTHER.peer_id), CLAIM)


def test_the_bytes_of_a_claim_never_change() -> None:
    assert sign_claim(SELF, CLAIM).hex() == GOLDEN_CLAIM
    assert read(bytes.fromhex(GOLDEN_CLAIM)) == CLAIM


def test_the_bytes_of_a_verdict_never_change() -> None:
    assert sign_verdict(SELF, VERDICT).hex() == GOLDEN_VERDICT
    assert read(bytes.fromhex(GOLDEN_VERDICT)) == VERDICT
