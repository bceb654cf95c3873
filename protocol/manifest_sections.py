"""The sections of the manifest: every field with its type, range, default, unit and reason.

This is the only list of the fields. The commented swarm.toml is generated from it (manifest_template), and
what the fields say about each other is checked in manifest.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MAX_LAYERS = 512
MAX_STAGES = 128
MAX_TEXT_CHARS = 1024

WireDtypeName = Literal["bf16", "fp32", "int8"]


def _printable(value: str) -> str:
    """Refuse control characters, line breaks and characters that reorder a line."""
    if not value.isprintable() or value != value.strip():
        raise ValueError("holds control characters, or spaces at an end; remove them")
    return value


Text = Annotated[str, Field(max_length=MAX_TEXT_CHARS), AfterValidator(_printable)]
Sha256 = Annotated[str, Field(pattern=r"\A([0-9a-f]{64})?\z")]
StageLayers = Annotated[int, Field(strict=True, ge=1, le=MAX_LAYERS)]


class Section(BaseModel):
    """A table of swarm.toml. Unknown fields are errors, and no value is converted to another type."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class ModelSection(Section):
    """The Llama-style language model that the swarm trains."""

    vocab_size: int = Field(
        default=260,
        ge=2,
        le=1_048_576,
        description="Number of token ids. At least 259 for the bytes tokenizer (256 bytes and 3"
        " marks), and at least the tokenizer's own size otherwise.",
    )
    width: int = Field(
        default=128,
        ge=8,
        le=65_536,
        description="Size of the vector of one token between layers; what travels from stage to stage.",
    )
    layers: int = Field(
        default=6, ge=1, le=MAX_LAYERS, description="Number of transformer layers, in all stages together."
    )
    heads: int = Field(
        default=4, ge=1, le=1024, description="Attention heads. Divides width; width / heads has to be even."
    )
    kv_heads: int = Field(
        default=2,
        ge=1,
        le=1024,
        description="Key and value heads. Divides heads; fewer than heads saves memory (grouped queries).",
    )
    ffn: int = Field(
        default=352,
        ge=8,
        le=262_144,
        description="Inner size of the feed-forward block; about 8/3 of width is usual.",
    )
    context: int = Field(default=128, ge=2, le=131_072, description="Tokens per sequence.")
    rope_base: float = Field(
        default=10_000.0,
        ge=100.0,
        le=1e9,
        description="Base of the rotary position embedding; larger for longer contexts.",
    )
    norm_eps: float = Field(
        default=1e-5,
        ge=1e-12,
        le=1e-2,
        description="Added under the root of each RMS norm, against division by zero.",
    )
    tie_embeddings: bool = Field(
        default=False,
        description="Use the input embedding as output head too. Possible with a single stage only,"
        " since stages share no parameters.",
    )
    seed: int = Field(
        default=0, ge=0, le=2**32 - 1, description="Seed of the initial parameters; the same on every node."
    )


class StagesSection(Section):
    """How the layers are cut into pipeline stages."""

    layers_per_stage: tuple[StageLayers, ...] = Field(
        default=(2, 2, 2),
        strict=False,  # TOML and msgpack have lists; the items stay strict
        min_length=1,
        max_length=MAX_STAGES,
        description="Layers of each stage, first to last; they add up to model.layers. The first stage"
        " also holds the embedding, the last one the output head, so give these two fewer layers when"
        " the vocabulary is large.",
    )
    min_replicas: int = Field(
        default=1,
        ge=1,
        le=256,
        description="Nodes that each stage needs before training starts. From 3 on a bad replica can be outvoted.",
    )


