"""Short messages beside the calls: the end of a step, and that a flagged microbatch was cleared."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from node.barrier import EndBarrier
from node.guard import Guard, Judged
from node.membership import Membership
from node.refusal_kinds import NOT_READY
from protocol.errors import RefusedError, RemoteError, SentinelError
from protocol.fields import decode, encode
from protocol.manifest import Manifest
from protocol.messages import Cleared, End, EndAnswer, Method
from protocol.transports.base import Request, Response, Route
from protocol.transports.sessions import Transport

log = logging.getLogger(__name__)

RETRY_SECONDS = 0.5

MAX_ENDED = 4096
"""Upstream peers, come and gone, whose last END is remembered."""

MAX_CLEARED_HOPS = 8
"""Eight hops with the largest sketch fill half of what the head of a frame may hold."""


class Notices:
    """Sends and takes a stage's notices."""

    def __init__(
        self,
        *,
        manifest: Manifest,
        stage: int,
        transport: Transport,
        membership: Membership,
        guard: Guard,
        digest_at: Callable[[int], bytes | None],
    ) -> None:
        self._manifest = manifest
        self._swarm = bytes.fromhex(manifest.swarm_id)
        self._stage = stage
        self._transport = transport
        self._membership = membership
        self._guard = guard
        self._digest_at = digest_at
        self._next_step = 0
        self._barriers: dict[int, EndBarrier] = {}
        self._ended: dict[str, int] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        transport.serve(Method.END, Route(handler=self._serve_end, admits=self._is_upstream))
        transport.serve(Method.CLEARED, Route(handler=self._serve_cleared, admits=self._is_sibling))

    def stand_at(self, step: int) -> None:
        """Note which step comes next, or is under way; ENDs of much earlier ones are dropped."""
        self._next_step = step
        for old in [number for number in self._barriers if number < step]:
            del self._barriers[old]

    def barrier(self, step: int) -> EndBarrier:
        """The ENDs of a step."""
        return self._barriers.setdefault(step, EndBarrier())

    def ended(self, peer: str) -> int:
        """The newest step of which a peer has told the end, whether this node took it or not; -1 for none."""
        return self._ended.get(peer, -1)

    def _is_upstream(self, peer: str) -> bool:
        return self._membership.view.stage_of(peer) == self._stage - 1 and self._guard.allows(peer)

    def _is_sibling(self, peer: str) -> bool:
        return self._membership.view.stage_of(peer) == self._stage and self._guard.allows(peer)

    def _replicas(self, stage: int, step: int, *, without: set[str]) -> list[str]:
        return [claim.peer for claim in self._membership.view.roster(stage, step, without=without)]

    async def send_end(self, step: int, loss: float, microbatches: int) -> None:
        """Tell every replica of the next stage that no more work comes; repeats until each took it or left.

        They answer with the digest of their parameters, so that one that differs from its siblings shows.
        """
        message = End(step=step, loss=loss, microbatches=microbatches)
        told: set[str] = set()
        digests: dict[str, bytes] = {}

        async def tell(peer: str) -> None:
            try:
                response = await self._transport.call(
                    peer, Method.END, message, timeout=self._manifest.network.hop_timeout_seconds
                )
                told.add(peer)
                digests[peer] = decode(EndAnswer, response.head).parameters
            except RemoteError as error:
                log.debug("peer %s refused the end of step %d: %s", peer[-8:], step, error)
                # A replica that is still getting ready, or has not heard of this node, needs its END later:
                # it would wait for it in vain, and hold its siblings up.
                if error.kind not in NOT_READY:
                    told.add(peer)
                elif error.kind == "not_admitted":
                    await self._membership.introduce(peer)
            except SentinelError as error:
                log.debug("peer %s did not take the end of step %d: %s", peer[-8:], step, error)

        def untold() -> list[str]:
            # Also to those that only this node has quarantined: END is no work, and whoever waited for it
            # in vain would hold up the stages below.
            replicas = self._replicas(self._stage + 1, step, without=self._guard.ejected())
            return [peer for peer in replicas if peer not in told]

        while self._next_step <= step + 1:
            await asyncio.gather(*map(tell, untold()))
            # A replica that could not be told is dialled anew by the membership, or is found to be gone.
            if untold():
                await self._membership.wait_until(lambda: False, RETRY_SECONDS)
            else:
                self._guard.compare_parameters(digests, step)
                digests.clear()
                await self._membership.wait_until(lambda: bool(untold()), 2.0)

    async def _serve_end(self, request: Request) -> Response:
        message = decode(End, request.head)
        if len(self._ended) > MAX_ENDED:
            self._ended.clear()
        self._ended[request.peer] = message.step
        if not self._next_step - 1 <= message.step <= self._next_step + 1:
            raise RefusedError(f"step {message.step} is not the present one", kind="wrong_step")
        self.barrier(message.step).end(request.peer, message.loss)
        self._membership.notify()
        return Response(head=encode(EndAnswer(parameters=self._digest_at(message.step) or b"")))

    def tell_cleared(self, judged: Judged, step: int, microbatch: int) -> None:
        """Show the siblings that what they may have flagged was the content of a microbatch."""
        if not judged.hops:
            return
        message = Cleared(step=step, microbatch=microbatch, hops=judged.hops[:MAX_CLEARED_HOPS])
        for peer in self._replicas(self._stage, step, without=self._guard.excluded()):
            if peer != self._membership.me:
                task = asyncio.get_running_loop().create_task(self._tell_one_cleared(peer, message))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _tell_one_cleared(self, peer: str, message: Cleared) -> None:
        try:
            await self._transport.call(
                peer, Method.CLEARED, message, timeout=self._manifest.network.hop_timeout_seconds
            )
        except SentinelError as error:
            log.debug("sibling %s did not take a clearance: %s", peer[-8:], error)

    async def _serve_cleared(self, request: Request) -> Response:
        message = decode(Cleared, request.head)
        peers = self._guard.check_clearance(
            message,
            stage=self._stage,
            sketch_bytes=4 * self._manifest.verifier.sketch_size,
            swarm=self._swarm,
            replicas=len(self._replicas(self._stage - 1, message.step, without=self._guard.excluded())),
        )
        self._guard.clear(peers, step=message.step, microbatch=message.microbatch)
        return Response()
