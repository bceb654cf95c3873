"""Makes the tables of ``docs/protocol.md`` and its golden vectors: ``python -m scripts.protocol_doc``.

The prose is written by hand; what stands between the marks ``<!-- NAME -->`` and ``<!-- end -->`` comes from the
code. With ``--check`` nothing is written, and it fails if something is out of date.
"""

from __future__ import annotations

import argparse
import inspect
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from dataclasses import fields as fields_of
from pathlib import Path
from typing import Any

from protocol import framing, messages
from protocol.fields import words_of
from protocol.messages import MODEL_METHODS, PUBLIC_METHODS, STREAM_OF, Method, StreamKind
from scripts.protocol_vectors import vectors

DOCS = Path(__file__).resolve().parent.parent / "docs"
PATH = DOCS / "protocol.md"
VECTORS = DOCS / "protocol-vectors.json"
COMMAND = "python -m scripts.protocol_doc"
MARKED = re.compile(r"(<!-- (?P<name>[a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Call:
    """One method: its message and body, the answer's message and body; "" for no body."""

    message: type[Any]
    body: str
    answer: type[Any]
    answer_body: str


_EMPTY = messages.Empty

CALLS: dict[Method, Call] = {
    Method.MANIFEST: Call(_EMPTY, "", _EMPTY, "the manifest's canonical bytes"),
    Method.VIEW: Call(_EMPTY, "", messages.Push, ""),
    Method.STATUS: Call(_EMPTY, "", _EMPTY, "JSON, as at `/status`"),
    Method.DIAL_BACK: Call(messages.DialBack, "", messages.DialBackAnswer, ""),
    Method.PUSH: Call(messages.Push, "", _EMPTY, ""),
    Method.ADMISSIONS: Call(messages.Admissions, "", messages.AdmissionsAnswer, ""),
    Method.END: Call(messages.End, "", messages.EndAnswer, ""),
    Method.SHARE_DONE: Call(messages.ShareDone, "", messages.ShareAnswer, ""),
    Method.ROUND_JOIN: Call(messages.RoundJoin, "", messages.RoundAnswer, ""),
    Method.ROUND_COMMIT: Call(messages.RoundCommit, "", messages.RoundAnswer, ""),
    Method.TRAIN: Call(messages.Train, "tokens, then the activation", messages.Trained, "gradient by the activation"),
    Method.ROUND_PROJECTION: Call(messages.RoundProjection, "", _EMPTY, "projections of the gradient sum's slices"),
    Method.ROUND_PARTS: Call(messages.RoundParts, "", messages.RoundPartsAnswer, "all parts of the slice"),
    Method.PART: Call(messages.Part, "slice of the gradient sum", messages.PartAnswer, "the reduced slice"),
    Method.AGGREGATE: Call(messages.Aggregate, "", messages.AggregateAnswer, "the mean gradient"),
    Method.STATE: Call(messages.StateQuery, "", messages.StateStatus, ""),
    Method.SNAPSHOT: Call(messages.Snapshot, "", messages.SnapshotAnswer, ""),
    Method.CHUNK: Call(messages.Chunk, "", _EMPTY, "the chunk"),
    Method.RELEASE: Call(messages.Release, "", _EMPTY, ""),
    Method.CLEARED: Call(messages.Cleared, "", _EMPTY, ""),
    Method.AUDIT: Call(messages.Audit, "tensors as they travelled", messages.AuditAnswer, ""),
    Method.EVIDENCE: Call(messages.Evidence, "", messages.EvidenceAnswer, "tensors as they travelled"),
    Method.PARAMETERS: Call(messages.Parameters, "", _EMPTY, "the parameters"),
    Method.BASELINE: Call(messages.Baseline, "baselines", _EMPTY, ""),
    Method.CHECKPOINTS: Call(messages.CheckpointQuery, "", messages.CheckpointOffers, ""),
    Method.CHECKPOINT_PART: Call(messages.CheckpointPart, "", _EMPTY, "the bytes"),
}

STATEMENTS = (messages.Hop, messages.Receipt)
"""Packed inside of other messages."""
ENVELOPES = (messages.Hello, messages.RequestHead, messages.ErrorHead)


def main() -> int:
    """Write the document and the vectors, or compare them; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if something is out of date")
    check = parser.parse_args().check
    wanted = {PATH: document(PATH.read_text(encoding="utf-8")), VECTORS: vectors_text()}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    if check and stale:
        print(f"{', '.join(path.name for path in stale)} out of date; run: {COMMAND}", file=sys.stderr)
        return 1
    for path in stale:
        path.write_text(wanted[path], encoding="utf-8")
    return 0


def vectors_text() -> str:
    """The golden vectors as JSON text."""
    return json.dumps(vectors(), indent=1) + "\n"


def document(text: str) -> str:
    """The document with every marked part made anew. Raises KeyError for a mark that nothing is known of."""
    parts = {"frame-kinds": _frame_kinds, "limits": _limits, "methods": _methods, "messages": _messages}
    return MARKED.sub(lambda found: found[1] + parts[found["name"]]() + found[3], text)


def _frame_kinds() -> str:
    return _table(("kind", "number"), [(kind.name, str(kind.value)) for kind in framing.FrameKind])


def _limits() -> str:
    rows = [
        ("head of a frame", f"{framing.MAX_HEAD_BYTES} bytes"),
        ("body of a frame", f"{framing.MAX_BODY_BYTES} bytes, and what the method allows"),
        ("record", f"{messages.MAX_RECORD_BYTES} bytes"),
        ("records in one message", str(messages.MAX_RECORDS)),
        ("microbatches of a step", str(messages.MAX_MICROBATCHES)),
        ("replicas in an averaging round", str(messages.MAX_REPLICAS)),
        ("packed hop", f"{messages.MAX_HOP_BYTES} bytes"),
        ("packed receipt", f"{messages.MAX_RECEIPT_BYTES} bytes"),
        ("chunks of a snapshot", str(messages.MAX_CHUNKS)),
    ]
    return _table(("what", "at most"), rows)


def _methods() -> str:
    rows = []
    for method, call in CALLS.items():
        stream = "tensor" if STREAM_OF[method] is StreamKind.TENSOR else "control"
        who = "anybody" if method in PUBLIC_METHODS else "admitted" if method in MODEL_METHODS else "claim"
        asked, answered = _side(call.message, call.body), _side(call.answer, call.answer_body)
        rows.append((f"`{method.value}`", stream, who, asked, answered))
    return _table(("method", "stream", "who may ask", "request", "answer"), rows)


def _side(message: type[Any], body: str) -> str:
    words = [] if message is _EMPTY else [f"[{message.__name__}](#{message.__name__.lower()})"]
    return "; ".join([*words, *([f"body: {body}"] if body else [])]) or "empty"


def _messages() -> str:
    shown = [*ENVELOPES, *STATEMENTS]
    for call in CALLS.values():
        shown += [message for message in (call.message, call.answer) if message not in shown and message is not _EMPTY]
    return "\n".join(_message(message) for message in shown)


def _message(message: type[Any]) -> str:
    about = inspect.cleandoc(message.__doc__ or "").replace("``", "`")
    rows = [
        (f"`{entry.name}`", words_of(entry), "" if entry.default is MISSING else _default(entry.default))
        for entry in fields_of(message)
    ]
    return f"#### {message.__name__}\n\n{about}\n\n" + _table(("field", "holds", "if missing"), rows)


def _default(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return {None: "nil", b"": "no bytes", "": "no text"}.get(value, str(value))  # type: ignore[call-overload,no-any-return]


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
