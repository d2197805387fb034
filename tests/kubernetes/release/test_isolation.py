"""Sandboxes reach and hold nothing, while a pod without their policy reaches all of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from rollyard_testing.kubernetes.installedchart import PATIENCE_SECONDS, job
from rollyard_testing.kubernetes.plainpod import plain_pod

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.installedchart import Installation

pytestmark = pytest.mark.kubernetes
TOKENS = "/var/run/secrets"
PROBE = """
import json, socket, struct, sys
from concurrent.futures import ThreadPoolExecutor

def tried(target):
    how, host, port = target.rsplit(" ", 2)
    try:
        if how == "tcp":
            socket.create_connection((host, int(port)), 2).close()
            return "reached"
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.settimeout(2)
            parts = b"kubernetes.default.svc.cluster.local".split(b".")
            name = b"".join(bytes([len(part)]) + part for part in parts)
            head = struct.pack(">6H", 7, 256, 1, 0, 0, 0)
            udp.sendto(head + name + b"\\0" + struct.pack(">2H", 1, 1), (host, int(port)))
            return "reached" if udp.recv(512)[:2] == b"\\0\\7" else "garbled"
    except OSError as error:
        return type(error).__name__

with ThreadPoolExecutor(16) as pool:
    print(json.dumps(dict(zip(sys.argv[1:], pool.map(tried, sys.argv[1:])))))
