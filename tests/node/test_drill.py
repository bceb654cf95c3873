"""A drill changes what its name says, only in its directions and only from its step on."""

from __future__ import annotations

import pytest
import torch

from node.drill import DELAY_MICROBATCHES, SCALE_FACTOR, Drill, parse_drill
from node.drill_names import Attack
from protocol.errors import SettingsError
from verifier.verdicts import Direction

SEED = b"seed"
NAMES = [f"{prefix}{attack}" for prefix in ("", "gradient-", "both-") for attack in Attack]


def tensors(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [3.0 + torch.randn(4, 64, generator=generator) for _ in range(count)]


def attacked(name: str, count: int = 1, *, from_step: int = 0, seed: bytes = SEED) -> list[torch.Tensor]:
    drill = Drill(parse_drill(name, from_step), seed=seed)
    return [drill.apply(tensor, Direction.ACTIVATION, 0) for tensor in tensors(count)]


@pytest.mark.parametrize("name", NAMES)
def test_a_name_reads_back(name: str) -> None:
    plan = parse_drill(name, 5)
    assert plan.name == name and plan.from_step == 5
    expected = {"gradient": {Direction.GRADIENT}, "both": set(Direction)}
    assert plan.directions == expected.get(name.split("-")[0], {Direction.ACTIVATION})


@pytest.mark.parametrize("name", ["", "none", "gradient-", "both-gradient-scale", "SCALE", "scale ", "sign_flip"])
def test_an_unknown_name_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(SettingsError, match="random-sign"):
        parse_drill(name, 0)


@pytest.mark.parametrize("name", NAMES)
def test_an_attack_changes_only_its_directions_and_only_from_its_step_on(name: str) -> None:
    plan = parse_drill(name, 3)
    drill = Drill(plan, seed=SEED)
    for step in range(6):
        for direction in Direction:
            for tensor in tensors(2):
                kept = tensor.clone()
                sent = drill.apply(tensor, direction, step)
                assert torch.equal(tensor, kept)  # the honest tensor is still needed
                assert sent.shape == tensor.shape and sent.dtype is torch.float32
                changed = not torch.equal(sent, tensor)
                assert changed == (step >= 3 and direction in plan.directions)
        assert drill.first_attack_step == (3 if step >= 3 else None)


def test_the_attacks_do_what_they_say() -> None:
    (x,) = tensors(1)
    sent = {attack: attacked(attack)[0] for attack in Attack if attack is not Attack.DELAY}
    assert not sent[Attack.CONSTANT].any()
    assert torch.equal(sent[Attack.SCALE], SCALE_FACTOR * x)
    assert torch.equal(sent[Attack.SIGN_FLIP], -x)
    assert torch.allclose(sent[Attack.BIAS], x + x.std())
    assert torch.equal(sent[Attack.RANDOM_SIGN].abs(), x.abs())
    assert 0.3 < float((sent[Attack.RANDOM_SIGN] == x).float().mean()) < 0.7
    noise = sent[Attack.NOISE] - x
    assert float(noise.mean().abs()) < 0.3 * float(x.std())
    assert float(noise.std()) == pytest.approx(float(x.std()), rel=0.2)
    random = sent[Attack.RANDOM]
    assert float(random.mean()) == pytest.approx(float(x.mean()), rel=0.2)
    assert float(random.std()) == pytest.approx(float(x.std()), rel=0.2)
    assert abs(float(torch.corrcoef(torch.stack([random.flatten(), x.flatten()]))[0, 1])) < 0.3


def test_a_delay_sends_the_tensor_of_an_earlier_microbatch() -> None:
    honest = tensors(8)
    sent = attacked("delay", 8)
    lag = DELAY_MICROBATCHES - 1
    assert all(torch.equal(sent[index], honest[index - lag]) for index in range(lag, 8))


def test_the_directions_have_pasts_of_their_own() -> None:
    drill = Drill(parse_drill("both-delay", 0), seed=SEED)
    one, two, three, four = tensors(4)
    drill.apply(one, Direction.ACTIVATION, 0)
    drill.apply(two, Direction.GRADIENT, 0)
    assert torch.equal(drill.apply(three, Direction.ACTIVATION, 0), one)
    assert torch.equal(drill.apply(four, Direction.GRADIENT, 0), two)


@pytest.mark.parametrize("name", ["noise", "random", "random-sign"])
def test_the_same_seed_gives_the_same_attack(name: str) -> None:
    assert all(torch.equal(*pair) for pair in zip(attacked(name, 3), attacked(name, 3), strict=True))
    assert not torch.equal(attacked(name)[0], attacked(name, seed=b"other")[0])
