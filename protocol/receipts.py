"""Signed statements about computing: receipts, the draw of a jury, and a juror's vote.

A receipt says "this is what I got, sent on, got back and gave back, computed with these
parameters". It binds swarm, stage, step and microbatch, so that it proves nothing elsewhere, and
anybody who holds it can have its work computed again.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

from protocol import fields
from protocol.errors import MessageError
from protocol.hops import NO_SIGNATURE
from protocol.identity import Identity, verify
from protocol.messages import Receipt
from protocol.packing import pack
from protocol.statements import open_statement


def sign_receipt(
    identity: Identity,
    swarm: bytes,
    *,
    stage: int,
    step: int,
    microbatch: int,
    received: bytes,
    sent: bytes,
    got: bytes,
    returned: bytes,
    parameters: bytes,
) -> bytes:
    """The packed and signed receipt of this node; ``sent`` and ``got`` are empty in the last stage."""
    receipt = Receipt(
        peer=identity.peer_id,
        stage=stage,
        step=step,
        microbatch=microbatch,
        received=received,
        sent=sent,
        got=got,
        returned=returned,
        parameters=parameters,
        signature=NO_SIGNATURE,
    )
    signature = identity.sign("receipt", _receipt_bytes(receipt, swarm))
    return pack(fields.encode(replace(receipt, signature=signature)))


def open_receipt(data: bytes, swarm: bytes) -> Receipt:
    """Read a receipt and check its signature.

    Raises:
        MessageError: kind "receipt"; it is malformed or not signed by its peer.
    """
    receipt = open_statement(Receipt, data, "receipt")
    if len(receipt.sent) != len(receipt.got):
        raise MessageError("a receipt tells half of what went on", kind="receipt")
    if not verify(receipt.peer, "receipt", _receipt_bytes(receipt, swarm), receipt.signature):
        raise MessageError("a receipt is not signed by the peer that it names", kind="receipt")
    return receipt


def check_receipt(
    data: bytes,
    swarm: bytes,
    *,
    peer: str,
    stage: int,
    step: int,
    microbatch: int,
    received: bytes,
    returned: bytes,
) -> Receipt:
    """Read the receipt of a microbatch that this node has just sent and got back.

    Raises:
        MessageError: kind "receipt"; it is not that.
    """
    receipt = open_receipt(data, swarm)
    about = (receipt.peer, receipt.stage, receipt.step, receipt.microbatch, receipt.received, receipt.returned)
    if about != (peer, stage, step, microbatch, received, returned):
        raise MessageError("a receipt does not fit what was sent and returned", kind="receipt")
    return receipt


def check_input_receipt(data: bytes | None, swarm: bytes, *, of: Receipt) -> Receipt:
    """Read the receipt that the stage below gave to the peer of ``of``, and check that the two fit.

    Raises:
        MessageError: kind "receipt"; it is missing, or about something else.
    """
    if data is None:
        raise MessageError("a receipt came without that of the stage below", kind="receipt")
    below = open_receipt(data, swarm)
    about = (below.stage, below.step, below.microbatch, below.received, below.returned)
    if about != (of.stage + 1, of.step, of.microbatch, of.sent, of.got) or below.peer == of.peer:
        raise MessageError("two receipts of neighbouring stages do not fit together", kind="receipt")
    return below


def statement_digest(statement: bytes) -> bytes:
    """What names a receipt or hop in draws, votes and verdicts; 32 bytes."""
    return hashlib.sha256(statement).digest()


def sign_draw(identity: Identity, swarm: bytes, subject: bytes) -> bytes:
    """The asking peer's part in the draw of a jury. Nobody else can know it before, the accused least of all."""
    return identity.sign("draw", pack([swarm, subject]))


def check_draw(peer: str, swarm: bytes, draw: bytes, subject: bytes) -> bool:
    """Whether a draw is this peer's for this statement."""
    return verify(peer, "draw", pack([swarm, subject]), draw)


def sign_vote(identity: Identity, swarm: bytes, *, subject: bytes, accused: str, guilty: bool) -> bytes:
    """A juror's signed word on a statement of the accused."""
    return identity.sign("vote", pack([swarm, subject, accused, guilty]))


def check_vote(peer: str, swarm: bytes, vote: bytes, *, subject: bytes, accused: str, guilty: bool) -> bool:
    """Whether a vote is this peer's."""
    return verify(peer, "vote", pack([swarm, subject, accused, guilty]), vote)


def _receipt_bytes(receipt: Receipt, swarm: bytes) -> bytes:
    values = fields.encode(receipt)
    del values["signature"]
    return pack([swarm, *values.values()])
