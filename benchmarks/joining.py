"""What joining costs: ``python -m benchmarks.joining [--parameters N] [--json FILE]``.

Donors run in processes of their own, each with its p2pd, and hold the state of a stage of so many parameters (twelve
bytes each: parameters and two moments). A joiner in this process fetches it over encrypted libp2p streams on
loopback, from one donor and from two, and checks every chunk. The rival of the transfer is one plain TCP connection on
loopback that carries the same bytes from a donor into memory here, with nothing checked.

Everything shares this machine, the encryption of both sides included, so on few cores the rates are those of the
processors. What joining does to a donor that trains is therefore also measured at a rate of ``--link`` MiB a second,
as over a fast link to a home: there the donor's compute thread multiplies matrices all the time, and a step is a fixed
number of products.

The JSON is a list of ``{case, ours, rival, rival_name, unit, ratio}``, where ``ratio`` is ours / rival.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks._donor import STEP, SWARM, make_state
from node.averaging import Committed
from node.backlog import Backlog, BacklogLimits
from node.download import Download, DownloadLimits
from node.inquiry import Inquiry
from node.joiner import Joiner
from node.snapshot import Layout
from protocol.errors import SentinelError
from protocol.fields import decode
from protocol.identity import Identity
from protocol.messages import Method, Snapshot, SnapshotAnswer
from protocol.transports.p2p import P2PTransport
from protocol.transports.p2pd import Daemon, DaemonOptions
from protocol.transports.sessions import SessionOptions

PARAMETERS = 10_000_000
LINK_MIB = 25
LEAST_STEPS = 10
REPETITIONS = 3
"""Of each transfer, of which the quickest counts; and of each round of steps without and with a joiner."""
MIB = 1 << 20
PATIENCE = 120.0
PLAIN = "plain TCP on loopback, nothing checked"
IDLE = "the same donor with nobody joining"

Row = dict[str, Any]


class DonorProcess:
    """A donor, and the pipe to it."""

    def __init__(self, process: asyncio.subprocess.Process, facts: dict[str, Any]) -> None:
        self._process = process
        self.peer: str = facts["peer"]
        self.addresses: list[str] = facts["addresses"]
        self.port: int = facts["port"]

    @classmethod
    async def start(cls, parameters: int, bytes_per_second: float = 0.0) -> DonorProcess:
        """A donor that is ready."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "benchmarks._donor", str(parameters), str(bytes_per_second)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        return cls(process, await _line(process))

    async def say(self, command: str) -> dict[str, Any]:
        """Give a command; returns what it answers."""
        assert self._process.stdin is not None
        self._process.stdin.write(command.encode() + b"\n")
        return await _line(self._process)

    async def stop(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()


async def _line(process: asyncio.subprocess.Process) -> dict[str, Any]:
    assert process.stdout is not None
    async with asyncio.timeout(PATIENCE):
        line = await process.stdout.readline()
    if not line:
        raise RuntimeError("a donor has ended")
    found: dict[str, Any] = json.loads(line)
    return found


class Bench:
    """The joiner's side."""

    def __init__(self, transport: P2PTransport, layout: Layout) -> None:
        self.transport = transport
        self.layout = layout

    async def meet(self, parameters: int, bytes_per_second: float = 0.0) -> DonorProcess:
        """A new donor that this side can reach."""
        donor = await DonorProcess.start(parameters, bytes_per_second)
        self.transport.learn(donor.peer, donor.addresses)
        return donor

    async def describe(self, donor: DonorProcess) -> SnapshotAnswer:
        """Have a donor freeze its state."""
        message = Snapshot(step=STEP)
        response = await self.transport.call(donor.peer, Method.SNAPSHOT, message, timeout=PATIENCE)
        return decode(SnapshotAnswer, response.head)

    async def download(self, donors: Sequence[DonorProcess]) -> float:
        """Fetch the frozen state of these donors; returns the seconds that it took."""
        answers = [await self.describe(donor) for donor in donors]
        download = Download(self.transport, answers[0], self.layout, limits=DownloadLimits(), on_dropped=_fail)
        started = time.perf_counter()
        await download.run([donor.peer for donor in donors])
        assert download.complete
        return time.perf_counter() - started

    async def join(self, donors: Sequence[DonorProcess]) -> float:
        """All of it, from the first question to a state that can be loaded; returns seconds."""
        peers = [donor.peer for donor in donors]
        inquiry = Inquiry(transport=self.transport, siblings=lambda: peers, introduce=_introduced)
        joiner = Joiner(
            transport=self.transport,
            layout=self.layout,
            inquiry=inquiry,
            claimed=lambda step: {},
            tell=lambda text: None,
            on_false=_fail,
            rng=random.Random(0),
        )
        backlog = Backlog(fetch=_nothing_yet, reached=inquiry.reached, limits=BacklogLimits(size=1))
        started = time.perf_counter()
        try:
            await joiner.fetch(backlog)
        finally:
            await backlog.close()
        return time.perf_counter() - started


def _fail(peer: str, error: SentinelError) -> None:
    raise AssertionError(f"{peer}: {error}")


async def _introduced(peer: str) -> bool:
    return True


async def _nothing_yet(step: int) -> Committed:
    await asyncio.Event().wait()
    raise AssertionError


def _receive_plainly(port: int, size: int) -> float:
    """Read so many bytes from a TCP port into memory that has been touched; returns seconds."""
    data = memoryview(torch.ones(size, dtype=torch.uint8).numpy())  # type: ignore[arg-type]
    with socket.create_connection(("127.0.0.1", port)) as connection:
        started = time.perf_counter()
        done = 0
        while done < size:
            count = connection.recv_into(data[done:])
            assert count, "the donor closed the connection"
            done += count
        return time.perf_counter() - started


@contextlib.asynccontextmanager
async def _bench(parameters: int) -> AsyncIterator[Bench]:
    layout = Layout.of(make_state(parameters))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "identity.key"
        Identity.load_or_create(path)
        daemon = Daemon(DaemonOptions(identity_path=str(path)))
        await daemon.start()
        transport = P2PTransport(daemon, options=SessionOptions(swarm=SWARM))
        try:
            await transport.start()
            yield Bench(transport, layout)
        finally:
            await transport.close()
            await daemon.stop()


def _row(case: str, ours: float, rival: float, rival_name: str, unit: str) -> Row:
    return {
        "case": case,
        "ours": round(ours, 4),
        "rival": round(rival, 4),
        "rival_name": rival_name,
        "unit": unit,
        "ratio": round(ours / rival, 3) if rival else None,
    }


async def _transfer(bench: Bench, parameters: int) -> list[Row]:
    """Rates with one donor and with two, and what a freeze costs."""
    donors = await asyncio.gather(*(bench.meet(parameters) for _ in range(2)))
    size = bench.layout.size
    try:
        idle = await _longest_pause(donors[0])
        await donors[0].say("mark")
        plain = await asyncio.to_thread(_receive_plainly, donors[0].port, size)
        plainly = (await donors[0].say("stats"))["cpu"]
        await donors[0].say("mark")
        started = time.perf_counter()
        await bench.describe(donors[0])
        described = time.perf_counter() - started
        frozen = await donors[0].say("stats")
        one = await bench.download(donors[:1])
        stats = await donors[0].say("stats")
        given = stats["cpu"] - frozen["cpu"]
        two = await bench.download(donors)
        for _ in range(REPETITIONS - 1):  # in turns, since the load of a machine comes and goes
            plain = min(plain, await asyncio.to_thread(_receive_plainly, donors[0].port, size))
            one = min(one, await bench.download(donors[:1]))
            two = min(two, await bench.download(donors))
        both = await bench.join(donors)
        packed = (await donors[1].say("pack"))["seconds"]
    finally:
        await asyncio.gather(*(donor.stop() for donor in donors))
    name = f"{parameters / 1e6:g} M parameters, {size / MIB:.0f} MiB"
    old = "clones and a safetensors file"
    return [
        _row(f"{name}: download from 1 donor", size / one / MIB, size / plain / MIB, PLAIN, "MiB/s"),
        _row(f"{name}: download from 2 donors", size / two / MIB, size / plain / MIB, PLAIN, "MiB/s"),
        _row(f"{name}: from the first question to the state, 2 donors", both, plain, PLAIN, "s"),
        _row(f"{name}: an update waits for the copy", frozen["locked"], packed, old, "s"),
        _row(f"{name}: copy and hashes, beside the training", described, packed, old, "s"),
        _row(f"{name}: processor time of the donor and its p2pd for giving it", given, plainly, PLAIN, "s"),
        _row(f"{name}: longest pause of the donor's event loop", stats["pause"], idle, IDLE, "s"),
    ]


async def _longest_pause(donor: DonorProcess) -> float:
    """Of an event loop with nothing to do."""
    await donor.say("mark")
    await asyncio.sleep(2.0)
    return float((await donor.say("stats"))["pause"])


async def _beside_training(bench: Bench, parameters: int, link: float) -> list[Row]:
    """How much longer a donor's steps take while it gives its state at the rate of a link."""
    donor = await bench.meet(parameters, link * MIB)
    alone: list[float] = []
    beside: list[float] = []
    try:
        await donor.say("train")
        for _ in range(REPETITIONS):
            await donor.say("mark")
            while len(steps := (await donor.say("stats"))["steps"]) < LEAST_STEPS:  # noqa: ASYNC110 - another process
                await asyncio.sleep(0.2)
            alone += steps
            await donor.say("mark")
            await bench.join([donor])
            beside += (await donor.say("stats"))["steps"]
        await donor.say("rest")
    finally:
        await donor.stop()
    case = f"{parameters / 1e6:g} M parameters: step of a donor that gives its state at {link:g} MiB/s"
    return [_row(case, _median(beside), _median(alone), IDLE, "s")]


def _median(steps: list[float]) -> float:
    return statistics.median(steps) if steps else 0.0


async def measure(parameters: int, link: float) -> list[Row]:
    """All rows."""
    async with _bench(parameters) as bench:
        return [*await _transfer(bench, parameters), *await _beside_training(bench, parameters, link)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.joining", description="What joining a stage costs.")
    parser.add_argument("--parameters", type=int, default=PARAMETERS, metavar="N", help="of the stage")
    parser.add_argument("--link", type=float, default=LINK_MIB, metavar="MIB", help="a second, for the last row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to this file")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    rows = uvloop.run(measure(options.parameters, options.link))
    for row in rows:
        ratio = f" = {row['ratio']:.2f} x" if row["ratio"] is not None else ""
        print(f"{row['case']}: {row['ours']:g} {row['unit']}; {row['rival_name']}: {row['rival']:g}{ratio}")
    if options.json is not None:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
