"""The admissions in a state folder: nothing is lost, nothing damaged does harm, and it does not grow for ever."""

from __future__ import annotations

import base64
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from node import admission_file
from node.admission_file import AdmissionFile
from protocol.admissions import Admission, peek_admission, sign_admission
from protocol.errors import StateFolderError
from protocol.identity import Identity

COORDINATOR = Identity(bytes(range(32)))
SWARM = bytes(range(32))
PEERS = [Identity(bytes([number]) * 32).peer_id for number in range(1, 9)]


def signed(peer: int = 0, serial: int = 1, swarm: bytes = SWARM) -> bytes:
    admission = Admission(swarm=swarm, peer=PEERS[peer], serial=serial, issued=1000.0 + serial, expires=9000.0)
    return sign_admission(COORDINATOR, admission)


def test_what_is_added_is_read_once_and_in_order(tmp_path: Path) -> None:
    file = AdmissionFile(tmp_path)
    assert file.read() == [] and not file.changed()
    file.add([signed(0), signed(1)])
    file.add([signed(1), signed(2)])
    assert file.read() == [signed(0), signed(1), signed(2)]
    assert file.path.stat().st_mode & 0o777 == 0o600


def test_a_change_is_noticed_once_also_by_another_process(tmp_path: Path) -> None:
    reader, writer = AdmissionFile(tmp_path), AdmissionFile(tmp_path)
    writer.add([signed(0)])
    assert reader.changed() and not reader.changed()
    writer.add([signed(0)])  # nothing new
    assert not reader.changed()
    writer.add([signed(1)])
    assert reader.changed()


def test_lines_that_are_cut_short_or_no_admissions_are_passed_over(tmp_path: Path) -> None:
    file = AdmissionFile(tmp_path)
    whole = base64.b64encode(signed(0))
    file.path.write_bytes(b"\n".join([b"?!", b"", whole, base64.b64encode(bytes(2000)), b"\xff\xfe", whole[:101]]))
    file.add([signed(1)])
    assert [data for data in file.read() if data in (signed(0), signed(1))] == [signed(0), signed(1)]


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    wanted = [signed(peer, serial) for peer in range(8) for serial in range(1, 6)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda data: AdmissionFile(tmp_path).add([data]), wanted))
    assert sorted(AdmissionFile(tmp_path).read()) == sorted(wanted)


def test_a_file_that_has_grown_keeps_the_newest_of_each_swarm_and_peer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission_file, "MAX_LINES", 12)
    file = AdmissionFile(tmp_path)
    for serial in range(1, 7):
        file.add([signed(0, serial), signed(1, serial)])
    assert len(file.read()) == 12
    file.add([signed(0, 1, bytes(32)), signed(2, 9)])
    kept = [(found.swarm, found.peer, found.serial) for found in map(peek_admission, file.read())]
    assert set(kept) == {
        *((SWARM, PEERS[peer], 6) for peer in (0, 1)),
        (bytes(32), PEERS[0], 1),
        (SWARM, PEERS[2], 9),
    }


def test_a_folder_that_cannot_be_used_is_told_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(StateFolderError, match="name another by --state-dir"):
        AdmissionFile(tmp_path / "missing").add([signed(0)])
    (tmp_path / "admissions").mkdir()
    with pytest.raises(StateFolderError, match="cannot read"):
        AdmissionFile(tmp_path).read()
