"""What the fields of a manifest say about each other, and manifest errors in one line.

Each sentence names the field, its value and the fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ValidationError

from protocol.identity import is_peer_id
from protocol.messages import MAX_MICROBATCHES

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from protocol.manifest import Manifest

BYTES_TOKENIZER_SIZE = 259
"""256 bytes, and the marks for begin, end and padding."""

MAX_ACTIVATION_BYTES = 1 << 30
"""In fp32; the largest body of a frame."""

_MAX_VALUE_CHARS = 60
_MAX_LISTED = 16

_WORDS = {
    "int_type": "has to be a whole number",
    "float_type": "has to be a number",
    "bool_type": "has to be true or false",
    "string_type": "has to be text in quotes",
    "finite_number": "has to be a finite number",
    "tuple_type": "has to be a list in brackets",
    "model_type": "has to be a table",
    "dict_type": "has to be a table",
    "greater_than": "has to be above {gt}",
    "greater_than_equal": "has to be at least {ge}",
    "less_than": "has to be below {lt}",
    "less_than_equal": "has to be at most {le}",
    "literal_error": "has to be {expected}",
    "string_too_short": "has to be at least {min_length} long",
    "string_too_long": "has to be at most {max_length} long",
    "too_short": "has to be at least {min_length} long",
    "too_long": "has to be at most {max_length} long",
    "string_pattern_mismatch": "has to be empty or 64 hex digits (0-9, a-f)",
}
"""Our words for the library's error types; an unlisted type keeps the library's words."""


def contradictions(manifest: Manifest) -> list[str]:
    """Every way in which two fields of an otherwise valid manifest contradict each other, as sentences."""
    return [
        *_model(manifest),
        *_stages(manifest),
        *_training(manifest),
        *_data(manifest),
        *_verifier(manifest),
        *_network(manifest),
        *_admission(manifest),
    ]


def describe(error: ValidationError, root: type[BaseModel]) -> str:
    """One line: the first problem, and the number of further ones."""
    # Unknown fields first: the field that they were meant to be is then missing, which explains less.
    details = sorted(error.errors(include_url=False), key=lambda detail: detail["type"] != "extra_forbidden")
    problems = [line for detail in details for line in _lines(detail, root)]
    more = len(problems) - 1
    return problems[0] if not more else f"{problems[0]} (and {more} more problem{'s' if more > 1 else ''})"


def describe_value(value: object) -> str:
    """A value for a message: on one line, and short."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print very long integers
        text = "a very long number"
    return _one_line(text)


