"""One line an entry, for people or as JSON; floods of one warning are held back."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from node.log import MAX_REMEMBERED, RepeatFilter, TextFormatter, configure_logging


class FakeClock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def untouched_logging() -> Iterator[None]:
    """Give the process back the logging that it had."""
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    for handler in [handler for handler in root.handlers if handler not in before]:
        root.removeHandler(handler)
    root.setLevel(level)
    for name in ("node", "protocol", "verifier"):
        logging.getLogger(name).setLevel(logging.NOTSET)


def written(log_format: str = "text", level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    configure_logging(log_format, level, stream=stream)
    return stream


def test_a_state_at_the_beginning_of_a_message_is_its_tag() -> None:
    stream = written()
    logging.getLogger("node.daemon").info("[%s] %s", "training", "step 12 loss 3.41")
    assert re.fullmatch(r"\d\d:\d\d:\d\d \[training\] step 12 loss 3.41\n", stream.getvalue())


def test_other_messages_are_tagged_with_their_module_and_warnings_say_so() -> None:
    stream = written()
    logging.getLogger("node.averaging").warning("attempt %d failed", 2)
    assert stream.getvalue().endswith("[averaging] warning: attempt 2 failed\n")


def test_json_lines_hold_the_fields() -> None:
    stream = written("json")
    logging.getLogger("node.daemon").info("[training] step %d", 12, extra={"step": 12, "loss": 3.41})
    entry = json.loads(stream.getvalue())
    assert entry["tag"] == "training"
    assert entry["message"] == "step 12"
    assert (entry["step"], entry["loss"], entry["level"]) == (12, 3.41, "info")
    assert isinstance(entry["time"], float)


def test_json_takes_any_field_and_keeps_a_traceback_on_its_line() -> None:
    stream = written("json")
    try:
        raise ValueError("wrong")
    except ValueError:
        logging.getLogger("node.x").exception("failed", extra={"thing": object()})
    (line,) = stream.getvalue().splitlines()
    assert "ValueError: wrong" in json.loads(line)["exception"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_peer_cannot_forge_lines_or_drive_the_terminal(log_format: str) -> None:
    stream = written(log_format)
    logging.getLogger("protocol.p2p").info("peer says %s", "hi\n12:00:00 [ejected] you\x1b[2J\u202e")
    (line,) = stream.getvalue().splitlines()
    assert line.isprintable()


def test_a_very_long_message_is_cut() -> None:
    stream = written()
    logging.getLogger("node.x").info("%s", "a" * 100_000)
    assert len(stream.getvalue()) < 5000


def test_the_level_is_for_this_project_and_libraries_are_heard_from_warning_on() -> None:
    stream = written(level="debug")
    logging.getLogger("node.x").debug("ours")
    logging.getLogger("aiohttp.access").info("theirs")
    logging.getLogger("aiohttp.server").error("their trouble")
    assert "ours" in stream.getvalue()
    assert "theirs" not in stream.getvalue()
    assert "their trouble" in stream.getvalue()


def test_a_second_call_replaces_the_first() -> None:
    first = written()
    second = written()
    logging.getLogger("node.x").info("once")
    assert first.getvalue() == ""
    assert second.getvalue().count("once") == 1


@pytest.mark.parametrize(("log_format", "level"), [("xml", "info"), ("text", "loud")])
def test_wrong_settings_name_the_right_ones(log_format: str, level: str) -> None:
    with pytest.raises(ValueError, match="use one of"):
        configure_logging(log_format, level)


def record(message: str, level: int = logging.WARNING) -> logging.LogRecord:
    return logging.LogRecord("node.x", level, "", 0, message, (), None)


def test_an_identical_warning_comes_once_per_interval_with_a_count() -> None:
    clock = FakeClock()
    repeat = RepeatFilter(30.0, clock=clock)
    assert repeat.filter(record("seed unreachable"))
    for _ in range(4):
        clock.now += 1.0
        assert not repeat.filter(record("seed unreachable"))
    assert repeat.filter(record("another"))
    clock.now = 30.0
    again = record("seed unreachable")
    assert repeat.filter(again)
    assert again.__dict__["repeats"] == 4


def test_information_is_never_held_back() -> None:
    repeat = RepeatFilter(30.0, clock=FakeClock())
    assert all(repeat.filter(record("same", logging.INFO)) for _ in range(5))


def test_the_count_is_written() -> None:
    stream = io.StringIO()
    handler = configure_logging("text", "info", stream=stream)
    clock = FakeClock()
    handler.filters[:] = [RepeatFilter(30.0, clock=clock)]
    for _ in range(3):
        logging.getLogger("node.x").warning("again")
    clock.now = 31.0
    logging.getLogger("node.x").warning("again")
    assert stream.getvalue().count("again") == 2
    assert "(2 more like this since)" in stream.getvalue()


def test_the_filter_forgets_rather_than_grows() -> None:
    repeat = RepeatFilter(1e9, clock=FakeClock())
    for number in range(MAX_REMEMBERED + 10):
        repeat.filter(record(f"warning {number}"))
    assert len(repeat._seen) == MAX_REMEMBERED


def test_a_library_that_renames_levels_does_not_rename_ours() -> None:
    logging.addLevelName(logging.WARNING, "WARN")
    try:
        record = logging.LogRecord("node.x", logging.WARNING, "x", 1, "careful", None, None)
        assert TextFormatter().format(record).endswith("[x] warning: careful")
    finally:
        logging.addLevelName(logging.WARNING, "WARNING")


# progress -----------------------------------------------------------------------------


class Screen(io.StringIO):
    """A stream that is a terminal."""

    def isatty(self) -> bool:
        return True


def fetch(done: int, total: int = 200) -> None:
    logging.getLogger("node.daemon").info("[syncing] %s", f"{done} of {total}", extra={"progress": (done, total)})


def test_progress_is_a_bar_on_a_terminal_that_the_next_entry_replaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    screen = Screen()
    configure_logging("text", "info", stream=screen)
    fetch(50)
    fetch(100)
    logging.getLogger("node.daemon").info("[training] begins")
    first, second, rest = screen.getvalue().split("\r\x1b[2K")[1:]
    assert first.endswith("[syncing] █████░░░░░░░░░░░░░░░  25% 50 of 200") and second.endswith("50% 100 of 200")
    assert rest.endswith("[training] begins\n") and "\n" not in first + second
    fetch(200)
    assert len(screen.getvalue().rpartition("\r\x1b[2K")[2]) < 70


@pytest.mark.parametrize(("log_format", "screen"), [("text", io.StringIO()), ("json", Screen())])
def test_progress_is_a_line_now_and_then_elsewhere(log_format: str, screen: io.StringIO) -> None:
    handler = configure_logging(log_format, "info", stream=screen)
    clock = FakeClock()
    handler._clock = clock  # type: ignore[attr-defined]
    handler._told = -60.0  # type: ignore[attr-defined]
    for _ in range(10):
        clock.now += 1.0
        fetch(int(clock.now))
    lines = screen.getvalue().splitlines()
    assert len(lines) == 2 and "\x1b" not in screen.getvalue()
    if log_format == "json":
        assert [json.loads(line)["progress"] for line in lines] == [[1, 200], [6, 200]]


def test_a_total_that_is_not_known_yet_is_no_division_by_zero() -> None:
    screen = Screen()
    configure_logging("text", "info", stream=screen)
    fetch(0, 0)
    assert "0%" in screen.getvalue()
