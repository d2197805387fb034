"""The parts of the proxy of sandboxes that need no sandbox: hosts, addresses, TLS, requests, bounds."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from rollyard_crds.fields.allowed_hosts import HostRule, host_name, installers_rule
from rollyard_crds.lease import SandboxHandle
from rollyard_crds.rolloutjob import SandboxSpec
from rollyard_pipeline.sandboxes.egress.destinations import Destinations, Infrastructure, is_own, why_refused
from rollyard_pipeline.sandboxes.egress.egress import proxy_variables
from rollyard_pipeline.sandboxes.egress.limits import (
    MAX_NOTES,
    EgressLimits,
    EgressRefused,
    Meter,
)
from rollyard_pipeline.sandboxes.egress.proxy import EgressProxy, Stream, parse_head, server_name
from rollyard_pipeline.sandboxes.tunnels import ConnectionPace
from rollyard_sandbox.client.wire import SandboxTunnel
from rollyard_sandbox.errors import SandboxError as ExecError
from rollyard_testing.pace import patience
from rollyard_testing.sandboxes.outside import HOST, PLANE, Outside, client_hello, with_extension
from rollyard_testing.sandboxes.outside import PUBLIC as REACHED


def refusal(reason: str, match: str | None = None) -> pytest.RaisesExc[EgressRefused]:
    """Expect a refusal for this reason."""
    return pytest.RaisesExc(EgressRefused, match=match, check=lambda error: error.reason == reason)


PUBLIC = (
    "1.1.1.1", "8.8.8.8", "151.101.0.223", "2606:4700:4700::1111", "2a04:4e42::223", "2001:4860:4860::8888",
    # The neighbours of what is special.
    "9.255.255.255", "11.0.0.0", "100.63.255.255", "100.128.0.0", "172.15.255.255", "172.32.0.0",
    "192.167.255.255", "192.169.0.0", "198.20.0.0", "223.255.255.255", "2001:200::1",
)  # fmt: skip
SPECIAL = (
    "0.0.0.0", "10.1.2.3", "100.64.0.1", "100.100.100.200", "127.0.0.1", "127.8.8.8", "168.63.129.16",
    "169.254.169.254", "169.254.170.2", "172.16.0.1", "172.31.255.255", "192.0.0.170", "192.168.1.1",
    "198.18.0.1", "224.0.0.251", "255.255.255.255", "::", "::1", "::127.0.0.1", "::ffff:10.0.0.1",
    "::ffff:8.8.8.8", "64:ff9b::a00:1", "64:ff9b:1::1", "2001::1", "2001:db8::1", "2002:a00:1::1", "fc00::1",
    "fd00:ec2::254", "fe80::1", "fe80::1%lo", "fec0::1", "ff02::1", "4000::1", "192.0.2.1", "192.31.196.1",
    "192.52.193.1", "192.88.99.1", "192.175.48.1", "198.19.255.255", "198.51.100.1", "203.0.113.1",
    "240.0.0.1", "100.127.255.255", "::ffff:0:8.8.8.8", "2001:20::1", "2620:4f:8000::1", "3fff::1",
)  # fmt: skip


@pytest.mark.parametrize("text", PUBLIC)
def test_public_addresses_are_connected_to(text: str) -> None:
    assert why_refused(ipaddress.ip_address(text)) == ""


@pytest.mark.attack(
    "an allowed name leads to loopback, an inner network or metadata, also as an IPv4 address in IPv6",
    boundary="network",
    surface="proxy",
    stopped_by="every address of the name must be public; the answer does not show it",
)
@pytest.mark.parametrize("text", SPECIAL)
def test_special_addresses_are_not(text: str) -> None:
    assert why_refused(ipaddress.ip_address(text))


def test_an_address_of_this_machine_is_known() -> None:
    assert is_own(ipaddress.ip_address("127.0.0.1"))
    assert not is_own(ipaddress.ip_address("192.0.2.1"))


HOSTS = [
    ("pypi.org", "pypi.org", 443, True),
    ("pypi.org", "pypi.org", 80, True),
    ("pypi.org", "pypi.org", 22, False),
    ("pypi.org", "files.pypi.org", 443, False),
    ("pypi.org", "evilpypi.org", 443, False),
    ("pypi.org", "pypi.org.evil.net", 443, False),
    ("*.example.org", "a.example.org", 443, True),
    ("*.example.org", "a.b.example.org", 443, True),
    ("*.example.org", "example.org", 443, False),
    ("*.example.org", "evilexample.org", 443, False),
    ("example.org:8443", "example.org", 8443, True),
    ("example.org:8443", "example.org", 443, False),
]


@pytest.mark.parametrize(("rule", "host", "port", "covered"), HOSTS)
def test_a_rule_covers(rule: str, host: str, port: int, covered: bool) -> None:
    assert HostRule.parse(rule).covers(host, port) is covered
    assert installers_rule("*").covers(host, port) is (port in (80, 443))


NO_HOSTS = (
    "", "*", "localhost", "org", "*.org", "127.0.0.1", "2130706433.1", "[::1]", "PyPI.org", "pypi.org.",
    "a..b",
    "-a.org", "a_.org", "pypi.org:", "pypi.org:0", "pypi.org:65536", "pypi.org:443:1", "http://pypi.org",
    "pypi.org/x", "*.*.org", "a.*.org", "user@pypi.org", "münchen.de", "pypi.org\n", f"{'a.' * 127}org",
)  # fmt: skip


@pytest.mark.attack(
    "an entry is an address, an inner name, or two readings of one name",
    boundary="network",
    surface="`spec.sandbox.allowedHosts`",
    stopped_by="entries are DNS names with a dot, in one spelling",
)
@pytest.mark.parametrize("text", NO_HOSTS)
def test_what_is_no_host_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"allowedHosts|allowed_hosts"):
        SandboxSpec.model_validate({"network": "allowlist", "allowedHosts": [text]})
    with pytest.raises(ValueError, match=r"is not a host|port|characters"):
        HostRule.parse(text)


@pytest.mark.parametrize(
    "fields",
    [{"network": "allowlist"}, {"allowedHosts": ["pypi.org"]}, {"network": "allowlist", "allowedHosts": []},
     {"network": "none", "allowedHosts": ["pypi.org"]}, {"network": "host"}],
)  # fmt: skip
def test_hosts_and_network_belong_together(fields: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=r"network|allowedHosts"):
        SandboxSpec.model_validate(fields)


def test_a_job_without_a_network_looks_as_before() -> None:
    assert "allowedHosts" not in SandboxSpec().to_json()
    assert SandboxSpec().host_rules == ()


CONTAINED = [
    ("*", "pypi.org", True),
    ("*", "*.example.org", True),
    ("*", "pypi.org:22", False),
    ("pypi.org", "pypi.org", True),
    ("pypi.org", "pypi.org:443", True),
    ("pypi.org:443", "pypi.org", False),
    ("pypi.org", "*.pypi.org", False),
    ("*.pypi.org", "pypi.org", False),
    ("*.pypi.org", "files.pypi.org", True),
    ("*.pypi.org", "*.files.pypi.org", True),
    ("*.files.pypi.org", "*.pypi.org", False),
    ("*.pypi.org", "*.evilpypi.org", False),
]


@pytest.mark.parametrize(("rule", "other", "contained"), CONTAINED)
def test_an_installers_rule_contains(rule: str, other: str, contained: bool) -> None:
    assert installers_rule(rule).contains(HostRule.parse(other)) is contained


def test_names_are_compared_in_one_form() -> None:
    assert host_name("PyPI.org.") == "pypi.org"
    for text in ("127.0.0.1", "[::1]", "localhost", "0x7f.1", "2130706433", "a..org", "pypi.org\r\nx: y", ""):
        assert host_name(text) is None


def test_the_server_name_of_a_client_is_read() -> None:
    hello = client_hello(HOST)
    assert server_name(hello) == HOST
    assert [server_name(hello[:size]) for size in (0, 1, 5, 9, len(hello) - 1)] == [None] * 5
    records = b"".join(
        hello[:3] + len(part).to_bytes(2) + part for part in (hello[5:6], hello[6:40], hello[40:])
    )
    assert server_name(records) == HOST
    assert server_name(records + b"\x17\x03\x03") == HOST


def hellos() -> dict[str, bytes]:
    hello = client_hello(HOST)
    return {
        "plain": b"GET / HTTP/1.1\r\n",
        "ssh": b"SSH-2.0-x\r\n",
        "no_name": client_hello(None),
        "two_names": with_extension(hello, 0, b"\0\x08\0\0\x05a.org"),
        "encrypted": with_extension(hello, 0xFE0D, b"\0" * 16),
        "other_message": hello[:5] + b"\x02" + hello[6:],
        "names_in_one_list": with_extension(client_hello(None), 0, b"\0\x10\0\0\x05a.org\0\0\x05b.org"),
        "another_kind_of_name": with_extension(client_hello(None), 0, b"\0\x08\x01\0\x05a.org"),
        "cut_inside": hello[:6] + b"\0\0\x20" + hello[9:],
        "empty_record": b"\x16\x03\x01\0\0",
        "endless": b"\x16\x03\x01\x40\0\x01\xff\xff\xff",
        "many_records": b"\x16\x03\x01\0\x01\x01\x16\x03\x01\0\x03\0\x3f\xfc" + b"\x16\x03\x01\0\x01a" * 8000,
    }


@pytest.mark.parametrize("name", sorted(hellos()))
def test_what_is_no_client_hello_with_one_name_is_refused(name: str) -> None:
    with refusal("NotTls"):
        server_name(hellos()[name])


def test_a_plain_request_is_written_again() -> None:
    head = parse_head(
        b"POST http://Pkgs.Example.org:81/a/b?c=d HTTP/1.1\r\nHost: other.example.org\r\nX: y\r\n"
        b"Proxy-Connection: keep-alive\r\nConnection: X-Own, keep-alive\r\nX-Own: 1\r\nUpgrade: websocket\r\n"
        b"Proxy-Authorization: secret\r\nContent-Length: 3\r\n\r\n"
    )
    assert (head.host, head.port, head.length, head.connects) == (HOST, 81, 3, False)
    assert head.forwarded == (
        b"POST /a/b?c=d HTTP/1.1\r\nHost: pkgs.example.org:81\r\nX: y\r\nContent-Length: 3\r\n"
        b"Connection: close\r\n\r\n"
    )


def test_a_plain_request_has_the_usual_port_path_and_body_unless_it_says_otherwise() -> None:
    head = parse_head(b"GET http://pkgs.example.org HTTP/1.1\r\nConnection: Content-Length\r\n\r\n")
    assert (head.port, head.length) == (80, 0)
    assert head.forwarded == b"GET / HTTP/1.1\r\nHost: pkgs.example.org\r\nConnection: close\r\n\r\n"
    fields = b"Connection: content-length\r\nContent-Length: 5\r\nTE: x\r\nKeep-Alive: y\r\nTrailer: z"
    head = parse_head(b"PUT http://pkgs.example.org?a HTTP/1.0\r\n" + fields + b"\r\n\r\n")
    assert head.length == 5
    assert head.forwarded == (
        b"PUT /?a HTTP/1.1\r\nHost: pkgs.example.org\r\nContent-Length: 5\r\nConnection: close\r\n\r\n"
    )


def test_connect_names_a_host_and_a_port() -> None:
    head = parse_head(b"CONNECT PKGS.example.org:443 HTTP/1.1\r\nHost: other\r\n\r\n")
    assert (head.host, head.port, head.connects) == (HOST, 443, True)
    assert parse_head(b"CONNECT [::1]:443 HTTP/1.1\r\n\r\n").host is None


BAD = [
    (b"GET / HTTP/1.1", 400),
    (b"GET https://pkgs.example.org/ HTTP/1.1", 400),
    (b"GET ftp://pkgs.example.org/ HTTP/1.1", 400),
    (b"GET http://u:p@pkgs.example.org/ HTTP/1.1", 400),
    (b"GET http://pkgs.example.org\\@other.org/ HTTP/1.1", 400),
    (b"GET http://pkgs.example.org:0/ HTTP/1.1", 400),
    (b"GET http://pkgs.example.org/#a HTTP/1.1", 400),
    (b"CONNECT pkgs.example.org:65536 HTTP/1.1", 400),
    (b"GET http://pkgs.example.org:99999/ HTTP/1.1", 400),
    (b"GET http:///path HTTP/1.1", 400),
    (b"GET http://[::1/ HTTP/1.1", 400),
    (b"GET  http://pkgs.example.org/ HTTP/1.1", 400),
    (b"GET http://pkgs.example.org/ HTTP/2", 400),
    (b"CONNECT pkgs.example.org HTTP/1.1", 400),
    (b"CONNECT pkgs.example.org:0 HTTP/1.1", 400),
    (b"CONNECT http://pkgs.example.org:443 HTTP/1.1", 400),
    (b"GET http://pkgs.example.org/ HTTP/1.1\r\nA: b\nHost: x", 400),
    (b"GET http://pkgs.example.org/ HTTP/1.1\r\n folded: x", 400),
    (b"GET http://pkgs.example.org/ HTTP/1.1\r\nA : b", 400),
    (b"GET http://pkgs.example.org/ HTTP/1.1\r\nA: \0", 400),
    (b"POST http://pkgs.example.org/ HTTP/1.1\r\nTransfer-Encoding: chunked", 411),
    (b"POST http://pkgs.example.org/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2", 400),
    (b"POST http://pkgs.example.org/ HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 1", 400),
    (b"POST http://pkgs.example.org/ HTTP/1.1\r\nContent-Length: +1", 400),
    (b"GET http://pkgs.example.org/ HTTP/1.1" + b"\r\nA: b" * 200, 431),
]


@pytest.mark.attack(
    "a second request, another `Host`, or a body of two readings reaches another site",
    boundary="network",
    surface="plain HTTP",
    stopped_by="one request for each connection, which the proxy writes again",
)
@pytest.mark.parametrize(("head", "status"), BAD)
def test_requests_with_several_readings_are_refused(head: bytes, status: int) -> None:
    with refusal("RequestRefused") as refused:
        parse_head(head + b"\r\n\r\n")
    assert refused.value.status == status


async def test_the_hosts_of_the_installation_are_refused_wherever_they_are() -> None:
    world = Outside()
    world.names |= {
        "plane.example.org": [["127.0.0.3"]],
        "alias.example.org": [["127.0.0.3"]],
        "backend.example.org": [["8.8.8.8"]],
    }
    infrastructure = Infrastructure(world.resolve, ["https://plane.example.org:8765", "unix:/run/plane"])
    checks = Destinations(world.resolve, infrastructure, lambda address: "")
    rules = [installers_rule("*")]
    for host in ("plane.example.org", "alias.example.org"):
        with refusal("DestinationRefused") as refused:
            await checks.addresses(host, 443, rules)
        assert "control plane" in refused.value.detail
        assert "control plane" not in str(refused.value)
    assert await checks.addresses("backend.example.org", 443, rules) == [ipaddress.ip_address("8.8.8.8")]
    infrastructure.add("http://8.8.8.8:8000/")
    with refusal("DestinationRefused"):
        await checks.addresses("backend.example.org", 443, rules)
    with refusal("HostUnresolved"):
        await checks.addresses("unknown.example.org", 443, rules)


async def test_a_host_of_the_installation_that_has_no_address_for_a_moment_keeps_its_last_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollyard_pipeline.sandboxes.egress.destinations._KNOWN_SECONDS", -1.0)
    world = Outside()
    world.names |= {"plane.example.org": [["127.0.0.3"]], "alias.example.org": [["127.0.0.3"]]}
    checks = Destinations(
        world.resolve, Infrastructure(world.resolve, ["https://plane.example.org"]), lambda _: ""
    )
    for _ in range(2):
        with refusal("DestinationRefused"):
            await checks.addresses("alias.example.org", 443, [installers_rule("*")])
        world.names.pop("plane.example.org", None)


async def test_every_host_and_every_address_of_the_installation_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rollyard_pipeline.sandboxes.egress.destinations._KNOWN_SECONDS", -1.0)
    world = Outside()
    world.names |= {
        "one.example.org": [["8.8.8.1"]],
        "two.example.org": [["8.8.8.2", "8.8.8.3"], ["8.8.8.4"]],
        "alias.example.org": [["1.1.1.1", "8.8.8.3"], ["8.8.8.4"]],
    }
    urls = ["https://one.example.org", "https://gone.example.org", "http://two.example.org.:8000/v1"]
    checks = Destinations(world.resolve, Infrastructure(world.resolve, urls), lambda _: "")
    for host in ("alias.example.org", "alias.example.org", "gone.example.org", "two.example.org"):
        world.names.setdefault("gone.example.org", [["1.1.1.2"]])
        with refusal("DestinationRefused"):
            await checks.addresses(host, 443, [installers_rule("*")])


async def test_a_host_needs_one_of_the_rules_and_an_address() -> None:
    world = Outside()
    world.names |= {"b.example.org": [["8.8.8.8"]], "empty.example.org": [[]]}
    checks = Destinations(world.resolve, Infrastructure(world.resolve))
    rules = [HostRule.parse(text) for text in ("a.example.org", "b.example.org", "empty.example.org")]
    assert await checks.addresses("b.example.org", 443, rules) == [ipaddress.ip_address("8.8.8.8")]
    with refusal("HostUnresolved"):
        await checks.addresses("empty.example.org", 443, rules)
    for host, given in (("c.example.org", rules), (None, [installers_rule("*")]), ("b.example.org", [])):
        with refusal("DestinationRefused"):
            await checks.addresses(host, 443, given)


def test_an_author_s_own_proxy_variables_stay_and_a_worker_s_connections_are_given_back() -> None:
    found = proxy_variables(81, {"HTTPS_PROXY": "http://mine", "no_proxy": "x"})
    proxy = "http://127.0.0.1:81"
    assert found == {
        "http_proxy": proxy,
        "https_proxy": proxy,
        "HTTP_PROXY": proxy,
        "NO_PROXY": "localhost,127.0.0.1,::1",
    }
    egress = Outside().egress(limits=EgressLimits(reserved=1, worker_connections=2))
    assert [egress.begin(own) for own in range(4)] == [True, True, False, False]
    egress.end()
    assert [egress.begin(own) for own in (1, 2)] == [True, False]
    assert [egress.begin(own) for own in (0, 1)] == [True, False], "another sandbox has its reserved one"
    egress.close()


async def test_one_bad_address_among_good_ones_is_enough() -> None:
    world = Outside()
    world.names["mixed.example.org"] = [["8.8.8.8", "10.0.0.5"]]
    checks = Destinations(world.resolve, Infrastructure(world.resolve))
    with refusal("DestinationRefused", match="not public") as refused:
        await checks.addresses("mixed.example.org", 443, [installers_rule("*")])
    assert "10.0.0.5" in refused.value.detail
    assert "10.0.0.5" not in str(refused.value)


PINS = ("mirror.example.org=10.1.2.0/24", "*.pinned.org=fd00::/8", "wide.example.org=0.0.0.0/0")


PINS_LEADING_INSIDE = pytest.mark.attack(
    "a pinned name leads to loopback, metadata, the worker's machine or the installation, or another name "
    "to a pinned address",
    boundary="network",
    surface="pins of hosts",
    stopped_by="a pin is for its host and its network only, and never for these",
)


@PINS_LEADING_INSIDE
@pytest.mark.parametrize(
    ("host", "addresses", "reached"),
    [
        ("mirror.example.org", ["10.1.2.3"], True),
        ("mirror.example.org", ["10.1.2.3", "8.8.8.8"], True),
        ("a.pinned.org", ["fd00::7"], True),
        ("wide.example.org", ["192.168.1.1"], True),
        ("wide.example.org", ["100.64.0.1"], True),
        ("mirror.example.org", ["10.1.3.3"], False),
        ("mirror.example.org", ["10.1.2.3", "10.1.3.3"], False),
        ("other.example.org", ["10.1.2.3"], False),
        ("pinned.org", ["fd00::7"], False),
        ("a.pinned.org", ["fd00:ec2::254"], False),
        ("a.pinned.org", ["fd20:ce::254"], False),
        ("wide.example.org", ["127.0.0.1"], False),
        ("wide.example.org", ["169.254.169.254"], False),
        ("wide.example.org", ["100.100.100.200"], False),
        ("wide.example.org", ["192.0.0.192"], False),
        ("wide.example.org", ["224.0.0.1"], False),
        ("wide.example.org", ["0.0.0.0"], False),
        ("a.pinned.org", ["::ffff:10.1.2.3"], False),
    ],
)
async def test_a_host_has_the_addresses_to_which_the_installer_pins_it(
    host: str, addresses: list[str], reached: bool
) -> None:
    world = Outside()
    world.names[host] = [addresses]
    pins = tuple(map(installers_rule, PINS))
    rules = [installers_rule("*")]
    checks = Destinations(world.resolve, Infrastructure(world.resolve), pins=pins)
    if reached:
        assert await checks.addresses(host, 443, rules) == list(map(ipaddress.ip_address, addresses))
    else:
        with refusal("DestinationRefused"):
            await checks.addresses(host, 443, rules)
    with refusal("DestinationRefused"):
        await checks.addresses(host, 22, [HostRule.parse(f"{host}:22")])


@PINS_LEADING_INSIDE
async def test_no_pin_leads_to_this_machine_or_to_the_installation() -> None:
    world = Outside()
    pins = (installers_rule("wide.example.org=0.0.0.0/0"),)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("198.51.100.1", 9))
        own = probe.getsockname()[0]
    world.names |= {"wide.example.org": [[own], ["10.7.7.7"]], "plane.example.org": [["10.7.7.7"]]}
    infrastructure = Infrastructure(world.resolve, ["https://plane.example.org"])
    checks = Destinations(world.resolve, infrastructure, pins=pins)
    for words in (own, "control plane"):
        with refusal("DestinationRefused") as refused:
            await checks.addresses("wide.example.org", 443, pins)
        assert words in refused.value.detail


@pytest.mark.parametrize(
    "entry",
    [
        "*=10.1.2.3", "pypi.org=", "pypi.org=host", "pypi.org=10.1.2.3/8", "pypi.org=127.0.0.1",
        "pypi.org=169.254.169.254", "10.1.2.3=10.1.2.3", "pypi.org=10.1.2.3,10.1.2.4", "pypi.org=::1",
    ],
)  # fmt: skip
def test_a_pin_that_means_nothing_or_too_much_is_refused(entry: str) -> None:
    with pytest.raises(ValueError, match="'"):
        installers_rule(entry)


async def test_the_pace_bounds_the_average() -> None:
    loop = asyncio.get_running_loop()
    pace = ConnectionPace(per_second=1000.0, burst=5)
    began = loop.time()
    for _ in range(25):
        await pace.turn()
    assert loop.time() - began >= 0.015


def test_bytes_and_notes_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    meter = Meter("r-1", EgressLimits(total_bytes=10))
    meter.count(10)
    assert meter.spent
    with refusal("NetworkSpent"):
        meter.count(1)
    with caplog.at_level(logging.WARNING):
        for number in range(100):
            meter.note(f"host-{number}.example.org\nforged line" + "x" * 1000)
            meter.note(f"host-{number}.example.org\nforged line" + "x" * 1000)
    assert len(caplog.messages) == MAX_NOTES
    assert all("\n" not in line and len(line) < 400 for line in caplog.messages)
    assert "further refusals are not logged" in caplog.messages[-1]


Talk = Callable[..., Awaitable[bytes]]


@asynccontextmanager
async def proxied(world: Outside, *hosts: str, **limits: float) -> AsyncIterator[Talk]:
    """Yield a function that sends bytes to a proxy as a program does, and returns all that comes back."""
    egress = world.egress(limits=EgressLimits(**limits))
    proxy = egress.proxy(world.spec(*hosts).host_rules, "r-1", world.resolve)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await proxy.serve(Stream(reader, writer))
        writer.close()

    async def talk(sent: bytes) -> bytes:
        async with asyncio.timeout(patience(10)):
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.write(sent)
            found = await reader.read(-1)
            writer.close()
            return found

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield talk
    egress.close()


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[Outside]:
    async with Outside().serving(tmp_path) as served:
        yield served


def getting(world: Outside, host: str = HOST, fields: str = "") -> bytes:
    return f"POST http://{host}:{world.port}/ HTTP/1.1\r\n{fields}\r\n".encode()


async def test_every_address_of_a_host_is_tried_in_turn(world: Outside) -> None:
    """Only the last one has a server at this port."""
    world.names[HOST] = [[PLANE, REACHED]]
    connecting = f"CONNECT {HOST}:{world.tls_port} HTTP/1.1\r\n\r\n".encode()
    async with proxied(world, head_seconds=0.05) as talk:
        assert await talk(connecting) == b"HTTP/1.1 200 Connection established\r\n\r\n"
        world.names[HOST] = [[PLANE, PLANE]]
        assert (await talk(connecting)).startswith(b"HTTP/1.1 502 ")


@pytest.mark.parametrize(
    "limits",
    [{"idle_seconds": 0.05, "connection_seconds": 1e4}, {"connection_seconds": 0.2, "idle_seconds": 1e4}],
)
async def test_a_connection_on_which_nothing_comes_ends(world: Outside, limits: dict[str, float]) -> None:
    world.pause = 1e4
    async with proxied(world, head_seconds=1e4, **limits) as talk:
        assert await talk(getting(world)) == b""
        assert world.received, "it had been forwarded"


@pytest.mark.parametrize("sent", ["", "GET http://", "CONNECT {}:{} HTTP/1.1\r\n\r\n"])
async def test_a_program_that_does_not_say_what_it_wants_loses_its_connection(
    world: Outside, sent: str
) -> None:
    async with proxied(world, head_seconds=0.05, idle_seconds=1e4, connection_seconds=1e4) as talk:
        answer = await talk(sent.format(HOST, world.tls_port).encode())
        assert answer in (b"", b"HTTP/1.1 200 Connection established\r\n\r\n")


async def test_the_bytes_of_all_connections_in_both_directions_are_counted_together(world: Outside) -> None:
    world.body = b"x" * 2000
    upload = getting(world, fields="Content-Length: 3000\r\n") + b"y" * 3000
    async with proxied(world, total_bytes=8000) as talk:
        assert (await talk(upload)).endswith(b"x" * 2000)
        # More than 5000 bytes were moved, so the second upload does not fit.
        assert not (await talk(upload)).endswith(b"x")
        assert (await talk(getting(world))).startswith(b"HTTP/1.1 503 ")
    async with proxied(world, total_bytes=8000) as talk:
        for _ in range(3):
            assert (await talk(getting(world))).endswith(b"x" * 2000)
        assert not (await talk(getting(world))).endswith(b"x" * 2000)


class LentTo:
    """A sandbox and its client, whose programs connect in the test's process."""

    def __init__(self) -> None:
        self.client = self
        self.handle = SandboxHandle(provider="bubblewrap", id="s", node="n", address="unix:/x")
        self.answers: list[str] = []
        """The reasons with which the next calls are refused."""
        self.asked = 0
        self.tunnels: asyncio.Queue[socket.socket] = asyncio.Queue()

    async def set_env(self, variables: dict[str, str]) -> None:
        assert variables["http_proxy"] == "http://127.0.0.1:81"

    async def tunnel(self) -> SandboxTunnel:
        self.asked += 1
        if self.answers:
            raise ExecError("refused", reason=self.answers.pop(0))
        worker, program = socket.socketpair()
        self.tunnels.put_nowait(program)
        return SandboxTunnel(81, *await asyncio.open_connection(sock=worker))

    @asynccontextmanager
    async def program(self, sent: bytes) -> AsyncIterator[asyncio.StreamReader]:
        async with asyncio.timeout(patience(10)):
            reader, writer = await asyncio.open_connection(sock=await self.tunnels.get())
            writer.write(b"+" + sent)
            yield reader
            writer.close()

    async def talk(self, sent: bytes) -> bytes:
        async with self.program(sent) as reader:
            return await reader.read(-1)


