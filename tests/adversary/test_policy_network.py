"""A policy that calls out: there is no network, and nothing of the host or of another sandbox answers."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
from rollyard_testing.adversary.attacklab import Lab
from rollyard_testing.adversary.attacks import Attack, cases, python

pytestmark = pytest.mark.attack(boundary="network")


CONNECT = """
import socket
def attempt(family, address, kind=socket.SOCK_STREAM):
    try:
        with socket.socket(family, kind) as caller:
            caller.settimeout(3)
            caller.connect(address)
            if kind == socket.SOCK_DGRAM:
                caller.send(b"hello")
    except OSError as error:
        print("refused", address, error)
    else:
        print("WON", address)
"""

ATTACKS = [
    Attack(
        name="control_plane",
        tries="the control plane's port, IPv4 and IPv6",
        surface="loopback of the host",
        stopped_by="network namespace",
        steps=(
            python(
                CONNECT
                + """
attempt(socket.AF_INET, ("127.0.0.1", @API_PORT@))
attempt(socket.AF_INET6, ("::1", @API_PORT@))
attempt(socket.AF_INET6, ("::ffff:127.0.0.1", @API_PORT@))
attempt(socket.AF_INET, ("0.0.0.0", @API_PORT@))
"""
            ),
            "exec 3<>/dev/tcp/127.0.0.1/@API_PORT@ && echo WON || echo refused by bash",
        ),
        shows=(r"^refused \('127", "^refused by bash$"),
        hides=("^WON",),
    ),
    Attack(
        name="metadata_service",
        tries="the cloud's metadata services",
        surface="link-local addresses",
        stopped_by="no interface but `lo`, no route",
        steps=(
            python(
                CONNECT
                + """
attempt(socket.AF_INET, ("169.254.169.254", 80))
attempt(socket.AF_INET, ("169.254.170.2", 80))
attempt(socket.AF_INET6, ("fd00:ec2::254", 80))
attempt(socket.AF_INET6, ("fe80::1", 80))
"""
            ),
        ),
        shows=("^refused .*169.254.169.254.*unreachable",),
        hides=("^WON",),
    ),
    Attack(
        name="names_and_datagrams",
        tries="datagrams and look-ups",
        surface="DNS, multicast, broadcast",
        stopped_by="no interface but `lo`, no route",
        steps=(
            python(
                CONNECT
                + """
for address in (("192.0.2.1", 53), ("224.0.0.1", 5353), ("255.255.255.255", 9)):
    attempt(socket.AF_INET, address, socket.SOCK_DGRAM)
attempt(socket.AF_INET6, ("ff02::1", 5353), socket.SOCK_DGRAM)
try:
    print("WON", socket.getaddrinfo("secret.example.invalid", 80))
except OSError as error:
    print("refused a name:", error)
"""
            ),
        ),
        shows=(r"^refused .*192\.0\.2\.1", "^refused a name"),
        hides=("^WON",),
    ),
    Attack(
        name="interfaces",
        tries="raw and packet sockets, netlink",
        surface="interfaces and raw packets",
        stopped_by="no capability",
        steps=(
            "tail -n +3 /proc/net/dev | cut -d: -f1",
            python("""
import socket, struct
for family, kind, number in (
    (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP),
    (socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW),
    (socket.AF_INET6, socket.SOCK_RAW, socket.IPPROTO_ICMPV6),
    (socket.AF_PACKET, socket.SOCK_RAW, 3),
    (socket.AF_PACKET, socket.SOCK_DGRAM, 3),
):
    try:
        socket.socket(family, kind, number).close()
        print("WON", family, kind)
    except OSError as error:
        print("refused", family.name, error)
# RTM_NEWLINK: a dummy interface.
try:
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as link:
        link.settimeout(3)
        kind = struct.pack("HH", 4 + 6, 1) + b"dummy\\0" + b"\\0\\0"
        info = struct.pack("HH", 4 + len(kind), 18) + kind
        body = struct.pack("BxHiII", 0, 0, 0, 0, 0) + info
        link.send(struct.pack("IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
        code = struct.unpack_from("i", link.recv(4096), 16)[0]
        print("refused" if code < 0 else "WON", "a new link", code)
except OSError as error:
    print("refused a new link", error)
"""),
        ),
        shows=(r"^\s*lo$", "^refused AF_PACKET", "^refused a new link"),
        hides=("^WON", "eth0"),
    ),
    Attack(
        name="other_families",
        tries="vsock to the hypervisor, and other families",
        surface="sockets without namespaces",
        stopped_by="filter of system calls",
        steps=(
            python("""
import socket
for number, name in ((40, "vsock"), (30, "tipc"), (31, "bluetooth"), (21, "rds"), (41, "kcm"), (44, "xdp")):
    try:
        caller = socket.socket(number, socket.SOCK_STREAM)
    except OSError as error:
        print("refused", name, error)
        continue
    try:
        caller.settimeout(3)
        caller.connect((2, 1024))
        print("WON", name)
    except OSError as error:
        # A reset is the host's answer: nobody listens on this port.
        print("WON" if isinstance(error, ConnectionResetError) else "refused", name, error)
    except TypeError as error:
        print("refused", name, error)
"""),
        ),
        shows=("^refused vsock",),
        hides=("^WON",),
    ),
    Attack(
        name="named_sockets",
        tries="Docker's, D-Bus', any other",
        surface="named sockets",
        stopped_by="none is mounted",
        steps=(
            "find / -xdev -type s 2>/dev/null | head; echo looked",
            "ls /run /var/run /tmp /run/docker.sock /run/dbus /run/user 2>/dev/null | grep -e sock -e dbus "
            "&& echo WON; echo tried",
        ),
        shows=("^looked\n", "^tried$"),
        hides=("^WON", r"\.sock$"),
    ),
]


@pytest.mark.parametrize("attack", cases(ATTACKS))
def test_nothing_answers(lab: Lab, attack: Attack) -> None:
    lab.attack(attack)


@pytest.fixture
def host_listeners() -> Iterator[tuple[int, int, str]]:
    """Yield ports on loopback and on every address, and the name of an abstract socket, all of the host."""
    abstract = f"host-{id(object())}"
    with (
        socket.create_server(("127.0.0.1", 0)) as loopback,
        socket.create_server(("0.0.0.0", 0)) as everywhere,
        socket.socket(socket.AF_UNIX) as unix,
    ):
        unix.bind("\0" + abstract)
        unix.listen()
        yield loopback.getsockname()[1], everywhere.getsockname()[1], abstract


@pytest.mark.attack(
    "listeners on all addresses, abstract sockets",
    surface="addresses of the host",
    stopped_by="network namespace",
)
def test_listeners_of_the_host_are_out_of_reach(lab: Lab, host_listeners: tuple[int, int, str]) -> None:
    loopback, everywhere, abstract = host_listeners
    attempts = [f'attempt(socket.AF_INET, ("127.0.0.1", {loopback}))']
    addresses = socket.getaddrinfo(socket.gethostname(), everywhere, type=socket.SOCK_STREAM)
    attempts += [f"attempt({int(family)}, {address!r})" for family, _, _, _, address in addresses]
    attempts += [f'attempt(socket.AF_UNIX, "\\0{abstract}")']
    outcome = lab.attack(
        Attack(
            name="host_listeners",
            goal="Reach a service of the host at its own address, or its abstract socket.",
            steps=(python(CONNECT + "\n".join(attempts)),),
            hides=("^WON",),
        )
    )
    assert sum(line.startswith("refused") for line in outcome.text.splitlines()) == len(attempts)
