"""Text to token ids and back: bytes as they are, or a tokenizer.json read by the ``tokenizers`` library.

That library is imported only when it is needed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np

from protocol.errors import DataSourceError

if TYPE_CHECKING:
    import tokenizers

IdArray = np.ndarray[tuple[int], np.dtype[np.uint32]]

_BOS_NAMES = ("<s>", "<bos>", "<|begin_of_text|>", "<|startoftext|>", "<|bos|>", "[BOS]", "[CLS]")
_EOS_NAMES = ("</s>", "<eos>", "<|end_of_text|>", "<|endoftext|>", "<|eos|>", "[EOS]", "[SEP]")
_UNBOUNDED = int(1e30)
"""What transformers writes where a tokenizer has no longest text."""


class Tokenizer(Protocol):
    """What the node needs of a tokenizer. ``vocab_size`` is the largest id + 1."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def bos_id(self) -> int | None: ...
    @property
    def eos_id(self) -> int | None: ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, without marks. Raises UnicodeEncodeError for lone surrogates."""

    def encode_array(self, text: str) -> IdArray:
        """The same as a uint32 array [n], without a Python list where possible."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids. Marks are left out, and what is not valid text becomes U+FFFD."""

    def save(self, folder: Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which transformers' AutoTokenizer loads."""


class ByteTokenizer:
    """One token a byte of UTF-8, ids 0 to 255, and three marks."""

    vocab_size = 259
    bos_id = 256
    eos_id = 257
    pad_id = 258

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_array(self, text: str) -> IdArray:
        return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(value for value in ids if value < 256).decode(errors="replace")

    def save(self, folder: Path) -> None:
        """As the protocol says; in tokenizer.json a byte-level BPE without merges, which has the same ids."""
        import tokenizers
        from tokenizers import decoders, models, pre_tokenizers

        vocabulary = {character: byte for byte, character in enumerate(_byte_characters())}
        tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        marks = ["<|bos|>", "<|eos|>", "<|pad|>"]
        tokenizer.add_special_tokens([tokenizers.AddedToken(mark, special=True) for mark in marks])
        bos, eos, pad = marks
        _save(folder, tokenizer, {"bos_token": bos, "eos_token": eos, "pad_token": pad})


class FileTokenizer:
    """A tokenizer.json."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self._tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab(with_added_tokens=True)
        # The largest id, not the count: a vocabulary may have holes.
        self.vocab_size: int = max(vocabulary.values(), default=-1) + 1
        self._bos = next((name for name in _BOS_NAMES if name in vocabulary), None)
        self._eos = next((name for name in _EOS_NAMES if name in vocabulary), None)
        self.bos_id: int | None = None if self._bos is None else vocabulary[self._bos]
        self.eos_id: int | None = None if self._eos is None else vocabulary[self._eos]

    def encode(self, text: str) -> list[int]:
        text.encode()  # the library's own error for lone surrogates is of no fixed type
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def encode_array(self, text: str) -> IdArray:
        return np.asarray(self.encode(text), dtype=np.uint32)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def save(self, folder: Path) -> None:
        named = {"bos_token": self._bos, "eos_token": self._eos}
        _save(folder, self._tokenizer, {key: name for key, name in named.items() if name is not None})


def load_tokenizer(spec: str, sha256: str | None = None) -> Tokenizer:
    """The tokenizer that the manifest names: "bytes", or the path of a tokenizer.json.

    Args:
        sha256: what the file's SHA-256 has to be, in hex; empty or None for no check.

    Raises:
        DataSourceError: no such file, not a tokenizer, or another than ``sha256`` names.
    """
    if spec == "bytes":
        return ByteTokenizer()
    try:
        content = Path(spec).read_bytes()
    except OSError as error:
        raise DataSourceError(
            f"data.tokenizer: cannot read {spec}: {error.strerror}; put the swarm's tokenizer.json there"
        ) from None
    found = hashlib.sha256(content).hexdigest()
    if sha256 and found != sha256.lower():
        raise DataSourceError(
            f"data.tokenizer: {spec} has SHA-256 {found}, and the manifest names {sha256}; get the swarm's file"
        )
    try:
        import tokenizers
    except ImportError:
        raise DataSourceError(
            "data.tokenizer: a tokenizer.json needs the Python package tokenizers; install it"
        ) from None
    try:
        return FileTokenizer(tokenizers.Tokenizer.from_buffer(content))
    except Exception as error:  # the library raises plain Exception
        reason = " ".join(str(error).split())[:120]
        raise DataSourceError(
            f"data.tokenizer: {spec} is not a tokenizer.json ({reason}); save it again with the tokenizers library"
        ) from None


def _byte_characters() -> list[str]:
    """The printable character by which byte-level BPE writes each byte: its own, or one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(spare)) for byte in range(256)]


def _save(folder: Path, tokenizer: tokenizers.Tokenizer, marks: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": _UNBOUNDED,
        # Otherwise transformers 4 adds token types, which a Llama refuses.
        "model_input_names": ["input_ids", "attention_mask"],
        **marks,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
