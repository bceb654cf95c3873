"""Checkpoints of a stage on disk: written whole or not at all, and read only if no bit of them has changed.

A checkpoint is one safetensors file, ``checkpoints/SWARM/stage-S-step-N.safetensors``: parameters and optimizer
state after N steps. Its metadata holds the manifest, so that the file alone tells what it is of, and a SHA-256 over
all bytes of the file, with zeros in the place of the digest itself. Knows nothing of peers and of the event loop.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Final

import torch

from node import tensor_file
from node.digest import parameter_digest
from node.snapshot import PARAMETERS, StageState
from node.state_folder import remove_unfinished, replacing
from node.tensor_file import DTYPES, chunks
from protocol.errors import LocalError, ManifestError
from protocol.fields import MAX_STEP
from protocol.manifest import MAX_MANIFEST_BYTES, Manifest

log = logging.getLogger(__name__)

FORMAT: Final = "1"
"""Written into the file; another one is a file of another version of this software."""

MAX_HEADER_BYTES: Final = 4 * MAX_MANIFEST_BYTES
"""The manifest in base64, and the names of the tensors."""

BYTES_PER_PARAMETER: Final = 12
"""The parameter and the two averages of the optimizer, in fp32."""

_NAME = re.compile(r"stage-(\d{1,3})-step-(\d{1,12})\.safetensors")
_DIGEST_KEY: Final = b'"sha256":"'
_NO_DIGEST: Final = "0" * 64


class CheckpointError(LocalError):
    """A checkpoint cannot be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A file is not the checkpoint that was written, or never was one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint that has been checked: of which manifest, stage and step, and where it is.

    ``parameters`` is their digest (32 bytes), ``saved`` the Unix time.
    """

    path: Path
    manifest: Manifest
    stage: int
    step: int
    parameters: bytes
    saved: float


class CheckpointStore:
    """The checkpoints of one swarm in a state folder. One process at a time."""

    def __init__(self, folder: Path, manifest: Manifest, *, keep: int) -> None:
        """``folder`` is for the checkpoints of all swarms. ``keep``: how many of a stage stay; 0 writes none."""
        self.folder = folder / manifest.swarm_id[:16]
        self.keep = keep
        self._manifest = manifest

    def check_all(self) -> tuple[list[Checkpoint], list[CheckpointError]]:
        """Read every checkpoint; returns the sound ones, newest first, and what is wrong with the others.

        Damaged files are kept under another name. Also removes what an earlier process left half written.
        """
        remove_unfinished(self.folder)
        sound: list[Checkpoint] = []
        errors: list[CheckpointError] = []
        for path in find_checkpoints(self.folder):
            try:
                sound.append(self._own(check_checkpoint(path)))
            except CheckpointError as error:
                errors.append(error)
                if isinstance(error, DamagedCheckpointError):
                    _set_aside(path)
        return sorted(sound, key=lambda found: found.step, reverse=True), errors

    def load(self, checkpoint: Checkpoint) -> StageState:
        """The state in a checkpoint.

        Raises:
            CheckpointError: it is gone, or damaged and now under another name.
        """
        try:
            found, state = read_checkpoint(checkpoint.path)
        except DamagedCheckpointError:
            _set_aside(checkpoint.path)
            raise
        if found != checkpoint:
            raise CheckpointError(f"{checkpoint.path} is another checkpoint than it was; let one node use the folder")
        return state

    def save(self, stage: int, state: StageState, *, now: float) -> Checkpoint:
        """Write a checkpoint, and then remove older ones of the stage than those to keep.

        Raises:
            CheckpointError: it could not be written; those that were there before are there still.
        """
        path = self.folder / checkpoint_name(stage, state.step)
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            saved = write_checkpoint(path, state, manifest=self._manifest, stage=stage, now=now)
        except OSError as error:
            size = BYTES_PER_PARAMETER * state.parameters.numel()
            raise CheckpointError(
                f"the checkpoint of step {state.step} could not be written: {error.strerror or error}; make room for "
                f"{-(-size >> 20)} MiB in {self.folder}, or give up checkpoints with --checkpoints 0"
            ) from None
        for old in self._outdated(stage, state.step):
            try:
                old.unlink(missing_ok=True)
            except OSError as error:
                log.warning("the old checkpoint %s stays: %s", old, error)
        return saved

    def _own(self, checkpoint: Checkpoint) -> Checkpoint:
        if checkpoint.manifest != self._manifest:
            raise CheckpointError(f"{checkpoint.path} is of another swarm; move it out of this folder")
        return checkpoint

    def _outdated(self, stage: int, step: int) -> list[Path]:
        """What need not be kept beside a new checkpoint.

        Other stages have the steps that are multiples of the interval, so ``keep`` of those stay, whatever else a
        node wrote when it left. Those of later steps stay as well: they were written before the swarm went back to
        an earlier step, and nobody can tell whether it will not need them.
        """
        interval = self._manifest.training.checkpoint_steps
        named = {stage_and_step(path): path for path in find_checkpoints(self.folder)}
        present = {number: path for (place, number), path in named.items() if place == stage}
        older = sorted(number for number in present if number <= step)
        common = [number for number in older if number % interval == 0]
        kept = {*common[-self.keep :], older[-1]}
        return [present[number] for number in older if number not in kept]


def find_checkpoints(folder: Path) -> list[Path]:
    """The files in a folder that are named like checkpoints, in order; none if there is no such folder."""
    return sorted(path for path in folder.glob("stage-*-step-*.safetensors") if _NAME.fullmatch(path.name))


def stage_and_step(path: Path) -> tuple[int, int]:
    """What a checkpoint is of, by its name. Raises ValueError if it is not named like one."""
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise ValueError("its name is not that of a checkpoint")
    return int(match[1]), int(match[2])


def write_checkpoint(path: Path, state: StageState, *, manifest: Manifest, stage: int, now: float) -> Checkpoint:
    """Write a state to a file, whole or not at all.

    Raises:
        OSError: as from writing; what was at ``path`` is still there.
    """
    # Wide elements first, so that each tensor is aligned in the file.
    ordered = sorted(state.tensors().items(), key=lambda item: (-item[1].element_size(), item[0]))
    digest = parameter_digest(state.parameters)
    header = tensor_file.header(
        ((name, tensor.dtype, tuple(tensor.shape)) for name, tensor in ordered),
        {
            "sha256": _NO_DIGEST,
            "format": FORMAT,
            "swarm": manifest.swarm_id,
            "stage": str(stage),
            "step": str(state.step),
            "parameters": digest.hex(),
            "saved": repr(now),
            "manifest": base64.b64encode(manifest.to_bytes()).decode("ascii"),
        },
    )
    whole = hashlib.sha256(header)
    with replacing(path) as file:
        file.write(header)
        for _, tensor in ordered:
            for chunk in chunks(tensor.detach().cpu().contiguous()):
                file.write(chunk)
                whole.update(chunk)
        file.seek(_digest_place(header))
        file.write(whole.hexdigest().encode("ascii"))
    return Checkpoint(path=path, manifest=manifest, stage=stage, step=state.step, parameters=digest, saved=now)


def check_checkpoint(path: Path) -> Checkpoint:
    """Read a whole file to see that it is a sound checkpoint.

    Raises:
        DamagedCheckpointError: it is not.
        CheckpointError: it cannot be read, or is of another version of this software.
    """
    return _read(path, keep=())[0]


def peek(path: Path) -> tuple[int, bytes]:
    """Size in bytes and digest of the parameters of a checkpoint, as its header says: nothing of it is checked.

    Raises:
        CheckpointError: it cannot be read, or has no header.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            _, metadata = _parse_header(_read_header(file), size=size)
            return size, bytes.fromhex(metadata["parameters"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"the checkpoint {path} cannot be read: {error}") from None


def checkpoint_name(stage: int, step: int) -> str:
    """The name of a checkpoint's file."""
    return f"stage-{stage}-step-{step}.safetensors"


def read_checkpoint(path: Path) -> tuple[Checkpoint, StageState]:
    """Read and check a checkpoint; raises as ``check_checkpoint``."""
    checkpoint, tensors = _read(path)
    return checkpoint, StageState(
        step=checkpoint.step,
        parameters=tensors.pop(PARAMETERS),
        optimizer={name.removeprefix("optimizer."): tensor for name, tensor in tensors.items()},
    )


def read_parameters(path: Path) -> tuple[Checkpoint, torch.Tensor]:
    """The parameters alone, float32 [P]; all of the file is checked. Raises as ``check_checkpoint``."""
    checkpoint, tensors = _read(path, keep=(PARAMETERS,))
    return checkpoint, tensors[PARAMETERS]


def _read(path: Path, *, keep: Iterable[str] | None = None) -> tuple[Checkpoint, dict[str, torch.Tensor]]:
    try:
        with path.open("rb") as file:
            header = _read_header(file)
            entries, metadata = _parse_header(header, size=os.fstat(file.fileno()).st_size)
            whole = hashlib.sha256(_without_digest(header))
            tensors: dict[str, torch.Tensor] = {}
            for name, dtype, count in entries:
                tensor = torch.empty(count, dtype=dtype)
                for chunk in chunks(tensor):
                    if file.readinto(chunk) != len(chunk):
                        raise ValueError("it is cut short")
                    whole.update(chunk)
                if keep is None or name in keep:
                    tensors[name] = tensor
            if whole.hexdigest() != metadata["sha256"]:
                raise ValueError("its SHA-256 is another")
            return _checkpoint(path, metadata, {name: count for name, _, count in entries}), tensors
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}; check the disk") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DamagedCheckpointError(f"the checkpoint {path} is damaged ({error}) and is not used") from None


