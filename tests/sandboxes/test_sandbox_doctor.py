"""Clear answers where sandboxes cannot be started, or limits bind less."""

from __future__ import annotations

import logging
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.lease import LeaseRef
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.doctor import limits_check, sandbox_checks
from rollyard_pipeline.sandboxes.errors import NodeUnusable
from rollyard_pipeline.sandboxes.host import cgroups
from rollyard_pipeline.sandboxes.host.cgroups import CgroupLimits, CgroupPlace
from rollyard_pipeline.sandboxes.interface import SandboxRequest
from rollyard_pipeline.sandboxes.starters.bubblewrap import (
    MOUNT_TRIES,
    bwrap_version,
    forbidden_text,
    userns_advice,
)


def program(folder: Path, script: str) -> str:
    path = folder / "bwrap"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


_REFUSING = """case "$1" in --version) echo bubblewrap 0.8.0;; *) echo "bwrap: No permissions to create a new
namespace" >&2; exit 1;; esac"""


async def test_no_bubblewrap(run_dir: Path) -> None:
    checks = await sandbox_checks(run_dir, bwrap=str(run_dir / "none"))
    assert not checks[0].ok
    assert "apt-get install bubblewrap" in checks[0].remedy
    assert "--sandbox process" in checks[0].remedy
    with pytest.raises(NodeUnusable) as caught:
        await open_provider("bubblewrap", run_dir=run_dir, node="n", bwrap=str(run_dir / "none")).start()
    assert caught.value.reason == "BubblewrapMissing"


async def test_forbidden_namespaces(run_dir: Path, tmp_path: Path) -> None:
    bwrap = program(tmp_path, _REFUSING)
    names = {check.name: check for check in await sandbox_checks(run_dir, bwrap=bwrap)}
    assert names["bubblewrap"].ok
    assert not names["user namespaces"].ok
    assert "No permissions to create a new" in names["user namespaces"].remedy
    with pytest.raises(NodeUnusable, match=r"What to do: .*--sandbox process") as caught:
        await open_provider("bubblewrap", run_dir=run_dir, node="n", bwrap=bwrap).start()
    assert caught.value.reason == "UserNamespacesForbidden"


_MOUNT_AWAY = """case "$1" in --version) ;; *)
  n=$(cat {count} 2>/dev/null || echo 0); echo $((n + 1)) > {count}
  if [ $((n % 3)) -lt {fails} ]; then
    echo "bwrap: Can't bind mount / on /newroot/: Unable to apply mount flags: Invalid argument" >&2
    exit 1
  fi;;
esac; exec {bwrap} "$@\""""


async def test_mounts_that_change_under_bubblewrap_are_no_failure(
    bubblewrap_works: None, run_dir: Path, tmp_path: Path, kit: Any
) -> None:
    text = _MOUNT_AWAY.format(count=tmp_path / "count", fails=2, bwrap=shutil.which("bwrap"))
    provider = open_provider("bubblewrap", run_dir=run_dir, node="n", bwrap=program(tmp_path, text))
    await provider.start()
    try:
        lease = LeaseRef(rollout="r-1", token=1)
        sandbox = await provider.acquire(SandboxRequest(memory_bytes=192 << 20), lease)
        assert (await sandbox.client.bash("echo here")).text() == "here\n"
        # The probe and the start have failed twice each.
        assert (tmp_path / "count").read_text() == "6\n"
    finally:
        await kit.clean(provider)


async def test_mounts_that_never_come_to_rest_are_one(run_dir: Path, tmp_path: Path) -> None:
    text = _MOUNT_AWAY.format(count=tmp_path / "count", fails=3, bwrap="false")
    bwrap = program(tmp_path, text.replace("--version) ;;", "--version) echo bubblewrap 0.8.0; exit;;"))
    with pytest.raises(NodeUnusable, match="Unable to apply mount flags"):
        await open_provider("bubblewrap", run_dir=run_dir, node="n", bwrap=bwrap).start()
    assert int((tmp_path / "count").read_text()) == MOUNT_TRIES


