"""What a node holds against its peers comes back after a restart, or is kept aside and reported."""

from __future__ import annotations

import base64
import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node.state_folder import StateFolder
from node.verdicts import (
    FORMAT,
    MAX_RECORDS,
    MAX_STANDINGS,
    MAX_VERDICTS_BYTES,
    ForeignVerdictsError,
    VerdictsError,
    load_verdicts,
    parse_verdicts,
    restore_verdicts,
    save_verdicts,
)
from protocol.identity import Identity
from protocol.messages import MAX_RECORD_BYTES
from verifier.config import CheckerConfig
from verifier.ledger import MAX_COUNT, Ledger, PeerEvent, PeerState, SavedStanding
from verifier.verdicts import Reason

SWARM, OTHER_SWARM = "ab" * 32, "cd" * 32
PEERS = [Identity(bytes([number]) * 32).peer_id for number in range(6)]

numbers = st.floats(0.0, 1e300)
states = st.sampled_from(PeerState)


@st.composite
def standings(draw: st.DrawFn, peer: str) -> SavedStanding:
    """Any standing that a ledger could have."""
    state = draw(states)
    offender = state not in (PeerState.PROBATION, PeerState.TRUSTED)
    return SavedStanding(
        peer=peer,
        state=state,
        trust=draw(st.floats(0.0, 1.0)),
        strikes=draw(numbers) if offender else 0.0,
        credits=draw(st.integers(0, MAX_COUNT)),
        reason=draw(st.sampled_from(Reason)) if offender else draw(st.none() | st.sampled_from(Reason)),
        until=draw(st.floats(1e-300, 1e300)) if state is PeerState.EJECTED else None,
        quarantined_at=draw(st.integers(0, MAX_COUNT)),
    )


saves = st.permutations(PEERS).flatmap(lambda order: st.tuples(*(standings(peer) for peer in order)))
records = st.lists(st.binary(min_size=1, max_size=200), max_size=5)


@pytest.fixture
def folder(tmp_path: Path) -> StateFolder:
    """An unlocked folder that exists."""
    return StateFolder(tmp_path)


def standing(**changes: Any) -> SavedStanding:
    values: dict[str, Any] = {
        "peer": PEERS[0],
        "state": PeerState.QUARANTINED,
        "trust": 0.25,
        "strikes": 3.0,
        "credits": 7,
        "reason": Reason.NORM,
        "quarantined_at": 12,
    }
    return SavedStanding(**(values | changes))


def document(**changes: Any) -> dict[str, Any]:
    """What the file holds for one standing and one record."""
    entry = {
        "peer": PEERS[0],
        "state": "quarantined",
        "trust": 0.25,
        "strikes": 3.0,
        "credits": 7,
        "reason": "norm",
        "until": None,
        "quarantined_at": 12,
    }
    whole = {"format": FORMAT, "swarm": SWARM, "standings": [entry], "records": [base64.b64encode(b"record").decode()]}
    return whole | changes


def with_entry(**changes: Any) -> dict[str, Any]:
    whole = document()
    whole["standings"] = [whole["standings"][0] | changes]
    return whole


def names(folder: StateFolder) -> list[str]:
    return sorted(path.name for path in folder.path.iterdir())


# there and back ------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(saved=saves, signed=records)
def test_whatever_is_saved_comes_back(
    folder: StateFolder, saved: tuple[SavedStanding, ...], signed: list[bytes]
) -> None:
    save_verdicts(folder, SWARM, saved, signed)
    assert load_verdicts(folder, SWARM) == (saved, tuple(signed))
    assert names(folder) == ["verdicts.json"]


def test_the_file_is_what_the_documentation_of_its_format_says(folder: StateFolder) -> None:
    save_verdicts(folder, SWARM, [standing()], [b"record"])
    assert json.loads(folder.verdicts_path.read_bytes()) == document()


def test_a_first_start_knows_nothing(folder: StateFolder, caplog: pytest.LogCaptureFixture) -> None:
    assert load_verdicts(folder, SWARM) == ((), ())
    assert caplog.text == ""
    assert names(folder) == []


