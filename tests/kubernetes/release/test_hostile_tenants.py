"""A tenant who may create jobs, pools and pods in one namespace tries to get more."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from rollyard_testing.kubernetes.installedchart import HOLD, PATIENCE_SECONDS, SMALL_POD, job, pool, task

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.installedchart import Installation

pytestmark = pytest.mark.kubernetes

TRY = """
import json, sys, urllib.error, urllib.request

token = open("/stolen/token").read()
answers = {}
for name, (method, url, body) in json.load(sys.stdin).items():
    headers = {"Authorization": "Bearer " + token, "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            answers[name] = [answer.status, answer.read().decode()]
    except urllib.error.HTTPError as error:
        answers[name] = [error.code, error.read().decode()]
print(json.dumps(answers))
"""


def volume(**kind: Any) -> dict[str, Any]:
    mount = {"name": "v", "mountPath": "/mnt/v"}
    return {"volumes": [{"name": "v", **kind}], "volumeMounts": [mount]}


def templates(installation: Installation) -> dict[str, tuple[dict[str, Any], str]]:
    """Return templates of a stage worker by name, each with the field that is refused."""
    account = {"serviceAccountToken": {"path": "token"}}
    keys = {"secretKeyRef": {"name": f"{installation.release}-rollyard-tokens", "key": "admin"}}
    init = {"name": "fetch", "image": installation.sandbox_image}
    out = [{"name": "v", "mountPath": "/out"}]
    over = {"volumes": [{"name": "v", "emptyDir": {}}], "volumeMounts": [{"name": "v", "mountPath": "/usr"}]}
    return {
        "hostpath": (volume(hostPath={"path": "/"}), "volumes[0].hostPath"),
        "secret": (volume(secret={"secretName": "keys"}), "volumes[0].secret"),
        "projected": (volume(projected={"sources": [account]}), "volumes[0].projected.sources[0]"),
        "claim": (volume(persistentVolumeClaim={"claimName": "data"}), "volumes[0].persistentVolumeClaim"),
        "csi": (volume(csi={"driver": "secrets-store.csi.k8s.io"}), "volumes[0].csi"),
        "two": (volume(emptyDir={}, hostPath={"path": "/"}), "volumes[0].hostPath"),
        "env": ({"env": [{"name": "A", "valueFrom": keys}]}, "env[0].valueFrom.secretKeyRef"),
        "image": ({"image": "registry.local/evil:1"}, "image"),
        "code": ({"env": [{"name": "PYTHONSTARTUP", "value": "/mnt/x.py"}]}, "env[0].name"),
        "init": ({"initContainers": [{**init, "image": "evil:1"}]}, "initContainers[0].image"),
        "filled": ({**over, "initContainers": [{**init, "volumeMounts": out}]}, "volumeMounts[0].mountPath"),
        "user": ({"podSecurityContext": {"runAsUser": 1000}}, "podSecurityContext.runAsUser"),
        "group": ({"podSecurityContext": {"fsGroup": 1000}}, "podSecurityContext.fsGroup"),
        "scheduler": ({"schedulerName": "mine"}, "schedulerName"),
    }


def test_templates_that_reach_out_start_nothing(installation: Installation) -> None:
    """Each names its field and the chart's value. The API server itself would take all but one of them."""
    asked = templates(installation)
    documents = []
    for name, (template, _) in asked.items():
        documents.append(job(f"evil-{name}", task("a"), stages={"run": {"template": template}}))
    documents.append(pool("evil", template=volume(hostPath={"path": "/"})))
    documents.append(job("evil-url", tasks={"url": "http://169.254.169.254/latest/meta-data/"}))
    bundle = {"apiVersion": "v1", "kind": "List", "items": documents}
    names = [f"evil-{name}" for name in (*asked, "url")]
    try:
        installation.apply(bundle)
        for name, (_, field) in asked.items():
            told = installation.until_condition("rj", f"evil-{name}", "Admitted", "TemplateNotAllowed")
            assert f"spec.stages.run.template.{field}" in told["message"]
            assert "jobs.allow." in told["message"]
        told = installation.until_condition("bp", "evil", "Ready", "TemplateNotAllowed")
        assert "spec.template.volumes[0].hostPath" in told["message"]
        told = installation.until_condition("rj", "evil-url", "Admitted", "TasksNotAllowed")
        assert told["status"] == "False"
        made = [pod["metadata"]["name"] for pod in installation.cluster.items("pods", installation.jobs)]
        assert not [name for name in made if name.startswith("evil")]
        with installation.client() as client:

            def said_over_rest() -> bool:
                conditions = client.job("evil-secret").status.conditions
                return any(one.reason == "TemplateNotAllowed" for one in conditions)

            # The operator writes the object's status first and then reports it to the control plane.
            installation.until(said_over_rest, "REST says the same")
    finally:
        installation.cluster.run(
            "kubectl", "delete", "rj,bp", *names, "evil", "-n", installation.jobs, "--ignore-not-found",
            f"--timeout={PATIENCE_SECONDS}s",
        )  # fmt: skip


LOOK = """
import json, os

def readable(path):
    try:
        return os.listdir(path) if os.path.isdir(path) else open(path).read(1 << 16)
    except OSError:
        return None

def writable(folder):
    try:
        open(os.path.join(folder, "x"), "w").close()
        return True
    except OSError:
        return False

places = ("/etc/rollyard/worker/token", "/etc/rollyard", "/var/run/secrets/kubernetes.io", "/tmp")
seen = {
    "files": {place: readable(place) for place in places},
    "env": dict(os.environ),
    "commands": [readable(f"/proc/{one}/cmdline") for one in os.listdir("/proc") if one.isdigit()],
    "writable": [place for place in ("/", "/etc", "/usr", "/tmp", "/out") if writable(place)],
    "ids": [os.getuid(), os.getgid(), *sorted(os.getgroups())],
    "privileges": [
        line.split()[1]
        for line in open("/proc/self/status")
        if line.startswith(("CapEff", "NoNewPrivs"))
    ],
}
json.dump(seen, open("/out/seen.json", "w"))
"""


@pytest.mark.attack(
    "an init container looks for the token, the variables and the files of its stage worker, and for the "
    "token of a service account",
    boundary="kubernetes",
    surface="`template` of a stage",
    stopped_by="it has the template's volumes, a /tmp and an environment of its own, and the restrictions of "
    "every pod; the worker still reads its token as the user that the template chose",
)
def test_an_init_container_sees_nothing_of_its_worker(installation: Installation) -> None:
    template = {
        **SMALL_POD,
        "volumes": [{"name": "v", "emptyDir": {}}],
        "volumeMounts": [{"name": "v", "mountPath": "/mnt/v"}],
        "initContainers": [
            {
                "name": "look",
                "image": installation.sandbox_image,
                "command": ["python3", "-c", LOOK],
                "env": [{"name": "OWN", "value": "1"}],
                "volumeMounts": [{"name": "v", "mountPath": "/out"}],
            }
        ],
        "podSecurityContext": {
            "runAsUser": 20000,
            "runAsGroup": 20001,
            "fsGroup": 20002,
            "supplementalGroups": [20003],
        },
    }
    namespace = installation.jobs
    with (
        installation.client() as client,
        installation.made(job("looking", task("a", hold=HOLD), stages={"run": {"template": template}})),
    ):
        installation.until(lambda: client.job("looking").status.counts.run.active == 1, "it is in Run")
        (pod,) = installation.cluster.items(
            "pods", namespace, "rollyard.dev/job=looking,rollyard.dev/stage=run"
        )
        in_worker = ("exec", "-n", namespace, pod["metadata"]["name"], "-c", "worker", "--")
        seen = json.loads(installation.cluster.kubectl(*in_worker, "cat", "/mnt/v/seen.json"))
        ids = "import os; print(os.getuid(), os.getgid(), *sorted(os.getgroups()))"
        own = installation.cluster.kubectl(*in_worker, "python3", "-c", ids).split()
        installation.let_go("looking")
        installation.wait("rj", "looking", "Complete")
    assert seen["files"] == {
        "/etc/rollyard/worker/token": None,
        "/etc/rollyard": None,
        "/var/run/secrets/kubernetes.io": None,
        "/tmp": [],
    }
    assert seen["env"]["OWN"] == "1"
    assert not [name for name in seen["env"] if name.startswith(("ROLLYARD_", "HF_"))]
    assert not any("rollyard_pipeline" in command for command in seen["commands"] if command)
    assert seen["writable"] == ["/tmp", "/out"]
    assert seen["ids"][:2] == [20000, 20001]
    assert {20002, 20003} <= set(seen["ids"])
    assert seen["privileges"] == ["0000000000000000", "1"]
    assert [int(one) for one in own] == seen["ids"]


def secret_of(installation: Installation, name: str) -> dict[str, Any] | None:
    """Return the Secret of a job."""
    found = installation.cluster.items("secrets", installation.jobs, f"rollyard.dev/job={name}")
    return found[0] if found else None


@pytest.fixture(scope="module")
def thief(installation: Installation) -> Iterator[str]:
    """Yield a pod of the tenant's own with the Secret of the job `mine`; beside it runs the job `theirs`."""
    with (
        installation.made(job("mine", task("a", hold=HOLD))),
        installation.made(job("theirs", task("b", hold=HOLD))),
    ):
        secret = installation.until(lambda: secret_of(installation, "mine"), "the job's Secret")
        container = {
            "name": "main",
            "image": installation.sandbox_image,
            "imagePullPolicy": "Never",
            "command": ["sleep", "600"],
            "volumeMounts": [{"name": "stolen", "mountPath": "/stolen"}],
            "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        }
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "thief"},
            "spec": {
                "restartPolicy": "Never",
                "terminationGracePeriodSeconds": 0,
                "automountServiceAccountToken": False,
                "securityContext": {
                    "runAsNonRoot": True,
                    "runAsUser": 1000,
                    "seccompProfile": {"type": "RuntimeDefault"},
                },
                "containers": [container],
                "volumes": [{"name": "stolen", "secret": {"secretName": secret["metadata"]["name"]}}],
            },
        }
        with installation.made(pod):
            installation.cluster.kubectl(
                "wait", "--for=condition=Ready", "pod/thief", "-n", installation.jobs,
                f"--timeout={PATIENCE_SECONDS}s",
            )  # fmt: skip
            yield "thief"


