"""Every node computes the same sequences from the same source, and bad sources are refused with a remedy."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from node import data as module
from node import documents
from node.data import TokenStream, open_source, permuted
from node.tokenizer import ByteTokenizer, load_tokenizer
from protocol.errors import DataSourceError
from protocol.manifest_sections import DataSection

EOS = ByteTokenizer.eos_id


def open_path(path: Path | str, **fields: object) -> TokenStream:
    section = DataSection.model_validate({"source": f"file:{path}", **fields})
    return open_source(section, ByteTokenizer(), vocab_size=260, sequences_per_step=8)


def refused(path: Path | str, **fields: object) -> str:
    """The one line with which a source is refused."""
    with pytest.raises(DataSourceError) as caught:
        open_path(path, **fields)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith("data.")
    assert ";" in message, "a remedy follows the cause"
    return message


def ids(stream: TokenStream) -> list[int]:
    """All tokens, read back through sequences (all but a remainder)."""
    windows = stream.windows(1)
    starts = {}
    for number in range(windows):
        pair = stream.sequences(0, number, per_microbatch=1, context=1)[0].tolist()
        starts[permuted(number, windows, b"sentinel:data:0:0:")] = pair
    return [starts[0][0]] + [starts[index][1] for index in range(windows)]


def counting_stream(length: int, *, seed: int = 0, sequences_per_step: int = 8) -> TokenStream:
    return TokenStream(np.arange(length, dtype="<u2"), seed=seed, sequences_per_step=sequences_per_step)


class TestSequences:
    @settings(max_examples=100, deadline=None)
    @given(
        length=st.integers(2, 2000),
        context=st.integers(1, 50),
        seed=st.integers(0, 2**32 - 1),
        step=st.integers(0, 10**9),
        microbatch=st.integers(0, 3),
    )
    def test_they_follow_from_seed_step_and_microbatch_alone(
        self, length: int, context: int, seed: int, step: int, microbatch: int
    ) -> None:
        if length <= context:
            length += context
        one, other = (counting_stream(length, seed=seed) for _ in range(2))
        other.sequences(step + 1, 0, per_microbatch=2, context=context)
        first, second = (
            stream.sequences(step, microbatch, per_microbatch=2, context=context) for stream in (one, other)
        )
        assert first.dtype == torch.int64
        assert first.shape == (2, context + 1)
        assert torch.equal(first, second)
        assert torch.equal(first[:, 1:], first[:, :-1] + 1), "each row is a run of the stream"
        assert not (first[:, 0] % context).any()

    def test_a_pass_reads_every_window_once(self) -> None:
        stream = counting_stream(10 * 24 + 1)
        starts = [
            int(row[0])
            for step in range(3)
            for number in range(4)
            for row in stream.sequences(step, number, per_microbatch=2, context=10)
        ]
        assert sorted(starts) == list(range(0, 240, 10))
        assert starts != sorted(starts)

    def test_passes_differ_in_order(self) -> None:
        stream = counting_stream(10 * 24 + 1, sequences_per_step=24)
        first, second = (stream.sequences(step, 0, per_microbatch=24, context=10)[:, 0].tolist() for step in (0, 1))
        assert sorted(first) == sorted(second)
        assert first != second

    def test_the_size_of_a_microbatch_does_not_change_a_step(self) -> None:
        stream = counting_stream(5000)
        whole = stream.sequences(7, 0, per_microbatch=8, context=10)
        parts = [stream.sequences(7, number, per_microbatch=2, context=10) for number in range(4)]
        assert torch.equal(torch.cat(parts), whole)

    def test_another_seed_gives_another_order(self) -> None:
        first, second = (
            counting_stream(5000, seed=seed).sequences(0, 0, per_microbatch=8, context=10) for seed in (0, 1)
        )
        assert not torch.equal(first, second)

    def test_they_are_the_same_in_every_release(self) -> None:
        rows = counting_stream(5000, seed=3).sequences(2, 1, per_microbatch=4, context=10)
        assert rows[:, 0].tolist() == [900, 4100, 1330, 2060]

    def test_a_source_shorter_than_a_sequence_is_refused(self) -> None:
        assert counting_stream(11).sequences(0, 0, per_microbatch=1, context=10).shape == (1, 11)
        with pytest.raises(DataSourceError, match="10 tokens are fewer than one sequence of 11"):
            counting_stream(10).sequences(0, 0, per_microbatch=1, context=10)

    @settings(deadline=None)
    @given(st.integers(1, 300), st.binary(max_size=8))
    def test_permuted_is_a_permutation(self, count: int, key: bytes) -> None:
        assert sorted(permuted(index, count, key) for index in range(count)) == list(range(count))


class TestStdlib:
    def test_it_loads_fast_small_and_the_same_each_time(self) -> None:
        started = time.process_time()
        streams = [open_source(DataSection(), ByteTokenizer(), vocab_size=260, sequences_per_step=8) for _ in range(2)]
        seconds = time.process_time() - started
        assert streams[0].fingerprint == streams[1].fingerprint
        assert 4 << 20 < len(streams[0]) < 9 << 20
        assert streams[0]._tokens.itemsize == 2
        assert seconds < 4.0

    def test_it_reads_the_library_and_not_what_was_installed(self) -> None:
        files = documents._stdlib_files()
        assert len(files) > 200
        assert all(file.suffix == ".py" for file in files)
        assert not any({"site-packages", "test", "idlelib", "__pycache__"} & set(file.parts) for file in files)
        assert sum(file.stat().st_size for file in files) <= documents.MAX_STDLIB_BYTES

    def test_a_python_without_sources_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sysconfig.get_path", lambda name: str(tmp_path))
        with pytest.raises(DataSourceError, match="file:PATH"):
            open_source(DataSection(), ByteTokenizer(), vocab_size=260, sequences_per_step=8)


class TestFiles:
    def test_text_is_one_document(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_bytes("naïve\r\n".encode())
        assert ids(open_path(path)) == [*"naïve\r\n".encode(), EOS]

    def test_long_text_is_read_in_pieces(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = tmp_path / "a.txt"
        path.write_text("日本語" * 50, encoding="utf-8")
        whole = open_path(path).fingerprint
        monkeypatch.setattr(documents, "_PIECE_BYTES", 7)
        assert open_path(path).fingerprint == whole

    def test_jsonl_is_a_document_a_line(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        path.write_text('{"text": "ab", "n": 1}\n\n{"text": ""}\n{"text": null}\n{"text": "c"}')
        assert ids(open_path(path)) == [97, 98, EOS, 99, EOS]

    def test_parquet_is_a_document_a_row(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        parquet.write_table(pa.table({"n": [1, 2, 3, 4], "body": ["ab", None, "", "c"]}), path)
        assert ids(open_path(path, text_field="body")) == [97, 98, EOS, 99, EOS]

    def test_a_folder_is_read_in_the_order_of_names(self, tmp_path: Path) -> None:
        (tmp_path / "z").mkdir()
        (tmp_path / "z" / "a.txt").write_text("3")
        (tmp_path / "b.jsonl").write_text(json.dumps({"text": "2"}))
        (tmp_path / "a.txt").write_text("1")
        (tmp_path / "empty.txt").write_text("")
        (tmp_path / ".hidden.txt").write_text("no")
        (tmp_path / "picture.png").write_bytes(b"\xff\xd8")
        assert ids(open_path(tmp_path)) == [ord("1"), EOS, ord("2"), EOS, ord("3"), EOS]

    def test_a_pattern_takes_what_it_meets(self, tmp_path: Path) -> None:
        for name in ("b.log", "a.log", "c.txt"):
            (tmp_path / name).write_text(name[0])
        assert ids(open_path(f"{tmp_path}/*.log")) == [97, EOS, 98, EOS]

    def test_a_name_with_brackets_is_no_pattern_when_it_exists(self, tmp_path: Path) -> None:
        path = tmp_path / "a[1].txt"
        path.write_text("xy")
        assert ids(open_path(path)) == [120, 121, EOS]

    def test_more_than_16_bits_are_kept(self, tmp_path: Path) -> None:
        class Large(ByteTokenizer):
            vocab_size = 70_000
            eos_id = 69_999

        (tmp_path / "a.txt").write_text("ab")
        section = DataSection(source=f"file:{tmp_path}/a.txt")
        stream = open_source(section, Large(), vocab_size=70_000, sequences_per_step=8)
        assert ids(stream) == [97, 98, 69_999]

    def test_the_fingerprint_tells_sources_apart(self, tmp_path: Path) -> None:
        prints = set()
        for text in ("ab", "ba", "ab "):
            (tmp_path / "a.txt").write_text(text)
            prints.add(open_path(tmp_path / "a.txt").fingerprint)
        assert len(prints) == 3
        assert all(len(value) == 64 for value in prints)


class TestHash:
    def test_one_file_has_its_own(self, tmp_path: Path) -> None:
        path = tmp_path / "a.txt"
        path.write_text("hello")
        digest = hashlib.sha256(b"hello").hexdigest()
        assert len(open_path(path, source_sha256=digest)) == 6
        assert digest in refused(path, source_sha256="0" * 64)

    def test_a_folder_has_that_of_its_files(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            (tmp_path / f"{name}.txt").write_text(name)
        together = hashlib.sha256(hashlib.sha256(b"a").digest() + hashlib.sha256(b"b").digest()).hexdigest()
        assert len(open_path(tmp_path, source_sha256=together)) == 4
        assert together in refused(tmp_path, source_sha256="0" * 64)


class TestRefusals:
    def test_a_missing_path(self, tmp_path: Path) -> None:
        assert "there is no" in refused(tmp_path / "none.txt")
        assert "pattern" in refused(tmp_path / "*.txt")

    def test_an_empty_source(self, tmp_path: Path) -> None:
        assert "no file" in refused(tmp_path)
        (tmp_path / "a.txt").write_text("")
        assert "no text" in refused(tmp_path / "a.txt")

    @pytest.mark.skipif(not Path("/dev/zero").exists(), reason="no device files here")
    def test_a_device_is_no_file(self) -> None:
        assert "not a file" in refused("/dev/zero")

    def test_an_unreadable_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "a.txt").write_text("x")

        def denied(self: Path, mode: str) -> object:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "open", denied)  # a test that runs as root can read everything
        assert "Permission denied" in refused(tmp_path / "a.txt")
        assert "Permission denied" in refused(tmp_path / "a.txt", source_sha256="0" * 64)

    @pytest.mark.parametrize("content", [b"caf\xe9", b"\xff\xfeh\x00", b"\x1f\x8b\x08", b"ok \xe6\x97"])
    def test_what_is_not_utf8(self, tmp_path: Path, content: bytes) -> None:
        (tmp_path / "a.txt").write_bytes(content)
        assert "UTF-8" in refused(tmp_path / "a.txt")

    @pytest.mark.parametrize(
        ("line", "reason"),
        [
            (b"{", "line 2 of"),
            (b'{"text": "\xff"}', "not JSON"),
            (b"[" * 200_000, "not JSON"),
            (b'["text"]', "not a JSON object"),
            (b'{"body": "x", "n": 1}', "no field 'text', but 'body', 'n'"),
            (b"{}", "no field 'text', but nothing"),
            (b'{"text": 5}', "no text but int"),
            (b'{"text": "\\ud800"}', "surrogate"),
        ],
    )
    def test_a_bad_line(self, tmp_path: Path, line: bytes, reason: str) -> None:
        path = tmp_path / "a.jsonl"
        path.write_bytes(b'{"text": "fine"}\n' + line + b"\n")
        assert reason in refused(path)

    def test_a_bad_parquet(self, tmp_path: Path) -> None:
        path = tmp_path / "a.parquet"
        path.write_bytes(b"PAR1 but no more")
        assert "cannot be read as parquet" in refused(path)
        parquet.write_table(pa.table({"body": ["x"], "n": [1]}), path)
        assert "no field 'text', but 'body', 'n'" in refused(path)
        assert "no text but int" in refused(path, text_field="n")

    def test_parquet_without_pyarrow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        parquet.write_table(pa.table({"text": ["x"]}), tmp_path / "a.parquet")
        monkeypatch.setitem(sys.modules, "pyarrow", None)
        assert "install it" in refused(tmp_path / "a.parquet")

    def test_a_vocabulary_larger_than_the_models(self) -> None:
        with pytest.raises(DataSourceError, match="has 259 token ids"):
            open_source(DataSection(), load_tokenizer("bytes"), vocab_size=258, sequences_per_step=8)

    def test_more_tokens_than_fit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "a.txt").write_text("abcd")
        monkeypatch.setattr(module, "MAX_TOKENS", 3)
        assert "more than 3 tokens" in refused(tmp_path / "a.txt")
