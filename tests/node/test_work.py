"""A microbatch may come to a node more than once in a step; what it sends on must never look like a repetition."""

from __future__ import annotations

from node.wiring import Dealer
from node.work import Step


def test_calls_for_one_microbatch_are_numbered_over_all_its_arrivals() -> None:
    step = Step(number=3, parameters=b"", dealer=Dealer(()))
    first_arrival = [step.next_attempt(5) for _ in range(2)]
    second_arrival = [step.next_attempt(5) for _ in range(2)]
    assert first_arrival + second_arrival == [0, 1, 2, 3]
    assert step.next_attempt(6) == 0
