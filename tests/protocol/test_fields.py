"""Each check of a field lets its own values through and names the field that it refuses."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import MessageError
from protocol.fields import binary, decode, encode, flag, integer, mapping, number, optional, sequence, text


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    whole: int = integer(1, 10)
    real: float = number(-1.0, 1.0)
    word: str = text(5)
    digest: bytes = binary(2, 4)
    blob: bytes = binary(longest=3)
    truth: bool = flag()
    items: tuple[int, ...] = sequence(integer(0, 3), 2)
    pairs: tuple[tuple[int, float], ...] = mapping(integer(0, 9), number(), 2)
    maybe: int | None = optional(integer(0, 1))
    later: int = integer(0, 5, default=3)


GOOD: dict[str, Any] = {
    "whole": 1,
    "real": 0.5,
    "word": "five!",
    "digest": b"ab",
    "blob": b"",
    "truth": True,
    "items": [0, 3],
    "pairs": [[1, 0.5], [2, 1]],
}

BAD: list[tuple[str, Any]] = [
    *(("whole", value) for value in (0, 11, True, 1.0, "1", None, [], {})),
    *(("real", value) for value in (1.5, math.nan, math.inf, -math.inf, True, "0", None, b"", [])),
    *(("word", value) for value in ("longer", "a\n", "\x1b[0m", "\u202e", "\ud800", b"a", 1, None, [])),
    *(("digest", value) for value in (b"", b"abc", "ab", None, bytearray(b"ab"), 2)),
    *(("blob", value) for value in (b"abcd", "", None, [])),
    *(("truth", value) for value in (0, 1, "true", None)),
    *(("items", value) for value in ([0, 1, 2], [4], [True], "01", b"01", None, {0: 1}, [[0]])),
    *(
        ("pairs", value)
        for value in ([[1, 1], [2, 2], [3, 3]], [[1]], [1], [[1, 2], [1, 3]], {1: 2}, [[10, 1]], [["1", 1]])
    ),
    *(("maybe", value) for value in (2, "0", [])),
    *(("later", value) for value in (6, None)),
]


def test_a_good_map_becomes_a_message_with_tuples_and_defaults() -> None:
    sample = decode(Sample, GOOD)
    assert sample.items == (0, 3)
    assert sample.pairs == ((1, 0.5), (2, 1.0))
    assert sample.maybe is None and sample.later == 3
    assert decode(Sample, encode(sample)) == sample


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda value: ascii(value)[:30])
def test_a_wrong_value_is_refused_and_its_field_named(name: str, value: Any) -> None:
    with pytest.raises(MessageError, match=rf"^Sample\.{name} ") as caught:
        decode(Sample, GOOD | {name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", GOOD)
def test_a_missing_field_is_named(name: str) -> None:
    with pytest.raises(MessageError, match=f"Sample lacks the field {name}$"):
        decode(Sample, {key: value for key, value in GOOD.items() if key != name})


def test_unknown_fields_are_ignored() -> None:
    assert decode(Sample, GOOD | {"newer": [1], "id": 7, "method": "x"}) == decode(Sample, GOOD)


def test_a_whole_number_counts_as_a_number_and_arrives_as_a_float() -> None:
    assert type(decode(Sample, GOOD | {"real": 1}).real) is float


@given(
    st.sampled_from([*GOOD, "maybe", "later"]),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(), st.binary()),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
        max_leaves=6,
    ),
)
def test_no_value_raises_anything_but_a_message_error(name: str, value: Any) -> None:
    try:
        sample = decode(Sample, GOOD | {name: value})
    except MessageError:
        return
    assert decode(Sample, encode(sample)) == sample
