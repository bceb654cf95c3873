"""DHT records: who serves which stage (claim), who accuses whom (accusation), and whom a jury has found guilty
(verdict), each signed by its writer.

A record is ``msgpack [kind, payload, signature]``: the payload is a msgpack map, and the signature covers it
in the context "record/<kind>". Whoever stores or reads a record checks everything here first: size, shape,
ranges, swarm, times, and the writer's signature. Known fields are checked strictly, unknown ones ignored, so
that a newer node may add fields. Time is an argument.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum, StrEnum
from typing import Literal

from protocol.errors import RecordError
from protocol.fields import MAX_STEP
from protocol.identity import SIGNATURE_BYTES, Identity, verify
from protocol.invite import parse_multiaddr
from protocol.messages import MAX_ADMISSION_BYTES, MAX_RECORD_BYTES
from protocol.packing import pack, unpack
from protocol.receipts import check_draw, check_vote
from protocol.record_fields import (
    Check,
    boolean,
    check_addresses,
    check_peer,
    one_of,
    positive_number,
    printable,
    read_payload,
    short_bytes,
    signed_by_peers,
    sized_bytes,
    whole,
)

MAX_CLAIM_AHEAD_SECONDS = 120.0
"""How far ahead a claim may expire: four leases of 30 s, so that a clock a minute off still works."""

MAX_ACCUSATION_AHEAD_SECONDS = 7 * 24 * 3600.0
"""No accusation, and so no ejection, outlives a week."""

MAX_STAGE = 127
MAX_CAPACITY = 1e6
MAX_GENERATION = 2**63 - 1
MAX_LABEL_CHARS = 40
MAX_VOTES = 16


class RecordKind(IntEnum):
    """What a record is; the first item of its envelope."""

    CLAIM = 1
    ACCUSATION = 2
    VERDICT = 3


class NodeState(StrEnum):
    """Where a node is in its life; the same words in the log, /status, the metrics and the claim."""

    PREFLIGHT = "preflight"
    BOOTSTRAPPING = "bootstrapping"
    ISOLATED = "isolated"
    WAITING = "waiting"
    CLAIMING = "claiming"
    SYNCING = "syncing"
    PROBATION = "probation"
    TRAINING = "training"
    DRAINING = "draining"
    EJECTED = "ejected"


AccusationKind = Literal["strikes", "audit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A node's lease of a stage.

    Attributes:
        swarm: the 32 bytes of the swarm id.
        peer: the writer's peer id.
        addresses: where to dial it; at most 8, each ending in its peer id.
        capacity: microbatches a second, above 0.
        step: steps that it has applied; before the start, those in the checkpoint that it offers to go on from.
        digest: SHA-256 of its parameters at that step, or b"" when it has none yet.
        active_from: the first step in which it takes work.
        generation: grows with each start of the process (its start in Unix microseconds).
        sequence: grows with each renewal.
        expires: Unix seconds.
        label: the volunteer's name for the node. agent: its software. drill: the attack it plays, or "".
        pinned: whether it never moves, since its volunteer chose the stage or it has a checkpoint of it.
        admission: in an invited swarm the coordinator's signed admission of this peer, whose own rules see
            ``protocol.admissions``; else b"", and then not in the payload.
    """

    swarm: bytes
    peer: str
    stage: int
    addresses: tuple[str, ...]
    capacity: float
    state: NodeState
    step: int
    digest: bytes
    active_from: int
    generation: int
    sequence: int
    expires: float
    label: str = ""
    agent: str = ""
    drill: str = ""
    pinned: bool = False
    admission: bytes = b""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accusation:
    """One peer's word against another.

    Attributes:
        swarm: the 32 bytes of the swarm id.
        kind: "strikes" (too many flags) or "audit" (a re-execution differed).
        reason: a short word, such as the kind of the last flag.
        step: when it happened.
        evidence: SHA-256 of what the accuser can show.
        expires: Unix seconds; the end of the ejection that it asks for.
    """

    swarm: bytes
    accuser: str
    accuser_stage: int
    accused: str
    accused_stage: int
    kind: AccusationKind
    reason: str
    step: int
    evidence: bytes
    expires: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What jurors found who computed a microbatch of the accused again.

    Attributes:
        swarm: the 32 bytes of the swarm id.
        writer: who asked for the audit.
        reason: what differed (activation, gradient, tokens, withheld).
        step: of the microbatch.
        subject: SHA-256 of the accused's signed statement.
        draw: the writer's signature over the subject, which draws the jury.
        votes: (juror, its signature that the accused is guilty), at most 16.
        expires: Unix seconds; the end of the ejection.
    """

    swarm: bytes
    writer: str
    accused: str
    accused_stage: int
    reason: str
    step: int
    subject: bytes
    draw: bytes
    votes: tuple[tuple[str, bytes], ...]
    expires: float


Record = Claim | Accusation | Verdict

_stage, _step = whole(0, MAX_STAGE), whole(0, MAX_STEP)
_swarm, _expires = sized_bytes(32), positive_number(1e12)

_CLAIM_CHECKS: dict[str, Check] = {
    "swarm": _swarm,
    "peer": check_peer,
    "stage": _stage,
    "addresses": check_addresses,
    "capacity": positive_number(MAX_CAPACITY),
    "state": one_of({state.value: state for state in NodeState}),
    "step": _step,
    "digest": sized_bytes(0, 32),
    "active_from": _step,
    "generation": whole(1, MAX_GENERATION),
    "sequence": whole(0, MAX_GENERATION),
    "expires": _expires,
    "label": printable(0, MAX_LABEL_CHARS),
    "agent": printable(0, MAX_LABEL_CHARS),
    "drill": printable(0, MAX_LABEL_CHARS),
    "pinned": boolean,
    "admission": short_bytes(MAX_ADMISSION_BYTES),
}
_ACCUSATION_CHECKS: dict[str, Check] = {
    "swarm": _swarm,
    "accuser": check_peer,
    "accuser_stage": _stage,
    "accused": check_peer,
    "accused_stage": _stage,
    "kind": one_of({"strikes": "strikes", "audit": "audit"}),
    "reason": printable(1, MAX_LABEL_CHARS),
    "step": _step,
    "evidence": sized_bytes(32),
    "expires": _expires,
}
_VERDICT_CHECKS: dict[str, Check] = {
    "swarm": _swarm,
    "writer": check_peer,
    "accused": check_peer,
    "accused_stage": _stage,
    "reason": printable(1, MAX_LABEL_CHARS),
    "step": _step,
    "subject": sized_bytes(32),
    "draw": sized_bytes(SIGNATURE_BYTES),
    "votes": signed_by_peers(MAX_VOTES, SIGNATURE_BYTES),
    "expires": _expires,
}
_CHECKS = {
    RecordKind.CLAIM: _CLAIM_CHECKS,
    RecordKind.ACCUSATION: _ACCUSATION_CHECKS,
    RecordKind.VERDICT: _VERDICT_CHECKS,
}
_FLOAT_FIELDS = frozenset({"capacity", "expires"})
"""Written as floats even where a caller gives whole numbers."""
_LEFT_OUT = frozenset({"admission"})
"""Not in the payload where it is empty, so that the claims of open swarms do not grow."""


def sign_claim(identity: Identity, claim: Claim) -> bytes:
    """The signed bytes of a claim. Raises ValueError if it breaks a rule or is not its own."""
    return _sign(identity, RecordKind.CLAIM, claim, claim.peer)


def sign_accusation(identity: Identity, accusation: Accusation) -> bytes:
    """The signed bytes of an accusation. Raises ValueError if it breaks a rule or is not its own."""
    return _sign(identity, RecordKind.ACCUSATION, accusation, accusation.accuser)


def sign_verdict(identity: Identity, verdict: Verdict) -> bytes:
    """The signed bytes of a verdict. Raises ValueError if it breaks a rule or is not its own."""
    return _sign(identity, RecordKind.VERDICT, verdict, verdict.writer)


def parse_record(data: bytes, *, swarm: bytes, now: float, max_ahead: float = MAX_CLAIM_AHEAD_SECONDS) -> Record:
    """Read and check a record that anyone may have written.

    swarm: the 32 bytes of our swarm id. now: Unix seconds. max_ahead: how many seconds ahead a claim may
    expire; an accusation may be a week ahead. Raises RecordError and nothing else; its ``kind`` is one of
    size, shape, unknown_kind, type, range, foreign_swarm, expired, too_far_ahead, signature.
    """
    kind, payload, signature = _open_envelope(data)
    record = _read_payload(kind, payload)
    if record.swarm != swarm:
        raise RecordError("the record belongs to another swarm", kind="foreign_swarm")
    if record.expires <= now:
        raise RecordError(f"the record expired {now - record.expires:.0f} s ago", kind="expired")
    ahead = max_ahead if isinstance(record, Claim) else MAX_ACCUSATION_AHEAD_SECONDS
    if record.expires > now + ahead:
        message = f"the record expires {record.expires - now:.0f} s from now, more than {ahead:.0f} s"
        raise RecordError(message, kind="too_far_ahead")
    if not verify(record_subkey(record), _context(kind), payload, signature):
        raise RecordError("the record is not signed by its writer", kind="signature")
    if isinstance(record, Verdict):
        _check_votes(record)
    return record


def claim_key(swarm_hex: str, stage: int) -> str:
    """The DHT key of the claims of a stage."""
    return f"sentinel/{swarm_hex}/claim/{stage}"


def accusation_key(swarm_hex: str, accused: str) -> str:
    """The DHT key of the accusations against a peer."""
    return f"sentinel/{swarm_hex}/accusation/{accused}"


def verdict_key(swarm_hex: str, accused: str) -> str:
    """The DHT key of the verdicts on a peer."""
    return f"sentinel/{swarm_hex}/verdict/{accused}"


def record_key(record: Record) -> str:
    """The DHT key under which a record belongs."""
    if isinstance(record, Claim):
        return claim_key(record.swarm.hex(), record.stage)
    key = verdict_key if isinstance(record, Verdict) else accusation_key
    return key(record.swarm.hex(), record.accused)


def record_subkey(record: Record) -> str:
    """The DHT subkey of a record: its writer's peer id."""
    match record:
        case Claim():
            return record.peer
        case Accusation():
            return record.accuser
        case Verdict():
            return record.writer


