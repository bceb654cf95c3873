"""Replicas of one stage over a real (in-memory) transport: honest ones with an averager, and puppets."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import torch

from node.averaging import Averager, Checking, Committed
from node.butterfly import Contribution
from node.rounds import strides
from protocol.errors import RefusedError, SentinelError
from protocol.fields import decode, encode
from protocol.framing import Buffer
from protocol.identity import Identity
from protocol.messages import (
    AggregateAnswer,
    Method,
    Part,
    PartAnswer,
    RoundAnswer,
    RoundCommit,
    RoundJoin,
    RoundProjection,
)
from protocol.parts import PartClaim, PartSigner
from protocol.tensors import WireDtype, encode_tensor
from protocol.transports.base import Observer, Request, Response, Route
from protocol.transports.memory import MemoryNetwork, MemoryTransport
from protocol.transports.sessions import SessionOptions
from verifier.reduction import projections
from verifier.verdicts import Reason

LENGTH = 101
HOP_SECONDS = 0.6
PATIENCE = 30.0
OLD, NEW = b"\x01" * 32, b"\x02" * 32
"""Digests of parameters; OLD is the smaller one."""


def identity(name: str) -> Identity:
    """The key of a peer of a short name."""
    return Identity(name.encode().ljust(32, b"."))


class NamedSigner(PartSigner):
    """Checks the signatures of peers that go by short names."""

    def __init__(self, name: str) -> None:
        super().__init__(identity(name), bytes(32))

    def check(self, peer: str, claim: PartClaim, body: Sequence[Buffer], signature: bytes) -> bool:
        return super().check(identity(peer).peer_id, claim, body, signature)


class Blame(Observer):
    """Remembers whom a transport reports."""

    def __init__(self) -> None:
        self.kinds: list[tuple[str, str]] = []
        self.unheard = asyncio.Event()
        """A peer did not answer a method yet."""

    def request_done(self, method: str, outcome: str) -> None:
        if outcome == "method":
            self.unheard.set()

    def remote_error(self, peer: str, error: SentinelError) -> None:
        self.kinds.append((peer, getattr(error, "kind", "")))


class Sibling:
    """A replica with a real averager, and as much of a view as that needs."""

    def __init__(self, stage: Stage, name: str, length: int, *, ready: bool = True) -> None:
        self.stage = stage
        self.name = name
        self._length = length
        self.blame = Blame()
        self.transport = MemoryTransport(
            stage.network, name, options=SessionOptions(swarm=bytes(32)), observer=self.blame
        )
        self.gone: set[str] = set()
        self.stalled: list[str] = []
        self.false: list[tuple[str, Reason]] = []
        self.examined: list[tuple[str, str]] = []
        self._changed = asyncio.Event()
        self.transport.on_peer_gone(self._lose)
        if ready:
            self.get_ready()

    def get_ready(self) -> None:
        """Begin to answer."""
        stage = self.stage
        self.averager = Averager(
            me=self.name,
            transport=self.transport,
            parameters=self._length,
            siblings=self.siblings,
            is_sibling=lambda peer: peer in stage.roster or peer in stage.guests,
            wait_until=self.wait_until,
            notify=self.notify,
            on_stalled=self.stalled.append,
            hop_seconds=stage.hop_seconds,
            robust=stage.robust,
            checking=Checking(
                signer=NamedSigner(self.name),
                mode=stage.mode,
                chance=stage.chance,
                on_false=lambda peer, reason, text: self.false.append((peer, reason)),
                barred=lambda peer: any(peer == name for name, _ in self.false),
                on_examined=lambda why, outcome: self.examined.append((why, outcome)),
                falsify=self.falsify,
            ),
        )
        self.averager.stand_at(0)

    def falsify(self, mean: torch.Tensor, step: int) -> torch.Tensor:
        """What it answers for its slice."""
        return mean

    def siblings(self, step: int) -> list[str]:
        return sorted(self.stage.roster - {self.name} - self.gone)

    def notify(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    async def wait_until(self, predicate: Callable[[], bool], seconds: float | None = None) -> bool:
        try:
            async with asyncio.timeout(seconds):
                while not predicate():
                    await self._changed.wait()
        except TimeoutError:
            return predicate()
        return True

    def _lose(self, peer: str) -> None:
        self.gone.add(peer)
        self.notify()

    async def run(self, gradient: torch.Tensor, count: int = 1, *, step: int = 0, parameters: bytes = OLD) -> Committed:
        """Average one step and remember what came out, as the trainer does."""
        contribution = Contribution(step=step, gradient=gradient, microbatches=count, parameters=parameters)
        async with asyncio.timeout(PATIENCE):
            committed = await self.averager.run(contribution)
        self.averager.remember(committed)
        self.averager.stand_at(step + 1)
        return committed


class Puppet:
    """A sibling whose every word the test chooses. It notes what it hears, and answers politely."""

    def __init__(self, stage: Stage, name: str) -> None:
        self.stage = stage
        self.name = name
        self.transport = MemoryTransport(stage.network, name, options=SessionOptions(swarm=bytes(32)))
        self.heard: asyncio.Queue[tuple[str, Any]] = asyncio.Queue()
        self.on_join: Callable[[str, RoundJoin], RoundAnswer] = lambda peer, message: RoundAnswer(committed=False)
        self.on_commit: Callable[[str, RoundCommit], RoundAnswer] = lambda peer, message: RoundAnswer(committed=False)
        self.slice: torch.Tensor | None = None
        self.coefficients: tuple[float, ...] | None = None
        """What it says that each member counts for; None for all the same."""
        self.gradient: torch.Tensor | None = None
        """Of which it tells projections."""
        self.aggregate: tuple[AggregateAnswer, torch.Tensor] | None = None
        self.transport.serve(Method.ROUND_JOIN, Route(handler=self._join))
        self.transport.serve(Method.ROUND_COMMIT, Route(handler=self._commit))
        self.transport.serve(Method.PART, Route(handler=self._part, body_limit=1 << 20))
        self.transport.serve(Method.AGGREGATE, Route(handler=self._aggregate))
        self.transport.serve(Method.ROUND_PROJECTION, Route(handler=self._projection))

    async def _projection(self, request: Request) -> Response:
        message = decode(RoundProjection, request.head)
        if self.gradient is None:
            await asyncio.Event().wait()
        assert self.gradient is not None
        told = projections(self.gradient, len(message.members), key=message.key)
        return Response(body=encode_tensor(told, WireDtype.FP32))

    async def _join(self, request: Request) -> Response:
        message = decode(RoundJoin, request.head)
        self.heard.put_nowait((request.peer, message))
        return Response(head=encode(self.on_join(request.peer, message)))

    async def _commit(self, request: Request) -> Response:
        message = decode(RoundCommit, request.head)
        self.heard.put_nowait((request.peer, message))
        return Response(head=encode(self.on_commit(request.peer, message)))

    async def _part(self, request: Request) -> Response:
        message = decode(Part, request.head)
        self.heard.put_nowait((request.peer, message))
        if self.slice is None:
            await asyncio.Event().wait()
        assert self.slice is not None
        count = len(message.members)
        head = encode(PartAnswer(coefficients=self.coefficients or (1 / count,) * count))
        return Response(head=head, body=encode_tensor(self.slice, WireDtype.FP32))

    async def _aggregate(self, request: Request) -> Response:
        if self.aggregate is None:
            raise RefusedError("nothing here", kind="not_yet")
        return Response(head=encode(self.aggregate[0]), body=encode_tensor(self.aggregate[1], WireDtype.FP32))

    async def hears(self, kind: type, attempt: int | None = None) -> Any:
        """The next message of a kind."""
        async with asyncio.timeout(PATIENCE):
            while True:
                _, message = await self.heard.get()
                if isinstance(message, kind) and attempt in (None, message.attempt):
                    return message

    async def say(self, peer: str, method: Method, message: Any, body: torch.Tensor | None = None) -> Response:
        buffers = [] if body is None else encode_tensor(body, WireDtype.FP32)
        limit = 8 * LENGTH  # of a vector, each slice of which is filled up to the longest, or of all parts of a slice
        return await self.transport.call(peer, method, message, buffers, timeout=PATIENCE, reply_limit=limit)

    async def join(
        self, peers: Sequence[str], members: Sequence[str], *, attempt: int = 0, parameters: bytes = OLD
    ) -> None:
        """Announce a round to some peers."""
        message = RoundJoin(step=0, attempt=attempt, members=tuple(members), microbatches=1, parameters=parameters)
        for peer in peers:
            await self.say(peer, Method.ROUND_JOIN, message)

    def send_parts(
        self, members: Sequence[str], gradient: torch.Tensor, attempt: int = 0
    ) -> dict[str, asyncio.Task[Response]]:
        """Send each other member its slice of ``gradient``, and stand by it."""
        self.gradient = gradient
        cuts = dict(zip(members, strides(len(members)), strict=True))
        return {
            peer: self.stage.spawn(self.send_part(peer, members, gradient[cuts[peer]], attempt))
            for peer in members
            if peer != self.name
        }

    async def send_part(
        self, owner: str, members: Sequence[str], part: torch.Tensor, attempt: int = 0, step: int = 0
    ) -> Response:
        """Send the owner of a slice this puppet's signed part of it."""
        claim = PartClaim(step=step, attempt=attempt, members=tuple(members), owner=owner, microbatches=1)
        signature = NamedSigner(self.name).sign(claim, encode_tensor(part, WireDtype.FP32))
        message = Part(step=step, attempt=attempt, members=claim.members, microbatches=1, signature=signature)
        return await self.say(owner, Method.PART, message, part)

    def die(self) -> None:
        """Vanish without a word."""
        self.stage.network.remove(self.name)
        for member in self.stage.members:
            self.transport.drop_links(member.name)
            member.transport.drop_links(self.name)


