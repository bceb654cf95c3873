"""One donor of ``benchmarks.joining``, in a process of its own: it "trains", gives its state, and tells what that cost.

Prints one line of JSON when it is ready, and one for each line that it reads: ``mark`` begins a measurement, and
``stats`` ends it. Ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import safetensors.torch
import torch
import uvloop

from node.digest import parameter_digest
from node.snapshot import Layout, StageState
from node.statesync import DonorLimits, StateServer
from protocol.identity import Identity
from protocol.messages import Method
from protocol.transports.base import Request, Response, Route
from protocol.transports.p2p import P2PTransport
from protocol.transports.p2pd import Daemon, DaemonOptions
from protocol.transports.sessions import SessionOptions

STEP = 1
SWARM = b"\x07" * 32
PROBE_SECONDS = 0.005
WORK = 384
"""Width of the matrices whose products are the work of a step; one takes about a millisecond."""
PRODUCTS = 50
"""In a step."""


def make_state(parameters: int) -> StageState:
    """The same bits in every process."""
    generator = torch.Generator().manual_seed(parameters)
    ramp = torch.randn(1 << 16, generator=generator).repeat(-(-parameters // (1 << 16)))[:parameters]
    return StageState(
        step=STEP,
        parameters=ramp.clone(),
        optimizer={"exp_avg": ramp * 0.1, "exp_avg_sq": ramp * ramp, "step": torch.tensor([STEP])},
    )


class Donor:
    """Gives one state, and measures."""

    def __init__(self, transport: P2PTransport, state: StageState, *, bytes_per_second: float) -> None:
        self._state = state
        self._digest = parameter_digest(state.parameters)
        self._rate = bytes_per_second
        self._next = 0.0
        self.layout = Layout.of(state)
        self.locked = 0.0
        """Seconds for which an update would have had to wait, the last time."""
        self.pause = 0.0
        """The longest time for which the event loop did not turn."""
        self.steps: list[float] = []
        self.training = threading.Event()
        self.ended = False
        self._cpu = 0.0
        self._server = StateServer(
            transport,
            layout=self.layout,
            freeze=self._freeze,
            digest=self._digest,
            is_sibling=lambda peer: True,
            limits=DonorLimits(freezing_share=1e9),
        )
        self._server.stands_at(STEP, self._digest)
        transport.serve(Method.CHUNK, Route(handler=self._serve_chunk))

    async def _freeze(self, copy: Callable[[StageState], None]) -> tuple[int, bytes]:
        started = time.perf_counter()
        await asyncio.to_thread(copy, self._state)
        self.locked = time.perf_counter() - started
        return STEP, self._digest

    async def _serve_chunk(self, request: Request) -> Response:
        """As it is, or no faster than a link of this rate would be."""
        if self._rate:
            now = asyncio.get_running_loop().time()
            self._next = max(now, self._next) + self.layout.chunk_bytes / self._rate
            await asyncio.sleep(self._next - now)
        return await self._server._serve_chunk(request)

    async def probe(self) -> None:
        """Notice when the event loop stands still."""
        while True:
            before = time.perf_counter()
            await asyncio.sleep(PROBE_SECONDS)
            self.pause = max(self.pause, time.perf_counter() - before - PROBE_SECONDS)

    def train(self) -> None:
        """Work like a compute thread."""
        left, right = torch.randn(WORK, WORK), torch.randn(WORK, WORK)
        while not self.ended:
            self.training.wait()
            started = time.perf_counter()
            for _ in range(PRODUCTS):
                torch.mm(left, right)
            self.steps.append(time.perf_counter() - started)

    def work(self) -> dict[str, Any]:
        """Train from now on."""
        self.training.set()
        return {}

    def rest(self) -> dict[str, Any]:
        """Stop after this step."""
        self.training.clear()
        return {}

    def mark(self) -> dict[str, Any]:
        """Begin to measure."""
        self.pause, self.steps, self._cpu = 0.0, [], _cpu_seconds()
        return {}

    def stats(self) -> dict[str, Any]:
        """What has been measured, in seconds."""
        return {
            "pause": self.pause,
            "locked": self.locked,
            "steps": list(self.steps),
            "cpu": _cpu_seconds() - self._cpu,
        }

    def pack_as_file(self) -> dict[str, Any]:
        """Copy the state as a safetensors file would have it: clones, then the file."""
        started = time.perf_counter()
        safetensors.torch.save({name: tensor.clone() for name, tensor in self._state.tensors().items()})
        return {"seconds": time.perf_counter() - started}

    def image(self) -> torch.Tensor:
        """The bytes of the state."""
        image = self.layout.image()
        self.layout.pack(self._state, image)
        return image

    def send_plainly(self, listener: socket.socket, image: torch.Tensor) -> None:
        """Send the same bytes over plain TCP to everybody who connects."""
        data = image.numpy().data
        while True:
            peer, _ = listener.accept()
            with peer:
                peer.sendall(data)


async def run(parameters: int, bytes_per_second: float) -> None:
    """Be a donor until standard input ends."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "identity.key"
        Identity.load_or_create(path)
        daemon = Daemon(DaemonOptions(identity_path=str(path)))
        await daemon.start()
        transport = P2PTransport(daemon, options=SessionOptions(swarm=SWARM))
        try:
            await transport.start()
            await serve(Donor(transport, make_state(parameters), bytes_per_second=bytes_per_second), daemon)
        finally:
            await transport.close()
            await daemon.stop()


async def serve(donor: Donor, daemon: Daemon) -> None:
    """Answer commands."""
    loop = asyncio.get_running_loop()
    probing = loop.create_task(donor.probe())
    listener = socket.create_server(("127.0.0.1", 0))
    training = threading.Thread(target=donor.train)
    training.start()
    threading.Thread(target=donor.send_plainly, args=(listener, donor.image()), daemon=True).start()
    _say({"peer": str(daemon.p2p.peer_id), "addresses": await daemon.addresses(), "port": listener.getsockname()[1]})
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    commands: dict[str, Callable[[], dict[str, Any]]] = {
        "mark": donor.mark,
        "stats": donor.stats,
        "pack": donor.pack_as_file,
        "train": donor.work,
        "rest": donor.rest,
    }
    while line := await reader.readline():
        _say(commands[line.decode().strip()]())
    probing.cancel()
    donor.ended = True
    donor.training.set()
    training.join()


def _cpu_seconds() -> float:
    """Processor time of this process and of its p2pd."""
    times = [psutil.Process().cpu_times(), *(child.cpu_times() for child in psutil.Process().children())]
    return sum(float(each.user + each.system) for each in times)


def _say(facts: dict[str, Any]) -> None:
    print(json.dumps(facts), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(run(int(sys.argv[1]), float(sys.argv[2])))