def supersedes(new: Claim, old: Claim) -> bool:
    """Whether ``new`` replaces ``old``: the same peer, and a later process or a later renewal."""
    return new.peer == old.peer and (new.generation, new.sequence) > (old.generation, old.sequence)


def _context(kind: RecordKind) -> str:
    return f"record/{kind.value}"


def _sign(identity: Identity, kind: RecordKind, record: Record, writer: str) -> bytes:
    if writer != identity.peer_id:
        raise ValueError(f"this identity, {identity.peer_id}, cannot sign a record of {writer}")
    values = {field.name: getattr(record, field.name) for field in fields(record)}
    values = {name: value for name, value in values.items() if value or name not in _LEFT_OUT}
    payload = pack(values | {name: float(values[name]) for name in _FLOAT_FIELDS & values.keys()})
    try:
        _read_payload(kind, payload)
    except RecordError as error:
        raise ValueError(str(error)) from None
    data = pack([kind.value, payload, identity.sign(_context(kind), payload)])
    if len(data) > MAX_RECORD_BYTES:
        raise ValueError(f"the record has {len(data)} of {MAX_RECORD_BYTES} bytes; name fewer addresses")
    return data


def _open_envelope(data: bytes) -> tuple[RecordKind, bytes, bytes]:
    if not isinstance(data, bytes):  # a value of the DHT, which others may have written as anything
        raise RecordError("the record is not a string of bytes", kind="shape")
    if len(data) > MAX_RECORD_BYTES:
        raise RecordError(f"the record has {len(data)} bytes; {MAX_RECORD_BYTES} are allowed", kind="size")
    try:
        envelope = unpack(data)
    except ValueError:
        raise RecordError("the record is not one msgpack value", kind="shape") from None
    if not isinstance(envelope, list) or len(envelope) != 3:
        raise RecordError("the record is not a list of kind, payload and signature", kind="shape")
    kind, payload, signature = envelope
    if type(kind) is not int or type(payload) is not bytes or type(signature) is not bytes:
        raise RecordError("the record has to hold a number and two strings of bytes", kind="type")
    if len(signature) != SIGNATURE_BYTES:
        raise RecordError(f"the signature has {len(signature)} bytes, not {SIGNATURE_BYTES}", kind="shape")
    if pack(envelope) != data:  # the signature does not cover the envelope, so it has one spelling only
        raise RecordError("the record is not in its shortest spelling", kind="shape")
    try:
        return RecordKind(kind), payload, signature
    except ValueError:
        raise RecordError(f"records of kind {kind} are unknown here", kind="unknown_kind") from None


