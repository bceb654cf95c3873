"""The real transport: framed streams over libp2p, through the local p2pd.

p2pd relays each libp2p stream over a unix socket of its own. The first message on such a
socket is p2pd's (who is on the other side, or whether the dial worked); then come frames.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterable
from typing import Any

from protocol.errors import LocalError, PeerUnreachableError, SentinelError
from protocol.messages import CONTROL_PROTOCOL, TENSOR_PROTOCOL, StreamKind
from protocol.transports.base import Link
from protocol.transports.hivemind_parts import (
    ControlFailure,
    Multiaddr,
    P2PDaemonError,
    PeerID,
    p2pd_pb2,
    read_pbmsg_safe,
    write_pbmsg,
)
from protocol.transports.p2pd import Daemon
from protocol.transports.sessions import DialingTransport
from protocol.transports.stream import StreamLink

PROTOCOL_OF = {StreamKind.CONTROL: CONTROL_PROTOCOL, StreamKind.TENSOR: TENSOR_PROTOCOL}
DIAL_SECONDS = 10
MAX_KNOWN_ADDRESSES = 4096


def _varint(number: int) -> bytes:
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


class P2PTransport(DialingTransport):
    """Streams of one node. The daemon must be started, and is stopped by its owner."""

    def __init__(self, daemon: Daemon, **options: Any) -> None:
        super().__init__(peer_id=str(daemon.p2p.peer_id), **options)
        self._daemon = daemon
        self._addresses: dict[str, tuple[str, ...]] = {}
        self._servers_listening: list[asyncio.AbstractServer] = []
        self._links: set[StreamLink] = set()

    async def start(self) -> None:
        """Register this node's protocols with p2pd.

        Raises:
            LocalError: p2pd refused.
        """
        for stream, protocol in PROTOCOL_OF.items():
            path = f"{self._daemon.folder}/{stream.value}-{secrets.token_hex(4)}.sock"
            server = await asyncio.get_running_loop().create_unix_server(
                lambda stream=stream: StreamLink(  # type: ignore[misc]
                    prelude=True, on_opened=lambda link, prelude: self._accepted(link, prelude, stream)
                ),
                path,
            )
            os.chmod(path, 0o600)
            self._servers_listening.append(server)
            await self._register(protocol, path)

    def learn(self, peer: str, addresses: Iterable[str]) -> None:
        """Remember where a peer listens (multiaddrs, with or without the peer id)."""
        if peer == self.peer_id:
            return
        if peer not in self._addresses and len(self._addresses) >= MAX_KNOWN_ADDRESSES:
            self._addresses.pop(next(iter(self._addresses)))
        self._addresses[peer] = tuple(addresses)

    async def dial(self, peer: str) -> None:
        """Make p2pd hold a connection to a peer.

        Raises:
            PeerUnreachableError: no known address answered; names the reason.
        """
        addresses = [Multiaddr(text.split("/p2p/")[0]) for text in self._addresses.get(peer, ())]
        if not addresses:
            return  # p2pd may know the way from its own routing table
        try:
            async with asyncio.timeout(DIAL_SECONDS):
                await self._daemon.p2p._client.connect(PeerID.from_base58(peer), addresses)
        except TimeoutError:
            raise PeerUnreachableError(f"peer {peer} did not answer in {DIAL_SECONDS} s") from None
        except (ControlFailure, P2PDaemonError, OSError) as error:
            raise PeerUnreachableError(f"peer {peer} cannot be dialled: {_short(error)}") from None

    async def _open_link(self, peer: str, stream: StreamKind) -> Link:
        await self.dial(peer)
        loop = asyncio.get_running_loop()
        try:
            _, link = await loop.create_unix_connection(lambda: StreamLink(prelude=True), self._daemon.control_path)
        except OSError as error:
            raise LocalError(f"the local p2pd does not answer: {error.strerror}; restart the node") from None
        link.peer = peer
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_OPEN,
            streamOpen=p2pd_pb2.StreamOpenRequest(
                peer=PeerID.from_base58(peer).to_bytes(), proto=[PROTOCOL_OF[stream]], timeout=DIAL_SECONDS
            ),
        ).SerializeToString()
        link.write_raw(_varint(len(request)) + request)
        try:
            async with asyncio.timeout(DIAL_SECONDS + 2):
                response = p2pd_pb2.Response.FromString(await asyncio.shield(link.opened))
        except TimeoutError:
            link.close()
            raise PeerUnreachableError(f"peer {peer} did not open a stream in time") from None
        except SentinelError as error:
            raise PeerUnreachableError(f"peer {peer} cannot be reached: {error}") from None
        except BaseException:
            link.close()
            raise
        if response.type == p2pd_pb2.Response.ERROR:
            link.close()
            raise PeerUnreachableError(f"peer {peer} cannot be reached: {_short(response.error.msg)}")
        self._keep(link)
        return link

    def _accepted(self, link: StreamLink, prelude: bytes, stream: StreamKind) -> None:
        info = p2pd_pb2.StreamInfo.FromString(prelude)
        link.peer = str(PeerID(info.peer))
        link.address = _multiaddr(info.addr)
        self._keep(link)
        self._accept_link(link, stream)

    def _keep(self, link: StreamLink) -> None:
        """Remember a link until it ends, to close it with the transport."""
        self._links = {known for known in self._links if not known.closed}
        self._links.add(link)

    async def _register(self, protocol: str, path: str) -> None:
        request = p2pd_pb2.Request(
            type=p2pd_pb2.Request.STREAM_HANDLER,
            streamHandler=p2pd_pb2.StreamHandlerRequest(
                addr=Multiaddr(f"/unix{path}").to_bytes(), proto=[protocol], balanced=False
            ),
        )
        reader, writer = await asyncio.open_unix_connection(self._daemon.control_path)
        try:
            await write_pbmsg(writer, request)
            response = p2pd_pb2.Response()
            await read_pbmsg_safe(reader, response)
        finally:
            writer.close()
        if response.type == p2pd_pb2.Response.ERROR:
            raise LocalError(f"p2pd refused to serve {protocol}: {response.error.msg}")

    async def _close_links(self) -> None:
        for server in self._servers_listening:
            server.close()
        for link in self._links:
            link.close()
        self._links.clear()


def _multiaddr(data: bytes) -> str:
    """The text of a binary multiaddr; empty where this version cannot read it."""
    try:
        return str(Multiaddr(data))
    except Exception:  # the library raises many unrelated types, and only when the text is made
        return ""


def _short(error: object) -> str:
    return " ".join(str(error).split())[:160]
