"""A stage at work: forward, backward, and the sum of its gradients over a step's microbatches.

Synchronous and single-threaded; only the compute thread calls it. All parameters are views of one flat float32
vector, and the gradient sum has the same layout. A microbatch's gradient enters the sum whole, at the end of
its backward, or not at all. Knows nothing of peers, steps or optimizers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import overload

import torch
from torch import Tensor, nn

from node.model import ParameterSlot, StageModule
from protocol.errors import LocalError

MAX_PENDING = 256
"""Forwards that may wait for their backward. The caller bounds memory by its own, lower limit; this one is
for a caller that forgets to discard."""


class StageError(LocalError):
    """A microbatch that this stage cannot compute; its gradient has not entered the sum."""


class PendingLimitError(StageError):
    """Too many forwards wait for their backward."""


class NonFiniteError(StageError):
    """The result of a microbatch is infinite or not a number."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pending:
    received: Tensor
    """Input of the forward; the leaf whose gradient goes upstream, except in the first stage."""
    output: Tensor
    version: int
    """Of the flat parameters, so that a backward through changed parameters is noticed."""


class StageRunner:
    """Runs one stage's module on one device."""

    def __init__(
        self,
        module: StageModule,
        device: torch.device,
        autocast: torch.dtype | None = None,
        *,
        max_pending: int = MAX_PENDING,
    ) -> None:
        """Takes the module over: its parameters become views of this runner's flat vector.

        Args:
            autocast: dtype of the matrix products, or None to compute in float32.
        """
        self.layout: tuple[ParameterSlot, ...] = module.layout()
        self._module = module
        self._device = device
        self._autocast = autocast
        self._max_pending = max_pending
        self._pending: dict[int, _Pending] = {}
        self._sum: Tensor | None = None
        self._count = 0
        self._flat = torch.empty(sum(slot.numel for slot in self.layout), device=device)
        self._parameters: list[nn.Parameter] = []
        for slot in self.layout:
            view = slot.view(self._flat)
            view.copy_(module.get_parameter(slot.name).detach())
            parameter = nn.Parameter(view)
            self._put(slot.name, parameter)
            self._parameters.append(parameter)
        module.to(device)  # the buffers; the parameters are there already

    # microbatches --------------------------------------------------------------------

    @overload
    def forward(self, key: int, received: Tensor) -> Tensor: ...
    @overload
    def forward(self, key: int, received: Tensor, targets: Tensor) -> float: ...
    def forward(self, key: int, received: Tensor, targets: Tensor | None = None) -> Tensor | float:
        """Run the stage on a microbatch and keep its graph under ``key``, until backward or discard.

        Args:
            received: tokens int64 [B, T] in the first stage, else the activation [B, T, d]. Not to be written
                into before the backward.
            targets: int64 [B, T]; given in the last stage and nowhere else.

        Returns:
            The activation, float32 [B, T, d], contiguous on the CPU, not to be written into; or the loss.

        Raises:
            PendingLimitError: too many microbatches wait for their backward.
            StageError: the key is in use, or a token is outside the vocabulary.
        """
        if key in self._pending:
            raise StageError(f"microbatch key {key} is in use; discard it first")
        if len(self._pending) >= self._max_pending:
            raise PendingLimitError(
                f"{len(self._pending)} microbatches wait for their gradient; discard those that failed"
            )
        pending = self._compute(received, targets)
        if targets is None:
            self._pending[key] = pending
            return _to_cpu(pending.output)
        loss = float(pending.output.detach())
        self._pending[key] = pending
        return loss

    def backward(self, key: int, grad_output: Tensor | None) -> Tensor | None:
        """Run the backward of a microbatch, add its gradient to the sum and forget its graph.

        Args:
            grad_output: gradient of the activation, [B, T, d]; None in the last stage, which has a loss.

        Returns:
            The gradient of the received activation, float32 [B, T, d], contiguous on the CPU; None in the
            first stage.

        Raises:
            NonFiniteError: the gradient is not finite, so it was dropped.
            StageError: there is no such graph, the parameters have changed since, or the shapes differ.
        """
        pending = self._pending.pop(key, None)
        if pending is None:
            raise StageError(f"nothing waits under microbatch key {key}; run its forward again")
        if pending.version != self._flat._version:
            raise StageError("the parameters have changed since this microbatch's forward; run it again")
        leaves: list[Tensor] = [*self._parameters]
        if not self._module.first:
            leaves.append(pending.received)
        gradients = self._differentiate(pending, grad_output, leaves)
        norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
        if not bool(torch.stack(norms).isfinite().all()):
            raise NonFiniteError("the gradient of a microbatch is not finite; it was dropped")
        upstream = None if self._module.first else _to_cpu(gradients[-1])
        if self._sum is None:
            self._sum = torch.zeros_like(self._flat)
        for slot, gradient in zip(self.layout, gradients, strict=False):  # the last may be upstream's
            slot.view(self._sum).add_(gradient)
        self._count += 1
        return upstream

    def forward_backward(self, key: int, received: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        """Both at once, in the last stage: the loss, and the gradient of the received activation, [B, T, d].

        Raises:
            NonFiniteError: the gradient is not finite, so it was dropped.
            StageError: as in forward; or the only stage of a model, which returns no gradient.
        """
        if self._module.first:
            raise StageError("the first stage has no gradient to return; use forward and backward")
        loss = self.forward(key, received, targets)
        gradient = self.backward(key, None)
        assert gradient is not None
        return loss, gradient

    def discard(self, key: int) -> None:
        """Forget a microbatch that has not had its backward; nothing happens if there is none."""
        self._pending.pop(key, None)

    @property
    def pending(self) -> int:
        """Microbatches that wait for their backward."""
        return len(self._pending)

    def replay(
        self,
        received: Tensor,
        grad_output: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        parameters: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute a microbatch again, both ways, without a trace in the gradient sum: for audits. Not of stage 0.

        Args:
            parameters: float32 [P], others than the present ones, in the order of the layout.

        Returns:
            The output (float32 [B, T, d], or the loss as a scalar) and the gradient of ``received``, on the CPU.
        """
        if self._module.first:
            raise StageError("the first stage has no gradient to return; replay its forward")
        pending = self._compute(received, targets, parameters)
        (gradient,) = self._differentiate(pending, grad_output, [pending.received])
        return _to_cpu(pending.output), _to_cpu(gradient)

    def replay_forward(self, received: Tensor, *, parameters: Tensor | None = None) -> Tensor:
        """The forward alone, of any stage but the last; float32 [B, T, d] on the CPU. As ``replay``."""
        return _to_cpu(self._compute(received, None, parameters, graph=False).output)

    # the whole stage -----------------------------------------------------------------

    def take_gradient(self) -> tuple[Tensor, int]:
        """The gradient sum, float32 [P] on the CPU, and how many microbatches it is of; then start anew.

        Microbatches that still wait for their backward are dropped, so that none enters the next sum.
        """
        taken, count = self._sum, self._count
        self._drop()
        return torch.zeros(self._flat.numel()) if taken is None else taken.cpu(), count

    def flat_parameters(self) -> Tensor:
        """All parameters, float32 [P] on this runner's device, in the order of the layout; not a copy."""
        return self._flat

    def load_flat(self, flat: Tensor) -> None:
        """Replace all parameters by a float32 [P]. Drops the gradient sum and what waits: both are of the old.

        Raises:
            StageError: another shape or dtype.
        """
        if flat.shape != self._flat.shape or flat.dtype != self._flat.dtype:
            raise StageError(
                f"parameters of this stage are float32 [{self._flat.numel()}], not {flat.dtype}"
                f" {list(flat.shape)}; check that they are of this stage"
            )
        self._flat.copy_(flat)
        self._drop()

    # ---------------------------------------------------------------------------------

    def _drop(self) -> None:
        self._pending.clear()
        self._sum, self._count = None, 0

    def _compute(
        self, received: Tensor, targets: Tensor | None, parameters: Tensor | None = None, *, graph: bool = True
    ) -> _Pending:
        if (targets is not None) != self._module.last:
            raise StageError("targets belong to the last stage, and to no other")
        if targets is not None:
            targets = self._tokens(targets)
        if self._module.first:
            leaf = self._tokens(received)
        else:
            leaf = received.detach().to(self._device, torch.float32).requires_grad_(True)
        exchanged = contextlib.nullcontext() if parameters is None else self._exchanged(parameters)
        with torch.set_grad_enabled(graph), self._precision(), exchanged:
            output: Tensor = self._module(leaf, targets)
        return _Pending(received=leaf, output=output, version=self._flat._version)

    @contextlib.contextmanager
    def _exchanged(self, parameters: Tensor) -> Iterator[None]:
        """Compute with others [P] for a while. Graphs that wait keep the tensors that they were made with.

        torch.func.functional_call would do it, and load all of torch's compiler for that.
        """
        try:
            for slot in self.layout:
                self._put(slot.name, nn.Parameter(slot.view(parameters), requires_grad=False))
            yield
        finally:
            for slot, own in zip(self.layout, self._parameters, strict=True):
                self._put(slot.name, own)

    def _put(self, name: str, parameter: nn.Parameter) -> None:
        owner, _, last = name.rpartition(".")
        setattr(self._module.get_submodule(owner), last, parameter)

    def _differentiate(self, pending: _Pending, grad_output: Tensor | None, leaves: list[Tensor]) -> tuple[Tensor, ...]:
        if (grad_output is None) != self._module.last:
            raise StageError("every stage but the last needs the gradient of its output")
        if grad_output is not None:
            if grad_output.shape != pending.output.shape:
                raise StageError(
                    f"a gradient has shape {list(grad_output.shape)}, its activation"
                    f" {list(pending.output.shape)}; they have to be equal"
                )
            grad_output = grad_output.to(self._device, pending.output.dtype)
        return torch.autograd.grad(pending.output, leaves, grad_output)

    def _tokens(self, tokens: Tensor) -> Tensor:
        """Check tokens on the CPU: an index out of range would leave a CUDA device unusable."""
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self._module.vocab_size:
            raise StageError(f"a token is outside the vocabulary of {self._module.vocab_size}")
        return tokens.to(self._device)

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self._autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, dtype=self._autocast)


def _to_cpu(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous()
