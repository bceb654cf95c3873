"""Computing a peer's microbatch again from the bytes that it got, and comparing. In the compute thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from node.data import TokenStream
from node.history import ParameterHistory
from node.model import stage_layout
from node.stage import StageRunner
from protocol.errors import MessageError, RefusedError
from protocol.framing import Buffer
from protocol.manifest import Manifest
from protocol.tensors import WireDtype, decode_tensor, encode_tensor
from verifier.audit import TOLERANCE, difference
from verifier.verdicts import Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Everything that one microbatch was to a stage, as it travelled; what the stage does not have is None."""

    stage: int
    step: int
    microbatch: int
    parameters: bytes | None
    """Digest of what the accused says to have computed with; None where it said nothing (a hop)."""
    received: Buffer | None = None
    sent: Buffer | None = None
    got: Buffer | None = None
    """None also where only the forward is to be computed."""
    returned: Buffer | None = None
    tokens: Buffer | None = None
    """int32 little endian [B, T + 1]; in the first and the last stage."""


class Replayer:
    """Recomputes work of this node's stage, and, given the parameters, of another one."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        stage: int,
        runner: StageRunner,
        history: ParameterHistory,
        data: TokenStream | None,
        build: Callable[[int], StageRunner],
    ) -> None:
        """``data``: needed to audit the first stage. ``build`` makes a runner of another stage."""
        self._manifest = manifest
        self._stage = stage
        self._last = manifest.num_stages - 1
        self._runner = runner
        self._history = history
        self._data = data
        self._build = build
        self._dtypes = {
            Direction.ACTIVATION: WireDtype(manifest.wire.activation_dtype),
            Direction.GRADIENT: WireDtype(manifest.wire.gradient_dtype),
        }

    def compare(self, replay: Replay, parameters: torch.Tensor | None = None) -> str:
        """What differs from an honest computation: "activation", "gradient", "tokens", or nothing ("").

        Args:
            parameters: float32 [P] of another stage than this node's.

        Raises:
            RefusedError: this node cannot tell; kind "expired", "parameters" or "no_data".
            RemoteError: the tensors or tokens are not what they should be; whoever sent them is to blame.
        """
        runner, flat = self._with(replay, parameters)
        tokens = None if replay.tokens is None else self._tokens(replay.tokens)
        if replay.stage == 0:
            assert tokens is not None
            if self._data is None:
                raise RefusedError("only replicas of the first stage have the data", kind="no_data")
            if not torch.equal(tokens, self._expected_tokens(replay)):
                return "tokens"
            output = runner.replay_forward(tokens[:, :-1], parameters=flat)
            return self._differs("activation", output, replay.sent)
        received = self._decode(replay.received, Direction.ACTIVATION)
        if replay.stage == self._last:
            assert tokens is not None
            _, gradient = runner.replay(received, None, tokens[:, 1:], parameters=flat)
            return self._differs("gradient", gradient, replay.returned)
        if replay.got is None:
            output = runner.replay_forward(received, parameters=flat)
            return self._differs("activation", output, replay.sent)
        got = self._decode(replay.got, Direction.GRADIENT)
        output, gradient = runner.replay(received, got, parameters=flat)
        return self._differs("activation", output, replay.sent) or self._differs("gradient", gradient, replay.returned)

    def length(self, stage: int) -> int:
        """Number of parameters of a stage."""
        layout = stage_layout(self._manifest.model, self._manifest.stages.layers_per_stage, stage)
        return sum(slot.numel for slot in layout)

    def _with(self, replay: Replay, parameters: torch.Tensor | None) -> tuple[StageRunner, torch.Tensor | None]:
        if replay.stage != self._stage:
            assert parameters is not None
            runner = self._build(replay.stage)
            if parameters.shape != runner.flat_parameters().shape:
                raise RefusedError("the parameters of that stage have another size", kind="parameters")
            return runner, parameters
        known = self._history.digest_at(replay.step)
        if known is None:
            raise RefusedError(f"the parameters of step {replay.step} are no longer kept here", kind="expired")
        if replay.parameters is not None and replay.parameters != known:
            raise RefusedError("the accused had other parameters in that step than this node", kind="parameters")
        flat = self._history.parameters_of(known)
        return self._runner, None if flat is self._runner.flat_parameters() else flat

    def _tokens(self, tokens: Buffer) -> torch.Tensor:
        shape = (self._manifest.training.sequences_per_microbatch, self._manifest.model.context + 1)
        if memoryview(tokens).nbytes != 4 * shape[0] * shape[1]:
            raise MessageError("an audit came with tokens of another size", kind="size")
        values = torch.frombuffer(bytearray(tokens), dtype=torch.int32).long()
        if not 0 <= int(values.min()) <= int(values.max()) < self._manifest.model.vocab_size:
            raise MessageError("a token is outside the vocabulary", kind="origin")
        return values.view(shape)

    def _expected_tokens(self, replay: Replay) -> torch.Tensor:
        assert self._data is not None
        return self._data.sequences(
            replay.step,
            replay.microbatch,
            per_microbatch=self._manifest.training.sequences_per_microbatch,
            context=self._manifest.model.context,
        )

    def _differs(self, name: str, recomputed: torch.Tensor, sent: Buffer | None) -> str:
        direction = Direction(name)
        dtype = self._dtypes[direction]
        # What was sent has lost precision on its way; what is compared to it loses the same.
        expected = self._decode(_joined(encode_tensor(recomputed, dtype)), direction)
        return name if difference(expected, self._decode(sent, direction)) > TOLERANCE[dtype.value] else ""

    def _decode(self, body: Buffer | None, direction: Direction) -> torch.Tensor:
        assert body is not None
        dtype, shape = self._dtypes[direction], self._manifest.activation_shape
        return decode_tensor(body, dtype=dtype.value, shape=shape, expected_dtype=dtype, expected_shape=shape)


def _joined(buffers: Sequence[Buffer]) -> bytes:
    return b"".join(buffers)
