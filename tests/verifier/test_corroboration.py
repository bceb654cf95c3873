"""When replicas bear each other out, and when they contradict each other."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from verifier.corroboration import LIKENESS, alike, contradicted, corroborated

SIZE = 64
OUTPUT, RECEIVED, ELSE = (torch.randn(SIZE, generator=torch.Generator().manual_seed(seed)) for seed in range(3))
ROUNDED = OUTPUT * (1 + LIKENESS / 2)
REPLICAS = [f"replica-{number}" for number in range(9)]


def test_rounding_is_alike_and_another_tensor_is_not() -> None:
    assert alike(OUTPUT, ROUNDED)
    assert alike(torch.zeros(SIZE), torch.zeros(SIZE))
    for other in (ELSE, -OUTPUT, OUTPUT * 2, torch.zeros(SIZE), OUTPUT * float("nan")):
        assert not alike(OUTPUT, other)
        assert not alike(other, OUTPUT)


@pytest.mark.parametrize(
    ("suspect", "accepted", "expected"),
    [
        ((ELSE, RECEIVED), (OUTPUT, RECEIVED), True),
        ((ROUNDED, RECEIVED), (OUTPUT, RECEIVED), False),
        ((ELSE, ELSE), (OUTPUT, RECEIVED), False),  # from different inputs both may be right
        ((ELSE, None), (OUTPUT, None), True),
        ((ROUNDED, None), (OUTPUT, None), False),
        ((ELSE, None), (OUTPUT, RECEIVED), False),
        ((ELSE, RECEIVED), (OUTPUT, None), False),
    ],
)
def test_equal_inputs_with_different_outputs_contradict(
    suspect: tuple[Tensor, Tensor | None], accepted: tuple[Tensor, Tensor | None], expected: bool
) -> None:
    assert contradicted(suspect, accepted) is expected


@given(agreeing=st.integers(1, 5), others=st.integers(0, 4), replicas=st.integers(1, 9))
def test_a_strict_majority_of_the_stage_and_at_least_two_corroborate(agreeing: int, others: int, replicas: int) -> None:
    sketches = [
        (peer, OUTPUT if place < agreeing else ELSE) for place, peer in enumerate(REPLICAS[: agreeing + others])
    ]
    found = corroborated(sketches, peer=REPLICAS[0], replicas=replicas)
    assert found == (tuple(REPLICAS[:agreeing]) if agreeing >= 2 and 2 * agreeing > replicas else ())


def test_nobody_corroborates_alone_by_sending_twice() -> None:
    assert corroborated([("a", OUTPUT), ("a", ROUNDED)], peer="a", replicas=1) == ()


def test_the_latest_word_of_the_peer_counts() -> None:
    assert corroborated([("a", ELSE), ("b", OUTPUT), ("a", OUTPUT)], peer="a", replicas=3) == ("a", "b")