def test_advice_names_the_setting_that_forbids(tmp_path: Path) -> None:
    for name, value in (
        ("kernel/unprivileged_userns_clone", "0"),
        ("kernel/apparmor_restrict_unprivileged_userns", "1"),
        ("user/max_user_namespaces", "1000"),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(value + "\n")
    advice = userns_advice(tmp_path)
    assert len(advice) == 2
    assert "sysctl -w kernel.unprivileged_userns_clone=1" in advice[0]
    assert "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0" in advice[1]
    (tmp_path / "user/max_user_namespaces").write_text("0")
    assert "user.max_user_namespaces=15000" in forbidden_text("no", tmp_path)
    assert "--security-opt seccomp=unconfined" in forbidden_text("no", tmp_path / "none")


def test_version() -> None:
    assert bwrap_version("bubblewrap 0.8.0\n") == (0, 8, 0)
    assert bwrap_version("bubblewrap 0.11.0") > (0, 8, 0)
    assert bwrap_version("what?") == ()


def test_limits_say_which_kind_is_in_force() -> None:
    whole = [CgroupPlace(2, Path("/x"), frozenset({"memory", "pids", "cpu"}))]
    assert "as a whole (cgroup v2)" in limits_check(whole, root=True, release="6.1.0").meaning
    user = limits_check([], root=False, release="6.1.0-13-amd64")
    assert user.ok
    assert "limited per sandbox (RLIMIT_NPROC)" in user.meaning
    assert "Delegate=yes" in user.remedy
    assert "whole account" in limits_check([], root=False, release="5.10.0").meaning
    root = limits_check([], root=True, release="6.1.0")
    assert not root.ok
    assert "do not bind root" in root.meaning


@pytest.mark.skipif(os.geteuid() != 0, reason="the warning is for root")
async def test_root_without_control_groups_is_warned(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    provider = open_provider("bubblewrap", run_dir=run_dir, node="n", find_places=list)
    with caplog.at_level(logging.WARNING):
        await provider.start()
    await provider.aclose()
    assert "the limit on processes does not bind" in caplog.text


# The forms of published recordings of machines on which systemd mounts version 2 only.
MOUNTS_V2 = (
    "24 31 0:22 / /sys rw,nosuid,nodev,noexec,relatime shared:7 - sysfs sysfs rw\n"
    "25 31 0:23 / /proc rw,nosuid,nodev,noexec,relatime shared:12 - proc proc rw\n"
    "34 24 0:29 / {mount} rw,nosuid,nodev,noexec,relatime shared:9"
    " - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
)
CONTROLLERS_V2 = "cpuset cpu io memory hugetlb pids rdma misc\n"
EVENTS_V2 = "low 0\nhigh 0\nmax 35\noom 1\noom_kill 3\noom_group_kill 1\n"


def fake_v2(tmp_path: Path, own: str, given: dict[str, str]) -> Path:
    """Make a /proc/self and a version 2 hierarchy as plain folders: what is written can be read back."""
    mount = tmp_path / "cgroup"
    for name, controllers in given.items():
        group = mount / name
        group.mkdir(parents=True, exist_ok=True)
        (group / "cgroup.subtree_control").write_text(controllers)
        (group / "cgroup.controllers").write_text(CONTROLLERS_V2)
        (group / "cgroup.procs").touch()
    proc = tmp_path / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text(f"0::{own}\n")
    (proc / "mountinfo").write_text(MOUNTS_V2.format(mount=mount))
    return proc


def test_version_2_takes_the_nearest_ancestor_that_hands_controllers_on(tmp_path: Path) -> None:
    slice_ = "user.slice/user@1000.service/app.slice"
    proc = fake_v2(
        tmp_path, f"/{slice_}/worker.scope", {"": "", slice_: "memory pids", f"{slice_}/worker.scope": ""}
    )
    place = tmp_path / "cgroup" / slice_ / "rollyard"
    place.mkdir()
    (place / "cgroup.controllers").write_text("memory pids")
    (place / "cgroup.subtree_control").write_text("memory pids")
    assert cgroups.find_places(proc) == [CgroupPlace(2, place, frozenset({"memory", "pids"}))]


def test_no_place_where_nothing_is_handed_on(tmp_path: Path) -> None:
    assert cgroups.find_places(fake_v2(tmp_path, "/a", {"a": ""})) == []
    assert cgroups.find_places(tmp_path / "missing") == []


@pytest.mark.parametrize("version", [1, 2])
def test_settings_of_both_versions(tmp_path: Path, version: int) -> None:
    place = CgroupPlace(version, tmp_path, frozenset({"memory", "pids", "cpu"}))
    (group,) = cgroups.create([place], "abc", CgroupLimits(cpu=0.5, memory_bytes=1000, processes=7))
    written = {file.name: file.read_text() for file in group.iterdir()}
    if version == 1:
        assert (written["memory.limit_in_bytes"], written["cpu.cfs_quota_us"]) == ("1000", "50000")
        assert (written["memory.kmem.tcp.limit_in_bytes"], written["pids.max"]) == ("125", "7")
    else:
        # Version 2 counts buffers of sockets with all other memory (the line `sock` of memory.stat).
        assert written == {
            "memory.max": "1000", "memory.swap.max": "0", "memory.oom.group": "0", "pids.max": "7",
            "cpu.max": "50000 100000",
        }  # fmt: skip


def test_oom_kills_of_both_versions(tmp_path: Path) -> None:
    for name, file, text in (("1", "memory.oom_control", "oom_kill 2\n"), ("2", "memory.events", EVENTS_V2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / file).write_text(text)
    assert cgroups.oom_kills([tmp_path / "1", tmp_path / "2", tmp_path / "gone"]) == 5
