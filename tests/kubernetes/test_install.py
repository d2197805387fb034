"""The chart installed with this checkout's images: its own test, the command line, upgrades under a job."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from rollyard_testing.kubernetes.installedchart import HOLD, job, task
from rollyard_testing.pace import patience

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.kubelab import Cluster

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly]

CHART = str(Path(__file__).resolve().parents[2] / "helm" / "rollyard")
ROLLYARD = str(Path(sys.executable).with_name("rollyard"))
SETTLE_SECONDS = patience(120)


@dataclass(frozen=True)
class Release:
    """A namespaced installation over TLS."""

    cluster: Cluster
    home: str
    jobs: str
    values: Path

    def apply(self, **changes: Any) -> None:
        """Install or upgrade it; `changes` are merged over its values."""
        document = yaml.safe_load(self.values.read_text())
        for key, value in changes.items():
            document[key] = {**document.get(key, {}), **value}
        self.cluster.helm(
            "upgrade", "--install", "yard", CHART, "-n", self.home, "--values", "-",
            "--wait", "--timeout", f"{patience(150):.0f}s", input=yaml.safe_dump(document),
        )  # fmt: skip

    def rollyard(self, *words: str, **env: str) -> subprocess.CompletedProcess[str]:
        """Run the command line with this cluster's kubeconfig, and nothing else to find a server by."""
        return subprocess.run(
            [ROLLYARD, *words],
            env={**self.cluster.env, "ROLLYARD_HOME": str(self.values.parent / "none"), **env},
            capture_output=True,
            text=True,
            timeout=patience(120),
        )


