"""A tensor crossing between stages: from values to signed bytes, and back with checks.

Everything here runs in the compute thread and knows one microbatch at a time. The receiver
relates the tensor to what its sender itself received, by the hop that the stage before the
sender signed (see verifier/sketch.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from node.drill import Drill
from protocol.errors import MessageError, RefusedError, TensorError
from protocol.framing import Buffer
from protocol.hops import body_digest, open_hop, sign_hop, sketch_key
from protocol.identity import Identity
from protocol.manifest import Manifest
from protocol.messages import Hop
from protocol.tensors import WireDtype, decode_tensor, encode_tensor, encoded_bytes
from verifier.guards import check_tensor
from verifier.sketch import Scratch, sketch
from verifier.verdicts import Direction, Reason

SKETCH_TOLERANCE = 1e-3
"""Relative difference allowed between a signed sketch and the receiver's own of the same bytes: the
additions of two machines may run in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outgoing:
    """A tensor ready to be sent. ``hop`` is the packed, signed statement about it."""

    dtype: str
    shape: tuple[int, ...]
    buffers: Sequence[memoryview]
    digest: bytes
    hop: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Incoming:
    """A tensor that arrived whole and as its sender signed it; not yet judged."""

    tensor: torch.Tensor
    digest: bytes
    hop: bytes
    sketch: torch.Tensor
    input_sketch: torch.Tensor | None
    rms: float = 0.0
    """Root mean square of the entries."""
    input_from: str = ""
    """Who sent its sender that input, and..."""
    input_digest: bytes = b""
    """...the digest of it; both empty where the sender received none."""