class TrainingSection(Section):
    """The optimizer (AdamW, per stage) and the size of a step."""

    steps: int = Field(
        default=0, ge=0, le=10**9, description="Optimizer steps after which training ends; 0 is without end."
    )
    learning_rate: float = Field(default=3e-3, gt=0.0, le=10.0, description="Highest learning rate.")
    warmup_steps: int = Field(
        default=10, ge=0, le=10**9, description="Steps over which the learning rate rises from 0 in a line."
    )
    min_lr_ratio: float = Field(
        default=0.1, ge=0.0, le=1.0, description="Lowest learning rate, as a share of the highest."
    )
    decay_steps: int = Field(
        default=1000,
        ge=1,
        le=10**9,
        description="Steps after the warm-up over which the learning rate falls, as half a cosine, to its lowest.",
    )
    beta1: float = Field(default=0.9, ge=0.0, lt=1.0, description="AdamW: share of the old mean kept each step.")
    beta2: float = Field(
        default=0.95, ge=0.0, lt=1.0, description="AdamW: share of the old mean square kept each step."
    )
    eps: float = Field(default=1e-8, gt=0.0, le=1e-2, description="AdamW: added to the root of the mean square.")
    weight_decay: float = Field(
        default=0.1,
        ge=0.0,
        le=10.0,
        description="AdamW: decay of matrices (not of norms), times the learning rate.",
    )
    clip_norm: float = Field(
        default=1.0,
        gt=0.0,
        le=1e6,
        description="Largest norm of a stage's averaged gradient; longer ones are scaled.",
    )
    aggregation: Literal["robust", "mean"] = Field(
        default="robust",
        description="How replicas combine their gradients. robust: outliers count less, from 3 replicas on. mean:"
        " exact, and at the mercy of each of them.",
    )
    sequences_per_step: int = Field(
        default=32,
        ge=1,
        le=1_048_576,
        description="Sequences of one optimizer step, over all replicas together. More makes a step"
        " longer, and averaging rarer for the same data.",
    )
    sequences_per_microbatch: int = Field(
        default=4,
        ge=1,
        le=4096,
        description="Sequences that travel through the pipeline together. Divides sequences_per_step.",
    )
    checkpoint_steps: int = Field(
        default=50,
        ge=1,
        le=10**9,
        description="Steps between two checkpoints of a node's stage. A restart loses up to so many steps.",
    )


class DataSection(Section):
    """What the model reads. Every node reads it by itself; the order follows from the seed."""

    source: Text = Field(
        default="stdlib",
        min_length=1,
        description='"stdlib" (Python\'s own source files, for a try without download), or "file:PATH"'
        " of text, .jsonl or .parquet: one file, a folder or a pattern, at the same path on every node.",
    )
    text_field: Text = Field(
        default="text",
        min_length=1,
        description="Field or column that holds the text in .jsonl and .parquet.",
    )
    tokenizer: Text = Field(
        default="bytes",
        min_length=1,
        description='"bytes" (one token a byte, nothing to download), or the path of a tokenizer.json.',
    )
    tokenizer_sha256: Sha256 = Field(
        default="",
        description="SHA-256 of the tokenizer.json in hex, checked by every node; empty for no check.",
    )
    source_sha256: Sha256 = Field(
        default="",
        description="SHA-256 of the source file in hex, checked by every node; empty for no check.",
    )
    seed: int = Field(default=0, ge=0, le=2**32 - 1, description="Seed of the order in which sequences are drawn.")


class WireSection(Section):
    """How tensors are written for the way between nodes."""

    activation_dtype: WireDtypeName = Field(
        default="bf16",
        description="Of activations: bf16 halves the traffic of fp32 at little loss, int8 quarters it, fp32 is exact.",
    )
    gradient_dtype: WireDtypeName = Field(default="bf16", description="Of activation gradients; as above.")


