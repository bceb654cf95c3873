"""``sentinel export``: the checkpoints of all stages put together as a folder that transformers loads as a Llama.

The folder appears whole or not at all. Parameters stay in fp32, to the bit; only one stage at a time is in memory.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from node import tensor_file
from node.checkpoints import (
    Checkpoint,
    CheckpointError,
    check_checkpoint,
    find_checkpoints,
    read_parameters,
    stage_and_step,
)
from node.model import stage_layout
from node.state_folder import StateFolder
from node.tensor_file import chunks
from node.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from protocol.errors import LocalError, UsageError
from protocol.manifest import Manifest

WEIGHTS_NAME = "model.safetensors"


class ExportError(LocalError):
    """The checkpoints that are here do not make a model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """What was written."""

    folder: Path
    name: str
    swarm: str
    step: int
    parameters: int
    sources: tuple[Path, ...]
    """The checkpoint of each stage."""


def export_model(
    state_dirs: Sequence[Path],
    out: Path,
    *,
    swarm: str = "",
    step: int | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> Exported:
    """Write the newest model that the checkpoints of some state folders make.

    Args:
        out: a folder that does not exist, or is empty.
        swarm: how the id of the swarm begins; needed where the folders hold checkpoints of several.
        step: another step than the newest one that every stage has.
        tell: hears what is worth a line.

    Raises:
        UsageError: ``out`` is not free.
        ExportError: no swarm, or no step, of which every stage is here; says what is missing.
        SentinelError: the tokenizer is not here.
        OSError: the folder cannot be written.
    """
    check_free(out)
    manifest, sources = choose(_of_one_swarm(state_dirs, swarm), step=step, tell=tell)
    tokenizer = load_tokenizer(manifest.data.tokenizer, manifest.data.tokenizer_sha256)
    with _appearing(out) as folder:
        tokenizer.save(folder)
        _write_json(folder / "config.json", model_config(manifest, tokenizer))
        _write_json(folder / "generation_config.json", generation_config(manifest, tokenizer))
        _write_weights(folder / WEIGHTS_NAME, manifest, sources, tell)
    return Exported(
        folder=out,
        name=manifest.name,
        swarm=manifest.swarm_id,
        step=sources[0].step,
        parameters=sum(map(manifest.stage_parameters, range(manifest.num_stages))),
        sources=tuple(source.path for source in sources),
    )


def check_free(out: Path) -> None:
    """Raise UsageError if there is something at ``out`` already, or nothing above it."""
    if out.is_symlink() or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise UsageError(f"--out: {out} exists already; name a folder that does not")
    if not out.absolute().parent.is_dir():
        raise UsageError(f"--out: the folder {out.absolute().parent} does not exist; make it first")


# which checkpoints -------------------------------------------------------------------------


def choose(
    paths: Collection[Path], *, step: int | None, tell: Callable[[str], None]
) -> tuple[Manifest, list[Checkpoint]]:
    """One sound checkpoint of each stage, all of one step: the newest possible one, or the one that is asked for.

    Files that turn out damaged, or have been replaced meanwhile, are passed over. Raises ExportError.
    """
    manifest = next((checkpoint.manifest for checkpoint in _sound(sorted(paths), tell)), None)
    if manifest is None:
        raise ExportError("none of the checkpoints is sound; add the --state-dir of other nodes")
    stages = range(manifest.num_stages)
    left: dict[int, dict[int, list[Path]]] = defaultdict(lambda: {stage: [] for stage in stages})
    for path in sorted(paths):
        stage, number = stage_and_step(path)
        if stage in stages:
            left[number][stage].append(path)
    while True:
        chosen = _complete_step(left, step)
        sound = {stage: list(_sound(left[chosen][stage], tell)) for stage in stages}
        if all(sound.values()):
            return manifest, [_of_most(sound[stage], tell) for stage in stages]
        left[chosen] = {stage: [checkpoint.path for checkpoint in found] for stage, found in sound.items()}


def _complete_step(left: Mapping[int, Mapping[int, Sequence[Path]]], wanted: int | None) -> int:
    """The newest step of which every stage is here, or the one that is wanted. Raises ExportError, and says what is."""
    complete = [number for number, stages in left.items() if all(stages.values())]
    if wanted in complete:
        return wanted
    if complete and wanted is None:
        return max(complete)
    stages = next(iter(left.values())).keys()
    held = {stage: sorted(number for number, found in left.items() if found[stage]) for stage in stages}
    if missing := [str(stage) for stage, numbers in held.items() if not numbers]:
        raise ExportError(
            f"no sound checkpoint of stage {' and '.join(missing)} of {len(held)} is here; add the --state-dir of a"
            " node that has held it"
        )
    listed = "; ".join(f"stage {stage}: {', '.join(map(str, numbers))}" for stage, numbers in held.items())
    if wanted is not None:
        raise ExportError(
            f"not every stage has a checkpoint of step {wanted} (steps of {listed}); choose another --step"
        )
    raise ExportError(f"the stages have no step in common (steps of {listed}); add the --state-dir of more nodes")


def _of_one_swarm(state_dirs: Sequence[Path], swarm: str) -> list[Path]:
    """The files in these folders that are of one swarm."""
    found: dict[str, list[Path]] = defaultdict(list)
    for state_dir in dict.fromkeys(path.absolute() for path in state_dirs):
        state = StateFolder(state_dir)
        for folder in sorted([*state.checkpoints_path.glob("*"), *state.copies_path.glob("*")]):
            found[folder.name].extend(find_checkpoints(folder))
    swarms = [name for name, paths in found.items() if paths and name.startswith(swarm[:16].lower())]
    if len(swarms) == 1:
        return found[swarms[0]]
    if swarms:
        raise ExportError(
            f"these folders hold checkpoints of {len(swarms)} swarms; choose one: --swarm {' or --swarm '.join(swarms)}"
        )
    where = ", ".join(map(str, state_dirs))
    raise ExportError(
        f"no checkpoint{f' of swarm {swarm}' if swarm else ''} is in {where}; name the --state-dir of nodes that train"
    )


def _sound(replicas: Sequence[Path], tell: Callable[[str], None]) -> Iterator[Checkpoint]:
    for path in replicas:
        try:
            yield check_checkpoint(path)
        except CheckpointError as error:
            tell(f"passed over: {error}")


def _of_most(replicas: Sequence[Checkpoint], tell: Callable[[str], None]) -> Checkpoint:
    """The checkpoint with the parameters that most of a stage's replicas have."""
    digests = Counter(replica.parameters for replica in replicas)
    (digest, most), *others = digests.most_common()
    if others and others[0][1] == most:
        rivals = " and ".join(
            str(next(each.path for each in replicas if each.parameters == parameters))
            for parameters, count in digests.items()
            if count == most
        )
        raise ExportError(
            f"the replicas of stage {replicas[0].stage} have different parameters at step {replicas[0].step}: {rivals};"
            " leave out the --state-dir of one, or choose another --step"
        )
    if others:
        tell(f"passed over: {len(replicas) - most} replica(s) of stage {replicas[0].stage} with other parameters")
    return next(replica for replica in replicas if replica.parameters == digest)


# what is written ---------------------------------------------------------------------------


def model_config(manifest: Manifest, tokenizer: Tokenizer) -> dict[str, Any]:
    """The config.json of transformers' LlamaForCausalLM."""
    model = manifest.model
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.width,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.width // model.heads,
        "hidden_act": "silu",
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.norm_eps,
        # transformers 4 reads the first two of these, transformers 5 the third.
        "rope_theta": model.rope_base,
        "rope_scaling": None,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_base},
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": model.tie_embeddings,
        "torch_dtype": "float32",
        "dtype": "float32",
        "use_cache": True,
        **_marks(tokenizer),
    }


