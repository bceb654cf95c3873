"""Text survives the way through token ids, and transformers reads what is saved."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers, trainers

from node.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from protocol.errors import DataSourceError

TEXTS = ["", "plain", "two  spaces\n\tand lines\r\n", "naïve café — 日本語 🙂", "\x00\x7f\u0100"]


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small byte-level BPE with the usual marks."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat and the hat and the bat"] * 20, trainer)
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture(params=["bytes", "file"])
def tokenizer(request: pytest.FixtureRequest, tokenizer_file: Path) -> Tokenizer:
    return load_tokenizer("bytes" if request.param == "bytes" else str(tokenizer_file))


class TestBoth:
    @pytest.mark.parametrize("text", TEXTS)
    def test_text_survives(self, tokenizer: Tokenizer, text: str) -> None:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert all(0 <= value < tokenizer.vocab_size for value in ids)

    @pytest.mark.parametrize("text", TEXTS)
    def test_the_array_holds_the_same_ids(self, tokenizer: Tokenizer, text: str) -> None:
        array = tokenizer.encode_array(text)
        assert array.dtype == np.uint32
        assert array.tolist() == tokenizer.encode(text)

    @pytest.mark.parametrize("text", TEXTS)
    def test_transformers_reads_what_is_saved(self, tokenizer: Tokenizer, text: str, tmp_path: Path) -> None:
        tokenizer.save(tmp_path / "new")
        loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "new")
        assert loaded.encode(text, add_special_tokens=False) == tokenizer.encode(text)
        assert loaded.decode(tokenizer.encode(text)) == text
        assert len(loaded) == tokenizer.vocab_size
        assert (loaded.bos_token_id, loaded.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)

    def test_marks_are_no_text(self, tokenizer: Tokenizer) -> None:
        assert tokenizer.bos_id is not None
        assert tokenizer.eos_id is not None
        ids = [tokenizer.bos_id, *tokenizer.encode("hat"), tokenizer.eos_id]
        assert tokenizer.decode(ids) == "hat"

    def test_lone_surrogates_are_refused(self, tokenizer: Tokenizer) -> None:
        for encode in (tokenizer.encode, tokenizer.encode_array):
            with pytest.raises(UnicodeEncodeError):
                encode("a\ud800b")


class TestBytes:
    @given(st.text())
    def test_ids_are_the_bytes(self, text: str) -> None:
        assert bytes(ByteTokenizer().encode(text)) == text.encode()

    def test_broken_text_is_marked_as_such(self) -> None:
        assert ByteTokenizer().decode([0x61, 0xFF, 0x62]) == "a\ufffdb"

    def test_marks_follow_the_bytes(self) -> None:
        tokenizer = ByteTokenizer()
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (256, 257, 258, 259)

    def test_every_byte_keeps_its_id_when_saved(self, tmp_path: Path) -> None:
        ByteTokenizer().save(tmp_path)
        saved = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
        text = "".join(chr(code) for code in range(0x800)) + "\uffff\U0010ffff"
        assert saved.encode(text).ids == list(text.encode())


class TestFile:
    def test_the_right_hash_is_accepted(self, tokenizer_file: Path) -> None:
        digest = hashlib.sha256(tokenizer_file.read_bytes()).hexdigest()
        assert load_tokenizer(str(tokenizer_file), digest.upper()).decode([0]) == ""

    def test_another_hash_is_refused(self, tokenizer_file: Path) -> None:
        with pytest.raises(DataSourceError, match="SHA-256"):
            load_tokenizer(str(tokenizer_file), "0" * 64)

    @pytest.mark.parametrize(
        ("content", "reason"),
        [(None, "No such file"), *((content, "not a tokenizer") for content in (b"", b"{}", b"\xff\x00"))],
    )
    def test_what_is_no_tokenizer_is_refused_in_one_line(
        self, tmp_path: Path, content: bytes | None, reason: str
    ) -> None:
        path = tmp_path / "tokenizer.json"
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(DataSourceError, match=reason) as caught:
            load_tokenizer(str(path))
        assert str(path) in str(caught.value)
        assert "\n" not in str(caught.value)

    def test_a_folder_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(DataSourceError, match="directory"):
            load_tokenizer(str(tmp_path))

    def test_a_vocabulary_with_holes_counts_to_its_largest_id(self, tmp_path: Path) -> None:
        path = tmp_path / "tokenizer.json"
        tokenizers.Tokenizer(models.WordLevel({"a": 0, "b": 9}, unk_token="a")).save(str(path))
        tokenizer = load_tokenizer(str(path))
        assert (tokenizer.vocab_size, tokenizer.bos_id, tokenizer.eos_id) == (10, None, None)