"""


class Scene:
    """Two sandboxes, a stage worker, a plain pod that listens, and a control pod."""

    def __init__(self, installation: Installation) -> None:
        self.installation = installation
        self.namespace = installation.jobs
        self.worker = installation.until(lambda: installation.pods("stage-worker"), "a stage worker")[0][
            "metadata"
        ]["name"]
        self.first, self.second = installation.until(self._sandboxes, "two sandboxes that are ready")
        pods = {pod["metadata"]["name"]: pod for pod in installation.cluster.items("pods", self.namespace)}
        self.address = {name: pod["status"].get("podIP", "") for name, pod in pods.items()}
        cluster, home = installation.cluster, installation.release
        api = cluster.get("service", f"{home}-rollyard-api", home)["spec"]["clusterIP"]
        (api_pod,) = cluster.items("pods", home, "app.kubernetes.io/component=api")
        kubernetes = cluster.get("service", "kubernetes", "default")["spec"]["clusterIP"]
        (endpoint,) = cluster.items("endpointslices", "default", "kubernetes.io/service-name=kubernetes")
        server = f"{endpoint['endpoints'][0]['addresses'][0]} {endpoint['ports'][0]['port']}"
        dns = cluster.get("service", "kube-dns", "kube-system")["spec"]["clusterIP"]
        self.targets = {
            "the API server's service": f"tcp {kubernetes} 443",
            "the API server": f"tcp {server}",
            "the control plane's service": f"tcp {api} 8765",
            "the control plane": f"tcp {api_pod['status']['podIP']} 8765",
            self.first: f"tcp {self.address[self.first]} 7411",
            self.second: f"tcp {self.address[self.second]} 7411",
            "a pod that listens": f"tcp {self.address['listener']} 8000",
            "DNS over TCP": f"tcp {dns} 53",
            "DNS": f"udp {dns} 53",
        }

    def _sandboxes(self) -> tuple[str, str] | None:
        ready = [
            pod["metadata"]["name"]
            for pod in self.installation.pods("sandbox")
            if any(
                (one["type"], one["status"]) == ("Ready", "True")
                for one in pod["status"].get("conditions", ())
            )
        ]
        return (ready[0], ready[1]) if len(ready) == 2 else None

    def probed(self, pod: str) -> dict[str, str]:
        """Return the result for each target, tried inside of a pod."""
        text = self.installation.cluster.kubectl(
            "exec", "-n", self.namespace, pod, "--", "python3", "-c", PROBE, *self.targets.values()
        )
        answers: dict[str, str] = json.loads(text)
        return {name: answers[target] for name, target in self.targets.items()}

    def control_reaches_all(self) -> bool:
        """Return whether the plain pod reaches all but the sandboxes, which only stage workers may reach."""
        found = self.probed("control")
        assert "reached" not in (found.pop(self.first), found.pop(self.second))
        return set(found.values()) == {"reached"}

    def said(self, namespace: str, pod: str, *command: str) -> str:
        done = self.installation.cluster.run("kubectl", "exec", "-n", namespace, pod, "--", *command)
        return done.stdout + done.stderr


@pytest.fixture(scope="module")
def scene(installation: Installation) -> Iterator[Scene]:
    warm = job("warm")
    warm["spec"]["sandbox"]["warm"] = 2
    image = installation.sandbox_image
    sleep = ["sleep", "600"]
    with (
        installation.made(plain_pod("control", image, {}, sleep)),
        installation.made(plain_pod("listener", image, {}, ["python3", "-m", "http.server", "8000"])),
        installation.made(warm),
    ):
        for name in ("control", "listener"):
            installation.cluster.kubectl(
                "wait",
                "--for=condition=Ready",
                f"pod/{name}",
                "-n",
                installation.jobs,
                f"--timeout={PATIENCE_SECONDS}s",
            )
        installation.wait("rj", "warm", "Running")
        yield Scene(installation)
    installation.until(lambda: not installation.pods(), "all of it is gone")


def test_a_sandbox_reaches_nothing_and_a_pod_without_the_policy_all(scene: Scene) -> None:
    assert scene.installation.cluster.items("networkpolicies", scene.namespace)
    # The positive control comes first: everything that is refused afterwards could be reached.
    scene.installation.until(scene.control_reaches_all, "a control that reaches everything")
    for name in (scene.first, scene.second):
        found = scene.probed(name)
        assert found.pop(name) == "reached", "its own port: the probe works in a sandbox too"
        assert set(found.values()) <= {"TimeoutError", "ConnectionRefusedError"}, found
        assert len(found) == len(scene.targets) - 1
    scene.installation.until(scene.control_reaches_all, "a control that still reaches everything")


def test_stage_workers_reach_sandboxes(scene: Scene) -> None:
    """This is the other half of the control: the port that sandboxes may not reach of each other is open."""
    target = (scene.address[scene.second], "7411")
    code = f"import socket; socket.create_connection({(target[0], 7411)!r}, 5).close(); print('reached')"
    assert scene.said(scene.namespace, scene.worker, "python", "-c", code).strip() == "reached"


def test_no_pod_but_the_operators_holds_a_token(scene: Scene) -> None:
    installation = scene.installation
    home = installation.release
    (api,) = installation.cluster.items("pods", home, "app.kubernetes.io/component=api")
    (operator,) = installation.cluster.items("pods", home, "app.kubernetes.io/component=operator")
    # The operator's token is there, so the text that is searched for is what a token looks like.
    look = ("python", "-c", f"import glob; print(glob.glob('{TOKENS}/**/token', recursive=True))")
    assert "token'" in scene.said(home, operator["metadata"]["name"], *look)
    for namespace, pod in ((home, api["metadata"]["name"]), (scene.namespace, scene.worker)):
        assert scene.said(namespace, pod, *look).strip() == "[]"
    assert "No such file" in scene.said(scene.namespace, scene.first, "ls", TOKENS)
    for pod in [api, *installation.cluster.items("pods", scene.namespace)]:
        assert pod["spec"]["automountServiceAccountToken"] is False
        assert not [
            source
            for volume in pod["spec"].get("volumes", ())
            for source in volume.get("projected", {}).get("sources", ())
            if "serviceAccountToken" in source
        ]


def test_a_sandbox_cannot_do_more_than_it_should(scene: Scene) -> None:
    said = scene.said(
        scene.namespace, scene.first, "sh", "-c",
        "id -u; grep -E 'NoNewPrivs|CapEff|Seccomp:' /proc/self/status; env; cat /etc/resolv.conf",
    )  # fmt: skip
    assert said.splitlines()[0] == "1000"
    assert "CapEff:\t0000000000000000" in said
    assert "NoNewPrivs:\t1" in said
    assert "Seccomp:\t2" in said
    assert "nameserver 127.0.0.1" in said
    assert scene.installation.tokens["worker"] not in said


def test_it_is_the_policy_that_refuses(scene: Scene) -> None:
    """Without the policy the same sandbox reaches what it did not; with the policy again, it does not."""
    installation = scene.installation
    (policy,) = installation.cluster.items("networkpolicies", scene.namespace)
    name = policy["metadata"]["name"]
    policy["metadata"] = {"name": name, "labels": policy["metadata"]["labels"]}
    opened = ("the API server", "a pod that listens", "DNS")

    def reached() -> list[bool]:
        found = scene.probed(scene.first)
        return [found[target] == "reached" for target in opened]

    installation.cluster.kubectl("delete", "networkpolicy", name, "-n", scene.namespace)
    try:
        installation.until(lambda: all(reached()), "an open sandbox")
    finally:
        installation.apply(policy)
    installation.until(lambda: not any(reached()), "a closed sandbox")
