"""``sentinel status``: the swarm as one of its nodes sees it. Imports neither torch nor hivemind."""

from __future__ import annotations

from typing import Any

from protocol.invite import Invite
from protocol.light import LightSession, run_light
from protocol.records import Accusation, Claim


def look(invite: Invite, *, seconds: float) -> dict[str, Any]:
    """Ask the first seed that answers for its status and its view.

    Raises:
        SentinelError: nobody answers, or it is another swarm.
    """
    swarm = bytes.fromhex(invite.swarm_id)

    async def ask(session: LightSession) -> dict[str, Any]:
        await session.hello(swarm)
        status = await session.status()
        records = await session.records(swarm)
        return {
            "seed": status,
            "claims": [_claim(record) for record in records if isinstance(record, Claim)],
            "accusations": [_accusation(record) for record in records if isinstance(record, Accusation)],
        }

    return run_light(ask, invite.addresses, seconds=seconds)


def _claim(claim: Claim) -> dict[str, Any]:
    return {
        "peer": claim.peer,
        "stage": claim.stage,
        "label": claim.label,
        "state": claim.state.value,
        "step": claim.step,
        "digest": claim.digest.hex(),
        "drill": claim.drill,
    }


def _accusation(accusation: Accusation) -> dict[str, Any]:
    return {
        "accuser": accusation.accuser,
        "accuser_stage": accusation.accuser_stage,
        "accused": accusation.accused,
        "accused_stage": accusation.accused_stage,
        "reason": accusation.reason,
        "step": accusation.step,
    }


def render(found: dict[str, Any]) -> str:
    """The status as text. Everything that peers chose is printable and short by the records' rules."""
    seed = found["seed"]
    claims = sorted(found["claims"], key=lambda claim: (claim["stage"], claim["peer"]))
    stages = seed.get("stages") or 0
    step = max((claim["step"] for claim in claims), default=0)
    loss = seed.get("loss")
    lines = [
        f"swarm {_plain(seed.get('name'))!s} ({_plain(seed.get('swarm'))[:12]}), step {step}"
        + (f" of {seed['steps']}" if seed.get("steps") else "")
        + (f", loss {loss:.3f}" if isinstance(loss, float) else "")
    ]
    for stage in range(int(stages)):
        here = [claim for claim in claims if claim["stage"] == stage]
        lines.append(f"stage {stage}: {len(here)} replica{'s' if len(here) != 1 else ''}")
        accused = {entry["accused"] for entry in found["accusations"]}
        for claim in here:
            label = f" {claim['label']}" if claim["label"] else ""
            drill = f"  DRILL {claim['drill']}" if claim["drill"] else ""
            mark = "  accused" if claim["peer"] in accused else ""
            lines.append(f"  {claim['peer'][-8:]}{label}  {claim['state']}  step {claim['step']}{drill}{mark}")
    if not claims:
        lines.append("no replicas yet")
    for entry in found["accusations"]:
        lines.append(
            f"accused: {entry['accused'][-8:]} of stage {entry['accused_stage']} by {entry['accuser'][-8:]} "
            f"at step {entry['step']}: {entry['reason']}"
        )
    return "\n".join(lines)


def _plain(value: object) -> str:
    text = value if isinstance(value, str) else ""
    return "".join(char for char in text if char.isprintable())[:64]
