"""Admissions: the coordinator's signed word on who may take part in an invited swarm, and what a node knows of them.

An admission is ``msgpack [payload, signature]``: the payload is a msgpack map, and the coordinator's signature covers
it in the context "admission". It admits a peer to a swarm until it expires, or revokes what was admitted before; of
two about one peer the one with the higher serial counts. Whoever has the manifest can check it. Time is an argument.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, fields
from enum import StrEnum

from protocol.errors import RecordError
from protocol.identity import SIGNATURE_BYTES, Identity, verify
from protocol.messages import MAX_ADMISSION_BYTES, MAX_SERIAL
from protocol.packing import pack, unpack
from protocol.record_fields import (
    Check,
    boolean,
    check_peer,
    positive_number,
    read_payload,
    sized_bytes,
    whole,
)
from protocol.records import Accusation, Claim, Record, Verdict

DAY_SECONDS = 86_400.0

MAX_ADMISSION_SECONDS = 366 * DAY_SECONDS
"""No admission is longer, so that a lost machine's one ends by itself, and a revocation need not be kept for ever."""

MAX_ISSUED_AHEAD_SECONDS = 60.0
"""How far ahead of this clock an admission may have been issued: as with claims, a clock a minute off still works."""

MAX_KNOWN = 4096
"""Admissions that a node keeps, as many as claims in its view; 2 MiB at most. Only the coordinator can fill it."""

_CONTEXT = "admission"


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """The coordinator's word on one peer.

    Attributes:
        swarm: the 32 bytes of the swarm id.
        peer: whom it is about.
        serial: grows with each one that the coordinator signs.
        issued, expires: Unix seconds.
        revoked: whether it takes back what was admitted; it is then kept until no earlier one can be valid.
    """

    swarm: bytes
    peer: str
    serial: int
    issued: float
    expires: float
    revoked: bool = False


_CHECKS: dict[str, Check] = {
    "swarm": sized_bytes(32),
    "peer": check_peer,
    "serial": whole(1, MAX_SERIAL),
    "issued": positive_number(1e12),
    "expires": positive_number(1e12),
    "revoked": boolean,
}


def sign_admission(coordinator: Identity, admission: Admission) -> bytes:
    """The signed bytes of an admission. Raises ValueError if it breaks a rule."""
    values = {field.name: getattr(admission, field.name) for field in fields(admission)}
    payload = pack(values | {"issued": float(admission.issued), "expires": float(admission.expires)})
    try:
        _read_payload(payload)
    except RecordError as error:
        raise ValueError(str(error)) from None
    return pack([payload, coordinator.sign(_CONTEXT, payload)])


def open_admission(data: bytes, *, swarm: bytes, coordinator: str, now: float) -> Admission:
    """Read and check an admission that anyone may have written. One that has expired still tells that it is over.

    swarm: the 32 bytes of our swarm id. coordinator: the peer id in its manifest. now: Unix seconds. Raises
    RecordError and nothing else; its ``kind`` is one of size, shape, type, range, foreign_swarm, too_far_ahead,
    signature.
    """
    payload, signature = _open_envelope(data)
    admission = _read_payload(payload)
    if admission.swarm != swarm:
        raise RecordError("the admission is to another swarm", kind="foreign_swarm")
    if admission.issued > now + MAX_ISSUED_AHEAD_SECONDS:
        message = f"the admission was issued {admission.issued - now:.0f} s from now; compare the clocks"
        raise RecordError(message, kind="too_far_ahead")
    if not verify(coordinator, _CONTEXT, payload, signature):
        raise RecordError("the admission is not signed by the swarm's coordinator", kind="signature")
    return admission


def peek_admission(data: bytes) -> Admission:
    """Read an admission without asking for which swarm it is, or who signed it. Raises RecordError as above."""
    return _read_payload(_open_envelope(data)[0])


class Standing(StrEnum):
    """What the coordinator says of a peer."""

    ADMITTED = "admitted"
    EXPIRED = "expired"
    REVOKED = "revoked"
    UNKNOWN = "unknown"


