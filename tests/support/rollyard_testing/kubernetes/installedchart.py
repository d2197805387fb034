"""One installation by the chart, as its tests use it: manifests, observations, and REST beside it."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rollyard_client import Client, NotFound
from rollyard_client.driver import DriverClient
from rollyard_crds.claims import Claim

from rollyard_testing.pace import patience

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.kubelab import Cluster

LOOK_SECONDS = 0.2
PATIENCE_SECONDS = round(patience(180))
"""The time for what takes a second or two on a machine with nothing else to do: under load it takes a minute.
"""
SOLVED = {"name": "submit", "arguments": {"answer": "yes"}}
SMALL_POD = {"resources": {"requests": {"cpu": "5m", "memory": "64Mi"}}}
HOLD = "until [ -e /work/go ]; do sleep 0.1; done"
"""A command that keeps a rollout in its stage until `Installation.release` lets it go."""


class NeverCame(AssertionError):
    """What was waited for did not come."""


def task(name: str, hold: str = "", setup: str = "") -> dict[str, Any]:
    """Return a task that the oracle solves.

    Args:
        hold: A bash command that its rollout runs first.
        setup: A bash script of Init.
    """
    steps = [{"name": "bash", "arguments": {"command": hold}}] if hold else []
    made: dict[str, Any] = {
        "id": name,
        "prompt": "Say yes.",
        "test_script": '[ "$ROLLYARD_ANSWER" = yes ]\n',
        "solution": [*steps, SOLVED],
    }
    if setup:
        made["sandbox"] = {"setup": setup}
    return made


def job(name: str, *tasks: dict[str, Any], **spec: Any) -> dict[str, Any]:
    """Return a small job of the oracle, without a model; without tasks it is a stream.

    Args:
        spec: Further fields of the spec; those of `stages` are put into each stage's.
    """
    stages = spec.pop("stages", {})
    body = {
        "tasks": {"inline": list(tasks)} if tasks else {"stream": True},
        "handler": "shell",
        "agent": {"type": "oracle", "tools": ["bash", "submit"], "toolTimeoutSeconds": 300},
        "sandbox": {
            "warm": 0,
            "resources": {"cpu": "500m", "memory": "128Mi", "disk": "64Mi", "processes": 64},
        },
        "stages": {
            stage: {"concurrency": 4, "template": SMALL_POD, **stages.get(stage, {})}
            for stage in ("init", "run", "eval")
        },
        **spec,
    }
    return {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": "RolloutJob",
        "metadata": {"name": name},
        "spec": body,
    }


def pool(name: str, **spec: Any) -> dict[str, Any]:
    """Return a pool of the embedded engine."""
    body = {"model": "/opt/rollyard/models/tiny-policy", "engine": {"type": "embedded"}, **spec}
    return {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": "BackendPool",
        "metadata": {"name": name},
        "spec": body,
    }


def in_namespace(document: dict[str, Any], namespace: str) -> dict[str, Any]:
    """Return the manifest with its namespace, as REST wants it."""
    document["metadata"]["namespace"] = namespace
    return document


def condition(obj: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Return a condition of an object; it is empty if there is none of this type."""
    found: list[dict[str, Any]] = (obj.get("status") or {}).get("conditions") or []
    return next((one for one in found if one["type"] == kind), {})


def is_so(obj: Mapping[str, Any], kind: str, status: str = "True") -> bool:
    """Return whether a condition has a status."""
    return condition(obj, kind).get("status") == status


