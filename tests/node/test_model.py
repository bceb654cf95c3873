"""The model is Llama: same names, same numbers, however it is cut."""

from __future__ import annotations

import hashlib
import math
import subprocess
import sys

import pytest
import torch
import transformers
from torch import Tensor

from node.model import ParameterSlot, StageModule, stage_layout
from protocol.manifest_sections import ModelSection

torch.set_num_threads(1)

SMALL = ModelSection(vocab_size=96, width=32, layers=6, heads=4, kv_heads=2, ffn=48, context=24, seed=7)
CUTS = [(6,), (3, 3), (1, 4, 1)]


def build(model: ModelSection, cut: tuple[int, ...]) -> list[StageModule]:
    return [StageModule(model, cut, stage) for stage in range(len(cut))]


def whole_state(stages: list[StageModule]) -> dict[str, Tensor]:
    return {name: tensor for stage in stages for name, tensor in stage.state_dict().items()}


def run(stages: list[StageModule], tokens: Tensor, targets: Tensor | None = None) -> Tensor:
    value = tokens
    for stage in stages[:-1]:
        value = stage(value)
    result: Tensor = stages[-1](value, targets)
    return result


def hugging_face(model: ModelSection, state: dict[str, Tensor]) -> transformers.LlamaForCausalLM:
    """transformers' model with these parameters."""
    config = transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.width,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        max_position_embeddings=model.context,
        rms_norm_eps=model.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": model.rope_base},
        tie_word_embeddings=model.tie_embeddings,
        attention_bias=False,
    )
    llama = transformers.LlamaForCausalLM(config)
    if model.tie_embeddings:
        state = {**state, "lm_head.weight": state["model.embed_tokens.weight"]}
    llama.load_state_dict(state, strict=True)
    llama.train(False)
    return llama


