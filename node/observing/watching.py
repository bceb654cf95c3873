"""``sentinel status --watch``: the swarm on the terminal, drawn anew until Ctrl-C. Runs on trio."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.live import Live

from node.log import configure_logging
from node.observing.counts import Counts
from node.observing.lean import left_out
from node.observing.live import line, table
from node.observing.picture import Picture, Presence
from node.observing.told import numbers
from protocol.invite import Invite


class Watching:
    """What was seen, and how it is shown: as a table that changes, or on no terminal as one line a round."""

    def __init__(self, invite: Invite, console: Console) -> None:
        self.picture = Picture(swarm=bytes.fromhex(invite.swarm_id))
        self.picture.add_seeds(((seed.peer_id, seed.text) for seed in invite.seeds), time.time())
        self.counts = Counts()
        self.broken = False
        """Whether whoever reads the lines has gone."""
        self._answered = 0.0
        self._console = console
        self._live: Live | None = None
        self._shown: RenderableType = "asking the nodes of the invite"

    @contextlib.contextmanager
    def showing(self) -> Iterator[None]:
        """Draw while the block runs; the last picture stays on the terminal."""
        if not self._console.is_terminal:
            yield
            return
        self._live = Live(console=self._console, get_renderable=lambda: self._shown, refresh_per_second=1)
        with self._live:
            yield

    def publish(self) -> None:
        """Show the picture as it is now; called after each round."""
        now = time.time()
        if self.picture.answering():
            self._answered = now
            if self.picture.rounds == 1 and numbers(self.picture)[Presence.UNASKED.value]:
                return  # the seeds have told of others, who are asked in a moment
        if self._live is not None:
            self._shown = table(self.picture, now, answered=self._answered)
            self._live.refresh()
            return
        try:
            print(line(self.picture, now, answered=self._answered), flush=True)
        except BrokenPipeError:
            self.broken = True


def watch_swarm(invite: Invite, *, interval: float) -> None:
    """Show a swarm until SIGINT or SIGTERM comes, or whoever reads has enough."""
    with left_out():
        import trio

        from node.observing.asking import watch
        from protocol.light import quiet_libraries
    configure_logging("text", "warning")
    quiet_libraries()
    watching = Watching(invite, Console())

    async def main() -> None:
        async with trio.open_nursery() as nursery:

            async def end_on_signal() -> None:
                with trio.open_signal_receiver(signal.SIGINT, signal.SIGTERM) as signals:
                    async for _ in signals:
                        signal.signal(signal.SIGINT, lambda *_: os._exit(130))  # the second time: at once
                        nursery.cancel_scope.cancel()
                        return

            def publish() -> None:
                watching.publish()
                if watching.broken:
                    nursery.cancel_scope.cancel()

            nursery.start_soon(end_on_signal)
            await watch(watching.picture, watching.counts, publish, interval=interval)

    with watching.showing():
        trio.run(main)
    if watching.broken:
        raise BrokenPipeError
