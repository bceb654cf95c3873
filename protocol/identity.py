"""A node's Ed25519 key: its file, its peer id, signing and verifying.

The key file is the protobuf ``PrivateKey{type=Ed25519, data=seed || public key}`` (68 bytes) that p2pd reads,
so that one file gives the same peer id in go-libp2p, in py-libp2p and here. The file is made whole or not at
all, is readable by its owner alone, and is refused otherwise.

Every signature is bound to a context ("record/1", "receipt", ...), so that bytes signed for one purpose prove
nothing for another. The signed bytes are ``b"sentinel:" + context + b"\\0" + data``.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from protocol.errors import AddressError, IdentityError

SEED_BYTES = 32
PUBLIC_KEY_BYTES = 32
SIGNATURE_BYTES = 64

_FILE_PREFIX = b"\x08\x01\x12\x40"  # protobuf: field 1 (type) = 1 (Ed25519), field 2 (data) of 64 bytes
_FILE_BYTES = len(_FILE_PREFIX) + SEED_BYTES + PUBLIC_KEY_BYTES

_PEER_ID_PREFIX = b"\x00\x24\x08\x01\x12\x20"  # identity multihash (36 bytes) of a protobuf public key (32)
_PEER_ID_TEXT_BYTES = 52
"""38 bytes that begin so always take 52 base58 characters, and the text always begins with 12D3KooW."""

_SIGNING_DOMAIN = b"sentinel:"

MAX_CACHED_KEYS = 4096
"""Parsed public keys kept; above the number of live peers that one node talks to or reads records of."""

MAX_CACHED_VERDICTS = 2048
"""Answers of ``verify`` kept. Most are about statements of 2 KiB with a sketch, so that they take 4 MiB."""


class Identity:
    """An Ed25519 key pair. Immutable; its ``repr`` shows the peer id and never the seed."""

    __slots__ = ("_key", "_peer_id", "_public_key", "_seed")

    def __init__(self, seed: bytes) -> None:
        """Derive the pair from ``seed`` (32 secret bytes). Raises IdentityError for another length."""
        if len(seed) != SEED_BYTES:
            raise IdentityError(f"a seed has {SEED_BYTES} bytes, not {len(seed)}; make a new identity")
        self._seed = bytes(seed)
        self._key = Ed25519PrivateKey.from_private_bytes(self._seed)
        self._public_key = self._key.public_key().public_bytes_raw()
        self._peer_id = peer_id_of(self._public_key)

    @classmethod
    def generate(cls) -> Identity:
        """Make a new random identity in memory only."""
        return cls(secrets.token_bytes(SEED_BYTES))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Identity:
        """Read a key file.

        Raises IdentityError, with the remedy, when it is missing, unreadable, damaged or open to others.
        """
        return cls(_checked_seed(Path(path), _read_key_file(Path(path))))

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> Identity:
        """Make a new key file (mode 0600) and its folder (0700). Raises IdentityError if the file exists."""
        identity = cls.generate()
        identity.save(path)
        return identity

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key to a new file (mode 0600), in its folder (0700). Raises IdentityError if the file exists."""
        try:
            _write_key_file(Path(path), self.file_bytes())
        except OSError as error:
            # The path is looked at again, since mkdir raises FileExistsError too, where a parent is a file.
            if isinstance(error, FileExistsError) and os.path.lexists(path):
                raise IdentityError(f"{path} exists already; use it, or move it away to get a new identity") from None
            raise IdentityError(
                f"cannot write the key file {path} ({error.strerror}); choose a writable --state-dir"
            ) from error

    @classmethod
    def load_or_create(cls, path: str | os.PathLike[str]) -> Identity:
        """Read the key file, or make it when there is none. Raises IdentityError as load and create do."""
        if not os.path.lexists(path):
            try:
                return cls.create(path)
            except IdentityError:
                if not os.path.lexists(path):  # else: another process made it just now, and that one counts
                    raise
        return cls.load(path)

    @property
    def peer_id(self) -> str:
        """The libp2p peer id, in base58 (12D3KooW...)."""
        return self._peer_id

    @property
    def public_key(self) -> bytes:
        """The raw public key, 32 bytes."""
        return self._public_key

    @property
    def seed(self) -> bytes:
        """The secret seed, 32 bytes. For handing the key to another libp2p implementation; never log it."""
        return self._seed

    def file_bytes(self) -> bytes:
        """The content of the key file, 68 secret bytes."""
        return _FILE_PREFIX + self._seed + self._public_key

    def sign(self, context: str, data: bytes) -> bytes:
        """Sign ``data`` for the purpose ``context`` (no NUL characters). Returns 64 bytes."""
        return self._key.sign(_signed_bytes(context, data))

    def __repr__(self) -> str:
        return f"Identity({self._peer_id})"


def peer_id_of(public_key: bytes) -> str:
    """The peer id (base58) of a raw public key of 32 bytes."""
    if len(public_key) != PUBLIC_KEY_BYTES:
        raise ValueError(f"an Ed25519 public key has {PUBLIC_KEY_BYTES} bytes, not {len(public_key)}")
    return base58.b58encode(_PEER_ID_PREFIX + public_key).decode("ascii")