@pytest.mark.attack(
    "whoever may create pods in the namespace mounts it and leases, completes or claims for another job",
    boundary="kubernetes",
    surface="Secret of a job's workers",
    stopped_by="the token serves its own job alone",
)
def test_the_token_of_a_job_is_worth_nothing_to_another(installation: Installation, thief: str) -> None:
    namespace = installation.jobs
    with installation.client() as client:
        installation.until(
            lambda: client.job("theirs").status.counts.run.active == 1, "its rollout is in Run"
        )
        (claim,) = [one for one in installation.claims() if one.job == "theirs"]

    def lease(name: str) -> tuple[str, str, dict[str, Any]]:
        body = {
            "worker": "thief",
            "node": "kubernetes",
            "capacity": {"eval": 1},
            "namespace": namespace,
            "job": name,
        }
        return "POST", f"{installation.url}/v1/leases", body

    where = f"?namespace={namespace}"
    method, url, body = lease("mine")
    calls = {
        "own lease": lease("mine"),
        "lease": lease("theirs"),
        "any lease": (method, url, {**body, "job": None, "namespace": None}),
        "claim": ("GET", f"{installation.url}/v1/claims/{claim.id}", None),
        "release": ("DELETE", f"{installation.url}/v1/claims/{claim.id}", None),
        "claims": ("GET", f"{installation.url}/v1/claims{where}", None),
        "job": ("GET", f"{installation.url}/v1/rolloutjobs/theirs{where}", None),
        "results": ("GET", f"{installation.url}/v1/rolloutjobs/theirs/trajectories{where}", None),
        "cancel": ("POST", f"{installation.url}/v1/rolloutjobs/theirs/cancel{where}", {}),
        "pools": ("GET", f"{installation.url}/v1/backendpools{where}", None),
    }
    done = installation.cluster.run(
        "kubectl", "exec", "-i", "-n", namespace, thief, "--", "python3", "-c", TRY, input=json.dumps(calls)
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    status = {name: answer[0] for name, answer in answers.items()}
    assert status.pop("own lease") == 200, "the token is good for its own job"
    assert set(status.values()) <= {401, 403, 404}, answers
    assert claim.secret == "" or claim.secret not in done.stdout
    with installation.client() as client:
        assert client.job("theirs").status.counts.run.active == 1, "it continues untouched"


def test_no_secret_of_the_namespace_is_more_than_a_jobs_token(installation: Installation, thief: str) -> None:
    for namespace in installation.namespaces:
        for secret in installation.cluster.items("secrets", namespace):
            values = {base64.b64decode(one).decode() for one in (secret.get("data") or {}).values()}
            assert not values & set(installation.tokens.values()), secret["metadata"]["name"]
    pods = installation.cluster.items("pods", installation.jobs)
    mounting = {
        pod["metadata"]["labels"].get("app.kubernetes.io/component")
        for pod in pods
        if "labels" in pod["metadata"] and any("secret" in one for one in pod["spec"]["volumes"])
    }
    assert mounting == {"stage-worker"}, "neither backends nor sandboxes hold a token"


def test_the_secret_goes_with_its_job(installation: Installation) -> None:
    with installation.made(job("brief", task("a", hold=HOLD))):
        secret = installation.until(lambda: secret_of(installation, "brief"), "the job's Secret")
        assert secret["immutable"] is True
    installation.until(lambda: secret_of(installation, "brief") is None, "it is gone")
