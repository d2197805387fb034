"""Sandbox pods on a real cluster: loop, API server, kubelet, network policy and exec server together."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pytest
from kubernetes.aio import client, config
from rollyard_crds.claims import Claim
from rollyard_crds.lease import SandboxHandle
from rollyard_crds.names import NODE, PROVIDER
from rollyard_operator.kube import labels
from rollyard_operator.kube.client import KubeClient
from rollyard_operator.kube.object_cache import PodCache
from rollyard_operator.kube.reflector import Reflector
from rollyard_operator.sandboxes.isolation import Witnesses, isolation_checks
from rollyard_operator.sandboxes.loop import SandboxLoop
from rollyard_operator.settings import OperatorSettings
from rollyard_pipeline.sandboxes.interface import Sandbox
from rollyard_sandbox.client import ExecClient
from rollyard_sandbox.errors import SandboxError
from rollyard_testing.kubernetes.connections import connections_ended
from rollyard_testing.operator.fakeclaims import SHAPE, ClaimDesk
from rollyard_testing.pace import patience
from rollyard_testing.sandboxes.outside import HOST, TALK, Outside

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.kubelab import Cluster

pytestmark = pytest.mark.kubernetes
SMALL = SHAPE.model_copy(update={"image": "", "cpu": 0.1, "memory_bytes": 256 << 20, "disk_bytes": 256 << 20})


@pytest.fixture(scope="module")
def images(cluster: Cluster, missing: Callable[[str], NoReturn]) -> dict[str, str]:
    """Return the sandbox's images, as `scripts/images --load` left them on the node."""
    format_ = "{range .items[*].status.images[*].names[*]}{@}{'\\n'}{end}"
    names = cluster.kubectl("get", "nodes", "-o", f"jsonpath={format_}").split()
    found = [name.rpartition(":") for name in sorted(names)]
    for repository, _, tag in found:
        default = f"{repository}-default:{tag}"
        if repository.endswith("rollyard-sandbox") and default in names:
            return {"sandbox": f"{repository}:{tag}", "sandboxDefault": default}
    return missing("no sandbox image on the cluster's node: run scripts/images --load")


class Live:
    """The loop with a real cluster and claims of our own."""

    def __init__(self, kube: KubeClient, namespace: str) -> None:
        self.kube, self.namespace = kube, namespace
        self.pods = PodCache()
        self.desk = ClaimDesk(lambda: datetime.now(UTC))

    def file(self, image: str = "") -> str:
        return self.desk.file(SMALL.model_copy(update={"image": image}), namespace=self.namespace)

    async def answered(self, claim: str) -> str:
        """Return the claim's state, once it is not Pending."""
        await self.until(lambda: self.desk.claims_[claim].state != "Pending")
        return self.desk.claims_[claim].state

    async def until(self, holds: Callable[[], bool], seconds: float = 120.0) -> None:
        async with asyncio.timeout(patience(seconds)):
            while not holds():  # noqa: ASYNC110 - a cluster's state
                await asyncio.sleep(0.01)

    def warm_and_ready(self) -> int:
        return sum(
            labels.label_of(pod, labels.WARM) == "true"
            and any(
                (one["type"], one["status"]) == ("Ready", "True")
                for one in (pod.get("status") or {}).get("conditions") or ()
            )
            for pod in self.pods
        )


