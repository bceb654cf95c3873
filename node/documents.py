"""The documents of a data source, read in pieces, in an order that is the same on every node.

A piece of text comes as a string, and None ends a document. Every problem is a DataSourceError of one line
that names the file and the fix.
"""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from protocol.errors import DataSourceError

if TYPE_CHECKING:
    from protocol.manifest_sections import DataSection

MAX_STDLIB_BYTES = 8 << 20
"""Python's library has some 12 MiB without tests; this much is plenty for a try, and loads in a moment."""

_SUFFIXES = frozenset({".txt", ".text", ".md", ".py", ".jsonl", ".parquet"})
"""What is read in a folder; a file that is named, or meets a pattern, is read whatever its suffix."""
_PIECE_BYTES = 1 << 20
_ROWS = 256

_SKIPPED_FOLDERS = frozenset(
    {
        *("test", "tests", "idle_test", "idlelib", "turtledemo", "__pycache__"),
        *("site-packages", "dist-packages", "lib-dynload"),
    }
)
_SKIPPED_FILES = ("_sysconfigdata", "sitecustomize", "usercustomize")
"""Written by whoever built or installed this Python, so they differ between machines."""


def read_documents(data: DataSection) -> Iterator[str | None]:
    """All documents of the source: pieces of text, and None after each document. Empty ones are left out.

    Raises:
        DataSourceError: missing, unreadable, not what the manifest names, or not text.
    """
    path = data.source.removeprefix("file:")
    files = _stdlib_files() if data.source == "stdlib" else _named_files(path)
    if data.source_sha256:
        _check_sha256(files, data.source_sha256.lower())
    for file in files:
        yield from _read_file(file, data.text_field)


def _read_file(file: Path, text_field: str) -> Iterator[str | None]:
    read = {".jsonl": _read_jsonl, ".parquet": _read_parquet}.get(file.suffix.lower())
    try:
        if read is None:
            yield from _read_text(file)
        else:
            for text in read(file, text_field):
                yield from (text, None)
    except OSError as error:
        raise _unreadable(file, error) from None


# which files ------------------------------------------------------------------------


def _stdlib_files() -> list[Path]:
    """Python's own source files in the order of their names, up to MAX_STDLIB_BYTES."""
    return list(_source_files(Path(sysconfig.get_path("stdlib"))))


@lru_cache(maxsize=1)
def _source_files(root: Path) -> tuple[Path, ...]:
    # Kept, since they do not change while a process runs and may be many nodes' in one process.
    chosen: list[Path] = []
    total = 0
    for file in _walk(root, lambda name: name not in _SKIPPED_FOLDERS and not name.startswith("config-")):
        if file.suffix != ".py" or file.name.startswith(_SKIPPED_FILES):
            continue
        size = file.stat().st_size
        if total + size > MAX_STDLIB_BYTES:
            break
        total += size
        chosen.append(file)
    if not chosen:
        raise DataSourceError(
            f'data.source: this Python comes without its source files ({root}); use "file:PATH" instead'
        )
    return tuple(chosen)


def _named_files(path: str) -> list[Path]:
    if Path(path).is_dir():
        files = [file for file in _walk(Path(path), lambda name: True) if file.suffix.lower() in _SUFFIXES]
        if not files:
            raise DataSourceError(
                f"data.source: the folder {path} holds no file that ends in {', '.join(sorted(_SUFFIXES))};"
                " put the data there"
            )
        return files
    if Path(path).exists() or not glob.has_magic(path):
        files = [Path(path)]
    else:
        files = sorted(Path(name) for name in glob.glob(path, recursive=True) if Path(name).is_file())
        if not files:
            raise DataSourceError(f"data.source: no file meets the pattern {path}; put the data there")
    if not files[0].exists():
        raise DataSourceError(f"data.source: there is no {path}; put the swarm's data at that path")
    if not files[0].is_file():
        raise DataSourceError(f"data.source: {path} is not a file or a folder; name one that is")
    return files


