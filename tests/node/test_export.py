"""What comes out of a swarm is a Llama: transformers, and a Llama written anew here, compute the same logits."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors
import torch
from torch import Tensor
from torch.nn import functional

from node import cli
from node.checkpoints import CheckpointStore
from node.export import ExportError, export_model
from node.model import StageModule
from node.snapshot import StageState
from node.tokenizer import ByteTokenizer
from protocol.errors import DataSourceError, UsageError
from protocol.manifest import Manifest

CONTEXT = 24


def manifest_of(cut: tuple[int, ...] = (1, 2, 1), **model: object) -> Manifest:
    """Grouped queries, an odd rope base and a large epsilon, so that none of them can be forgotten."""
    values = {
        "vocab_size": 260,
        "width": 48,
        "layers": sum(cut),
        "heads": 6,
        "kv_heads": 2,
        "ffn": 80,
        "context": CONTEXT,
        "rope_base": 700.0,
        "norm_eps": 3e-3,
    }
    return Manifest.from_mapping(
        {
            "name": "exported",
            "model": values | model,
            "stages": {"layers_per_stage": list(cut)},
            "training": {"checkpoint_steps": 10},
        }
    )


MANIFEST = manifest_of()


def parameters_of(manifest: Manifest, stage: int, step: int) -> Tensor:
    """As large as those of a trained model, so that every part of it matters; norms differ from 1, too."""
    generator = torch.Generator().manual_seed(100 * stage + step)
    layout = StageModule(manifest.model, manifest.stages.layers_per_stage, stage).layout()
    parts = []
    for slot in layout:
        values = torch.randn(slot.numel, generator=generator)
        parts.append(1.0 + 0.3 * values if len(slot.shape) == 1 else values / math.sqrt(slot.shape[-1]))
    return torch.cat(parts)


def save(folder: Path, manifest: Manifest, stage: int, step: int, *, shift: float = 0.0) -> Path:
    flat = parameters_of(manifest, stage, step) + shift
    state = StageState(
        step=step,
        parameters=flat,
        optimizer={"exp_avg": flat, "exp_avg_sq": flat.abs(), "step": torch.tensor([step])},
    )
    return CheckpointStore(folder / "checkpoints", manifest, keep=9).save(stage, state, now=0.0).path


@pytest.fixture
def nodes(tmp_path: Path) -> list[Path]:
    """The state folders of three nodes, one for each stage."""
    folders = [tmp_path / f"node{stage}" for stage in range(3)]
    for stage, folder in enumerate(folders):
        for step in (10, 20):
            save(folder, MANIFEST, stage, step)
    return folders


def swarm_logits(manifest: Manifest, step: int, tokens: Tensor) -> Tensor:
    """What the stages of the swarm compute, one after another."""
    value = tokens
    for stage in range(manifest.num_stages):
        module = StageModule(manifest.model, manifest.stages.layers_per_stage, stage)
        flat = parameters_of(manifest, stage, step)
        for slot in module.layout():
            module.get_parameter(slot.name).data.copy_(slot.view(flat))
        with torch.no_grad():
            value = module(value)
    return value


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 260, (2, CONTEXT), generator=torch.Generator().manual_seed(5))


# a Llama written from the conventions of transformers, without any of this project's code ------


class PlainLlama:
    """Reads a folder's config.json and model.safetensors."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights: dict[str, Tensor] = {}
        with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - not a dict
                self.weights[name] = file.get_tensor(name)
        self.used: set[str] = set()

    def weight(self, name: str) -> Tensor:
        self.used.add(name)
        return self.weights[name]

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return self.weight(name) * (x * scale)

    def project(self, x: Tensor, name: str) -> Tensor:
        return x @ self.weight(f"{name}.weight").T

    def rotate(self, x: Tensor) -> Tensor:
        """x: [batch, heads, time, size]; the halves of a head are the two coordinates that turn together."""
        size = x.shape[-1]
        time = torch.arange(x.shape[-2], dtype=torch.float64)
        speed = self.config["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
        angle = torch.outer(time, speed).float()
        one, two = x[..., : size // 2], x[..., size // 2 :]
        return torch.cat((one * angle.cos() - two * angle.sin(), two * angle.cos() + one * angle.sin()), dim=-1)

    def attend(self, x: Tensor, place: str) -> Tensor:
        batch, time, _ = x.shape
        heads, groups, size = (self.config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        q = self.rotate(self.project(x, f"{place}.q_proj").view(batch, time, heads, size).transpose(1, 2))
        k = self.rotate(self.project(x, f"{place}.k_proj").view(batch, time, groups, size).transpose(1, 2))
        v = self.project(x, f"{place}.v_proj").view(batch, time, groups, size).transpose(1, 2)
        outputs = []
        for head in range(heads):
            group = head // (heads // groups)
            scores = q[:, head] @ k[:, group].transpose(-1, -2) / math.sqrt(size)
            hidden = torch.triu(torch.ones(time, time, dtype=torch.bool), diagonal=1)
            outputs.append(scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, group])
        return self.project(torch.cat(outputs, dim=-1), f"{place}.o_proj")

    def feed_forward(self, x: Tensor, place: str) -> Tensor:
        gate = functional.silu(self.project(x, f"{place}.gate_proj"))
        return self.project(gate * self.project(x, f"{place}.up_proj"), f"{place}.down_proj")

    def logits(self, tokens: Tensor) -> Tensor:
        x = self.weight("model.embed_tokens.weight")[tokens]
        for index in range(self.config["num_hidden_layers"]):
            place = f"model.layers.{index}"
            x = x + self.attend(self.norm(x, f"{place}.input_layernorm.weight"), f"{place}.self_attn")
            x = x + self.feed_forward(self.norm(x, f"{place}.post_attention_layernorm.weight"), f"{place}.mlp")
        tied = self.config["tie_word_embeddings"]
        head = self.weight("model.embed_tokens.weight" if tied else "lm_head.weight")
        return self.norm(x, "model.norm.weight") @ head.T


# the model -----------------------------------------------------------------------------------


def test_the_logits_are_those_of_the_swarm(nodes: list[Path], tmp_path: Path, tokens: Tensor) -> None:
    done = export_model(nodes, tmp_path / "model")
    llama = PlainLlama(tmp_path / "model")
    logits = llama.logits(tokens)
    torch.testing.assert_close(logits, swarm_logits(MANIFEST, 20, tokens), rtol=1e-4, atol=1e-4)
    assert logits.std() > 0.5, "a model whose logits hardly differ proves nothing"
    assert llama.used == set(llama.weights), "every weight belongs to a Llama"
    assert sum(weight.numel() for weight in llama.weights.values()) == done.parameters
    assert {weight.dtype for weight in llama.weights.values()} == {torch.float32}
    assert done.step == 20 and done.swarm == MANIFEST.swarm_id


def test_a_tied_model_has_no_head_of_its_own(tmp_path: Path, tokens: Tensor) -> None:
    manifest = manifest_of((2,), tie_embeddings=True)
    save(tmp_path / "node", manifest, 0, 10)
    export_model([tmp_path / "node"], tmp_path / "model")
    llama = PlainLlama(tmp_path / "model")
    torch.testing.assert_close(llama.logits(tokens), swarm_logits(manifest, 10, tokens), rtol=1e-4, atol=1e-4)
    assert llama.config["tie_word_embeddings"] is True and "lm_head.weight" not in llama.weights


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_loads_it_and_computes_the_same(tmp_path: Path, tokens: Tensor, tied: bool) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    manifest = manifest_of((3,), tie_embeddings=True) if tied else MANIFEST
    for stage in range(manifest.num_stages):
        save(tmp_path / "node", manifest, stage, 10)
    export_model([tmp_path / "node"], tmp_path / "model")
    llama, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert type(llama).__name__ == "LlamaForCausalLM"
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = llama(tokens).logits
    torch.testing.assert_close(logits, swarm_logits(manifest, 10, tokens), rtol=1e-4, atol=1e-4)

    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "naïve café — 日本語"
    assert tokenizer(text)["input_ids"] == ByteTokenizer().encode(text)
    assert (llama.config.bos_token_id, llama.config.eos_token_id) == (tokenizer.bos_token_id, tokenizer.eos_token_id)
    start = tokenizer("def ", return_tensors="pt")
    written = llama.generate(**start, do_sample=False)
    assert start["input_ids"].shape[1] < written.shape[1] <= CONTEXT


def test_the_folder_holds_what_is_expected_of_it(nodes: list[Path], tmp_path: Path) -> None:
    export_model(nodes, tmp_path / "model")
    assert {path.name for path in (tmp_path / "model").iterdir()} == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"),
    }
    with safetensors.safe_open(tmp_path / "model" / "model.safetensors", framework="pt") as file:
        assert file.metadata() == {
            "format": "pt",
            "sentinel_swarm": MANIFEST.swarm_id,
            "sentinel_step": "20",
        }


# which checkpoints ----------------------------------------------------------------------------


def first_weight(folder: Path) -> Tensor:
    with safetensors.safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.get_tensor("model.embed_tokens.weight")


def test_the_newest_step_that_every_stage_has_is_taken(nodes: list[Path], tmp_path: Path) -> None:
    save(nodes[0], MANIFEST, 0, 30)
    assert export_model(nodes, tmp_path / "newest").step == 20
    assert export_model(nodes, tmp_path / "older", step=10).step == 10
    with pytest.raises(ExportError, match=r"of step 30 \(steps of stage 0: 10, 20, 30; stage 1: 10, 20; stage 2"):
        export_model(nodes, tmp_path / "none", step=30)


def test_a_damaged_checkpoint_is_passed_over(nodes: list[Path], tmp_path: Path) -> None:
    newest = next((nodes[1] / "checkpoints").glob("*/stage-1-step-20.safetensors"))
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    told: list[str] = []
    assert export_model(nodes, tmp_path / "model", tell=told.append).step == 10
    assert any("passed over" in text and "is damaged" in text for text in told)
    assert newest.exists(), "looking at a folder changes nothing in it"


def test_a_damaged_replica_is_replaced_by_a_sound_one(nodes: list[Path], tmp_path: Path) -> None:
    next((nodes[1] / "checkpoints").glob("*/stage-1-step-20.safetensors")).write_bytes(b"")
    nodes.append(tmp_path / "sibling")
    save(nodes[-1], MANIFEST, 1, 20)
    assert export_model(nodes, tmp_path / "model").step == 20


def test_of_replicas_that_differ_the_majority_counts(nodes: list[Path], tmp_path: Path) -> None:
    sound = first_weight(export_model(nodes, tmp_path / "sound").folder)
    odd, even = tmp_path / "odd", tmp_path / "even"
    save(odd, MANIFEST, 0, 20, shift=1.0)
    with pytest.raises(ExportError, match=r"different parameters at step 20: .* leave out the --state-dir"):
        export_model([odd, *nodes], tmp_path / "model")
    save(even, MANIFEST, 0, 20)
    assert torch.equal(first_weight(export_model([odd, *nodes, even], tmp_path / "model").folder), sound)


def test_what_is_missing_is_named(nodes: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="no sound checkpoint of stage 0 and 2 of 3 is here; add the --state-dir"):
        export_model(nodes[1:2], tmp_path / "model")
    with pytest.raises(ExportError, match="no checkpoint is in"):
        export_model([tmp_path], tmp_path / "model")
    save(tmp_path / "late", MANIFEST, 2, 40)
    with pytest.raises(
        ExportError, match=r"no step in common \(steps of stage 0: 10, 20; stage 1: 10, 20; stage 2: 40"
    ):
        export_model([*nodes[:2], tmp_path / "late"], tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_one_of_several_swarms_has_to_be_chosen(nodes: list[Path], tmp_path: Path) -> None:
    other = manifest_of((2,))
    save(nodes[0], other, 0, 10)
    with pytest.raises(ExportError, match="checkpoints of 2 swarms; choose one: --swarm"):
        export_model(nodes, tmp_path / "model")
    assert export_model(nodes, tmp_path / "model", swarm=other.swarm_id).swarm == other.swarm_id
    assert export_model(nodes, tmp_path / "model2", swarm=MANIFEST.swarm_id[:6].upper()).swarm == MANIFEST.swarm_id
    with pytest.raises(ExportError, match="no checkpoint of swarm"):
        export_model(nodes, tmp_path / "model3", swarm="zzzz")


# the folder ------------------------------------------------------------------------------------


def test_nothing_is_overwritten(nodes: list[Path], tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("precious")
    (tmp_path / "file").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("full", "file", "link"):
        with pytest.raises(UsageError, match="exists already; name a folder that does not"):
            export_model(nodes, tmp_path / name)
    with pytest.raises(UsageError, match="does not exist; make it first"):
        export_model(nodes, tmp_path / "no" / "folder")
    (tmp_path / "empty").mkdir()
    export_model(nodes, tmp_path / "empty")
    assert (tmp_path / "empty" / "config.json").exists()


def test_an_export_that_fails_leaves_nothing_behind(
    nodes: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr("node.export.os.fsync", full)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(OSError, match="No space left"):
        export_model(nodes, tmp_path / "model")
    assert sorted(tmp_path.iterdir()) == before


def test_a_tokenizer_that_is_not_here_is_asked_for(tmp_path: Path) -> None:
    manifest = Manifest.from_mapping(
        MANIFEST.model_dump() | {"data": {"tokenizer": str(tmp_path / "tokenizer.json"), "source": "stdlib"}}
    )
    for stage in range(3):
        save(tmp_path / "node", manifest, stage, 10)
    with pytest.raises(DataSourceError, match=r"put the swarm's tokenizer\.json there"):
        export_model([tmp_path / "node"], tmp_path / "model")


# the command -----------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("SENTINEL_STATE_DIR", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    yield


def test_the_command_says_what_it_wrote(nodes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    places = [word for node in nodes for word in ("--state-dir", str(node))]
    assert cli.main(["export", *places, "--out", str(tmp_path / "model")]) == 0
    said = capsys.readouterr()
    assert said.out.startswith(f"wrote {tmp_path / 'model'}: exported after 20 steps, ")
    assert f"from_pretrained('{tmp_path / 'model'}')" in said.out
    assert [line.partition(":")[0] for line in said.err.splitlines()] == ["stage 0", "stage 1", "stage 2"]
    assert cli.main(["export", *places, "--out", str(tmp_path / "again"), "--step", "10", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["step"] == 10 and facts["swarm"] == MANIFEST.swarm_id and len(facts["checkpoints"]) == 3


def test_mistakes_get_one_line(nodes: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = ["--state-dir", str(nodes[0])]
    for arguments, code, says in (
        ([*one, "--out", str(nodes[0])], 2, "exists already"),
        ([*one, "--out", str(tmp_path / "model")], 1, "no sound checkpoint of stage 1 and 2 of 3 is here"),
        ([*one, "--out", str(tmp_path / "no" / "model")], 2, "make it first"),
    ):
        assert cli.main(["export", *arguments]) == code
        said = capsys.readouterr()
        assert said.out == "" and says in said.err and said.err.count("\n") == 1


def test_the_default_is_the_folder_that_nodes_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for stage in range(3):
        save(tmp_path / "data" / "sentinel-swarm", MANIFEST, stage, 10)
        save(tmp_path / "here", MANIFEST, stage, 20)
    assert cli.main(["export", "--out", str(tmp_path / "model")]) == 0
    assert "after 10 steps" in capsys.readouterr().out
    monkeypatch.setenv("SENTINEL_STATE_DIR", str(tmp_path / "here"))
    assert cli.main(["export", "--out", str(tmp_path / "model2")]) == 0
    assert "after 20 steps" in capsys.readouterr().out
