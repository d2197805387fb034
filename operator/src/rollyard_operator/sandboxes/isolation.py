"""The addresses that a sandbox must not reach, although they answer an unrestricted pod."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from rollyard_operator.kube.errors import KubeError
from rollyard_operator.kube.interface import Kube
from rollyard_operator.settings import OperatorSettings, SettingsError

RESOLVE_SECONDS = 10.0
RESOLVER = Path("/etc/resolv.conf")
METADATA = "169.254.169.254:80"
"""The address where clouds hand out the credentials of the node."""


async def isolation_checks(
    settings: OperatorSettings, kube: Kube, env: Mapping[str, str], resolver: Path = RESOLVER
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
    found = await _resolved(targets)
    if not found:
        raise SettingsError(
            "isolation.checks: neither the API server's nor the control plane's address is one that pods "
            "could reach; name one, such as 10.96.0.1:443, or say isolation.required: false"
        )
    if not settings.isolation.checks:
        found += (*_dns(env, resolver), METADATA)
    return tuple(dict.fromkeys((*found, *await external_checks(settings))))


async def external_checks(settings: OperatorSettings) -> tuple[str, ...]:
    """Return the `ADDRESS:PORT` of each check outside the cluster's own networks.

    Raises:
        SettingsError: A name cannot be resolved.
    """
    return await _resolved(settings.isolation.external)


async def _resolved(targets: Iterable[str]) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for target in targets:
        for address in await _resolve(target):
            found[address] = None
    return tuple(found)


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


async def _api_server(kube: Kube, env: Mapping[str, str]) -> list[str]:
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
            found = await asyncio.get_running_loop().getaddrinfo(
                host, int(port), type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP
            )
    except (OSError, TimeoutError) as error:
        raise SettingsError(f"isolation.checks: {target}: the name cannot be resolved: {error}") from error
    addresses = dict.fromkeys(str(info[4][0]) for info in found)
    # Loopback addresses are left out, because a pod may reach anything on its own loopback.
    return [_join(one, int(port)) for one in addresses if not ipaddress.ip_address(one).is_loopback]
