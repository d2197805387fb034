"""The check of slurmrestd, which a profile names or whose socket is at one of the usual places."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from rollyard.checks.finding import TIMEOUT_SECONDS, Finding

if TYPE_CHECKING:
    from rollyard_slurm.profile import RestProfile

SOCKETS = (Path("/run/slurmrestd/slurmrestd.socket"), Path("/run/slurmrestd.socket"))
NAME = "slurmrestd"


def check_slurmrestd(profile: Path | None, sockets: Iterable[Path] = SOCKETS) -> Finding | None:
    """Check that slurmrestd answers. Return None if no profile names one and no socket of it exists."""
    from rollyard_slurm.errors import ProfileInvalid
    from rollyard_slurm.profile import RestProfile, load

    try:
        wanted = load(profile).rest if profile is not None else None
    except ProfileInvalid as error:
        return Finding("slurm profile", "missing", str(error))
    if wanted is not None:
        return _asked(wanted, needed=True)
    for path in sockets:
        if path.is_socket():
            return _asked(RestProfile(url=f"unix:{path}"), needed=False)
    return None


def _asked(wanted: RestProfile, needed: bool) -> Finding:
    from rollyard_slurm.calls.protocol import CallCounts
    from rollyard_slurm.calls.slurmrestd import SlurmrestdClient
    from rollyard_slurm.errors import SlurmError

    server = SlurmrestdClient(wanted, TIMEOUT_SECONDS, CallCounts())
    try:
        server.check()
        api = asyncio.run(server.api())
    except SlurmError as error:
        advice = "a token is renewed with `scontrol token`" if wanted.token_file is not None else ""
        if not needed:
            advice = "only needed where Slurm's commands are not; `doctor --profile FILE` tries a profile's"
        return Finding(NAME, "missing" if needed else "optional", str(error), advice)
    how = "signals batch scripts itself" if api.signals_batch else "batch scripts hear by a file in the home"
    advice = "" if needed else f"where Slurm's commands are missing: --rest-url {wanted.url}"
    return Finding(NAME, "ok", f"{wanted.url} has v0.0.{api.version}; {how}", advice)
