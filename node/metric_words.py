"""The words that may stand as label values: closed sets, so that no peer can make the number of series grow."""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from protocol.messages import Method, StreamKind
from protocol.records import NodeState
from verifier.verdicts import Direction, Reason

OTHER: Final = "other"

STATES: Final = tuple(state.value for state in NodeState)
OUTCOMES: Final = ("completed", "retried", "refused", "lost", "unaveraged")
PHASES: Final = ("forward", "backward", "wait", "send", "average", "optimizer", "check", "audit", "idle")
REASONS: Final = tuple(reason.value for reason in Reason)
DIRECTIONS: Final = tuple(direction.value for direction in Direction)
METHODS: Final = tuple(method.value for method in Method)
DHT_OPERATIONS: Final = ("store", "get")
AUDIT_OUTCOMES: Final = ("honest", "guilty", "disputed", "parameters", "expired", "inconclusive", "skipped")
AVERAGING_OUTCOMES: Final = ("committed", "refetched", "failed")
EXAMINED_WHY: Final = ("sum", "rule", "chance")
EXAMINED_OUTCOMES: Final = ("right", "false", "not_shown")
COPY_OUTCOMES: Final = ("fetched", "failed", "skipped")
CHECKPOINT_OUTCOMES: Final = ("written", "failed", "skipped", "damaged")

REMOTE_KINDS: Final = tuple(
    dict.fromkeys(
        (
            *("remote", "signature", "version", "swarm", "frame", "message", "tensor", "record", "refused", "flagged"),
            *("internal", "unavailable", "busy", "too_old", "not_yet", "not_started", "not_admitted"),
            *("unknown_peer", "unknown_method", "incomplete", "range", "round", "digest", "snapshot"),
            *("expired", "exhausted", "unfinished", "no_evidence", "no_data", "not_drawn", "inconclusive"),
            *REASONS,
        )
    )
)
"""Kinds of ``protocol.errors.RemoteError``. The kind of a refusal is text that a peer chose."""

REQUEST_OUTCOMES: Final = ("ok", "timeout", "unreachable", "cancelled", *REMOTE_KINDS)

RECORD_KINDS: Final = (
    *("record", "foreign_swarm", "expired", "too_far_ahead", "signature", "shape", "size", "type"),
    *("unknown_kind", "range", "owner", "key", "expiry", "not_admitted"),
)

REFUSED_WHERE: Final = ("stream", "record")

WIRE_DIRECTIONS: Final = ("in", "out")
STREAMS: Final = tuple(stream.value for stream in StreamKind)
VOTES: Final = ("guilty", "honest")
EJECTIONS: Final = ("seen", "self")
ACCUSATIONS: Final = ("sent", "received")
AUDIT_ROLES: Final = ("caller", "juror")
ROLES: Final = ("coordinator", "volunteer")


def bounded(value: str, known: Collection[str]) -> str:
    """The value if it is a known word, else "other"."""
    return value if value in known else OTHER
