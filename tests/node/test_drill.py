"""A drill changes what its name says, only in its directions and only from its step on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from node.drill import DELAY_MICROBATCHES, DRIFT_LIMIT, Drill, parse_drill
from node.drill_attacks import deviation
from node.drill_names import CONDUCT_ATTACKS, PREFIXES, TENSOR_ATTACKS, Attack, check_drill_name
from protocol.errors import SettingsError
from verifier.verdicts import Direction

SEED = b"seed"
TENSOR_NAMES = [f"{prefix}{attack}" for prefix in ("", *PREFIXES) for attack in TENSOR_ATTACKS]
NAMES = [*TENSOR_NAMES, *map(str, CONDUCT_ATTACKS)]
NOT_EVERY_TENSOR = {Attack.STALE, Attack.INTERMITTENT}


def tensors(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [3.0 + torch.randn(4, 64, generator=generator) for _ in range(count)]


def drill_of(name: str, *, from_step: int = 0, seed: bytes = SEED) -> Drill:
    return Drill(parse_drill(name, from_step), seed=seed)


def attacked(name: str, count: int = 1, *, seed: bytes = SEED) -> list[Tensor]:
    drill = drill_of(name, seed=seed)
    return [drill.apply(tensor, Direction.ACTIVATION, 0) for tensor in tensors(count)]


def test_every_attack_is_on_tensors_or_on_conduct() -> None:
    assert sorted([*TENSOR_ATTACKS, *CONDUCT_ATTACKS]) == sorted(Attack)


@pytest.mark.parametrize("name", NAMES)
def test_a_name_reads_back(name: str) -> None:
    plan = parse_drill(name, 5)
    assert plan.name == name and plan.from_step == 5
    expected = {"gradient": set(Direction) - {Direction.ACTIVATION}, "both": set(Direction)}
    if plan.attack in CONDUCT_ATTACKS:
        assert plan.directions == set()
    else:
        assert plan.directions == expected.get(name.split("-")[0], {Direction.ACTIVATION})


@pytest.mark.parametrize("name", ["", "none", "gradient-", "both-gradient-scale", "SCALE", "scale ", "sign_flip"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_drill(name, 0)
    assert all(attack in str(caught.value) for attack in Attack)


@pytest.mark.parametrize("attack", CONDUCT_ATTACKS)
@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_direction_before_an_attack_on_conduct_is_refused(prefix: str, attack: Attack) -> None:
    with pytest.raises(SettingsError, match=f"{attack} changes no tensor.* takes no {prefix} .*write {attack}$"):
        parse_drill(f"{prefix}{attack}", 0)
    assert check_drill_name(attack) == ("", attack)


@pytest.mark.parametrize("name", TENSOR_NAMES)
def test_an_attack_changes_only_its_directions_and_only_from_its_step_on(name: str) -> None:
    drill = drill_of(name, from_step=3)
    every = drill.plan.attack not in NOT_EVERY_TENSOR
    falsified, first = 0, None
    for step in range(10):
        for direction in Direction:
            for tensor in tensors(2):
                kept = tensor.clone()
                sent = drill.apply(tensor, direction, step)
                assert torch.equal(tensor, kept)  # the honest tensor is still needed
                assert sent.shape == tensor.shape and sent.dtype is torch.float32
                changed = not torch.equal(sent, tensor)
                may = step >= 3 and direction in drill.plan.directions
                assert changed == may if every else changed <= may
                falsified += changed
                first = step if changed and first is None else first
                assert (drill.attacked, drill.first_attack_step) == (falsified, first)
    assert falsified > 0


@pytest.mark.parametrize("name", CONDUCT_ATTACKS)
def test_an_attack_on_conduct_leaves_tensors_alone(name: str) -> None:
    drill = drill_of(name)
    (x,) = tensors(1)
    assert all(drill.apply(x, direction, 5, received=-x) is x for direction in Direction)
    assert (drill.attacked, drill.first_attack_step) == (0, None)


@pytest.mark.parametrize("name", ["scale", "noise", "sign-flip", "random-sign", "constant", "mimic", "bias", "drift"])
def test_a_tensor_that_stays_what_it_was_is_no_attack(name: str) -> None:
    drill = drill_of(name)
    drill.apply(torch.zeros(4, 8), Direction.ACTIVATION, 0)
    assert (drill.attacked, drill.first_attack_step) == (0, None)


@pytest.mark.parametrize("attack", TENSOR_ATTACKS)
def test_other_dtypes_are_kept(attack: Attack) -> None:
    drill = drill_of(attack)
    for tensor in tensors(8):
        sent = drill.apply(tensor.bfloat16(), Direction.ACTIVATION, 30, received=tensor)
        assert sent.dtype is torch.bfloat16 and sent.shape == tensor.shape


def test_a_delay_sends_the_tensor_of_an_earlier_microbatch() -> None:
    honest = tensors(8)
    sent = attacked("delay", 8)
    lag = DELAY_MICROBATCHES - 1
    assert all(torch.equal(sent[index], honest[index - lag]) for index in range(lag, 8))


@pytest.mark.parametrize("name", ["both-delay", "both-stale"])
def test_the_directions_have_pasts_of_their_own(name: str) -> None:
    drill = drill_of(name)
    one, two, three, four = tensors(4)
    drill.apply(one, Direction.ACTIVATION, 0)
    drill.apply(two, Direction.GRADIENT, 0)
    assert torch.equal(drill.apply(three, Direction.ACTIVATION, 0), one)
    assert torch.equal(drill.apply(four, Direction.GRADIENT, 0), two)


@pytest.mark.parametrize("direction", Direction)
def test_an_idle_node_passes_on_what_it_received(direction: Direction) -> None:
    drill = drill_of("both-identity", from_step=1)
    x, received = tensors(2)
    assert drill.apply(x, direction, 0, received=received) is x
    sent = drill.apply(x, direction, 1, received=received)
    assert torch.equal(sent, received) and sent is not received
    assert not drill.apply(x, direction, 1).any()  # at the ends of the pipeline nothing is received
    assert not drill.apply(x, direction, 1, received=x.clone()).equal(received)
    assert drill.attacked == 2  # the last one was the truth


def test_a_stale_node_sends_its_first_output_for_ever() -> None:
    drill = drill_of("stale", from_step=2)
    honest = tensors(12)
    sent = [drill.apply(tensor, Direction.ACTIVATION, index // 2) for index, tensor in enumerate(honest)]
    assert all(torch.equal(*pair) for pair in zip(sent[:5], honest[:5], strict=True))
    assert all(torch.equal(tensor, honest[4]) for tensor in sent[4:])
    assert (drill.attacked, drill.first_attack_step) == (7, 2)


def test_the_cache_of_a_stale_node_is_a_copy() -> None:
    drill = drill_of("stale")
    first, second = tensors(2)
    kept = first.clone()
    drill.apply(first, Direction.ACTIVATION, 0)
    first.zero_()
    assert torch.equal(drill.apply(second, Direction.ACTIVATION, 0), kept)


def test_a_drift_grows_from_step_to_step_in_one_direction() -> None:
    drill = drill_of("drift", from_step=10)
    (x,) = tensors(1)
    moves = {step: drill.apply(x, Direction.ACTIVATION, step) - x for step in (9, 10, 11, 14, 59, 109, 110, 500)}
    unit = moves[109] / deviation(x)
    assert float(unit.square().mean()) == pytest.approx(1.0, rel=1e-4)
    assert torch.allclose(unit, unit[0].expand_as(unit), atol=1e-5)  # all tokens alike
    for step, move in moves.items():
        size = min(DRIFT_LIMIT, 0.01 * max(0, step - 9))
        assert torch.allclose(move, size * moves[109], atol=1e-5)
    assert drill.first_attack_step == 10


def test_the_drifts_of_two_directions_or_nodes_differ() -> None:
    (x,) = tensors(1)
    drill, other = drill_of("both-drift"), drill_of("both-drift", seed=b"other")
    one = drill.apply(x, Direction.ACTIVATION, 200)
    assert not torch.allclose(one, drill.apply(x, Direction.GRADIENT, 200))
    assert not torch.allclose(one, other.apply(x, Direction.ACTIVATION, 200))


@pytest.mark.parametrize("seed", [b"one", b"two", b"three"])
def test_an_intermittent_node_flips_about_one_microbatch_in_four(seed: bytes) -> None:
    drill = drill_of("intermittent", seed=seed)
    flips = []
    for x in tensors(1) * 1000:
        sent = drill.apply(x, Direction.ACTIVATION, 0)
        assert torch.equal(sent, x) or torch.equal(sent, -x)
        flips.append(torch.equal(sent, -x))
    assert 200 < sum(flips) < 300  # 3.6 standard deviations
    assert drill.attacked == sum(flips)
    assert len({tuple(flips[start : start + 4]) for start in range(0, 1000, 4)}) > 4  # not every fourth


@pytest.mark.parametrize("name", ["noise", "random", "random-sign", "mimic", "drift", "intermittent"])
def test_the_same_seed_gives_the_same_attack(name: str) -> None:
    assert all(torch.equal(*pair) for pair in zip(attacked(name, 30), attacked(name, 30), strict=True))
    other = attacked(name, 30, seed=b"other")
    assert not all(torch.equal(*pair) for pair in zip(attacked(name, 30), other, strict=True))


@pytest.mark.parametrize("name", ["noise", "mimic", "intermittent"])
def test_what_happens_in_one_direction_does_not_change_the_other(name: str) -> None:
    alone, both = drill_of(name), drill_of(f"both-{name}")
    for x in tensors(20):
        both.apply(x, Direction.GRADIENT, 0)
        assert torch.equal(alone.apply(x, Direction.ACTIVATION, 0), both.apply(x, Direction.ACTIVATION, 0))