@dataclass
class Installation:
    """A release, and the namespaces that its operator serves."""

    cluster: Cluster
    release: str
    """The release's name, which is also its instance's, and that of its namespace."""
    namespaces: tuple[str, ...]
    sandbox_image: str
    """The image of sandboxes that name none."""
    url: str = ""
    tokens: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def jobs(self) -> str:
        """Return the namespace of most tests."""
        return self.namespaces[0]

    @property
    def service_account(self) -> str:
        """Return the operator's user name."""
        return f"system:serviceaccount:{self.release}:{self.release}-rollyard-operator"

    def client(self, namespace: str = "", role: str = "admin") -> Client:
        """Return a REST client, as seen from outside of the cluster."""
        return Client(self.url, self.tokens[role], namespace=namespace or self.jobs)

    def claims(self, namespace: str = "") -> list[Claim]:
        """Return what the control plane has of claims."""

        async def ask() -> list[Claim]:
            client = DriverClient(self.url, self.tokens["driver"])
            try:
                return list((await client.claims(namespace=namespace or self.jobs)).claims)
            finally:
                await client.close()

        return asyncio.run(ask())

    def connect(self) -> None:
        """Find the control plane's address, and its tokens."""
        home = self.release
        service = self.cluster.get("service", f"{home}-rollyard-api", home)["spec"]
        self.url = f"http://{service['clusterIP']}:{service['ports'][0]['port']}"
        data = self.cluster.get("secret", f"{home}-rollyard-tokens", home)["data"]
        self.tokens = {role: base64.b64decode(data[role]).decode() for role in ("admin", "driver", "worker")}
        with self.client() as client:
            self.until(lambda: client.jobs() is not None, "the control plane answers")

    # Objects.

    def apply(self, document: dict[str, Any], namespace: str = "") -> dict[str, Any]:
        """Run `kubectl apply`, and return the object as the API server has it."""
        text = self.cluster.kubectl(
            "apply", "-n", namespace or self.jobs, "-o", "json", "-f", "-", input=json.dumps(document)
        )
        made: dict[str, Any] = json.loads(text)
        return made

    def apply_quietly(self, document: dict[str, Any], namespace: str = "") -> bool:
        """Do the same, and return whether the object was taken."""
        done = self.cluster.run(
            "kubectl", "apply", "-n", namespace or self.jobs, "-f", "-", input=json.dumps(document)
        )
        return done.returncode == 0

    def get(self, kind: str, name: str, namespace: str = "") -> dict[str, Any] | None:
        """Return an object, or None where there is none."""
        return self.cluster.find(kind, name, namespace or self.jobs)

    def patch(self, kind: str, name: str, spec: dict[str, Any], namespace: str = "") -> str:
        """Merge into a spec, and return why it was refused; empty if it was not."""
        done = self.cluster.run(
            "kubectl", "patch", kind, name, "-n", namespace or self.jobs, "--type=merge",
            "-p", json.dumps({"spec": spec}),
        )  # fmt: skip
        return "" if done.returncode == 0 else done.stderr

    def wait(
        self, kind: str, name: str, what: str, namespace: str = "", seconds: int = PATIENCE_SECONDS
    ) -> None:
        """Run `kubectl wait --for=condition=WHAT`, and report what there is where it does not come."""
        where = namespace or self.jobs
        done = self.cluster.run(
            "kubectl",
            "wait",
            f"--for=condition={what}",
            f"{kind}/{name}",
            "-n",
            where,
            f"--timeout={seconds}s",
        )
        if done.returncode:
            raise NeverCame(f"{kind}/{name} {what}: {done.stderr}{self.explain(where)}")

    def pods(self, component: str = "", namespace: str = "", job: str = "") -> list[dict[str, Any]]:
        """Return the pods that the operator made and that are not being deleted."""
        chosen = {
            "rollyard.dev/instance": self.release,
            "app.kubernetes.io/component": component,
            "rollyard.dev/job": job,
        }
        selector = ",".join(f"{key}={value}" for key, value in chosen.items() if value)
        found = self.cluster.items("pods", namespace or self.jobs, selector)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def events(self, name: str, namespace: str = "") -> list[dict[str, Any]]:
        """Return the events of an object."""
        found = self.cluster.items("events", namespace or self.jobs)
        return [one for one in found if one["involvedObject"]["name"] == name]

    def let_go(self, job: str, namespace: str = "") -> None:
        """Release the rollouts of a job that run `HOLD`, in every sandbox of it."""
        where = namespace or self.jobs
        for pod in self.pods("sandbox", where, job):
            self.cluster.kubectl("exec", "-n", where, pod["metadata"]["name"], "--", "touch", "/work/go")

    def delete(self, kind: str, name: str, namespace: str = "") -> None:
        """Delete an object, and wait until it is gone."""
        self.cluster.kubectl(
            "delete", kind, name, "-n", namespace or self.jobs, f"--timeout={PATIENCE_SECONDS}s"
        )

    @contextmanager
    def made(self, document: dict[str, Any], namespace: str = "") -> Iterator[dict[str, Any]]:
        """Apply an object, which is deleted afterwards whatever happens."""
        kind, name = document["kind"].lower(), document["metadata"]["name"]
        try:
            yield self.apply(document, namespace)
        finally:
            self.cluster.run(
                "kubectl", "delete", kind, name, "-n", namespace or self.jobs, "--ignore-not-found",
                f"--timeout={PATIENCE_SECONDS}s",
            )  # fmt: skip

    # Waiting.

    def until(
        self, holds: Callable[[], Any], what: str, seconds: float = PATIENCE_SECONDS, namespace: str = ""
    ) -> Any:
        """Return the first true answer of `holds`.

        Raises:
            NeverCame: It never gave one; the text says what there is instead.
        """
        deadline = time.monotonic() + seconds
        while True:
            try:
                found = holds()
            except (OSError, NotFound):
                found = None  # A service may have no endpoint yet, or the object does not exist yet.
            if found:
                return found
            if time.monotonic() > deadline:
                raise NeverCame(f"{what}: not within {seconds:g} s{self.explain(namespace or self.jobs)}")
            time.sleep(LOOK_SECONDS)

    def until_condition(
        self, kind: str, name: str, what: str, words: str, status: str = "False", namespace: str = "",
        seconds: float = PATIENCE_SECONDS,
    ) -> dict[str, Any]:  # fmt: skip
        """Return the condition, once it has this status and `words` in its reason or message."""

        def look() -> dict[str, Any] | None:
            one = condition(self.get(kind, name, namespace) or {}, what)
            said = f"{one.get('reason')} {one.get('message')}"
            return one if one.get("status") == status and words in said else None

        found: dict[str, Any] = self.until(
            look, f"{kind}/{name} {what}={status} with {words!r}", seconds, namespace
        )
        return found

    def explain(self, namespace: str) -> str:
        """Return what there is to see of a namespace and of the operator."""
        home = self.release
        said = []
        for words in (
            ("get", "rj,bp,pods", "-n", namespace, "-o", "wide"),
            (
                "get",
                "rj,bp",
                "-n",
                namespace,
                "-o",
                "jsonpath={range .items[*]}{.metadata.name}{.status}{'\\n'}{end}",
            ),
            ("get", "events", "-n", namespace, "--sort-by=.lastTimestamp"),
            ("logs", "-n", home, "-l", "app.kubernetes.io/component=operator", "--tail=40"),
            ("logs", "-n", namespace, "-l", "app.kubernetes.io/component=stage-worker", "--tail=15"),
        ):
            done = self.cluster.run("kubectl", *words)
            said.append(f"\n$ kubectl {' '.join(words)}\n{done.stdout}{done.stderr}")
        return "".join(said)
