"""What the kinds of refusals mean to the one who was refused. One table, since they overlap and must not disagree."""

from __future__ import annotations

from typing import Final

NOT_READY: Final = frozenset({"method", "not_admitted", "unavailable"})
"""The peer is still getting ready, or has not heard of this node: the same message is good later."""

PASSING: Final = NOT_READY | {"busy", "wrong_step", "unknown_peer", "not_started"}
"""Says nothing about this node's work, which is tried again after a change."""

NOT_THEIR_FAULT: Final = frozenset(
    {"busy", "wrong_step", "unknown_peer", "not_started", "not_admitted", "unfinished", "exhausted"}
)
"""Without blame for whoever sent what was refused. A message for a step that is over, for one, is what a slow link
looks like."""

CANNOT_BE_ASKED: Final = NOT_READY | {"busy", "internal"}
"""The accused in an audit cannot answer now, which says nothing about its evidence."""
