"""Signed statements about single tensors: hops, and the origin of tokens.

A hop says "this is the tensor that I sent". Both bind swarm, step and microbatch, so that none
can be replayed from elsewhere.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace

from protocol import fields
from protocol.errors import MessageError
from protocol.framing import Buffer
from protocol.identity import Identity, verify
from protocol.messages import Hop
from protocol.packing import pack
from protocol.statements import open_statement

NO_SIGNATURE = bytes(64)


def body_digest(buffers: Sequence[Buffer]) -> bytes:
    """SHA-256 over buffers, one after another; 32 bytes."""
    digest = hashlib.sha256()
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def sketch_key(swarm: bytes, step: int) -> bytes:
    """The key of the random signs that all sketches of a step share; 32 bytes."""
    return hashlib.sha256(b"sentinel:sketch" + swarm + step.to_bytes(8, "big")).digest()


def sign_hop(
    identity: Identity,
    swarm: bytes,
    *,
    stage: int,
    step: int,
    microbatch: int,
    direction: str,
    digest: bytes,
    sketch: bytes,
    source: bytes = b"",
) -> bytes:
    """The packed and signed hop of a tensor that this node is about to send; ``source`` is the digest of its input."""
    hop = Hop(
        peer=identity.peer_id,
        stage=stage,
        step=step,
        microbatch=microbatch,
        direction=direction,
        digest=digest,
        source=source,
        sketch=sketch,
        signature=NO_SIGNATURE,
    )
    signature = identity.sign("hop", _hop_bytes(hop, swarm))
    return pack(fields.encode(replace(hop, signature=signature)))


def read_hop(data: bytes, swarm: bytes, *, sketch_bytes: int) -> Hop:
    """Read a hop, whatever it is about, and check its signature.

    Raises:
        MessageError: kind "sketch"; it is malformed or not signed by its peer.
    """
    hop = open_statement(Hop, data, "sketch")
    if len(hop.sketch) != sketch_bytes:
        raise MessageError(f"a sketch has {len(hop.sketch)} bytes, not {sketch_bytes}", kind="sketch")
    if not verify(hop.peer, "hop", _hop_bytes(hop, swarm), hop.signature):
        raise MessageError("a hop is not signed by the peer that it names", kind="sketch")
    return hop


def open_hop(
    data: bytes, swarm: bytes, *, stage: int, step: int, microbatch: int, direction: str, sketch_bytes: int
) -> Hop:
    """Read a hop and check that it is signed and about this tensor; the caller checks who may have sent it.

    Raises:
        MessageError: kind "sketch"; it is malformed, about something else, or not signed by its peer.
    """
    hop = read_hop(data, swarm, sketch_bytes=sketch_bytes)
    about = (hop.stage, hop.step, hop.microbatch, hop.direction)
    if about != (stage, step, microbatch, direction):
        raise MessageError(f"a hop is about {about}, not {(stage, step, microbatch, direction)}", kind="sketch")
    return hop


def _hop_bytes(hop: Hop, swarm: bytes) -> bytes:
    about = [hop.peer, hop.stage, hop.step, hop.microbatch, hop.direction, hop.digest, hop.source, hop.sketch]
    return pack([swarm, *about])


def _token_bytes(swarm: bytes, step: int, microbatch: int, tokens: Buffer) -> bytes:
    return pack([swarm, step, microbatch, body_digest((tokens,))])


def sign_tokens(identity: Identity, swarm: bytes, *, step: int, microbatch: int, tokens: Buffer) -> bytes:
    """The origin's signature over the tokens (int32 little endian) of a microbatch."""
    return identity.sign("tokens", _token_bytes(swarm, step, microbatch, tokens))


def check_tokens(peer: str, swarm: bytes, signature: bytes, *, step: int, microbatch: int, tokens: Buffer) -> bool:
    """Whether tokens are signed by their origin for this step and microbatch."""
    return verify(peer, "tokens", _token_bytes(swarm, step, microbatch, tokens), signature)
