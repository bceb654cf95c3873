"""A process that was stopped knows it, whatever runs first when it goes on."""

from __future__ import annotations

from node.wakefulness import GAP_SECONDS, TICK_SECONDS, Wakefulness


class Clock:
    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def test_regular_ticks_are_no_sleep() -> None:
    clock = Clock()
    awake = Wakefulness(now=clock)
    for _ in range(100):
        clock.time += 2 * TICK_SECONDS
        awake.tick()
    assert not awake.slept_since(1000.0)


def test_a_gap_is_seen_by_whoever_began_before_it_and_not_after_it() -> None:
    clock = Clock()
    awake = Wakefulness(now=clock)
    began = clock.time
    clock.time += GAP_SECONDS + 1
    assert awake.slept_since(began)  # before any tick
    awake.tick()
    assert awake.slept_since(began)
    clock.time += TICK_SECONDS
    awake.tick()
    assert awake.slept_since(began)
    assert not awake.slept_since(clock.time)


def test_a_gap_that_only_the_tick_saw_is_remembered() -> None:
    clock = Clock()
    awake = Wakefulness(now=clock)
    began = clock.time
    clock.time += GAP_SECONDS + 1
    awake.tick()
    clock.time += TICK_SECONDS
    assert awake.slept_since(began)