class VerifierSection(Section):
    """How nodes check what they receive, and what follows from it."""

    mode: Literal["enforce", "observe", "off"] = Field(
        default="enforce",
        description="enforce: refuse what is flagged and eject who repeats it. observe: count and show"
        " only. off: no statistics at all; malformed messages are refused still.",
    )
    warmup_steps: int = Field(
        default=20,
        ge=0,
        le=100_000,
        description="Steps during which the fence only learns. Peers are trusted meanwhile, so start"
        " with nodes you know.",
    )
    ema_activation: float = Field(
        default=0.9,
        ge=0.0,
        lt=1.0,
        description="Share of the old moving average of activations kept each update.",
    )
    ema_gradient: float = Field(
        default=0.8,
        ge=0.0,
        lt=1.0,
        description="The same for activation gradients; lower, since gradients change faster.",
    )
    reduction: Literal["tokens", "sequences", "none"] = Field(
        default="tokens",
        description="What the averages are over, besides time: tokens: all tokens of a microbatch, one value per"
        " feature. sequences: the sequences of a microbatch, one per position and feature. none: nothing,"
        " one per element; takes the memory of a whole tensor.",
    )
    votes: int = Field(
        default=1,
        ge=1,
        le=4,
        description="Statistics that must be beyond their fence before a tensor is flagged; 1: any of them.",
    )
    sketches: bool = Field(
        default=True,
        description="Compare what a stage sends with what it received, by sketches. false: only the four distances"
        " of the SENTINEL paper, which overlook replayed and sign-changed tensors.",
    )
    window: int = Field(
        default=128,
        ge=16,
        le=65_536,
        description="Accepted distances remembered, per metric, to set the fence.",
    )
    minimum_history: int = Field(
        default=24,
        ge=4,
        le=65_536,
        description="Accepted distances needed before the fence judges. At most window.",
    )
    fence_multiplier: float = Field(
        default=3.0,
        gt=0.0,
        le=100.0,
        description="Fence: quartile plus this times the interquartile range; where the adaption starts.",
    )
    target_false_positive_rate: float = Field(
        default=0.001,
        gt=0.0,
        lt=0.25,
        description="Share of honest tensors that may be flagged; the fence adapts to it.",
    )
    strike_limit: float = Field(
        default=3.0, gt=0.0, le=1000.0, description="Strikes at which a peer is quarantined and accused."
    )
    strike_decay: float = Field(
        default=0.1,
        gt=0.0,
        le=1000.0,
        description="Strikes that a peer loses each step, so that chance is forgiven.",
    )
    ejection_seconds: float = Field(
        default=3600.0,
        ge=1.0,
        le=604_800.0,
        description="How long an ejection lasts, in seconds; at most a week.",
    )
    norm_bound: float = Field(
        default=1e4,
        gt=0.0,
        le=1e30,
        description="Largest root mean square of a received tensor; one above it is flagged, even during the warm-up.",
    )
    sketch_size: int = Field(
        default=512,
        ge=16,
        le=4096,
        description="Numbers that stand for a tensor in every message; its likeness to another is then known"
        " to about 1/sqrt of this.",
    )
    audit_rate: float = Field(
        default=1 / 64,
        ge=0.0,
        le=1.0,
        description="Share of microbatches that another replica computes again, to compare; costs as much"
        " compute. 0 for no audits.",
    )
    audit_suspicion: float = Field(
        default=16.0,
        ge=1.0,
        le=10_000.0,
        description="How many times more often newcomers, suspects and tensors near their fence are audited.",
    )
    allow_drills: bool = Field(
        default=False,
        description="Let nodes play an attacker on purpose, to see the checker work. Never true in a real swarm.",
    )

    @property
    def audits(self) -> bool:
        """Whether work is computed again now and then."""
        return self.mode != "off" and self.audit_rate > 0.0


class NetworkSection(Section):
    """Time limits, in seconds, and how much is under way at once."""

    hop_timeout_seconds: float = Field(
        default=20.0,
        ge=0.1,
        le=3600.0,
        description="Longest wait for one stage's own part of a call, before the microbatch is tried elsewhere.",
    )
    lease_seconds: float = Field(
        default=30.0,
        ge=1.0,
        le=120.0,
        description="How long a claim of a stage lives when it is not renewed.",
    )
    renew_seconds: float = Field(
        default=10.0, ge=0.1, le=120.0, description="How often a claim is renewed. Less than lease_seconds."
    )
    heartbeat_seconds: float = Field(
        default=2.0, ge=0.05, le=600.0, description="How often neighbours tell each other that they live."
    )
    dead_after_seconds: float = Field(
        default=8.0,
        ge=0.2,
        le=3600.0,
        description="Silence after which a neighbour counts as gone. More than twice heartbeat_seconds.",
    )
    in_flight: int = Field(
        default=4,
        ge=1,
        le=256,
        description="Microbatches that a node has under way at once; more fills the pipeline and takes memory.",
    )


class AdmissionSection(Section):
    """Who may join."""

    mode: Literal["open", "invited"] = Field(
        default="open",
        description="open: whoever has the invite. invited: whom the coordinator has admitted, by peer id.",
    )
    coordinator: Text = Field(
        default="",
        description="Peer id of the coordinator, who signs admissions; needed for invited, else empty.",
    )
