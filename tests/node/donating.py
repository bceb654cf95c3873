"""Replicas of one stage that give their state to joiners, over a real (in-memory) transport."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import torch

from node.digest import parameter_digest
from node.download import DownloadLimits
from node.inquiry import Inquiry
from node.joiner import Joiner, JoinLimits
from node.snapshot import Layout, StageState
from node.statesync import DonorLimits, StateServer
from protocol.errors import SentinelError
from protocol.fields import decode
from protocol.messages import Chunk, Method
from protocol.transports.base import Observer, Request, Response, Route
from protocol.transports.memory import MemoryNetwork, MemoryTransport
from protocol.transports.sessions import SessionOptions

PARAMETERS = 1000
CHUNK_BYTES = 1000
PATIENCE = 20.0
JOINER = "joiner"
PLENTY = 1 << 40

QUICK = DownloadLimits(chunk=0.5, late=0.1, pause=0.01, longest_pause=0.05, turn=0.5, grace=PATIENCE)
LIMITS = JoinLimits(late=0.2, describe=2.0, resume=1.0, look=0.02, release=1.0, download=QUICK)

Handler = Callable[[Request], Awaitable[Response]]


def make_state(step: int, *, seed: int = 0, parameters: int = PARAMETERS) -> StageState:
    """What every honest replica of a stage holds before this step."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return StageState(
        step=step,
        parameters=torch.randn(parameters, generator=generator),
        optimizer={
            "exp_avg": torch.randn(parameters, generator=generator),
            "exp_avg_sq": torch.rand(parameters, generator=generator),
            "step": torch.tensor([step]),
        },
    )


LAYOUT = Layout.of(make_state(0), chunk_bytes=CHUNK_BYTES)


def same_bits(one: StageState, other: StageState) -> bool:
    """Whether two states are equal, to the bit."""
    images = []
    for state in (one, other):
        image = LAYOUT.image()
        LAYOUT.pack(state, image)
        images.append(image)
    return one.step == other.step and torch.equal(*images)


class Blame(Observer):
    """Remembers whom a transport reports."""

    def __init__(self) -> None:
        self.kinds: list[tuple[str, str]] = []

    def remote_error(self, peer: str, error: SentinelError) -> None:
        self.kinds.append((peer, getattr(error, "kind", "")))


class Donor:
    """A replica that only trains in so far as the test moves it on."""

    def __init__(self, stage: Giving, name: str, *, step: int, seed: int, **options: Any) -> None:
        self.stage = stage
        self.name = name
        self.seed = seed
        self.state = make_state(step, seed=seed)
        self.between_steps = asyncio.Lock()
        self.frozen = 0
        """How often its state has been frozen."""
        self.served: list[int] = []
        """Chunks that it has been asked for, and gave."""
        self.transport = MemoryTransport(stage.network, name, options=SessionOptions(swarm=bytes(32)))
        self.server = StateServer(
            self.transport,
            layout=LAYOUT,
            freeze=self.freeze,
            digest=parameter_digest(make_state(0, seed=seed).parameters),
            is_sibling=lambda peer: peer not in stage.strangers,
            **{"limits": DonorLimits(boundary=2.0, freezing_share=1e6), "memory": lambda: PLENTY, **options},
        )
        if step:
            self.reach(step)
        self.on(Method.CHUNK, self.count)

    def reach(self, step: int) -> None:
        """Go on to a step."""
        self.state = make_state(step, seed=self.seed)
        self.server.stands_at(step, parameter_digest(self.state.parameters))

    async def freeze(self, copy: Callable[[StageState], None]) -> tuple[int, bytes]:
        async with self.between_steps:
            self.frozen += 1
            state = self.state
            await asyncio.to_thread(copy, state)
            return state.step, parameter_digest(state.parameters)

    def on(self, method: Method, handler: Handler) -> None:
        """Answer a method in another way."""
        self.transport.serve(method, Route(handler=handler, admits=lambda peer: peer not in self.stage.strangers))

    async def count(self, request: Request) -> Response:
        """Serve a chunk as it should be."""
        response = await self.server._serve_chunk(request)
        self.served.append(decode(Chunk, request.head).index)
        return response

    def die(self) -> None:
        """Vanish without a word."""
        self.stage.network.remove(self.name)
        for other in self.stage.transports():
            other.drop_links(self.name)
        self.stage.listed.remove(self.name)


class Giving:
    """A stage, and a node that joins it."""

    def __init__(self) -> None:
        self.network = MemoryNetwork()
        self.donors: dict[str, Donor] = {}
        self.listed: list[str] = []
        """Peers that claim to have the state."""
        self.strangers: set[str] = set()
        """Peers whose claim nobody has heard of."""
        self.claims: dict[str, bytes] = {}
        self.introduced: list[str] = []
        self.told: list[str] = []
        self.false: list[tuple[str, str]] = []
        self.blame = Blame()
        self.transport = MemoryTransport(
            self.network, JOINER, options=SessionOptions(swarm=bytes(32)), observer=self.blame
        )

    def donor(self, name: str, *, step: int = 5, seed: int = 0, **options: Any) -> Donor:
        """A replica. Those of another ``seed`` hold something else than the others."""
        made = self.donors[name] = Donor(self, name, step=step, seed=seed, **options)
        self.listed.append(name)
        return made

    def stage(self, names: str, *, step: int = 5) -> list[Donor]:
        """Honest replicas."""
        return [self.donor(name, step=step) for name in names]

    def inquiry(self) -> Inquiry:
        """What asks the siblings."""

        async def introduce(peer: str) -> bool:
            self.introduced.append(peer)
            self.strangers.discard(JOINER)
            return True

        return Inquiry(
            transport=self.transport, siblings=lambda: list(self.listed), introduce=introduce, seconds=1.0, late=0.2
        )

    def joiner(self, limits: JoinLimits = LIMITS, *, seed: int = 0) -> Joiner:
        """What fetches the state."""
        return Joiner(
            transport=self.transport,
            layout=LAYOUT,
            inquiry=self.inquiry(),
            claimed=lambda step: self.claims,
            tell=self.told.append,
            on_false=lambda peer, error: self.false.append((peer, str(error))),
            limits=limits,
            rng=random.Random(seed),
        )

    def served(self) -> list[int]:
        """Every chunk that was given, by whomever."""
        return sorted(index for donor in self.donors.values() for index in donor.served)

    def transports(self) -> list[MemoryTransport]:
        return [self.transport, *(donor.transport for donor in self.donors.values())]

    async def close(self) -> None:
        await asyncio.gather(*(transport.close() for transport in self.transports()))
