"""Receipts, draws and votes prove exactly one thing; change any part of it and they prove nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import fields
from protocol.errors import MessageError
from protocol.fields import MAX_STEP
from protocol.hops import NO_SIGNATURE, body_digest, check_tokens, read_hop, sign_hop, sign_tokens
from protocol.identity import Identity, verify
from protocol.messages import MAX_MICROBATCHES, MAX_RECEIPT_BYTES, Receipt
from protocol.packing import pack, unpack
from protocol.receipts import (
    check_draw,
    check_input_receipt,
    check_receipt,
    check_vote,
    open_receipt,
    sign_draw,
    sign_receipt,
    sign_vote,
    statement_digest,
)

SELF, OTHER = Identity(bytes(range(32))), Identity(bytes(range(1, 33)))
SWARM, FOREIGN = bytes(32), bytes(31) + b"\1"
RECEIVED, SENT, GOT, RETURNED, PARAMETERS = (
    body_digest((word,)) for word in (b"in", b"on", b"back", b"up", b"weights")
)
DIGESTS = ("received", "sent", "got", "returned", "parameters")
FACTS: dict[str, Any] = {
    "stage": 1,
    "step": 9,
    "microbatch": 4,
    "received": RECEIVED,
    "sent": SENT,
    "got": GOT,
    "returned": RETURNED,
    "parameters": PARAMETERS,
}
KNOWN: dict[str, Any] = {
    "peer": SELF.peer_id,
    "stage": 1,
    "step": 9,
    "microbatch": 4,
    "received": RECEIVED,
    "returned": RETURNED,
}
BELOW: dict[str, Any] = {**FACTS, "stage": 2, "received": SENT, "sent": b"", "got": b"", "returned": GOT}
GOLDEN = (
    "8aa3676f74c4203c482346f375027677fa8a0d6830a32714d4f13f9e94c2d9e215e0ac205ad4e5aa6d6963726f6261746368"
    "04aa706172616d6574657273c4209a129038d9a00aed0cf6a7ea059ca50a813449061ab87848cf1a13eafdf33b2ca4706565"
    "72d934313244334b6f6f574134586f70314a6154334d487877594d6b436570597376346950566f704d5877437a3569485964"
    "4266655342a87265636569766564c420582967534d0f909d196b97f9e6921342777aea87b46fa52df165389db1fb8ccfa872"
    "657475726e6564c42075a288c0d6898c5f7b054590845978a82a3ad79fcce3d43ff68a7501e5a91ee9a473656e74c420b8d3"
    "1e852725afb1e26d53bab6095b2bff1749c9275be13ed1c05a56ed31ec09a97369676e6174757265c4404638801d33607456"
    "3f894b3a6dd4d3e08c173673d6ceaf9561dcf488ea203c056f0708c8667a39ee63efb42841e7a0de46f5fc907163dc386f3b"
    "9147d84f3e02a5737461676501a47374657009"
)


def signed(identity: Identity = SELF, swarm: bytes = SWARM, **changes: Any) -> bytes:
    return sign_receipt(identity, swarm, **{**FACTS, **changes})


def below(identity: Identity = OTHER, swarm: bytes = SWARM, **changes: Any) -> bytes:
    """The receipt that the stage below gave to the writer of ``signed()``."""
    return sign_receipt(identity, swarm, **{**BELOW, **changes})


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(MessageError) as caught:
        read()
    assert type(caught.value) is MessageError
    assert caught.value.kind == "receipt"
    assert "\n" not in str(caught.value)
    return str(caught.value)


def altered(data: bytes, **changes: Any) -> bytes:
    """The same receipt with its old signature and other content."""
    return pack({**fields.encode(open_receipt(data, SWARM)), **changes})


# receipts -----------------------------------------------------------------------------------


def test_a_receipt_says_what_was_made_of_a_microbatch() -> None:
    receipt = check_receipt(signed(), SWARM, **KNOWN)
    assert {name: getattr(receipt, name) for name in FACTS} == FACTS
    assert receipt.peer == SELF.peer_id
    assert open_receipt(signed(), SWARM) == receipt


def test_the_bytes_of_a_receipt_never_change() -> None:
    assert signed().hex() == GOLDEN
    assert len(signed()) <= MAX_RECEIPT_BYTES


def test_the_largest_receipt_fits_into_its_message() -> None:
    assert len(signed(stage=1024, step=MAX_STEP, microbatch=MAX_MICROBATCHES)) <= MAX_RECEIPT_BYTES


CHANGES = [
    {"peer": OTHER.peer_id},
    {"stage": 2},
    {"step": 10},
    {"microbatch": 5},
    *({name: bytes(32)} for name in DIGESTS),
    {"signature": NO_SIGNATURE},
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_a_receipt_whose_content_was_changed_is_refused(change: dict[str, Any]) -> None:
    assert "not signed" in refused(lambda: open_receipt(altered(signed(), **change), SWARM))


@pytest.mark.parametrize("name", DIGESTS)
def test_two_digests_of_a_receipt_cannot_be_exchanged(name: str) -> None:
    for other in DIGESTS:
        if other != name:
            swapped = altered(signed(), **{name: FACTS[other], other: FACTS[name]})
            assert "not signed" in refused(lambda swapped=swapped: open_receipt(swapped, SWARM))  # type: ignore[misc]


def test_a_receipt_of_another_swarm_is_refused() -> None:
    assert "not signed" in refused(lambda: open_receipt(signed(), FOREIGN))
    assert "not signed" in refused(lambda: open_receipt(signed(swarm=FOREIGN), SWARM))


@pytest.mark.parametrize("name", ["sent", "got"])
def test_a_receipt_that_tells_half_is_refused(name: str) -> None:
    half: dict[str, Any] = {name: b""}
    assert "half" in refused(lambda: open_receipt(signed(**half), SWARM))


def test_the_last_stage_has_nothing_to_tell_of_the_next() -> None:
    assert open_receipt(signed(sent=b"", got=b""), SWARM).sent == b""


@pytest.mark.parametrize(
    "change",
    [
        {"peer": OTHER.peer_id},
        {"stage": 2},
        {"step": 10},
        {"step": 8},
        {"microbatch": 5},
        {"received": bytes(32)},
        {"returned": bytes(32)},
    ],
    ids=str,
)
def test_a_receipt_about_something_else_than_what_was_sent_and_returned_is_refused(change: dict[str, Any]) -> None:
    assert "does not fit" in refused(lambda: check_receipt(signed(), SWARM, **{**KNOWN, **change}))
    honest = {name: value for name, value in change.items() if name != "peer"}
    if honest:
        assert "does not fit" in refused(lambda: check_receipt(signed(**honest), SWARM, **KNOWN))
    else:
        assert "does not fit" in refused(lambda: check_receipt(signed(OTHER), SWARM, **KNOWN))


def test_a_receipt_with_its_digests_the_wrong_way_round_is_refused() -> None:
    turned = signed(received=RETURNED, returned=RECEIVED)
    assert "does not fit" in refused(lambda: check_receipt(turned, SWARM, **KNOWN))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pack([1, 2]),
        pack("text"),
        b"\x81\x01\x02",  # a map whose key is a number
        b"\x81\xc4\x01a\x02",  # ... or bytes
        pack({}),
        pack({"peer": 1}),
        signed()[:-1],
        signed() + b"\0",
        altered(signed(), received=bytes(31)),
        altered(signed(), sent=bytes(33)),
        altered(signed(), parameters="x" * 32),
        altered(signed(), step=True),
        altered(signed(), step=-1),
        altered(signed(), step=2**63),
        altered(signed(), stage=1025),
        altered(signed(), microbatch=1.0),
        altered(signed(), peer="not a peer id"),
        altered(signed(), peer="x" * 65),
        altered(signed(), signature=bytes(63)),
        b"\x81" * 3000,
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=lambda data: ascii(data)[:60],
)
def test_what_is_not_a_receipt_is_refused(data: bytes) -> None:
    refused(lambda: open_receipt(data, SWARM))
    refused(lambda: check_receipt(data, SWARM, **KNOWN))
    refused(lambda: check_input_receipt(data, SWARM, of=open_receipt(signed(), SWARM)))


@given(st.binary(max_size=MAX_RECEIPT_BYTES))
def test_arbitrary_bytes_raise_nothing_but_message_errors(data: bytes) -> None:
    refused(lambda: open_receipt(data, SWARM))


@given(st.integers(0, len(signed()) - 1))
def test_a_receipt_cut_short_is_refused(length: int) -> None:
    refused(lambda: open_receipt(signed()[:length], SWARM))


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
    max_leaves=6,
)


@given(junk, st.sampled_from([*FACTS, "peer", "signature"]))
def test_any_msgpack_is_refused_and_so_is_any_value_of_a_field(value: Any, name: str) -> None:
    refused(lambda: open_receipt(msgpack.packb(value), SWARM))
    values = {**fields.encode(open_receipt(signed(), SWARM)), name: value}
    if name in ("stage", "step", "microbatch") and type(value) is int and value == FACTS[name]:
        return  # what it says anyway
    refused(lambda: open_receipt(msgpack.packb(values), SWARM))


@given(st.integers(0, len(signed()) - 1), st.integers(1, 255))
def test_a_receipt_with_a_changed_byte_is_refused_or_unchanged(position: int, flip: int) -> None:
    data = bytearray(signed())
    data[position] ^= flip
    try:
        receipt = open_receipt(bytes(data), SWARM)
    except MessageError as error:
        assert error.kind == "receipt"
        return
    assert fields.encode(receipt) == unpack(signed())  # another spelling of the same receipt


def test_unknown_fields_of_a_receipt_are_ignored() -> None:
    assert open_receipt(altered(signed(), added=[1]), SWARM) == open_receipt(signed(), SWARM)


# the receipt of the stage below ----------------------------------------------------------------


def of() -> Receipt:
    return open_receipt(signed(), SWARM)


def test_receipts_of_neighbouring_stages_fit_together() -> None:
    read = check_input_receipt(below(), SWARM, of=of())
    assert (read.peer, read.stage, read.received, read.returned) == (OTHER.peer_id, 2, SENT, GOT)
    middle = check_input_receipt(below(sent=RECEIVED, got=RETURNED), SWARM, of=of())
    assert middle.sent == RECEIVED  # where the pipeline goes on is no matter of these two


@pytest.mark.parametrize(
    "change",
    [
        {"stage": 1},
        {"stage": 3},
        {"step": 8},
        {"step": 10},
        {"microbatch": 5},
        {"received": RECEIVED},
        {"returned": RETURNED},
        {"received": GOT, "returned": SENT},
    ],
    ids=str,
)
def test_receipts_that_do_not_fit_together_are_refused(change: dict[str, Any]) -> None:
    assert "do not fit together" in refused(lambda: check_input_receipt(below(**change), SWARM, of=of()))


def test_nobody_is_his_own_stage_below() -> None:
    assert "do not fit together" in refused(lambda: check_input_receipt(below(SELF), SWARM, of=of()))


def test_a_receipt_without_that_of_the_stage_below_is_refused() -> None:
    assert "without" in refused(lambda: check_input_receipt(None, SWARM, of=of()))
    assert "not signed" in refused(lambda: check_input_receipt(below(swarm=FOREIGN), SWARM, of=of()))


def test_a_receipt_of_the_last_stage_has_none_below() -> None:
    last = replace(of(), sent=b"", got=b"")
    refused(lambda: check_input_receipt(below(), SWARM, of=last))


# draws and votes -------------------------------------------------------------------------------

SUBJECT, ELSE = statement_digest(b"receipt"), statement_digest(b"another")
VOTE: dict[str, Any] = {"subject": SUBJECT, "accused": OTHER.peer_id, "guilty": True}


def test_a_statement_has_a_digest_of_its_own() -> None:
    assert len(SUBJECT) == 32 and SUBJECT != ELSE == statement_digest(b"another")


def test_a_draw_is_of_one_peer_swarm_and_statement() -> None:
    draw = sign_draw(SELF, SWARM, SUBJECT)
    assert check_draw(SELF.peer_id, SWARM, draw, SUBJECT)
    assert draw == sign_draw(SELF, SWARM, SUBJECT)  # whoever could choose among several would choose the jury
    assert not check_draw(OTHER.peer_id, SWARM, draw, SUBJECT)
    assert not check_draw("nobody", SWARM, draw, SUBJECT)
    assert not check_draw(SELF.peer_id, FOREIGN, draw, SUBJECT)
    assert not check_draw(SELF.peer_id, SWARM, draw, ELSE)
    assert not check_draw(SELF.peer_id, SWARM, b"", SUBJECT)
    assert not check_draw(SELF.peer_id, SWARM, draw[::-1], SUBJECT)


@pytest.mark.parametrize("guilty", [True, False])
def test_a_vote_is_of_one_juror_swarm_statement_and_accused(guilty: bool) -> None:
    values = {**VOTE, "guilty": guilty}
    vote = sign_vote(SELF, SWARM, **values)
    assert check_vote(SELF.peer_id, SWARM, vote, **values)
    assert not check_vote(OTHER.peer_id, SWARM, vote, **values)
    assert not check_vote("nobody", SWARM, vote, **values)
    assert not check_vote(SELF.peer_id, FOREIGN, vote, **values)
    assert not check_vote(SELF.peer_id, SWARM, vote, **{**values, "subject": ELSE})
    assert not check_vote(SELF.peer_id, SWARM, vote, **{**values, "accused": SELF.peer_id})
    assert not check_vote(SELF.peer_id, SWARM, bytes(64), **values)
    assert not check_vote(SELF.peer_id, SWARM, b"", **values)


def test_a_vote_for_guilty_is_no_vote_for_honest_and_the_other_way_round() -> None:
    for said in (True, False):
        vote = sign_vote(SELF, SWARM, **{**VOTE, "guilty": said})
        assert not check_vote(SELF.peer_id, SWARM, vote, **{**VOTE, "guilty": not said})


@given(st.binary(max_size=80))
def test_arbitrary_bytes_are_neither_draw_nor_vote(data: bytes) -> None:
    assert not check_draw(SELF.peer_id, SWARM, data, SUBJECT)
    assert not check_vote(SELF.peer_id, SWARM, data, **VOTE)


# one purpose, one signature ----------------------------------------------------------------------


def test_a_signature_for_one_purpose_proves_nothing_for_another() -> None:
    receipt = open_receipt(signed(), SWARM).signature
    draw, vote = sign_draw(SELF, SWARM, SUBJECT), sign_vote(SELF, SWARM, **VOTE)
    tokens = sign_tokens(SELF, SWARM, step=9, microbatch=4, tokens=b"tokens")
    signatures = {"receipt": receipt, "draw": draw, "vote": vote, "tokens": tokens}
    for name, signature in signatures.items():
        assert check_draw(SELF.peer_id, SWARM, signature, SUBJECT) is (name == "draw")
        assert check_vote(SELF.peer_id, SWARM, signature, **VOTE) is (name == "vote")
        proves_tokens = check_tokens(SELF.peer_id, SWARM, signature, step=9, microbatch=4, tokens=b"tokens")
        assert proves_tokens is (name == "tokens")
        data = altered(signed(), signature=signature)
        if name == "receipt":
            assert open_receipt(data, SWARM).signature == signature
        else:
            refused(lambda data=data: open_receipt(data, SWARM))  # type: ignore[misc]


def test_the_same_bytes_signed_in_another_context_are_no_receipt_draw_or_vote() -> None:
    values = fields.encode(open_receipt(signed(), SWARM))
    del values["signature"]
    content = pack([SWARM, *values.values()])
    assert verify(SELF.peer_id, "receipt", content, open_receipt(signed(), SWARM).signature)
    for context in ("hop", "vote", "draw", "tokens", "record/1", "record/3"):
        forged = altered(signed(), signature=SELF.sign(context, content))
        refused(lambda forged=forged: open_receipt(forged, SWARM))  # type: ignore[misc]
        if context != "draw":
            assert not check_draw(SELF.peer_id, SWARM, SELF.sign(context, pack([SWARM, SUBJECT])), SUBJECT)
        if context != "vote":
            vote = SELF.sign(context, pack([SWARM, SUBJECT, OTHER.peer_id, True]))
            assert not check_vote(SELF.peer_id, SWARM, vote, **VOTE)


def test_a_receipt_is_no_hop_and_a_hop_is_no_receipt() -> None:
    hop = sign_hop(
        SELF, SWARM, stage=1, step=9, microbatch=4, direction="activation", digest=RECEIVED, sketch=bytes(16)
    )
    assert read_hop(hop, SWARM, sketch_bytes=16).digest == RECEIVED
    refused(lambda: open_receipt(hop, SWARM))
    with pytest.raises(MessageError) as caught:
        read_hop(signed(), SWARM, sketch_bytes=16)
    assert caught.value.kind == "sketch"
