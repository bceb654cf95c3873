"""Siblings show each other what they have learnt of their boundaries, and take the median as reference.

Each replica learns from what its own neighbours happen to send it, so a wiring that puts one of them behind a
cheat could shift its baselines alone. Every few steps they are exchanged beside the training; at the next end of
a step the median over all siblings takes the place of the own baseline. Whoever comes too late is left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Mapping

from node.guard import Guard
from node.membership import Membership
from protocol.errors import MessageError, RefusedError, SentinelError
from protocol.fields import decode
from protocol.messages import Baseline, Method
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport
from verifier.baselines import median_reduction, pack_reduction, unpack_reduction
from verifier.distances import Reduction
from verifier.verdicts import Direction

log = logging.getLogger(__name__)

EVERY_STEPS = 4
"""Baselines change little within so few steps, and each exchange costs a message to every sibling."""
MAX_BODY_BYTES = 1 << 20
CALL_SECONDS = 5.0


class Baselines:
    """Sends, takes and applies the baselines of one stage."""

    def __init__(
        self,
        *,
        transport: Transport,
        membership: Membership,
        guard: Guard,
        siblings: Callable[[int], list[str]],
        is_sibling: Callable[[str], bool],
    ) -> None:
        """``siblings(step)`` lists the live siblings that take part in a step, without this node."""
        self._transport = transport
        self._membership = membership
        self._guard = guard
        self._siblings = siblings
        self._step = 0
        self._own: dict[Direction, Reduction] = {}
        self._own_step = -1
        self._received: dict[str, tuple[int, bytes]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        transport.serve(Method.BASELINE, Route(handler=self._serve, body_limit=MAX_BODY_BYTES, admits=is_sibling))

    def share(self, step: int) -> None:
        """After the end of a step: send the baselines, if it is time."""
        self._step = step
        if step % EVERY_STEPS or not self._guard.judges:
            return
        self._own, self._own_step = dict(self._guard.baselines()), step
        body = b"".join(pack_reduction(self._own[direction]) for direction in Direction if direction in self._own)
        if not body or len(body) > MAX_BODY_BYTES:
            return
        for peer in self._siblings(step):
            task = asyncio.get_running_loop().create_task(self._send(peer, step, body))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def take_median(self, step: int) -> None:
        """At the end of a step, before it is learnt from: set the median of the last exchange as reference.

        In the compute thread.
        """
        if self._own_step != step - 1 or not self._own:
            return
        others: list[Mapping[Direction, Reduction]] = []
        for received_step, body in self._received.copy().values():
            if received_step == self._own_step:
                with contextlib.suppress(MessageError):  # it came before this node's own, so it is checked only now
                    others.append(self._split(body))
        for direction, own in self._own.items():
            shared = median_reduction(own, [entry[direction] for entry in others])
            self._guard.set_baseline(direction, shared.reduction)
        self._own = {}

    async def close(self) -> None:
        """Stop sending."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _send(self, peer: str, step: int, body: bytes) -> None:
        try:
            await self._transport.call(peer, Method.BASELINE, Baseline(step=step), (body,), timeout=CALL_SECONDS)
        except SentinelError as error:
            log.debug("sibling %s did not take the baselines: %s", peer[-8:], error)

    async def _serve(self, request: Request) -> Response:
        message = decode(Baseline, request.head)
        if not self._step - EVERY_STEPS <= message.step <= self._step + EVERY_STEPS:
            raise RefusedError(f"baselines of step {message.step} are of no use now", kind="wrong_step")
        body = bytes(request.body)
        if self._own and self._own_step == message.step:
            self._split(body)
        self._received = {peer: entry for peer, entry in self._received.items() if entry[0] >= self._step - EVERY_STEPS}
        self._received[request.peer] = (message.step, body)
        return Response()

    def _split(self, body: bytes) -> dict[Direction, Reduction]:
        """The reductions in a body, shaped like this node's own.

        Raises:
            MessageError: it is none such.
        """
        found: dict[Direction, Reduction] = {}
        start = 0
        try:
            for direction in Direction:
                if direction in self._own:
                    like = self._own[direction]
                    size = 4 * (like.mean.numel() + like.quantiles.numel())
                    found[direction] = unpack_reduction(body[start : start + size], like=like)
                    start += size
        except ValueError as error:
            raise MessageError(f"a sibling's baselines cannot be read: {error}", kind="size") from None
        if start != len(body):
            raise MessageError("a sibling's baselines have another size", kind="size")
        return found
