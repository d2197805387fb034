"""One control plane for two drivers: the chart's on a real cluster, and a user's bridge on a real Slurm.

The bridge and the nodes reach the control plane as those of a real site would: over HTTPS, at a port of the
cluster's node, with the certificate of the chart's own authority.
"""

from __future__ import annotations

import json
import os
import ssl
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from rollyard.local.options import shipped_model
from rollyard_client import Client, NotFound
from rollyard_crds import RolloutJob
from rollyard_testing.kubernetes.installedchart import Installation, is_so
from rollyard_testing.manifests import job_manifest, pool_manifest
from rollyard_testing.pace import patience
from rollyard_testing.slurm.bridgelab import Bridge, condition, until
from rollyard_testing.slurm.bridgelab import job as oracle_job

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.kubelab import Cluster
    from rollyard_testing.slurm.slurmlab import Slurm

pytestmark = [pytest.mark.slurm, pytest.mark.kubernetes, pytest.mark.nightly]

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 4
TASKS = 4
POD_MODEL = "/opt/rollyard/models/tiny-policy"
SMALL = {"cpu": "500m", "memory": "128Mi", "disk": "64Mi", "processes": 64}
LITTLE = {"requests": {"cpu": "20m", "memory": "128Mi"}}


@dataclass
class Shared(Installation):
    """The chart's installation, reached over HTTPS at the cluster's node."""

    certificate: str = ""

    def client(self, namespace: str = "", role: str = "admin") -> Client:
        trusted = ssl.create_default_context(cadata=self.certificate)
        return Client(self.url, self.tokens[role], namespace=namespace or self.jobs, tls=trusted)

    def secret(self, name: str, key: str) -> str:
        """Return what a user's kubectl gives."""
        words = ("get", "secret", f"{self.release}-rollyard-{name}", "-n", self.release)
        template = '{{index .data "' + key + '" | base64decode}}'
        return self.cluster.kubectl(*words, "-o", f"go-template={template}")


def values(namespace: str, tag: str, address: str) -> dict[str, Any]:
    """Return small values, without a volume that outlives them, open to what is outside of the cluster."""
    return {
        "namespaces": [namespace],
        "crds": {"enabled": False},  # They are this checkout's already.
        "images": {"tag": tag, "pullPolicy": "Never"},
        "api": {
            "persistence": {"type": "emptyDir"},
            "resources": LITTLE,
            "leaseSeconds": 10,
            "service": {"type": "NodePort"},
        },
        "tls": {"enabled": True, "ipAddresses": [address]},
        "operator": {"resources": LITTLE},
        "workers": {"resources": LITTLE},
        "sandboxes": {"cpuRequestFraction": 0.02, "memoryRequestFraction": 0.25},
    }


@pytest.fixture(scope="module")
def installation(cluster: Cluster, images: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shared]:
    (node,) = yaml.safe_load(cluster.kubectl("get", "nodes", "-o", "yaml"))["items"]
    address = next(one["address"] for one in node["status"]["addresses"] if one["type"] == "InternalIP")
    release, jobs = cluster.namespace(restricted=True), cluster.namespace(restricted=True)
    made = Shared(cluster, release, (jobs,), f"registry.local/rollyard-sandbox-default:{images}")
    given = tmp_path_factory.mktemp("values") / "values.yaml"
    given.write_text(yaml.safe_dump(values(jobs, images, address)))
    chart = str(ROOT / "helm" / "rollyard")
    try:
        cluster.helm(
            "install", release, chart, "-n", release, "-f", str(given),
            "--wait", "--timeout", f"{patience(180):.0f}s",
        )  # fmt: skip
        service = cluster.get("service", f"{release}-rollyard-api", release)["spec"]
        made.url = f"https://{address}:{service['ports'][0]['nodePort']}"
        made.tokens = yaml.safe_load(made.secret("tokens", "tokens.json"))
        made.certificate = made.secret("tls", "ca.crt")
        with made.client() as client:
            made.until(lambda: client.jobs() is not None, "the control plane answers")
        yield made
    finally:
        cluster.run("kubectl", "delete", "rj,bp", "--all", "-n", jobs, f"--timeout={patience(60):.0f}s")
        cluster.helm("uninstall", release, "-n", release, "--wait", "--ignore-not-found")


@pytest.fixture
def bridge(slurm: Slurm, shared: Path, installation: Shared, sif: Path) -> Iterator[Bridge]:
    """Yield a bridge of the user's that has joined, with the two tokens that it needs."""
    tokens, authority = shared / "tokens.json", shared / "ca.crt"
    both = {role: installation.tokens[role] for role in ("driver", "worker")}
    for path, text in (
        (tokens, json.dumps(both)),
        (authority, installation.certificate),
    ):
        path.write_text(text)
        path.chmod(0o600)
        os.chown(path, slurm.uid, slurm.gid)
    options = ["--join", installation.url, "--token-file", str(tokens), "--ca-file", str(authority)]
    options.append("--all-namespaces")
    made = Bridge(slurm, shared / "h", [*options, "--sandbox", "apptainer", "--default-image", str(sif)])
    made.start()
    yield made
    made.kill()


def pool(name: str, model: str, **spec: Any) -> dict[str, Any]:
    body = {"model": model, "engine": {"type": "embedded"}, "template": {"resources": LITTLE}, **spec}
    return pool_manifest(name, body)


