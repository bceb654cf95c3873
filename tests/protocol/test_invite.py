"""Invites and addresses: what round-trips, and what each mistake is told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import AddressError, InviteError, UsageError
from protocol.identity import Identity
from protocol.invite import (
    MAX_ADDRESS_CHARS,
    MAX_INVITE_ADDRESSES,
    MAX_INVITE_BYTES,
    Invite,
    Multiaddr,
    parse_invite,
    parse_multiaddr,
)

SWARM = "0123456789abcdef" * 4
PEER = Identity(bytes(range(32))).peer_id
ADDRESS = f"/ip4/203.0.113.7/tcp/31337/p2p/{PEER}"
INVITE = f"sentinel://{SWARM}{ADDRESS}"

host_labels = st.from_regex(r"[a-z0-9]([a-z0-9-]{0,10}[a-z0-9])?", fullmatch=True)
host_names = st.builds(
    lambda labels, last: ".".join([*labels, last]),
    st.lists(host_labels, max_size=4),
    st.from_regex(r"[a-z]{2,8}", fullmatch=True),
)
hosts = st.one_of(
    st.ip_addresses(v=4).filter(lambda ip: int(ip) != 0).map(lambda ip: f"/ip4/{ip}"),
    st.ip_addresses(v=6).filter(lambda ip: int(ip) != 0).map(lambda ip: f"/ip6/{ip}"),
    st.tuples(st.sampled_from(["dns", "dns4", "dns6"]), host_names).map(lambda pair: f"/{pair[0]}/{pair[1]}"),
)
transports = st.tuples(st.integers(1, 65535), st.sampled_from(["tcp/{}", "tcp/{}/ws", "udp/{}/quic-v1"])).map(
    lambda pair: pair[1].format(pair[0])
)
peers = st.binary(min_size=32, max_size=32).map(lambda seed: Identity(seed).peer_id)
addresses = st.builds("{}/{}/p2p/{}".format, hosts, transports, peers)
swarm_ids = st.binary(min_size=32, max_size=32).map(bytes.hex)
invites = st.builds(Invite, swarm_ids, st.lists(addresses, min_size=1, max_size=8, unique=True).map(tuple))


@given(invites)
def test_an_invite_reads_back_equal(invite: Invite) -> None:
    assert parse_invite(str(invite)) == invite
    assert parse_invite(f"  {invite}\n") == invite


@given(addresses)
def test_an_address_reads_back_equal(text: str) -> None:
    address = parse_multiaddr(text)
    assert str(address) == text
    assert parse_multiaddr(address.text) == address


@given(st.text(max_size=300))
def test_any_text_is_read_or_refused_in_one_line(text: str) -> None:
    for candidate in (text, f"sentinel://{text}", f"sentinel://{SWARM}/{text}", INVITE + text):
        try:
            parse_invite(candidate)
        except InviteError as error:
            assert "\n" not in str(error)


@given(st.text("/ipdnstcudqw46p0123456789.:-_v1ab", max_size=80))
def test_any_address_is_read_or_refused_in_one_line(text: str) -> None:
    for candidate in (text, f"/ip4/1.2.3.4/{text}", f"/dns/{text}/p2p/{PEER}", ADDRESS + text):
        try:
            parse_multiaddr(candidate, need_peer=False)
        except AddressError as error:
            assert "\n" not in str(error)


def test_an_invite_names_its_seeds_in_order() -> None:
    other = f"/dns4/seed.example.org/udp/4001/quic-v1/p2p/{PEER}"
    invite = parse_invite(f"{INVITE},{other}")
    assert invite.swarm_id == SWARM
    assert invite.addresses == (ADDRESS, other)
    assert [seed.host for seed in invite.seeds] == ["203.0.113.7", "seed.example.org"]


def test_repeated_addresses_and_a_doubled_slash_are_forgiven() -> None:
    assert parse_invite(f"sentinel://{SWARM}/{ADDRESS},{ADDRESS}") == Invite(SWARM, (ADDRESS,))


def test_an_address_is_taken_apart() -> None:
    assert parse_multiaddr(f"/ip6/2001:DB8::0:1/tcp/443/ws/p2p/{PEER}") == Multiaddr(
        host_protocol="ip6",
        host="2001:db8::1",
        transport="ws",
        port=443,
        peer_id=PEER,
        text=f"/ip6/2001:db8::1/tcp/443/ws/p2p/{PEER}",
    )
    assert parse_multiaddr(f"/dns4/Seed.Example.org/udp/1/quic-v1/p2p/{PEER}").host == "seed.example.org"


def test_an_address_to_listen_on_needs_no_peer() -> None:
    address = parse_multiaddr("/ip4/0.0.0.0/tcp/31337", need_peer=False)
    assert (address.peer_id, address.text) == ("", "/ip4/0.0.0.0/tcp/31337")
    assert parse_multiaddr(ADDRESS, need_peer=False).peer_id == PEER


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (f"/ip4/1.2.3.4/tcp/80 /p2p/{PEER}", "holds a space"),
        (f"/ip4/1.2.3.4/tcp/8\u0660/p2p/{PEER}", "foreign character"),
        (f"ip4/1.2.3.4/tcp/80/p2p/{PEER}", "leading slash"),
        ("", "leading slash"),
        (f"/ip/1.2.3.4/tcp/80/p2p/{PEER}", "write /ip4/ or /ip6/"),
        (f"/ipv4/1.2.3.4/tcp/80/p2p/{PEER}", "write one of /ip4/, /ip6/, /dns/"),
        (f"/ip4/1.2.3/tcp/80/p2p/{PEER}", "'1.2.3', which is not an IPv4 address"),
        (f"/ip4/1.2.3.256/tcp/80/p2p/{PEER}", "not an IPv4 address"),
        (f"/ip4/01.2.3.4/tcp/80/p2p/{PEER}", "not an IPv4 address"),
        (f"/ip4/example.org/tcp/80/p2p/{PEER}", "not an IPv4 address"),
        (f"/ip6/1.2.3.4/tcp/80/p2p/{PEER}", "not an IPv6 address"),
        (f"/ip6/fe80::1%eth0/tcp/80/p2p/{PEER}", "not an IPv6 address"),
        (f"/ip6/:::/tcp/80/p2p/{PEER}", "not an IPv6 address"),
        (f"/dns4/1.2.3.4/tcp/80/p2p/{PEER}", "write /ip4/ before it"),
        (f"/dns/-a.org/tcp/80/p2p/{PEER}", "not a host name"),
        (f"/dns/a..org/tcp/80/p2p/{PEER}", "not a host name"),
        (f"/dns/{'a' * 64}.org/tcp/80/p2p/{PEER}", "not a host name"),
        (f"/dns//tcp/80/p2p/{PEER}", "not a host name"),
        (f"/ip4/1.2.3.4/tcp/0/p2p/{PEER}", "the port '0'"),
        (f"/ip4/1.2.3.4/tcp/65536/p2p/{PEER}", "the port '65536'"),
        (f"/ip4/1.2.3.4/tcp/{'9' * 50}/p2p/{PEER}", "from 1 to 65535"),
        (f"/ip4/1.2.3.4/tcp/http/p2p/{PEER}", "the port 'http'"),
        (f"/ip4/1.2.3.4/tcp/080/p2p/{PEER}", "the port '080'"),
        (f"/ip4/1.2.3.4/tcp//p2p/{PEER}", "the port ''"),
        (f"/ip4/1.2.3.4/udp/80/p2p/{PEER}", "unknown transport"),
        (f"/ip4/1.2.3.4/udp/80/quic/p2p/{PEER}", "/udp/PORT/quic-v1"),
        (f"/ip4/1.2.3.4/80/p2p/{PEER}", "unknown transport"),
        ("/ip4/1.2.3.4", "cut short"),
        ("/ip4/1.2.3.4/tcp", "cut short"),
        ("/ip4/1.2.3.4/tcp/80", "lacks its end /p2p/PEER_ID"),
        ("/ip4/1.2.3.4/tcp/80/", "lacks its end /p2p/PEER_ID"),
        ("/ip4/1.2.3.4/tcp/80/p2p", "not a peer id"),
        ("/ip4/1.2.3.4/tcp/80/p2p/", "not a peer id"),
        (f"/ip4/1.2.3.4/tcp/80/p2p/{PEER[:-2]}", "copy it whole"),
        (f"/ip4/1.2.3.4/tcp/80/{PEER}", "does not belong there"),
        (f"/ip4/1.2.3.4/tcp/80/wss/p2p/{PEER}", "/wss, which does not belong there"),
        (f"/ip4/1.2.3.4/tcp/80/ipfs/{PEER}", "write /p2p/"),
        (f"/ip4/1.2.3.4/tcp/80/p2p/{PEER}/", "does not belong there"),
        (f"/ip4/1.2.3.4/tcp/80/p2p/{PEER}/p2p-circuit/p2p/{PEER}", "through a relay"),
        (f"/ip4/0.0.0.0/tcp/80/p2p/{PEER}", "is one to listen on"),
        (f"/ip6/::/tcp/80/p2p/{PEER}", "is one to listen on"),
        ("/ip4/1.2.3.4/tcp/80" + "/" * MAX_ADDRESS_CHARS, "400 are allowed"),
    ],
)
def test_a_wrong_address_is_told_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(AddressError) as caught:
        parse_multiaddr(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(InviteError):
        parse_invite(f"{INVITE},{text}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("  \n", "is empty"),
        (f"http://{SWARM}{ADDRESS}", "begins with http:"),
        (f"/ip4/1.2.3.4/tcp/80/p2p/{PEER}", "begins with sentinel://, but this does not"),
        (SWARM, "begins with sentinel://"),
        (f"sentinel:{SWARM}{ADDRESS}", "begins with sentinel:"),
        (f"sentinel://{SWARM[:-3]}{ADDRESS}", "cut short (61 of 64"),
        (f"sentinel://{SWARM}0{ADDRESS}", "too long (65"),
        (f"sentinel://{SWARM[:-1]}g{ADDRESS}", "0-9 and a-f"),
        (f"sentinel://{SWARM.upper()}{ADDRESS}", "0-9 and a-f"),
        (f"sentinel://{SWARM}", "names no seed"),
        (f"sentinel://{SWARM}/", "names no seed"),
        (f"{INVITE}, {ADDRESS}", "holds a space"),
        (f"{INVITE},\n{ADDRESS}", "line break"),
        (f"{INVITE},\u200b{ADDRESS}", "foreign character"),
        (f"{INVITE},ip4/1.2.3.4/tcp/80/p2p/{PEER}", "address 2 of the invite"),
        (f"{INVITE},", "address 2 of the invite"),
        (INVITE + f",{ADDRESS}" * 60, "4096 are allowed"),
    ],
)
def test_a_wrong_invite_is_told_what_is_wrong(text: str, words: str) -> None:
    with pytest.raises(InviteError) as caught:
        parse_invite(text)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == UsageError.exit_code == 2


def test_an_invite_holds_at_most_sixteen_addresses() -> None:
    many = tuple(f"/ip4/10.0.0.{n}/tcp/1/p2p/{PEER}" for n in range(1, MAX_INVITE_ADDRESSES + 2))
    assert len(Invite(SWARM, many[:-1]).addresses) == MAX_INVITE_ADDRESSES
    with pytest.raises(InviteError, match="17 addresses; 16 are allowed"):
        Invite(SWARM, many)


def test_an_invite_cannot_be_built_that_could_not_be_read() -> None:
    long = tuple(f"/dns/{'.'.join([letter * 60] * 4)}/tcp/1/p2p/{PEER}" for letter in "abcdefghijklmno")
    with pytest.raises(InviteError, match=f"{MAX_INVITE_BYTES} are allowed"):
        Invite(SWARM, long)
    with pytest.raises(InviteError, match="names no seed"):
        Invite(SWARM, ())
