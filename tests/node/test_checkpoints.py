"""A checkpoint is on disk whole or not at all, and what has changed by a single bit is never taken for one."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from node.checkpoints import (
    MAX_HEADER_BYTES,
    Checkpoint,
    CheckpointError,
    CheckpointStore,
    DamagedCheckpointError,
    check_checkpoint,
    find_checkpoints,
    read_checkpoint,
    read_parameters,
    write_checkpoint,
)
from node.digest import parameter_digest
from node.model import stage_layout
from node.optimizer import StepOptimizer
from node.snapshot import StageState
from protocol.manifest import Manifest

ROOT = Path(__file__).parents[2]
MANIFEST = Manifest.from_mapping(
    {
        "name": "test",
        "model": {"width": 8, "layers": 2, "heads": 2, "kv_heads": 1, "ffn": 8, "context": 8},
        "stages": {"layers_per_stage": [1, 1]},
        "training": {"checkpoint_steps": 10},
    }
)
OTHER = Manifest.from_mapping(MANIFEST.model_dump() | {"name": "other"})
NOW = 1_700_000_000.0

DIES_WHILE_IT_WRITES = """
import os, signal, sys
from pathlib import Path
import node.state_folder
from node.checkpoints import CheckpointStore
from tests.node.test_checkpoints import MANIFEST, state_of
# A moment before the name of the new file becomes that of the checkpoint.
node.state_folder.os.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
CheckpointStore(Path(sys.argv[1]), MANIFEST, keep=2).save(0, state_of(20), now=0.0)
"""

DISK_OF_SOME_KILOBYTES = """
import resource, signal, sys
from pathlib import Path
from node.checkpoints import CheckpointError, CheckpointStore
from tests.node.test_checkpoints import MANIFEST, state_of
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    CheckpointStore(Path(sys.argv[1]), MANIFEST, keep=2).save(0, state_of(20), now=0.0)
except CheckpointError as error:
    print(error)
"""


def state_of(step: int, stage: int = 0, *, seed: int = 0) -> StageState:
    """A state such as that stage might have."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    length = MANIFEST.stage_parameters(stage)
    optimizer = StepOptimizer(
        stage_layout(MANIFEST.model, MANIFEST.stages.layers_per_stage, stage), MANIFEST.training
    ).state()
    return StageState(
        step=step,
        parameters=torch.randn(length, generator=generator),
        optimizer={
            name: torch.tensor([step]) if name == "step" else torch.rand(length, generator=generator)
            for name in optimizer
        },
    )


def same(one: StageState, other: StageState) -> bool:
    tensors, others = one.tensors(), other.tensors()
    return (
        one.step == other.step
        and tensors.keys() == others.keys()
        and all(
            tensor.dtype == others[name].dtype and torch.equal(tensor, others[name]) for name, tensor in tensors.items()
        )
    )


def steps(store: CheckpointStore) -> list[int]:
    return [checkpoint.step for checkpoint in store.check_all()[0]]