def model_job(name: str, pool: str, **spec: Any) -> dict[str, Any]:
    """Return a small job of the tiny policy; each rollout has a reward, whatever it says."""
    tasks = [{"id": f"t{n}", "prompt": f"Say {n}.", "test_script": "true\n"} for n in range(TASKS)]
    stages = {
        stage: {"concurrency": 4, "template": {"resources": LITTLE}} for stage in ("init", "run", "eval")
    }
    body = {
        "tasks": {"inline": tasks},
        "handler": "shell",
        "samplesPerTask": SAMPLES,
        "agent": {"type": "tools", "tools": ["bash", "submit"], "maxTurns": 3, "maxContextTokens": 512},
        "sampling": {"maxTokens": 32},
        "backendRef": {"name": pool},
        "sandbox": {"resources": SMALL, "warm": 2},
        "stages": stages,
        **spec,
    }
    return job_manifest(name, body)


def waiting_job(name: str) -> dict[str, Any]:
    """Return a job for Slurm that would last for minutes."""
    document = oracle_job(name, tasks=1, samples=1, pause=300.0, placement="slurm").to_json()
    return {**{part: document[part] for part in ("apiVersion", "kind", "spec")}, "metadata": {"name": name}}


def owners(bridge: Bridge, kind: str) -> set[str]:
    return {one["owner"].rpartition("/")[2] for one in bridge.jobs(kind).values()}


def test_a_job_on_each_at_the_same_time(installation: Shared, bridge: Bridge) -> None:
    on = installation
    on.apply(pool("nodes", str(shipped_model()), placement="slurm"))
    on.apply(pool("pods", POD_MODEL))
    on.apply(model_job("here", "pods"))
    on.apply(model_job("there", "nodes", placement="slurm"))
    on.apply(model_job("nowhere", "pods", placement="local"))
    over_rest = model_job("rest", "nodes", placement="slurm")
    over_rest["metadata"]["namespace"] = on.jobs
    with on.client() as client:
        client.submit(RolloutJob.model_validate(over_rest))
        for name in ("here", "there"):
            on.wait("rj", name, "Succeeded")
        until(lambda: condition(client.job("rest"), "Succeeded") == "True", 120, "the job of REST")
        serving = {name: {one.url for one in client.pool(name).status.backends} for name in ("nodes", "pods")}
        for name, source in (("here", "pods"), ("there", "nodes"), ("rest", "nodes")):
            got = list(client.trajectories(name))
            seen = Counter((one.task_id, one.sample_index) for one in got)
            assert len(seen) == TASKS * SAMPLES
            assert set(seen.values()) == {1}, "every rollout exactly once"
            assert {one.backend for one in got} <= serving[source]
            assert {one.reward for one in got} == {1.0}
        here, there = client.job("here").status, client.job("there").status
    starts, ends = (
        [getattr(one, f"{part}_time") for one in (here, there)] for part in ("start", "completion")
    )
    assert max(starts) < min(ends), "at the same time"

    shown = on.get("rj", "there")
    assert shown is not None
    assert shown["status"]["counts"]["succeeded"] == TASKS * SAMPLES
    assert shown["status"]["phase"] == "Succeeded"
    assert is_so(shown, "Finished")
    assert on.get("rj", "rest") is None, "the home of a job of REST for another driver is the store"
    named = {path.name.partition("-")[0] for path in (bridge.home / "logs").glob("*-worker-*.log")}
    assert named == {"there", "rest"}
    assert owners(bridge, "backend") == {"nodes"}
    components = {
        (
            pod["metadata"]["labels"].get("rollyard.dev/job"),
            pod["metadata"]["labels"].get("rollyard.dev/pool"),
        )
        for pod in on.pods()
    }
    assert components <= {("here", None), (None, "pods"), (None, None)}

    nobody = on.until_condition("rj", "nowhere", "Admitted", "no driver 'local' has reported on it yet")
    assert nobody["reason"] == "NoDriver"

    for kind, names in (("rj", ("here", "there", "nowhere")), ("bp", ("nodes", "pods"))):
        for name in names:
            on.delete(kind, name)
    with on.client() as client:
        client.delete("rest")
        until(lambda: not client.jobs("*") and not client.pools("*"), 60, "an empty control plane")
    until(lambda: not bridge.jobs(), 60, "the end of every Slurm job")
    on.until(lambda: not on.pods(), "the end of every pod")
    assert bridge.stop() == 0


def test_it_is_deleted_and_cancelled_from_either_side(installation: Shared, bridge: Bridge) -> None:
    on = installation
    for name in ("first", "second", "third"):
        on.apply(waiting_job(name))
    bridge.running(count=3)
    assert owners(bridge, "stage-worker") == {"first", "second", "third"}
    on.until(lambda: is_so(on.get("rj", "first") or {}, "Running"), "Running in the object's status")

    on.delete("rj", "first")
    with on.client() as client:
        client.delete("second")
        on.until(lambda: on.get("rj", "second") is None, "the end of the object")
        client.cancel("third")
        on.wait("rj", "third", "Failed")
        until(lambda: not bridge.jobs(), 60, "the end of every Slurm job")
        for name in ("first", "second"):
            with pytest.raises(NotFound):
                client.job(name)
    third = on.get("rj", "third")
    assert third is not None
    assert third["status"]["phase"] == "Cancelled"
    on.delete("rj", "third")
    assert on.pods() == []
    assert bridge.stop() == 0
    assert list((bridge.home / "submissions").iterdir()) == []
    assert list((bridge.home / "tokens").iterdir()) == []
