"""The command `rollyard down`, which stops what `rollyard up` started."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

GRACE_SECONDS: Final = 25.0


@click.command()
@click.option("--home", type=click.Path(path_type=Path), help="State folder [~/.local/state/rollyard].")
def command(home: Path | None) -> None:
    """Stop what `rollyard up` started on this machine. State and trajectories stay."""
    from rollyard_drivers.host.child import sweep
    from rollyard_drivers.host.home import Home, default_home, read_json
    from rollyard_drivers.host.processes import end

    from rollyard.errors import CliError, UsageProblem

    folder = Home((home or default_home()).expanduser().resolve())
    running = folder.supervisor()
    if running is None:
        with folder.locked():
            left = sweep(folder.pids)
        removed = f"; removed leftovers: {', '.join(left)}" if left else ""
        click.echo(f"nothing runs on {folder.root}{removed}")
        return
    if (read_json(folder.root / "bridge.json") or {}).get("pid") == running.pid:
        raise UsageProblem(f"a Slurm bridge runs on {folder.root}: end it with `rollyard slurm-bridge down`")
    if not end(running, GRACE_SECONDS):
        raise CliError(f"process {running.pid} does not end; see {folder.logs}")
    sweep(folder.pids)
    click.echo(f"stopped (process {running.pid}); state and trajectories stay in {folder.root}")
