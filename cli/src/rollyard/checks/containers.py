"""Rootless containers: user namespaces, ids for them, FUSE, and Apptainer or SingularityCE."""

from __future__ import annotations

import getpass
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from rollyard.checks.finding import Finding, Runner, Verdict, run

SUBIDS = 65536
"""User ids that a fakeroot container wants."""
_ANSWER = re.compile(r"\b(apptainer|singularity-ce|singularity)(?:-pro)? version (\d+)\.(\d+)\S*", re.I)
_OLDEST = {"apptainer": (1, 1), "singularity-ce": (3, 11)}
FUSE_RULE = 'KERNEL=="fuse", MODE="0666"'


def check_user_namespaces(sysctl: Path = Path("/proc/sys"), runner: Runner = run) -> Finding:
    """Whether this user may make user namespaces: everything rootless rests on them."""
    from rollyard_pipeline.sandboxes.bubblewrap import userns_advice

    name = "user namespaces"
    code, text = runner("unshare", "--user", "--map-root-user", "--mount", "true")
    if code == 0:
        return Finding(name, "ok", "this user may make them, and mount in them")
    if code == 127:
        return Finding(name, "optional", "not tried: no `unshare` on PATH", "install util-linux")
    advice = userns_advice(sysctl) or [
        "in a container or chroot the kernel refuses them: run outside, or with a seccomp profile that "
        "allows unshare, clone and mount"
    ]
    return Finding(name, "missing", f"refused: {text}", "ask the administrator: " + "; ".join(advice))


def check_subordinate_ids(user: str | None = None, etc: Path = Path("/etc"), runner: Runner = run) -> Finding:
    """User and group ids of one's own: only `--fakeroot` builds and sandboxes need them."""
    name = "subuid, subgid"
    user = user or getpass.getuser()
    lacking = []
    for option, file in (("", "subuid"), ("-g", "subgid")):
        ranges = _ranges(etc / file, user) or _from_directory(option, user, runner)
        if max(ranges, default=0) < SUBIDS:
            lacking.append(file)
    helpers = [helper for helper in ("newuidmap", "newgidmap") if shutil.which(helper) is None]
    if not lacking and not helpers:
        return Finding(name, "ok", f"{user} has {SUBIDS} ids or more, and newuidmap is there")
    advice = []
    if lacking:
        advice.append(f"usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}")
    if helpers:
        advice.append("the package uidmap (Debian) or shadow-utils (Red Hat)")
    found = ", ".join(
        [*(f"no {SUBIDS} ids in {file}" for file in lacking), *(f"no {one}" for one in helpers)]
    )
    return Finding(
        name, "optional", found, "only fakeroot needs it; ask the administrator for " + " and ".join(advice)
    )


def _ranges(file: Path, user: str) -> list[int]:
    """Sizes of the ranges that a file gives to a user, by name or number."""
    try:
        lines = [line.split(":") for line in file.read_text().splitlines()]
    except OSError:
        return []
    owners = {user, str(os.getuid())}
    return [int(line[2]) for line in lines if len(line) == 3 and line[0] in owners and line[2].isdigit()]


def _from_directory(option: str, user: str, runner: Runner) -> list[int]:
    """The same where a site keeps them in LDAP: `0: alice 100000 65536`."""
    code, text = runner("getsubids", *([option] if option else []), user)
    words = text.split()
    return [int(words[-1])] if code == 0 and words and words[-1].isdigit() else []


def fuse_problem(device: Path = Path("/dev/fuse")) -> str | None:
    """Why SIF images cannot be mounted by this user; None where they can."""
    if not device.exists():
        return f"there is no {device}"
    if not os.access(device, os.R_OK | os.W_OK):
        return f"{device} is closed to this user (mode {device.stat().st_mode & 0o777:04o})"
    if shutil.which("squashfuse_ll") is None and shutil.which("squashfuse") is None:
        return "no squashfuse on PATH"
    return None


def check_fuse(device: Path = Path("/dev/fuse")) -> Finding:
    """What mounts SIF images and writable layers without root."""
    problem = fuse_problem(device)
    if problem is not None:
        remedy = {
            True: "the packages squashfuse and fuse-overlayfs",
            False: f"/dev/fuse with mode 0666 (modprobe fuse; udev rule: {FUSE_RULE})",
        }["squashfuse" in problem]
        return Finding(
            "fuse", "optional", problem,
            f"SIF images are unpacked to folders first, which takes time and space; ask for {remedy}",
        )  # fmt: skip
    if shutil.which("fuse-overlayfs") is None:
        return Finding(
            "fuse", "ok", f"{device} is open, squashfuse is there; no fuse-overlayfs",
            "on kernels before 5.11 writable layers need it: ask for the package fuse-overlayfs",
        )  # fmt: skip
    return Finding("fuse", "ok", f"{device} is open; squashfuse and fuse-overlayfs are there")


def check_apptainer(needed: bool = False, runner: Runner = run) -> Finding:
    """Apptainer or SingularityCE, by what they answer: `singularity` may be either, or too old.

    Args:
        needed: on a Slurm cluster its absence is a fault, elsewhere not.
        runner: runs a command.
    """
    verdict: Verdict = "missing" if needed else "optional"
    ask = (
        "ask the administrator for Apptainer 1.1 or newer (or try `module load apptainer`); it can also be "
        "installed without root, with its install-unprivileged.sh"
    )
    seen = []
    for name in ("apptainer", "singularity"):
        path = shutil.which(name)
        if path is None:
            continue
        code, text = runner(path, "--version")
        match = _ANSWER.search(text)
        if code != 0 or match is None:
            seen.append(f"{path} answers {text[:120]!r}")
            continue
        kind, version = match[1].lower(), (int(match[2]), int(match[3]))
        if kind not in _OLDEST or version < _OLDEST[kind]:
            seen.append(f"{match[0]} is too old")
            continue
        return Finding("apptainer", "ok", f"{match[0]} ({path})")
    if seen:
        return Finding("apptainer", verdict, "; ".join(seen), ask)
    return Finding(
        "apptainer",
        verdict,
        "not installed",
        ask if needed else "only `--sandbox apptainer` and Slurm need it",
    )


def examine(needed: bool) -> Iterator[Finding]:
    """All of these."""
    yield check_user_namespaces()
    yield check_subordinate_ids()
    yield check_fuse()
    yield check_apptainer(needed)