def _model(manifest: Manifest) -> Iterator[str]:
    model = manifest.model
    if model.width % model.heads:
        yield (
            f"model.heads: {model.heads} does not divide model.width {model.width};"
            f" choose one of {_head_counts(model.width)}"
        )
    elif (model.width // model.heads) % 2:
        yield (
            f"model.heads: {model.heads} gives heads of odd size {model.width // model.heads}, which rotary"
            f" positions cannot use; choose one of {_head_counts(model.width)}"
        )
    if model.heads % model.kv_heads:
        yield (
            f"model.kv_heads: {model.kv_heads} does not divide model.heads {model.heads};"
            f" choose one of {_listed(_divisors(model.heads))}"
        )
    if model.tie_embeddings and manifest.num_stages > 1:
        yield (
            f"model.tie_embeddings: true needs a single stage, not {manifest.num_stages}, since"
            f" stages share no"
            " parameters; set it to false"
        )


def _stages(manifest: Manifest) -> Iterator[str]:
    total, layers = sum(manifest.stages.layers_per_stage), manifest.model.layers
    if total != layers:
        yield (
            f"stages.layers_per_stage: {list(manifest.stages.layers_per_stage)} adds up to {total}, but"
            f" model.layers is {layers}; change one of them"
        )


def _training(manifest: Manifest) -> Iterator[str]:
    training = manifest.training
    if training.sequences_per_step % training.sequences_per_microbatch:
        yield (
            f"training.sequences_per_step: {training.sequences_per_step} is not a multiple of"
            f" training.sequences_per_microbatch {training.sequences_per_microbatch}; change one of them"
        )
    elif manifest.microbatches_per_step > MAX_MICROBATCHES:
        yield (
            f"training.sequences_per_microbatch: {training.sequences_per_microbatch} gives"
            f" {manifest.microbatches_per_step} microbatches a step, and {MAX_MICROBATCHES} are"
            f" allowed; raise it"
        )
    if manifest.activation_bytes("fp32") > MAX_ACTIVATION_BYTES:
        yield (
            f"training.sequences_per_microbatch: {training.sequences_per_microbatch} sequences of"
            f" {manifest.model.context} tokens of width {manifest.model.width} are more than a"
            f" tensor may have"
            f" ({MAX_ACTIVATION_BYTES} bytes in fp32); lower it"
        )


def _data(manifest: Manifest) -> Iterator[str]:
    data, vocab_size = manifest.data, manifest.model.vocab_size
    if data.source != "stdlib" and not (data.source.startswith("file:") and data.source != "file:"):
        yield f'data.source: {describe_value(data.source)} is unknown; write "stdlib" or "file:PATH"'
    if data.tokenizer == "bytes" and vocab_size < BYTES_TOKENIZER_SIZE:
        yield (
            f"model.vocab_size: {vocab_size} is too few for the bytes tokenizer; write at least {BYTES_TOKENIZER_SIZE}"
        )
    if data.tokenizer == "bytes" and data.tokenizer_sha256:
        yield (
            f"data.tokenizer_sha256: {describe_value(data.tokenizer_sha256)} belongs to no file, since"
            ' data.tokenizer is "bytes"; leave it empty'
        )


def _verifier(manifest: Manifest) -> Iterator[str]:
    verifier = manifest.verifier
    if verifier.minimum_history > verifier.window:
        yield (
            f"verifier.minimum_history: {verifier.minimum_history} is more than verifier.window"
            f" {verifier.window}; lower it"
        )


def _network(manifest: Manifest) -> Iterator[str]:
    network = manifest.network
    if network.renew_seconds >= network.lease_seconds:
        yield (
            f"network.renew_seconds: {network.renew_seconds:g} is not less than network.lease_seconds"
            f" {network.lease_seconds:g}; a third of it is usual"
        )
    if network.heartbeat_seconds * 2 >= network.dead_after_seconds:
        yield (
            f"network.dead_after_seconds: {network.dead_after_seconds:g} is not more than twice"
            f" network.heartbeat_seconds {network.heartbeat_seconds:g}; raise it, or beat more often"
        )


def _admission(manifest: Manifest) -> Iterator[str]:
    admission = manifest.admission
    if admission.mode == "invited" and not admission.coordinator:
        yield (
            'admission.coordinator: "" is no peer id, and admission.mode "invited" needs one; put in what'
            " `sentinel identity` prints on the coordinator's machine"
        )
    elif admission.coordinator and not is_peer_id(admission.coordinator):
        yield (
            f"admission.coordinator: {describe_value(admission.coordinator)} is no peer id; put in what"
            " `sentinel identity` prints on the coordinator's machine"
        )


def _one_line(text: str) -> str:
    """Text that a stranger may have written, made safe to print: field names too come from the file."""
    text = "".join(character if character.isprintable() else "?" for character in text)
    return text if len(text) <= _MAX_VALUE_CHARS else f"{text[: _MAX_VALUE_CHARS - 3]}..."


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _head_counts(width: int) -> str:
    if width % 2:
        return "none, until model.width is even"
    return _listed(_divisors(width // 2))


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:_MAX_LISTED])) + (", ..." if len(numbers) > _MAX_LISTED else "")


def _lines(detail: ErrorDetails, root: type[BaseModel]) -> list[str]:
    """The problems in one of the library's errors: one, or for contradictions several."""
    where = ".".join(_one_line(str(part)) for part in detail["loc"])
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "value_error":
        problem = str(context["error"])
        return [f"{where}: {describe_value(detail['input'])} {problem}"] if where else problem.split("\n")
    if kind == "missing":
        return [f"{where}: is missing; add it"]
    if kind == "extra_forbidden":
        return [_unknown_field(where, [str(part) for part in detail["loc"]], root)]
    words = _WORDS[kind].format(**context) if kind in _WORDS else f"is refused: {detail['msg']}"
    return [f"{where}: {describe_value(detail['input'])} {words}"]


def _unknown_field(where: str, path: list[str], root: type[BaseModel]) -> str:
    section: Any = root
    for part in path[:-1]:
        section = section.model_fields[part].annotation
    names = list(section.model_fields)
    close = difflib.get_close_matches(path[-1], names, n=1)
    return f"{where}: there is no such field; " + (f"did you mean {close[0]}?" if close else "remove it")