def _walk(root: Path, enter: Callable[[str], bool]) -> list[Path]:
    """Files below a folder, none of them hidden, sorted by their names relative to it."""

    def fail(error: OSError) -> None:
        raise _unreadable(Path(error.filename or root), error)

    found: list[Path] = []
    for folder, folders, names in os.walk(root, onerror=fail):
        folders[:] = [name for name in folders if not name.startswith(".") and enter(name)]
        found.extend(Path(folder, name) for name in names if not name.startswith("."))
    files = (file for file in found if file.is_file())
    return sorted(files, key=lambda file: file.relative_to(root).as_posix())


def _check_sha256(files: list[Path], expected: str) -> None:
    """Of one file the plain SHA-256; of several the SHA-256 of their digests, one after the other."""
    digests = []
    for file in files:
        try:
            with file.open("rb") as stream:
                digests.append(hashlib.file_digest(stream, "sha256"))
        except OSError as error:
            raise _unreadable(file, error) from None
    together = hashlib.sha256(b"".join(digest.digest() for digest in digests))
    found = (digests[0] if len(digests) == 1 else together).hexdigest()
    if found != expected:
        raise DataSourceError(
            f"data.source: the data here has SHA-256 {found}, and the manifest names {expected}; get the swarm's data"
        )


# what they hold ---------------------------------------------------------------------


def _read_text(file: Path) -> Iterator[str | None]:
    """The file as one document."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    empty = True
    with file.open("rb") as stream:
        while block := stream.read(_PIECE_BYTES):
            if text := _decode(decoder, block, file):
                empty = False
                yield text
    _decode(decoder, b"", file, final=True)
    if not empty:
        yield None


def _decode(decoder: codecs.IncrementalDecoder, block: bytes, file: Path, *, final: bool = False) -> str:
    try:
        return decoder.decode(block, final)
    except UnicodeDecodeError:
        raise DataSourceError(f"data.source: {file} is not UTF-8 text; convert it, or leave it out") from None


def _read_jsonl(file: Path, text_field: str) -> Iterator[str]:
    """A document a line: the text in one field of a JSON object."""
    with file.open("rb") as stream:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            where = f"line {number} of {file}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):  # ValueError: not JSON, or not UTF-8
                raise DataSourceError(f"data.source: {where} is not JSON; correct or remove it") from None
            if not isinstance(row, dict):
                raise DataSourceError(f"data.source: {where} is not a JSON object; correct or remove it")
            if text_field not in row:
                raise _no_field(where, text_field, row)
            yield from _texts([row[text_field]], where, text_field)


def _read_parquet(file: Path, text_field: str) -> Iterator[str]:
    """A document a row: the text in one column."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataSourceError(
            f"data.source: {file} needs the Python package pyarrow; install it, or use .jsonl"
        ) from None
    try:
        with parquet.ParquetFile(file) as table:
            names = table.schema_arrow.names
            if text_field not in names:
                raise _no_field(str(file), text_field, names)
            for batch in table.iter_batches(batch_size=_ROWS, columns=[text_field]):
                yield from _texts(batch.column(0).to_pylist(), str(file), text_field)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())[:120]
        raise DataSourceError(f"data.source: {file} cannot be read as parquet ({reason}); get the file again") from None


def _texts(values: Iterable[object], where: str, text_field: str) -> Iterator[str]:
    """The values that are text; nothing for null and empty text."""
    for value in values:
        if value is not None and not isinstance(value, str):
            raise DataSourceError(
                f"data.text_field: {text_field!r} in {where} holds no text but {type(value).__name__};"
                " name another field"
            )
        if value:
            yield value


def _no_field(where: str, text_field: str, names: Iterable[object]) -> DataSourceError:
    known = ", ".join([repr(str(name)[:40]) for name in names][:10]) or "nothing"
    return DataSourceError(f"data.text_field: {where} has no field {text_field!r}, but {known}; name one of these")


def _unreadable(file: Path, error: OSError) -> DataSourceError:
    reason = error.strerror or str(error)
    return DataSourceError(f"data.source: cannot read {file}: {reason}; check path and permissions")
