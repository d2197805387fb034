"""The pool of vLLM of demo-kubernetes, and the kill of its pod's engine."""

from __future__ import annotations

import argparse
import json
import select
import shlex
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import yaml
from demos import DemoFailed, Half
from kubernetes_demo import KubernetesDemo
from kubernetes_vllm import FromImage, Mounted, VllmUnusable, mounted, pool_manifest
from rollyard import Client
from rollyard.connection import connect
from vllm_half import JOB, POOL, VllmPool, lose_backend, use_pool, vllm_environment

LOST_SECONDS = 60
ANSWER_SECONDS = 60.0
PODS = f"rollyard.dev/pool={POOL}"


class KubernetesPool(VllmPool):
    """A pool of one pod, in the demo's own namespace of jobs."""

    def __init__(self, demo: KubernetesDemo, vllm: FromImage | Mounted) -> None:
        self.demo: KubernetesDemo = demo
        self.vllm = vllm
        self.out: Path = demo.options.out / "vllm"
        self.out.mkdir(exist_ok=True)

    def start(self) -> None:
        """Apply the pool, wait until it is ready, and print it."""
        options = self.demo.options
        self._apply("pool.yaml", pool_manifest(self.vllm, f"{options.images}engine:{options.tag}"))
        self.wait_ready()
        self.demo.get("bp")

    def backend(self) -> dict[str, Any]:
        """Return the pool's one pod, as it is now."""
        command = ("kubectl", "get", "pods", "-n", self.demo.jobs, "-l", PODS, "-o", "json")
        pods = json.loads(self.demo.output(*command, quiet=True))["items"]
        if len(pods) != 1:
            raise DemoFailed(f"{POOL} has {len(pods)} pods, not one")
        meta = pods[0]["metadata"]
        return {
            "pod": meta["name"],
            "uid": meta["uid"],
            "url": f"http://{pods[0]['status']['podIP']}:8000",
            "restarts": int(meta["annotations"].get("rollyard.dev/restarts", 0)),
        }

    @contextmanager
    def killer(self, backend: dict[str, Any]) -> Iterator[Callable[[], None]]:
        """Yield the function that prints the command that kills the pod's engine, and kills it at once."""
        with Crash.ready(self.demo.jobs, backend["pod"], self.demo.env) as crash:

            def kill() -> None:
                self.demo.show(crash.command)
                crash.now()

            yield kill

    def submit_job(self) -> None:
        """Apply the job over the pool."""
        options = self.demo.options
        job = self.demo.job()
        use_pool(job, options.tasks * options.samples)
        self._apply("job.yaml", job)

    def client(self) -> AbstractContextManager[Client]:
        """Return a client over a port that is forwarded."""
        return connect(f"kubernetes://{self.demo.home}/{self.demo.release}", None, self.demo.jobs)

    def wait_lost(self) -> None:
        """Wait until the pool is seen to have no backend, and print what it is like then."""
        self.demo.wait("Ready=False", f"bp/{POOL}", LOST_SECONDS)
        self.demo.get("rj,bp")
        self.demo.get("pods", "-l", PODS)

    def wait_ready(self) -> None:
        """Wait until the pool has a backend."""
        self.demo.wait("Ready", f"bp/{POOL}")

    def finish_job(self) -> None:
        """Wait for the job, which must succeed."""
        self.demo.end(JOB)

    def print_events(self) -> None:
        """Print why the pool was degraded, and its events."""
        message = 'jsonpath={.status.conditions[?(@.type=="Degraded")].message}'
        self.demo.get(f"bp/{POOL}", "-o", message)
        selector = f"involvedObject.name={POOL}"
        self.demo.get("events", "--field-selector", selector, "--sort-by=.metadata.creationTimestamp")

    def _apply(self, name: str, manifest: dict[str, Any]) -> None:
        path = self.out / name
        path.write_text(yaml.safe_dump(manifest, sort_keys=False))
        self.demo.output("kubectl", "apply", "-n", self.demo.jobs, "-f", str(path))


def run_half(demo: KubernetesDemo, vllm: FromImage | Mounted) -> Half:
    """Run the quickstart's job over one pod of vLLM, which is killed in the middle."""
    pool = KubernetesPool(demo, vllm)
    pool.start()
    seconds, rollouts_ended, history = lose_backend(pool)
    pool.print_events()
    pod = history["backends"][0]["pod"]
    killed = {"pod": pod, "process": "EngineCore", "rollouts_ended": rollouts_ended}
    history = {"engine": str(vllm), "killed": killed, **history}
    return Half(demo.fetch(JOB, pool.out), seconds, history)


def find_vllm(options: argparse.Namespace, in_lab: bool) -> FromImage | Mounted | str:
    """Return what the second half runs, or a text that says why there is no vLLM."""
    if options.no_vllm:
        return "--no-vllm"
    if options.vllm_image:
        return FromImage(options.vllm_image, options.vllm_gpus)
    if not in_lab:
        return "pods of this cluster cannot mount vLLM from this machine; --vllm-image names an image with it"
    try:
        return mounted(vllm_environment(), (options.out / "vllm-libraries").resolve())
    except VllmUnusable as error:
        return str(error)


class Crash:
    """A SIGKILL of vLLM's engine in a pod, which is prepared so that it can be sent at once.

    The kernel kills in the same way when memory runs out: requests break off, and the server in front of the
    engine finds it dead. `kubectl delete --force` would ask the server to end first, and the server's process
    is the first of the container, which signals from within cannot kill.
    """

    # A process that ends in between is not an error. [E] does not match this command line itself.
    SCRIPT = (
        "echo ready; read -r go; "
        "kill -9 $(grep -ls '[E]ngineCore' /proc/[0-9]*/cmdline | cut -d/ -f3) && echo killed"
    )

    def __init__(self, process: subprocess.Popen[str], command: str) -> None:
        self._process = process
        self.command = command

    def now(self) -> None:
        """Kill the engine.

        Raises:
            DemoFailed: There was nothing to kill.
        """
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self._expect("killed")

    def _expect(self, word: str) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], ANSWER_SECONDS)
        if not readable or stdout.readline().strip() != word:
            self._fail()

    def _fail(self) -> NoReturn:
        self._process.kill()
        _, errors = self._process.communicate()
        raise DemoFailed(f"{self.command}: {errors.strip() or 'no answer'}")

    @classmethod
    @contextmanager
    def ready(cls, namespace: str, pod: str, env: Mapping[str, str] | None) -> Iterator[Crash]:
        """Yield a shell in the pod that waits for the command to kill.

        Raises:
            DemoFailed: There is no such shell.
        """
        command = ["kubectl", "exec", "-i", "-n", namespace, pod, "--", "sh", "-c", cls.SCRIPT]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        try:
            crash = cls(process, shlex.join(command))
            crash._expect("ready")
            yield crash
        finally:
            process.kill()
            process.communicate()
