"""The node's log: one short line an entry, for people or as JSON, without floods.

Nothing happens at import. A line is ``HH:MM:SS [tag] text``: the tag is the state or event that a message
begins with (``[training] step 12 ...``), else the module that wrote it. Whatever a peer managed to get into
a message stays on its line: control characters are shown as escapes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import shutil
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TextIO

LEVELS: Final = ("debug", "info", "warning", "error")
FORMATS: Final = ("text", "json")

REPEAT_SECONDS: Final = 30.0
"""An identical warning is written at most once in this time."""

MAX_REMEMBERED: Final = 512
"""Distinct warnings remembered at once; more than that can only be warnings that hold changing numbers."""

MAX_MESSAGE_CHARS: Final = 4000

PROGRESS_SECONDS: Final = 5.0
"""Between two lines of progress where no bar can be drawn."""

BAR_CHARS: Final = 20
BACK: Final = "\r\x1b[2K"
"""To the beginning of the line, and that cleared."""

_OURS: Final = ("node", "protocol", "verifier")
_TAG: Final = re.compile(r"\[([a-z_]{1,24})\] ?")
_STANDARD_FIELDS: Final = frozenset(
    {*logging.LogRecord("", 0, "", 0, "", (), None).__dict__, "message", "asctime", "tag", "repeats"}
)


LEVEL_WORDS = (
    (logging.CRITICAL, "critical"),
    (logging.ERROR, "error"),
    (logging.WARNING, "warning"),
    (logging.INFO, "info"),
)


def configure_logging(
    log_format: str = "text", level: str = "info", *, stream: TextIO | None = None
) -> logging.Handler:
    """Send the log of this process to ``stream`` (stderr); a second call replaces what the first one set.

    The level is for this project's own modules; libraries are heard from "warning" on.

    Raises:
        ValueError: the format or the level is not one of FORMATS and LEVELS.
    """
    if log_format not in FORMATS:
        raise ValueError(f"the log format is {log_format!r}; use one of {', '.join(FORMATS)}")
    if level not in LEVELS:
        raise ValueError(f"the log level is {level!r}; use one of {', '.join(LEVELS)}")
    handler = _Handler(stream if stream is not None else sys.stderr)
    handler.bars = log_format == "text" and handler.stream.isatty()
    handler.setFormatter(JsonFormatter() if log_format == "json" else TextFormatter())
    handler.addFilter(RepeatFilter(REPEAT_SECONDS))
    root = logging.getLogger()
    for old in [known for known in root.handlers if isinstance(known, _Handler)]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in _OURS:
        logging.getLogger(name).setLevel(level.upper())
    return handler


class _Handler(logging.StreamHandler[TextIO]):
    """Ours, so that it can be told from handlers that others added.

    An entry with an extra ``progress`` (done, of how much) is a bar on the last line of a terminal, and the next entry
    takes its place. Elsewhere it is a line now and then.
    """

    def __init__(self, stream: TextIO, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self.bars = False
        """Whether to draw bars: for people, and where one can go back in the line."""
        self._drawn = False
        self._clock = clock
        self._told = -PROGRESS_SECONDS

    def emit(self, record: logging.LogRecord) -> None:
        """Write an entry, or draw it."""
        progress: tuple[int, int] | None = getattr(record, "progress", None)
        if progress is not None and self.bars:
            self._put(f"{BACK}{bar_line(record, *progress, width=_columns() - 1)}")
            self._drawn = True
            return
        if progress is not None:
            if self._clock() - self._told < PROGRESS_SECONDS:
                return
            self._told = self._clock()
        if self._drawn:
            self._put(BACK)
            self._drawn = False
        super().emit(record)

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # the terminal is gone
            self.stream.write(text)
            self.stream.flush()


def bar_line(record: logging.LogRecord, done: int, total: int, *, width: int) -> str:
    """One line that fits: clock, tag, bar, percent and the entry's text."""
    tag, text = split_tag(record)
    share = min(1.0, done / total) if total else 0.0
    filled = round(share * BAR_CHARS)
    clock = time.strftime("%H:%M:%S", time.localtime(record.created))
    bar = "█" * filled + "░" * (BAR_CHARS - filled)
    return f"{clock} [{tag}] {bar} {share:4.0%} {text}"[:width]


def _columns() -> int:
    return max(20, shutil.get_terminal_size((80, 24)).columns)


def split_tag(record: logging.LogRecord) -> tuple[str, str]:
    """The tag of an entry and its text, on one line."""
    text = single_line(record.getMessage())
    if found := _TAG.match(text):
        return found.group(1), text[found.end() :]
    return record.name.rpartition(".")[2], text


def single_line(text: str) -> str:
    """The text with everything unprintable escaped, and cut if it is very long."""
    if len(text) > MAX_MESSAGE_CHARS:
        text = f"{text[:MAX_MESSAGE_CHARS]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def level_word(level: int) -> str:
    """The level in our words: libraries rename levels for the whole process (hivemind makes it "WARN")."""
    return next((word for limit, word in LEVEL_WORDS if level >= limit), "debug")


class TextFormatter(logging.Formatter):
    """``12:03:04 [training] step 12 loss 3.41``; from "warning" on the level stands before the text."""

    def format(self, record: logging.LogRecord) -> str:
        """One line; a traceback, where there is one, follows it indented."""
        tag, text = split_tag(record)
        level = f"{level_word(record.levelno)}: " if record.levelno >= logging.WARNING else ""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        line = f"{clock} [{tag}] {level}{text}"
        if repeats := getattr(record, "repeats", 0):
            line += f" ({repeats} more like this since)"
        if record.exc_info:
            line += "\n    " + self.formatException(record.exc_info).replace("\n", "\n    ")
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (Unix seconds), level, tag, logger, message, and all extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """One line, whatever it holds."""
        tag, text = split_tag(record)
        entry: dict[str, object] = {
            "time": round(record.created, 3),
            "level": level_word(record.levelno),
            "tag": tag,
            "logger": record.name,
            "message": text,
        }
        entry |= {key: value for key, value in record.__dict__.items() if key not in _STANDARD_FIELDS}
        if repeats := getattr(record, "repeats", 0):
            entry["repeats"] = repeats
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, default=str)


@dataclass(slots=True)
class _Seen:
    since: float
    suppressed: int = 0


class RepeatFilter(logging.Filter):
    """Lets an identical warning pass once per interval, and then says how many were left out.

    Applies from "warning" on: what is below is either wanted or switched off.
    """

    def __init__(self, interval_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._interval = interval_seconds
        self._clock = clock
        self._seen: OrderedDict[tuple[str, int, str], _Seen] = OrderedDict()

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the entry is to be written; marks it with the number of those left out."""
        if record.levelno < logging.WARNING:
            return True
        key = (record.name, record.levelno, record.getMessage())
        now = self._clock()
        seen = self._seen.get(key)
        if seen is not None and now - seen.since < self._interval:
            seen.suppressed += 1
            return False
        record.repeats = seen.suppressed if seen is not None else 0
        self._seen[key] = _Seen(since=now)
        self._seen.move_to_end(key)
        if len(self._seen) > MAX_REMEMBERED:
            self._seen.popitem(last=False)
        return True