def test_verdicts_of_another_swarm_are_ignored_and_left_alone(
    folder: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    save_verdicts(folder, OTHER_SWARM, [standing()], [b"record"])
    assert load_verdicts(folder, SWARM) == ((), ())
    assert "another swarm" in caplog.text
    assert names(folder) == ["verdicts.json"]
    with pytest.raises(ForeignVerdictsError):
        parse_verdicts(folder.verdicts_path.read_bytes(), SWARM)


def test_the_most_that_is_saved_can_be_read_again(folder: StateFolder) -> None:
    longest = 2.2250738585072014e-308
    peers = [Identity(number.to_bytes(32, "big")).peer_id for number in range(MAX_STANDINGS + 1)]
    saved = [
        standing(
            peer=peer,
            trust=longest,
            strikes=longest,
            credits=MAX_COUNT,
            reason=Reason.WASSERSTEIN,
            quarantined_at=MAX_COUNT,
        )
        for peer in peers
    ]
    signed = [number.to_bytes(MAX_RECORD_BYTES, "big") for number in range(MAX_RECORDS + 1)]
    save_verdicts(folder, SWARM, saved, signed)
    assert folder.verdicts_path.stat().st_size <= MAX_VERDICTS_BYTES
    assert load_verdicts(folder, SWARM) == (tuple(saved[1:]), tuple(signed[1:]))


def test_records_that_could_not_be_read_again_are_left_out(folder: StateFolder) -> None:
    save_verdicts(folder, SWARM, [], [b"", bytes(MAX_RECORD_BYTES + 1), b"record"])
    assert load_verdicts(folder, SWARM) == ((), (b"record",))


def test_a_full_disk_leaves_the_old_verdicts(folder: StateFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    save_verdicts(folder, SWARM, [standing()], [])

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        save_verdicts(folder, SWARM, [], [])
    assert load_verdicts(folder, SWARM) == ((standing(),), ())


# damaged -------------------------------------------------------------------------------

DAMAGED: list[object] = [
    b"",
    b"{",
    b"null",
    b"[]",
    b"{}",
    b"\xff\xfe\x00",
    b"[" * 100_000,
    b"9" * 5000,
    b" " * (MAX_VERDICTS_BYTES + 1),
    document(format=FORMAT + 1),
    document(format=None),
    document(extra=1),
    {name: value for name, value in document().items() if name != "records"},
    document(swarm=7),
    document(swarm=None),
    *(document(standings=value) for value in (None, {}, "text", [None], [[]], [{}], document()["standings"] * 2)),
    document(standings=[{}] * (MAX_STANDINGS + 1)),
    *(document(records=value) for value in (None, {}, "text", [None], [7], [""], ["?"], ["YQ"], ["YQ==\n"], ["é"])),
    document(records=["YQ=="] * (MAX_RECORDS + 1)),
    document(records=[base64.b64encode(bytes(MAX_RECORD_BYTES + 1)).decode()]),
    document(records=["A" * 10_000]),
    with_entry(extra=1),
    *(with_entry(peer=value) for value in (None, 7, [], "", "peer", "\ud800", PEERS[0] + "x")),
    *(with_entry(state=value) for value in (None, 7, [], {}, "", "QUARANTINED", "unknown", "ejected", "probation")),
    *(with_entry(reason=value) for value in (None, 7, [], "unknown")),
    *(with_entry(trust=value) for value in (None, True, "0.5", [], -0.1, 1.1, math.nan, math.inf, 10**400)),
    *(with_entry(strikes=value) for value in (None, False, "3", -1, math.nan, -math.inf, 10**400)),
    *(with_entry(credits=value) for value in (None, True, 1.0, "1", -1, MAX_COUNT + 1)),
    *(with_entry(quarantined_at=value) for value in (None, True, 1.0, -1, MAX_COUNT + 1)),
    *(with_entry(until=value) for value in (5.0, "5", True)),
    *(with_entry(state="ejected", until=value) for value in (None, 0, -5.0, True, "5", math.nan, 10**400)),
]


def content(damaged: object) -> bytes:
    return damaged if isinstance(damaged, bytes) else json.dumps(damaged).encode()


@pytest.mark.parametrize("damaged", DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_kept_aside_and_reported(
    folder: StateFolder, damaged: object, caplog: pytest.LogCaptureFixture
) -> None:
    folder.verdicts_path.write_bytes(content(damaged))
    assert load_verdicts(folder, SWARM) == ((), ())
    assert names(folder) == ["verdicts.json.damaged"]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "damaged" in record.getMessage()
    assert "\n" not in record.getMessage()
    assert len(record.getMessage()) < 600


@pytest.mark.parametrize("found", [document(), with_entry(strikes=3, trust=0, until=None)])
def test_what_the_damaged_ones_were_made_from_is_whole(found: object) -> None:
    saved, signed = parse_verdicts(content(found), SWARM)
    assert (saved[0].peer, signed) == (PEERS[0], (b"record",))
    assert isinstance(saved[0].strikes, float)


@given(
    data=st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["format", "swarm", "a"]), inner),
        max_leaves=6,
    ).map(lambda value: json.dumps(value).encode())
)
def test_whatever_is_in_the_file_the_error_is_typed(data: bytes) -> None:
    with pytest.raises(VerdictsError):
        parse_verdicts(data, SWARM)


