"""`rollyard up` with the job of the quickstart at a small size, while it runs and afterwards."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import yaml

from rollyard_testing.browser.signin import Served
from rollyard_testing.faults.yard import ROOT, Yard, a_yard
from rollyard_testing.pace import patience

SECONDS: Final = patience(180.0)
LOOK_SECONDS: Final = 0.1


def quickstart(name: str, tasks: int, samples: int) -> dict[str, Any]:
    """Return the manifest of the quickstart's job with its first tasks inline."""
    folder = ROOT / "examples" / "quickstart"
    job: dict[str, Any] = yaml.safe_load((folder / "job.yaml").read_text())
    lines = (folder / "tasks.jsonl").read_text().splitlines()[:tasks]
    job["metadata"]["name"] = name
    job["spec"] |= {"tasks": {"inline": [json.loads(line) for line in lines]}, "samplesPerTask": samples}
    return job


class Live:
    """A running `rollyard up`."""

    def __init__(self, yard: Yard) -> None:
        self.yard = yard
        context = json.loads((yard.home / "context.json").read_text())
        self.served = Served(context["url"], json.loads(Path(context["token_file"]).read_text()))

    def submit(self, name: str, tasks: int, samples: int) -> None:
        """Submit the job of the quickstart under a name."""
        with self.served.http() as http:
            http.post("/v1/rolloutjobs", json=quickstart(name, tasks, samples)).raise_for_status()

    def job(self, name: str) -> dict[str, Any]:
        """Return the resource of a job."""
        with self.served.http() as http:
            found: dict[str, Any] = http.get(f"/v1/rolloutjobs/{name}").raise_for_status().json()
            return found

    def wait(self, name: str) -> dict[str, Any]:
        """Return the resource of a job once it has finished.

        Raises:
            AssertionError: It did not finish in time.
        """
        deadline = time.monotonic() + SECONDS
        while True:
            job = self.job(name)
            if job["status"].get("phase") in ("Succeeded", "Failed", "Cancelled"):
                return job
            assert time.monotonic() < deadline, f"{job['status']}\n{self.yard.words()}"
            time.sleep(LOOK_SECONDS)


@contextmanager
def a_live_rollyard(*arguments: str) -> Iterator[Live]:
    """Start `rollyard up`, and stop it with the block."""
    with a_yard(*arguments) as yard:
        yard.start()
        yield Live(yard)
        yard.stop()
