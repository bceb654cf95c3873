"""Which step of a live swarm's checkpoints is taken out, and in which form."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from node.common_checkpoints import common_step
from node.export import ExportError
from protocol.messages import CheckpointOffers

D, E = b"\x01" * 32, b"\x02" * 32
SIZES = [1000, 1000]
Told = dict[int, dict[str, CheckpointOffers]]


def offers(steps: dict[int, bytes], size: int = 100) -> CheckpointOffers:
    return CheckpointOffers(steps=tuple(steps), sizes=tuple(size for _ in steps), parameters=tuple(steps.values()))


def test_the_newest_step_that_every_stage_has() -> None:
    told = {0: {"a": offers({100: D, 150: D})}, 1: {"b": offers({50: D, 100: E}), "c": offers({150: D}, size=1001)}}
    found = common_step(told, SIZES, None)
    assert [(each.step, each.parameters, each.peers) for each in found] == [(100, D, ("a",)), (100, E, ("b",))]
    assert [each.step for each in common_step({**told, 1: {"b": offers({100: D, 150: D})}}, SIZES, 100)] == [100, 100]


def test_a_stage_is_taken_in_the_form_that_most_name() -> None:
    told = {
        0: {"a": offers({100: D}), "liar": offers({100: E, 10**9: E}), "c": offers({100: D})},
        1: {"b": offers({100: D})},
    }
    first, _ = common_step(told, SIZES, None)
    assert (first.step, first.parameters, first.peers) == (100, D, ("a", "c"))


@pytest.mark.parametrize(
    ("told", "step", "words"),
    [
        ({0: {"a": offers({100: D})}}, None, "no node offers a checkpoint of stage 1 yet"),
        ({}, None, "of stage 0 and 1"),
        (
            {0: {"a": offers({100: D})}, 1: {"b": offers({50: D})}},
            None,
            "no step in common (steps of stage 0: 100; stage 1: 50)",
        ),
        ({0: {"a": offers({100: D})}, 1: {"b": offers({100: D})}}, 50, "not every stage has step 50"),
    ],
)
def test_what_is_missing_is_said(told: Told, step: int | None, words: str) -> None:
    with pytest.raises(ExportError) as caught:
        common_step(told, SIZES, step)
    assert words in str(caught.value)


@given(
    st.dictionaries(
        st.integers(0, 1),
        st.dictionaries(st.sampled_from("abc"), st.dictionaries(st.integers(0, 5), st.sampled_from([D, E]))),
    )
)
def test_whatever_is_taken_was_offered(spoken: dict[int, dict[str, dict[int, bytes]]]) -> None:
    told = {stage: {peer: offers(steps) for peer, steps in peers.items()} for stage, peers in spoken.items()}
    try:
        found = common_step(told, SIZES, None)
    except ExportError:
        held = [{step for steps in spoken.get(stage, {}).values() for step in steps if step} for stage in range(2)]
        assert not held[0] & held[1]
        return
    assert len({each.step for each in found}) == 1
    for stage, each in enumerate(found):
        assert all(spoken[stage][peer][each.step] == each.parameters for peer in each.peers) and each.peers
