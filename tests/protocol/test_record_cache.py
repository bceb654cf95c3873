"""The cache of checked records: the same answers as without it, whatever the clock says."""

from __future__ import annotations

import pytest

from protocol import record_cache
from protocol.errors import RecordError
from protocol.identity import Identity
from protocol.record_cache import check_record
from protocol.records import Accusation, sign_accusation

NOW = 1_700_000_000.0
SWARM = bytes(range(32))


@pytest.fixture
def data() -> bytes:
    writer, accused = Identity.generate(), Identity.generate()
    return sign_accusation(
        writer,
        Accusation(
            swarm=SWARM,
            accuser=writer.peer_id,
            accuser_stage=1,
            accused=accused.peer_id,
            accused_stage=2,
            kind="strikes",
            reason="l2",
            step=3,
            evidence=bytes(32),
            expires=NOW + 600.0,
        ),
    )


def test_a_record_is_checked_once_and_is_the_same_afterwards(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    first = check_record(data, swarm=SWARM, now=NOW)
    monkeypatch.setattr(record_cache, "parse_record", None)
    assert check_record(bytes(bytearray(data)), swarm=SWARM, now=NOW + 1.0) is first


def test_a_known_record_still_expires(data: bytes) -> None:
    check_record(data, swarm=SWARM, now=NOW)
    with pytest.raises(RecordError) as caught:
        check_record(data, swarm=SWARM, now=NOW + 600.0)
    assert caught.value.kind == "expired"


def test_a_clock_that_goes_back_sees_a_record_too_far_ahead(data: bytes) -> None:
    check_record(data, swarm=SWARM, now=NOW)
    with pytest.raises(RecordError) as caught:
        check_record(data, swarm=SWARM, now=NOW - 30 * 86_400.0)
    assert caught.value.kind == "too_far_ahead"


def test_another_swarm_and_other_bytes_are_refused(data: bytes) -> None:
    check_record(data, swarm=SWARM, now=NOW)
    with pytest.raises(RecordError) as caught:
        check_record(data, swarm=bytes(32), now=NOW)
    assert caught.value.kind == "foreign_swarm"
    with pytest.raises(RecordError):
        check_record(data[:-1] + bytes([data[-1] ^ 1]), swarm=SWARM, now=NOW)


def test_it_does_not_grow_without_end(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_cache, "MAX_CHECKED", 2)
    for swarm in range(5):
        with pytest.raises(RecordError):
            check_record(data, swarm=bytes([swarm] * 32), now=NOW)  # refused ones are not kept
    check_record(data, swarm=SWARM, now=NOW)
    assert len(record_cache._checked) <= 2