def generation_config(manifest: Manifest, tokenizer: Tokenizer) -> dict[str, Any]:
    """The generation_config.json: text ends at the end mark, or where the model has seen no positions."""
    return {"max_length": manifest.model.context, **_marks(tokenizer)}


def _marks(tokenizer: Tokenizer) -> dict[str, int | None]:
    pad = tokenizer.pad_id if isinstance(tokenizer, ByteTokenizer) else None
    return {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id, "pad_token_id": pad}


def _write_weights(path: Path, manifest: Manifest, sources: Sequence[Checkpoint], tell: Callable[[str], None]) -> None:
    layouts = [
        stage_layout(manifest.model, manifest.stages.layers_per_stage, stage) for stage in range(manifest.num_stages)
    ]
    metadata = {"format": "pt", "sentinel_swarm": manifest.swarm_id, "sentinel_step": str(sources[0].step)}
    with path.open("wb") as file:
        slots = [slot for layout in layouts for slot in layout]
        file.write(tensor_file.header([(slot.name, torch.float32, slot.shape) for slot in slots], metadata))
        for source, layout in zip(sources, layouts, strict=True):
            tell(f"stage {source.stage}: step {source.step}, {source.path}")
            checkpoint, parameters = read_parameters(source.path)
            if checkpoint != source:
                raise ExportError(f"{source.path} has changed meanwhile; run the command again")
            for slot in layout:
                for chunk in chunks(slot.view(parameters)):
                    file.write(chunk)
        file.flush()
        os.fsync(file.fileno())


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _appearing(out: Path) -> Iterator[Path]:
    """A new folder beside ``out`` that becomes it when the block ends well, and disappears otherwise."""
    folder = Path(tempfile.mkdtemp(dir=out.absolute().parent, prefix=f".{out.name}."))
    try:
        yield folder
        folder.chmod(0o755)
        folder.rename(out)  # takes the place of an empty one
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
