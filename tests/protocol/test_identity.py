"""The key file, the peer id, and signatures that hold for one purpose only."""

from __future__ import annotations

import multiprocessing
import os
import stat
from pathlib import Path

import base58
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol import identity as identity_module
from protocol.errors import AddressError, IdentityError
from protocol.identity import Identity, is_peer_id, peer_id_of, public_key_of, verify

SEED = bytes(range(32))
PEER_ID = "12D3KooWA4Xop1JaT3MHxwYMkCepYsv4iPVopMXwCz5iHYdBfeSB"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "identity.key"
    Identity.create(path)
    return path


def test_the_peer_id_of_a_seed_never_changes() -> None:
    assert Identity(SEED).peer_id == PEER_ID


def test_the_peer_id_is_the_identity_multihash_of_the_public_key() -> None:
    identity = Identity(SEED)
    assert base58.b58decode(identity.peer_id) == bytes.fromhex("002408011220") + identity.public_key
    assert public_key_of(identity.peer_id) == identity.public_key


@pytest.mark.parametrize("public_key", [bytes(32), b"\xff" * 32])
def test_every_peer_id_has_52_characters(public_key: bytes) -> None:
    peer_id = peer_id_of(public_key)
    assert len(peer_id) == 52
    assert peer_id.startswith("12D3KooW")
    assert public_key_of(peer_id) == public_key


def test_a_created_file_is_private_and_loads_to_the_same_peer(tmp_path: Path) -> None:
    path = tmp_path / "state" / "identity.key"
    created = Identity.load_or_create(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.read_bytes() == b"\x08\x01\x12\x40" + created.seed + created.public_key
    assert [entry.name for entry in path.parent.iterdir()] == ["identity.key"]
    assert Identity.load_or_create(path).peer_id == Identity.load(path).peer_id == created.peer_id


def test_a_created_file_is_private_whatever_the_umask(tmp_path: Path) -> None:
    old = os.umask(0o777)
    try:
        Identity.create(tmp_path / "identity.key")
    finally:
        os.umask(old)
    Identity.load(tmp_path / "identity.key")


def test_create_never_replaces_a_file(key_file: Path) -> None:
    before = key_file.read_bytes()
    with pytest.raises(IdentityError, match="exists already"):
        Identity.create(key_file)
    assert key_file.read_bytes() == before


def test_a_file_system_without_hard_links_works_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(source: object, target: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(identity_module.os, "link", no_link)
    path = tmp_path / "identity.key"
    created = Identity.create(path)
    assert Identity.load(path).peer_id == created.peer_id
    with pytest.raises(IdentityError, match="exists already"):
        Identity.create(path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["identity.key"]


def test_whoever_loses_the_race_to_create_takes_the_winner_s_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "identity.key"
    real_link = os.link

    def link_second(source: str, target: str) -> None:
        monkeypatch.setattr(identity_module.os, "link", real_link)
        Identity.create(path)
        real_link(source, target)

    monkeypatch.setattr(identity_module.os, "link", link_second)
    assert Identity.load_or_create(path).peer_id == Identity.load(path).peer_id


def test_processes_that_start_together_get_one_key(tmp_path: Path) -> None:
    path = str(tmp_path / "state" / "identity.key")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert len(set(pool.map(_peer_id_at, [path] * 4))) == 1


def _peer_id_at(path: str) -> str:
    return Identity.load_or_create(path).peer_id


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(IdentityError, match="no key file at"):
        Identity.load(tmp_path / "identity.key")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601])
def test_a_file_open_to_others_is_refused_with_the_remedy(key_file: Path, mode: int) -> None:
    key_file.chmod(mode)
    with pytest.raises(IdentityError, match=f"chmod 600 {key_file}"):
        Identity.load(key_file)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x08\x01\x12\x40" + SEED,
        b"\x08\x01\x12\x40" + bytes(65),
        b"\x08\x00\x12\x40" + bytes(64),
        bytes(100_000),
    ],
)
def test_a_damaged_file_is_refused(key_file: Path, content: bytes) -> None:
    key_file.write_bytes(content)
    with pytest.raises(IdentityError, match="not an Ed25519 key file of 68 bytes"):
        Identity.load(key_file)


