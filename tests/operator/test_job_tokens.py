"""The token of a job is in a Secret of its own, which serves that job only and goes with it."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollyard_crds.security.job_token import JobIdentity, job_of
from rollyard_operator.controllers.legacy_token import secrets_of
from rollyard_operator.kube.errors import KubeError
from rollyard_operator.kube.labels import Object
from rollyard_testing.operator.fakecluster import FakeControlPlane, FakeKube
from rollyard_testing.operator.operatorlab import KEY, NAMESPACE, Lab, hurry, job, running, settings_in, until

OLD = "rollyard-worker"
OLD_POD = (NAMESPACE, "math-old-run-0")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hurry(monkeypatch)
    monkeypatch.setattr("rollyard_operator.installation.TOKEN_SECONDS", 0.02)
    monkeypatch.setattr("rollyard_operator.installation.SWEEP_SECONDS", 0.05)
    return tmp_path


@pytest.fixture
async def lab(folder: Path) -> AsyncIterator[Lab]:
    async with running(Lab(settings_in(folder), FakeKube(), FakeControlPlane())) as made:
        yield made


def token_of(secret: Object) -> str:
    return base64.b64decode(secret["data"]["token"]).decode()


def mounted(lab: Lab) -> set[str]:
    """Return the Secrets of the pods that are not being deleted."""
    pods = [pod for pod in lab.kube.of("Pod") if "deletionTimestamp" not in pod["metadata"]]
    return set().union(*(secrets_of(pod) for pod in pods))


async def test_each_job_has_a_token_that_serves_it_alone(lab: Lab) -> None:
    lab.kube.put(job())
    lab.kube.put(job("other"))
    await until(lambda: len(lab.kube.of("Pod")) == 6)
    secrets = {secret["metadata"]["labels"]["rollyard.dev/job"]: secret for secret in lab.kube.of("Secret")}
    assert set(secrets) == {"math", "other"}
    for name, secret in secrets.items():
        uid = lab.kube.objects["RolloutJob", NAMESPACE, name]["metadata"]["uid"]
        assert job_of(token_of(secret), "worker-token") == JobIdentity(NAMESPACE, name, uid)
        assert secret["immutable"] is True
        (owner,) = secret["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"], owner["uid"]) == ("RolloutJob", name, uid)
        mounting = [pod for pod in lab.kube.of("Pod") if secret["metadata"]["name"] in secrets_of(pod)]
        assert {pod["metadata"]["labels"]["rollyard.dev/job"] for pod in mounting} == {name}
        assert len(mounting) == 3
    assert "worker-token" not in str(lab.kube.objects), "the token of all workers stays with the operator"


async def test_the_secret_is_there_before_the_pods_and_goes_with_the_job(lab: Lab) -> None:
    lab.kube.put(job())
    await until(lambda: len(lab.kube.of("Pod")) == 3)
    made = [kind for verb, kind, _ in lab.kube.calls if verb == "create" and kind in ("Secret", "Pod")]
    assert made[0] == "Secret"
    lab.kube.remove("RolloutJob", *KEY)
    await until(lambda: not lab.kube.of("Secret"))


async def test_the_release_namespace_gets_no_more(folder: Path) -> None:
    lab = Lab(settings_in(folder, releaseNamespace=NAMESPACE), FakeKube(), FakeControlPlane())
    async with running(lab):
        lab.kube.put(job())
        await until(lambda: len(lab.kube.of("Pod")) == 3)
        (secret,) = lab.kube.of("Secret")
        assert token_of(secret).startswith("ry-job.")


async def test_another_worker_token_gives_jobs_new_secrets_and_workers(lab: Lab, folder: Path) -> None:
    lab.kube.put(job())
    await until(lambda: len(lab.kube.of("Pod")) == 3)
    lab.start_pods()
    await until(lambda: lab.holds("Running"))
    before = mounted(lab)
    (folder / "worker").write_text("another-token\n")
    await until(lambda: not mounted(lab))
    for name in lab.kube.names("Pod"):
        lab.kube.remove("Pod", NAMESPACE, name)
    await until(lambda: len(lab.kube.of("Pod")) == 3)
    (name,) = mounted(lab)
    assert name not in before
    assert job_of(token_of(lab.kube.objects["Secret", NAMESPACE, name]), "another-token") is not None


async def test_an_unreadable_token_file_starts_nothing_and_is_read_again(lab: Lab, folder: Path) -> None:
    (folder / "worker").write_text("\n")
    lab.kube.put(job())
    await until(lambda: KEY in lab.control.all_jobs)
    assert lab.kube.of("Pod") == []
    (folder / "worker").write_text("worker-token\n")
    await until(lambda: len(lab.kube.of("Pod")) == 3)


async def test_an_upgrade_removes_the_namespaces_secret_once_no_pod_mounts_it(folder: Path) -> None:
    """Workers of the earlier version continue until they are replaced, even one that has not started yet."""
    lab = Lab(settings_in(folder), FakeKube(), FakeControlPlane())
    lab.kube.put(job())
    uid = lab.kube.objects["RolloutJob", *KEY]["metadata"]["uid"]
    meta = {"name": OLD, "namespace": NAMESPACE}
    lab.kube.put({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": {}})
    labels = {
        "rollyard.dev/instance": "test",
        "app.kubernetes.io/component": "stage-worker",
        "rollyard.dev/job": "math",
        "rollyard.dev/job-uid": uid,
    }
    volumes = [{"name": "rollyard-token", "secret": {"secretName": OLD}}]
    spec = {"volumes": volumes, "containers": [{"name": "worker"}]}
    pod = {"name": OLD_POD[1], "namespace": NAMESPACE, "labels": labels, "ownerReferences": []}
    lab.kube.put({"apiVersion": "v1", "kind": "Pod", "metadata": pod, "spec": spec})
    async with running(lab):
        await until(lambda: len(lab.kube.of("Pod")) == 4)
        where = ("Secret", NAMESPACE, OLD)
        # The old worker is asked to end, and mounts the Secret until it has.
        await until(lambda: "deletionTimestamp" in lab.kube.objects["Pod", *OLD_POD]["metadata"])
        assert where in lab.kube.objects
        lab.kube.remove("Pod", *OLD_POD)
        await until(lambda: where not in lab.kube.objects)
        assert len([pod for pod in lab.kube.of("Pod") if OLD in secrets_of(pod)]) == 0


async def test_a_refused_removal_is_tried_again(folder: Path) -> None:
    lab = Lab(settings_in(folder), FakeKube(), FakeControlPlane())
    meta = {"name": OLD, "namespace": NAMESPACE}
    lab.kube.put({"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": {}})
    lab.kube.put(job())
    refusals = [KubeError(403, "Forbidden", "no"), KubeError(403, "Forbidden", "no")]

    def refuse(verb: str, obj: Object) -> KubeError | None:
        return refusals.pop() if (verb, obj["kind"]) == ("delete", "Secret") and refusals else None

    lab.kube.refuse = refuse
    async with running(lab):
        await until(lambda: ("Secret", NAMESPACE, OLD) not in lab.kube.objects)
    assert not refusals
