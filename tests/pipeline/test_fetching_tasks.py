"""Task folders whose tests fetch their tools with pip, npm and apt, from the indexes that this machine uses.

The hosts are those of the machine's own settings. Where a name leads to an address that is not public, as
that of a mirror does, the host is pinned to it, as an installer would.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import socket
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import NoReturn
from urllib.parse import urlsplit

import pytest
from rollyard_crds import Task
from rollyard_pipeline.sandboxes.egress.destinations import why_refused
from rollyard_tasks.formats.harbor import HarborFormat
from rollyard_tasks.formats.interface import Row
from rollyard_tasks.harbor.archive import pack, read_folder
from rollyard_testing.pace import patience
from rollyard_testing.pipeline.stagelab import StageLab, stage_lab

FOLDERS = Path(__file__).parents[2] / "examples/harbor/fetching"
RESOURCES = {"memory": "1Gi", "disk": "256Mi", "processes": 256}
PROGRAMS = {"pip": "/usr/bin/pip", "npm": "/usr/bin/npm", "apt": "/usr/bin/apt-get"}
PIP = """
import json
from pip._internal.models.index import PyPI
print(json.dumps([PyPI.simple_url, f"https://{PyPI.file_storage_domain}"]))
"""


def printed(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=patience(30)).stdout


def own_index() -> str:
    """Return the URL of the index that pip is set to use here, or "" for its default."""
    command = ["/usr/bin/pip", "config", "get", "global.index-url"]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(30)).stdout.strip()


def urls_of(tool: str) -> list[str]:
    """Return the URLs of the machine's own index."""
    if tool == "pip":
        own = own_index()
        return [own] if own else list(map(str, json.loads(printed("/usr/bin/python3", "-c", PIP))))
    if tool == "npm":
        return [printed("npm", "config", "get", "registry").strip()]
    return debian_sources()[0].split()


def debian_sources() -> tuple[str, str]:
    """Return the URIs of the sources of Debian itself, and the text of their file."""
    for file in sorted(Path("/etc/apt/sources.list.d").glob("*.sources")):
        text = file.read_text()
        if "debian-archive-keyring" in text:
            lines = [line for line in text.splitlines() if line.startswith("URIs:")]
            return " ".join(line.removeprefix("URIs:") for line in lines), text
    return "", ""


def trouble(tool: str, urls: list[str]) -> str:
    """Return why the tool's index cannot be used here, or ""."""
    if not urls:
        return f"{tool} has no index"
    for url in urls:
        host = urlsplit(url).hostname or ""
        port = urlsplit(url).port or (443 if url.startswith("https:") else 80)
        try:
            socket.create_connection((host, port), timeout=patience(10)).close()
        except OSError as error:
            return f"{host} is not reached: {error}"
    return ""


def entries(urls: list[str]) -> tuple[list[str], list[str]]:
    """Return the hosts as a job names them, and the installer's pins of those that are not public."""
    hosts, pins = [], []
    for url in urls:
        where = urlsplit(url)
        hosts.append(str(where.hostname) + (f":{where.port}" if where.port else ""))
        found = {item[4][0] for item in socket.getaddrinfo(where.hostname, None, type=socket.SOCK_STREAM)}
        pins += [f"{hosts[-1]}={address}" for address in found if why_refused(ipaddress.ip_address(address))]
    return list(dict.fromkeys(hosts)), list(dict.fromkeys(pins))


def task(tool: str) -> Task:
    """Return the task, whose tests know the machine's certificates and its sources of packages."""
    bundle = ssl.get_default_verify_paths().cafile or ""
    env = {"PIP_CERT": bundle, "npm_config_cafile": bundle, "APT_SOURCES": debian_sources()[1]}
    env["PIP_INDEX_URL"] = own_index() if tool == "pip" else ""
    files = dict(read_folder(FOLDERS / tool))
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in env.items() if value)
    toml, mode = files["task.toml"]
    files["task.toml"] = (toml + f"\n[verifier.env]\n{lines}".encode(), mode)
    row = {"path": tool, "task_binary": pack(files)}
    return Task.model_validate(HarborFormat().task(Row(row, 1)))


@pytest.fixture
async def lab(bubblewrap_works: None, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[StageLab]:
    async with stage_lab("bubblewrap", tmp_path_factory.mktemp("f")) as lab:
        yield lab


@pytest.mark.attack(
    "without its walls an attack would fail as well; an honest test gets no tools",
    boundary="network",
    surface="judgement",
    stopped_by="controls, in which each succeeds; an honest test is rewarded, and its author reads what "
    "stayed behind",
)
@pytest.mark.parametrize("tool", ["pip", "npm", "apt"])
async def test_tests_fetch_their_tools(lab: StageLab, tool: str, missing: Callable[[str], NoReturn]) -> None:
    if not Path(PROGRAMS[tool]).exists():
        missing(f"{PROGRAMS[tool]} is not installed")
    urls = await asyncio.to_thread(urls_of, tool)
    if problem := await asyncio.to_thread(trouble, tool, urls):
        pytest.skip(problem)  # It is no part of this machine, which may have no network.
    hosts, pins = entries(urls)
    network = {"eval": {"timeoutSeconds": 180, "network": "allowlist", "allowedHosts": hosts}}
    for steps, reward in ((None, 1.0), ([[]], 0.0)):
        found = await lab.play(
            task(tool), steps, stages=network, sandbox={"warm": 0, "resources": RESOURCES}, pinnedHosts=pins
        )
        assert (found.reward, found.reward_reason) == (reward, ""), found.reward_output
