"""The invite line and the addresses in it, read strictly and refused with a message that says what to change.

An invite is ``sentinel://SWARM_ID/MULTIADDR[,MULTIADDR...]``: the SHA-256 of the manifest, and addresses of
some nodes to begin with. It holds no secret, and as it names the hash, no seed can pass off another manifest.
An address is ``/ip4|ip6|dns|dns4|dns6/HOST/tcp/PORT[/ws]/p2p/PEER_ID`` or has ``/udp/PORT/quic-v1`` there.
Nothing here opens a socket or asks a name server.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from protocol.errors import AddressError, InviteError
from protocol.identity import public_key_of

SCHEME = "sentinel://"

MAX_INVITE_BYTES = 4096
"""A line that still survives chat programs and shells."""

MAX_INVITE_ADDRESSES = 16
"""More seeds than that make the line long and the first connection no surer."""

MAX_ADDRESS_CHARS = 400
"""A host name has at most 253 characters and a peer id 52; eight such addresses fit a 4 KiB record."""

SWARM_ID_CHARS = 64

_SWARM_ID = re.compile(r"[0-9a-f]{64}")
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_HOST_LABEL = re.compile(r"[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9_])?")
_HOST_PROTOCOLS = ("ip4", "ip6", "dns", "dns4", "dns6")
_MAX_HOST_CHARS = 253
_EXAMPLE = "/ip4/203.0.113.7/tcp/31337/p2p/12D3KooW..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Multiaddr:
    """One address of a node.

    ``host_protocol`` is ip4, ip6, dns, dns4 or dns6; ``transport`` is tcp, ws or quic-v1; ``port`` is 1 to
    65535; ``peer_id`` is "" where the address names no peer; ``text`` is the one spelling of the whole.
    """

    host_protocol: str
    host: str
    transport: str
    port: int
    peer_id: str
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Invite:
    """What a volunteer needs to find a swarm: its id (64 hex digits) and the seeds' addresses, in order.

    The constructor raises InviteError for a wrong id or address, and drops repeated addresses.
    """

    swarm_id: str
    addresses: tuple[str, ...]

    def __post_init__(self) -> None:
        _check_swarm_id(self.swarm_id)
        texts: dict[str, None] = {}
        for number, address in enumerate(self.addresses, start=1):
            try:
                texts[parse_multiaddr(address).text] = None
            except AddressError as error:
                where = "" if len(self.addresses) == 1 else f"address {number} of the invite: "
                raise InviteError(f"{where}{error}") from None
        if not texts:
            raise InviteError(f"the invite names no seed; it continues after the swarm id with {_EXAMPLE}")
        if len(texts) > MAX_INVITE_ADDRESSES:
            raise InviteError(
                f"the invite names {len(texts)} addresses; {MAX_INVITE_ADDRESSES} are allowed, leave some out"
            )
        object.__setattr__(self, "addresses", tuple(texts))
        if len(str(self)) > MAX_INVITE_BYTES:
            raise InviteError(_too_long("the invite", len(str(self)), MAX_INVITE_BYTES))

    @property
    def seeds(self) -> tuple[Multiaddr, ...]:
        """The addresses, taken apart."""
        return tuple(parse_multiaddr(address) for address in self.addresses)

    def __str__(self) -> str:
        return f"{SCHEME}{self.swarm_id}{','.join(self.addresses)}"


def parse_invite(text: str) -> Invite:
    """Read an invite line; whitespace around it is forgiven. Raises InviteError, saying what to change."""
    text = text.strip()
    if len(text) > MAX_INVITE_BYTES:
        raise InviteError(_too_long("the invite", len(text), MAX_INVITE_BYTES))
    if not text:
        raise InviteError(f"the invite is empty; it looks like {SCHEME}SWARM_ID{_EXAMPLE}")
    if not text.isascii() or not text.isprintable() or " " in text:
        raise InviteError(
            "the invite holds a space, a line break or a foreign character; paste it as one unbroken line"
        )
    if not text.startswith(SCHEME):
        scheme = _SCHEME.match(text)
        found = f"this begins with {scheme.group()[:20]}" if scheme else "this does not"
        raise InviteError(f"an invite begins with {SCHEME}, but {found}; ask the coordinator for the line")
    swarm_id, _, rest = text.removeprefix(SCHEME).partition("/")
    _check_swarm_id(swarm_id)
    if not rest.strip("/"):
        raise InviteError(f"the invite names no seed; it continues after the swarm id with {_EXAMPLE}")
    # The slash that ends the swarm id is the one that begins the first address; writing both is fine too.
    return Invite(swarm_id, tuple(f"/{rest.removeprefix('/')}".split(",")))


def parse_multiaddr(text: str, *, need_peer: bool = True) -> Multiaddr:
    """Read an address; ``.text`` of the result is its one spelling (host in lower case, shortest IPv6).

    With ``need_peer`` (an address to dial) the address must end in /p2p/PEER_ID and cannot be the unspecified
    address; without it (an address to listen on or to announce) both are free. Raises AddressError.
    """
    _check_characters(text)
    parts = text.split("/")[1:]
    if len(parts) < 4:
        raise AddressError(f"the address {text!r} is cut short; it looks like {_EXAMPLE}")
    host = _parse_host(text, parts[0], parts[1])
    transport, used = _parse_transport(text, parts)
    port = _parse_port(text, parts[3])
    peer_id = _parse_peer(text, parts[used:], need_peer=need_peer)
    if need_peer and host in ("0.0.0.0", "::"):
        raise AddressError(
            f"the address {text!r} is one to listen on; write the address at which others reach this node"
        )
    prefix = f"/{parts[0]}/{host}/" + "/".join((parts[2], str(port), *parts[4:used]))
    return Multiaddr(
        host_protocol=parts[0],
        host=host,
        transport=transport,
        port=port,
        peer_id=peer_id,
        text=f"{prefix}/p2p/{peer_id}" if peer_id else prefix,
    )


def _check_swarm_id(swarm_id: str) -> None:
    if _SWARM_ID.fullmatch(swarm_id):
        return
    if len(swarm_id) < SWARM_ID_CHARS:
        problem = f"the swarm id is cut short ({len(swarm_id)} of {SWARM_ID_CHARS} characters)"
    elif len(swarm_id) > SWARM_ID_CHARS:
        problem = f"the swarm id is too long ({len(swarm_id)} instead of {SWARM_ID_CHARS} characters)"
    else:
        problem = "the swarm id holds something else than the digits 0-9 and a-f"
    raise InviteError(f"{problem}; copy the whole invite line")


def _check_characters(text: str) -> None:
    if len(text) > MAX_ADDRESS_CHARS:
        raise AddressError(_too_long("the address", len(text), MAX_ADDRESS_CHARS))
    if not text.isascii() or not text.isprintable() or " " in text:
        raise AddressError(f"the address {text!a} holds a space or a foreign character; remove it")
    if not text.startswith("/"):
        raise AddressError(f"the address {text!r} lacks its leading slash; it looks like {_EXAMPLE}")


def _parse_host(text: str, protocol: str, host: str) -> str:
    if protocol == "ip":
        raise AddressError(f"the address {text!r} begins with /ip/; write /ip4/ or /ip6/")
    if protocol not in _HOST_PROTOCOLS:
        raise AddressError(
            f"the address {text!r} begins with /{protocol}/; write one of /{'/, /'.join(_HOST_PROTOCOLS)}/"
        )
    if protocol.startswith("dns"):
        return _parse_host_name(text, host)
    kind = ipaddress.IPv4Address if protocol == "ip4" else ipaddress.IPv6Address
    if "%" not in host:  # a zone means something on one machine only
        try:
            return str(kind(host))
        except ValueError:
            pass
    raise AddressError(f"the address {text!r} holds {host!r}, which is not an IPv{protocol[-1]} address; correct it")


def _parse_host_name(text: str, host: str) -> str:
    name = host.lower()
    labels = name.split(".")
    if len(name) > _MAX_HOST_CHARS or not all(_HOST_LABEL.fullmatch(label) for label in labels):
        raise AddressError(f"the address {text!r} holds {host!r}, which is not a host name; correct it")
    if labels[-1].isdigit():
        raise AddressError(f"the address {text!r} holds an IP address as a name; write /ip4/ before it")
    return name


def _parse_transport(text: str, parts: list[str]) -> tuple[str, int]:
    """The transport, and how many of the parts belong to it and to what precedes it."""
    if parts[2] == "tcp":
        return ("ws", 5) if parts[4:5] == ["ws"] else ("tcp", 4)
    if parts[2] == "udp" and parts[4:5] == ["quic-v1"]:
        return "quic-v1", 5
    raise AddressError(
        f"the address {text!r} holds an unknown transport; write /tcp/PORT, /tcp/PORT/ws or /udp/PORT/quic-v1"
    )


def _parse_port(text: str, port: str) -> int:
    if port.isdigit() and len(port) <= 5 and 1 <= int(port) <= 65535 and port[0] != "0":
        return int(port)
    raise AddressError(f"the address {text!r} holds the port {port!r}; write a whole number from 1 to 65535")


def _parse_peer(text: str, parts: list[str], *, need_peer: bool) -> str:
    if not parts and not need_peer:
        return ""
    if not parts or parts == [""]:
        raise AddressError(f"the address {text!r} lacks its end /p2p/PEER_ID; add the peer id of that node")
    if "p2p-circuit" in parts:
        raise AddressError(f"the address {text!r} leads through a relay; write a direct address")
    if parts[0] == "ipfs":
        raise AddressError(f"the address {text!r} holds /ipfs/; write /p2p/")
    if parts[0] != "p2p" or len(parts) > 2:
        extra = parts[0] if parts[0] != "p2p" else parts[2]
        raise AddressError(f"the address {text!r} holds /{extra}, which does not belong there; remove it")
    peer_id = parts[1] if len(parts) == 2 else ""
    try:
        public_key_of(peer_id)
    except AddressError as error:
        raise AddressError(f"the address {text!r} ends in a wrong peer id: {error}") from None
    return peer_id


def _too_long(what: str, length: int, limit: int) -> str:
    return f"{what} has {length} characters; {limit} are allowed, so shorten it"
