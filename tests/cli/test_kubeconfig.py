"""The command line with a kubeconfig: a control plane of this machine behind a scripted kubectl."""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard.main import main
from rollyard_testing.api.control_plane import a_control_plane
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience
from rollyard_testing.waiting import until

SCRIPT = Path(__file__).with_name("scripted_kubectl.py")
READY_SECONDS = 150


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, str]]:
    """Yield the port and the admin's token of a control plane."""
    folder = tmp_path_factory.mktemp("plane")
    with a_control_plane(
        folder, "--log-level", "error", ready_seconds=READY_SECONDS, end_seconds=60
    ) as started:
        yield started.port, started.tokens["admin"]


def service(namespace: str, release: str = "rollyard", **changes: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "namespace": namespace,
            "name": f"{release}-api",
            "labels": {"app.kubernetes.io/instance": release},
            "annotations": {"rollyard.dev/tokens-secret": "tokens"},
        },
        "spec": {"ports": [{"name": "http", "port": 8765}]},
        **changes,
    }


Scripted = Callable[..., None]


@pytest.fixture
def kubectl(plane: tuple[int, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Scripted:
    """Put a kubectl with this state on PATH, and a kubeconfig. Nothing else names a server."""
    port, token = plane
    for name in ("ROLLYARD_URL", "ROLLYARD_TOKEN", "ROLLYARD_HOME", "ROLLYARD_KUBERNETES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    (tmp_path / "kubeconfig").write_text("")
    state = tmp_path / "state.json"
    program = tmp_path / "bin" / "kubectl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, str(SCRIPT), str(state)])} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")

    def script(**changes: Any) -> None:
        secrets = {"tokens": {"admin": base64.b64encode(token.encode()).decode()}}
        given = {"services": [service("rollouts")], "secrets": secrets, "target": port, **changes}
        state.write_text(json.dumps(given))

    script()
    return script


def error(capsys: pytest.CaptureFixture[str], *words: str, status: int = 1) -> str:
    assert main(list(words)) == status
    shown = capsys.readouterr().err
    assert shown.startswith("rollyard: ")
    assert shown.count("\n") == 1
    return shown


@pytest.mark.parametrize(
    "words",
    [
        ("get", "--kubernetes", "rj"),  # The next word is not a namespace.
        ("get", "rj", "--kubernetes"),
        ("get", "--kubernetes=rollouts"),
        ("get", "--kubernetes=rollouts/rollyard", "rj"),
        ("get", "--url", "kubernetes://rollouts"),
        ("get", "rj"),
    ],
    ids=" ".join,
)
def test_the_control_plane_is_found_and_its_token_read(
    kubectl: Scripted, capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    assert main([*words, "-o", "json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out) == {"apiVersion": "v1", "kind": "List", "items": []}
    found_by_itself = "rollyard: using rollouts/rollyard of the cluster of your kubeconfig\n"
    assert shown.err == (found_by_itself if words == ("get", "rj") else "")


@pytest.mark.parametrize("value", ["rollouts", "*", "rollouts/rollyard"])
def test_the_environment_names_it(
    kubectl: Scripted, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], value: str
) -> None:
    monkeypatch.setenv("ROLLYARD_KUBERNETES", value)
    assert main(["get", "rj", "-o", "json"]) == 0
    assert capsys.readouterr().err == ""


def test_a_token_of_ones_own_needs_no_right_to_read_secrets(
    kubectl: Scripted,
    plane: tuple[int, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    kubectl(forbidden=["secrets"])
    assert "you may not read Secret 'tokens' in namespace 'rollouts': set ROLLYARD_TOKEN" in error(
        capsys, "get", "--kubernetes"
    )
    monkeypatch.setenv("ROLLYARD_TOKEN", plane[1])
    assert main(["get", "--kubernetes", "-o", "json"]) == 0


def test_without_the_right_to_all_namespaces_the_current_one_is_searched(
    kubectl: Scripted, capsys: pytest.CaptureFixture[str]
) -> None:
    forbidden = ["services --all-namespaces"]
    kubectl(forbidden=forbidden, current="rollouts")
    assert main(["get", "--kubernetes", "-o", "json"]) == 0
    capsys.readouterr()
    kubectl(forbidden=forbidden, current="elsewhere")
    assert "no Rollyard is installed in namespace 'elsewhere'" in error(capsys, "get", "--kubernetes")


def names(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    """Return NAMESPACE/NAME of the jobs that `rollyard get` lists."""
    assert main(["get", "rj", "-o", "json", *words]) == 0
    listed = [item["metadata"] for item in json.loads(capsys.readouterr().out)["items"]]
    return [f"{meta['namespace']}/{meta['name']}" for meta in listed]


def test_the_namespace_is_that_of_the_kubeconfigs_context(
    kubectl: Scripted, plane: tuple[int, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [{"id": "a", "prompt": "x", "test_script": "true", "solution": []}]
    job = {"tasks": {"inline": tasks}, "handler": "shell", "agent": {"type": "oracle"}}
    (tmp_path / "job.yaml").write_text(json.dumps(job_manifest("j", job)))
    port, token = plane
    elsewhere = ["--url", f"http://127.0.0.1:{port}"]
    kubectl(current="team-a")
    for words in ([], ["--name", "k", "-n", "team-b"]):
        assert main(["submit", "-f", str(tmp_path / "job.yaml"), *words]) == 0
    capsys.readouterr()
    try:
        assert names(capsys) == names(capsys, "--kubernetes=rollouts") == ["team-a/j"]
        assert names(capsys, "-n", "team-b") == ["team-b/k"]
        assert names(capsys, "-A") == ["team-a/j", "team-b/k"]
        assert main(["describe", "j"]) == 0
        assert "team-a" in capsys.readouterr().out
        assert "no RolloutJob and no BackendPool 'k' in namespace 'team-a'" in error(
            capsys, "describe", "k", "--kubernetes"
        )
        # A control plane that is named by its URL has nothing to do with the kubeconfig.
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("ROLLYARD_TOKEN", token)
            assert names(capsys, *elsewhere) == []
            assert names(capsys, *elsewhere, "-n", "team-a") == ["team-a/j"]
        kubectl(current="")
        assert names(capsys) == []
    finally:
        for name, namespace in (("j", "team-a"), ("k", "team-b")):
            assert main(["delete", name, "-n", namespace]) == 0


@pytest.mark.parametrize(
    ("state", "words", "status", "told"),
    [
        ({"services": []}, ["--kubernetes"], 1, "no Rollyard is installed in the cluster"),
        ({}, ["--kubernetes=other"], 1, "no Rollyard is installed in namespace 'other'"),
        ({}, ["--kubernetes=rollouts/x"], 1, "no release 'x' of Rollyard is installed in namespace"),
        ({}, ["--kubernetes=No_Name"], 2, "must be NAMESPACE or NAMESPACE/RELEASE (got 'No_Name')"),
        ({}, ["--kubernetes", "--url", "http://a"], 2, "give one of them"),
        (
            {"services": [service("a"), service("b", "yard")]},
            ["--kubernetes"],
            2,
            "(a/rollyard, b/yard): choose with --kubernetes=NAMESPACE/RELEASE",
        ),
        ({"forbidden": ["services"]}, ["--kubernetes=a"], 1, "ask for `list services`"),
        ({"forbidden": ["portforward"]}, ["--kubernetes"], 1, "`create pods/portforward` there"),
        ({"unreachable": True}, ["--kubernetes"], 1, "the cluster does not answer: Unable to connect"),
        ({"secrets": {}}, ["--kubernetes"], 1, 'secrets "tokens" not found; set ROLLYARD_TOKEN'),
        ({"secrets": {"tokens": {}}}, ["--kubernetes"], 1, "has no key 'admin'"),
        # Nothing names a server, so the message names both ways that were tried.
        ({"services": []}, [], 1, "with `rollyard up`; in the cluster of your kubeconfig: no Rollyard"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_wrong_is_told_in_one_line(
    kubectl: Scripted,
    capsys: pytest.CaptureFixture[str],
    state: dict[str, Any],
    words: list[str],
    status: int,
    told: str,
) -> None:
    kubectl(**state)
    assert told in error(capsys, "get", "rj", *words, status=status)


def test_without_kubectl(
    kubectl: Scripted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "kubectl is not on PATH, and --kubernetes needs it" in error(capsys, "get", "--kubernetes")
    assert "no server at http://127.0.0.1:8765" in error(capsys, "get")


def test_a_tunnel_that_breaks_comes_back(kubectl: Scripted) -> None:
    from rollyard import cluster
    from rollyard_client import Client

    kubectl(lives=1.2)
    installation = cluster.find("kubernetes://")
    with cluster.forwarded(installation) as url, Client(url, cluster.token(installation)) as client:
        processes = set()
        deadline = time.monotonic() + patience(READY_SECONDS)
        while len(processes) < 2 and time.monotonic() < deadline:
            processes |= {int(child) for child in children() if b"port-forward" in command_line(child)}
            assert client.jobs() == []
        assert len(processes) >= 2
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)


def children() -> list[str]:
    found = []
    for task in Path("/proc/self/task").iterdir():
        try:
            found += (task / "children").read_text().split()
        except OSError:
            continue
    return found


def command_line(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_nothing_is_left_when_the_command_is_killed(kubectl: Scripted, tmp_path: Path) -> None:
    script = (
        "import os, signal\n"
        "from rollyard import cluster\n"
        "with cluster.forwarded(cluster.find('kubernetes://')) as url:\n"
        "    print(url, flush=True)\n"
        "    signal.pause()\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline().rsplit(":", 1)[1])
        process.kill()
        process.wait()
    until(lambda: not listens(port), patience(READY_SECONDS))


def listens(port: int) -> bool:
    rows = Path("/proc/net/tcp").read_text().splitlines()[1:]
    return any(row.split()[1] == f"0100007F:{port:04X}" and row.split()[3] == "0A" for row in rows)


@pytest.mark.parametrize("words", [("--kubernetes", "open"), ("open", "--kubernetes=rollouts")], ids=str)
def test_the_way_to_the_page_stays_open_until_ctrl_c(kubectl: Scripted, words: tuple[str, ...]) -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "rollyard", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            link = process.stdout.readline().strip()
            page, _, code = link.partition("/#code=")
            assert page.startswith("http://127.0.0.1:"), process.stderr.read()
            assert "within 60 seconds" in process.stderr.readline()
            assert process.stderr.readline() == "The way into the cluster stays open until Ctrl-C.\n"
            headers = {"Origin": page, "Rollyard-Page": "1"}
            answer = httpx.post(f"{page}/v1/session", json={"code": code}, headers=headers, trust_env=False)
            assert answer.status_code == 204
            jobs = httpx.get(f"{page}/v1/rolloutjobs", cookies=dict(answer.cookies), trust_env=False)
            assert jobs.status_code == 200
            process.send_signal(signal.SIGINT)
            assert process.wait(patience(60)) == 130
        finally:
            process.kill()
    with pytest.raises(httpx.ConnectError):
        httpx.get(page, trust_env=False)
