"""The training that a swarm has to reproduce, in one process: no network, no wire format, no retries.

Written with plain autograd on the stages' modules one after another, apart from the code that the nodes run
(StageRunner), so that the two check each other. Only the optimizer and the data are shared.
"""

from __future__ import annotations

import torch
from torch import Tensor

from node.data import TokenStream, open_source
from node.model import StageModule
from node.optimizer import StepOptimizer
from node.tokenizer import load_tokenizer
from protocol.manifest import Manifest


class ReferenceTrainer:
    """The whole model of a manifest, trained step by step."""

    def __init__(self, manifest: Manifest, data: TokenStream | None = None) -> None:
        self.manifest = manifest
        cut = manifest.stages.layers_per_stage
        self.stages = [StageModule(manifest.model, cut, stage) for stage in range(manifest.num_stages)]
        self.optimizers = [StepOptimizer(stage.layout(), manifest.training) for stage in self.stages]
        self.data = data if data is not None else open_manifest_source(manifest)
        self.step = 0

    def loss(self, microbatch: int) -> Tensor:
        """Mean cross entropy of a microbatch of the present step, with its graph."""
        tokens = self.data.sequences(
            self.step,
            microbatch,
            per_microbatch=self.manifest.training.sequences_per_microbatch,
            context=self.manifest.model.context,
        )
        value = tokens[:, :-1]
        for stage in self.stages[:-1]:
            value = stage(value)
        loss: Tensor = self.stages[-1](value, tokens[:, 1:])
        return loss

    def gradients(self) -> tuple[float, list[Tensor]]:
        """Mean loss and, for each stage, the flat mean gradient [P] over all microbatches of the present step."""
        count = self.manifest.microbatches_per_step
        losses = []
        for stage in self.stages:
            stage.zero_grad()
        for microbatch in range(count):
            loss = self.loss(microbatch)
            torch.autograd.backward(loss)
            losses.append(loss.item())
        means = [flatten(stage, gradients=True) / count for stage in self.stages]
        return sum(losses) / count, means

    def train_step(self) -> float:
        """Train one step; returns its mean loss, before the update."""
        loss, means = self.gradients()
        for stage, optimizer, mean in zip(self.stages, self.optimizers, means, strict=True):
            flat = flatten(stage)
            optimizer.apply(flat, mean, self.step)
            for slot in stage.layout():
                stage.get_parameter(slot.name).data.copy_(slot.view(flat))
        self.step += 1
        return loss


def train_reference(manifest: Manifest, steps: int, data: TokenStream | None = None) -> list[float]:
    """The mean loss of each of the first steps."""
    trainer = ReferenceTrainer(manifest, data)
    return [trainer.train_step() for _ in range(steps)]


def flatten(stage: StageModule, *, gradients: bool = False) -> Tensor:
    """A stage's parameters, or their gradients, as a new flat vector [P] in the order of its layout."""
    parts = []
    for slot in stage.layout():
        tensor: Tensor | None = stage.get_parameter(slot.name)
        if gradients and tensor is not None:
            tensor = tensor.grad
        assert tensor is not None
        parts.append(tensor.detach().reshape(-1))
    return torch.cat(parts)


def open_manifest_source(manifest: Manifest) -> TokenStream:
    """The token stream that the manifest names."""
    return open_source(
        manifest.data,
        load_tokenizer(manifest.data.tokenizer, manifest.data.tokenizer_sha256),
        vocab_size=manifest.model.vocab_size,
        sequences_per_step=manifest.training.sequences_per_step,
    )
