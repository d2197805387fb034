"""The same sandboxes for an ordinary user, without control groups: resource limits bind instead."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollyard_testing.pace import patience

_USER = 65534

_PROGRAM = """
import asyncio, json, os, resource, sys
from pathlib import Path
from rollyard_crds.lease import LeaseRef
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.doctor import sandbox_checks
from rollyard_pipeline.sandboxes.host.records import SandboxFolder
from rollyard_pipeline.sandboxes.interface import SandboxRequest

async def main():
    # This is what a login shell permits; the descriptors in flight below are more.
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    provider = open_provider("bubblewrap", run_dir=sys.argv[1], node="n", find_places=lambda: [])
    await provider.start()
    request = SandboxRequest(memory_bytes=192 << 20, disk_bytes=16 << 20, processes=40)
    answer = {"uid": os.getuid()}
    other = await provider.acquire(request, LeaseRef(rollout="r-2", token=1))
    async with other, await provider.acquire(request, LeaseRef(rollout="r-1", token=1)) as sandbox:
        for name, script in json.loads(sys.argv[2]).items():
            result = await sandbox.client.run(["bash", "-c", script], timeout=20)
            answer[name] = [result.exit_code, result.output.decode(errors="replace").strip()]
        result = await other.client.run(["bash", "-c", "echo unharmed"], timeout=20)
        answer["other"] = result.output.decode().strip()
        answer["flight"] = (await other.client.bash(sys.argv[3], timeout=20)).text()
        async with await provider.acquire(request, LeaseRef(rollout="r-3", token=1)) as third:
            answer["forked"] = SandboxFolder(Path(sys.argv[1])).load(third.handle.id).monitor is None
    for sandbox_id in provider.claimed():
        await provider.release(sandbox_id)
    await provider.aclose()
    answer["left"] = sorted(os.listdir(Path(sys.argv[1]) / "sandboxes"))
    answer["limits"] = [check.meaning for check in await sandbox_checks(Path(sys.argv[1]), places=lambda: [])
                        if check.name == "limits"]
    print(json.dumps(answer))

asyncio.run(main())
"""

_IN_FLIGHT = """
import os, socket, time
held, sent, null = [], 0, os.open("/dev/null", os.O_RDONLY)
try:
    while True:
        here, there = socket.socketpair()
        held += [here, there]
        here.setblocking(False)
        try:
            while True:
                socket.send_fds(here, [b"x"], [null] * 250)
                sent += 250
        except BlockingIOError:
            continue
except OSError as error:
    print(sent, error.strerror, flush=True)
time.sleep(300)
"""


@pytest.fixture
def user_run_dir() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="ry-u-"))
    if os.geteuid() == 0:
        os.chown(folder, _USER, _USER)
    yield folder
    shutil.rmtree(folder)


def command_as_user() -> tuple[list[str], dict[str, str]]:
    """Return the command of a Python that can import this project as an ordinary user."""
    path = [entry for entry in sys.path if entry and Path(entry).is_dir()] + site.getsitepackages()
    if os.geteuid() != 0:
        return [sys.executable], {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    outside = [entry for entry in path if Path(sys.base_prefix) not in (Path(entry), *Path(entry).parents)]
    env = {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": os.pathsep.join(outside),
        "HOME": "/nonexistent",
    }
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    become = ["setpriv", f"--reuid={_USER}", f"--regid={_USER}", "--clear-groups", "--inh-caps=-all"]
    for python in (sys.executable, f"/usr/bin/{name}", f"/usr/local/bin/{name}"):
        command = [*become, python]
        test = [
            *command,
            "-c",
            "import sys, rollyard_pipeline.sandboxes, zmq; open(sys._base_executable).close()",
        ]
        if subprocess.run(test, env=env, cwd="/", capture_output=True, timeout=patience(60)).returncode == 0:
            return command, env
    pytest.skip(
        "no Python on this machine lets an ordinary user import this project (a checkout in a home folder?)"
    )


def test_ordinary_user(bubblewrap_works: None, user_run_dir: Path) -> None:
    command, env = command_as_user()
    scripts = {
        "id": "id -u",
        "fork": "for i in $(seq 120); do sleep 5 & done 2>&1; kill $(jobs -p)",
        "memory": "/.rollyard/venv/bin/python -c 'b = bytearray(300 << 20)'",
        "disk": "head -c 100M /dev/zero > big; rm big",
        "network": "exec 3<>/dev/tcp/192.0.2.1/80",
        "home": "ls -A /root /home",
        "system": "touch /usr/x",
        "sysctl": "echo x > /proc/sys/kernel/core_pattern",
        "caps": "grep -c 'Cap.*[1-9a-f]$' /proc/self/status",
        "alive": "echo alive",
    }
    flight = f"(exec /.rollyard/venv/bin/python -c '{_IN_FLIGHT}' > flight &); "
    flight += "until [ -s flight ]; do sleep 0.01; done; cat flight"
    done = subprocess.run(
        [*command, "-c", _PROGRAM, str(user_run_dir), json.dumps(scripts), flight],
        env=env, cwd="/", capture_output=True, text=True, timeout=patience(55),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert answer["uid"] != 0
    assert answer["id"] == [0, "1000"]
    assert "Resource temporarily unavailable" in answer["fork"][1]
    assert "MemoryError" in answer["memory"][1]
    assert "No space left on device" in answer["disk"][1]
    assert answer["home"] == [0, "/home:\n\n/root:"]
    assert answer["caps"] == [1, "0"]
    for name in ("network", "system", "sysctl"):
        assert answer[name][0] != 0, name
    assert answer["alive"] == [0, "alive"]
    # Whatever sandboxes hold in flight, the next one is still forked from a template.
    assert "Too many references" in answer["flight"]
    assert answer["forked"]
    assert answer["other"] == "unharmed"
    assert answer["left"] == [".sweep"]
    assert "limited per sandbox (RLIMIT_NPROC)" in answer["limits"][0]
