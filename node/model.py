"""The language model (Llama-style), built one stage at a time.

A stage holds only its own modules, under the names that Hugging Face's LlamaForCausalLM gives them in the
whole model: ``model.embed_tokens.weight`` (first stage), ``model.layers.{index over the whole model}. ...``,
``model.norm.weight`` and ``lm_head.weight`` (last stage). Initial values depend on the seed and the
parameter's name alone, so they are the same bits on every machine and however the model is cut.

The output head is a parameter of its own. It can be tied to the embedding only if the model is a single
stage, because stages share no parameters; a tied model has no ``lm_head.weight``.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

if TYPE_CHECKING:
    from protocol.manifest_sections import ModelSection

_INITIAL_STD = 0.02
_RESIDUAL_OUTPUTS = ("o_proj.weight", "down_proj.weight")
_DRAWS = 8
"""Uniform 16-bit integers that are added up for one initial value."""
_CHUNK = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSlot:
    """Where a parameter lies in its stage's flat vector. ``offset`` counts elements."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def view(self, flat: Tensor) -> Tensor:
        """This parameter's part of a flat vector [P], in its own shape; shares memory."""
        return flat[self.offset : self.offset + self.numel].view(self.shape)


class Linear(nn.Module):
    """A matrix without bias; [..., inputs] -> [..., outputs]. Starts uninitialised, unlike torch's own."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, value: Tensor) -> Tensor:
        return functional.linear(value, self.weight)


class RMSNorm(nn.Module):
    """Scales each vector to a root mean square of one, then by a learnt weight; [..., d] -> [..., d]."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self._eps = eps

    def forward(self, value: Tensor) -> Tensor:
        return functional.rms_norm(value, self.weight.shape, self.weight, self._eps)


class Attention(nn.Module):
    """Causal attention with rotary positions and grouped queries; [B, T, d] -> [B, T, d]."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self._head_size = model.width // model.heads
        self._group = model.heads // model.kv_heads
        self.q_proj = Linear(model.width, model.width)
        self.k_proj = Linear(model.width, model.kv_heads * self._head_size)
        self.v_proj = Linear(model.width, model.kv_heads * self._head_size)
        self.o_proj = Linear(model.width, model.width)

    def forward(self, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, width = value.shape
        heads = (batch, length, -1, self._head_size)
        query = _rotate(self.q_proj(value).view(heads).transpose(1, 2), cos, sin)
        key = _rotate(self.k_proj(value).view(heads).transpose(1, 2), cos, sin)
        content = self.v_proj(value).view(heads).transpose(1, 2)
        grouped = self._group > 1
        if grouped and value.is_cuda:
            # Not every CUDA kernel takes grouped heads; without copies torch may fall back to the slowest.
            key = key.repeat_interleave(self._group, dim=1)
            content = content.repeat_interleave(self._group, dim=1)
            grouped = False
        mixed = functional.scaled_dot_product_attention(query, key, content, is_causal=True, enable_gqa=grouped)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(batch, length, width))
        return output


class FeedForward(nn.Module):
    """SwiGLU; [..., d] -> [..., d]."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.gate_proj = Linear(model.width, model.ffn)
        self.up_proj = Linear(model.width, model.ffn)
        self.down_proj = Linear(model.ffn, model.width)

    def forward(self, value: Tensor) -> Tensor:
        output: Tensor = self.down_proj(functional.silu(self.gate_proj(value)) * self.up_proj(value))
        return output


