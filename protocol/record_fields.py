"""Checks of single record fields: a value from a stranger in, the checked value out, or RecordError.

``kind`` of the error is "type" where the value has the wrong type, and "range" where it is not allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping

from protocol.errors import AddressError, RecordError
from protocol.identity import is_peer_id
from protocol.invite import parse_multiaddr
from protocol.packing import unpack

Check = Callable[[str, object], object]
"""Takes the field's name and its value."""

MAX_ADDRESSES = 8
"""Enough for TCP, WebSocket and QUIC on a private and a public address of both families."""


def whole(low: int, high: int) -> Check:
    """A whole number in [low, high]; a bool is none."""

    def check(name: str, value: object) -> int:
        if type(value) is not int:
            raise _wrong_type(name, "a whole number")
        if not low <= value <= high:
            raise _out_of_range(name, f"from {low} to {high}")
        return value

    return check


def boolean(name: str, value: object) -> bool:
    """True or false."""
    if type(value) is not bool:
        raise _wrong_type(name, "true or false")
    return value


def positive_number(high: float) -> Check:
    """A finite float in (0, high]."""

    def check(name: str, value: object) -> float:
        if type(value) is not float:
            raise _wrong_type(name, "a float")
        if not math.isfinite(value) or not 0.0 < value <= high:
            raise _out_of_range(name, f"above 0 and at most {high:g}")
        return value

    return check


def sized_bytes(*sizes: int) -> Check:
    """Bytes of one of the given lengths."""

    def check(name: str, value: object) -> bytes:
        if type(value) is not bytes:
            raise _wrong_type(name, "bytes")
        if len(value) not in sizes:
            raise _out_of_range(name, f"of {' or '.join(map(str, sizes))} bytes")
        return value

    return check


def short_bytes(longest: int) -> Check:
    """Bytes of at most this length."""

    def check(name: str, value: object) -> bytes:
        if type(value) is not bytes:
            raise _wrong_type(name, "bytes")
        if len(value) > longest:
            raise _out_of_range(name, f"at most {longest} bytes")
        return value

    return check


def printable(shortest: int, longest: int) -> Check:
    """Text on one line, safe to show: no control characters and none that reorder a line."""

    def check(name: str, value: object) -> str:
        if not isinstance(value, str):
            raise _wrong_type(name, "text")
        if not shortest <= len(value) <= longest or not value.isprintable():
            raise _out_of_range(name, f"{shortest} to {longest} printable characters")
        return value

    return check


def one_of(values: Mapping[str, object]) -> Check:
    """One of a few words; gives what the word stands for."""

    def check(name: str, value: object) -> object:
        if not isinstance(value, str):
            raise _wrong_type(name, "text")
        if value not in values:
            raise _out_of_range(name, f"one of {', '.join(values)}")
        return values[value]

    return check


def check_peer(name: str, value: object) -> str:
    """A peer id."""
    if not isinstance(value, str):
        raise _wrong_type(name, "text")
    if not is_peer_id(value):
        raise _out_of_range(name, "an Ed25519 peer id")
    return value


def signed_by_peers(most: int, signature_bytes: int) -> Check:
    """One to ``most`` pairs of a peer id and its signature."""

    def check(name: str, value: object) -> tuple[tuple[str, bytes], ...]:
        if not isinstance(value, list | tuple) or not all(isinstance(e, list | tuple) and len(e) == 2 for e in value):
            raise _wrong_type(name, "a list of pairs")
        if not 1 <= len(value) <= most:
            raise _out_of_range(name, f"1 to {most} pairs")
        of_signature = sized_bytes(signature_bytes)
        pairs = []
        for peer, signature in value:
            checked = of_signature(name, signature)
            assert isinstance(checked, bytes)
            pairs.append((check_peer(name, peer), checked))
        return tuple(pairs)

    return check


def check_addresses(name: str, value: object) -> tuple[str, ...]:
    """At most eight dialable addresses, each in its one spelling."""
    if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
        raise _wrong_type(name, "a list of addresses")
    if len(value) > MAX_ADDRESSES:
        raise _out_of_range(name, f"at most {MAX_ADDRESSES} addresses")
    try:
        return tuple(parse_multiaddr(item).text for item in value)
    except AddressError as error:
        raise RecordError(f"the record field {name} holds a wrong address: {error}", kind="range") from None


def read_payload(
    payload: bytes, checks: Mapping[str, Check], what: str, *, optional: Collection[str] = ()
) -> dict[str, object]:
    """The checked fields of a signed msgpack map; unknown ones are left out. ``what`` is the word for errors.

    Raises:
        RecordError: kind "shape" if it is no such map or lacks a field, else as the check of the field says.
    """
    try:
        values = unpack(payload)
    except ValueError:
        raise RecordError(f"the payload of the {what} is not one msgpack value", kind="shape") from None
    if not isinstance(values, dict):
        raise RecordError(f"the payload of the {what} is not a map", kind="shape")
    if missing := [name for name in checks if name not in values and name not in optional]:
        raise RecordError(f"the {what} lacks the field {missing[0]}", kind="shape")
    return {name: check(name, values[name]) for name, check in checks.items() if name in values}


def _wrong_type(name: str, wanted: str) -> RecordError:
    return RecordError(f"the record field {name} has to be {wanted}", kind="type")


def _out_of_range(name: str, wanted: str) -> RecordError:
    return RecordError(f"the record field {name} has to be {wanted}", kind="range")
