"""Files that were removed and can still be read: the newest offered ones, few, and not for ever."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from node import held_checkpoints
from node.held_checkpoints import (
    GRACE_SECONDS,
    IDLE_SECONDS,
    MAX_IN_ALL,
    MAX_OF_STAGE,
    MAX_SECONDS,
    FileFacts,
    HeldCheckpoints,
)


class Disk:
    """A folder whose files are checkpoints of no content but their name, and the time."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.now = 0.0
        self.held = HeldCheckpoints(lambda: self.now)

    def write(self, stage: int, *steps: int, text: str = "") -> dict[int, FileFacts]:
        found = {}
        for step in steps:
            path = self.folder / f"{stage}-{step}"
            path.unlink(missing_ok=True)
            path.write_text(f"{stage} {step} {text}")
            found[step] = FileFacts(path=path, size=path.stat().st_size, parameters=text.encode())
        return found

    def offer(self, stage: int, *steps: int, text: str = "") -> set[int]:
        """Write checkpoints, offer them, and remove them; what is offered now."""
        found = self.write(stage, *steps, text=text)
        offered = self.held.offer(stage, found)
        for facts in found.values():
            facts.path.unlink()
        return set(offered)

    def read(self, stage: int, step: int) -> str | None:
        descriptor = self.held.open(stage, step)
        if descriptor is None:
            return None
        with os.fdopen(descriptor) as file:
            os.lseek(file.fileno(), 0, os.SEEK_SET)
            return file.read()


@pytest.fixture
async def disk(tmp_path: Path) -> AsyncIterator[Disk]:
    made = Disk(tmp_path)
    yield made
    made.held.close()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_the_newest_that_were_offered_can_be_read_after_they_are_gone(disk: Disk) -> None:
    assert disk.offer(0, 1, 2, 3) == {1, 2, 3}
    assert disk.read(0, 3) == "0 3 " and disk.read(0, 2) == "0 2 "
    assert disk.read(0, 1) is None and disk.read(1, 3) is None


async def test_who_asks_later_is_offered_those_that_are_held_as_well(disk: Disk) -> None:
    disk.offer(0, 1, 2)
    assert disk.offer(0, 3, 4) == {1, 2, 3, 4}
    assert disk.offer(0, 5) == {1, 2, 3, 4, 5}
    assert disk.read(0, 4) == "0 4 "
    assert disk.read(0, 5) is None, "there is no room, as somebody may just begin with the others"


async def test_who_is_not_read_gives_way_to_a_newer_one_after_a_while(disk: Disk) -> None:
    disk.offer(0, 1, 2)
    disk.offer(0, 3, 4)
    disk.now = GRACE_SECONDS + 1
    for step in (1, 2, 4):
        disk.read(0, step)
    assert disk.offer(0, 5) == {1, 2, 4, 5}
    assert disk.read(0, 5) == "0 5 "


async def test_a_step_that_was_written_anew_is_the_new_one(disk: Disk) -> None:
    disk.offer(0, 1, text="old")
    disk.offer(0, 1, text="new")
    assert disk.read(0, 1) == "0 1 new"


async def test_it_is_let_go_when_nobody_reads_it_and_at_the_latest_after_a_time(disk: Disk) -> None:
    disk.offer(0, 1)
    disk.now = IDLE_SECONDS - 1
    assert disk.read(0, 1)
    disk.now += IDLE_SECONDS - 1
    assert disk.held.offer(0, {}).keys() == {1}
    disk.now += IDLE_SECONDS + 1
    assert not disk.held.offer(0, {})
    disk.offer(0, 2)
    until = disk.now + MAX_SECONDS
    while disk.now < until:
        assert disk.read(0, 2)
        disk.now += IDLE_SECONDS / 2
        disk.held.offer(0, {})
    disk.now += IDLE_SECONDS / 2
    assert not disk.held.offer(0, {})


async def test_it_is_let_go_without_another_request(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_checkpoints, "LOOK_SECONDS", 0.0)
    before = open_files()
    disk.offer(0, 1, 2)
    assert open_files() == before + 2
    disk.now = IDLE_SECONDS + 1
    async with asyncio.timeout(20):
        while len(disk.held):  # noqa: ASYNC110 - nothing tells
            await asyncio.sleep(0)
    assert open_files() == before


async def test_what_is_gone_before_it_can_be_held_is_not_offered(disk: Disk) -> None:
    found = disk.write(0, 1, 2)
    found[2].path.unlink()
    assert disk.held.offer(0, found).keys() == {1}


actions = st.one_of(
    st.tuples(st.just("offer"), st.integers(0, 9), st.integers(0, 50)),
    st.tuples(st.just("read"), st.integers(0, 9), st.integers(0, 50)),
    st.tuples(st.just("wait"), st.integers(1, 90), st.just(0)),
)


@given(st.lists(actions, max_size=60))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
def test_never_more_than_so_many_are_held_and_all_are_closed(tmp_path: Path, done: list[tuple[str, int, int]]) -> None:
    async def main() -> None:
        disk = Disk(tmp_path)
        before = open_files()
        for what, first, second in done:
            if what == "wait":
                disk.now += first
            elif what == "read":
                text = disk.read(first, second)
                assert text in (None, f"{first} {second} ")
            else:
                assert second in disk.offer(first, second)
            assert open_files() - before == len(disk.held) <= MAX_IN_ALL
            of_stage = [stage for stage, _ in disk.held._held]
            assert all(of_stage.count(stage) <= MAX_OF_STAGE for stage in of_stage)
        disk.held.close()
        assert open_files() == before

    asyncio.run(main())