def test_halves_that_do_not_belong_together_are_refused(key_file: Path) -> None:
    content = bytearray(key_file.read_bytes())
    content[67] ^= 1
    key_file.write_bytes(content)
    with pytest.raises(IdentityError, match="do not belong together"):
        Identity.load(key_file)


def test_a_folder_and_a_pipe_are_refused_at_once(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for name in (".", "pipe"):
        with pytest.raises(IdentityError, match="not a regular file"):
            Identity.load(tmp_path / name)


def test_a_dangling_link_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "identity.key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(IdentityError):
        Identity.load_or_create(tmp_path / "identity.key")
    assert not (tmp_path / "elsewhere").exists()


def test_a_folder_that_cannot_be_made_is_an_identity_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(IdentityError, match="--state-dir"):
        Identity.load_or_create(tmp_path / "file" / "identity.key")


def test_errors_are_one_line(key_file: Path) -> None:
    key_file.write_bytes(b"")
    with pytest.raises(IdentityError) as caught:
        Identity.load(key_file)
    assert "\n" not in str(caught.value)


def test_the_seed_shows_nowhere() -> None:
    identity = Identity(SEED)
    assert repr(identity) == f"Identity({PEER_ID})"
    assert SEED.hex() not in f"{identity} {identity!r}"


def test_a_seed_of_another_length_is_refused() -> None:
    with pytest.raises(IdentityError):
        Identity(bytes(31))
    with pytest.raises(ValueError):
        peer_id_of(bytes(31))


def test_a_signature_holds_for_its_data_context_and_peer_only() -> None:
    identity = Identity(SEED)
    signature = identity.sign("receipt", b"data")
    assert len(signature) == 64
    assert verify(identity.peer_id, "receipt", b"data", signature)
    assert not verify(identity.peer_id, "receipt", b"date", signature)
    assert not verify(identity.peer_id, "record/1", b"data", signature)
    assert not verify(Identity.generate().peer_id, "receipt", b"data", signature)


def test_context_and_data_cannot_be_shifted_into_each_other() -> None:
    identity = Identity(SEED)
    assert not verify(identity.peer_id, "a", b"\0b", identity.sign("a\u0001", b"b"))
    with pytest.raises(ValueError, match="NUL"):
        identity.sign("a\0b", b"")
    assert not verify(identity.peer_id, "a\0b", b"", bytes(64))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "12D3KooW",
        PEER_ID[:-1],
        PEER_ID + "1",
        PEER_ID + " ",
        PEER_ID[:-1] + " ",
        PEER_ID[:-1] + "\n",
        PEER_ID[:-1] + "0",
        PEER_ID.lower(),
        "1" * 52,
        "z" * 52,
        "Q" + PEER_ID[1:],
        "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N",
        "\u00e9" * 52,
        "x" * 1_000_000,
    ],
)
def test_what_is_not_a_peer_id_is_refused(text: str) -> None:
    assert not is_peer_id(text)
    assert not verify(text, "receipt", b"", bytes(64))
    with pytest.raises(AddressError, match="not a peer id") as caught:
        public_key_of(text)
    assert len(str(caught.value)) < 200
    assert "\n" not in str(caught.value)


anything = st.one_of(
    st.none(),
    st.integers(),
    st.text(),
    st.binary(),
    st.lists(st.integers()),
    st.just(PEER_ID),
    st.just("a\ud800"),
)


@given(peer_id=anything, context=anything, data=anything, signature=anything)
def test_verify_never_raises(peer_id: str, context: str, data: bytes, signature: bytes) -> None:
    assert verify(peer_id, context, data, signature) is False


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=200))
def test_every_seed_signs_what_its_peer_id_verifies(seed: bytes, data: bytes) -> None:
    identity = Identity(seed)
    assert verify(identity.peer_id, "receipt", data, identity.sign("receipt", data))


def test_the_cache_of_keys_is_bounded() -> None:
    assert identity_module._parsed_key.cache_info().maxsize == identity_module.MAX_CACHED_KEYS
