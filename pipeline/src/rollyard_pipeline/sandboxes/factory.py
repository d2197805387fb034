"""A provider by name."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rollyard_crds.names import NODE, PROVIDER

from rollyard_pipeline.control_plane.calls import ClaimCalls
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions, ApptainerStarter
from rollyard_pipeline.sandboxes.claims import ClaimProvider
from rollyard_pipeline.sandboxes.host import cgroups
from rollyard_pipeline.sandboxes.host.records import SandboxFolder
from rollyard_pipeline.sandboxes.interface import SandboxProvider
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_pipeline.sandboxes.starters.bare_process import WARNING, ProcessStarter
from rollyard_pipeline.sandboxes.starters.bubblewrap import BubblewrapStarter

log = logging.getLogger(__name__)

PROVIDERS: Final = ("bubblewrap", "apptainer", "process", PROVIDER)


def open_provider(
    name: str,
    *,
    run_dir: Path | str,
    node: str,
    starts_at_once: int | None = None,
    bwrap: str | None = None,
    find_places: Callable[[], Sequence[cgroups.CgroupPlace]] = cgroups.find_places,
    claims: ClaimCalls | None = None,
    apptainer: ApptainerOptions | None = None,
) -> SandboxProvider:
    """The provider `name`; await its `start()` before anything else.

    Args:
        run_dir: shared by all workers of the node; claimed pods need none.
        node: name of the node, as handles carry it.
        starts_at_once: default: the number of CPU cores, at least 2.
        bwrap: path of the bubblewrap program; default: from PATH.
        find_places: where control groups can be made.
        claims: the control plane's claims; `kubernetes` needs them.
        apptainer: for `apptainer` sandboxes.

    Raises:
        ValueError: no provider has that name, or it lacks what it needs; the message names the option.
    """
    if name not in PROVIDERS:
        raise ValueError(f"--sandbox {name}: there is no such provider; choose one of {', '.join(PROVIDERS)}")
    if name == PROVIDER:
        if claims is None:
            raise ValueError(f"--sandbox {name}: needs a control plane that takes claims")
        if node != NODE:
            raise ValueError(
                f"--node {node}: sandbox pods are reached from every worker alike, so that workers with "
                f"--sandbox {name} have --node {NODE}"
            )
        return ClaimProvider(claims)
    folder = SandboxFolder(Path(run_dir))
    places = list(find_places())
    missing = {"memory", "pids"} - cgroups.enforced(places)
    if missing and os.geteuid() == 0:
        log.warning(
            "no writable control groups for %s: as root the limit on processes does not bind, and memory is "
            "limited per process only; give this container its own writable cgroups, or run as another user",
            " and ".join(sorted(missing)),
        )
    starts = starts_at_once or max(2, os.cpu_count() or 2)
    if name == "process":
        log.warning(WARNING, os.geteuid())
        return NodeProvider(folder, node, ProcessStarter(places), places, starts)
    if name == "apptainer":
        options = apptainer or ApptainerOptions()
        return NodeProvider(folder, node, ApptainerStarter(folder, places, options), places, starts)
    return NodeProvider(folder, node, BubblewrapStarter(folder, places, bwrap), places, starts)