def _read_payload(kind: RecordKind, payload: bytes) -> Record:
    checked = read_payload(payload, _CHECKS[kind], "record", optional=_LEFT_OUT)
    if kind is RecordKind.CLAIM:
        return _own_addresses_only(Claim(**checked))  # type: ignore[arg-type]  # each value has passed its check
    if kind is RecordKind.VERDICT:
        return _no_self_vote(Verdict(**checked))  # type: ignore[arg-type]
    return _no_self_accusation(Accusation(**checked))  # type: ignore[arg-type]


def _own_addresses_only(claim: Claim) -> Claim:
    """A claim that names another peer's address could send the whole swarm to dial a victim."""
    if any(parse_multiaddr(address).peer_id != claim.peer for address in claim.addresses):
        raise RecordError("the claim names an address of another peer", kind="range")
    return claim


def _no_self_accusation(accusation: Accusation) -> Accusation:
    if accusation.accuser == accusation.accused:
        raise RecordError("the accusation is against its own writer", kind="range")
    return accusation


def _no_self_vote(verdict: Verdict) -> Verdict:
    jurors = [juror for juror, _ in verdict.votes]
    if verdict.accused in (verdict.writer, *jurors) or len(set(jurors)) != len(jurors):
        raise RecordError("the verdict counts the accused, or a juror twice", kind="range")
    return verdict


def _check_votes(verdict: Verdict) -> None:
    """A verdict carries its proof: a stranger's word that others have voted would be worth nothing."""
    drawn = check_draw(verdict.writer, verdict.swarm, verdict.draw, verdict.subject)
    about = {"subject": verdict.subject, "accused": verdict.accused, "guilty": True}
    if not drawn or not all(check_vote(peer, verdict.swarm, vote, **about) for peer, vote in verdict.votes):  # type: ignore[arg-type]
        raise RecordError("the verdict's draw or a vote is not signed by whom it names", kind="signature")
