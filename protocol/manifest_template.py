"""swarm.toml with a comment on every field, generated from the manifest's own definition.

Reading the text back gives an equal manifest.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, Literal, cast, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from protocol.manifest import Manifest
from protocol.manifest_sections import Section

_LINE_CHARS = 100

_HEADER = (
    "The manifest of a swarm. Its SHA-256 is the swarm's id, so that every node has the same one, and any"
    " change makes another swarm. A field that is left out takes the default that its comment names."
)


def render(manifest: Manifest) -> str:
    """The text of a commented swarm.toml that holds ``manifest``."""
    top = [name for name, info in Manifest.model_fields.items() if not _is_section(info)]
    sections = [name for name, info in Manifest.model_fields.items() if _is_section(info)]
    lines = [*_comment(_HEADER), ""]
    for name in top:
        lines += [*_field(Manifest.model_fields[name], name, getattr(manifest, name)), ""]
    for name in sections:
        section: Section = getattr(manifest, name)
        # Not inspect.getdoc: a section without a docstring must not show its parent's.
        lines += [*_comment(type(section).__doc__ or ""), f"[{name}]", ""]
        for field, info in type(section).model_fields.items():
            lines += [*_field(info, field, getattr(section, field)), ""]
    return "\n".join(lines)


def render_values(values: Mapping[str, Any]) -> str:
    """The text of a commented swarm.toml with these values (nested as in the file), the rest default.

    Raises ManifestError if they are no valid manifest.
    """
    return render(Manifest.from_mapping(values))


def _is_section(info: FieldInfo) -> bool:
    return isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel)


def _field(info: FieldInfo, name: str, value: object) -> Iterator[str]:
    notes = [note for note in (_allowed(info), _default(info)) if note]
    yield from _comment(f"{info.description} ({'; '.join(notes)})" if notes else f"{info.description}")
    yield f"{name} = {_toml(value)}"


def _allowed(info: FieldInfo) -> str:
    """The range of a field in words, from the constraints that the reader applies."""
    if get_origin(info.annotation) is Literal:
        return "one of " + ", ".join(_toml(choice) for choice in get_args(info.annotation))
    bounds = {
        key: getattr(constraint, key)
        for constraint in info.metadata
        for key in ("ge", "gt", "le", "lt")
        if hasattr(constraint, key)
    }
    if bounds.keys() == {"ge", "le"}:
        return f"{_bound(bounds['ge'])} to {_bound(bounds['le'])}"
    words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
    return ", ".join(f"{words[key]} {_bound(bound)}" for key, bound in bounds.items())


def _bound(value: float) -> str:
    """A bound for reading: no fraction where there is none, and large floats in powers of ten."""
    return f"{value:g}" if isinstance(value, float) else str(value)


def _default(info: FieldInfo) -> str:
    return "" if info.is_required() else f"default {_toml(info.default)}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        width=_LINE_CHARS,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):
        # Text in a manifest is printable; TOML and JSON then escape the same two characters in the same way.
        return json.dumps(value, ensure_ascii=False)
    return repr(cast(float, value))
