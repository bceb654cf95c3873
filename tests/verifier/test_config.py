"""Settings are checked where they enter, and the light modules stay light."""

import subprocess
import sys
from typing import Any

import pytest

from verifier.config import CheckerConfig


def test_the_defaults_are_valid() -> None:
    assert CheckerConfig().mode == "enforce"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mode", "strict"),
        ("reduction", "batch"),
        ("votes", 0),
        ("votes", 5),
        ("ema_activation", 1.0),
        ("ema_gradient", -0.1),
        ("target_false_positive_rate", 0.0),
        ("target_false_positive_rate", 0.5),
        ("minimum_history", 0),
        ("fence_multiplier", float("nan")),
        ("strike_limit", 0.0),
        ("strike_decay", float("inf")),
        ("warmup_steps", -1),
        ("window", 8),
        ("release_after_steps", 0),
        ("max_peers", 0),
    ],
)
def test_a_wrong_setting_is_named(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=field):
        CheckerConfig(**{field: value})


def test_quarantine_may_end_after_some_steps() -> None:
    assert CheckerConfig(release_after_steps=5).release_after_steps == 5


def test_the_modules_without_tensors_do_not_import_torch() -> None:
    code = (
        "import sys, verifier.config, verifier.ledger, verifier.quorum, verifier.verdicts\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