@asynccontextmanager
async def live(
    cluster: Cluster, images: dict[str, str], image_volume: str, **isolation: Any
) -> AsyncIterator[Live]:
    namespace = cluster.namespace(restricted=True)
    settings = OperatorSettings.model_validate(
        {
            "instance": "k-live",
            "controlPlaneUrl": "http://127.0.0.1:8765",
            "tokenFile": "/unused",
            "workerTokenFile": "/unused",
            "releaseNamespace": namespace,
            "imagePullPolicy": "Never",
            "imageVolume": image_volume,
            "isolation": isolation,
            "images": {"worker": "unused", "engine": "unused", **images},
        }
    )
    access = client.Configuration()
    await config.load_kube_config(config_file=str(cluster.kubeconfig), client_configuration=access)
    kube = KubeClient(access)
    spec = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}, "suspend": True}
    job = await kube.apply(
        {
            "apiVersion": "rollyard.dev/v1alpha1",
            "kind": "RolloutJob",
            "metadata": {"name": "job", "namespace": namespace},
            "spec": spec,
        }
    )
    checks = await isolation_checks(settings, kube, {})
    assert checks, "the API server's address is checked"
    found = Live(kube, namespace)
    jobs: dict[tuple[str, str], Any] = {(namespace, "job"): job}
    loop = SandboxLoop(
        kube, found.pods, found.desk, lambda *key: jobs.get(key), settings, "driver token", checks
    )
    reflector = Reflector(kube, "Pod", namespace, labels.selector("k-live"), found.pods)
    tasks = [asyncio.create_task(reflector.run())]
    try:
        async with asyncio.timeout(patience(60.0)):
            await reflector.settled.wait()
        tasks.append(asyncio.create_task(loop.run()))
        yield found
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await kube.close()
        await connections_ended(access.host)


async def reaches_its_hosts_alone(pod: ExecClient, bound: Claim, folder: Path) -> None:
    """Lend the pod a network from here, and begin its evaluation. Its own network stays closed."""
    handle = SandboxHandle(provider=PROVIDER, id=bound.id, node=NODE, address=bound.address)
    sandbox = Sandbox(handle, pod, "/work", {})
    async with Outside().serving(folder) as outside:
        egress = outside.egress()

        async def get(host: str) -> str:
            asked = f"GET http://{host}:{outside.port}/ HTTP/1.1\r\n\r\n".encode()
            return (await pod.run(["bash", "-c", TALK], stdin=asked, timeout=patience(30))).text()

        async with egress.lent(sandbox, outside.spec(), "r-1", {}):
            assert "200 OK" in await get(HOST)
            assert "not in allowedHosts" in await get("other.example.org")
            await pod.begin_eval()
            assert "HTTP" not in await get(HOST)
            with pytest.raises(SandboxError, match="an evaluation has begun"):
                await pod.tunnel()
        assert len(outside.received) == 1
        egress.close()


@pytest.mark.attack(
    "a program on the server's port that agrees to everything, and that knows the hash of the secret and "
    "all that workers send there",
    boundary="exec server",
    surface="connection in pods",
    stopped_by="the server learns the secret before any command runs; workers never send it again, and "
    "demand a proof",
)
@pytest.mark.parametrize("image_volume", ["always", "never"])
async def test_a_sandbox_from_claim_to_removal(
    cluster: Cluster, images: dict[str, str], image_volume: str, tmp_path: Path
) -> None:
    async with live(cluster, images, image_volume) as world:
        claim = world.file()
        assert await world.answered(claim) == "Bound"
        bound = world.desk.claims_[claim]
        api = cluster.kubectl("config", "view", "--minify", "-o", "jsonpath={.clusters[0].cluster.server}")
        host, port = api.removeprefix("https://").split(":")
        async with await ExecClient.connect(bound.address, token=bound.secret) as sandbox:
            done = await sandbox.bash("id -u; touch /work/a /tmp/b; stat -c %u /work/a", timeout=patience(30))
            assert (done.exit_code, done.output.split()) == (0, [b"1000", b"1000"])
            tried = await sandbox.bash(
                f"timeout 3 bash -c '</dev/tcp/{host}/{port}' && echo reached; ls /var/run/secrets 2>&1",
                timeout=patience(30),
            )
            assert b"reached" not in tried.output
            assert b"No such file" in tried.output, "no token of a service account"
            assert sandbox.proven_token == f"proven.{bound.secret}"
        # From now on it proves that it knows what it has been shown; commands can read no more than the hash.
        async with await ExecClient.connect(bound.address, token=sandbox.proven_token) as again:
            argv = await again.run(["sh", "-c", r"tr '\0' ' ' < /proc/1/cmdline"])
            assert hashlib.sha256(bound.secret.encode()).hexdigest() in argv.text()
            looked = await again.run(["sh", "-c", "cat /proc/1/environ /proc/1/mem; ls -l /proc/1/fd; env"])
            assert looked.text().count("Permission denied") == 3, looked.text()
            assert bound.secret not in looked.text() + argv.text()
            await reaches_its_hosts_alone(again, bound, tmp_path)
        for wrong in ("0" * 32, "proven." + "0" * 32):
            with pytest.raises(SandboxError):
                await ExecClient.connect(bound.address, token=wrong)
        world.desk.release(claim)
        await world.until(lambda: not world.desk.claims_)
        assert cluster.items("pods", world.namespace) == []


