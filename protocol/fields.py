"""Checked fields: turn the map of a message that a stranger sent into a frozen dataclass.

Each field of a message names its own check. Known fields are checked strictly, unknown
ones are ignored, so that a newer node can add a field without breaking an older one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, field, fields
from functools import cache
from typing import Any, ClassVar, Protocol, TypeVar

from protocol.errors import MessageError

Check = Callable[[object], object]


class DataclassInstance(Protocol):
    """Anything made by ``@dataclass``."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


Message = TypeVar("Message", bound=DataclassInstance)

MAX_STEP = 2**40


def _checked(check: Check, words: str, default: object = MISSING) -> Any:
    """A field with its check, and the check in words for whoever writes another implementation."""
    metadata = {"check": check, "words": words}
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, metadata=metadata)


def words_of(entry: Field[Any]) -> str:
    """What a field of a message may hold, in words."""
    return str(entry.metadata["words"])


def integer(low: int, high: int, *, default: object = MISSING) -> Any:
    """A whole number in [low, high]; a bool is not a number."""

    def check(value: object) -> object:
        if type(value) is not int or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return _checked(check, f"whole number, {low} to {high}", default)


def number(low: float = -math.inf, high: float = math.inf, *, default: object = MISSING) -> Any:
    """A finite number in [low, high]."""

    def check(value: object) -> object:
        if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:  # type: ignore[operator, arg-type]
            raise ValueError(f"must be a finite number from {low} to {high}")
        return float(value)  # type: ignore[arg-type]

    bounds = "" if (low, high) == (-math.inf, math.inf) else f", {low:g} to {high:g}"
    return _checked(check, f"finite number{bounds}", default)


def text(longest: int, *, default: object = MISSING) -> Any:
    """Printable text of at most ``longest`` characters."""

    def check(value: object) -> object:
        if not isinstance(value, str) or len(value) > longest or not value.isprintable():
            raise ValueError(f"must be printable text of at most {longest} characters")
        return value

    return _checked(check, f"printable text, at most {longest} characters", default)


def binary(*sizes: int, longest: int | None = None, default: object = MISSING) -> Any:
    """Bytes of one of the given sizes, or of at most ``longest``."""

    def check(value: object) -> object:
        if not isinstance(value, bytes):
            raise ValueError("must be bytes")
        if longest is None and len(value) not in sizes:
            raise ValueError(f"must be bytes of length {' or '.join(map(str, sizes))}")
        if longest is not None and len(value) > longest:
            raise ValueError(f"must be at most {longest} bytes")
        return value

    lengths = " or ".join(map(str, sizes)) if longest is None else f"at most {longest}"
    return _checked(check, f"{lengths} bytes", default)


def flag(*, default: object = MISSING) -> Any:
    """True or false."""

    def check(value: object) -> object:
        if not isinstance(value, bool):
            raise ValueError("must be true or false")
        return value

    return _checked(check, "true or false", default)


def sequence(item: Any, most: int, *, default: object = MISSING) -> Any:
    """A list of at most ``most`` items, each checked as the given field; arrives as a tuple."""
    check_item: Check = item.metadata["check"]

    def check(value: object) -> object:
        if not isinstance(value, list | tuple) or len(value) > most:
            raise ValueError(f"must be a list of at most {most} items")
        return tuple(check_item(entry) for entry in value)

    return _checked(check, f"list of at most {most}: {item.metadata['words']}", default)


def mapping(key: Any, value: Any, most: int, *, default: object = MISSING) -> Any:
    """Pairs of checked keys and values, sent as a list of pairs; arrives as a tuple of pairs."""
    check_key: Check = key.metadata["check"]
    check_value: Check = value.metadata["check"]

    def check(pairs: object) -> object:
        if not isinstance(pairs, list | tuple) or len(pairs) > most:
            raise ValueError(f"must be at most {most} pairs")
        checked = []
        for pair in pairs:
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise ValueError("must be pairs")
            checked.append((check_key(pair[0]), check_value(pair[1])))
        if len({entry[0] for entry in checked}) != len(checked):
            raise ValueError("names a key twice")
        return tuple(checked)

    pair = f"[{key.metadata['words']}; {value.metadata['words']}]"
    return _checked(check, f"list of at most {most} pairs {pair}, no key twice", default)


def optional(inner: Any) -> Any:
    """The given field, or nothing."""
    check_inner: Check = inner.metadata["check"]
    words = f"nil, or {inner.metadata['words']}"
    return _checked(lambda value: None if value is None else check_inner(value), words, None)


@cache
def _entries(kind: type[DataclassInstance]) -> tuple[tuple[str, Check, object], ...]:
    """Name, check and default of each field, looked up once: every message passes here."""
    return tuple((entry.name, entry.metadata["check"], entry.default) for entry in fields(kind))


def decode(kind: type[Message], head: Mapping[str, Any]) -> Message:
    """Build a message from a received map.

    Raises:
        MessageError: names the message and the field that is missing or wrong.
    """
    values: dict[str, object] = {}
    for name, check, default in _entries(kind):
        if name not in head:
            if default is MISSING:
                raise MessageError(f"{kind.__name__} lacks the field {name}")
            continue
        try:
            values[name] = check(head[name])
        except ValueError as error:
            raise MessageError(f"{kind.__name__}.{name} {error}") from None
    return kind(**values)


def encode(message: DataclassInstance) -> dict[str, Any]:
    """The map that ``decode`` reads back."""
    return {name: getattr(message, name) for name, _, _ in _entries(type(message))}
