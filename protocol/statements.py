"""Reading a packed, signed statement that travels inside of a message."""

from __future__ import annotations

from protocol import fields
from protocol.errors import MessageError
from protocol.packing import unpack


def open_statement(of: type[fields.Message], data: bytes, kind: str) -> fields.Message:
    """Decode a statement; its signature is the caller's to check.

    Raises:
        MessageError: of this kind; it is not what it should be.
    """
    name = of.__name__.lower()
    try:
        values = unpack(data)
    except ValueError:
        raise MessageError(f"a {name} is not msgpack", kind=kind) from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise MessageError(f"a {name} is not a map", kind=kind)
    try:
        return fields.decode(of, values)
    except MessageError as error:
        raise MessageError(str(error), kind=kind) from None
