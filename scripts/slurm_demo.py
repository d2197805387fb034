"""One run of Rollyard on Slurm for demo-slurm: the bridge, a job, its trajectories, and the removal."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from demos import MODEL, ROLLYARD, ROOT, Demo, Half, wait_until_gone
from rich.console import Console

LAB = ROOT / "scripts" / "slurm-lab"
JOB = ROOT / "examples" / "quickstart" / "job.yaml"
GONE_SECONDS = 60
LAB_PROFILE: dict[str, Any] = {
    # One worker fits on each node of four CPUs, with room for a backend beside it.
    "time_limit": "30",
    "workers": {"cpus": 3, "memory": "3000M"},
    "backends": {"cpus": 1, "memory": "900M"},
}


@dataclass
class Site:
    """The cluster, and the way in which commands get there."""

    before: tuple[str, ...] = ()
    """The words that make a command run as the user of the cluster."""
    shared: Path = field(default_factory=Path)
    """A folder of that user on storage that the nodes share."""
    info: dict[str, Any] | None = None
    """The lab's description by scripts/slurm-lab, where the cluster is the lab."""


class SlurmDemo(Demo):
    """One bridge, from up to down."""

    program = "demo-slurm"
    job_name = "quickstart"
    lab_profile = LAB_PROFILE
    tokenizer = MODEL
    workers: int
    """The number of jobs of stage workers."""

    def __init__(self, options: argparse.Namespace, site: Site, console: Console) -> None:
        super().__init__(options, console)
        self.site = site
        self.before = site.before
        self.home = site.shared / "rollyard"
        self.workers = options.workers
        self.nodes: dict[str, set[str]] = {}
        """The nodes on which workers and backends were seen, by kind."""
        self.history: dict[str, Any] = {}
        """What happened to the backend, for the summary."""

    def rollyard(self, *words: str, **further: bool) -> str:
        """Run the command line as the user of the cluster."""
        return self.output(str(ROLLYARD), *words, **further)

    def write(self) -> None:
        """Write tasks, job and profile into the shared folder."""
        self.put("tasks.jsonl", self.first_tasks())
        self.put("job.yaml", yaml.safe_dump(self.job(), sort_keys=False))
        if self.options.profile is None and self.site.info is not None:
            self.put("profile.yaml", yaml.safe_dump(self.lab_profile, sort_keys=False))

    def put(self, name: str, text: str) -> None:
        """Write a file for the user of the cluster, and a copy of it among the results."""
        (self.site.shared / name).write_text(text)
        (self.options.out / name).write_text(text)

    def job(self) -> dict[str, Any]:
        """Return the quickstart's job, as this run has it."""
        job: dict[str, Any] = yaml.safe_load(JOB.read_text())
        job["spec"]["samplesPerTask"] = self.options.samples
        for stage in job["spec"]["stages"].values():
            # The bridge runs all three stages in each worker, and each worker is one Slurm job.
            stage["replicas"] = self.workers
        job["spec"]["sandbox"]["warm"] = 2
        return job

    def engine(self) -> list[str]:
        """Return the bridge's options for the pool that it makes."""
        return ["--engine", "embedded", "--replicas", str(self.options.backends)]

    def run(self) -> Half:
        """Run the bridge from up to down, and the job on it."""
        self.write()
        with self.removed_afterwards():
            self.bridge()
            seconds = self.run_job()
            return Half(self.fetch(), seconds, self.history)

    def bridge(self) -> None:
        """Write the scripts that the bridge would submit, then start the bridge itself."""
        options, shared = self.options, self.site.shared
        common = ["--home", str(self.home), *self.engine()]
        common += ["--default-image", options.image, "--lease-seconds", "15"]
        profile = options.profile or (shared / "profile.yaml" if self.site.info is not None else None)
        common += ["--profile", str(profile)] if profile is not None else []
        common += ["--partition", options.partition] if options.partition else []
        job = str(shared / "job.yaml")
        scripts = self.rollyard("slurm-bridge", "up", *common, "--dry-run", "-f", job, quiet=True)
        (options.out / "scripts.txt").write_text(scripts)
        self.console.print(f"The scripts that it submits: {options.out / 'scripts.txt'}")
        self.rollyard("slurm-bridge", "up", *common, "--detach")

    def run_job(self) -> float:
        """Run the job to its end while Slurm's queue is watched, and return the seconds that it took."""
        done = threading.Event()

        def watch() -> None:
            while not done.wait(1.0):
                self.look()

        thread = threading.Thread(target=watch, name="squeue")
        thread.start()
        try:
            seconds = self.work()
            self.look()
        finally:
            done.set()
            thread.join(30)
        self.rollyard("slurm-bridge", "status", "--home", str(self.home))
        self.output("squeue", "--me", "-o", "%.8i %.10T %.9M %.6N %k")
        return seconds

    def work(self) -> float:
        """Submit the job and follow it to its end; return the seconds in between."""
        began = time.monotonic()
        job = str(self.site.shared / "job.yaml")
        self.rollyard("submit", "-f", job, "--home", str(self.home), "--wait", live=True)
        return time.monotonic() - began

    def look(self) -> None:
        """Remember on which nodes jobs of the bridge run."""
        text = self.output("squeue", "--me", "-h", "-t", "RUNNING", "-o", "%N|%j", quiet=True, check=False)
        for line in text.splitlines():
            node, _, name = line.partition("|")
            if name.startswith("rollyard-"):
                kind = "backend" if "-backend-" in name else "worker"
                self.nodes.setdefault(kind, set()).add(node)

    def fetch(self) -> Path:
        """Fetch the trajectories, and print where the work was done."""
        for suffix in ("parquet", "jsonl"):
            path = self.site.shared / f"trajectories.{suffix}"
            self.rollyard("trajectories", self.job_name, "--home", str(self.home), "-o", str(path))
            shutil.copyfile(path, self.options.out / path.name)
        (self.options.out / "tokenizer.txt").write_text(f"{self.tokenizer}\n")
        nodes = {kind: sorted(names) for kind, names in self.nodes.items()}
        (self.options.out / "nodes.json").write_text(json.dumps(nodes, indent=2) + "\n")
        self.say(f"Nodes: {nodes}")
        return self.options.out / "trajectories.jsonl"

    def explanations(self) -> tuple[tuple[str, ...], ...]:
        """Return the commands whose output helps to explain a failure."""
        logs = f"{shlex.quote(str(self.home))}/logs/*.log"
        return ("squeue", "--me"), ("sh", "-c", f"tail -n 30 {logs}")

    def remove(self) -> None:
        """Stop the bridge and its jobs. Nothing of them may be left."""
        self.rollyard("slurm-bridge", "down", "--home", str(self.home))
        wait_until_gone(self.left, GONE_SECONDS)
        where = "in the queue" if self.site.info is None else "in the queue, and on any node"
        self.console.print(f"nothing left {where}")

    def left(self) -> list[str]:
        """Return the bridge's jobs that are left; in the lab also its user's processes, and files on the
        nodes.
        """
        names = self.output("squeue", "--me", "-h", "-o", "%i %j", quiet=True).splitlines()
        remaining = [f"job {line}" for line in names if " rollyard-" in line]
        if self.site.info is not None:
            for entry in os.scandir("/proc"):
                try:
                    if not entry.name.isdigit() or entry.stat().st_uid != self.site.info["uid"]:
                        continue
                    line = Path(entry.path, "cmdline").read_bytes().replace(b"\0", b" ")
                    groups = Path(entry.path, "cgroup").read_text()
                except OSError:
                    continue  # It has ended in between.
                # These are the control plane's, and those that Slurm's jobs have started.
                if line and (os.fsencode(self.home) in line or "/slurm" in groups):
                    remaining.append(f"process {entry.name} {line[:80].decode(errors='replace')}")
            instance = json.loads((self.home / "bridge.json").read_text())["instance"]
            for node, tmp in self.site.info["node_tmp"].items():
                paths = Path(tmp).glob(f"ry-*-{instance}")
                remaining += [f"{node}: /tmp/{path.relative_to(tmp)}" for path in paths]
        return remaining
