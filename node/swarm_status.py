"""``sentinel status``: the swarm as one of its nodes sees it. Imports neither torch nor hivemind."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from node.contribution import MAX_COUNT
from node.invites import invite_by
from node.wording import many
from protocol.errors import ProtocolVersionError, SwarmMismatchError
from protocol.fields import MAX_STEP
from protocol.invite import Invite
from protocol.messages import PROTOCOL_VERSION
from protocol.records import MAX_STAGE, Accusation, Claim, Record

if TYPE_CHECKING:
    from protocol.light import LightSession

MAX_REPLICAS = 256
"""Looked at in a status; as many as an honest one holds."""


def look(invite: Invite, *, seconds: float) -> dict[str, Any]:
    """Ask the first seed that answers for its status and its view.

    Raises:
        SentinelError: nobody answers, or it is another swarm.
    """
    from protocol.light import run_light  # libp2p, which only this needs

    swarm = bytes.fromhex(invite.swarm_id)

    async def ask(session: LightSession) -> dict[str, Any]:
        try:
            await session.hello(swarm)
        except SwarmMismatchError:
            raise SwarmMismatchError(
                "the node at this address belongs to another swarm than the invite names; ask for a new invite"
            ) from None
        except ProtocolVersionError as error:
            raise ProtocolVersionError(
                f"the swarm speaks another protocol version than this software (version {PROTOCOL_VERSION}); upgrade "
                f"the older of the two; the node says: {error}"
            ) from None
        found = picture(await session.status(), await session.records(swarm))
        return {**found, "invite": found["invite"] or str(invite)}

    return run_light(ask, invite.addresses, seconds=seconds)


def picture(status: dict[str, Any], records: Iterable[Record]) -> dict[str, Any]:
    """What ``--json`` prints: the status of the node that was asked, and the records that it knows."""
    known = list(records)
    claims = [record for record in known if isinstance(record, Claim)]
    return {
        "seed": status,
        "invite": invite_by(claims[0].swarm.hex(), (), claims) if claims else "",
        "claims": [_claim(record) for record in known if isinstance(record, Claim)],
        "accusations": [_accusation(record) for record in known if isinstance(record, Accusation)],
    }


def _claim(claim: Claim) -> dict[str, Any]:
    return {
        "peer": claim.peer,
        "stage": claim.stage,
        "label": claim.label,
        "state": claim.state.value,
        "step": claim.step,
        "addresses": list(claim.addresses),
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
    """The status as text.

    What claims hold is signed by their writers, and printable and short by the records' rules. The seed's own status
    is whatever that node likes to send, so each part is checked here.
    """
    seed = found["seed"]
    claims = sorted(found["claims"], key=lambda claim: (claim["stage"], claim["peer"]))
    stages = max(_whole(seed.get("stages"), MAX_STAGE + 1), max((claim["stage"] + 1 for claim in claims), default=0))
    step = max((claim["step"] for claim in claims), default=0)
    loss = seed.get("loss")
    steps = _whole(seed.get("steps"), MAX_STEP)
    lines = [
        f"swarm {_plain(seed.get('name'))} ({_plain(seed.get('swarm'))[:12]}), step {step}"
        + (f" of {steps}" if steps else "")
        + (f", loss {loss:.3f}" if isinstance(loss, float) and math.isfinite(loss) else "")
    ]
    gave = contributed(seed)
    accused = {entry["accused"] for entry in found["accusations"]}
    for stage in range(stages):
        here = [claim for claim in claims if claim["stage"] == stage]
        lines.append(f"stage {stage}: {len(here)} replica{'s' if len(here) != 1 else ''}")
        for claim in here:
            label = f" {claim['label']}" if claim["label"] else ""
            drill = f"  DRILL {claim['drill']}" if claim["drill"] else ""
            mark = "  accused" if claim["peer"] in accused else ""
            share = f"  {many(gave[claim['peer']], 'microbatch')}" if gave.get(claim["peer"]) else ""
            lines.append(f"  {claim['peer'][-8:]}{label}  {claim['state']}  step {claim['step']}{share}{drill}{mark}")
    if not claims:
        lines.append("no replicas yet")
    for entry in found["accusations"]:
        lines.append(
            f"accused: {entry['accused'][-8:]} of stage {entry['accused_stage']} by {entry['accuser'][-8:]} "
            f"at step {entry['step']}: {entry['reason']}"
        )
    if reason := _plain(seed.get("reason"), 200):
        lines.append(f"asked {_plain(seed.get('peer'))[-8:]}, which is {_plain(seed.get('state'))}: {reason}")
    if invite := found.get("invite"):
        lines.append(f"invite: {invite}")
    return "\n".join(lines)


def contributed(seed: dict[str, Any]) -> dict[str, int]:
    """Microbatches by peer, in all their runs, as the asked node tells: a coordinator of all, others of themselves."""
    replicas = seed.get("replicas")
    told = [seed, *(replicas[:MAX_REPLICAS] if isinstance(replicas, list) else ())]
    found = {}
    for entry in told:
        contribution = entry.get("contribution") if isinstance(entry, dict) else None
        if isinstance(contribution, dict) and isinstance(entry.get("peer"), str):
            found[entry["peer"]] = _whole(contribution.get("microbatches"), MAX_COUNT)
    return found


def _plain(value: object, most: int = 64) -> str:
    text = value if isinstance(value, str) else ""
    return "".join(char for char in text[: 4 * most] if char.isprintable())[:most]


def _whole(value: object, most: int) -> int:
    return value if type(value) is int and 0 <= value <= most else 0
