"""Asks Slurm as the lab's user, by its commands or by slurmrestd, and prints the answers as JSON."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rollyard_slurm.calls.protocol import SlurmCalls
from rollyard_slurm.calls.rest import slurm_calls
from rollyard_slurm.errors import SubmitRefused
from rollyard_slurm.profile import RestProfile
from rollyard_slurm.scripts.batch import BatchScript
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

SECONDS = patience(240.0)
SHOWN = (
    "JobName", "Requeue", "TimeLimit", "Partition", "ExcNodeList", "NumNodes", "NumTasks", "CPUs/Task",
    "MinMemoryNode", "MinMemoryCPU", "OverSubscribe", "WorkDir", "Comment", "StdErr", "StdIn", "StdOut",
    "TresPerNode", "Account", "QOS", "Features", "MinCPUsNode", "Licenses", "BatchFlag", "ReqNodeList",
)  # fmt: skip


def batch(home: Path, name: str, *more: tuple[str, str | None]) -> BatchScript:
    """Return a script that notes the signals it gets, and whose child would end by any signal, and the script
    with it.
    """
    options = (
        ("job-name", "rollyard-x"), ("comment", "rollyard,instance=ab"), ("output", f"{home}/{name}-%j.log"),
        ("open-mode", "append"), ("signal", "B:USR1@30"), ("nodes", "1"), ("ntasks", "1"),
        ("chdir", str(home)), *more,
    )  # fmt: skip
    before = ("heard=; trap 'heard=${heard}1; echo USR1' USR1; trap 'heard=${heard}2; echo USR2' USR2",)
    after = (
        "echo ready",
        "sleep 300 & child=$!",
        'while [ "$heard" != 12 ] && kill -0 "$child"; do wait "$child"; done',
        'kill -0 "$child" || exit 9',
        'echo "heard $heard"; kill "$child"; exit 5',
    )
    return BatchScript(options, (), before, after)


async def contract(commands: SlurmCalls, home: Path) -> dict[str, Any]:
    told: dict[str, Any] = {}
    asked = (("time", "7"), ("cpus-per-task", "2"), ("mem", "150M"), ("gres", "gpu:1"), ("exclude", "cn4"))
    job = await commands.submit(batch(home, "a", ("no-requeue", None), *asked))
    other = (("requeue", None), ("partition", "gpu"), ("exclusive", None))
    waiting = await commands.submit(batch(home, "b", *other))

    async def running() -> Any:
        return next((one for one in await commands.queue() if one.id == job and one.state == "RUNNING"), None)

    seen = await eventually(running, SECONDS)
    told["shown"] = [_shown(job, home), _shown(waiting, home)]
    told["queued"] = asdict(seen)
    live = await commands.details(job)
    assert live is not None
    assert live.live
    told["responds"] = await commands.nodes_respond(seen.nodes)
    log = home / f"a-{job}.log"
    await eventually(lambda: _says(log, "ready"), SECONDS)
    for name in ("USR1", "USR2"):
        await commands.signal([job], name)
        await eventually(lambda name=name: _says(log, name), SECONDS)  # Two at once have no order.

    async def ended() -> Any:
        found = await commands.details(job)
        return found if found is not None and not found.live else None

    told["ended"] = asdict(await eventually(ended, SECONDS))
    told["log"] = log.read_text()
    try:
        await commands.submit(batch(home, "c", ("partition", "nowhere")))
    except SubmitRefused as refusal:
        told["refused"] = [str(refusal), refusal.limit]
    await commands.cancel([waiting, job])

    async def gone() -> Any:
        return waiting not in {one.id for one in await commands.queue()}

    await eventually(gone, SECONDS)
    found = await commands.details(waiting)
    told["cancelled"] = None if found is None else found.state
    told["unknown"] = await commands.details(999_999)
    told["left"] = sorted(path.name for path in (home / "signals").glob("*"))
    return told


def _shown(job: int, home: Path) -> dict[str, str]:
    """Return what Slurm says that a job asked for, without what is of this job alone."""
    done = subprocess.run(
        ["scontrol", "show", "job", str(job)], capture_output=True, text=True, timeout=patience(60)
    )
    text = done.stdout.replace(str(home), "HOME").replace(f"-{job}.log", "-JOB.log")
    pairs = (word.partition("=")[::2] for word in text.split())
    # The nodes of a pending job are a range.
    return {name: value.removesuffix("-1") for name, value in pairs if name in SHOWN}


async def _says(path: Path, words: str) -> bool:
    return path.exists() and words in path.read_text()


def main() -> None:
    how, home = sys.argv[1], Path(sys.argv[2])
    rest = None if how == "commands" else RestProfile(url=how)
    print(json.dumps(asyncio.run(contract(slurm_calls(rest, 20.0, home), home))))


if __name__ == "__main__":
    main()
