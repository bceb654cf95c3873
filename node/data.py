"""The tokens that the model trains on: which ones belong to a step's microbatch follows from the data seed.

All documents stand one after another, each closed by the tokenizer's end mark (if it has one), cut into
windows of ``context`` tokens. A window comes with one more token, the label of its last, so a pass over all
windows trains on each token once. Sequence n of the training (n counts over all steps) belongs to pass
n // windows and reads window p(n % windows), where p is a permutation drawn for each pass. So nothing repeats
within a pass, any node can compute any sequence from (step, microbatch) alone, and no index takes memory.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch

from node.documents import read_documents
from node.tokenizer import Tokenizer
from protocol.errors import DataSourceError

if TYPE_CHECKING:
    from protocol.manifest_sections import DataSection

MAX_TOKENS = 1 << 30
"""Tokens are held in memory, 2 or 4 bytes each."""
_ROUNDS = 4


class TokenStream:
    """The tokens of a source, and the sequences cut from them. Immutable; usable from any thread."""

    def __init__(
        self,
        tokens: np.ndarray[tuple[int], np.dtype[np.unsignedinteger]],
        *,
        seed: int,
        sequences_per_step: int,
    ) -> None:
        """``tokens``: uint16 or uint32 [n], little endian; not copied."""
        self._tokens = tokens
        self._seed = seed
        self._sequences_per_step = sequences_per_step

    def __len__(self) -> int:
        """Number of tokens."""
        return len(self._tokens)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of the token ids, as they are stored, in hex: equal on nodes that read the same data."""
        digest = hashlib.sha256(f"{self._tokens.dtype.itemsize}:".encode())
        digest.update(self._tokens.data)
        return digest.hexdigest()

    def windows(self, context: int) -> int:
        """Sequences in one pass."""
        return max(0, len(self._tokens) - 1) // context

    def sequences(self, step: int, microbatch: int, *, per_microbatch: int, context: int) -> torch.Tensor:
        """The tokens of one microbatch, int64 [per_microbatch, context + 1]: inputs and, one later, labels.

        Raises:
            DataSourceError: the source is shorter than one sequence.
        """
        windows = self.windows(context)
        if windows == 0:
            raise DataSourceError(
                f"data.source: {len(self)} tokens are fewer than one sequence of {context + 1}; use more data"
            )
        first = step * self._sequences_per_step + microbatch * per_microbatch
        rows = np.empty((per_microbatch, context + 1), dtype=np.int64)
        for row, number in zip(rows, range(first, first + per_microbatch), strict=True):
            turn, index = divmod(number, windows)
            start = permuted(index, windows, f"sentinel:data:{self._seed}:{turn}:".encode()) * context
            row[:] = self._tokens[start : start + context + 1]
        return torch.from_numpy(rows)


def open_source(data: DataSection, tokenizer: Tokenizer, *, vocab_size: int, sequences_per_step: int) -> TokenStream:
    """Read the manifest's data source and encode it.

    Args:
        vocab_size: of the model; the tokenizer may have fewer ids, not more.
        sequences_per_step: of all replicas together.

    Raises:
        DataSourceError: the source cannot be read, is empty, too large, or does not fit the model.
    """
    if tokenizer.vocab_size > vocab_size:
        raise DataSourceError(
            f"data.tokenizer: has {tokenizer.vocab_size} token ids, and model.vocab_size is {vocab_size};"
            " raise that in the manifest, or use another tokenizer"
        )
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
    end = b"" if tokenizer.eos_id is None else np.array([tokenizer.eos_id], dtype=dtype).tobytes()
    # Grown in place, for a list of arrays and their concatenation would take twice the memory.
    buffer = bytearray()
    for piece in read_documents(data):
        if piece is None:
            buffer += end
            continue
        try:
            ids = tokenizer.encode_array(piece)
        except UnicodeEncodeError:
            raise DataSourceError(
                "data.source: a text holds half of a surrogate pair, which is no character; remove it"
            ) from None
        buffer += ids.astype(dtype).data
        if len(buffer) > MAX_TOKENS * dtype.itemsize:
            raise DataSourceError(f"data.source: has more than {MAX_TOKENS} tokens; use a part of it")
    if not buffer:
        raise DataSourceError(f"data.source: {data.source} holds no text; use another")
    return TokenStream(np.frombuffer(buffer, dtype=dtype), seed=data.seed, sequences_per_step=sequences_per_step)


def permuted(index: int, count: int, key: bytes) -> int:
    """Where ``index`` goes in the permutation of range(count) that ``key`` names.

    A Feistel network over the smallest power of four that holds ``count``, applied again while it leads
    outside the range; which ends, since a permutation comes back to where it started.
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(_ROUNDS):
            digest = hashlib.sha256(key + bytes([turn]) + right.to_bytes(8, "little")).digest()
            left, right = right, left ^ (int.from_bytes(digest[:8], "little") & mask)
        index = left << half | right
        if index < count:
            return index
