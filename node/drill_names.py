"""The names of the drill's attacks, without torch."""

from __future__ import annotations

from enum import StrEnum

from protocol.errors import SettingsError


class Attack(StrEnum):
    """What a drill falsifies. x is the honest tensor, s its standard deviation."""

    # Tensors: what is sent instead of x.
    CONSTANT = "constant"  # zeros
    RANDOM = "random"  # normal, with the mean and deviation of x
    SCALE = "scale"  # 10 x
    SIGN_FLIP = "sign-flip"  # -x
    RANDOM_SIGN = "random-sign"  # x with random signs
    DELAY = "delay"  # the tensor of an earlier microbatch
    BIAS = "bias"  # x + s
    NOISE = "noise"  # x + normal noise of deviation s
    MIMIC = "mimic"  # x with 0.3 of its norm in noise that keeps each feature's mean and deviation
    IDENTITY = "identity"  # the tensor that this node received: no work at all
    STALE = "stale"  # for ever the first tensor of the attack
    DRIFT = "drift"  # x + r s v with a fixed direction v; r grows by 0.01 a step, to 1
    INTERMITTENT = "intermittent"  # -x for one microbatch in four, x for the others

    # Conduct: the tensors stay honest.
    INJECT = "inject"  # adds a fixed vector to its own parameters every third step
    FRAME = "frame"  # accuses an honest neighbour, another one in every step
    FALSE_RECEIPT = "false-receipt"  # signs receipts over another digest than that of what it returned
    LYING_AUDITOR = "lying-auditor"  # says, as an auditor, the contrary of what it found
    FALSE_REDUCTION = "false-reduction"  # answers -x for the slice of the gradients that it reduces for all


CONDUCT_ATTACKS = (
    Attack.INJECT,
    Attack.FRAME,
    Attack.FALSE_RECEIPT,
    Attack.LYING_AUDITOR,
    Attack.FALSE_REDUCTION,
)
"""Those without a direction: no prefix goes before them."""

TENSOR_ATTACKS = tuple(attack for attack in Attack if attack not in CONDUCT_ATTACKS)
"""Those on activations, on gradients, or on both."""

PREFIXES = ("gradient-", "both-")


def check_drill_name(text: str) -> tuple[str, Attack]:
    """Split a name into its prefix ("" for activations, and for attacks without a direction) and its attack.

    Raises:
        SettingsError: unknown, with the attacks that there are; or a prefix before one that has no direction.
    """
    prefix = next((prefix for prefix in PREFIXES if text.startswith(prefix)), "")
    try:
        attack = Attack(text.removeprefix(prefix))
    except ValueError:
        raise SettingsError(
            f"unknown drill {text!r}; choose one of {', '.join(TENSOR_ATTACKS)}, alone or after gradient- or both-, "
            f"or one of {', '.join(CONDUCT_ATTACKS)}"
        ) from None
    if prefix and attack in CONDUCT_ATTACKS:
        raise SettingsError(f"the drill {attack} changes no tensor, so it takes no {prefix} before it; write {attack}")
    return prefix, attack
