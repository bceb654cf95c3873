"""What the compute thread does with one microbatch: decode, check, forward, backward, encode.

Every method runs in the compute thread, one at a time, and nothing here awaits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from node.boundary import Boundary, Incoming, Outgoing
from node.guard import FlaggedError, Guard, Judged
from node.stage import StageRunner
from node.telemetry import Telemetry
from node.work import Returned, Work
from protocol.errors import MessageError
from protocol.framing import Buffer
from protocol.manifest import Manifest
from protocol.messages import Train, Trained
from protocol.receipts import check_input_receipt, check_receipt
from verifier.verdicts import Direction


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """A gradient that came back with its receipts in order."""

    incoming: Incoming
    judged: Judged | None
    """None if the statistics refuse it."""
    flag: FlaggedError | None


class StageJobs:
    """The jobs of one stage."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        stage: int,
        boundary: Boundary,
        guard: Guard,
        runner: StageRunner,
        telemetry: Telemetry,
    ) -> None:
        self._manifest = manifest
        self._swarm = bytes.fromhex(manifest.swarm_id)
        self._stage = stage
        self._last = manifest.num_stages - 1
        self._boundary = boundary
        self._guard = guard
        self._runner = runner
        self._telemetry = telemetry

    def forward(self, key: int, step: int, microbatch: int, value: torch.Tensor, source: bytes = b"") -> Outgoing:
        """Forward of tokens int64 [B, T] (stage 0) or an activation [B, T, d]; the output is ready to be sent.

        ``source`` is the digest of the activation.
        """
        with self._telemetry.phase("forward"):
            output = self._runner.forward(key, value)
        with self._telemetry.phase("send"):
            return self._boundary.outgoing(
                output,
                step=step,
                microbatch=microbatch,
                direction=Direction.ACTIVATION,
                received=value if value.is_floating_point() else None,
                source=source,
            )

    def _decode(
        self,
        message: Train | Trained,
        body: Buffer,
        *,
        sender: str,
        step: int,
        microbatch: int,
        direction: Direction,
    ) -> Incoming:
        return self._boundary.incoming(
            body,
            dtype=message.dtype,
            shape=message.shape,
            hop=message.hop,
            input_hop=message.input_hop,
            sender=sender,
            step=step,
            microbatch=microbatch,
            direction=direction,
        )

    def _take_activation(
        self, step: int, sender: str, message: Train, body: Buffer, replicas: int, excused: bool
    ) -> tuple[Incoming, Judged]:
        """Decode an activation and judge it."""
        direction, microbatch = Direction.ACTIVATION, message.microbatch
        with self._telemetry.phase("check"):
            incoming = self._decode(message, body, sender=sender, step=step, microbatch=microbatch, direction=direction)
            judged = self._guard.judge(
                incoming,
                sender=sender,
                step=step,
                microbatch=microbatch,
                direction=direction,
                replicas=replicas,
                excused=excused,
            )
            return incoming, judged

    def receive(
        self,
        key: int,
        step: int,
        sender: str,
        message: Train,
        work: Work,
        body: Buffer,
        replicas: int,
        excused: bool,
    ) -> tuple[Outgoing, Incoming, Judged]:
        """Check an activation and run the forward of a middle stage.

        Raises:
            RemoteError: the activation must not be used.
        """
        incoming, judged = self._take_activation(step, sender, message, body, replicas, excused)
        return self.forward(key, step, message.microbatch, incoming.tensor, incoming.digest), incoming, judged

    def receive_last(
        self,
        key: int,
        step: int,
        sender: str,
        message: Train,
        work: Work,
        body: Buffer,
        replicas: int,
        excused: bool,
    ) -> tuple[Outgoing, float, Incoming, Judged]:
        """Check an activation and run both ways of the last stage; the gradient is ready to be sent.

        Raises:
            RemoteError: the activation or the labels must not be used.
        """
        incoming, judged = self._take_activation(step, sender, message, body, replicas, excused)
        training = self._manifest.training
        tokens = torch.frombuffer(bytearray(work.tokens), dtype=torch.int32).long()
        if int(tokens.min()) < 0 or int(tokens.max()) >= self._manifest.model.vocab_size:
            raise MessageError("a token is outside the vocabulary", kind="origin")
        targets = tokens.view(training.sequences_per_microbatch, -1)[:, 1:]
        with self._telemetry.phase("forward"):
            loss, gradient = self._runner.forward_backward(key, incoming.tensor, targets)
        with self._telemetry.phase("send"):
            outgoing = self._boundary.outgoing(
                gradient, step=step, microbatch=message.microbatch, direction=Direction.GRADIENT
            )
        return outgoing, loss, incoming, judged

    def receive_gradient(
        self, step: int, microbatch: int, peer: str, trained: Trained, body: Buffer, sent: bytes, replicas: int
    ) -> Arrival:
        """Check a gradient that came back for an activation of digest ``sent``, and its receipts.

        Raises:
            RemoteError: it, or a receipt, is not what it should be. What the statistics alone refuse is told in
                the result, since its receipts are good for an audit.
        """
        direction = Direction.GRADIENT
        with self._telemetry.phase("check"):
            incoming = self._decode(trained, body, sender=peer, step=step, microbatch=microbatch, direction=direction)
            receipt = check_receipt(
                trained.receipt,
                self._swarm,
                peer=peer,
                stage=self._stage + 1,
                step=step,
                microbatch=microbatch,
                received=sent,
                returned=incoming.digest,
            )
            if receipt.stage < self._last:
                below = check_input_receipt(trained.input_receipt, self._swarm, of=receipt)
                if (below.peer, below.returned) != (incoming.input_from, incoming.input_digest):
                    raise MessageError("a receipt and a hop of the stage below do not fit together", kind="receipt")
            elif receipt.sent:
                raise MessageError("the last stage sends nothing on", kind="receipt")
            try:
                judged = self._guard.judge(
                    incoming, sender=peer, step=step, microbatch=microbatch, direction=direction, replicas=replicas
                )
            except FlaggedError as flag:
                return Arrival(incoming=incoming, judged=None, flag=flag)
            return Arrival(incoming=incoming, judged=judged, flag=None)

    def excuse(self, step: int, microbatch: int, peer: str, incoming: Incoming, replicas: int) -> Judged:
        """The judgement of a gradient that looks odd and has been found right."""
        return self._guard.judge(
            incoming,
            sender=peer,
            step=step,
            microbatch=microbatch,
            direction=Direction.GRADIENT,
            replicas=replicas,
            excused=True,
        )

    def backward(self, key: int, step: int, microbatch: int, returned: Returned) -> Outgoing:
        """Backward of a middle stage; the gradient of its input is ready to be sent."""
        with self._telemetry.phase("backward"):
            gradient = self._runner.backward(key, returned.incoming.tensor)
        assert gradient is not None
        with self._telemetry.phase("send"):
            return self._boundary.outgoing(
                gradient,
                step=step,
                microbatch=microbatch,
                direction=Direction.GRADIENT,
                received=returned.incoming.tensor,
                source=returned.incoming.digest,
            )

    def train_alone(self, key: int, tokens: torch.Tensor) -> float:
        """Both ways through the only stage that there is."""
        with self._telemetry.phase("forward"):
            loss = self._runner.forward(key, tokens[:, :-1], tokens[:, 1:])
        with self._telemetry.phase("backward"):
            self._runner.backward(key, None)
        return loss

    def backward_only(self, key: int, returned: Returned) -> None:
        """Backward of stage 0, whose input has no gradient."""
        with self._telemetry.phase("backward"):
            self._runner.backward(key, returned.incoming.tensor)

    def accept(self, judged: Judged) -> None:
        """Learn from a tensor whose microbatch is complete."""
        self._guard.accept(judged)

    def discard(self, key: int) -> None:
        """Forget a microbatch that did not get through."""
        self._runner.discard(key)