@given(
    changes=st.dictionaries(
        st.sampled_from(sorted(document()["standings"][0])),
        st.none() | st.booleans() | st.floats() | st.integers() | st.sampled_from([*PeerState, *Reason, *PEERS]),
    )
)
def test_an_entry_is_understood_whole_or_refused(changes: dict[str, Any]) -> None:
    found = content(with_entry(**changes))
    try:
        saved, _ = parse_verdicts(found, SWARM)
    except VerdictsError:
        return
    assert len(saved) == 1


def test_only_the_latest_damaged_file_is_kept(folder: StateFolder) -> None:
    for text in ("first", "second"):
        folder.verdicts_path.write_text(text)
        load_verdicts(folder, SWARM)
    assert (folder.path / "verdicts.json.damaged").read_text() == "second"
    save_verdicts(folder, SWARM, [], [])
    assert names(folder) == ["verdicts.json", "verdicts.json.damaged"]


def test_a_damaged_file_that_cannot_be_moved_stops_nobody(
    folder: StateFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.verdicts_path.write_text("{")

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "replace", refuse)
    assert load_verdicts(folder, SWARM) == ((), ())
    assert "stay there" in caplog.text


def test_a_file_that_cannot_be_read_is_reported_and_stays(
    folder: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    folder.verdicts_path.mkdir()
    assert load_verdicts(folder, SWARM) == ((), ())
    assert "cannot be read" in caplog.text
    assert names(folder) == ["verdicts.json"]


# into the ledger -----------------------------------------------------------------------


def test_a_restarted_node_still_bars_whom_it_barred(folder: StateFolder) -> None:
    book = Ledger(CheckerConfig())
    book.condemn(PEERS[0], Reason.AUDIT, step=3)
    book.eject(PEERS[1], reason=Reason.STRIKES, until=100.0, now=0.0)
    book.eject(PEERS[2], reason=Reason.STRIKES, until=900.0, now=0.0)
    save_verdicts(folder, SWARM, book.export(), [b"record"])
    after = Ledger(CheckerConfig())
    changes, signed = restore_verdicts(folder, SWARM, after, now=500.0)
    assert [(change.peer, change.event) for change in changes] == [(PEERS[1], PeerEvent.EXPIRED)]
    assert signed == (b"record",)
    assert [after.allows(peer) for peer in PEERS[:4]] == [False, True, False, True]


def test_nothing_saved_leaves_the_ledger_as_it_is(folder: StateFolder) -> None:
    book = Ledger(CheckerConfig())
    book.credit(PEERS[0], step=0)
    assert restore_verdicts(folder, SWARM, book, now=0.0) == ((), ())
    assert book.peers() == (PEERS[0],)


def test_standings_that_contradict_the_swarms_limit_are_set_aside(
    folder: StateFolder, caplog: pytest.LogCaptureFixture
) -> None:
    save_verdicts(folder, SWARM, [standing(strikes=0.5)], [b"record"])
    book = Ledger(CheckerConfig())
    assert restore_verdicts(folder, SWARM, book, now=0.0) == ((), ())
    assert book.peers() == ()
    assert names(folder) == ["verdicts.json.damaged"]
    assert "strikes do not make" in caplog.text
