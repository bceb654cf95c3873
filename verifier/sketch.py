"""A signed, low-dimensional picture of a tensor, small enough to travel with every message.

A receiver wants to relate what a peer sends to what that peer was sent, and it has only the first
tensor. So each sender signs a sketch of what it sends, and a peer hands on, with its own output, the
signed sketch of its input. In a pre-norm residual network a stage's output is its input plus
something, token by token, so the cosine of the two is clearly positive; it falls to zero for a tensor
that belongs to another microbatch or got random signs, and below zero for a flipped one.

The sketch: subtract each feature's mean over the tokens (a common bias would make any two tensors
look alike), cut the tokens that outweigh all others, multiply by +-1 signs drawn from a key, and fold
the result into ``size`` sums. The folding is linear, it keeps inner products in expectation, and its
cosines err by about 1/sqrt(size).

Signs come from SHAKE-256 and not from a torch generator: sender and receiver must agree on every bit,
and torch does not promise the same random stream across releases. Whoever knows the key can build a
tensor with a chosen sketch, so the key should change from step to step.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from functools import lru_cache

import torch
from torch import Tensor

KEY_BYTES = 32

CACHED_SIGNS = 4
"""Sign vectors kept, one per (key, shape) in use: this step's and the last one's, with room for two
boundary shapes. Each is as large as a float32 boundary tensor, hence few."""


KEPT_SHAPES = 2
"""Shapes for which scratch memory is kept."""


class Scratch:
    """Memory to compute sketches in. For one thread at a time: to allocate it anew costs more than the computing."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[int, int, int], tuple[Tensor, Tensor]] = OrderedDict()

    def room(self, tokens: int, width: int, size: int) -> tuple[Tensor, Tensor]:
        """Zeros, [n] with n a multiple of ``size``, and within them a view [tokens, width] to write into.

        Between the rows of the view, and behind it, the zeros stay.
        """
        found = self._kept.get((tokens, width, size))
        if found is None:
            row = _row_length(width, size)
            padded = torch.zeros(-(-tokens * row // size) * size)
            found = self._kept[tokens, width, size] = padded, padded[: tokens * row].view(tokens, row)[:, :width]
            while len(self._kept) > KEPT_SHAPES:
                self._kept.popitem(last=False)
        return found


def sketch(tensor: Tensor, *, key: bytes, size: int, scratch: Scratch | None = None) -> Tensor:
    """A float32 vector [size] that depends only on ``tensor`` [..., d] and ``key`` (32 bytes).

    ``scratch``: memory to use again, of the calling thread.
    Scaling the tensor scales the sketch. Raises ValueError for a key of another length or a size below 1.
    """
    _check(key, size)
    source = tensor.detach().reshape(-1, tensor.shape[-1])
    tokens, width = source.shape
    padded, cloud = (scratch or Scratch()).room(tokens, width, size)
    _temper_(torch.sub(source, source.mean(dim=0, keepdim=True), out=cloud))
    cloud.mul_(_signs(key, tokens, width))
    return padded.view(-1, size).sum(dim=0)


def temper(tensor: Tensor) -> Tensor:
    """The cloud of tokens [N, d], centred per feature, with no token much longer than the median one.

    The gradient of an RMS norm grows with the inverse of a token's size, so a handful of rare tokens now and
    then carry most of a gradient's energy, and a stage changes exactly those most. Unclipped, the cosine of
    an honest stage's gradients falls below 0.1 once in a thousand microbatches; clipped, it stays above 0.7.
    Heavy tokens also shift the mean by which lengths are measured, so there are two rounds.
    """
    cloud = tensor.detach().reshape(-1, tensor.shape[-1]).float()
    return _temper_(cloud - cloud.mean(dim=0, keepdim=True))


def project(cloud: Tensor, *, key: bytes, size: int) -> Tensor:
    """Fold [N, d] float32 into [size]: linear, and on average true to inner products."""
    _check(key, size)
    tokens, width = cloud.shape
    padded, room = Scratch().room(tokens, width, size)
    torch.mul(cloud, _signs(key, tokens, width), out=room)
    return padded.view(-1, size).sum(dim=0)


def cosine(a: Tensor, b: Tensor) -> float:
    """Cosine of two sketches, in [-1, 1]; 0 when one of them is all zero."""
    norms = _norm(a) * _norm(b)
    if norms == 0.0:
        return 0.0
    inner = float(torch.dot(a.double(), b.double()))
    return max(-1.0, min(1.0, inner / norms)) if math.isfinite(norms) else math.nan


def gain(a: Tensor, b: Tensor) -> float:
    """log(|a| / |b|): how much larger ``a`` is, as a natural logarithm. Never infinite for finite input."""
    return math.log(max(_norm(a), _SMALLEST_NORM)) - math.log(max(_norm(b), _SMALLEST_NORM))


_SMALLEST_NORM = 1e-30


def _norm(sketch: Tensor) -> float:
    return float(torch.linalg.vector_norm(sketch, dtype=torch.float64))


def _check(key: bytes, size: int) -> None:
    if len(key) != KEY_BYTES:
        raise ValueError(f"a sketch key has {KEY_BYTES} bytes, got {len(key)}")
    if size < 1:
        raise ValueError(f"a sketch has at least one entry, got size {size}")


def _temper_(cloud: Tensor) -> Tensor:
    """In place, of a cloud that is centred already."""
    _clip_(cloud)
    return _clip_(cloud.sub_(cloud.mean(dim=0, keepdim=True)))


def _clip_(cloud: Tensor) -> Tensor:
    """Shorten, in place, each token that is longer than the median one."""
    lengths = torch.linalg.vector_norm(cloud, dim=1, keepdim=True)
    return cloud.mul_((lengths.median() / lengths.clamp_min(_SMALLEST_NORM)).clamp_(max=1.0))


def _row_length(width: int, size: int) -> int:
    """The shortest row that holds ``width`` features and shares no factor with ``size``.

    With a common factor a feature would always land in the same few sums, and a single massive feature
    (every large transformer grows some) would leave only those sums to carry the whole picture.
    """
    row = width
    while math.gcd(row, size) != 1:
        row += 1
    return row


@lru_cache(maxsize=CACHED_SIGNS)
def _signs(key: bytes, tokens: int, width: int) -> Tensor:
    """+-1 as float32 [tokens, width]: the bits of SHAKE-256 over key and shape."""
    count = tokens * width
    shape = tokens.to_bytes(8, "big") + width.to_bytes(8, "big")
    digest = hashlib.shake_256(key + shape).digest(-(-count // 8))
    packed = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    bits = packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8) & 1
    return (bits.reshape(-1)[:count].float() * 2 - 1).view(tokens, width)