class Boundary:
    """Both ends of the boundaries of one stage."""

    def __init__(
        self,
        *,
        identity: Identity,
        manifest: Manifest,
        stage: int,
        stage_of: Callable[[str], int | None],
        drill: Drill | None,
    ) -> None:
        self._identity = identity
        self._swarm = bytes.fromhex(manifest.swarm_id)
        self._stage = stage
        self._stage_of = stage_of
        self._drill = drill
        self._num_stages = manifest.num_stages
        self._shape = manifest.activation_shape
        self._sketch_size = manifest.verifier.sketch_size
        self._scratch = Scratch()
        self._dtypes = {
            Direction.ACTIVATION: WireDtype(manifest.wire.activation_dtype),
            Direction.GRADIENT: WireDtype(manifest.wire.gradient_dtype),
        }

    def body_bytes(self, direction: Direction) -> int:
        """Size of an encoded tensor of this direction."""
        return encoded_bytes(self._shape, self._dtypes[direction])

    def outgoing(
        self,
        tensor: torch.Tensor,
        *,
        step: int,
        microbatch: int,
        direction: Direction,
        received: torch.Tensor | None = None,
        source: bytes = b"",
    ) -> Outgoing:
        """Encode and sign a tensor [B, T, d] float32; a drill spoils it here.

        ``received`` is what this node got in this direction for the same microbatch, which a drill may hand on, and
        ``source`` its digest.
        """
        if self._drill is not None:
            tensor = self._drill.apply(tensor, direction, step, received=received)
        dtype = self._dtypes[direction]
        buffers = encode_tensor(tensor, dtype)
        sent = (
            tensor
            if dtype is WireDtype.FP32
            else self._decode(buffers[0] if len(buffers) == 1 else b"".join(buffers), direction)
        )
        digest = body_digest(buffers)
        hop = sign_hop(
            self._identity,
            self._swarm,
            stage=self._stage,
            step=step,
            microbatch=microbatch,
            direction=direction.value,
            digest=digest,
            source=source,
            sketch=_pack(self._sketch(sent, step)),
        )
        return Outgoing(dtype=dtype.value, shape=tuple(tensor.shape), buffers=buffers, digest=digest, hop=hop)

    def incoming(
        self,
        body: Buffer,
        *,
        dtype: str,
        shape: Sequence[int],
        hop: bytes,
        input_hop: bytes | None,
        sender: str,
        step: int,
        microbatch: int,
        direction: Direction,
    ) -> Incoming:
        """Decode a tensor and check that it is what its sender signed, with the hop that it must bring.

        Raises:
            TensorError: wrong dtype, shape or size, or not finite.
            MessageError: kind "sketch"; a hop is missing, wrong, or not from whom it must be.
        """
        sender_stage = self._stage - 1 if direction is Direction.ACTIVATION else self._stage + 1
        tensor = self._decode(body, direction, dtype=dtype, shape=shape)
        size = check_tensor(tensor, shape=self._shape, dtype=torch.float32)
        if isinstance(size, Reason):
            raise TensorError(f"a tensor from {sender[-8:]} breaks the guard {size}", kind=size.value)
        opened = open_hop(
            hop,
            self._swarm,
            stage=sender_stage,
            step=step,
            microbatch=microbatch,
            direction=direction.value,
            sketch_bytes=4 * self._sketch_size,
        )
        if opened.peer != sender:
            raise MessageError("a tensor came with a hop that somebody else signed", kind="sketch")
        digest = body_digest((body,))
        if opened.digest != digest:
            raise MessageError("a tensor is not the one that its hop describes", kind="sketch")
        own = self._sketch(tensor, step)
        if not _close(own, _unpack(opened.sketch)):
            raise MessageError("a tensor's sketch is not the one that its hop claims", kind="sketch")
        before = self._input_hop(input_hop, sender, sender_stage, step, microbatch, direction)
        if opened.source != (b"" if before is None else before.digest):
            raise MessageError("a tensor was made from another input than its hops say", kind="sketch")
        return Incoming(
            tensor=tensor,
            rms=size,
            digest=digest,
            hop=hop,
            sketch=own,
            input_sketch=None if before is None else _unpack(before.sketch),
            input_from="" if before is None else before.peer,
            input_digest=b"" if before is None else before.digest,
        )

    def _input_hop(
        self,
        data: bytes | None,
        sender: str,
        sender_stage: int,
        step: int,
        microbatch: int,
        direction: Direction,
    ) -> Hop | None:
        """The hop of what the sender received; None where it received none (stage 0, last stage)."""
        source_stage = sender_stage - 1 if direction is Direction.ACTIVATION else sender_stage + 1
        if not 0 <= source_stage < self._num_stages:
            return None
        if data is None:
            raise MessageError("a tensor came without the hop of its sender's input", kind="sketch")
        opened = open_hop(
            data,
            self._swarm,
            stage=source_stage,
            step=step,
            microbatch=microbatch,
            direction=direction.value,
            sketch_bytes=4 * self._sketch_size,
        )
        known = self._stage_of(opened.peer)
        if known is None:
            # Perhaps it has just left, or this node has not heard of it yet: not the sender's fault.
            raise RefusedError("the hop of a sender's input is from a peer without a claim", kind="unknown_peer")
        if opened.peer == sender or known != source_stage:
            raise MessageError("the hop of a sender's input is not from the stage before it", kind="sketch")
        return opened

    def _decode(
        self, body: Buffer, direction: Direction, *, dtype: str = "", shape: Sequence[int] = ()
    ) -> torch.Tensor:
        expected = self._dtypes[direction]
        return decode_tensor(
            body,
            dtype=dtype or expected.value,
            shape=shape or self._shape,
            expected_dtype=expected,
            expected_shape=self._shape,
        )

    def _sketch(self, tensor: torch.Tensor, step: int) -> torch.Tensor:
        return sketch(tensor, key=sketch_key(self._swarm, step), size=self._sketch_size, scratch=self._scratch)


def _pack(values: torch.Tensor) -> bytes:
    return values.contiguous().numpy().tobytes()


def _unpack(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float32)


def _close(own: torch.Tensor, claimed: torch.Tensor) -> bool:
    # Written so that NaN in either (guards judge the tensor itself later) counts as different.
    return bool((own - claimed).norm() <= SKETCH_TOLERANCE * own.norm() + 1e-6)
