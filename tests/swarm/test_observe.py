"""``sentinel observe`` on real swarms: it sees every node, tells the silent from the gone, and stays small."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from node.demo_processes import Child
from protocol.identity import Identity
from tests.swarm.harness import Swarm, running, sentinel, small_manifest
from tests.swarm.observer import Observing, observing

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(400)]

PATIENCE = 120.0
HOSTILE_NODES = Path(__file__).with_name("hostile_nodes.py")
MOST_BYTES = 100 * 2**20
ROUNDS = 60
NOBODY = f"sentinel://{'0123456789abcdef' * 4}/ip4/127.0.0.1/tcp/9/p2p/{Identity(bytes(range(32))).peer_id}"


async def test_an_observer_sees_every_node_and_outlives_its_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One swarm for all of it, since each process costs seconds of a small machine."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # the socket folders of killed nodes stay in here
    async with running(tmp_path, small_manifest(training={"steps": 0})) as swarm:
        coordinator = await swarm.coordinate()
        nodes = [*await swarm.fill(1), await swarm.join("second", stage=1)]
        async with observing(tmp_path, swarm.invite) as observer:
            await everybody_is_seen(observer, coordinator, nodes)
            await metrics_are_true(observer, nodes)
            await who_is_killed_is_silent_and_then_gone(observer, nodes[1])
            await the_seed_is_not_needed_any_more(swarm, observer, coordinator, nodes[0])
            assert await observer.leave(signal.SIGTERM) == 0
            assert "Traceback" not in observer.log.read_text()


async def everybody_is_seen(observer: Observing, coordinator: Child, nodes: list[Child]) -> None:
    status = await observer.until(
        lambda status: (
            status["nodes"]["answering"] == 5 and status["state"] == "training" and len(status["losses"]) > 3
        ),
        seconds=PATIENCE,
    )
    assert {(replica["peer"], replica["label"], replica["stage"]) for replica in status["replicas"]} == {
        (node.peer, node.name, node.stage) for node in nodes
    }
    assert all(replica["presence"] == "answering" for replica in status["replicas"])
    assert coordinator.peer not in {replica["peer"] for replica in status["replicas"]}
    assert status["name"] == "test" and status["stages"] == 3 and status["loss"] > 0 and status["observer"] is True
    steps = [step for step, _ in status["losses"]]
    assert steps == sorted(set(steps)) and all(loss > 0 for _, loss in status["losses"])
    status = await observer.until(lambda status: all("standing" in replica for replica in status["replicas"]))
    assert all(0 <= replica["standing"]["trust"] <= 1 for replica in status["replicas"])
    code, text = await observer.get("readyz")
    assert code == 200 and text.startswith("training: step")
    assert (await observer.get("healthz"))[0] == 200
    page = (await observer.get(""))[1]
    assert "Which nodes answer" in page and "trusted by its neighbours" in page


async def metrics_are_true(observer: Observing, nodes: list[Child]) -> None:
    code, text = await observer.get("metrics")
    assert code == 200
    samples: dict[str, dict[tuple[str, ...], float]] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type not in ("", "unknown"), family.name
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sample.labels.values())] = sample.value
    assert samples["sentinel_swarm_nodes"][("answering",)] == 5
    assert samples["sentinel_swarm_step"][()] >= 3 and samples["sentinel_swarm_loss"][()] > 0
    assert samples["sentinel_swarm_stage_replicas"] == {("0",): 1, ("1",): 2, ("2",): 1}
    assert samples["sentinel_swarm_stage_serving_replicas"].keys() == {("0",), ("1",), ("2",)}
    answering = samples["sentinel_swarm_node_answering"]
    assert {(node.peer, str(node.stage)) for node in nodes} <= answering.keys()
    assert set(answering.values()) == {1.0} and len(answering) == 5
    assert all(samples["sentinel_swarm_node_tokens"][node.peer, str(node.stage)] > 0 for node in nodes[::2])
    assert samples["sentinel_swarm_questions_total"][("answered",)] >= 5


async def who_is_killed_is_silent_and_then_gone(observer: Observing, node: Child) -> None:
    node.process.kill()
    await node.process.wait()
    silent = await observer.until(lambda status: presence(status, node) != "answering")
    assert presence(silent, node) == "silent" and silent["nodes"]["silent"] >= 1
    gone = await observer.until(lambda status: presence(status, node) != "silent")  # a lease has 30 s
    assert presence(gone, node) == "gone" and gone["nodes"]["gone"] == 1
    assert next(replica for replica in gone["replicas"] if replica["peer"] == node.peer)["state"] == "gone"


async def the_seed_is_not_needed_any_more(swarm: Swarm, observer: Observing, coordinator: Child, node: Child) -> None:
    coordinator.process.kill()
    await coordinator.process.wait()
    swarm.invite = (await swarm.status(node))["invite"]
    late = await swarm.join("late", stage=2)
    await observer.until(lambda status: presence(status, late) == "answering", seconds=PATIENCE)


def presence(status: dict[str, Any], node: Child) -> str:
    found = [replica["presence"] for replica in status["replicas"] if replica["peer"] == node.peer]
    assert len(found) <= 1
    return found[0] if found else ""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_an_observer_that_nobody_answers_goes_on_trying_and_says_so(tmp_path: Path, number: int) -> None:
    async with observing(tmp_path, NOBODY, "--log-format", "json") as observer:
        assert observer.line.startswith("observing swarm 0123456789ab at http://127.0.0.1:")
        await observer.until(lambda status: status["state"] == "isolated")
        code, text = await observer.get("readyz")
        assert code == 503 and text == "isolated: no node answers, still trying\n"
        assert (await observer.get("healthz"))[0] == 200
        assert '"message": "no node answers, still trying"' in observer.log.read_text()
        assert await observer.leave(number) == 0
        assert "Traceback" not in observer.log.read_text()


async def test_nodes_that_mistreat_an_observer_only_do_not_answer() -> None:
    code, text, errors = await sentinel(program=HOSTILE_NODES)
    assert code == 0, errors
    found = json.loads(text)
    answers = found.pop("answers")
    # The honest one's view holds a claim of a node that is not there, and what is no record.
    assert answers.pop("honest") == "answering" and answers.pop("claimed") == "silent"
    assert set(answers.values()) == {"gone"} and len(answers) == 6
    assert found == {"step": 7, "outline": False, "counts": [2, 13]}


async def test_an_address_that_cannot_be_had_is_one_line(tmp_path: Path) -> None:
    async with observing(tmp_path, NOBODY) as observer:
        port = observer.url.rstrip("/").rpartition(":")[2]
        code, text, errors = await sentinel("observe", NOBODY, "--http-port", port)
        assert (code, text, errors.count("\n")) == (5, "", 1) and f"HTTP port {port} on 127.0.0.1 is in use" in errors
        code, text, errors = await sentinel("observe", NOBODY, "--http-host", "no host")
        assert (code, text, errors.count("\n")) == (2, "", 1) and "correct --http-host" in errors


@pytest.mark.slow
async def test_an_observer_of_twelve_nodes_needs_less_than_100_mib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(tmp_path, small_manifest(training={"steps": 0})) as swarm:
        await swarm.coordinate()
        nodes = await swarm.fill(4)
        async with observing(tmp_path, swarm.invite) as observer:
            status = await observer.until(
                lambda status: status["nodes"]["answering"] == 13 and status["rounds"] >= ROUNDS, seconds=300
            )
            assert {replica["peer"] for replica in status["replicas"]} == {node.peer for node in nodes}
            for path in ("", "metrics", "status"):
                assert (await observer.get(path))[0] == 200
            most = observer.most_memory()
            with capsys.disabled():
                print(
                    f"\nan observer of 12 nodes has had at most {most / 2**20:.1f} MiB resident after {ROUNDS} rounds"
                )
            assert most < MOST_BYTES
            assert await observer.leave(signal.SIGTERM) == 0
