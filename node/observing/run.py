"""``sentinel observe``: HTTP on asyncio in the main thread, the questions on trio in another.

The two share a picture only through what ``Observer.publish`` leaves: a finished status, and metrics, whose library
is safe to use from several threads.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

import click

from node.http import HttpServer
from node.log import configure_logging
from node.observing.counts import Counts
from node.observing.lean import left_out
from node.observing.metrics import SwarmMetrics
from node.observing.picture import Picture
from node.observing.told import numbers, tell, where
from protocol.invite import Invite

if TYPE_CHECKING:
    import trio

log = logging.getLogger(__name__)

OVERDUE_SECONDS: Final = 180.0
"""A round takes a minute at worst; after this many seconds and ten intervals without one, something is stuck."""


class Observer:
    """What is known, as the HTTP port shows it."""

    def __init__(self, invite: Invite, *, interval: float) -> None:
        self.picture = Picture(swarm=bytes.fromhex(invite.swarm_id))
        self.picture.add_seeds(((seed.peer_id, seed.text) for seed in invite.seeds), time.time())
        self.counts = Counts()
        self.metrics = SwarmMetrics()
        self.interval = interval
        self._started = self._published = time.time()
        self._said: tuple[str, str] = ("", "")
        self.publish()

    def publish(self) -> None:
        """Show the picture as it is now. Called between rounds, by the thread that changes the picture."""
        now = time.time()
        self.metrics.update(self.picture, self.counts, now)
        self.status = tell(self.picture, now, started=self._started)
        self._published = now
        if self.picture.rounds:
            self._say()

    def _say(self) -> None:
        """Log what has changed, and nothing that only counts on."""
        state, reason = where(self.picture)
        count = numbers(self.picture)
        key = (state, ", ".join(f"{number} {presence}" for presence, number in count.items() if number))
        if key == self._said:
            return
        self._said = key
        log.log(logging.WARNING if state == "isolated" else logging.INFO, "[%s] %s", state, reason)

    def ready(self) -> tuple[bool, str]:
        """Whether anybody answers."""
        answering = self.status["nodes"]["answering"] > 0
        return answering, f"{self.status['state']}: {self.status['reason']}"

    def alive(self) -> tuple[bool, str]:
        """Whether rounds go on."""
        age = time.time() - self._published
        return age < OVERDUE_SECONDS + 10 * self.interval, f"the last round ended {age:.0f} s ago"


class Questions:
    """The thread that asks; ``stop`` may be called from any other, also before it has begun."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._token: trio.lowlevel.TrioToken | None = None
        self._cancel: Callable[[], None] | None = None
        self._stopping = False

    def run(self) -> None:
        """Ask until stopped."""
        with left_out():
            import trio

            from node.observing.asking import watch
            from protocol.light import quiet_libraries
        quiet_libraries()

        async def main() -> None:
            with trio.CancelScope() as scope:
                self._cancel = scope.cancel
                self._token = trio.lowlevel.current_trio_token()
                if self._stopping:  # it came before there was anything to cancel
                    return
                observer = self._observer
                await watch(observer.picture, observer.counts, observer.publish, interval=observer.interval)

        trio.run(main)

    def stop(self) -> None:
        """End the questions, also those under way."""
        self._stopping = True
        if self._token is None or self._cancel is None:
            return
        import trio

        try:
            self._token.run_sync_soon(self._cancel)
        except trio.RunFinishedError:
            log.debug("the questions have ended already")


def observe(
    invite: Invite, *, http_host: str, http_port: int, interval: float, log_format: str, log_level: str
) -> None:
    """Serve the picture of a swarm until a signal comes.

    Raises:
        SentinelError: the address cannot be listened on.
    """
    configure_logging(log_format, log_level)
    asyncio.run(_serve(Observer(invite, interval=interval), http_host, http_port))


async def _serve(observer: Observer, host: str, port: int) -> None:
    loop, stop = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _leave, stop)
    server = HttpServer(
        observer.metrics, lambda: _with_address(observer.status, address), observer.ready, observer.alive
    )
    address = await server.start(host, port)
    questions = Questions(observer)
    asking = asyncio.create_task(asyncio.to_thread(questions.run))
    waiting = asyncio.create_task(stop.wait())
    shown = f"[{address[0]}]" if ":" in address[0] else address[0]
    click.echo(f"observing swarm {observer.picture.swarm.hex()[:12]} at http://{shown}:{address[1]}/")
    try:
        await asyncio.wait((asking, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        questions.stop()
        await server.close()
        await asking  # raises what ended it, where that was not the signal


def _leave(stop: asyncio.Event) -> None:
    if stop.is_set():  # asked for the second time: at once
        os._exit(130)
    stop.set()


def _with_address(status: dict[str, Any], address: tuple[str, int]) -> dict[str, Any]:
    return {**status, "http": list(address)}
