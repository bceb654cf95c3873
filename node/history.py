"""The parameters of this step and of the one before, for audits of work that has just been done.

An audit that waits for idle time may begin when its step is over and the parameters have changed, so one older
copy is kept. Only the compute thread uses this.
"""

from __future__ import annotations

import torch
from torch import Tensor

from node.stage import StageRunner


class ParameterHistory:
    """Two versions of a stage's parameters, by step and digest."""

    def __init__(self, runner: StageRunner, *, digest: bytes, keep: bool) -> None:
        """``digest`` is that of the present parameters, before step 0. ``keep``: whether to keep the older one."""
        self._runner = runner
        self._keep = keep
        self._present = (0, digest)
        self._before: tuple[int, bytes, Tensor] | None = None
        self._copy: Tensor | None = None

    def about_to_change(self) -> None:
        """Call before an update: what is present becomes the version before."""
        if not self._keep:
            return
        flat = self._runner.flat_parameters().detach()
        if self._copy is None:
            self._copy = torch.empty_like(flat)
        self._copy.copy_(flat)  # into memory that is there already: several times quicker than a clone
        self._before = (*self._present, self._copy)

    def changed(self, step: int, digest: bytes) -> None:
        """Call after an update: these are the parameters of ``step``."""
        self._present = (step, digest)

    def replaced(self, step: int, digest: bytes) -> None:
        """Call after the state was replaced by another node's: what was before it is no history of it."""
        self._present, self._before = (step, digest), None

    @property
    def step(self) -> int:
        """The step that the present parameters are for."""
        return self._present[0]

    def digest_at(self, step: int) -> bytes | None:
        """The digest of a step's parameters; None if they are not kept."""
        if step == self._present[0]:
            return self._present[1]
        if self._before is not None and step == self._before[0]:
            return self._before[1]
        return None

    def parameters_of(self, digest: bytes) -> Tensor | None:
        """Parameters float32 [P] with this digest; not a copy. None if they are not kept."""
        if digest == self._present[1]:
            return self._runner.flat_parameters()
        if self._before is not None and digest == self._before[1]:
            return self._before[2]
        return None
