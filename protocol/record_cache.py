"""Records that were checked before: the same bytes need no second look at their signature.

A node reads the same claims from the DHT again and again, gets them by push as well, and in a simulation
shares its process with many others that get them too. Whether bytes are a well-formed and signed record
does not depend on who asks; only the clock does, and that is looked at each time.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import Lock

from protocol.records import Record, parse_record

MAX_CHECKED = 8192
"""Records kept, at most 4 KiB each; the least recently used goes first."""

_checked: OrderedDict[tuple[bytes, bytes], tuple[Record, float]] = OrderedDict()
_lock = Lock()


def check_record(data: bytes, *, swarm: bytes, now: float) -> Record:
    """As ``parse_record``: the record in ``data``. swarm: 32 bytes of the swarm id. now: Unix seconds.

    Raises:
        RecordError: as ``parse_record`` does.
    """
    key = (swarm, data)
    with _lock:
        known = _checked.get(key)
        # What was no more than so far ahead of an earlier clock is not further ahead of a later one.
        if known is not None and known[1] <= now < known[0].expires:
            _checked.move_to_end(key)
            return known[0]
    record = parse_record(data, swarm=swarm, now=now)
    with _lock:
        _checked[key] = (record, now)
        while len(_checked) > MAX_CHECKED:
            _checked.popitem(last=False)
    return record
