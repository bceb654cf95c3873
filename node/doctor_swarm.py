"""The part of ``sentinel doctor`` that asks a swarm: is it there, does its work fit here, can its nodes reach us?"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from node import bandwidth
from node.admission_file import AdmissionFile, known_here
from node.dialback import TOKEN_BYTES
from node.doctor import Plan, available_bytes, on_gpu
from node.estimate import stage_memory
from node.findings import Finding, bad, good, note
from node.settings import MAX_CLOCK_OFFSET_SECONDS
from protocol import fields
from protocol.admissions import DAY_SECONDS, Standing
from protocol.errors import RemoteError, SentinelError
from protocol.identity import Identity
from protocol.invite import Invite, parse_multiaddr
from protocol.manifest import Manifest
from protocol.messages import DialBack, DialBackAnswer, Method
from protocol.records import Claim, NodeState

if TYPE_CHECKING:
    from protocol.light import LightSession

GOOD_CLOCK_OFFSET_SECONDS = 1.0
SLOW_SECONDS = 0.5
DIALLED = 12
"""Nodes that are dialled, to see how many can be."""
DIAL_SECONDS = 3.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """What a node of the swarm said."""

    manifest: Manifest
    claims: tuple[Claim, ...]
    round_trip: float
    """Seconds."""
    clock_offset: float
    """Seconds by which its clock is ahead."""
    dialled_back: DialBackAnswer | str
    """The answer, or why there is none."""


def swarm(plan: Plan, invite: Invite) -> list[Finding]:
    """Ask the first node of the invite that answers, and judge what it says."""
    from protocol.light import run_light  # py-libp2p, which cannot be in one process with hivemind

    with listening(plan.host, plan.port) as (port, token, shown):
        try:
            said = run_light(lambda session: _ask(session, invite, port, token), invite.addresses, seconds=plan.seconds)
        except SentinelError as error:
            return [bad("swarm", str(error), "check the invite, or ask for the one of another node")]
        reached = shown()
    text = f"{said.manifest.name}, {len(said.claims)} nodes; {said.round_trip * 1000:.0f} ms there and back"
    found = [good("swarm", text)]
    if said.round_trip > SLOW_SECONDS:
        found.append(note("network", "the node of the invite is slow to answer", "expect little; try a nearer swarm"))
    found.append(clock(said.clock_offset))
    if said.manifest.admission.mode == "invited":
        found.append(admission(said.manifest, plan.state_dir, now=time.time()))
    found.extend(fit(said.manifest, said.claims, available_bytes(plan), gpu=on_gpu(plan)))
    found.append(reachability(said.dialled_back, reached=reached, chosen=plan.port != 0))
    found.append(peers(said.claims, dials))
    found.append(bandwidth.judge(bandwidth.measure(said.manifest, said.claims, seconds=plan.seconds), said.manifest))
    return found


async def _ask(session: LightSession, invite: Invite, port: int, token: bytes) -> Answers:
    swarm = bytes.fromhex(invite.swarm_id)
    began = time.time()
    hello = await session.hello(swarm)
    round_trip = time.time() - began
    frame = await session.request(Method.MANIFEST)
    manifest = Manifest.from_bytes(bytes(frame.body), expected_swarm_id=invite.swarm_id)
    records = await session.records(swarm)
    dialled: DialBackAnswer | str = "nothing listens on the port"
    if port:
        try:
            answer = await session.request(Method.DIAL_BACK, DialBack(port=port, token=token))
            dialled = fields.decode(DialBackAnswer, answer.head)
        except RemoteError as error:
            dialled = str(error)
    return Answers(
        manifest=manifest,
        claims=tuple(record for record in records if isinstance(record, Claim)),
        round_trip=round_trip,
        clock_offset=hello.time + round_trip / 2 - time.time(),
        dialled_back=dialled,
    )


# judging; pure -------------------------------------------------------------------------------


def clock(offset: float) -> Finding:
    """How far the clocks are apart."""
    text = f"{abs(offset):.1f} s {'behind' if offset > 0 else 'ahead of'} that of the node that was asked"
    if abs(offset) > MAX_CLOCK_OFFSET_SECONDS:
        return bad("clock", text, "set this machine's clock, for instance with chrony or systemd-timesyncd")
    if abs(offset) > GOOD_CLOCK_OFFSET_SECONDS:
        return note("clock", text, "let a time service keep this machine's clock")
    return good("clock", text)


def admission(manifest: Manifest, state_dir: Path, *, now: float) -> Finding:
    """Whether an invited swarm has admitted this machine's identity, as far as its state folder tells."""
    name = "admission"
    try:
        peer = Identity.load(state_dir / "identity.key").peer_id
        roll = known_here(AdmissionFile(state_dir), manifest, now)
    except SentinelError:
        return note(name, "by peer id, and there is no identity here yet", "`sentinel join` makes one, and waits")
    standing, known = roll.standing(peer, now), roll.of(peer)
    if standing is Standing.ADMITTED:
        return good(
            name, f"admitted for {(known.expires - now) / DAY_SECONDS:.0f} days" if known else "the coordinator"
        )
    return note(name, f"by peer id; this one is {standing} here", f"ask the coordinator to run: sentinel admit {peer}")


