"""The steps of demo-kubernetes with a cluster, command by command, each printed as it is run."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import yaml
from demos import MODEL, ROLLYARD, ROOT, Demo, wait_until_gone
from rich.console import Console

CHART = "helm/rollyard"
EXAMPLES = "examples/kubernetes"
INSTALL_SECONDS = 180
GONE_SECONDS = 120


class KubernetesDemo(Demo):
    """One installation of the chart, with a namespace for its jobs."""

    program = "demo-kubernetes"

    def __init__(self, options: argparse.Namespace, env: dict[str, str], console: Console) -> None:
        super().__init__(options, console)
        self.env = env
        self.release: str = options.release
        self.home: str = options.namespace
        self.jobs = f"{options.namespace}-jobs"
        self.host_paths: tuple[str, ...] = ()
        """The folders of the node that its pools mount."""

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
        values = {
            "images.prefix": self.options.images,
            "images.tag": self.options.tag,
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
            self.say("An earlier demo was killed: removing what it left")
            self.remove()
        self.output("kubectl", "create", "namespace", self.jobs)
        sets = [word for key, value in values.items() for word in ("--set", f"{key}={value}")]
        # This installation takes over CRDs that an earlier installation left, or that kubectl applied. Helm 4
        # applies at the server, where their fields have an owner.
        helm4 = self.output("helm", "version", "--short", quiet=True).startswith("v4")
        sets += ["--force-conflicts"] if helm4 else []
        command = ["helm", "upgrade", "--install", self.release, CHART, "-n", self.home, "--create-namespace"]
        command += ["--take-ownership", "--wait", "--timeout", f"{INSTALL_SECONDS}s", *sets]
        self.output(*command)
        self.output("helm", "test", self.release, "-n", self.home, "--logs")

    def apply(self) -> None:
        """Apply tasks, pool and job in a namespace of their own."""
        tasks, job = self.options.out / "tasks.jsonl", self.options.out / "job.yaml"
        tasks.write_text(self.first_tasks())
        job.write_text(yaml.safe_dump(self.job(), sort_keys=False))
        from_file = f"--from-file=tasks.jsonl={tasks}"
        self.output("kubectl", "create", "configmap", "quickstart-tasks", "-n", self.jobs, from_file)
        for manifest in (f"{EXAMPLES}/pool.yaml", str(job)):
            self.output("kubectl", "apply", "-n", self.jobs, "-f", manifest)

    def job(self) -> dict[str, Any]:
        """Return the example's job over as many samples as were asked for."""
        job: dict[str, Any] = yaml.safe_load((ROOT / EXAMPLES / "job.yaml").read_text())
        job["spec"]["samplesPerTask"] = self.options.samples
        return job

    def wait(self, condition: str, name: str, seconds: int | None = None) -> None:
        """Wait until an object has a condition."""
        timeout = f"--timeout={self.options.timeout if seconds is None else seconds}s"
        self.output("kubectl", "wait", "-n", self.jobs, f"--for=condition={condition}", name, timeout)

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
        installation = f"--kubernetes={self.home}/{self.release}"
        for suffix in ("parquet", "jsonl"):
            path = str(out / f"trajectories.{suffix}")
            self.output(str(ROLLYARD), "trajectories", job, installation, "-n", self.jobs, "-o", path)
        (out / "tokenizer.txt").write_text(f"{MODEL}\n")
        return out / "trajectories.jsonl"

    def explanations(self) -> tuple[tuple[str, ...], ...]:
        """Return the commands whose output helps to explain a failure."""
        return (
            ("kubectl", "get", "rj,bp,pods", "-n", self.jobs, "-o", "wide"),
            ("kubectl", "describe", "rj,bp", "-n", self.jobs),
            ("kubectl", "get", "events", "-n", self.jobs, "--sort-by=.lastTimestamp"),
            ("kubectl", "logs", "-n", self.jobs, "-l", "rollyard.dev/pool", "--prefix", "--tail=40"),
            ("kubectl", "get", "pods", "-n", self.home, "-o", "wide"),
            ("kubectl", "logs", "-n", self.home, "-l", "app.kubernetes.io/component=operator", "--tail=60"),
            ("kubectl", "logs", "-n", self.home, "-l", "app.kubernetes.io/component=api", "--tail=60"),
        )

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
        wait_until_gone(lambda: self.items(kinds, selector), GONE_SECONDS)
        self.say(f"nothing left of {kinds} with {selector}")