@pytest.fixture(scope="module")
def release(cluster: Cluster, images: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    home, jobs = cluster.namespace(restricted=True), cluster.namespace(restricted=True)
    folder = tmp_path_factory.mktemp("release")
    values = folder / "values.yaml"
    (folder / "state").mkdir()
    cluster.volume(home, folder / "state")
    document = {
        "namespaces": [jobs],
        "crds": {"enabled": False},
        "images": {"tag": images},
        "tls": {"enabled": True},
        "api": {
            "persistence": {"type": "existingClaim", "existingClaim": "state"},
            "resources": {"requests": {"cpu": "50m"}},
        },
        "operator": {"resources": {"requests": {"cpu": "50m"}}},
    }
    values.write_text(yaml.safe_dump(document))
    made = Release(cluster, home, jobs, values)
    try:
        made.apply()
        yield made
    finally:
        cluster.kubectl("delete", "rj,bp", "--all", "-n", jobs, f"--timeout={patience(180):.0f}s")
        cluster.helm("uninstall", "yard", "-n", home, "--wait", "--ignore-not-found")
        cluster.remove_volume(home)


def test_its_own_test_passes(release: Release) -> None:
    said = release.cluster.helm(
        "test", "yard", "-n", release.home, "--logs", "--timeout", f"{patience(120):.0f}s"
    )
    assert "Phase:          Succeeded" in said
    assert said.count("ok   https://") == 4


def test_the_command_line_reaches_it_through_the_kubeconfig(release: Release) -> None:
    for name in (release.home, f"{release.home}/yard"):
        done = release.rollyard("get", f"--kubernetes={name}", "-n", release.jobs, "-o", "json")
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["items"] == []
    done = release.rollyard("get", ROLLYARD_KUBERNETES=release.home)
    assert done.returncode == 0, done.stderr


def test_a_task_file_of_this_machine_is_uploaded(release: Release, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text('{"id": "a", "prompt": "?"}\n{"id": "b", "prompt": "?"}\n')
    spec = {"tasks": {"url": "tasks.jsonl"}, "handler": "math", "agent": {"type": "oracle"}, "suspend": True}
    manifest = tmp_path / "job.yaml"
    manifest.write_text(
        yaml.safe_dump(
            {
                "apiVersion": "rollyard.dev/v1alpha1",
                "kind": "RolloutJob",
                "metadata": {"name": "carried"},
                "spec": spec,
            }
        )
    )
    words = ("submit", f"--kubernetes={release.home}", "-n", release.jobs, "-f", str(manifest))
    for said in ("carried submitted (2 rollouts)", "carried unchanged ("):
        done = release.rollyard(*words)
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
    release.cluster.kubectl(
        "wait", "--for=create", "rj/carried", "-n", release.jobs, f"--timeout={patience(180):.0f}s"
    )
    where = ("-n", release.jobs, "-o", "jsonpath={.spec.tasks.url}")
    assert release.cluster.kubectl("get", "rj/carried", *where).startswith("blob:sha256:")
    release.cluster.kubectl("delete", "rj", "carried", "-n", release.jobs, f"--timeout={patience(180):.0f}s")


def account(release: Release, name: str, rules: list[dict[str, Any]], folder: Path) -> Release:
    """Return the same release, as a service account with these rights in its namespace."""
    cluster = release.cluster
    cluster.kubectl("create", "serviceaccount", name, "-n", release.home)
    meta = {"name": name, "namespace": release.home}
    group = "rbac.authorization.k8s.io"
    role = {"apiVersion": f"{group}/v1", "kind": "Role", "metadata": meta, "rules": rules}
    binding = {
        **role,
        "kind": "RoleBinding",
        "roleRef": {"apiGroup": group, "kind": "Role", "name": name},
        "subjects": [{"kind": "ServiceAccount", **meta}],
    }
    del binding["rules"]
    cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all([role, binding]))
    token = cluster.kubectl("create", "token", name, "-n", release.home).strip()
    config = yaml.safe_load(cluster.kubeconfig.read_text())
    config["users"] = [{"name": config["contexts"][0]["context"]["user"], "user": {"token": token}}]
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return Release(cluster.with_rights(path), release.home, release.jobs, release.values)


def right(resource: str, *verbs: str) -> dict[str, Any]:
    return {"apiGroups": [""], "resources": [resource], "verbs": list(verbs)}


def test_without_rights_it_is_told_which_are_missing(release: Release, tmp_path: Path) -> None:
    words = ("get", f"--kubernetes={release.home}")
    services, pods = right("services", "list", "get"), right("pods", "list", "get")
    for number, (rules, env, told) in enumerate(
        (
            ([], {}, "ask for `list services`"),
            ([services], {}, "you may not read Secret 'yard-rollyard-tokens'"),
            ([services, pods], {"ROLLYARD_TOKEN": "x"}, "`create pods/portforward`"),
            ([services, pods, right("pods/portforward", "create")], {"ROLLYARD_TOKEN": "x"}, "token"),
        )
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        done = account(release, f"user-{number}", rules, folder).rollyard(*words, **env)
        assert done.returncode == 1
        assert done.stderr.startswith("rollyard: ")
        assert told in done.stderr, done.stderr


def test_the_tunnel_outlives_the_control_plane_s_pod(
    release: Release, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rollyard.connection import connect
    from rollyard_client.errors import RollyardError

    monkeypatch.setenv("KUBECONFIG", str(release.cluster.kubeconfig))
    monkeypatch.setenv("PATH", release.cluster.env["PATH"])
    selector = "app.kubernetes.io/component=api"
    with connect(f"kubernetes://{release.home}", None, release.jobs) as client:
        assert client.jobs() == []
        before = {one["metadata"]["uid"] for one in release.cluster.items("pods", release.home, selector)}
        release.cluster.kubectl("delete", "pod", "-n", release.home, "-l", selector)
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            try:
                assert client.jobs() == []
                break
            except RollyardError:
                assert time.monotonic() < deadline
        after = {one["metadata"]["uid"] for one in release.cluster.items("pods", release.home, selector)}
    assert not before & after


def test_upgrade_and_rollback_keep_a_job_at_work(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pods stay, and a rollout in the middle of Run ends as if nothing had happened."""
    from rollyard.connection import connect

    monkeypatch.setenv("KUBECONFIG", str(release.cluster.kubeconfig))
    monkeypatch.setenv("PATH", release.cluster.env["PATH"])
    cluster = release.cluster

    def pods(component: str) -> dict[str, tuple[str, str]]:
        found = cluster.items("pods", release.jobs, f"app.kubernetes.io/component={component}")
        return {one["metadata"]["name"]: (one["metadata"]["uid"], one["status"]["phase"]) for one in found}

    cluster.kubectl("create", "-n", release.jobs, "-f", "-", input=json.dumps(job("stream")))
    settled(lambda: [phase for _, phase in pods("stage-worker").values()] == ["Running"] * 3)
    with connect(f"kubernetes://{release.home}", None, release.jobs) as client:
        client.push_tasks("stream", [task("held", hold=HOLD)])
        settled(lambda: client.job("stream").status.counts.run.active == 1)
        before = pods("stage-worker"), pods("sandbox")
        (box,) = before[1]
        release.apply(operator={"logLevel": "warning"}, api={**release_api(release), "logLevel": "warning"})
        assert (pods("stage-worker"), pods("sandbox")) == before
        cluster.helm("rollback", "yard", "-n", release.home, "--wait", "--timeout", f"{patience(150):.0f}s")
        assert (pods("stage-worker"), pods("sandbox")) == before
        cluster.kubectl("exec", "-n", release.jobs, box, "--", "touch", "/work/go")
        client.push_tasks("stream", [task("later")])
        client.close_stream("stream")
        cluster.kubectl(
            "wait", "--for=condition=Succeeded", "rj/stream", "-n", release.jobs,
            f"--timeout={patience(120):.0f}s",
        )  # fmt: skip
        ended = sorted((one.task_id, one.reward, one.attempt) for one in client.trajectories("stream"))
    assert ended == [("held", 1.0, 0), ("later", 1.0, 0)]
    cluster.kubectl("delete", "rj", "stream", "-n", release.jobs)
    settled(lambda: not pods("stage-worker") and not pods("sandbox"))


def release_api(release: Release) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(release.values.read_text())["api"]
    return found


def settled(condition: Any) -> None:
    deadline = time.monotonic() + SETTLE_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.3)


def test_a_job_is_served_by_a_pod_that_stood_ready(release: Release, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod ends with the job, another one stands ready again, and all go with the option."""
    from rollyard.connection import connect

    monkeypatch.setenv("KUBECONFIG", str(release.cluster.kubeconfig))
    monkeypatch.setenv("PATH", release.cluster.env["PATH"])
    cluster = release.cluster

    def running(selector: str) -> set[str]:
        found = cluster.items("pods", release.jobs, selector)
        return {one["metadata"]["name"] for one in found if one["status"]["phase"] == "Running"}

    release.apply(workers={"ready": 1})
    try:
        settled(lambda: len(running("rollyard.dev/ready")) == 1)
        (name,) = running("rollyard.dev/ready")
        default = {stage: {"template": {}} for stage in ("init", "run", "eval")}
        manifest = job("at-once", stages=default)
        cluster.kubectl("create", "-n", release.jobs, "-f", "-", input=json.dumps(manifest))
        settled(lambda: len(running("rollyard.dev/job=at-once,rollyard.dev/stage")) == 3)
        pod = cluster.get("pod", name, release.jobs)
        assert pod["metadata"]["labels"]["rollyard.dev/job"] == "at-once"
        assert [one["kind"] for one in pod["metadata"]["ownerReferences"]] == ["RolloutJob"]
        assert pod["status"]["containerStatuses"][0]["restartCount"] == 0
        settled(lambda: len(running("rollyard.dev/ready") - {name}) == 1)
        with connect(f"kubernetes://{release.home}", None, release.jobs) as client:
            client.push_tasks("at-once", [task("only")])
            client.close_stream("at-once")
            cluster.kubectl(
                "wait", "--for=condition=Succeeded", "rj/at-once", "-n", release.jobs,
                f"--timeout={patience(120):.0f}s",
            )  # fmt: skip
            ended = [(one.task_id, one.reward, one.attempt) for one in client.trajectories("at-once")]
        # Each stage has one worker, so the one that stood ready has served its stage.
        assert ended == [("only", 1.0, 0)]
        settled(lambda: name not in running("rollyard.dev/instance"))
        assert len(running("rollyard.dev/ready")) == 1
    finally:
        cluster.kubectl("delete", "rj", "at-once", "-n", release.jobs, "--ignore-not-found")
        release.apply(workers={"ready": 0})
    settled(lambda: not cluster.items("pods", release.jobs, "rollyard.dev/ready"))