def public_key_of(peer_id: str) -> bytes:
    """The raw public key (32 bytes) inside a peer id. Raises AddressError for anything but an Ed25519 id."""
    # base58 takes quadratic time and forgives trailing whitespace: hence the length first, the way back last.
    if isinstance(peer_id, str) and len(peer_id) == _PEER_ID_TEXT_BYTES and peer_id.isascii():
        public_key = _decoded_key(peer_id)
        if public_key is not None:
            return public_key
    raise AddressError(
        f"{_short(peer_id)} is not a peer id, which begins with 12D3KooW and has {_PEER_ID_TEXT_BYTES}"
        " characters; copy it whole"
    )


@lru_cache(maxsize=MAX_CACHED_KEYS)
def _decoded_key(peer_id: str) -> bytes | None:
    """The public key inside ASCII text of the right length; None if it holds none. Each claim names its peer thrice."""
    with contextlib.suppress(ValueError):
        raw = base58.b58decode(peer_id)
        public_key = raw[len(_PEER_ID_PREFIX) :]
        if (
            raw.startswith(_PEER_ID_PREFIX)
            and len(public_key) == PUBLIC_KEY_BYTES
            and peer_id_of(public_key) == peer_id
        ):
            return public_key
    return None


def is_peer_id(text: object) -> bool:
    """Whether ``text`` is the peer id of an Ed25519 key. Never raises."""
    try:
        _parsed_key(text)
    except (AddressError, ValueError, TypeError):
        return False
    return True


def verify(peer_id: str, context: str, data: bytes, signature: bytes) -> bool:
    """Whether ``signature`` is the peer's over ``data`` for the purpose ``context``. Never raises."""
    try:
        return _verified(peer_id, _signed_bytes(context, data), bytes(memoryview(signature)))
    except (AddressError, ValueError, TypeError, AttributeError):
        return False


@lru_cache(maxsize=MAX_CACHED_VERDICTS)
def _verified(peer_id: str, signed: bytes, signature: bytes) -> bool:
    """The same answer for the same bytes: an audit looks again at what was checked when it arrived, and in a
    simulation several nodes of one process check one statement."""
    try:
        _parsed_key(peer_id).verify(signature, signed)
    except InvalidSignature:
        return False
    return True


@lru_cache(maxsize=MAX_CACHED_KEYS)
def _parsed_key(peer_id: str) -> Ed25519PublicKey:
    return Ed25519PublicKey.from_public_bytes(public_key_of(peer_id))


def _signed_bytes(context: str, data: bytes) -> bytes:
    if "\0" in context:
        raise ValueError("a signing context holds no NUL character, which ends it")
    return b"".join((_SIGNING_DOMAIN, context.encode("utf-8"), b"\0", data))


def _read_key_file(path: Path) -> bytes:
    """Read at most one byte more than a key file has; checks are made on the open file, not on the name."""
    try:
        # Non-blocking, since opening a named pipe would otherwise wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise IdentityError(
            f"no key file at {path}; `sentinel join` and `coordinate` make one, or name another --state-dir"
        ) from None
    except OSError as error:
        raise IdentityError(
            f"cannot read the key file {path} ({error.strerror}); make it a file that this user owns"
        ) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise IdentityError(f"{path} is not a regular file; move it away to get a new identity")
        if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise IdentityError(f"other users may read the key file {path}; run `chmod 600 {path}`")
        return os.read(descriptor, _FILE_BYTES + 1)
    except OSError as error:
        raise IdentityError(f"cannot read the key file {path} ({error.strerror}); check the disk") from error
    finally:
        os.close(descriptor)


def _checked_seed(path: Path, content: bytes) -> bytes:
    remedy = "restore it from a copy, or move it away to get a new identity"
    if len(content) != _FILE_BYTES or not content.startswith(_FILE_PREFIX):
        raise IdentityError(f"{path} is not an Ed25519 key file of {_FILE_BYTES} bytes; {remedy}")
    seed = content[len(_FILE_PREFIX) : len(_FILE_PREFIX) + SEED_BYTES]
    if Identity(seed).public_key != content[len(_FILE_PREFIX) + SEED_BYTES :]:
        raise IdentityError(f"the two halves of the key file {path} do not belong together; {remedy}")
    return seed


def _write_key_file(path: Path, content: bytes) -> None:
    """Put ``content`` at ``path`` whole or not at all. Raises FileExistsError rather than replace a file."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)  # whatever the umask took away
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        _publish(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
    _sync_folder(path.parent)


def _publish(temporary: Path, path: Path) -> None:
    """Give the finished file its name. A link fails if the name is taken, which a rename would not."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK, errno.ENOSYS):
            raise
        # A file system without hard links. The lock on the state folder keeps other nodes away meanwhile.
        if os.path.lexists(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
        os.rename(temporary, path)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _short(value: object) -> str:
    """A foreign value for a message: quoted, on one line, not longer than a line."""
    text = ascii(value[:64] if isinstance(value, str) else value)
    return text if len(text) <= 70 else text[:66] + "...'"
