"""What siblings say of themselves to a node of their stage: how far they are, and which parameters they had."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar

from node.donors import Standing, reached
from protocol.errors import RemoteError, SentinelError
from protocol.fields import decode
from protocol.messages import Method, StateQuery, StateStatus
from protocol.transports.sessions import Transport

T = TypeVar("T")

MAX_ASKED = 15
"""Siblings whose word is asked for; more would hardly change what most of them say."""
STATUS_SECONDS = 5.0
LATE_SECONDS = 1.0
"""For those who are late, once more than half have answered."""


class Inquiry:
    """Asks siblings."""

    def __init__(
        self,
        *,
        transport: Transport,
        siblings: Callable[[], list[str]],
        introduce: Callable[[str], Awaitable[bool]],
        seconds: float = STATUS_SECONDS,
        late: float = LATE_SECONDS,
        rng: random.Random | None = None,
    ) -> None:
        """``siblings()`` lists whom to ask; ``introduce`` shows one of them this node's claim."""
        self._transport = transport
        self._siblings = siblings
        self._introduce = introduce
        self._seconds = seconds
        self._late = late
        self._rng = rng or random.Random()

    async def standings(self, step: int | None = None) -> list[Standing]:
        """How far siblings are, and the digests of their parameters before ``step``, of those that answer in time."""
        siblings = self._siblings()
        asked = self._rng.sample(siblings, min(MAX_ASKED, len(siblings)))
        answers, _ = await collect(
            {peer: self._standing(peer, step) for peer in asked},
            enough=len(asked) // 2 + 1,
            patience=lambda _: self._late,
        )
        return list(answers.values())

    async def reached(self) -> int | None:
        """The step that most siblings are in; None if nobody answers."""
        standings = await self.standings()
        return reached(standings) if standings else None

    async def _standing(self, peer: str, step: int | None) -> Standing:
        query = StateQuery(step=step)
        try:
            response = await self._transport.call(peer, Method.STATE, query, timeout=self._seconds)
        except RemoteError as error:
            if error.kind != "not_admitted":
                raise
            await self._introduce(peer)  # it does not know yet that this node is its sibling
            response = await self._transport.call(peer, Method.STATE, query, timeout=self._seconds)
        status = decode(StateStatus, response.head)
        return Standing(peer=peer, step=status.step, frozen=status.frozen, parameters=status.parameters)


def told(standings: Collection[Standing]) -> dict[str, bytes]:
    """Who has named a digest, and which."""
    return {standing.peer: standing.parameters for standing in standings if standing.parameters}


async def collect(
    calls: Mapping[str, Coroutine[Any, Any, T]], *, enough: int, patience: Callable[[float], float]
) -> tuple[dict[str, T], dict[str, SentinelError]]:
    """Make calls to several peers at once; answers and errors by peer.

    Once ``enough`` have answered, in so many seconds, the others have ``patience(seconds)`` left: one that does not
    answer must not hold up what does not depend on it.
    """
    tasks = {asyncio.get_running_loop().create_task(call): peer for peer, call in calls.items()}
    answers: dict[str, T] = {}
    errors: dict[str, SentinelError] = {}
    started = time.monotonic()
    deadline: float | None = None
    pending = set(tasks)
    try:
        while pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            done, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            for task in done:
                try:
                    answers[tasks[task]] = task.result()
                except SentinelError as error:
                    errors[tasks[task]] = error
            if deadline is None and len(answers) >= enough:
                deadline = time.monotonic() + patience(time.monotonic() - started)
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
    return answers, errors
