"""A stage's state as bytes: parameters and optimizer tensors, one after another, cut into chunks with a hash each.

Both sides know the layout from the stage itself, so nothing that is received has to be parsed, and sizes are known
before a byte is asked for. Pure and synchronous; a state is large, so what handles bytes belongs in a thread.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from protocol.errors import MessageError
from protocol.messages import MAX_CHUNKS, SnapshotAnswer

CHUNK_BYTES = 4 << 20
"""Large enough that a round trip does not matter, small enough to be fetched again elsewhere without regret."""

PARAMETERS = "parameters"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageState:
    """Parameters float32 [P] and optimizer tensors after ``step`` steps."""

    step: int
    parameters: torch.Tensor
    optimizer: dict[str, torch.Tensor]

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return {**{f"optimizer.{name}": tensor for name, tensor in self.optimizer.items()}, PARAMETERS: self.parameters}


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where one tensor lies: bytes ``start`` to ``end``, contiguous, little endian."""

    name: str
    dtype: torch.dtype
    shape: torch.Size
    start: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The order and the sizes of everything in a state."""

    segments: tuple[Segment, ...]
    size: int
    """Bytes in all."""
    chunk_bytes: int

    @classmethod
    def of(cls, state: StageState, *, chunk_bytes: int | None = None) -> Layout:
        """The layout of every state of this one's stage. Chunks are doubled until they are few enough to be named."""
        chunk_bytes = chunk_bytes or CHUNK_BYTES
        segments: list[Segment] = []
        start = 0
        # Wide elements first, so that each tensor begins at a multiple of its element's size.
        for name, tensor in sorted(state.tensors().items(), key=lambda item: (-item[1].element_size(), item[0])):
            end = start + tensor.numel() * tensor.element_size()
            segments.append(Segment(name=name, dtype=tensor.dtype, shape=tensor.shape, start=start, end=end))
            start = end
        while -(-start // chunk_bytes) > MAX_CHUNKS:
            chunk_bytes *= 2
        return cls(segments=tuple(segments), size=start, chunk_bytes=chunk_bytes)

    @property
    def chunks(self) -> int:
        """How many there are."""
        return -(-self.size // self.chunk_bytes)

    def bounds(self, index: int) -> slice:
        """The bytes of a chunk; all but the last are of one size."""
        return slice(index * self.chunk_bytes, min((index + 1) * self.chunk_bytes, self.size))

    def image(self) -> torch.Tensor:
        """Memory for one state, uint8 [size], touched, so that a copy into it does not wait for the kernel."""
        return torch.empty(self.size, dtype=torch.uint8).zero_()

    def pack(self, state: StageState, image: torch.Tensor) -> None:
        """Copy a state, from whatever device, into an image."""
        tensors = state.tensors()
        for segment in self.segments:
            flat = tensors[segment.name].detach().contiguous().view(-1)
            image[segment.start : segment.end].copy_(flat.view(torch.uint8))

    def unpack(self, image: torch.Tensor, step: int) -> StageState:
        """The state in an image. Its tensors share the image's memory.

        Raises:
            MessageError: a value is not finite.
        """
        found = {}
        for segment in self.segments:
            tensor = image[segment.start : segment.end].view(segment.dtype).view(segment.shape)
            # The extremes are finite only if everything is; unlike a mask they need no memory.
            if tensor.is_floating_point() and not all(bool(extreme.isfinite()) for extreme in torch.aminmax(tensor)):
                raise MessageError(f"the tensor {segment.name} of a snapshot is not finite", kind="snapshot")
            found[segment.name] = tensor
        parameters = found.pop(PARAMETERS)
        optimizer = {name.removeprefix("optimizer."): tensor for name, tensor in found.items()}
        return StageState(step=step, parameters=parameters, optimizer=optimizer)

    def describe(self, image: torch.Tensor, *, step: int, parameters: bytes) -> SnapshotAnswer:
        """What a donor says of its image; ``parameters`` is their digest."""
        data = image.numpy()
        hashes = tuple(hashlib.sha256(data[self.bounds(index)].data).digest() for index in range(self.chunks))
        return SnapshotAnswer(
            step=step, size=self.size, parameters=parameters, chunk_bytes=self.chunk_bytes, chunks=hashes
        )

    def check(self, answer: SnapshotAnswer, step: int) -> None:
        """Look whether a description can be one of this stage's state before ``step``.

        Raises:
            MessageError: it cannot.
        """
        if answer.step != step:
            raise MessageError(f"a snapshot of step {answer.step} was offered, not of {step}", kind="snapshot")
        if answer.size != self.size or answer.chunk_bytes != self.chunk_bytes:
            raise MessageError(
                f"a snapshot of {answer.size} bytes in chunks of {answer.chunk_bytes} was offered,"
                f" {self.size} in chunks of {self.chunk_bytes} expected",
                kind="snapshot",
            )
        if len(answer.chunks) != self.chunks:
            raise MessageError("a snapshot names another number of chunks than its size has", kind="snapshot")