class Roll:
    """The newest admission of each peer that a node knows. The coordinator itself is always admitted."""

    def __init__(
        self,
        *,
        swarm: bytes,
        coordinator: str,
        on_news: Callable[[Admission], None] = lambda admission: None,
    ) -> None:
        """``on_news`` hears of each admission that replaces what was known of its peer."""
        self.swarm = swarm
        self.coordinator = coordinator
        self._on_news = on_news
        self._known: dict[str, tuple[Admission, bytes]] = {}
        self._digest = b""

    def __len__(self) -> int:
        return len(self._known)

    def open(self, data: bytes, now: float) -> Admission:
        """As ``open_admission``, for this swarm."""
        return open_admission(data, swarm=self.swarm, coordinator=self.coordinator, now=now)

    def take(self, data: bytes, now: float) -> bool:
        """Keep an admission if it is the newest of its peer; true if it was news. Raises RecordError as ``open``."""
        admission = self.open(data, now)
        known = self._known.get(admission.peer)
        if known is not None and (known[0].serial, known[1]) >= (admission.serial, data):
            return False
        if known is None and len(self._known) >= MAX_KNOWN and not self._make_room(admission):
            return False
        self._known[admission.peer] = admission, data
        self._digest = b""
        self._on_news(admission)
        return True

    def _make_room(self, new: Admission) -> bool:
        """Drop what ends first, so that all nodes keep the same ones; false if that is the new one itself."""
        first = min((known for known, _ in self._known.values()), key=_end)
        if _end(new) <= _end(first):
            return False
        del self._known[first.peer]
        return True

    def peers(self) -> list[str]:
        """Whom something is known of."""
        return list(self._known)

    def of(self, peer: str) -> Admission | None:
        """The newest admission of a peer."""
        known = self._known.get(peer)
        return None if known is None else known[0]

    def signed(self, peer: str) -> bytes:
        """Its signed bytes; empty if there is none."""
        known = self._known.get(peer)
        return b"" if known is None else known[1]

    def standing(self, peer: str, now: float) -> Standing:
        """What the coordinator says of a peer, as far as this node knows."""
        if peer == self.coordinator:
            return Standing.ADMITTED
        known = self.of(peer)
        if known is None:
            return Standing.UNKNOWN
        if known.revoked:
            return Standing.REVOKED
        return Standing.EXPIRED if known.expires <= now else Standing.ADMITTED

    def admits(self, peer: str, now: float) -> bool:
        """Whether a peer may take part."""
        return self.standing(peer, now) is Standing.ADMITTED

    def check(self, record: Record, now: float) -> None:
        """Refuse a record whose writer is not admitted. A claim brings its writer's admission with it.

        Raises:
            RecordError: kind "not_admitted", or what is wrong with the admission in a claim.
        """
        match record:
            case Claim(peer=writer):
                if record.admission and record.admission != self.signed(writer):
                    self._take_own(record, now)
            case Accusation(accuser=writer) | Verdict(writer=writer):
                pass
        standing = self.standing(writer, now)
        if standing is not Standing.ADMITTED:
            raise RecordError(f"the record's writer is not admitted to this swarm ({standing})", kind="not_admitted")

    def _take_own(self, claim: Claim, now: float) -> None:
        if self.open(claim.admission, now).peer != claim.peer:
            raise RecordError("the claim carries the admission of another peer", kind="not_admitted")
        self.take(claim.admission, now)

    def all_signed(self) -> list[bytes]:
        """Everything known, by serial."""
        return [data for _, data in sorted(self._known.values(), key=lambda known: known[0].serial)]

    def after(self, serial: int, most: int) -> tuple[tuple[bytes, ...], bool]:
        """The first ``most`` with a higher serial, in order, and whether there are more."""
        later = [known for known in self._known.values() if known[0].serial > serial]
        later.sort(key=lambda known: known[0].serial)
        return tuple(data for _, data in later[:most]), len(later) > most

    def digest(self) -> bytes:
        """SHA-256 of everything known: two nodes with the same one have nothing to tell each other."""
        if not self._digest:
            self._digest = hashlib.sha256(b"".join(self.all_signed())).digest()
        return self._digest


def _end(admission: Admission) -> tuple[float, int, str]:
    return admission.expires, admission.serial, admission.peer


def _open_envelope(data: bytes) -> tuple[bytes, bytes]:
    if not isinstance(data, bytes):
        raise RecordError("the admission is not a string of bytes", kind="shape")
    if len(data) > MAX_ADMISSION_BYTES:
        raise RecordError(f"the admission has {len(data)} bytes; {MAX_ADMISSION_BYTES} are allowed", kind="size")
    try:
        envelope = unpack(data)
    except ValueError:
        raise RecordError("the admission is not one msgpack value", kind="shape") from None
    if not isinstance(envelope, list) or len(envelope) != 2 or not all(type(part) is bytes for part in envelope):
        raise RecordError("the admission is not a list of payload and signature", kind="shape")
    payload, signature = envelope
    if len(signature) != SIGNATURE_BYTES:
        raise RecordError(f"the signature has {len(signature)} bytes, not {SIGNATURE_BYTES}", kind="shape")
    if pack(envelope) != data:  # the signature does not cover the envelope, so it has one spelling only
        raise RecordError("the admission is not in its shortest spelling", kind="shape")
    return payload, signature


def _read_payload(payload: bytes) -> Admission:
    admission = Admission(**read_payload(payload, _CHECKS, "admission"))  # type: ignore[arg-type]  # each value has passed its check
    if not 0.0 < admission.expires - admission.issued <= MAX_ADMISSION_SECONDS:
        raise RecordError("the admission lasts no time, or more than a year", kind="range")
    return admission