def _checkpoint(path: Path, metadata: Mapping[str, str], counts: Mapping[str, int]) -> Checkpoint:
    """What the metadata of a file of the right digest says.

    Raises:
        CheckpointError: it is of another version of this software.
        ValueError: the numbers in it do not belong together.
    """
    if metadata["format"] != FORMAT:
        raise CheckpointError(
            f"{path} has format {metadata['format']}, and this software reads {FORMAT}; use the one that wrote it"
        )
    try:
        manifest = Manifest.from_bytes(base64.b64decode(metadata["manifest"], validate=True), metadata["swarm"])
    except ManifestError as error:
        raise CheckpointError(f"the manifest in {path} cannot be read: {error}") from None
    except binascii.Error:
        raise ValueError("its manifest is not in base64") from None
    stage, step = int(metadata["stage"]), int(metadata["step"])
    if not 0 <= stage < manifest.num_stages or not 0 <= step <= MAX_STEP or (stage, step) != stage_and_step(path):
        raise ValueError(f"it is of stage {stage} and step {step}")
    if counts[PARAMETERS] != manifest.stage_parameters(stage):
        raise ValueError(f"it has {counts[PARAMETERS]} parameters")
    return Checkpoint(
        path=path,
        manifest=manifest,
        stage=stage,
        step=step,
        parameters=bytes.fromhex(metadata["parameters"]),
        saved=float(metadata["saved"]),
    )


