"""Resident memory of a real control plane that holds 10,000 queued rollouts."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from rollyard_bench.harness import manifest
from rollyard_bench.processes import ControlPlane, ProgramFailed, control_plane
from rollyard_bench.results import Baseline, Measurement, Settings

TASKS = 1250
SAMPLES = 8
NAME = "queued"
QUEUED_SECONDS = 60.0
MB = 1e6
TAKE = "cat data/*.csv | sort -t, -k3n | tail -n 1 | cut -d, -f2"


def _task(number: int) -> dict[str, Any]:
    """Return a shell task of the quickstart's kind and size: a few files, a test script, a reference
    solution.
    """
    files = {
        f"data/part{part}.csv": "".join(
            f"{row},name-{number}-{part}-{row},{row * 7 % 13}\n" for row in range(8)
        )
        for part in range(3)
    }
    command = f"{TAKE} > answer.txt"
    return {
        "id": f"task-{number:04d}",
        "prompt": "Find the row with the largest third column in the files under data/ and write its second "
        f"column into answer.txt. This is case {number}.",
        "sandbox": {"files": files},
        "test_script": f'want=$({TAKE})\n[ "$(cat answer.txt)" = "$want" ] # {number}\n',
        "solution": [
            {"name": "bash", "arguments": {"command": command}},
            {"name": "submit", "arguments": {"answer": "done"}},
        ],
        "metadata": {"family": "csv", "number": number},
    }


async def _submit(plane: ControlPlane) -> int:
    """Submit the tasks and return their bytes, once all rollouts are queued."""
    tasks = [_task(number) for number in range(TASKS)]
    # No model is asked for, so nothing is leased while memory is read.
    job = manifest(
        NAME, tasks={"stream": True}, handler="shell", samplesPerTask=SAMPLES, agent={"type": "oracle"}
    )
    async with plane.client() as client:
        await client.submit(job)
        await client.push_tasks(NAME, tasks)
        async with asyncio.timeout(QUEUED_SECONDS):
            while (queued := (await client.job(NAME)).status.counts.init.queued) < TASKS * SAMPLES:
                plane.program.check("rollyard_api")
                await asyncio.sleep(0.2)
        if queued != TASKS * SAMPLES:
            raise ProgramFailed(f"{queued} rollouts are queued, {TASKS * SAMPLES} were submitted")
    return sum(len(json.dumps(task)) + 1 for task in tasks)


def _memory(pid: int) -> Counter[str]:
    """Return `VmRSS` and `VmHWM` (the highest so far) of a process and its children together, in bytes."""
    totals: Counter[str] = Counter()
    process = psutil.Process(pid)
    for one in (process, *process.children(recursive=True)):
        for line in Path(f"/proc/{one.pid}/status").read_text().splitlines():
            key, _, rest = line.partition(":")
            if key in ("VmRSS", "VmHWM"):
                totals[key] += int(rest.split()[0]) * 1024
    return totals


async def measure(settings: Settings) -> list[Measurement]:
    """Start the control plane, queue 1,250 tasks × 8 samples, and read its resident set."""
    with tempfile.TemporaryDirectory(prefix="rollyard-bench-") as folder:
        async with control_plane(Path(folder)) as plane:
            idle = _memory(plane.program.process.pid)
            size = await _submit(plane)
            # Wait until the submission's own garbage is nearly gone, and the sweeps have seen the queue.
            await asyncio.sleep(2.0)
            full = _memory(plane.program.process.pid)
    how = (
        f"VmRSS of the control plane (with children), {TASKS} × {SAMPLES} = {TASKS * SAMPLES} rollouts "
        f"queued on SQLite, {size / TASKS:.0f} bytes a task, pushed over REST in one request; highest ever "
        f"(VmHWM) {full['VmHWM'] / MB:.0f} MB; the baseline is the same process before the job"
    )
    baseline = Baseline("the same process, idle", idle["VmRSS"] / MB)
    return [Measurement("queued_10000_resident", full["VmRSS"] / MB, baseline, how)]
