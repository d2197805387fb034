"""The token of a job is in a Secret of its own, which serves that job only and goes with it."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rollyard_crds.security.job_token import JobIdentity, job_of
from rollyard_operator.kube.labels import Object
from rollyard_testing.operator.fakecluster import FakeControlPlane, FakeKube
from rollyard_testing.operator.operatorlab import KEY, NAMESPACE, Lab, hurry, job, running, settings_in, until


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    hurry(monkeypatch)
    monkeypatch.setattr("rollyard_operator.installation.TOKEN_SECONDS", 0.02)
    return tmp_path


@pytest.fixture
async def lab(folder: Path) -> AsyncIterator[Lab]:
    async with running(Lab(settings_in(folder), FakeKube(), FakeControlPlane())) as made:
        yield made


def token_of(secret: Object) -> str:
    return base64.b64decode(secret["data"]["token"]).decode()


def secrets_of(pod: Object) -> set[str]:
    """Return the names of the Secrets that a pod mounts as volumes."""
    volumes = (pod.get("spec") or {}).get("volumes") or ()
    return {str(volume["secret"].get("secretName")) for volume in volumes if volume.get("secret")}


def mounted(lab: Lab) -> set[str]:
    """Return the Secrets of the pods that are not being deleted."""
    pods = [pod for pod in lab.kube.of("Pod") if "deletionTimestamp" not in pod["metadata"]]
    return set().union(*(secrets_of(pod) for pod in pods))


@pytest.mark.attack(
    "a tenant reads the token of all workers",
    boundary="kubernetes",
    surface="Secrets of a namespace with jobs",
    stopped_by="it never leaves the operator and the control plane",
)
async def test_each_job_has_a_token_that_serves_it_alone(lab: Lab) -> None:
    lab.kube.put(job())
    await lab.with_workers(job("other"), count=6)
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
    await lab.with_workers()
    made = [kind for verb, kind, _ in lab.kube.calls if verb == "create" and kind in ("Secret", "Pod")]
    assert made[0] == "Secret"
    lab.kube.remove("RolloutJob", *KEY)
    await until(lambda: not lab.kube.of("Secret"))


async def test_the_release_namespace_gets_no_more(folder: Path) -> None:
    lab = Lab(settings_in(folder, releaseNamespace=NAMESPACE), FakeKube(), FakeControlPlane())
    async with running(lab):
        await lab.with_workers()
        (secret,) = lab.kube.of("Secret")
        assert token_of(secret).startswith("ry-job.")


async def test_another_worker_token_gives_jobs_new_secrets_and_workers(lab: Lab, folder: Path) -> None:
    await lab.with_running_workers()
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
