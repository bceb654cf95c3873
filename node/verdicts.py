"""What a node knows against its peers, kept in its state folder, so that a restart is no amnesty.

``verdicts.json`` holds the standings of the ledger and the signed records (accusations and the like) behind the
ejections. A standing is this node's own note and is believed as it is; a record carries its writer's signature,
so whoever loads one checks it again, as if it had just come from the DHT.

The file belongs to one swarm. One of another swarm is ignored, and replaced when there is something to save. A
damaged one is kept under another name and reported; it never stops a node.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Final, NoReturn

from node.state_folder import StateFolder
from protocol.errors import LocalError
from protocol.identity import is_peer_id
from protocol.messages import MAX_RECORD_BYTES
from verifier.ledger import Ledger, PeerState, SavedStanding, StandingChanged
from verifier.verdicts import Reason

log = logging.getLogger(__name__)

VERDICTS_NAME: Final = "verdicts.json"

FORMAT: Final = 1
"""Written into the file; another number is a file of another version of this software."""

MAX_STANDINGS: Final = 4096
"""Peers in the file: as many as a ledger remembers unless told otherwise."""

MAX_RECORDS: Final = 1024
"""Signed records in the file: 64 ejections, each with the words of 16 neighbours."""

MAX_VERDICTS_BYTES: Final = 8 * 1024 * 1024
"""Largest file that is read: MAX_STANDINGS of 400 bytes and MAX_RECORDS of MAX_RECORD_BYTES in base64 fit."""

_FIELDS: Final = frozenset(field.name for field in fields(SavedStanding))


class VerdictsError(LocalError):
    """The saved verdicts cannot be understood."""


class ForeignVerdictsError(VerdictsError):
    """The saved verdicts belong to another swarm."""


def save_verdicts(
    folder: StateFolder, swarm_hex: str, saved: Sequence[SavedStanding], records: Iterable[bytes]
) -> None:
    """Write the file, whole or not at all. Of too many standings or records the last ones are kept.

    Pass only records that an ejection still rests on: a crowd of others would push those out. A record that is
    longer than any record may be is left out, since it could not be read again.

    Raises:
        OSError: the disk is full, or the folder is gone.
    """
    kept = [record for record in records if 0 < len(record) <= MAX_RECORD_BYTES][-MAX_RECORDS:]
    standings = [{name: getattr(each, name) for name in sorted(_FIELDS)} for each in saved[-MAX_STANDINGS:]]
    folder.write_json(
        VERDICTS_NAME,
        {
            "format": FORMAT,
            "swarm": swarm_hex,
            "standings": standings,
            "records": [base64.b64encode(record).decode("ascii") for record in kept],
        },
    )


def load_verdicts(folder: StateFolder, swarm_hex: str) -> tuple[tuple[SavedStanding, ...], tuple[bytes, ...]]:
    """The saved standings, in their order, and the records, whose signatures are not checked here.

    Both are empty if there is no file, or it belongs to another swarm, or it is damaged. Raises nothing.
    """
    try:
        return parse_verdicts(folder.read(VERDICTS_NAME, at_most=MAX_VERDICTS_BYTES), swarm_hex)
    except FileNotFoundError:
        pass
    except ForeignVerdictsError as error:
        log.info("%s: %s", folder.verdicts_path, error)
    except OSError as error:
        log.warning("the verdicts %s cannot be read: %s; this node knows nothing of its peers", VERDICTS_NAME, error)
    except (VerdictsError, ValueError) as error:
        set_verdicts_aside(folder, str(error))
    return (), ()


def restore_verdicts(
    folder: StateFolder, swarm_hex: str, ledger: Ledger, *, now: float
) -> tuple[tuple[StandingChanged, ...], tuple[bytes, ...]]:
    """Load the file into a ledger. Returns the ejections that ran out meanwhile, and the records.

    ``now`` is in Unix seconds. What the ledger refuses is treated like a damaged file. Raises nothing.
    """
    saved, records = load_verdicts(folder, swarm_hex)
    if not saved:
        return (), records
    try:
        return ledger.restore(saved, now=now), records
    except ValueError as error:
        set_verdicts_aside(folder, str(error))
        return (), ()


def set_verdicts_aside(folder: StateFolder, why: str) -> None:
    """Keep a damaged file for whoever wants to look into it, out of the way of the next one."""
    try:
        aside = folder.set_aside(VERDICTS_NAME)
    except OSError as error:
        log.warning("the verdicts %s are damaged (%s) and stay there: %s", folder.verdicts_path, why, error)
    else:
        log.warning("the verdicts were damaged (%s) and are kept as %s; this node starts without them", why, aside)


def parse_verdicts(data: bytes, swarm_hex: str) -> tuple[tuple[SavedStanding, ...], tuple[bytes, ...]]:
    """Read the content of the file.

    Raises:
        ForeignVerdictsError: it belongs to another swarm.
        VerdictsError: it is not what ``save_verdicts`` writes.
    """
    try:
        found = json.loads(data, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise VerdictsError(f"they are not JSON: {error}") from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise VerdictsError(f"they are not in format {FORMAT}, the one that this version reads")
    if found.keys() != {"format", "swarm", "standings", "records"}:
        raise VerdictsError("they hold other things than a swarm, standings and records")
    if not isinstance(found["swarm"], str):
        raise VerdictsError("they name no swarm")
    if found["swarm"] != swarm_hex:
        raise ForeignVerdictsError("these are the verdicts of another swarm, they are not used")
    standings = _list(found["standings"], "standings", MAX_STANDINGS)
    records = _list(found["records"], "records", MAX_RECORDS)
    saved = tuple(_standing(entry) for entry in standings)
    if len({each.peer for each in saved}) < len(saved):
        raise VerdictsError("they name a peer twice")
    return saved, tuple(_record(entry) for entry in records)


def _list(found: object, name: str, longest: int) -> list[object]:
    if not isinstance(found, list) or len(found) > longest:
        raise VerdictsError(f"their {name} are not a list of at most {longest}")
    return found


def _standing(entry: object) -> SavedStanding:
    if not isinstance(entry, dict) or entry.keys() != _FIELDS:
        raise VerdictsError(f"a standing has other fields than {', '.join(sorted(_FIELDS))}")
    peer, reason, until = entry["peer"], entry["reason"], entry["until"]
    if not is_peer_id(peer):
        raise VerdictsError("a standing is not that of a peer id")
    try:
        return SavedStanding(
            peer=peer,
            state=PeerState(entry["state"]),
            trust=_number(entry["trust"]),
            strikes=_number(entry["strikes"]),
            credits=_whole(entry["credits"]),
            reason=None if reason is None else Reason(reason),
            until=None if until is None else _number(until),
            quarantined_at=_whole(entry["quarantined_at"]),
        )
    except ValueError as error:
        raise VerdictsError(str(error)) from None


def _number(found: object) -> float:
    """A number that JSON may have written without a point. Its range is the standing's to check."""
    if type(found) is float:
        return found
    try:
        return float(_whole(found))
    except OverflowError:
        raise VerdictsError("a number is too large") from None


def _whole(found: object) -> int:
    if type(found) is not int:  # a bool is no number
        raise VerdictsError(f"a number is a {type(found).__name__}")
    return found


def _record(entry: object) -> bytes:
    # Measured before it is decoded: four characters hold three bytes.
    if not isinstance(entry, str) or not 0 < len(entry) <= -(-MAX_RECORD_BYTES // 3) * 4:
        raise VerdictsError("a record is not a short string")
    try:
        record = base64.b64decode(entry, validate=True)
    except (binascii.Error, ValueError):
        raise VerdictsError("a record is not base64") from None
    if len(record) > MAX_RECORD_BYTES:
        raise VerdictsError(f"a record has more than {MAX_RECORD_BYTES} bytes")
    return record


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")
