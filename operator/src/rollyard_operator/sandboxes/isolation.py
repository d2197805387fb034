"""The addresses that a sandbox must not reach, although they answer an unrestricted pod.

The operator's own pod is not restricted, so the operator itself finds out whether the addresses outside the
cluster answer at all. An address that never answers proves nothing.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from rollyard_operator.kube.client import KubeClient
from rollyard_operator.kube.errors import KubeError
from rollyard_operator.sandboxes.observations import connect
from rollyard_operator.settings import OperatorSettings, SettingsError

RESOLVE_SECONDS = 10.0
RESOLVER = Path("/etc/resolv.conf")
METADATA = "169.254.169.254:80"
"""The address where clouds hand out the credentials of the node."""
AGAIN_SECONDS = 300.0
"""The time between two tries, in seconds."""
TRY_SECONDS = 3.0
NOT_PROVEN = (
    "no sandbox tries an address outside of the cluster before it is handed out (value "
    "sandboxes.isolation.external): that they reach none rests on the NetworkPolicies alone"
)
SILENT = (
    "none of the addresses outside of the cluster answers the operator ({}), so that it proves nothing that "
    "sandboxes do not reach them (value sandboxes.isolation.external)"
)
_log = logging.getLogger(__name__)


async def isolation_checks(
    settings: OperatorSettings, kube: KubeClient, env: Mapping[str, str], resolver: Path = RESOLVER
) -> tuple[str, ...]:
    """Return the `ADDRESS:PORT` of each check. The result is empty if isolation is not required.

    Names are resolved here because a sandbox has no DNS. Without `isolation.checks` the checks are the API
    server as pods reach it, the control plane, the DNS servers that the operator itself uses in a pod, and
    the metadata address of clouds. The addresses of `isolation.external` are always added.

    Args:
        env: The environment of the process. In a pod it contains the address of the API server.
        resolver: The file that names the DNS servers.

    Raises:
        SettingsError: A name cannot be resolved, or there is no address to check against.
    """
    if not settings.isolation.required:
        return ()
    targets = list(settings.isolation.checks)
    if not targets:
        targets = [*await _api_server(kube, env), *_control_plane(settings)]
    addresses = await _resolved(targets)
    if not addresses:
        raise SettingsError(
            "isolation.checks: neither the API server's nor the control plane's address is one that pods "
            "could reach; name one, such as 10.96.0.1:443, or say isolation.required: false"
        )
    if not settings.isolation.checks:
        addresses += (*_dns(env, resolver), METADATA)
    return tuple(dict.fromkeys((*addresses, *await external_checks(settings))))


async def external_checks(settings: OperatorSettings) -> tuple[str, ...]:
    """Return the `ADDRESS:PORT` of each check outside the cluster's own networks.

    Raises:
        SettingsError: A name cannot be resolved.
    """
    return await _resolved(settings.isolation.external)


async def _resolved(targets: Iterable[str]) -> tuple[str, ...]:
    addresses: dict[str, None] = {}
    for target in targets:
        addresses |= dict.fromkeys(await _resolve(target))
    return tuple(addresses)


def _dns(env: Mapping[str, str], resolver: Path) -> list[str]:
    """Return the cluster's DNS servers if the operator runs in a pod. Data could leave a sandbox by DNS."""
    if not env.get("KUBERNETES_SERVICE_HOST"):
        return []
    try:
        lines = resolver.read_text(errors="replace").splitlines()
    except OSError:
        return []
    words = [line.split() for line in lines]
    hosts = [one[1] for one in words if len(one) > 1 and one[0] == "nameserver"]
    return [_join(host, 53) for host in hosts if _is_address(host)]


def _is_address(text: str) -> bool:
    try:
        return not ipaddress.ip_address(text).is_loopback
    except ValueError:
        return False


async def _api_server(kube: KubeClient, env: Mapping[str, str]) -> list[str]:
    host = env.get("KUBERNETES_SERVICE_HOST", "")
    if host:
        return [_join(host, int(env.get("KUBERNETES_SERVICE_PORT") or 443))]
    try:
        service = await kube.get("Service", "default", "kubernetes")
    except KubeError:
        return []  # The operator may not read the service. The control plane is checked.
    if service is None:
        return []
    port = service["spec"]["ports"][0]["port"]
    return [_join(address, port) for address in service["spec"].get("clusterIPs") or ()]


def _control_plane(settings: OperatorSettings) -> list[str]:
    parts = urlsplit(settings.control_plane_url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return [_join(parts.hostname, port)] if parts.hostname else []


def _join(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def _resolve(target: str) -> list[str]:
    host, _, port = target.rpartition(":")
    host = host.strip("[]")
    try:
        async with asyncio.timeout(RESOLVE_SECONDS):
            infos = await asyncio.get_running_loop().getaddrinfo(
                host, int(port), type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
            )
    except (OSError, TimeoutError) as error:
        raise SettingsError(f"isolation.checks: {target}: the name cannot be resolved: {error}") from error
    addresses = dict.fromkeys(str(info[4][0]) for info in infos)
    # Loopback addresses are left out, because a pod may reach anything on its own loopback.
    return [_join(one, int(port)) for one in addresses if not ipaddress.ip_address(one).is_loopback]


class Witnesses:
    """Tries the addresses every AGAIN_SECONDS.

    Args:
        targets: The addresses as `ADDRESS:PORT`, with names resolved.
    """

    def __init__(self, targets: Sequence[str]) -> None:
        self._targets = tuple(targets)
        self._answering: frozenset[str] | None = None

    async def run(self) -> None:
        """Try the addresses until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(AGAIN_SECONDS)

    async def look(self) -> None:
        """Try all addresses once, at the same time."""
        answers = await asyncio.gather(*(_answers(target) for target in self._targets))
        now = frozenset(target for target, fine in zip(self._targets, answers, strict=True) if fine)
        if now != self._answering:
            self._answering = now
            if doubt := self.doubt():
                _log.warning("%s", doubt)

    def doubt(self) -> str:
        """Return what is not proven about the isolation of sandboxes.

        An empty string means that everything is proven, or that it is not known yet.
        """
        if not self._targets:
            return NOT_PROVEN
        if self._answering is None or self._answering:
            return ""
        return SILENT.format(", ".join(self._targets))


async def _answers(target: str) -> bool:
    host, _, port = target.rpartition(":")
    try:
        async with asyncio.timeout(TRY_SECONDS):
            await connect(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    return True