async def test_each_connection_gives_its_place_back_however_it_ends(
    world: Outside, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    one = LentTo()
    egress = world.egress(limits=EgressLimits(connections=1, waiting=1, reserved=0, worker_connections=1))
    async with egress.lent(one, world.spec(), "r-1", {}):
        for _ in range(2):
            assert (await one.talk(getting(world))).endswith(b"reached")
        with monkeypatch.context() as broken:
            broken.setattr(EgressProxy, "serve", lambda *_: 1 / 0)
            assert await one.talk(b"") == b""
        assert "ZeroDivisionError" in caplog.text
        assert (await one.talk(getting(world))).endswith(b"reached")
        one.tunnels.put_nowait(await one.tunnels.get())  # The last connection has ended.
        # While another sandbox has the worker's only connection, this one is refused.
        assert egress.begin(0)
        assert await one.talk(getting(world)) == b""
        egress.end()
        world.pause = 1e4
        world.arrived.clear()
        async with one.program(getting(world)):
            await world.arrived.wait()
    assert egress.begin(0), "with the lending, its connections have ended"
    assert not egress.begin(0)
    egress.close()


async def test_a_lending_survives_what_passes_and_ends_where_a_server_takes_no_more(
    world: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard_pipeline.sandboxes.tunnels._PAUSE", 0.0)
    one = LentTo()
    egress = world.egress(limits=EgressLimits(connections=1, waiting=1))
    async with egress.lent(one, world.spec(), "r-1", {}):
        for refusals in (["TooManyTunnels"] * 9, ["SandboxError"] * 4, ["SandboxError"] * 4):
            one.answers = refusals
            assert (await one.talk(getting(world))).endswith(b"reached")
    for last in (["SandboxError"] * 5, ["TooManyTunnels", "TurnedAway", "TunnelRefused"]):
        one = LentTo()
        async with egress.lent(one, world.spec(), "r-1", {}):
            (lending,) = (task for task in asyncio.all_tasks() if task.get_name() == "sandbox-tunnels")
            one.answers = [*last, "SandboxError"]
            assert (await one.talk(getting(world))).endswith(b"reached")
            async with asyncio.timeout(patience(10)):
                await asyncio.wait([lending])
        assert (one.asked, one.answers) == (1 + len(last), ["SandboxError"])
    egress.close()
