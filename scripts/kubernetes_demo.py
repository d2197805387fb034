"""The steps of demo-kubernetes with a cluster, command by command, each printed as it is run."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "helm" / "rollyard"
EXAMPLES = ROOT / "examples" / "kubernetes"
TASKS = ROOT / "examples" / "quickstart" / "tasks.jsonl"
INSTALL_SECONDS = 180
GONE_SECONDS = 120
MODEL = "engine/src/rollyard_engine/models/tiny-policy"


class DemoFailed(Exception):
    """A step did not do what it should; the text is its output."""


class Demo:
    """One run, in which every command is printed before it runs."""

    def __init__(self, options: argparse.Namespace, env: dict[str, str], console: Console) -> None:
        self.options = options
        self.env = env
        self.console = console
        self.release: str = options.release
        self.home: str = options.namespace
        self.jobs = f"{options.namespace}-jobs"
        self.host_paths: tuple[str, ...] = ()
        """The folders of the node that its pools mount."""

    def say(self, text: str) -> None:
        """Print a line that is not a command's output."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def output(self, *command: str, quiet: bool = False) -> str:
        """Run a command, which must succeed, and return what it prints."""
        if not quiet:
            self.console.print(f"[bold]$ {shlex.join(command)}[/bold]", soft_wrap=True, highlight=False)
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, cwd=ROOT)
        if done.returncode != 0:
            raise DemoFailed(f"{shlex.join(command)}: {(done.stderr or done.stdout).strip()}")
        if not quiet and done.stdout.strip():
            self.console.print(done.stdout.rstrip(), markup=False, highlight=False, soft_wrap=True)
        return done.stdout

    def items(self, kinds: str, selector: str) -> list[str]:
        """Return objects of all namespaces with kind, namespace and name, without those that are being
        deleted.
        """
        text = self.output("kubectl", "get", kinds, "-A", "-l", selector, "-o", "json", quiet=True)
        return [
            f"{item['kind']} {item['metadata'].get('namespace', '')}/{item['metadata']['name']}"
            for item in json.loads(text)["items"]
        ]

    def install(self) -> None:
        """Install the chart, and run its own test."""
        options = self.options
        values = {
            "images.prefix": options.images,
            "images.tag": options.tag,
            # The demo does not concern itself with what else runs in this cluster.
            "namespaces": f"{{{self.jobs}}}",
            # No volume may outlive the demo, and the resources must fit on small machines.
            "api.persistence.type": "emptyDir",
            "api.resources.requests.cpu": "100m",
            "sandboxes.cpuRequestFraction": "0.02",
            "sandboxes.memoryRequestFraction": "0.25",
        }
        if self.host_paths:
            values["jobs.allow.hostPath"] = f"{{{','.join(self.host_paths)}}}"
        if self.output("kubectl", "get", "namespace", self.jobs, "--ignore-not-found", quiet=True):
            self.console.print("An earlier demo was killed: removing what it left")
            self.remove()
        self.output("kubectl", "create", "namespace", self.jobs)
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        # This installation takes over CRDs that an earlier installation left, or that kubectl applied. Helm 4
        # applies at the server, where their fields have an owner.
        helm4 = self.output("helm", "version", "--short", quiet=True).startswith("v4")
        sets += ["--force-conflicts"] if helm4 else []
        self.output(
            "helm", "upgrade", "--install", self.release, str(CHART.relative_to(ROOT)), "-n", self.home,
            "--create-namespace", "--take-ownership", "--wait", "--timeout", f"{INSTALL_SECONDS}s", *sets,
        )  # fmt: skip
        self.output("helm", "test", self.release, "-n", self.home, "--logs")

    def apply(self) -> None:
        """Apply tasks, pool and job in a namespace of their own."""
        tasks = self.options.out / "tasks.jsonl"
        self._write_tasks(tasks)
        manifest = self.options.out / "job.yaml"
        job = self.job()
        manifest.write_text(yaml.safe_dump(job, sort_keys=False))
        self.output(
            "kubectl", "create", "configmap", "quickstart-tasks", "-n", self.jobs,
            f"--from-file=tasks.jsonl={tasks}",
        )  # fmt: skip
        self.output(
            "kubectl", "apply", "-n", self.jobs, "-f", str((EXAMPLES / "pool.yaml").relative_to(ROOT))
        )
        self.output("kubectl", "apply", "-n", self.jobs, "-f", str(manifest))

    def job(self) -> dict[str, Any]:
        """Return the example's job over as many samples as were asked for."""
        job: dict[str, Any] = yaml.safe_load((EXAMPLES / "job.yaml").read_text())
        job["spec"]["samplesPerTask"] = self.options.samples
        return job

    def _write_tasks(self, path: Path) -> None:
        options = self.options
        lines = [line for line in TASKS.read_text().splitlines(keepends=True) if line.strip()]
        if len(lines) < options.tasks:
            raise DemoFailed(f"--tasks {options.tasks}: {TASKS.name} holds {len(lines)}")
        path.write_text("".join(lines[: options.tasks]))

    def wait(self, condition: str, name: str, seconds: int | None = None) -> None:
        """Wait until an object has a condition."""
        self.output(
            "kubectl", "wait", "-n", self.jobs, f"--for=condition={condition}", name,
            f"--timeout={self.options.timeout if seconds is None else seconds}s",
        )  # fmt: skip

    def get(self, kinds: str, *further: str) -> None:
        """Print objects of the jobs' namespace."""
        self.output("kubectl", "get", kinds, "-n", self.jobs, *further)

    def finish(self) -> None:
        """Wait for the pool and the job, and report why the job did not succeed."""
        self.wait("Ready", "bp/default")
        self.get("rj,bp,pods")
        self.end("quickstart")

    def end(self, job: str) -> None:
        """Wait for a job, which must succeed."""
        self.wait("Finished", f"rj/{job}")
        self.get("rj,bp")
        self.wait("Succeeded", f"rj/{job}", 1)

    def fetch(self, job: str, out: Path) -> Path:
        """Fetch the trajectories over a port that the command line forwards."""
        rollyard = os.path.relpath(Path(sys.executable).with_name("rollyard"), ROOT)
        for suffix in ("parquet", "jsonl"):
            path = out / f"trajectories.{suffix}"
            self.output(
                rollyard, "trajectories", job, f"--kubernetes={self.home}/{self.release}",
                "-n", self.jobs, "-o", str(path),
            )  # fmt: skip
        (out / "tokenizer.txt").write_text(f"{ROOT / MODEL}\n")
        return out / "trajectories.jsonl"

    def explain(self) -> None:
        """Print what helps to explain a failure."""
        for words in (
            ("get", "rj,bp,pods", "-n", self.jobs, "-o", "wide"),
            ("describe", "rj,bp", "-n", self.jobs),
            ("get", "events", "-n", self.jobs, "--sort-by=.lastTimestamp"),
            ("logs", "-n", self.jobs, "-l", "rollyard.dev/pool", "--prefix", "--tail=40"),
            ("get", "pods", "-n", self.home, "-o", "wide"),
            ("logs", "-n", self.home, "-l", "app.kubernetes.io/component=operator", "--tail=60"),
            ("logs", "-n", self.home, "-l", "app.kubernetes.io/component=api", "--tail=60"),
        ):
            done = subprocess.run(["kubectl", *words], env=self.env, capture_output=True, text=True)
            print(f"$ kubectl {shlex.join(words)}\n{done.stdout}{done.stderr}", file=sys.stderr)

    def remove(self) -> None:
        """Delete the job and the pool, then the release. Nothing may be left but the CRDs."""
        self.output("kubectl", "delete", "rj,bp", "--all", "-n", self.jobs, "--ignore-not-found")
        mine = f"rollyard.dev/instance={self.release}"
        self.until_gone("pods", mine)
        self.output("helm", "uninstall", self.release, "-n", self.home, "--wait", "--ignore-not-found")
        self.output("kubectl", "delete", "namespace", self.jobs, self.home, "--ignore-not-found")
        self.until_gone(
            "pods,services,configmaps,secrets,serviceaccounts,deployments,networkpolicies,roles,rolebindings,"
            "persistentvolumeclaims,clusterroles,clusterrolebindings",
            f"app.kubernetes.io/instance={self.release}",
        )
        self.output("kubectl", "get", "crd", "-l", "app.kubernetes.io/name=rollyard", "-o", "name")

    def until_gone(self, kinds: str, selector: str) -> None:
        """Wait until the objects are gone, and raise where one is still left after a while."""
        deadline = time.monotonic() + GONE_SECONDS
        while left := self.items(kinds, selector):
            if time.monotonic() > deadline:
                raise DemoFailed(f"left behind: {', '.join(left)}")
            time.sleep(0.5)
        self.console.print(f"nothing left of {kinds} with {selector}", markup=False, soft_wrap=True)
