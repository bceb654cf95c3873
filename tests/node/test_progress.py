"""What a person reads while a state is fetched."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.progress import WINDOW_SECONDS, Meter, amount, duration, progress_text

MIB = 1 << 20


def meter(total: int, *arrived: tuple[float, int]) -> Meter:
    made = Meter(total=total, started=0.0)
    for now, count in arrived:
        made.add(count, now)
    return made


def test_the_text_says_how_much_from_whom_how_fast_and_how_long() -> None:
    made = meter(800 * MIB, (1.0, 50 * MIB), (4.0, 70 * MIB))
    assert (
        progress_text(made, 4.0, siblings=2)
        == "downloading the stage's state: 120 of 800 MiB from 2 siblings, 30 MiB/s, 23 s left"
    )


def test_one_sibling_is_no_plural_and_small_states_are_told_in_kib() -> None:
    made = meter(800 << 10, (2.0, 200 << 10))
    assert (
        progress_text(made, 2.0, siblings=1)
        == "downloading the stage's state: 200 of 800 KiB from 1 sibling, 100 KiB/s, 6 s left"
    )


def test_a_wait_says_what_for() -> None:
    made = meter(800 * MIB)
    begin = "downloading the stage's state: 0 of 800 MiB from 2 siblings, "
    assert progress_text(made, 0.0, siblings=2) == f"{begin}waiting for the next bytes"
    assert progress_text(made, 3.0, siblings=2, busy=2) == f"{begin}all busy with other joiners; waiting for a turn"
    assert progress_text(made, 3.0, siblings=2, busy=1) == f"{begin}waiting for the next bytes"


def test_the_rate_is_that_of_the_last_seconds() -> None:
    made = meter(1000 * MIB, (1.0, 100 * MIB))
    assert made.rate(2.0) == 50 * MIB
    made.add(10 * MIB, 30.0)
    assert made.rate(30.0) == 10 * MIB / WINDOW_SECONDS
    assert made.rate(50.0) == 0.0 and made.seconds_left(50.0) is None
    assert made.done == 110 * MIB


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0 s"),
        (0.2, "1 s"),
        (20.0, "20 s"),
        (120.0, "120 s"),
        (121.0, "3 min"),
        (7200.0, "120 min"),
        (7201, "3 h"),
    ],
)
def test_durations_are_rounded_up(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 KiB"), (2048, "2 KiB"), (3.5 * MIB, "3.5 MiB"), (35.4 * MIB, "35 MiB")]
)
def test_amounts_have_the_unit_that_suits_them(count: float, text: str) -> None:
    assert amount(count) == text


@given(
    steps=st.lists(st.tuples(st.floats(0, 30), st.integers(1, 1 << 30)), max_size=30),
    wait=st.floats(0, 60),
    siblings=st.integers(0, 3),
)
def test_no_course_of_a_download_breaks_the_text(steps: list[tuple[float, int]], wait: float, siblings: int) -> None:
    made = Meter(total=sum(count for _, count in steps) + 1, started=100.0)
    now = 100.0
    for seconds, count in steps:
        now += seconds
        made.add(count, now)
        assert made.rate(now) >= 0.0
        left = made.seconds_left(now)
        assert left is None or left > 0.0
    text = progress_text(made, now + wait, siblings=siblings)
    assert text.startswith("downloading the stage's state: ") and "\n" not in text
