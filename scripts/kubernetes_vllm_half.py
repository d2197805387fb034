"""The half of demo-kubernetes that runs on vLLM, which is killed in the middle."""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from pathlib import Path
from typing import Any

import yaml
from kubernetes_demo import ROOT, Demo, DemoFailed
from kubernetes_vllm import Crash, FromImage, Mounted, VllmUnusable, mounted, pool_manifest
from rollyard.connection import connect
from rollyard.quickstart.vllm_servers import run_places
from rollyard_client import Client
from rollyard_client import NotFound as NoSuchJob

NOTICED_SECONDS = 60
POLL_SECONDS = 0.02


class VllmHalf:
    """The quickstart's job over one pod of vLLM, which is killed once a third of the rollouts have ended."""

    POOL = "vllm"
    JOB = "quickstart-vllm"
    PODS = "rollyard.dev/pool=vllm"

    def __init__(self, demo: Demo, vllm: FromImage | Mounted) -> None:
        self.demo = demo
        self.vllm = vllm
        self.out: Path = demo.options.out / "vllm"

    def run(self) -> tuple[Path, float, dict[str, Any]]:
        """Return the trajectories, the job's seconds, and the backend's history for the summary."""
        demo = self.demo
        self.out.mkdir(exist_ok=True)
        self._apply_pool()
        demo.wait("Ready", f"bp/{self.POOL}")
        demo.get("bp")
        first = self._backend()
        with Crash.ready(demo.jobs, first["pod"], demo.env) as crash:
            began = time.monotonic()
            self._apply_job()
            with connect(f"kubernetes://{demo.home}/{demo.release}", None, demo.jobs) as client:
                ended = self._a_third(client)
            demo.say(f"{ended} rollouts have ended. {crash.command}")
            killed = time.monotonic()
            crash.now()
        demo.wait("Ready=False", f"bp/{self.POOL}", NOTICED_SECONDS)
        demo.get("rj,bp")
        demo.get("pods", "-l", self.PODS)
        demo.wait("Ready", f"bp/{self.POOL}")
        away = time.monotonic() - killed
        second = self._backend()
        demo.end(self.JOB)
        wall = time.monotonic() - began
        self._condition("Degraded")
        about = f"involvedObject.name={self.POOL}"
        demo.get("events", "--field-selector", about, "--sort-by=.metadata.creationTimestamp")
        history = {
            "engine": str(self.vllm),
            "killed": {"pod": first["pod"], "process": "EngineCore", "rollouts_ended": ended},
            "seconds_without_backend": round(away, 3),
            "backends": [first, second],
        }
        return demo.fetch(self.JOB, self.out), wall, history

    def _apply_pool(self) -> None:
        options = self.demo.options
        pool = self.out / "pool.yaml"
        manifest = pool_manifest(self.vllm, f"{options.images}engine:{options.tag}")
        pool.write_text(yaml.safe_dump(manifest, sort_keys=False))
        self.demo.output("kubectl", "apply", "-n", self.demo.jobs, "-f", str(pool))

    def _apply_job(self) -> None:
        options = self.demo.options
        manifest = self.demo.job()
        manifest["metadata"]["name"] = self.JOB
        spec = manifest["spec"]
        spec["backendRef"]["name"] = self.POOL
        # Most of the work still lies ahead when the backend is killed.
        run = spec["stages"]["run"]
        run["concurrency"] = run_places(run["concurrency"], options.tasks * options.samples)
        job = self.out / "job.yaml"
        job.write_text(yaml.safe_dump(manifest, sort_keys=False))
        self.demo.output("kubectl", "apply", "-n", self.demo.jobs, "-f", str(job))

    def _a_third(self, client: Client) -> int:
        """Wait until a third of the rollouts have ended, and return how many have."""
        deadline = time.monotonic() + self.demo.options.timeout
        total = self.demo.options.tasks * self.demo.options.samples
        while time.monotonic() < deadline:
            try:
                counts = client.job(self.JOB).status.counts
            except NoSuchJob:  # The operator has not seen it yet.
                counts = None
            ended = counts.succeeded + counts.failed + counts.cancelled if counts is not None else 0
            if ended == total:
                raise DemoFailed(f"all {total} rollouts had ended before the backend was killed")
            if 3 * ended >= total:
                return ended
            time.sleep(POLL_SECONDS)
        raise DemoFailed(f"a third of the rollouts of {self.JOB} have not ended in time")

    def _backend(self) -> dict[str, Any]:
        """Return the pool's one pod, as it is now."""
        text = self.demo.output(
            "kubectl", "get", "pods", "-n", self.demo.jobs, "-l", self.PODS, "-o", "json", quiet=True
        )
        pods = json.loads(text)["items"]
        if len(pods) != 1:
            raise DemoFailed(f"{self.POOL} has {len(pods)} pods, not one")
        meta = pods[0]["metadata"]
        return {
            "pod": meta["name"],
            "uid": meta["uid"],
            "url": f"http://{pods[0]['status']['podIP']}:8000",
            "restarts": int(meta["annotations"].get("rollyard.dev/restarts", 0)),
        }

    def _condition(self, kind: str) -> None:
        """Print what a condition of the pool says."""
        path = f'jsonpath={{.status.conditions[?(@.type=="{kind}")].message}}'
        self.demo.get(f"bp/{self.POOL}", "-o", path)


def find_vllm(options: argparse.Namespace, in_lab: bool) -> FromImage | Mounted | str:
    """Return what the second half runs, or a text that says why there is no vLLM."""
    if options.no_vllm:
        return "--no-vllm"
    if options.vllm_image:
        return FromImage(options.vllm_image, options.vllm_gpus)
    if not in_lab:
        return "pods of this cluster cannot mount vLLM from this machine; --vllm-image names an image with it"
    done = subprocess.run([ROOT / "scripts" / "vllm-env"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode != 0:
        raise DemoFailed("the environment with vLLM cannot be made; see above (--no-vllm: without)")
    try:
        return mounted(Path(done.stdout.strip()), (options.out / "vllm-libraries").resolve())
    except VllmUnusable as error:
        return str(error)
