"""Devices are refused with a remedy, and a container's memory limit counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from node.device import autocast_dtype, available_memory_bytes, cgroup_available_bytes, choose_device, limit_threads
from protocol.errors import SettingsError
from protocol.manifest_sections import WireSection

MIB = 1 << 20


def write(path: Path, content: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)


def fake_cuda(monkeypatch: pytest.MonkeyPatch, *, count: int, capability: tuple[int, int] = (8, 0)) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)


class TestChoice:
    def test_auto_takes_a_gpu_if_there_is_one(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_cuda(monkeypatch, count=0)
        assert choose_device() == torch.device("cpu")
        fake_cuda(monkeypatch, count=1)
        assert choose_device() == torch.device("cuda", 0)

    @pytest.mark.parametrize(("word", "index"), [("cuda", 0), ("cuda:1", 1)])
    def test_a_gpu_can_be_named(self, monkeypatch: pytest.MonkeyPatch, word: str, index: int) -> None:
        fake_cuda(monkeypatch, count=2)
        assert choose_device(word) == torch.device("cuda", index)
        assert choose_device("cpu") == torch.device("cpu")

    @pytest.mark.parametrize("word", ["", "gpu", "cpu:0", "cuda:", "cuda:x", "cuda:-1", "cuda:2"])
    def test_others_are_refused(self, monkeypatch: pytest.MonkeyPatch, word: str) -> None:
        fake_cuda(monkeypatch, count=2)
        with pytest.raises(SettingsError, match="device: "):
            choose_device(word)

    def test_a_missing_gpu_is_explained(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_cuda(monkeypatch, count=0)
        with pytest.raises(SettingsError, match="nvidia-smi"):
            choose_device("cuda")


class TestAutocast:
    def test_a_modern_gpu_computes_in_bfloat16_unless_the_wire_is_exact(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_cuda(monkeypatch, count=1)
        gpu = torch.device("cuda", 0)
        assert autocast_dtype(gpu, WireSection()) is torch.bfloat16
        assert autocast_dtype(gpu, WireSection(activation_dtype="fp32")) is None
        assert autocast_dtype(torch.device("cpu"), WireSection()) is None

    def test_an_old_gpu_computes_in_float32(self, monkeypatch: pytest.MonkeyPatch) -> None:
        fake_cuda(monkeypatch, count=1, capability=(7, 5))
        assert autocast_dtype(torch.device("cuda", 0), WireSection()) is None


class TestMemory:
    def test_there_is_some_here(self) -> None:
        assert available_memory_bytes(torch.device("cpu")) > MIB

    def test_version_2_takes_the_tightest_group(self, tmp_path: Path) -> None:
        root, membership = tmp_path / "cgroup", tmp_path / "self"
        write(membership, "0::/outer/inner\n")
        write(root / "outer/inner/memory.max", "max\n")
        write(root / "outer/memory.max", f"{100 * MIB}\n")
        write(root / "outer/memory.current", f"{70 * MIB}\n")
        write(root / "outer/memory.stat", f"anon 1\ninactive_file {20 * MIB}\n")
        assert cgroup_available_bytes(root, membership) == 50 * MIB

    def test_version_1_is_read_too(self, tmp_path: Path) -> None:
        root, membership = tmp_path / "cgroup", tmp_path / "self"
        write(membership, "5:cpu,cpuacct:/x\n4:memory:/box\n0::/x\n")
        write(root / "memory/box/memory.limit_in_bytes", f"{64 * MIB}\n")
        write(root / "memory/box/memory.usage_in_bytes", f"{80 * MIB}\n")
        write(root / "memory/memory.limit_in_bytes", "9223372036854771712\n")
        assert cgroup_available_bytes(root, membership) == 0

    def test_a_path_of_the_host_leads_to_the_containers_root(self, tmp_path: Path) -> None:
        root, membership = tmp_path / "cgroup", tmp_path / "self"
        write(membership, "0::/../../system.slice/box\n")
        write(root / "memory.max", f"{10 * MIB}\n")
        write(root / "memory.current", f"{4 * MIB}\n")
        assert cgroup_available_bytes(root, membership) == 6 * MIB

    def test_without_a_usage_file_this_process_counts(self, tmp_path: Path) -> None:
        root, membership = tmp_path / "cgroup", tmp_path / "self"
        write(membership, "0::/\n")
        write(root / "memory.max", f"{1 << 50}\n")
        room = cgroup_available_bytes(root, membership)
        assert room is not None
        assert 0 < (1 << 50) - room < 1 << 40

    def test_without_groups_there_is_no_limit(self, tmp_path: Path) -> None:
        assert cgroup_available_bytes(tmp_path, tmp_path / "none") is None
        write(tmp_path / "self", "0::/\nnonsense\n")
        assert cgroup_available_bytes(tmp_path, tmp_path / "self") is None

    def test_the_limit_bounds_what_the_machine_has(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("node.device.cgroup_available_bytes", lambda: 5)
        assert available_memory_bytes(torch.device("cpu")) == 5


def test_threads_are_limited_only_when_asked() -> None:
    before = torch.get_num_threads()
    limit_threads(0)
    assert torch.get_num_threads() == before
    limit_threads(1)
    assert torch.get_num_threads() == 1