def fit(manifest: Manifest, claims: tuple[Claim, ...], free: int | None, *, gpu: bool = False) -> list[Finding]:
    """Whether any stage fits, and which ones need somebody. ``free`` is the memory of the GPU, if there is one."""
    stages = range(manifest.num_stages)
    memory = [stage_memory(manifest, stage) for stage in stages]
    needed = [each.device if gpu else each.total for each in memory]
    alive = [claim for claim in claims if claim.state not in (NodeState.DRAINING, NodeState.EJECTED)]
    empty = [stage for stage in stages if not any(claim.stage == stage for claim in alive)]
    fitting = [stage for stage in stages if free is None or needed[stage] <= free]
    least = min(needed) / 2**30
    if not fitting:
        return [bad("stages", f"none fits: the smallest needs {least:.1f} GiB", "use a machine with more memory")]
    text = f"{len(fitting)} of {manifest.num_stages} fit here"
    if empty:
        text += f"; nobody holds {', '.join(map(str, empty[:8]))}"
    found = [good("stages", text)]
    if len(fitting) < manifest.num_stages:
        large = max(needed) / 2**30
        found.append(note("stages", f"the largest needs {large:.1f} GiB", "nothing: another node can take that one"))
    return found


def reachability(answer: DialBackAnswer | str, *, reached: bool, chosen: bool) -> Finding:
    """Whether the swarm's nodes can connect to this one."""
    name = "reachable"
    advice = "forward the port in your router and name it with --port; or leave --reach on, for relays"
    if isinstance(answer, str):
        return note(name, f"not known: {answer}", "try again later, or with the invite of another node")
    if answer.reached and reached:
        return good(name, f"a node of the swarm connected to {answer.host}")
    if answer.reached:
        return note(name, f"something else answers at {answer.host}", advice)
    if not chosen:
        return note(name, f"not at {answer.host}, and without --port every start takes another port", advice)
    return note(name, f"nobody could connect to {answer.host}", advice)


def peers(claims: tuple[Claim, ...], dialled: Callable[[str], bool]) -> Finding:
    """Whether this machine can connect to the nodes."""
    places = [address for claim in claims[:DIALLED] for address in claim.addresses[:1]]
    if not places:
        return good("peers", "none yet: this node would be among the first")
    reached = sum(map(dialled, places))
    text = f"{reached} of {len(places)} nodes can be connected to from here"
    if not reached:
        return bad("peers", text, "let outgoing TCP connections through your firewall")
    if reached < len(places):
        return note("peers", text, "nothing, if the others are behind relays; else look at your firewall")
    return good("peers", text)


# the network ---------------------------------------------------------------------------------


def dials(address: str) -> bool:
    """Whether a TCP connection to a multiaddr can be opened."""
    try:
        place = parse_multiaddr(address)
        with socket.create_connection((place.host, place.port), timeout=DIAL_SECONDS):
            return True
    except (SentinelError, OSError):
        return False


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[tuple[int, bytes, Callable[[], bool]]]:
    """Listen as the node would: the port (0 if it is taken), a token, and whether somebody has shown that."""
    token = secrets.token_bytes(TOKEN_BYTES)
    seen = threading.Event()
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listener:
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host, port))
            listener.listen(4)
        except OSError:
            yield 0, token, seen.is_set
            return
        watcher = threading.Thread(target=_watch, args=(listener, token, seen), daemon=True)
        watcher.start()
        yield listener.getsockname()[1], token, lambda: seen.wait(1.0)
        listener.shutdown(socket.SHUT_RDWR)
        watcher.join()


def _watch(listener: socket.socket, token: bytes, seen: threading.Event) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:  # shut down
            return
        with connection, contextlib.suppress(OSError):
            connection.settimeout(DIAL_SECONDS)
            data = b""
            while len(data) < TOKEN_BYTES and (more := connection.recv(TOKEN_BYTES - len(data))):
                data += more
            if data == token:
                seen.set()