class Layer(nn.Module):
    """One transformer layer; [B, T, d] -> [B, T, d]."""

    def __init__(self, model: ModelSection) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(model.width, model.norm_eps)
        self.self_attn = Attention(model)
        self.post_attention_layernorm = RMSNorm(model.width, model.norm_eps)
        self.mlp = FeedForward(model)

    def forward(self, value: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        value = value + self.self_attn(self.input_layernorm(value), cos, sin)
        output: Tensor = value + self.mlp(self.post_attention_layernorm(value))
        return output


class Body(nn.Module):
    """A stage's share of what Llama calls ``model``: embedding, some layers, final norm."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: ModelSection, layers: range, *, first: bool, last: bool) -> None:
        super().__init__()
        self.embed_tokens = nn.Module() if first else None
        if self.embed_tokens is not None:
            self.embed_tokens.weight = nn.Parameter(torch.empty(model.vocab_size, model.width))
        self.layers = nn.ModuleDict({str(index): Layer(model) for index in layers})
        self.norm = RMSNorm(model.width, model.norm_eps) if last else None
        cos, sin = _rotary_tables(model.context, model.width // model.heads, model.rope_base)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def embedding(self) -> Tensor:
        """The embedding matrix [vocabulary, d]; only in the first stage."""
        assert self.embed_tokens is not None
        weight = self.embed_tokens.weight
        assert isinstance(weight, Tensor)
        return weight

    def forward(self, value: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            value = functional.embedding(value, self.embedding())
        cos, sin = self.cos[: value.shape[1]], self.sin[: value.shape[1]]
        for layer in self.layers.values():
            value = layer(value, cos, sin)
        return value if self.norm is None else self.norm(value)


class StageModule(nn.Module):
    """The modules of one stage, with their initial values."""

    def __init__(self, model: ModelSection, layers_per_stage: Sequence[int], stage: int) -> None:
        """``stage`` counts from 0. Raises ValueError for a tied output head in more than one stage."""
        super().__init__()
        last_stage = len(layers_per_stage) - 1
        if not 0 <= stage <= last_stage:
            raise ValueError(f"there is no stage {stage}; stages are 0 to {last_stage}")
        if model.tie_embeddings and last_stage > 0:
            raise ValueError("the output head can be tied to the embedding in a single stage only")
        self.stage = stage
        self.first = stage == 0
        self.last = stage == last_stage
        self.vocab_size = model.vocab_size
        start = sum(layers_per_stage[:stage])
        layers = range(start, start + layers_per_stage[stage])
        self.model = Body(model, layers, first=self.first, last=self.last)
        own_head = self.last and not model.tie_embeddings
        self.lm_head = Linear(model.width, model.vocab_size) if own_head else None
        self._initialise(model)

    def forward(self, received: Tensor, targets: Tensor | None = None) -> Tensor:
        """Run the stage.

        Args:
            received: tokens int64 [B, T] in the first stage, else the activation [B, T, d].
            targets: int64 [B, T], the token after each; in the last stage only.

        Returns:
            The activation [B, T, d]; in the last stage the mean cross entropy, a float32 scalar, or without
            targets the logits, float32 [B, T, vocabulary].
        """
        value: Tensor = self.model(received)
        if not self.last:
            return value
        head = self.model.embedding() if self.lm_head is None else self.lm_head.weight
        logits = functional.linear(value, head).float()
        if targets is None:
            return logits
        return functional.cross_entropy(logits.view(-1, self.vocab_size), targets.reshape(-1))

    def layout(self) -> tuple[ParameterSlot, ...]:
        """The parameters in the order of their names, and their places in the stage's flat vector."""
        slots, offset = [], 0
        for name, parameter in sorted(self.named_parameters()):
            slots.append(ParameterSlot(name=name, shape=tuple(parameter.shape), offset=offset))
            offset += parameter.numel()
        return tuple(slots)

    @torch.no_grad()
    def _initialise(self, model: ModelSection) -> None:
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue  # built for its layout only
            if parameter.ndim == 1:
                parameter.fill_(1.0)
                continue
            std = _INITIAL_STD
            if name.endswith(_RESIDUAL_OUTPUTS):
                std /= math.sqrt(2 * model.layers)
            _draw(parameter, model.seed, name, std)


def stage_layout(model: ModelSection, layers_per_stage: Sequence[int], stage: int) -> tuple[ParameterSlot, ...]:
    """The layout of a stage, without allocating its parameters."""
    with torch.device("meta"):
        return StageModule(model, layers_per_stage, stage).layout()


def _draw(parameter: Tensor, seed: int, name: str, std: float) -> None:
    """Fill a float32 CPU tensor with nearly normal values (a sum of eight uniform ones, at most 4.9 std).

    Replicas have to start from the same bits. torch's own normal values come from vectorised logarithms and
    cosines that differ between processors; here all is integers up to one final product, and numpy guarantees
    the integers of its bit generators.
    """
    digest = hashlib.sha256(f"sentinel:parameter:{seed}:{name}".encode()).digest()
    source = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
    mean = _DRAWS * 0xFFFF // 2
    scale = np.float32(std / math.sqrt(_DRAWS * (0x10000**2 - 1) / 12))
    low_lanes, low_lane = np.uint64(0x0000FFFF_0000FFFF), np.uint64(0xFFFFFFFF)
    flat = parameter.detach().view(-1).numpy()
    for start in range(0, len(flat), _CHUNK):
        part = flat[start : start + _CHUNK]
        # A value takes two 64-bit words, that is eight 16-bit integers, added up in two lanes at a time.
        words = source.random_raw(2 * len(part))
        lanes = (words & low_lanes) + ((words >> np.uint64(16)) & low_lanes)
        lanes = lanes[0::2] + lanes[1::2]
        total = (lanes & low_lane) + (lanes >> np.uint64(32))
        np.multiply((total.astype(np.int64) - mean).astype(np.float32), scale, out=part)


def _rotary_tables(context: int, head_size: int, base: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [context, head_size]; both halves of a head turn by the same angles."""
    # On the CPU also where only a layout is wanted: computing on the meta device loads all of torch's compiler.
    frequencies = 1.0 / base ** (torch.arange(0, head_size, 2, dtype=torch.float32, device="cpu") / head_size)
    angles = torch.outer(torch.arange(context, dtype=torch.float32, device="cpu"), frequencies)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn [B, heads, T, head_size] by its positions; element i pairs with i + head_size / 2."""
    first, second = heads.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return heads * cos.to(heads.dtype) + turned * sin.to(heads.dtype)
