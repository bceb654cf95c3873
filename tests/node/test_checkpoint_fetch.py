"""A checkpoint's file from peers that die, are busy or lie: what is used in the end is what most had offered."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import torch

from node import checkpoint_fetch
from node.checkpoint_fetch import NoCheckpointError, Offer, ask_offers, best_offer, fetch, largest_file
from node.checkpoint_server import CheckpointServer
from node.checkpoints import CheckpointStore, find_checkpoints, read_checkpoint
from node.digest import parameter_digest
from protocol.errors import RefusedError
from protocol.messages import MAX_CHECKPOINT_PART_BYTES, CheckpointPart, CheckpointQuery, Method
from protocol.transports.base import Request, Response, Route
from protocol.transports.memory import MemoryNetwork, MemoryTransport
from protocol.transports.sessions import SessionOptions
from tests.node.test_checkpoints import MANIFEST, NOW, state_of

STEP = 20
PATIENCE = 20.0
PART = 256


class Peers:
    """Peers with a checkpoint of stage 0 each, and one that fetches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.network = MemoryNetwork()
        self.transports: list[MemoryTransport] = []
        self.servers: dict[str, CheckpointServer] = {}
        self.me = self.transport("me")

    def transport(self, name: str) -> MemoryTransport:
        made = MemoryTransport(self.network, name, options=SessionOptions(swarm=bytes(32)))
        self.transports.append(made)
        return made

    def peer(self, name: str, *steps: int, seed: int = 0) -> Path:
        """A peer that has checkpoints of these steps; returns its folder."""
        store = CheckpointStore(self.folder / name, MANIFEST, keep=9)
        for step in steps:
            store.save(0, state_of(step, seed=seed), now=NOW)
        self.servers[name] = CheckpointServer(self.transport(name), lambda: [self.folder / "none", store.folder])
        return store.folder

    def spoil(
        self,
        name: str,
        spoiled: Callable[[Request, Response], Awaitable[Response]],
        method: Method = Method.CHECKPOINT_PART,
    ) -> None:
        """Change what a peer gives."""
        transport = next(transport for transport in self.transports if transport.peer_id == name)
        handler = transport._routes[method].handler

        async def changed(request: Request) -> Response:
            return await spoiled(request, await handler(request))

        transport.serve(method, Route(handler=changed))

    async def offer(self, *names: str) -> Offer:
        told = await ask_offers(self.me, names, 0)
        found = best_offer(told, at_most=10_000, largest=largest_file(MANIFEST, 0))
        assert found is not None
        return found

    async def fetch(self, offer: Offer) -> Path:
        async with asyncio.timeout(PATIENCE):
            found = await fetch(self.me, offer, manifest=MANIFEST, stage=0, folder=self.folder / "got")
        return found.path

    async def close(self) -> None:
        for server in self.servers.values():
            server.close()
        await asyncio.gather(*(transport.close() for transport in self.transports))


@pytest.fixture
async def peers(tmp_path: Path, no_tasks_left: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Peers]:
    """Peers whose parts are small, so that a file has many."""
    monkeypatch.setattr(checkpoint_fetch, "MAX_CHECKPOINT_PART_BYTES", PART)
    monkeypatch.setattr(checkpoint_fetch, "BUSY_SECONDS", 0.0)
    made = Peers(tmp_path)
    yield made
    await made.close()


def is_whole(path: Path) -> bool:
    """Whether a file holds the state of all honest peers."""
    _, state = read_checkpoint(path)
    return torch.equal(state.parameters, state_of(STEP).parameters)


async def test_a_checkpoint_comes_over_whole(peers: Peers) -> None:
    peers.peer("a", 10, STEP)
    offer = await peers.offer("a")
    assert (offer.step, offer.peers) == (STEP, ("a",))
    assert offer.parameters == parameter_digest(state_of(STEP).parameters)
    assert offer.size > 3 * PART
    assert is_whole(await peers.fetch(offer))
    assert [path.name for path in find_checkpoints(peers.folder / "got")] == [f"stage-0-step-{STEP}.safetensors"]


async def test_who_has_nothing_offers_nothing_and_who_does_not_answer_is_left_out(peers: Peers) -> None:
    peers.peer("a")
    told = await ask_offers(peers.me, ["a", "nobody"], 0)
    assert set(told) == {"a"} and told["a"].steps == ()


async def test_another_peer_takes_over_in_the_middle(peers: Peers) -> None:
    peers.peer("a", STEP)
    peers.peer("b", STEP)

    async def dies(request: Request, response: Response) -> Response:
        if request.head["offset"]:
            peers.network.remove("a")
            peers.me.drop_links("a")
        return response

    peers.spoil("a", dies)
    assert is_whole(await peers.fetch(await peers.offer("a", "b")))


async def test_false_bytes_are_found_and_the_honest_peer_gives_all_of_it(peers: Peers) -> None:
    peers.peer("a", STEP)
    peers.peer("b", STEP)

    async def flips(request: Request, response: Response) -> Response:
        data = bytearray(response.data)
        data[-1] ^= 1
        return Response(body=(bytes(data),))

    peers.spoil("a", flips)
    assert is_whole(await peers.fetch(await peers.offer("a", "b")))