async def test_warm_sandboxes_are_handed_out_at_once_and_refilled(
    cluster: Cluster, images: dict[str, str]
) -> None:
    async with live(cluster, images, "always") as world:
        world.desk.want(3, SMALL, namespace=world.namespace)
        await world.until(lambda: world.warm_and_ready() == 3)
        claims, names, waits = [], set(), []
        for _ in range(3):
            begun = time.monotonic()
            claims.append(world.file())
            assert await world.answered(claims[-1]) == "Bound"
            waits.append(time.monotonic() - begun)
        print("seconds from claim to warm sandbox:", [round(one, 3) for one in waits])
        pods = {
            pod["metadata"]["labels"].get(labels.CLAIM): pod for pod in cluster.items("pods", world.namespace)
        }
        for claim in claims:
            names.add(pods[claim]["metadata"]["name"].split("-")[0])
            (owner,) = pods[claim]["metadata"]["ownerReferences"]
            assert owner["kind"] == "RolloutJob"
        assert names == {"sbw"}, "none was made for its claim"
        await world.until(lambda: world.warm_and_ready() == 3)
        # With the job's object goes what it had claimed, and the warm sandboxes once they are not wanted.
        world.desk.want(0)
        for claim in claims:
            world.desk.release(claim)
        await world.until(lambda: not world.desk.claims_ and not len(world.pods))


async def test_an_image_that_is_not_there_is_told(cluster: Cluster, images: dict[str, str]) -> None:
    async with live(cluster, images, "always") as world:
        claim = world.file("registry.local/absent:1")
        assert await world.answered(claim) == "Failed"
        failed = world.desk.claims_[claim]
        assert (failed.reason, failed.retryable) == ("ImagePullFailed", False)
        assert "registry.local/absent:1" in failed.message
        await world.until(lambda: not len(world.pods))

        def told() -> list[str]:
            events = cluster.items("events", world.namespace)
            return [one["involvedObject"]["name"] for one in events if one["reason"] == "SandboxFailed"]

        await world.until(lambda: bool(told()))
        assert told() == ["job"]


async def test_a_killed_sandbox_is_lost(cluster: Cluster, images: dict[str, str]) -> None:
    async with live(cluster, images, "always") as world:
        claim = world.file()
        assert await world.answered(claim) == "Bound"
        cluster.kubectl("delete", "pod", f"sb-{claim}", "-n", world.namespace, "--now")
        await world.until(lambda: world.desk.claims_[claim].state == "Failed")
        assert world.desk.claims_[claim].reason == "SandboxLost"


OUTSIDE = "203.0.113.1"
"""An address of the range that RFC 5737 keeps for documentation, which no cluster has."""
LISTENER = f"""
import socket
server = socket.create_server(({OUTSIDE!r}, 8080), backlog=64)
print("listening", flush=True)
while True:
    server.accept()[0].close()
"""


