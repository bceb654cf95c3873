"""What a node tells of itself and of others, made safe: numbers in range, short printable text, few of each. Pure."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from sys import intern
from typing import Any, Final

from protocol.errors import MessageError
from protocol.fields import MAX_STEP
from protocol.identity import is_peer_id
from protocol.packing import unpack
from protocol.records import MAX_STAGE
from verifier.ledger import STRANGER_TRUST, PeerState

MAX_LOSSES: Final = 50
MAX_EVENTS: Final = 10
"""Events kept of one node, the newest: 1024 nodes then cannot fill the memory with them."""

MAX_REPLICAS: Final = 256
"""Looked at in one status; as many as an honest one holds."""

MAX_STANDINGS: Final = 32
"""Kept of them: those about which the teller has an opinion."""

MAX_TEXT_CHARS: Final = 120
MAX_COUNT: Final = 2**60
MAX_LOSS: Final = 1e6
MAX_RATE: Final = 1e12

EVENT_KINDS: Final = frozenset(
    {
        *("strike", "suspect", "probation", "trusted", "quarantined", "ejected", "would_eject", "cleared", "borne"),
        *("accusation", "verdict", "audit", "lost", "unaveraged", "out_of_sync"),
    }
)
"""What the page shows of events; words that are none of these are not kept."""

STANDINGS: Final = frozenset(state.value for state in PeerState)

COUNTS: Final = (
    *("microbatches_retried", "microbatches_refused", "microbatches_lost", "microbatches_unaveraged"),
    *("flags", "audits", "votes", "bytes_in", "bytes_out"),
)
CONTRIBUTED: Final = ("microbatches", "tokens", "steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What the manifest says that is worth showing. Its hash is the swarm's id, so it is what the founder wrote."""

    name: str
    stages: int
    steps: int
    """0 has no end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToldEvent:
    """Something that a node says it saw."""

    time: float
    """Unix seconds on the teller's clock."""
    step: int
    kind: str
    peer: str
    stage: int | None
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A node's own word. It may lie; the shape is right."""

    step: int = 0
    loss: float | None = None
    tokens_per_second: float = 0.0
    uptime_seconds: float = 0.0
    coordinator: bool = False
    label: str = ""
    reason: str = ""
    losses: tuple[tuple[int, float], ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    """By the names in ``COUNTS`` and ``CONTRIBUTED``."""
    standings: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    """Of other peers: state and trust in [0, 1]."""
    events: tuple[ToldEvent, ...] = ()


def read_report(status: Mapping[str, Any]) -> Report:
    """The report in a status, whatever that holds."""
    contribution = status.get("contribution")
    contribution = contribution if isinstance(contribution, Mapping) else {}
    return Report(
        step=whole(status.get("step"), MAX_STEP) or 0,
        loss=number(status.get("loss"), MAX_LOSS),
        tokens_per_second=number(status.get("tokens_per_second"), MAX_RATE) or 0.0,
        uptime_seconds=number(status.get("uptime_seconds"), MAX_RATE) or 0.0,
        coordinator=status.get("coordinator") is True,
        label=plain(status.get("label"), 40),
        reason=plain(status.get("reason")),
        losses=tuple(point for entry in _newest(status, "losses", MAX_LOSSES) if (point := _loss(entry)) is not None),
        counts={name: whole(status.get(name), MAX_COUNT) or 0 for name in COUNTS}
        | {name: whole(contribution.get(name), MAX_COUNT) or 0 for name in CONTRIBUTED},
        standings=dict(
            [found for entry in _newest(status, "replicas", MAX_REPLICAS) if (found := _standing(entry))][
                :MAX_STANDINGS
            ]
        ),
        events=tuple(event for entry in _newest(status, "events", MAX_EVENTS) if (event := _event(entry)) is not None),
    )


def read_outline(data: bytes, swarm: bytes) -> Outline:
    """The outline of the manifest in ``data``, which has to be that of the swarm. swarm: the 32 bytes of its id.

    Raises:
        MessageError: it is another's, or no manifest.
    """
    if hashlib.sha256(data).digest() != swarm:
        raise MessageError("this is the manifest of another swarm")
    try:
        values = unpack(data)
    except ValueError:
        raise MessageError("the manifest is not one msgpack value") from None
    sections = values if isinstance(values, dict) else {}
    stages, training = sections.get("stages"), sections.get("training")
    layers = stages.get("layers_per_stage") if isinstance(stages, dict) else None
    count = len(layers) if isinstance(layers, list) else 0
    if not 1 <= count <= MAX_STAGE + 1:
        raise MessageError("the manifest names no stages")
    steps = training.get("steps") if isinstance(training, dict) else None
    return Outline(name=plain(sections.get("name"), 64), stages=count, steps=whole(steps, MAX_STEP) or 0)


def whole(value: object, most: int) -> int | None:
    """A whole number from 0 on; a bool is none."""
    return value if type(value) is int and 0 <= value <= most else None


def number(value: object, most: float) -> float | None:
    """A finite number from 0 on, as a float."""
    if type(value) is int:
        return float(value) if 0 <= value <= most else None
    return value if isinstance(value, float) and math.isfinite(value) and 0 <= value <= most else None


def plain(value: object, most: int = MAX_TEXT_CHARS) -> str:
    """Text that stays on its line and is short."""
    text = value if isinstance(value, str) else ""
    return "".join(char for char in text[: 4 * most] if char.isprintable())[:most]


def _newest(status: Mapping[str, Any], key: str, most: int) -> list[Any]:
    entries = status.get(key)
    return entries[-most:] if isinstance(entries, list) else []


def _loss(entry: object) -> tuple[int, float] | None:
    if not isinstance(entry, list) or len(entry) != 2:
        return None
    step, loss = whole(entry[0], MAX_STEP), number(entry[1], MAX_LOSS)
    return None if step is None or loss is None else (step, loss)


def _standing(entry: object) -> tuple[str, tuple[str, float]] | None:
    told = entry.get("standing") if isinstance(entry, Mapping) else None
    if not isinstance(entry, Mapping) or not isinstance(told, Mapping):
        return None
    peer, state, trust = entry.get("peer"), told.get("state"), number(told.get("trust"), 1.0)
    if not isinstance(peer, str) or not is_peer_id(peer) or trust is None:
        return None
    if not isinstance(state, str) or state not in STANDINGS:
        return None
    if state == PeerState.PROBATION and trust == STRANGER_TRUST:  # what every node says of peers it knows nothing of
        return None
    return intern(peer), (intern(state), trust)  # told by many, kept once


def _event(entry: object) -> ToldEvent | None:
    if not isinstance(entry, Mapping):
        return None
    kind, peer = entry.get("kind"), entry.get("peer")
    time, step = number(entry.get("time"), 1e12), whole(entry.get("step"), MAX_STEP)
    if not isinstance(kind, str) or kind not in EVENT_KINDS or time is None or step is None:
        return None
    return ToldEvent(
        time=time,
        step=step,
        kind=intern(kind),
        peer=intern(peer) if isinstance(peer, str) and is_peer_id(peer) else "",
        stage=whole(entry.get("stage"), MAX_STAGE),
        text=plain(entry.get("text")),
    )
