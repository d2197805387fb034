"""What a sandbox can see and touch: nothing of the machine, nothing of its neighbours."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from rollyard_pipeline.sandboxes.provider import NodeProvider


async def test_neighbours_are_invisible(kit: Any, isolated: NodeProvider, run_dir: Path) -> None:
    async with await kit.acquire(isolated, "r-1") as first, await kit.acquire(isolated, "r-2") as second:
        await kit.sh(
            first, "echo secret > mine; echo secret > /tmp/mine; (exec -a neighbour sleep 100) & disown"
        )
        assert (await kit.sh(first, "cat mine"))[1] == "secret"
        for path in ("/work/mine", "/tmp/mine", str(run_dir), first.handle.address.removeprefix("unix:")):
            code, _ = await kit.sh(second, f"test -e {path}")
            assert code == 1, f"{path} is visible"
        _, listing = await kit.sh(second, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
        assert "neighbour" not in listing
        assert str(run_dir) not in listing
        assert (await kit.sh(second, "find / -xdev -type s 2>/dev/null"))[1] == ""
        # An abstract or path socket of another network namespace is not listed either.
        assert first.handle.id not in (await kit.sh(second, "cat /proc/net/unix"))[1]


async def test_home_tokens_and_accounts_are_invisible(
    kit: Any, isolated: NodeProvider, run_dir: Path
) -> None:
    token = run_dir / "tokens.json"
    token.write_text("secret-token")
    async with await kit.acquire(isolated) as sandbox:
        for path in (
            token,
            Path.home() / ".bashrc",
            Path.home() / ".ssh",
            "/etc/shadow",
            "/etc/ssh",
            Path.cwd(),
        ):
            assert (await kit.sh(sandbox, f"test -e {path}"))[0] == 1, f"{path} is visible"
        assert (await kit.sh(sandbox, "ls -A /home /root /opt /work"))[1].split() == [
            "/home:",
            "/opt:",
            "/root:",
            "/work:",
        ]
        assert (await kit.sh(sandbox, "cat /etc/passwd"))[1].count("\n") == 2
        _, environment = await kit.sh(sandbox, "env")
        assert {line.split("=")[0] for line in environment.splitlines()} <= {
            "PATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "TERM", "TMPDIR", "PWD", "OLDPWD", "SHLVL",
            "_",
        }  # fmt: skip


async def test_host_processes_are_out_of_reach(kit: Any, isolated: NodeProvider) -> None:
    async with await kit.acquire(isolated) as sandbox:
        _, pids = await kit.sh(sandbox, "ls /proc | grep -c '^[0-9]'")
        assert int(pids) < 12
        _, roots = await kit.sh(sandbox, "ls /proc/1/root/home /proc/1/root/root 2>&1; ls /proc/1/cwd/ 2>&1")
        assert ".bashrc" not in roots
        for namespace in ("pid", "mnt", "user", "ipc", "net", "uts"):
            _, inside = await kit.sh(sandbox, f"readlink /proc/self/ns/{namespace}")
            assert inside != os.readlink(f"/proc/self/ns/{namespace}"), namespace
        assert (await kit.sh(sandbox, "hostname"))[1] == "sandbox"


@pytest.mark.parametrize(
    "script",
    [
        "touch /dev/x", "touch /.rollyard/x",
        "echo x > /proc/sys/kernel/core_pattern", "echo 1 > /proc/sys/vm/drop_caches",
        "mount -o remount,rw /usr", "mount -t tmpfs none /mnt", "umount /proc/sys", "unshare -U true",
        "unshare -m true", "chroot / true", "mknod /tmp/sda b 8 0", "echo 1 > /proc/sysrq-trigger",
        "head -c 1 /proc/kcore", "hostname other",
    ],
)  # fmt: skip
async def test_system_cannot_be_changed(kit: Any, isolated: NodeProvider, script: str) -> None:
    async with await kit.acquire(isolated) as sandbox:
        code, output = await kit.sh(sandbox, script)
        assert code != 0, output
        assert code != 127, f"the program is missing, so nothing was tried: {output}"


@pytest.mark.parametrize("path", ["/usr/x", "/etc/x", "/x", "/run/x"])
async def test_machines_own_system_is_read_only(kit: Any, bubblewrap: NodeProvider, path: str) -> None:
    async with await kit.acquire(bubblewrap) as sandbox:
        assert (await kit.sh(sandbox, f"touch {path}"))[0] != 0


async def test_usual_things_work(kit: Any, isolated: NodeProvider) -> None:
    async with await kit.acquire(
        isolated, env={"GREETING": "hi"}, files={"a/b.txt": "x y\n", "/tmp/c": "z"}
    ) as sandbox:
        assert sandbox.workdir == "/work"
        script = (
            "echo $GREETING; cat a/b.txt /tmp/c; echo; pwd; sort <<< 'b\na'; echo x > /dev/shm/y; tty; id -un"
        )
        code, output = await kit.sh(sandbox, script)
        assert code == 0 or "not a tty" in output
        assert output.splitlines() == ["hi", "x y", "z", "/work", "a", "b", "not a tty", "sandbox"]
        assert (
            await kit.sh(sandbox, "/.rollyard/venv/bin/python -c 'import ipykernel, zmq, ssl; print(1)'")
        )[1] == "1"
