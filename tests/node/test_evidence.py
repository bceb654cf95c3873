"""Evidence is found by what it is about, and old evidence goes before the present step's, which never goes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from node.evidence import EvidenceStore, Kept

BIG = 1 << 30


def kept(size: int = 10, mark: bytes = b"r") -> Kept:
    """Evidence of ``size`` bytes."""
    return Kept(sent=(memoryview(bytes(size - 4)), b"\1\2"), got=bytearray(2), input_receipt=mark)


def key(step: int, microbatch: int = 0, returned: bytes = bytes(32)) -> tuple[int, int, bytes]:
    return step, microbatch, returned


def test_its_size_is_that_of_the_tensors() -> None:
    assert kept(10).nbytes == 10
    words = memoryview(bytearray(8)).cast("i")  # counts items, not bytes
    assert Kept(sent=(words,), got=words, input_receipt=bytes(500)).nbytes == 16


def test_evidence_is_found_by_step_microbatch_and_what_was_returned() -> None:
    store = EvidenceStore(keep=True)
    one, other = kept(mark=b"one"), kept(mark=b"other")
    store.add(3, 7, b"a" * 32, one)
    store.add(3, 7, b"b" * 32, other)  # the same microbatch again, for another caller
    assert store.find(3, 7, b"a" * 32) is one
    assert store.find(3, 7, b"b" * 32) is other
    assert store.find(3, 8, b"a" * 32) is store.find(4, 7, b"a" * 32) is store.find(3, 7, b"c" * 32) is None


def test_the_first_evidence_for_a_gradient_stays() -> None:
    store = EvidenceStore(keep=True, limit=25)
    first = kept()
    for _ in range(10):
        store.add(*key(3), first)
        store.add(*key(3), kept())
    assert store.find(*key(3)) is first
    store.add(*key(2, 1), kept())
    assert store.find(*key(2, 1)) is not None  # what was added twice counts once


def test_where_nobody_audits_nothing_is_kept() -> None:
    store = EvidenceStore(keep=False)
    store.add(*key(3), kept())
    assert store.find(*key(3)) is None
    store.forget_before(9)


def test_beyond_the_limit_the_oldest_goes_first() -> None:
    store = EvidenceStore(keep=True, limit=30)
    for microbatch in range(3):
        store.add(*key(1, microbatch), kept())
    store.add(*key(2), kept())
    assert store.find(*key(1, 0)) is None
    assert store.find(*key(1, 1)) is not None and store.find(*key(1, 2)) is not None
    store.add(*key(2, 1), kept(15))
    assert store.find(*key(1, 1)) is store.find(*key(1, 2)) is None
    assert store.find(*key(2)) is not None and store.find(*key(2, 1)) is not None


def test_of_the_present_step_nothing_is_dropped_whatever_the_limit() -> None:
    store = EvidenceStore(keep=True, limit=15)
    for microbatch in range(20):
        store.add(*key(5, microbatch), kept())
    store.add(*key(5, 20), kept(BIG >> 10))
    assert all(store.find(*key(5, microbatch)) is not None for microbatch in range(21))
    store.add(*key(6), kept())  # the step before it is over, and goes
    assert [store.find(*key(5, microbatch)) for microbatch in range(21)] == [None] * 21
    assert store.find(*key(6)) is not None


def test_what_is_older_than_a_step_is_let_go_and_makes_room() -> None:
    store = EvidenceStore(keep=True, limit=30)
    for step in (1, 2, 3):
        store.add(*key(step), kept())
    store.forget_before(2)
    assert store.find(*key(1)) is None
    assert store.find(*key(2)) is not None and store.find(*key(3)) is not None
    store.forget_before(2)
    store.add(*key(4), kept())
    assert store.find(*key(2)) is not None  # 30 bytes again, and not a byte more
    store.forget_before(9)
    store.add(*key(9), kept(30))
    assert store.find(*key(9)) is not None and store.find(*key(3)) is store.find(*key(4)) is None


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(0, 5), st.integers(0, 3), st.integers(4, 40)),
            st.tuples(st.just("forget"), st.integers(0, 6)),
        ),
        max_size=40,
    )
)
def test_the_limit_holds_but_for_the_present_step_in_any_course_of_things(course: list[tuple[object, ...]]) -> None:
    store = EvidenceStore(keep=True, limit=100)
    present = 0
    for event in course:
        if event[0] == "add":
            _, step, microbatch, size = event
            assert isinstance(step, int) and isinstance(microbatch, int) and isinstance(size, int)
            present = max(present, step)  # steps only go on
            store.add(present, microbatch, bytes(32), kept(size))
            assert store.find(present, microbatch, bytes(32)) is not None
        else:
            assert isinstance(event[1], int)
            store.forget_before(min(event[1], present))
        held = {place: entry.nbytes for place, entry in store._kept.items()}
        assert store._bytes == sum(held.values())
        past = sum(size for (step, _, _), size in held.items() if step < present)
        assert past == 0 or store._bytes <= 100
