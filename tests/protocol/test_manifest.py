"""The manifest: what it accepts, how each mistake is told, its one spelling, and its commented text."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tomllib
from itertools import pairwise
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from protocol import framing, manifest_checks
from protocol.errors import ManifestError
from protocol.identity import Identity
from protocol.manifest import MAX_MANIFEST_BYTES, Manifest
from protocol.manifest_sections import ModelSection, Section
from protocol.manifest_template import render, render_values
from protocol.packing import pack

PEER = Identity(bytes(range(32))).peer_id
DEFAULT = Manifest(name="attic")
GOLDEN_SWARM_ID = "1934a9031a9ae413b31b99bd65682514c95f58a7de9f8df269978340fde59fa6"

names = st.text(min_size=1, max_size=64).filter(lambda name: name.isprintable() and name == name.strip())


def floats(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(low, high)


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    heads = draw(st.sampled_from([1, 2, 3, 8]))
    layers = draw(st.lists(st.integers(1, 4), min_size=1, max_size=6))
    per_microbatch = draw(st.integers(1, 8))
    lease = draw(floats(1.0, 120.0))
    return Manifest.from_mapping(
        {
            "name": draw(names),
            "model": {
                "heads": heads,
                "kv_heads": draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0])),
                "width": heads * draw(st.sampled_from([8, 16, 64])),
                "vocab_size": draw(st.integers(259, 1_048_576)),
                "layers": sum(layers),
                "norm_eps": draw(floats(1e-12, 1e-2)),
                "tie_embeddings": len(layers) == 1 and draw(st.booleans()),
                "seed": draw(st.integers(0, 2**32 - 1)),
            },
            "stages": {"layers_per_stage": layers},
            "training": {
                "learning_rate": draw(floats(1e-300, 10.0)),
                "sequences_per_microbatch": per_microbatch,
                "sequences_per_step": per_microbatch * draw(st.integers(1, 100)),
            },
            "data": {"source": "file:" + draw(names), "text_field": draw(names)},
            "wire": {"gradient_dtype": draw(st.sampled_from(["bf16", "fp32", "int8"]))},
            "verifier": {
                "norm_bound": draw(floats(1e-300, 1e30)),
                "audit_rate": draw(floats(0.0, 1.0)),
                "audit_suspicion": draw(floats(1.0, 1e3)),
                "allow_drills": draw(st.booleans()),
            },
            "network": {"lease_seconds": lease, "renew_seconds": max(0.1, lease / 3)},
            "admission": {"mode": "invited", "coordinator": PEER} if draw(st.booleans()) else {},
        }
    )


def refused(text: str) -> str:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_toml(text)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 300
    return message


def changed(section: str, **values: Any) -> dict[str, Any]:
    return {"name": "attic", section: values}


@given(manifests())
def test_bytes_read_back_equal_and_canonical(manifest: Manifest) -> None:
    data = manifest.to_bytes()
    again = Manifest.from_bytes(data, manifest.swarm_id)
    assert again == manifest
    assert hash(again) == hash(manifest)
    assert again.to_bytes() == data
    assert manifest.swarm_id == hashlib.sha256(data).hexdigest()


@given(manifests())
def test_the_commented_text_reads_back_equal(manifest: Manifest) -> None:
    assert Manifest.from_toml(render(manifest)) == manifest


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_crash(data: bytes) -> None:
    with pytest.raises(ManifestError):
        Manifest.from_bytes(data)


@given(st.data())
def test_changed_bytes_are_refused_or_are_another_swarm(data: st.DataObject) -> None:
    original = DEFAULT.to_bytes()
    position = data.draw(st.integers(0, len(original) - 1))
    changed_bytes = bytearray(original)
    changed_bytes[position] ^= data.draw(st.integers(1, 255))
    with pytest.raises(ManifestError, match="not of"):
        Manifest.from_bytes(bytes(changed_bytes), DEFAULT.swarm_id)
    try:
        other = Manifest.from_bytes(bytes(changed_bytes))
    except ManifestError as error:
        assert "\n" not in str(error)
    else:
        assert other.swarm_id != DEFAULT.swarm_id


junk = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**64 - 1), st.floats(), st.text(max_size=9)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=9), inner, max_size=3)),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from([*Manifest.model_fields, "other"]), junk, max_size=4))
def test_any_map_is_read_or_refused_in_one_line(values: dict[str, Any]) -> None:
    try:
        Manifest.from_bytes(pack(values))
    except ManifestError as error:
        assert "\n" not in str(error)


@given(st.sampled_from([*ModelSection.model_fields, "other"]), junk)
def test_any_value_of_a_field_is_read_or_refused_in_one_line(field: str, value: object) -> None:
    try:
        Manifest.from_mapping(changed("model", **{field: value}))
    except ManifestError as error:
        assert "\n" not in str(error)


def test_the_swarm_id_of_a_manifest_never_changes() -> None:
    assert DEFAULT.swarm_id == GOLDEN_SWARM_ID


def test_bytes_are_nested_maps_with_every_field_in_order() -> None:
    values = msgpack.unpackb(DEFAULT.to_bytes())
    assert list(values) == sorted(Manifest.model_fields)
    for name, info in Manifest.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            assert list(values[name]) == sorted(info.annotation.model_fields)


def test_a_second_spelling_of_the_same_manifest_is_refused() -> None:
    values = msgpack.unpackb(DEFAULT.to_bytes())
    reordered = msgpack.packb(dict(reversed(values.items())))
    values["training"]["learning_rate"] = 1
    whole = pack(values)
    del values["training"]
    for data in (reordered, whole, pack(values)):
        with pytest.raises(ManifestError, match="canonical"):
            Manifest.from_bytes(data)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (bytes(MAX_MANIFEST_BYTES + 1), "65537 bytes; 65536 are allowed"),
        (DEFAULT.to_bytes() + b"\0", "not one msgpack value"),
        (b"\x91" * 5000, "not one msgpack value"),
        (b"\xdf\xff\xff\xff\xff", "not one msgpack value"),
        (pack([1]), "not a map"),
        (pack({}), "name: is missing"),
        (pack({"name": b"attic"}), "has to be text"),
    ],
)
def test_bytes_that_are_no_manifest_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_bytes(data)
    assert words in str(caught.value)


def test_a_whole_number_serves_where_a_number_is_asked_for() -> None:
    manifest = Manifest.from_toml('name = "attic"\n[training]\nlearning_rate = 1')
    assert manifest.training.learning_rate == 1.0
    assert Manifest.from_bytes(manifest.to_bytes(), manifest.swarm_id) == manifest


def test_a_manifest_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        DEFAULT.name = "cellar"  # type: ignore[misc]
    with pytest.raises(ValidationError):
        DEFAULT.model.width = 64  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "name: is missing; add it"),
        ("name = ", "not valid TOML"),
        ('name = "a"\nname = "b"', "not valid TOML"),
        ("seed = " + "9" * 5000, "not valid TOML"),
        ("#" * (MAX_MANIFEST_BYTES + 1), "65536 are allowed"),
        ("name = 3", "name: 3 has to be text"),
        ('name = ""', "name: '' has to be at least 1 long"),
        (f'name = "{"a" * 65}"', "has to be at most 64 long"),
        ('name = "a\\nb"', "control characters"),
        ('name = " a"', "spaces at an end"),
        ('name = "a\\u202Eb"', "control characters"),
        ('name = "a"\nmodle = 1', "modle: there is no such field; did you mean model?"),
        ('name = "a"\nzzz = 1', "zzz: there is no such field; remove it"),
        ('name = "a"\n"z\\n\\u001B" = 1', "z??: there is no such field; remove it"),
        (f'name = "a"\n{"z" * 999} = 1', "zzz...: there is no such field; remove it"),
        ('name = "a"\nmodel = 3', "model: 3 has to be a table"),
        (
            'name = "a"\nprotocol_version = 2',
            "protocol_version: 2 is not spoken here; this build speaks version 1",
        ),
        ('name = "a"\nprotocol_version = 2\n[modelx]', "this build speaks version 1"),
        ('name = "a"\n[model]\nhaeds = 4', "model.haeds: there is no such field; did you mean heads?"),
        ('name = "a"\n[model]\nheads = "4"', "model.heads: '4' has to be a whole number"),
        ('name = "a"\n[model]\nheads = 4.0', "model.heads: 4.0 has to be a whole number"),
        ('name = "a"\n[model]\nheads = true', "model.heads: True has to be a whole number"),
        ('name = "a"\n[model]\nrope_base = "1e4"', "model.rope_base: '1e4' has to be a number"),
        ('name = "a"\n[model]\nrope_base = nan', "model.rope_base: nan has to be a finite number"),
        ('name = "a"\n[model]\nrope_base = inf', "model.rope_base: inf has to be a finite number"),
        ('name = "a"\n[model]\ntie_embeddings = 1', "has to be true or false"),
        ('name = "a"\n[model]\nlayers = 513', "model.layers: 513 has to be at most 512"),
        ('name = "a"\n[training]\nbeta1 = 1.0', "training.beta1: 1.0 has to be below 1"),
        ('name = "a"\n[training]\nlearning_rate = 0', "training.learning_rate: 0 has to be above 0"),
        ('name = "a"\n[training]\nsteps = -1', "training.steps: -1 has to be at least 0"),
        ('name = "a"\n[stages]\nlayers_per_stage = 3', "layers_per_stage: 3 has to be a list"),
        ('name = "a"\n[stages]\nlayers_per_stage = []', "layers_per_stage: [] has to be at least 1 long"),
        (
            'name = "a"\n[stages]\nlayers_per_stage = [3, 0, 3]',
            "stages.layers_per_stage.1: 0 has to be at least 1",
        ),
        (
            'name = "a"\n[stages]\nlayers_per_stage = ["6"]',
            "layers_per_stage.0: '6' has to be a whole number",
        ),
        ('name = "a"\n[wire]\nactivation_dtype = "fp8"', "has to be 'bf16', 'fp32' or 'int8'"),
        ('name = "a"\n[data]\nsource_sha256 = "abc"', "empty or 64 hex digits"),
        ('name = "a"\n[model]\nheads = "4"\nlayers = 0\n[wire]\nx = 1', "(and 2 more problems)"),
        ('name = "a"\n[model]\nheads = "4"\nlayers = 0', "(and 1 more problem)"),
    ],
)
def test_a_wrong_text_is_told_what_is_wrong(text: str, words: str) -> None:
    assert words in refused(text)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (changed("model", heads=3), "model.heads: 3 does not divide model.width 128; choose one of 1, 2, 4"),
        (changed("model", heads=3, width=129), "model.heads: 3 gives heads of odd size 43"),
        (changed("model", heads=128), "heads of odd size 1"),
        (changed("model", heads=4, width=129), "none, until model.width is even"),
        (
            changed("model", kv_heads=3),
            "model.kv_heads: 3 does not divide model.heads 4; choose one of 1, 2, 4",
        ),
        (changed("model", tie_embeddings=True), "model.tie_embeddings: true needs a single stage, not 3"),
        (changed("model", layers=7), "[2, 2, 2] adds up to 6, but model.layers is 7"),
        (changed("stages", layers_per_stage=[2, 2]), "adds up to 4, but model.layers is 6"),
        (changed("training", sequences_per_step=30), "30 is not a multiple of"),
        (
            changed("training", sequences_per_step=5000, sequences_per_microbatch=1),
            "gives 5000 microbatches a step, and 4096 are allowed",
        ),
        (changed("model", width=65_536, context=131_072), "more than a tensor may have"),
        (changed("model", vocab_size=258), "model.vocab_size: 258 is too few for the bytes tokenizer"),
        (changed("data", source="https://example.org"), "data.source: 'https://example.org' is unknown"),
        (changed("data", source="file:"), 'write "stdlib" or "file:PATH"'),
        (changed("data", tokenizer_sha256="0" * 64), "belongs to no file"),
        (changed("verifier", window=16), "verifier.minimum_history: 24 is more than verifier.window 16"),
        (changed("network", renew_seconds=30.0), "network.renew_seconds: 30 is not less than"),
        (changed("network", heartbeat_seconds=4.0), "network.dead_after_seconds: 8 is not more than twice"),
        (changed("admission", mode="invited"), 'admission.coordinator: "" is no peer id'),
        (changed("admission", coordinator="12D3KooW"), "admission.coordinator: '12D3KooW' is no peer id"),
    ],
)
def test_a_contradiction_is_told_with_its_fix(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError) as caught:
        Manifest.from_mapping(values)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_contradiction_is_counted() -> None:
    values = changed("network", renew_seconds=30.0, heartbeat_seconds=4.0) | {"model": {"layers": 7}}
    with pytest.raises(ManifestError, match=r"^stages.layers_per_stage: .* \(and 2 more problems\)$"):
        Manifest.from_mapping(values)


def test_a_tokenizer_file_may_have_few_tokens_and_a_hash() -> None:
    data = {"tokenizer": "tokenizer.json", "tokenizer_sha256": "0" * 64}
    assert Manifest.from_mapping(changed("data", **data) | {"model": {"vocab_size": 2}}).data.tokenizer_sha256


def test_layers_and_parameters_of_the_stages() -> None:
    assert [DEFAULT.stage_layers(stage) for stage in range(DEFAULT.num_stages)] == [
        range(0, 2),
        range(2, 4),
        range(4, 6),
    ]
    layer = 2 * 128 * 128 + 2 * 128 * 64 + 3 * 128 * 352 + 2 * 128
    assert DEFAULT.stage_parameters(0) == 2 * layer + 260 * 128
    assert DEFAULT.stage_parameters(1) == 2 * layer
    assert DEFAULT.stage_parameters(2) == 2 * layer + 260 * 128 + 128
    for stage in (-1, 3):
        with pytest.raises(IndexError, match=f"no stage {stage}"):
            DEFAULT.stage_layers(stage)


def test_a_tied_head_is_counted_once() -> None:
    values = {"name": "attic", "stages": {"layers_per_stage": [6]}}
    tied = Manifest.from_mapping(values | {"model": {"tie_embeddings": True}})
    assert Manifest.from_mapping(values).stage_parameters(0) - tied.stage_parameters(0) == 260 * 128


def test_sizes_of_a_step_and_of_a_tensor() -> None:
    assert DEFAULT.microbatches_per_step == 8
    assert DEFAULT.activation_shape == (4, 128, 128)


def test_sizes_agree_with_what_is_sent() -> None:
    tensors = pytest.importorskip("protocol.tensors")
    odd = Manifest.from_mapping({"name": "attic", "model": {"width": 10, "heads": 5, "kv_heads": 1, "context": 3}})
    for manifest in (DEFAULT, odd):
        for name in ("fp32", "bf16", "int8"):
            expected = tensors.encoded_bytes(manifest.activation_shape, tensors.WireDtype(name))
            assert manifest.activation_bytes(name) == expected  # type: ignore[arg-type]
    assert manifest_checks.MAX_ACTIVATION_BYTES == framing.MAX_BODY_BYTES


def test_every_field_says_what_it_is_for() -> None:
    sections = [info.annotation for info in Manifest.model_fields.values()]
    models = [Manifest, *(kind for kind in sections if isinstance(kind, type) and issubclass(kind, Section))]
    assert len(models) == 9
    for model in models:
        for name, info in model.model_fields.items():
            described = isinstance(info.annotation, type) and issubclass(info.annotation, Section)
            assert described or (info.description or "").endswith("."), f"{model.__name__}.{name}"


def test_the_commented_text_has_a_comment_above_every_line() -> None:
    lines = render(DEFAULT).splitlines()
    for above, line in pairwise(lines):
        if line and not line.startswith("#"):
            assert above.startswith("# "), line
        assert len(line) <= 100
    values = tomllib.loads("\n".join(lines))
    assert list(values) == list(Manifest.model_fields)


def test_the_commented_text_takes_the_values_given() -> None:
    text = render_values({"name": 'an "attic"', "training": {"steps": 7}})
    assert 'name = "an \\"attic\\""' in text
    assert Manifest.from_toml(text).training.steps == 7
    with pytest.raises(ManifestError, match="did you mean name"):
        render_values({"nmae": "attic"})


def test_reading_a_manifest_or_a_record_loads_no_heavy_library() -> None:
    program = (
        "import sys, protocol.manifest_template, protocol.records, protocol.invite;"
        "print([name for name in ('torch', 'hivemind', 'libp2p', 'asyncio') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "[]"
