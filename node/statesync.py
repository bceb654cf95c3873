"""How a joining replica gets its stage's state from a sibling.

A donor freezes its state between two steps into one safetensors file and serves it in hashed
chunks; the joiner checks each chunk, the whole, and the digest of the parameters.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import safetensors.torch
import torch

from node.digest import parameter_digest
from protocol.errors import MessageError, RefusedError
from protocol.fields import decode, encode
from protocol.messages import Chunk, Method, Snapshot, SnapshotAnswer
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport

log = logging.getLogger(__name__)

CHUNK_BYTES = 4 << 20
KEEP_SECONDS = 120.0
"""How long a frozen state is kept after it was last asked for."""
MAX_CONCURRENT_CHUNKS = 4
CALL_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """Parameters float32 [P] and optimizer tensors after ``step`` steps."""

    step: int
    parameters: torch.Tensor
    optimizer: dict[str, torch.Tensor]


def pack_state(state: StageState) -> bytes:
    """One safetensors file."""
    tensors = {f"optimizer.{name}": tensor.contiguous() for name, tensor in state.optimizer.items()}
    tensors["parameters"] = state.parameters.contiguous()
    return safetensors.torch.save(tensors, metadata={"step": str(state.step)})


def unpack_state(data: bytes, *, step: int, like: StageState) -> StageState:
    """Read a state whose tensors must have the names, shapes and dtypes of ``like``.

    Raises:
        MessageError: the file is not such a state.
    """
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # safetensors raises its own, undocumented types
        raise MessageError(f"a snapshot is not a safetensors file: {type(error).__name__}", kind="snapshot") from None
    expected = {f"optimizer.{name}": tensor for name, tensor in like.optimizer.items()}
    expected["parameters"] = like.parameters
    if set(tensors) != set(expected):
        raise MessageError("a snapshot holds other tensors than this stage has", kind="snapshot")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name].shape or tensor.dtype != expected[name].dtype:
            raise MessageError(f"the tensor {name} of a snapshot has another shape or dtype", kind="snapshot")
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise MessageError(f"the tensor {name} of a snapshot is not finite", kind="snapshot")
    return StageState(
        step=step,
        parameters=tensors["parameters"],
        optimizer={name: tensors[f"optimizer.{name}"] for name in like.optimizer},
    )


class StateServer:
    """Serves frozen states to siblings."""

    def __init__(
        self,
        transport: Transport,
        *,
        freeze: Callable[[], Awaitable[StageState]],
        is_sibling: Callable[[str], bool],
    ) -> None:
        self._freeze = freeze
        self._lock = asyncio.Lock()
        self._frozen: tuple[SnapshotAnswer, bytes] | None = None
        self._last_asked = 0.0
        transport.serve(Method.SNAPSHOT, Route(handler=self._serve_snapshot, admits=is_sibling))
        transport.serve(Method.CHUNK, Route(handler=self._serve_chunk, admits=is_sibling))

    async def _serve_snapshot(self, request: Request) -> Response:
        async with self._lock:
            stale = time.monotonic() - self._last_asked > KEEP_SECONDS
            if self._frozen is None or stale:
                state = await self._freeze()
                self._frozen = await asyncio.to_thread(_freeze, state)
            self._last_asked = time.monotonic()
            return Response(head=encode(self._frozen[0]))

    async def _serve_chunk(self, request: Request) -> Response:
        message = decode(Chunk, request.head)
        if self._frozen is None or self._frozen[0].step != message.step:
            raise RefusedError(f"the snapshot of step {message.step} is no longer kept", kind="too_old")
        self._last_asked = time.monotonic()
        start = message.index * CHUNK_BYTES
        data = self._frozen[1]
        if start >= len(data):
            raise RefusedError("there is no such chunk", kind="range")
        return Response(body=(memoryview(data)[start : start + CHUNK_BYTES],))

    def forget_old(self, step: int) -> None:
        """Let go of a snapshot that no joiner could still catch up from, or that nobody asks for."""
        if self._frozen is None:
            return
        if step - self._frozen[0].step > 8 or time.monotonic() - self._last_asked > KEEP_SECONDS:
            self._frozen = None


def _freeze(state: StageState) -> tuple[SnapshotAnswer, bytes]:
    data = pack_state(state)
    chunks = tuple(
        hashlib.sha256(memoryview(data)[start : start + CHUNK_BYTES]).digest()
        for start in range(0, len(data), CHUNK_BYTES)
    )
    answer = SnapshotAnswer(
        step=state.step,
        size=len(data),
        parameters=parameter_digest(state.parameters),
        chunk_bytes=CHUNK_BYTES,
        chunks=chunks,
    )
    return answer, data


async def fetch_state(
    transport: Transport,
    donor: str,
    *,
    like: StageState,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> StageState:
    """Download a state from a donor and check it.

    Args:
        like: a state of this stage, for names, shapes and the size limit.
        on_progress: called with bytes done and bytes in all.

    Raises:
        SentinelError: the donor is gone, refuses, or what it gave is not what it announced.
    """
    response = await transport.call(donor, Method.SNAPSHOT, Snapshot(), timeout=CALL_SECONDS)
    answer = decode(SnapshotAnswer, response.head)
    expected = len(pack_state(like))
    # The step in the metadata may have more digits than ours; beyond that, sizes agree exactly.
    if abs(answer.size - expected) > 64 or answer.chunk_bytes != CHUNK_BYTES:
        raise MessageError(f"a snapshot of {answer.size} bytes was offered, {expected} expected", kind="snapshot")
    if len(answer.chunks) != -(-answer.size // CHUNK_BYTES):
        raise MessageError("a snapshot names another number of chunks than its size has", kind="snapshot")
    data = bytearray(answer.size)
    done = 0
    slots = asyncio.Semaphore(MAX_CONCURRENT_CHUNKS)

    async def fetch(index: int) -> None:
        nonlocal done
        async with slots:
            chunk = await transport.call(
                donor,
                Method.CHUNK,
                Chunk(step=answer.step, index=index),
                timeout=CALL_SECONDS,
                reply_limit=CHUNK_BYTES,
            )
        if hashlib.sha256(chunk.data).digest() != answer.chunks[index]:
            raise MessageError(f"chunk {index} of a snapshot does not match its hash", kind="snapshot")
        start = index * CHUNK_BYTES
        if len(chunk.data) != min(CHUNK_BYTES, answer.size - start):
            raise MessageError(f"chunk {index} of a snapshot has the wrong size", kind="snapshot")
        data[start : start + len(chunk.data)] = chunk.data
        done += len(chunk.data)
        on_progress(done, answer.size)

    downloads = [asyncio.ensure_future(fetch(index)) for index in range(len(answer.chunks))]
    try:
        await asyncio.gather(*downloads)
    finally:
        for download in downloads:
            download.cancel()
    state = await asyncio.to_thread(unpack_state, bytes(data), step=answer.step, like=like)
    if parameter_digest(state.parameters) != answer.parameters:
        raise MessageError("a snapshot's parameters do not match their digest", kind="snapshot")
    return state