@pytest.fixture
def store(tmp_path: Path) -> CheckpointStore:
    """An empty store that keeps two."""
    return CheckpointStore(tmp_path, MANIFEST, keep=2)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound checkpoint."""
    path = tmp_path_factory.mktemp("sound") / "stage-1-step-30.safetensors"
    write_checkpoint(path, state_of(30, 1), manifest=MANIFEST, stage=1, now=NOW)
    return path


# writing and reading ---------------------------------------------------------------------


def test_what_was_saved_comes_back_to_the_bit(store: CheckpointStore) -> None:
    state = state_of(20)
    saved = store.save(0, state, now=NOW)
    assert saved == Checkpoint(
        path=store.folder / "stage-0-step-20.safetensors",
        manifest=MANIFEST,
        stage=0,
        step=20,
        parameters=parameter_digest(state.parameters),
        saved=NOW,
    )
    assert store.check_all() == ([saved], [])
    assert same(store.load(saved), state)
    assert torch.equal(read_parameters(saved.path)[1], state.parameters)
    assert saved.path.stat().st_mode & 0o777 == 0o600 and store.folder.stat().st_mode & 0o777 == 0o700


def test_a_checkpoint_is_an_ordinary_safetensors_file(written: Path) -> None:
    state = state_of(30, 1)
    with safetensors.safe_open(written, framework="pt") as file:
        assert set(file.keys()) == set(state.tensors())
        assert all(torch.equal(file.get_tensor(name), tensor) for name, tensor in state.tensors().items())
        metadata = file.metadata()
    assert metadata["swarm"] == MANIFEST.swarm_id
    assert (metadata["stage"], metadata["step"]) == ("1", "30")
    assert metadata["parameters"] == parameter_digest(state.parameters).hex()


def test_a_checkpoint_tells_by_itself_what_it_is_of(written: Path) -> None:
    checkpoint, _ = read_checkpoint(written)
    assert checkpoint.manifest == MANIFEST and (checkpoint.stage, checkpoint.step) == (1, 30)


# what is kept ----------------------------------------------------------------------------


def test_the_newest_ones_of_each_stage_are_kept(store: CheckpointStore) -> None:
    for step in (10, 20, 30, 40):
        store.save(0, state_of(step), now=NOW)
    store.save(1, state_of(10, 1), now=NOW)
    assert [(found.stage, found.step) for found in store.check_all()[0]] == [(0, 40), (0, 30), (1, 10)]


def test_one_that_a_leaving_node_wrote_does_not_push_out_those_that_others_have(store: CheckpointStore) -> None:
    for step in (10, 20, 27):
        store.save(0, state_of(step), now=NOW)
    assert steps(store) == [27, 20, 10]
    store.save(0, state_of(30), now=NOW)
    assert steps(store) == [30, 20]


def test_later_ones_outlive_a_swarm_that_went_back(store: CheckpointStore) -> None:
    for step in (40, 50):
        store.save(0, state_of(step), now=NOW)
    for step in (20, 30):
        store.save(0, state_of(step, seed=1), now=NOW)
    assert steps(store) == [50, 40, 30, 20]
    store.save(0, state_of(40, seed=1), now=NOW)
    assert steps(store) == [50, 40, 30]
    assert same(store.load(store.check_all()[0][1]), state_of(40, seed=1))


def test_checkpoints_of_other_swarms_are_out_of_the_way(tmp_path: Path, store: CheckpointStore) -> None:
    other = CheckpointStore(tmp_path, OTHER, keep=1)
    other.save(0, state_of(10), now=NOW)
    store.save(0, state_of(20), now=NOW)
    assert steps(other) == [10] and steps(store) == [20]
    (other.folder / "stage-0-step-10.safetensors").rename(store.folder / "stage-0-step-10.safetensors")
    sound, (error,) = store.check_all()
    assert [found.step for found in sound] == [20]
    assert "is of another swarm; move it" in str(error) and len(find_checkpoints(store.folder)) == 2


# crashes and full disks --------------------------------------------------------------------


def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_process_that_is_killed_while_it_writes_leaves_the_one_before(tmp_path: Path, store: CheckpointStore) -> None:
    store.save(0, state_of(10), now=NOW)
    assert run(DIES_WHILE_IT_WRITES, tmp_path).returncode == -signal.SIGKILL
    assert len(list(store.folder.iterdir())) == 2  # the old one, and what was being written
    assert find_checkpoints(store.folder) == [store.folder / "stage-0-step-10.safetensors"]
    sound, errors = store.check_all()
    assert errors == [] and same(store.load(sound[0]), state_of(10))
    assert len(list(store.folder.iterdir())) == 1


def test_a_disk_that_is_full_costs_nothing_that_was_there(tmp_path: Path, store: CheckpointStore) -> None:
    store.save(0, state_of(10), now=NOW)
    before = sorted(path.name for path in store.folder.iterdir())
    ran = run(DISK_OF_SOME_KILOBYTES, tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.startswith("the checkpoint of step 20 could not be written: File too large; make room for 1 MiB")
    assert "--checkpoints 0" in ran.stdout and ran.stdout.count("\n") == 1
    assert sorted(path.name for path in store.folder.iterdir()) == before
    assert steps(store) == [10]


def test_no_space_left_is_told_in_one_line(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for step in (10, 20):
        store.save(0, state_of(step), now=NOW)
    with monkeypatch.context() as patched, pytest.raises(CheckpointError) as raised:
        patched.setattr("node.state_folder.os.fsync", full)
        store.save(0, state_of(30), now=NOW)
    assert "No space left on device; make room" in str(raised.value) and "\n" not in str(raised.value)
    assert steps(store) == [20, 10]  # the older ones go only once the new one is whole
    store.save(0, state_of(30), now=NOW)
    assert steps(store) == [30, 20]


# damage ------------------------------------------------------------------------------------


@given(place=st.floats(0.0, 1.0, exclude_max=True), flip=st.integers(1, 255))
@settings(max_examples=150)
def test_a_changed_byte_is_always_noticed(written: Path, place: float, flip: int) -> None:
    damaged_copy(written, place, flip)


@given(place=st.integers(0, 4095), flip=st.integers(1, 255))
@settings(max_examples=150)
def test_a_changed_byte_of_the_header_is_always_noticed(written: Path, place: int, flip: int) -> None:
    damaged_copy(written, place / written.stat().st_size, flip)


def damaged_copy(written: Path, place: float, flip: int) -> None:
    data = bytearray(written.read_bytes())
    data[int(place * len(data))] ^= flip
    refuse(written, bytes(data))


def refuse(written: Path, data: bytes) -> None:
    """Neither way of reading takes such a file."""
    path = written.parent / "copy" / written.name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    for read in (check_checkpoint, read_checkpoint, read_parameters):
        with pytest.raises(DamagedCheckpointError) as raised:
            read(path)
        assert str(path) in str(raised.value) and "\n" not in str(raised.value)


@given(length=st.floats(0.0, 1.0, exclude_max=True))
def test_a_file_that_is_cut_short_is_refused(written: Path, length: float) -> None:
    data = written.read_bytes()
    refuse(written, data[: int(length * len(data))])


@given(data=st.binary(max_size=300))
def test_any_bytes_are_refused(written: Path, data: bytes) -> None:
    refuse(written, data)
    refuse(written, len(data).to_bytes(8, "little") + data)
    refuse(written, len(data).to_bytes(8, "little") + data + written.read_bytes())


def test_headers_of_any_size_and_shape_are_refused(written: Path) -> None:
    data = written.read_bytes()
    refuse(written, data + b"\0")
    refuse(written, (MAX_HEADER_BYTES + 1).to_bytes(8, "little") + data[8:])
    for header in (
        b"[" * 5000,
        b'{"__metadata__":{"sha256":""},"parameters":{"dtype":"F32","shape":[1e9],"data_offsets":[0,4000000000]}}',
        b'{"__metadata__":{"sha256":"%s"},"parameters":{"dtype":"F32","shape":[-1],"data_offsets":[0,-4]}}'
        % (b"0" * 64),
        b'{"__metadata__":{},"parameters":{"dtype":"F64","shape":[0],"data_offsets":[0,0]}}',
        b'{"__metadata__":{},"parameters":[]}',
        b'{"__metadata__":7}',
        b"null",
        b"1",
    ):
        refuse(written, len(header).to_bytes(8, "little") + header)


def test_a_checkpoint_under_another_name_is_refused(written: Path) -> None:
    for name in ("stage-0-step-30.safetensors", "stage-1-step-31.safetensors", "model.safetensors"):
        path = written.parent / "renamed" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(written.read_bytes())
        with pytest.raises(DamagedCheckpointError):
            check_checkpoint(path)


def test_a_damaged_one_is_set_aside_and_the_one_before_is_used(store: CheckpointStore) -> None:
    for step in (10, 20):
        store.save(0, state_of(step), now=NOW)
    newest = store.folder / "stage-0-step-20.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1])
    sound, (error,) = store.check_all()
    assert [found.step for found in sound] == [10] and isinstance(error, DamagedCheckpointError)
    assert not newest.exists() and newest.with_name(f"{newest.name}.damaged").exists()
    assert store.check_all() == (sound, [])


def test_one_that_is_damaged_after_it_was_checked_is_not_loaded(store: CheckpointStore) -> None:
    saved = store.save(0, state_of(10), now=NOW)
    saved.path.write_bytes(saved.path.read_bytes().replace(b'"step":"10"', b'"step":"11"'))
    with pytest.raises(DamagedCheckpointError):
        store.load(saved)
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        store.load(saved)
    store.save(0, state_of(10, seed=1), now=NOW)
    with pytest.raises(CheckpointError, match="another checkpoint than it was"):
        store.load(saved)


def test_another_format_is_neither_used_nor_set_aside(store: CheckpointStore, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr("node.checkpoints.FORMAT", "2")
        saved = store.save(0, state_of(10), now=NOW)
    sound, (error,) = store.check_all()
    assert sound == [] and "has format 2, and this software reads 1" in str(error) and saved.path.exists()


def test_a_state_of_another_size_is_noticed(written: Path) -> None:
    path = written.parent / "stage-1-step-40.safetensors"
    state = state_of(40, 1)
    write_checkpoint(
        path, replace(state, parameters=state.parameters[:-1].clone()), manifest=MANIFEST, stage=1, now=NOW
    )
    with pytest.raises(DamagedCheckpointError, match="parameters"):
        check_checkpoint(path)
    path.unlink()
