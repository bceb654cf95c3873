"""The names of the drill's attacks, without torch."""

from __future__ import annotations

from enum import StrEnum

from protocol.errors import SettingsError


class Attack(StrEnum):
    """What happens to a tensor before it is sent. x is the honest tensor, s its standard deviation."""

    CONSTANT = "constant"  # zeros
    RANDOM = "random"  # normal, with the mean and deviation of x
    SCALE = "scale"  # 10 x
    SIGN_FLIP = "sign-flip"  # -x
    RANDOM_SIGN = "random-sign"  # x with random signs
    DELAY = "delay"  # the tensor of an earlier microbatch
    BIAS = "bias"  # x + s
    NOISE = "noise"  # x + normal noise of deviation s


PREFIXES = ("gradient-", "both-")


def check_drill_name(text: str) -> tuple[str, Attack]:
    """Split a name into its prefix ("" for activations) and its attack.

    Raises:
        SettingsError: names the attacks that there are.
    """
    prefix = next((prefix for prefix in PREFIXES if text.startswith(prefix)), "")
    try:
        return prefix, Attack(text.removeprefix(prefix))
    except ValueError:
        known = ", ".join(Attack)
        raise SettingsError(
            f"unknown drill {text!r}; choose one of {known}, alone or after gradient- or both-"
        ) from None
