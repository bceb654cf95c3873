"""Gives checkpoint files to whoever asks: nodes that keep copies, volunteers of a stage that was lost, and exporters.

Files are read where they lie, so training is not held up; what was offered can be fetched though newer checkpoints have
taken its place. A checkpoint holds nothing that a joiner would not get as well; what is bounded is how much of the disk
and of the line strangers can take.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from node.checkpoints import CheckpointError, checkpoint_name, find_checkpoints, peek, stage_and_step
from node.held_checkpoints import FileFacts, HeldCheckpoints
from protocol.errors import LocalError, RefusedError
from protocol.fields import decode, encode
from protocol.messages import (
    MAX_OFFERED_CHECKPOINTS,
    CheckpointOffers,
    CheckpointPart,
    CheckpointQuery,
    Method,
)
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport

MAX_AT_ONCE = 4
"""Answers that are being read from the disk; others are told to come again."""


class CheckpointServer:
    """Answers with the files in some folders."""

    def __init__(self, transport: Transport, folders: Callable[[], Sequence[Path]]) -> None:
        """``folders()``: where checkpoints of this swarm lie, those that count most first."""
        self._folders = folders
        self._known: dict[Path, tuple[float, FileFacts]] = {}
        """What a file's header said, by the time of its last change."""
        self._listing = threading.Lock()
        self._held = HeldCheckpoints()
        self._reading: set[str] = set()
        transport.serve(Method.CHECKPOINTS, Route(handler=self._serve_list))
        transport.serve(Method.CHECKPOINT_PART, Route(handler=self._serve_part))

    def close(self) -> None:
        """Close the files that were kept open for those who fetch them."""
        self._held.close()

    async def _serve_list(self, request: Request) -> Response:
        stage = decode(CheckpointQuery, request.head).stage
        with _turn(self._reading, request.peer):
            found = await asyncio.to_thread(self._list, stage)
        newest = sorted(self._held.offer(stage, found).items(), reverse=True)[:MAX_OFFERED_CHECKPOINTS]
        return Response(
            head=encode(
                CheckpointOffers(
                    steps=tuple(step for step, _ in newest),
                    sizes=tuple(facts.size for _, facts in newest),
                    parameters=tuple(facts.parameters for _, facts in newest),
                )
            )
        )

    async def _serve_part(self, request: Request) -> Response:
        message = decode(CheckpointPart, request.head)
        with _turn(self._reading, request.peer):
            descriptor = self._held.open(message.stage, message.step)
            if descriptor is None:
                descriptor = self._open(message.stage, message.step)
            try:
                part = await asyncio.to_thread(_read, descriptor, message)
            finally:
                os.close(descriptor)
        return Response(body=(part,))

    def _list(self, stage: int) -> dict[int, FileFacts]:
        """The checkpoints of a stage on the disk, by step."""
        with self._listing:
            return self._look(stage)

    def _look(self, stage: int) -> dict[int, FileFacts]:
        found: dict[int, FileFacts] = {}
        present: set[Path] = set()
        for folder in self._folders():
            for path in find_checkpoints(folder):
                present.add(path)
                place, step = stage_and_step(path)
                if place != stage or step in found:
                    continue
                try:
                    changed = path.stat().st_mtime
                    if path not in self._known or self._known[path][0] != changed:
                        size, parameters = peek(path)
                        self._known[path] = (changed, FileFacts(path=path, size=size, parameters=parameters))
                except (OSError, CheckpointError):
                    continue  # gone meanwhile, or damaged, which its owner finds out
                found[step] = self._known[path][1]
        for path in self._known.keys() - present:
            del self._known[path]
        return found

    def _open(self, stage: int, step: int) -> int:
        for folder in self._folders():
            try:
                return os.open(folder / checkpoint_name(stage, step), os.O_RDONLY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise LocalError(f"a checkpoint cannot be read: {error.strerror}") from None
        raise RefusedError(f"there is no checkpoint of step {step} here any more", kind="too_old")


def _read(descriptor: int, message: CheckpointPart) -> bytes:
    try:
        part = os.pread(descriptor, message.length, message.offset)
    except OSError as error:
        raise LocalError(f"a checkpoint cannot be read: {error.strerror}") from None
    if not part:
        raise RefusedError("the checkpoint ends before that", kind="range")
    return part


@contextlib.contextmanager
def _turn(reading: set[str], peer: str) -> Iterator[None]:
    """One request of a peer at a time, and few in all."""
    if peer in reading or len(reading) >= MAX_AT_ONCE:
        raise RefusedError("other checkpoints are being read just now", kind="busy")
    reading.add(peer)
    try:
        yield
    finally:
        reading.discard(peer)
