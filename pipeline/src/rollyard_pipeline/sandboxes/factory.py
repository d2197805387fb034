"""Construction of a sandbox provider by name."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from rollyard_crds.names import NODE, PROVIDER

from rollyard_pipeline.control_plane.calls import WorkerCalls
from rollyard_pipeline.sandboxes.allowed_images import ANY, AllowedImages
from rollyard_pipeline.sandboxes.apptainer.starter import ApptainerOptions, ApptainerStarter
from rollyard_pipeline.sandboxes.claims import ClaimProvider
from rollyard_pipeline.sandboxes.host import cgroups
from rollyard_pipeline.sandboxes.host.records import SandboxFolder
from rollyard_pipeline.sandboxes.interface import SandboxProvider
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_pipeline.sandboxes.starters.bare_process import WARNING, ProcessStarter
from rollyard_pipeline.sandboxes.starters.bubblewrap import BubblewrapStarter

_NO_GROUPS: Final = (
    "no writable control groups for %s: as root the limit on processes does not bind, and memory is limited "
    "per process only; give this container its own writable cgroups, or run as another user"
)
PROVIDERS: Final = ("bubblewrap", "apptainer", "process", PROVIDER)


def open_provider(
    name: str,
    *,
    run_dir: Path | str,
    node: str,
    starts_at_once: int | None = None,
    bwrap: str | None = None,
    find_places: Callable[[], Sequence[cgroups.CgroupPlace]] = cgroups.find_places,
    claims: WorkerCalls | None = None,
    apptainer: ApptainerOptions | None = None,
    templates: bool = True,
    images: Sequence[str] = (ANY,),
) -> SandboxProvider:
    """Return the provider `name`. The caller must await its `start()` before any other call.

    Args:
        run_dir: The run folder, which all workers of the node share. Claimed pods do not need one.
        node: The name of the node, which handles carry.
        starts_at_once: The number of sandboxes that may start at the same time. The default is the number of
            CPU cores, but at least 2.
        bwrap: The path of the bubblewrap program. By default it is looked up on PATH.
        find_places: Returns the places where control groups can be made.
        claims: The control plane's claims, which `kubernetes` needs.
        apptainer: The options of `apptainer` sandboxes.
        templates: Whether `bubblewrap` sandboxes are forked from templates, which is much faster than to
            start bwrap and Python for each of them.
        images: The images that jobs may name on this node; see `AllowedImages`.

    Raises:
        ValueError: No provider has that name, an option that it needs is missing, or an entry of `images` is
            malformed; the message names it.
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
    try:
        allowed = AllowedImages(images)
    except ValueError as error:
        raise ValueError(f"--allow-image: {error}") from error
    places = list(find_places())
    missing = {"memory", "pids"} - cgroups.enforced(places)
    warnings = []
    if missing and os.geteuid() == 0:
        warnings.append(_NO_GROUPS % " and ".join(sorted(missing)))
    starts = starts_at_once or max(2, os.cpu_count() or 2)
    if name == "process":
        warnings.append(WARNING % os.geteuid())
        return NodeProvider(folder, node, ProcessStarter(places), places, starts, warnings, allowed)
    if name == "apptainer":
        options = apptainer or ApptainerOptions()
        apptainer_starter = ApptainerStarter(folder, places, options, allowed)
        return NodeProvider(folder, node, apptainer_starter, places, starts, warnings, allowed)
    starter = BubblewrapStarter(folder, places, bwrap, templates=templates)
    return NodeProvider(folder, node, starter, places, starts, warnings, allowed)