def random_tokens(model: ModelSection, *, batch: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(model.vocab_size, (batch, model.context + 1), generator=generator)


def scaled_up(stages: list[StageModule]) -> list[StageModule]:
    """Larger parameters than the initial ones, so that attention and gates are far from linear."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for stage in stages:
            for parameter in stage.parameters():
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return stages


class TestEqualsLlama:
    @pytest.mark.parametrize("cut", CUTS)
    @pytest.mark.parametrize("kv_heads", [1, 2, 4])
    def test_logits_and_loss_are_those_of_transformers(self, cut: tuple[int, ...], kv_heads: int) -> None:
        model = SMALL.model_copy(update={"kv_heads": kv_heads})
        stages = scaled_up(build(model, cut))
        llama = hugging_face(model, whole_state(stages))
        tokens = random_tokens(model)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        with torch.no_grad():
            logits = run(stages, inputs)
            torch.testing.assert_close(logits, llama(inputs).logits, atol=1e-5, rtol=1e-5)
            loss = run(stages, inputs, targets)
            torch.testing.assert_close(loss, llama(tokens, labels=tokens).loss, atol=1e-5, rtol=1e-5)
        assert logits.std() > 0.1, "the comparison would hold for a model that does nothing"

    @pytest.mark.parametrize("rope_base", [500.0, 500_000.0])
    def test_rotary_base_is_llamas(self, rope_base: float) -> None:
        model = SMALL.model_copy(update={"rope_base": rope_base})
        stages = scaled_up(build(model, (6,)))
        tokens = random_tokens(model)[:, :-1]
        with torch.no_grad():
            expected = hugging_face(model, whole_state(stages))(tokens).logits
            torch.testing.assert_close(run(stages, tokens), expected, atol=1e-5, rtol=1e-5)

    def test_a_tied_head_is_the_embedding(self) -> None:
        model = SMALL.model_copy(update={"tie_embeddings": True})
        stages = scaled_up(build(model, (6,)))
        assert "lm_head.weight" not in whole_state(stages)
        tokens = random_tokens(model)[:, :-1]
        with torch.no_grad():
            expected = hugging_face(model, whole_state(stages))(tokens).logits
            torch.testing.assert_close(run(stages, tokens), expected, atol=1e-5, rtol=1e-5)

    def test_a_tied_head_needs_a_single_stage(self) -> None:
        with pytest.raises(ValueError, match="single stage"):
            StageModule(SMALL.model_copy(update={"tie_embeddings": True}), (3, 3), 0)

    def test_a_shorter_sequence_is_a_prefix(self) -> None:
        stages = scaled_up(build(SMALL, (3, 3)))
        tokens = random_tokens(SMALL)[:, :-1]
        with torch.no_grad():
            torch.testing.assert_close(run(stages, tokens[:, :5]), run(stages, tokens)[:, :5], atol=1e-5, rtol=1e-5)


class TestStages:
    @pytest.mark.parametrize("cut", CUTS[1:])
    def test_a_stage_holds_its_own_modules_only(self, cut: tuple[int, ...]) -> None:
        names = [set(stage.state_dict()) for stage in build(SMALL, cut)]
        whole = set(build(SMALL, (6,))[0].state_dict())
        assert set().union(*names) == whole
        assert sum(map(len, names)) == len(whole)
        assert "model.embed_tokens.weight" in names[0]
        assert {"model.norm.weight", "lm_head.weight"} <= names[-1]
        assert f"model.layers.{cut[0]}.self_attn.q_proj.weight" in names[1]

    def test_there_is_no_stage_beyond_the_last(self) -> None:
        with pytest.raises(ValueError, match="0 to 1"):
            StageModule(SMALL, (3, 3), 2)

    def test_the_layout_is_the_parameters_in_the_order_of_their_names_without_gaps(self) -> None:
        for stage in build(SMALL.model_copy(update={"layers": 12}), (12,)):
            layout = stage.layout()
            assert [slot.name for slot in layout] == sorted(name for name, _ in stage.named_parameters())
            end = 0
            for slot in layout:
                assert slot.offset == end
                assert slot.shape == tuple(stage.get_parameter(slot.name).shape)
                end += slot.numel

    def test_the_layout_needs_no_parameters(self) -> None:
        huge = ModelSection(vocab_size=200_000, width=8192, layers=4, heads=64, kv_heads=8, ffn=28672)
        assert sum(slot.numel for slot in stage_layout(huge, (2, 2), 0)) > 3_000_000_000
        assert stage_layout(SMALL, (3, 3), 1) == StageModule(SMALL, (3, 3), 1).layout()

    def test_a_slot_views_its_part_of_the_flat_vector(self) -> None:
        flat = torch.arange(10.0)
        view = ParameterSlot(name="a", shape=(2, 3), offset=2).view(flat)
        view[1, 2] = -1.0
        assert view[0].tolist() == [2.0, 3.0, 4.0]
        assert flat[7] == -1.0


class TestInitialValues:
    @pytest.mark.parametrize("cut", CUTS[1:])
    def test_they_do_not_depend_on_the_cut(self, cut: tuple[int, ...]) -> None:
        whole = whole_state(build(SMALL, (6,)))
        state = whole_state(build(SMALL, cut))
        assert state.keys() == whole.keys()
        assert all(torch.equal(tensor, whole[name]) for name, tensor in state.items())

    def test_they_leave_the_global_generator_alone(self) -> None:
        before = torch.get_rng_state()
        StageModule(SMALL, (6,), 0)
        assert torch.equal(torch.get_rng_state(), before)

    def test_another_seed_gives_other_values(self) -> None:
        first = whole_state(build(SMALL, (6,)))
        second = whole_state(build(SMALL.model_copy(update={"seed": 8}), (6,)))
        assert all(torch.equal(first[name], second[name]) == (first[name].ndim == 1) for name in first)

    def test_parameters_of_equal_shape_differ(self) -> None:
        state = whole_state(build(SMALL, (6,)))
        assert not torch.equal(state["model.layers.0.mlp.up_proj.weight"], state["model.layers.1.mlp.up_proj.weight"])
        assert not torch.equal(state["model.layers.0.mlp.up_proj.weight"], state["model.layers.0.mlp.gate_proj.weight"])

    def test_they_look_normal_with_the_wanted_deviation(self) -> None:
        model = ModelSection(vocab_size=2048, width=256, layers=2, heads=4, kv_heads=4, ffn=704)
        state = whole_state(build(model, (2,)))
        embedding = state["model.embed_tokens.weight"].double() / 0.02
        assert abs(embedding.mean()) < 0.005
        assert abs(embedding.std() - 1.0) < 0.005
        for bound, share in ((1.0, 0.6827), (2.0, 0.9545), (3.0, 0.9973)):
            assert abs((embedding.abs() < bound).double().mean() - share) < 0.01
        # Neighbours are independent, also across the chunks in which they are drawn.
        flat = embedding.view(-1)
        for lag in (1, 2, 256, 1 << 16):
            assert abs((flat[lag:] * flat[:-lag]).mean()) < 0.01
        scaled = state["model.layers.1.mlp.down_proj.weight"]
        assert abs(scaled.std().item() / (0.02 / math.sqrt(4)) - 1.0) < 0.02
        assert torch.equal(state["model.layers.0.input_layernorm.weight"], torch.ones(256))

    def test_they_are_the_same_bits_in_every_release(self) -> None:
        """Nodes of different releases start one swarm, so these values may never change."""
        digest = hashlib.sha256()
        for name, tensor in sorted(whole_state(build(SMALL, (6,))).items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        assert digest.hexdigest() == "6a762e240bab906b4f13f06ceded3a52190418b09cbf7b1f16dc62cc33911182"


def test_a_layout_does_not_load_the_compiler_of_torch() -> None:
    # It would take tens of MiB, and leave a folder among the temporary files.
    code = (
        "import sys; from node.model import stage_layout; from protocol.manifest import Manifest;"
        "m = Manifest.from_mapping({'name': 'test'}); stage_layout(m.model, m.stages.layers_per_stage, 1);"
        "sys.exit('torch._inductor' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
