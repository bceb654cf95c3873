"""The parts of the settings' benchmark that decide what its numbers mean."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import pytest
import torch

from benchmarks import settings
from benchmarks.settings import Case, Item, Message, Stream, Tally, chance_of_limit, inserted, markdown, steps_until
from node.guard import checker_config
from protocol.manifest import Manifest
from verifier.config import AXES, CheckerConfig
from verifier.sentinel import BoundaryChecker
from verifier.sketch import sketch
from verifier.verdicts import Direction

SHAPE = (2, 16, 32)
STEPS, FROM_STEP = 24, 18
CONFIG = CheckerConfig(warmup_steps=4, minimum_history=8)


def message(number: int, step: int, received: Message | None = None) -> Message:
    """A little more than what was received, if anything was."""
    value = torch.randn(SHAPE, generator=torch.Generator().manual_seed(number)) + 1.0
    if received is not None:
        value = received.tensor.float() + 0.3 * (value - 1.0)
    picture = sketch(value.bfloat16(), key=settings.step_key(step), size=CONFIG.sketch_size)
    return Message(tensor=value.bfloat16(), sketch=picture, received=received)


def stream(boundary: int = 1, direction: Direction = Direction.ACTIVATION) -> Stream:
    def sent(number: int, step: int) -> Message:
        return message(number, step, message(10_000 + number, step))

    messages = [[sent(4 * step + microbatch, step) for microbatch in range(4)] for step in range(STEPS)]
    return Stream(boundary=boundary, direction=direction, messages=messages)


# what is tried -----------------------------------------------------------------------------------


def test_the_defaults_are_those_of_a_new_swarm() -> None:
    manifest = Manifest.from_mapping({"name": "defaults"})
    assert checker_config(manifest) == settings.DEFAULTS


def test_each_trial_differs_from_the_defaults_in_what_it_says() -> None:
    first, *others = settings.trials()
    assert (first.setting, first.config) == ("default", CheckerConfig())
    assert len({trial.config for trial in others}) == len(others)
    for trial in others:
        assert trial.config != CheckerConfig()
        if trial.setting in ("reduction", "votes", "window", "fence_multiplier"):
            (value,) = {str(getattr(trial.config, trial.setting)), trial.value} - {f"{trial.value}.0"} or {trial.value}
            assert value == trial.value
            assert replace(trial.config, **{trial.setting: getattr(CheckerConfig(), trial.setting)}) == CheckerConfig()


@pytest.mark.parametrize(
    ("direction", "places"),
    [(Direction.ACTIVATION, ["ends", "inner", "inner"]), (Direction.GRADIENT, ["inner", "inner", "ends"])],
)
def test_the_ends_are_the_stages_with_nothing_before_them(direction: Direction, places: list[str]) -> None:
    assert [Stream(boundary=boundary, direction=direction).place for boundary in range(3)] == places


def test_keys_of_sketches_change_with_the_step() -> None:
    assert settings.step_key(3) == hashlib.sha256(bytes(7) + b"\x03").digest()


# strikes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "limit", "expected"),
    [
        ([True] * 5, 3.0, 4),  # a tenth of a strike leaks in each step
        ([True] * 5, 1.0, 1),
        ([False, False, True], 1.0, 3),
        ([True, False] * 4, 2.0, 5),
        ([True] * 3, 3.0, None),
        ([], 1.0, None),
    ],
)
def test_the_ledger_says_when_somebody_is_barred(flags: list[bool], limit: float, expected: int | None) -> None:
    assert steps_until(flags, CheckerConfig(strike_limit=limit)) == expected


def test_the_chance_of_the_limit_follows_from_the_share() -> None:
    assert chance_of_limit(0.0, limit=1.0, decay=0.1, steps=100) == 0.0
    assert chance_of_limit(0.01, limit=1.0, decay=0.1, steps=100) == pytest.approx(1 - 0.99**100)
    assert chance_of_limit(1.0, limit=3.0, decay=0.1, steps=3) == 0.0
    assert chance_of_limit(1.0, limit=3.0, decay=0.1, steps=4) == pytest.approx(1.0)
    # Two flags in a row, of three steps: 1.9 strikes are enough for 1.9.
    assert chance_of_limit(0.5, limit=1.9, decay=0.1, steps=3) == pytest.approx(3 / 8)
    rising = [chance_of_limit(0.05, limit=limit, decay=0.1, steps=200) for limit in (4.0, 3.0, 2.0, 1.0)]
    assert rising == sorted(rising)


# judging -----------------------------------------------------------------------------------------


def test_an_attacker_changes_its_own_microbatch_from_the_given_step_on() -> None:
    honest = stream()
    fakes = settings.falsify(honest, "sign-flip", FROM_STEP)
    assert sorted(fakes) == list(range(FROM_STEP, STEPS))
    for step, fake in fakes.items():
        assert torch.equal(fake.tensor, -honest.messages[step][settings.ATTACKED].tensor)
        assert fake.received is honest.messages[step][settings.ATTACKED].received
    some = settings.falsify(honest, "intermittent", 0)
    assert 0 < len(some) < STEPS
    idle = settings.falsify(honest, "identity", STEPS - 1)[STEPS - 1]
    assert idle.received is not None
    assert torch.equal(idle.tensor, idle.received.tensor)


def case(*attacks: str) -> Case:
    honest = stream()
    return settings.reduced(honest, {name: settings.falsify(honest, name, FROM_STEP) for name in attacks}, CONFIG)


def test_honest_messages_pass_and_blatant_ones_do_not() -> None:
    honest, attacks = settings.judge(case("scale", "intermittent"), CONFIG, FROM_STEP)
    assert (honest.judged, honest.flagged) == (4 * (STEPS - 4), 0)
    assert honest.flagged_steps == [False] * STEPS
    scale, some = attacks["scale"], attacks["intermittent"]
    assert (scale.sent, scale.caught, scale.caught_steps) == (STEPS - FROM_STEP, STEPS - FROM_STEP, [True] * 6)
    assert some.sent == some.caught == sum(some.caught_steps) <= 6


def test_what_slips_through_is_learnt() -> None:
    made = case()
    honest = made.honest
    big = BoundaryChecker(CONFIG, Direction.ACTIVATION, seed=1).reduce(3.0 * made.stream.messages[0][0].tensor)
    loud = {step: replace(honest[step][0], reduction=big, input_sketch=None) for step in range(FROM_STEP, STEPS)}
    quiet = {step: honest[step][0] for step in range(FROM_STEP, FROM_STEP + 3)}
    mixed = Case(stream=made.stream, honest=honest, fakes={"mixed": loud | quiet})
    _, attacks = settings.judge(mixed, CONFIG, FROM_STEP)
    assert attacks["mixed"].caught_steps == [False] * 3 + [True] * 3
    assert (attacks["mixed"].sent, attacks["mixed"].caught) == (6, 3)


def test_a_tally_adds_up_and_tells_who_is_barred() -> None:
    tally = Tally()
    first, *_ = settings.trials()
    made = case("scale")
    for _ in range(2):
        tally.add(first, made.stream, *settings.judge(made, CONFIG, FROM_STEP))
    (honest,) = tally.honest.values()
    (attack,) = tally.attacks.values()
    assert (honest.place, honest.direction, honest.judged, honest.flagged) == ("inner", "activation", 160, 0)
    assert (attack.attack, attack.sent, attack.recall, attack.attackers, attack.barred) == ("scale", 12, 1.0, 2, 2)
    strikes = {row.limit: row for row in tally.strikes()}
    assert (strikes[3.0].barred, strikes[3.0].median_steps, strikes[3.0].slowest_steps) == (2, 4, 4)
    assert (strikes[5.0].honest, strikes[5.0].honest_barred, strikes[5.0].honest_chance) == (2, 0, 0.0)


@pytest.mark.parametrize("axes", AXES)
def test_a_case_is_reduced_as_its_setting_says(axes: str) -> None:
    honest = stream()
    made = settings.reduced(honest, {}, replace(CONFIG, reduction=axes))  # type: ignore[arg-type]
    item: Item = made.honest[0][0]
    sizes = {"tokens": 32, "sequences": 16 * 32, "none": 2 * 16 * 32}
    assert item.reduction.mean.shape == (sizes[axes],)
    assert item.input_sketch is not None


# tables ------------------------------------------------------------------------------------------


def test_a_table_lines_up() -> None:
    assert markdown([["a", "share"], ["long name", "5 %"]]) == (
        "| a         | share |\n|-----------|------:|\n| long name |   5 % |"
    )


def test_tables_replace_what_stands_between_their_markers() -> None:
    text = "before\n<!-- table one -->\nold\n<!-- end one -->\nafter\n"
    once = inserted(text, {"one": "| new |"})
    assert once == "before\n<!-- table one -->\n\n| new |\n\n<!-- end one -->\nafter\n"
    assert inserted(once, {"one": "| new |"}) == once
    with pytest.raises(ValueError, match="no place for the table two"):
        inserted(text, {"two": ""})


def test_too_few_steps_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        settings.main(["--steps", "20"])
    assert "--steps is at least" in capsys.readouterr().err
