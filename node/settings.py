"""What a person tells a node on its command line or in its environment, apart from the manifest."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

from protocol.errors import AddressError, SettingsError
from protocol.invite import Invite, parse_multiaddr
from protocol.manifest import Manifest
from protocol.records import MAX_LABEL_CHARS

MAX_CLOCK_OFFSET_SECONDS = 3.0
"""hivemind refuses DHT peers whose clock is further away than this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """One node's own settings. A node has either an invite or, as coordinator, the manifest itself.

    Raises:
        SettingsError: an address or the label is wrong; tells the option. Ports and devices are known only later.
    """

    state_dir: Path
    invite: Invite | None = None
    manifest: Manifest | None = None
    invite_file: Path | None = None
    """Where a coordinator leaves the invite for nodes on the same machine."""
    host: str = "0.0.0.0"
    """Address to listen on for peers."""
    port: int = 0
    """TCP port for peers; 0 chooses a free one."""
    announce: tuple[str, ...] = ()
    """Multiaddrs to announce instead of the listening ones."""
    reach: bool = True
    """Use NAT port mapping and relays."""
    http_host: str = "127.0.0.1"
    http_port: int | None = 0
    """TCP port for metrics and status; 0 chooses a free one, None serves none."""
    stage: int | None = None
    """Claim this stage and no other."""
    label: str = ""
    """A name for people."""
    device: str = "auto"
    threads: int = 0
    """Torch threads; 0 leaves the choice to torch."""
    drill: str = ""
    drill_from: int = 0
    checkpoints: int = 2
    """Of this node's stage, so many are kept; 0 writes none."""
    copies_gib: float = 4.0
    """Disk for copies of other stages' checkpoints; 0 keeps none."""
    exit_when_done: bool = False
    """Leave after the manifest's last step instead of holding the model for export."""

    ready_fd: int | None = None
    """A file descriptor of the parent: one JSON line goes there when this node can be reached, then it is closed."""

    def __post_init__(self) -> None:
        try:
            ipaddress.ip_address(self.host)
        except ValueError:
            raise SettingsError(
                f"--host: {self.host!r} is not an IP address; write 0.0.0.0 for every network, or 127.0.0.1 for this"
                " machine alone"
            ) from None
        for address in self.announce:
            try:
                parse_multiaddr(address, need_peer=False)
            except AddressError as error:
                raise SettingsError(f"--announce: {error}") from None
        if len(self.label) > MAX_LABEL_CHARS or not self.label.isprintable():
            raise SettingsError(f"--label: write at most {MAX_LABEL_CHARS} printable characters")

    @property
    def coordinates(self) -> bool:
        """Whether this node starts a swarm instead of joining one."""
        return self.manifest is not None
