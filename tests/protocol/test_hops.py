"""Hops and signed tokens prove exactly one thing; change any part of it and they prove nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import fields
from protocol.errors import MessageError
from protocol.hops import body_digest, check_tokens, open_hop, read_hop, sign_hop, sign_tokens, sketch_key
from protocol.identity import Identity
from protocol.messages import Hop
from protocol.packing import pack, unpack

SELF, OTHER = Identity(bytes(range(32))), Identity(bytes(range(1, 33)))
SWARM, FOREIGN = bytes(32), bytes(31) + b"\1"
SOURCE = body_digest((b"input",))
SKETCH = b"\0\0\x80\x3f" * 4
ABOUT: dict[str, Any] = {"stage": 1, "step": 9, "microbatch": 4, "direction": "activation"}


def signed(**changes: Any) -> bytes:
    values = {**ABOUT, "digest": body_digest((b"body",)), "source": SOURCE, "sketch": SKETCH, **changes}
    return sign_hop(SELF, SWARM, **values)


def opened(data: bytes, swarm: bytes = SWARM, **changes: Any) -> Hop:
    return open_hop(data, swarm, **{**ABOUT, "sketch_bytes": len(SKETCH), **changes})


def refused(data: bytes, swarm: bytes = SWARM, **changes: Any) -> str:
    with pytest.raises(MessageError) as caught:
        opened(data, swarm, **changes)
    assert caught.value.kind == "sketch"
    return str(caught.value)


def test_a_hop_says_who_sent_what() -> None:
    hop = opened(signed())
    assert (hop.peer, hop.digest, hop.source, hop.sketch) == (SELF.peer_id, body_digest((b"body",)), SOURCE, SKETCH)
    assert (hop.stage, hop.step, hop.microbatch, hop.direction) == (1, 9, 4, "activation")


@pytest.mark.parametrize(
    "change", [{"stage": 2}, {"step": 10}, {"step": 8}, {"microbatch": 5}, {"direction": "gradient"}], ids=str
)
def test_a_hop_about_something_else_is_refused(change: dict[str, Any]) -> None:
    assert "is about" in refused(signed(**change))
    assert "is about" in refused(signed(), **change)


@pytest.mark.parametrize(
    "change",
    [
        {"peer": OTHER.peer_id},
        {"peer": "not a peer id"},
        {"digest": bytes(32)},
        {"source": bytes(32)},
        {"source": b""},
        {"digest": SOURCE, "source": body_digest((b"body",))},
        {"sketch": SKETCH[::-1]},
        {"signature": bytes(64)},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_hop_whose_content_was_changed_is_refused(change: dict[str, Any]) -> None:
    hop = replace(opened(signed()), **change)
    assert "not signed" in refused(pack(fields.encode(hop)))


def test_whoever_received_nothing_names_no_source() -> None:
    assert opened(signed(source=b"")).source == b""


@pytest.mark.parametrize("name", ["stage", "step", "microbatch", "direction"])
def test_a_hop_moved_to_another_place_is_refused_even_if_the_place_fits(name: str) -> None:
    changed = {"direction": "gradient"}.get(name, 3)
    moved = replace(opened(signed()), **{name: changed})
    assert "not signed" in refused(pack(fields.encode(moved)), **{name: changed})


def test_a_hop_of_another_swarm_is_refused() -> None:
    assert "not signed" in refused(signed(), FOREIGN)


def test_a_sketch_of_another_size_is_refused() -> None:
    assert "sketch has 20 bytes" in refused(signed(sketch=SKETCH + b"\0\0\0\0"))
    assert "sketch has 0 bytes" in refused(signed(sketch=b""))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        pack([1, 2]),
        pack("text"),
        b"\x81\x01\x02",
        b"\x81\xc4\x01a\x02",
        pack({}),
        pack({"peer": 1}),
        signed()[:-1],
        signed() + b"\0",
    ],
    ids=ascii,
)
def test_what_is_not_a_hop_is_refused(data: bytes) -> None:
    refused(data)


@given(st.integers(0, len(signed()) - 1), st.integers(1, 255))
def test_a_hop_with_a_changed_byte_is_refused_or_unchanged(position: int, flip: int) -> None:
    original = signed()
    data = bytearray(original)
    data[position] ^= flip
    try:
        hop = opened(bytes(data))
    except MessageError as error:
        assert error.kind == "sketch"
        return
    assert fields.encode(hop) == unpack(original)  # another spelling of the same hop


@given(st.binary(max_size=300))
def test_arbitrary_bytes_raise_nothing_but_message_errors(data: bytes) -> None:
    refused(data)


def test_a_hop_can_be_read_without_knowing_what_it_is_about() -> None:
    assert read_hop(signed(), SWARM, sketch_bytes=len(SKETCH)) == opened(signed())
    for data, swarm in ((signed(), FOREIGN), (signed()[:-1], SWARM), (signed(sketch=b""), SWARM)):
        with pytest.raises(MessageError) as caught:
            read_hop(data, swarm, sketch_bytes=len(SKETCH))
        assert caught.value.kind == "sketch"


def test_tokens_are_bound_to_origin_swarm_step_microbatch_and_content() -> None:
    signature = sign_tokens(SELF, SWARM, step=9, microbatch=4, tokens=b"tokens")

    def proven(
        *,
        peer: str = SELF.peer_id,
        swarm: bytes = SWARM,
        step: int = 9,
        microbatch: int = 4,
        tokens: bytes = b"tokens",
    ) -> bool:
        return check_tokens(peer, swarm, signature, step=step, microbatch=microbatch, tokens=tokens)

    assert proven()
    assert not proven(peer=OTHER.peer_id)
    assert not proven(swarm=FOREIGN)
    assert not proven(step=8)
    assert not proven(microbatch=5)
    assert not proven(tokens=b"tokenz")


def test_a_digest_does_not_depend_on_the_cuts_between_buffers() -> None:
    assert body_digest((b"ab", memoryview(b"c"))) == body_digest((bytearray(b"abc"),)) != body_digest(())


def test_the_sketch_key_differs_by_swarm_and_step() -> None:
    keys = {sketch_key(swarm, step) for swarm in (SWARM, FOREIGN) for step in (0, 1, 2**40)}
    assert len(keys) == 6 and all(len(key) == 32 for key in keys)
