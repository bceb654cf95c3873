"""The manifest: everything that the nodes of a swarm have to agree on, and its one spelling in bytes.

The coordinator writes it as swarm.toml; nodes pass it on as canonical msgpack, whose SHA-256 is the swarm id,
so that it can be fetched from anyone. Reading refuses with one line: the field, its value and the fix.
"""

from __future__ import annotations

import hashlib
import math
import tomllib
from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from protocol.errors import ManifestError
from protocol.manifest_checks import contradictions, describe, describe_value
from protocol.manifest_sections import (
    AdmissionSection,
    DataSection,
    ModelSection,
    NetworkSection,
    Section,
    StagesSection,
    Text,
    TrainingSection,
    VerifierSection,
    WireDtypeName,
    WireSection,
)
from protocol.messages import PROTOCOL_VERSION
from protocol.packing import pack, unpack

MAX_MANIFEST_BYTES = 64 * 1024
"""A manifest takes about 2 KiB."""

_WIRE_BYTES = {"fp32": 4, "bf16": 2, "int8": 1}
_INT8_BLOCK = 64
"""Values that share an fp32 scale; as in protocol.tensors, which needs torch and so is not imported here."""


class Manifest(Section):
    """A swarm's description; immutable, hashable, and valid by construction."""

    name: Annotated[Text, Field(min_length=1, max_length=64)] = Field(
        description="Name of the swarm, shown to volunteers; 1 to 64 characters."
    )
    protocol_version: int = Field(
        default=PROTOCOL_VERSION,
        ge=1,
        description="Version of the protocol that the nodes speak; leave as it is.",
    )
    model: ModelSection = ModelSection()
    stages: StagesSection = StagesSection()
    training: TrainingSection = TrainingSection()
    data: DataSection = DataSection()
    wire: WireSection = WireSection()
    verifier: VerifierSection = VerifierSection()
    network: NetworkSection = NetworkSection()
    admission: AdmissionSection = AdmissionSection()

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        problems = contradictions(self)
        if problems:
            raise ValueError("\n".join(problems))
        return self

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build a manifest from nested maps, as TOML or msgpack give them. Raises ManifestError."""
        version = values.get("protocol_version", PROTOCOL_VERSION)
        if type(version) is int and version != PROTOCOL_VERSION:
            # First, since another version may well have other fields.
            raise ManifestError(
                f"protocol_version: {describe_value(version)} is not spoken here; this build speaks version"
                f" {PROTOCOL_VERSION}, so install the release that the coordinator uses"
            )
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            raise ManifestError(describe(error, cls)) from None

    @classmethod
    def from_toml(cls, text: str) -> Self:
        """Read swarm.toml. Raises ManifestError: the first problem, and how many more there are."""
        if len(text) > MAX_MANIFEST_BYTES:
            raise ManifestError(_too_long(len(text), "characters"))
        try:
            values = tomllib.loads(text)
        except (ValueError, RecursionError) as error:  # ValueError also for numbers of thousands of digits
            raise ManifestError(f"not valid TOML: {error}; correct that line") from None
        return cls.from_mapping(values)

    @classmethod
    def from_bytes(cls, data: bytes, expected_swarm_id: str | None = None) -> Self:
        """Read canonical bytes from a peer.

        Raises ManifestError if they are too long, not the ones that ``expected_swarm_id`` (hex) names,
        invalid, or not canonical.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise ManifestError(_too_long(len(data), "bytes"))
        digest = hashlib.sha256(data).hexdigest()
        if expected_swarm_id is not None and digest != expected_swarm_id:
            raise ManifestError(
                f"this manifest is that of swarm {digest[:16]}..., not of {expected_swarm_id[:16]}...;"
                " ask another peer, or check the invite"
            )
        try:
            values = unpack(data)
        except ValueError:
            raise ManifestError("the manifest is not one msgpack value; ask another peer") from None
        if not isinstance(values, dict):
            raise ManifestError("the manifest is not a map; ask another peer")
        manifest = cls.from_mapping(values)
        if manifest.to_bytes() != data:
            raise ManifestError("the manifest is not in its canonical spelling; ask another peer")
        return manifest

    def to_bytes(self) -> bytes:
        """The canonical msgpack bytes: nested maps with sorted keys, every field present, 64-bit floats."""
        return pack(self.model_dump())

    @cached_property
    def swarm_id(self) -> str:
        """SHA-256 of the canonical bytes, 64 hex digits."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def num_stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.stages.layers_per_stage)

    @property
    def microbatches_per_step(self) -> int:
        """Microbatches of one step, over all replicas together."""
        return self.training.sequences_per_step // self.training.sequences_per_microbatch

    @property
    def activation_shape(self) -> tuple[int, int, int]:
        """Shape of a tensor between stages: sequences of a microbatch, tokens, width."""
        return (self.training.sequences_per_microbatch, self.model.context, self.model.width)

    def activation_bytes(self, dtype: WireDtypeName) -> int:
        """Bytes of one tensor between stages, as written by protocol.tensors."""
        count = math.prod(self.activation_shape)
        scales = -(-count // _INT8_BLOCK) * 4 if dtype == "int8" else 0
        return count * _WIRE_BYTES[dtype] + scales

    def stage_layers(self, stage: int) -> range:
        """The layers of a stage, counted over the whole model from 0. Raises IndexError for no such stage."""
        if not 0 <= stage < self.num_stages:
            raise IndexError(f"there is no stage {stage}; stages are 0 to {self.num_stages - 1}")
        start = sum(self.stages.layers_per_stage[:stage])
        return range(start, start + self.stages.layers_per_stage[stage])

    def stage_parameters(self, stage: int) -> int:
        """Number of parameters of a stage; embedding in the first, final norm and output head in the last."""
        model = self.model
        kv_width = model.kv_heads * (model.width // model.heads)
        attention = 2 * model.width * model.width + 2 * model.width * kv_width
        layer = attention + 3 * model.width * model.ffn + 2 * model.width
        total = len(self.stage_layers(stage)) * layer
        if stage == 0:
            total += model.vocab_size * model.width
        if stage == self.num_stages - 1:
            total += model.width + (0 if model.tie_embeddings else model.vocab_size * model.width)
        return total


def _too_long(length: int, unit: str) -> str:
    return f"the manifest has {length} {unit}; {MAX_MANIFEST_BYTES} are allowed, so shorten it"