class Stage:
    """The replicas of one stage."""

    def __init__(
        self,
        *,
        robust: bool = False,
        hop_seconds: float = HOP_SECONDS,
        mode: str = "enforce",
        chance: float = 0.0,
    ) -> None:
        self.robust = robust
        self.mode = mode
        self.chance = chance
        self.hop_seconds = hop_seconds
        self.network = MemoryNetwork()
        self.roster: set[str] = set()
        self.guests: set[str] = set()
        """Peers with a claim on the stage that take no part in this step."""
        self.members: list[Sibling] = []
        self.puppets: list[Puppet] = []
        self.tasks: set[asyncio.Task[Any]] = set()

    def sibling(self, name: str, *, length: int = LENGTH, listed: bool = True, ready: bool = True) -> Sibling:
        made = Sibling(self, name, length, ready=ready)
        self.members.append(made)
        if listed:
            self.roster.add(name)
        return made

    def siblings(self, names: str, *, length: int = LENGTH) -> list[Sibling]:
        return [self.sibling(name, length=length) for name in names]

    def puppet(self, name: str, *, listed: bool = True) -> Puppet:
        made = Puppet(self, name)
        self.puppets.append(made)
        (self.roster if listed else self.guests).add(name)
        return made

    def unlist(self, name: str) -> None:
        """The sibling's claim says that it takes no work any more."""
        self.roster.discard(name)
        for member in self.members:
            member.notify()

    def spawn(self, coroutine: Any) -> asyncio.Task[Any]:
        task = asyncio.ensure_future(coroutine)
        self.tasks.add(task)
        return task

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        await asyncio.gather(*(member.averager.close() for member in self.members))
        await asyncio.gather(*(peer.transport.close() for peer in [*self.members, *self.puppets]))


def gradients(count: int, length: int = LENGTH) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(length, generator=generator) for _ in range(count)]