def _set_aside(path: Path) -> None:
    """Keep a damaged file for whoever wants to look into it, where no checkpoint is looked for."""
    try:
        path.replace(path.with_name(f"{path.name}.damaged"))
    except OSError as error:
        log.warning("the damaged checkpoint %s stays there: %s", path, error)


# the file --------------------------------------------------------------------------------


def _read_header(file: BinaryIO) -> bytes:
    """The length and the JSON of a file. Raises ValueError if it has none, or too long a one."""
    prefix = file.read(8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > MAX_HEADER_BYTES:
        raise ValueError("it does not begin like one")
    text = file.read(length)
    if len(text) < length:
        raise ValueError("it is cut short")
    return prefix + text


def _parse_header(header: bytes, *, size: int) -> tuple[list[tuple[str, torch.dtype, int]], dict[str, str]]:
    """Names, dtypes and lengths of the tensors in the order of the file, and the metadata.

    Nothing of this is known to be right yet; but the tensors fill the file's ``size`` exactly, so that no more
    memory is asked for than the file could fill. Raises ValueError, LookupError or TypeError.
    """
    entries = json.loads(header[8:])
    metadata = entries.pop("__metadata__")
    tensors = []
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1]["data_offsets"][0]):
        dtype, (count,), (start, stop) = DTYPES[entry["dtype"]], entry["shape"], entry["data_offsets"]
        if type(count) is not int or count < 0 or start != end or stop - start != count * dtype.itemsize:
            raise ValueError(f"its tensor {name!r} is not where it should be")
        end = stop
        tensors.append((str(name), dtype, count))
    if size != len(header) + end:
        raise ValueError(f"it has {size} bytes instead of {len(header) + end}")
    return tensors, {str(name): str(value) for name, value in metadata.items()}


def _digest_place(header: bytes) -> int:
    return header.index(_DIGEST_KEY) + len(_DIGEST_KEY)


def _without_digest(header: bytes) -> bytes:
    place = _digest_place(header)
    return header[:place] + _NO_DIGEST.encode("ascii") + header[place + len(_NO_DIGEST) :]
