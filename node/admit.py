"""What a coordinator does about admissions on its own machine: sign one, list them, and be the one who may."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from node.admission_file import AdmissionFile, known_here
from protocol.admissions import (
    DAY_SECONDS,
    MAX_ADMISSION_SECONDS,
    MAX_KNOWN,
    Admission,
    Roll,
    Standing,
    sign_admission,
)
from protocol.errors import SettingsError, UsageError
from protocol.identity import Identity
from protocol.manifest import Manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Signed:
    """What was signed, and what stood before."""

    admission: Admission
    before: Standing


def check_coordinator(manifest: Manifest, identity: Identity, folder: Path) -> None:
    """Make sure that this identity may start, and admit peers to, the swarm of a manifest.

    Raises:
        SettingsError: the swarm is an invited one and names another coordinator.
    """
    admission = manifest.admission
    if admission.mode == "invited" and admission.coordinator != identity.peer_id:
        raise SettingsError(
            f"the manifest names the coordinator {admission.coordinator}, and the identity in {folder} is "
            f"{identity.peer_id}; name the state folder of that one by --state-dir, bring its key here with `sentinel "
            "identity import`, or write a manifest for this one with `sentinel init --invited`"
        )


def sign(folder: Path, manifest: Manifest, peer: str, *, days: int, revoke: bool, now: float) -> Signed:
    """Admit a peer for some days, or revoke what it has, and leave that in the state folder.

    Raises:
        UsageError: the swarm is open, this machine is not its coordinator, or the peer is that itself.
        SentinelError: the key or the file cannot be used.
    """
    identity = _coordinator(folder, manifest)
    if peer == identity.peer_id:
        raise UsageError("PEER_ID is this coordinator's own, which is always admitted; give a volunteer's")
    file = AdmissionFile(folder)
    with file.locked():
        roll = known_here(file, manifest, now)
        live = sum(roll.standing(known, now) is not Standing.EXPIRED for known in roll.peers())
        if live >= MAX_KNOWN and roll.of(peer) is None and not revoke:
            raise UsageError(f"{live} admissions and revocations hold already, and nodes keep no more; let some end")
        before = roll.standing(peer, now)
        admission = Admission(
            swarm=roll.swarm,
            peer=peer,
            # The clock, so that a lost file does not make new ones look old.
            serial=max(int(now * 1e6), 1 + _newest_serial(roll)),
            issued=now,
            expires=now + (MAX_ADMISSION_SECONDS if revoke else days * DAY_SECONDS),
            revoked=revoke,
        )
        file.append([sign_admission(identity, admission)])
    return Signed(admission=admission, before=before)


def listed(folder: Path, manifest: Manifest, *, now: float) -> list[tuple[Admission, Standing]]:
    """The newest admission of each peer, and what it means now; newest first.

    Raises:
        UsageError: the swarm is open, or this machine is not its coordinator.
        SentinelError: the key or the file cannot be used.
    """
    _coordinator(folder, manifest)
    roll = known_here(AdmissionFile(folder), manifest, now)
    found = (roll.open(data, now) for data in roll.all_signed())
    return sorted(
        ((admission, roll.standing(admission.peer, now)) for admission in found), key=lambda entry: -entry[0].serial
    )


def _coordinator(folder: Path, manifest: Manifest) -> Identity:
    if manifest.admission.mode != "invited":
        raise UsageError(
            f"the swarm {manifest.name!r} is open: whoever has its invite may join; for one that admits by peer id "
            "write a new manifest with `sentinel init --invited`"
        )
    identity = Identity.load(folder / "identity.key")
    check_coordinator(manifest, identity, folder)
    return identity


def _newest_serial(roll: Roll) -> int:
    return max((known.serial for known in map(roll.of, roll.peers()) if known is not None), default=0)