@pytest.fixture
def outside() -> Iterator[str]:
    """Yield `IP:PORT` of a listener outside of the cluster's networks, to which the node routes.

    Its network namespace has no name. `ip netns add` would mount a folder over the one that holds the
    namespaces of all running pods, and the kubelet could not remove those any more.
    """
    name = f"ry{secrets.token_hex(3)}"
    near, far = f"{name}a", f"{name}b"
    holder = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", "print('here', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    enter = ("nsenter", f"--net=/proc/{holder.pid}/ns/net")

    def run(*words: str) -> None:
        subprocess.run(words, check=True, capture_output=True, text=True, timeout=patience(30))

    listener = None
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline().strip() == "here"
        run("ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", str(holder.pid))
        run("ip", "addr", "add", "203.0.113.254/24", "dev", near)
        run("ip", "link", "set", near, "up")
        run(*enter, "ip", "addr", "add", f"{OUTSIDE}/24", "dev", far)
        run(*enter, "ip", "link", "set", far, "up")
        run(*enter, "ip", "route", "add", "default", "via", "203.0.113.254")
        listener = subprocess.Popen(
            [*enter, sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True
        )
        assert listener.stdout is not None
        assert listener.stdout.readline().strip() == "listening"
        yield f"{OUTSIDE}:8080"
    finally:
        # The kernel removes it by itself only some time after the last process of the namespace.
        with suppress(subprocess.CalledProcessError):
            run("ip", "link", "delete", near)
        for process in (listener, holder):
            if process is not None:
                process.kill()
                with process:
                    process.wait(patience(30))


def permits_outside(namespace: str) -> dict[str, Any]:
    """Return a tenant's policy about which the cluster's own ranges say nothing."""
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": "artifacts", "namespace": namespace},
        "spec": {
            "podSelector": {},
            "policyTypes": ["Egress"],
            "egress": [{"to": [{"ipBlock": {"cidr": "203.0.113.0/24"}}]}],
        },
    }


@pytest.mark.attack(
    "a tenant's NetworkPolicy opens it, where policies are not read",
    boundary="kubernetes",
    surface="network of sandboxes",
    stopped_by="addresses outside of the cluster are tried from the sandbox",
)
async def test_a_sandbox_that_reaches_an_address_outside_is_not_handed_out(
    cluster: Cluster, images: dict[str, str], outside: str
) -> None:
    """The tenant's policy opens nothing of the cluster, so only a listener outside of it shows the effect."""
    witnesses = Witnesses((outside,))
    await witnesses.look()
    assert witnesses.doubt() == "", "it answers from here: what sandboxes do not reach is closed to them"
    isolation = {"external": [outside], "policies": "ignore", "seconds": 3}
    async with live(cluster, images, "always", **isolation) as world:
        policy = json.dumps(permits_outside(world.namespace))
        cluster.kubectl("apply", "-f", "-", input=policy)
        refused = world.file()
        assert await world.answered(refused) == "Failed"
        failed = world.desk.claims_[refused]
        assert failed.reason == "NotIsolated"
        assert f"still reaches {outside}" in failed.message
        world.desk.release(refused)
        cluster.kubectl("delete", "-f", "-", input=policy)
        closed = world.file()
        assert await world.answered(closed) == "Bound"
        world.desk.release(closed)
        await world.until(lambda: not world.desk.claims_)


async def test_a_policy_that_opens_sandboxes_is_named(
    cluster: Cluster, images: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No check outside of the cluster is needed, because the policies themselves show it."""
    monkeypatch.setattr("rollyard_operator.sandboxes.policies.LOOK_SECONDS", 0.5)
    async with live(cluster, images, "always") as world:
        policy = json.dumps(permits_outside(world.namespace))
        cluster.kubectl("apply", "-f", "-", input=policy)
        refused = world.file()
        assert await world.answered(refused) == "Failed"
        failed = world.desk.claims_[refused]
        assert failed.reason == "NotIsolated"
        assert "NetworkPolicy artifacts permits sandboxes to send" in failed.message
        assert cluster.items("pods", world.namespace) == []
        world.desk.release(refused)
        cluster.kubectl("delete", "-f", "-", input=policy)
        # The known policies are valid for a moment, so a claim that comes at once may still be refused.
        async with asyncio.timeout(patience(60)):
            while await world.answered(closed := world.file()) != "Bound":
                world.desk.release(closed)
        # One that comes while a sandbox is in use is reported.
        cluster.kubectl("apply", "-f", "-", input=policy)

        def told() -> list[str]:
            events = cluster.items("events", world.namespace)
            return [one["message"] for one in events if one["reason"] == "SandboxesOpened"]

        await world.until(lambda: bool(told()))
        assert "NetworkPolicy artifacts permits sandboxes to send" in told()[0]
        world.desk.release(closed)
        await world.until(lambda: not world.desk.claims_)
