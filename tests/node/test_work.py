"""A microbatch may come to a node more than once in a step; what it sends on must never look like a repetition."""

from __future__ import annotations

import pytest

from node.wiring import Dealer
from node.work import MAX_RUNS, Step
from protocol.errors import MessageError, RefusedError


def test_calls_for_one_microbatch_are_numbered_over_all_its_arrivals() -> None:
    step = Step(number=3, parameters=b"", dealer=Dealer(()))
    first_arrival = [step.next_attempt(5) for _ in range(2)]
    second_arrival = [step.next_attempt(5) for _ in range(2)]
    assert first_arrival + second_arrival == [0, 1, 2, 3]
    assert step.next_attempt(6) == 0


def test_a_caller_may_send_a_microbatch_some_times_and_no_message_twice() -> None:
    step = Step(number=0, parameters=bytes(32), dealer=Dealer(()))
    for attempt in range(MAX_RUNS):
        step.arrives("a", 3, attempt)
        with pytest.raises(MessageError) as twice:
            step.arrives("a", 3, attempt)
        assert twice.value.kind == "repeated"
    with pytest.raises(RefusedError) as caught:
        step.arrives("a", 3, MAX_RUNS)
    assert caught.value.kind == "exhausted"
    step.arrives("b", 3, 0)
    step.arrives("a", 4, 0)


def test_a_caller_that_starts_again_does_not_repeat_itself_and_gets_no_more_runs() -> None:
    step = Step(number=0, parameters=bytes(32), dealer=Dealer(()))
    for generation in range(MAX_RUNS):
        step.arrives("a", 3, 0, generation)
    with pytest.raises(MessageError, match="twice"):
        step.arrives("a", 3, 0, 0)
    with pytest.raises(RefusedError, match="enough"):
        step.arrives("a", 3, 0, MAX_RUNS)