@pytest.mark.parametrize("length", [0, 1, PART + 1])
async def test_a_part_of_another_size_is_not_taken(peers: Peers, length: int) -> None:
    peers.peer("a", STEP)
    peers.peer("b", STEP)

    async def other_size(request: Request, response: Response) -> Response:
        return Response(body=(bytes(length),))

    peers.spoil("a", other_size)
    assert is_whole(await peers.fetch(await peers.offer("a", "b")))


async def test_a_sound_file_with_other_parameters_than_offered_is_not_used(peers: Peers) -> None:
    peers.peer("a", STEP)
    peers.peer("liar", STEP, seed=1)
    offer = await peers.offer("a")
    lie = Offer(step=offer.step, size=offer.size, parameters=offer.parameters, peers=("liar",))
    with pytest.raises(NoCheckpointError, match="other parameters than were offered"):
        await peers.fetch(lie)
    assert find_checkpoints(peers.folder / "got") == [] and list((peers.folder / "got").iterdir()) == []


async def test_busy_peers_are_asked_again(peers: Peers) -> None:
    peers.peer("a", STEP)
    left = 5

    async def busy(request: Request, response: Response) -> Response:
        nonlocal left
        left -= 1
        if left > 0:
            raise RefusedError("other checkpoints are being read just now", kind="busy")
        return response

    peers.spoil("a", busy)
    assert is_whole(await peers.fetch(await peers.offer("a")))


async def test_peers_that_are_busy_for_ever_are_given_up(peers: Peers) -> None:
    peers.peer("a", STEP)

    async def busy(request: Request, response: Response) -> Response:
        raise RefusedError("other checkpoints are being read just now", kind="busy")

    peers.spoil("a", busy)
    with pytest.raises(NoCheckpointError):
        await peers.fetch(await peers.offer("a"))


async def test_what_was_offered_can_be_fetched_though_it_was_removed_since(peers: Peers) -> None:
    folder = peers.peer("a", STEP)
    offer = await peers.offer("a")
    for path in find_checkpoints(folder):
        path.unlink()
    assert is_whole(await peers.fetch(offer))
    assert (await ask_offers(peers.me, ["a"], 0))["a"].steps == (STEP,), "it is there for others as well"
    peers.servers["a"].close()
    assert (await ask_offers(peers.me, ["a"], 0))["a"].steps == ()
    with pytest.raises(NoCheckpointError):
        await peers.fetch(offer)


async def test_nodes_whose_checkpoints_are_always_new_give_those_that_they_offered(peers: Peers) -> None:
    """Between any two requests the node writes another checkpoint, and keeps one."""
    folder = peers.peer("a", STEP)
    step = STEP

    async def trains_on(request: Request, response: Response) -> Response:
        nonlocal step
        step += MANIFEST.training.checkpoint_steps
        CheckpointStore(folder.parent, MANIFEST, keep=1).save(0, state_of(step), now=NOW)
        return response

    for method in (Method.CHECKPOINTS, Method.CHECKPOINT_PART):
        peers.spoil("a", trains_on, method)
    for _ in range(4):
        offer = await peers.offer("a")
        assert offer.step not in {int(path.stem.rpartition("-")[2]) for path in find_checkpoints(folder)}
        assert (await peers.fetch(offer)).exists()


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (CheckpointPart(stage=0, step=STEP, offset=1 << 40, length=1), "range"),
        (CheckpointPart(stage=0, step=STEP + 1, offset=0, length=1), "too_old"),
        (CheckpointPart(stage=1000, step=STEP, offset=0, length=1), "too_old"),
    ],
)
async def test_what_there_is_not_is_refused(peers: Peers, message: CheckpointPart, kind: str) -> None:
    peers.peer("a", STEP)
    with pytest.raises(RefusedError) as caught:
        await peers.me.call("a", Method.CHECKPOINT_PART, message, timeout=PATIENCE, reply_limit=1)
    assert caught.value.kind == kind


async def test_one_peer_has_one_answer_at_a_time(peers: Peers) -> None:
    peers.peer("a", STEP)
    message = CheckpointPart(stage=0, step=STEP, offset=0, length=MAX_CHECKPOINT_PART_BYTES)
    calls = [
        peers.me.call("a", Method.CHECKPOINT_PART, message, timeout=PATIENCE, reply_limit=1 << 18) for _ in range(8)
    ]
    answers = await asyncio.gather(*calls, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, RefusedError)]
    assert refused and all(answer.kind == "busy" for answer in refused)
    assert len(refused) < len(answers)


async def test_a_damaged_file_is_not_offered(peers: Peers) -> None:
    folder = peers.peer("a", 10, STEP)
    (folder / f"stage-0-step-{STEP}.safetensors").write_bytes(b"\xff" * 100)
    response = await peers.me.call("a", Method.CHECKPOINTS, CheckpointQuery(stage=0), timeout=PATIENCE)
    assert response.head["steps"] == [10]
