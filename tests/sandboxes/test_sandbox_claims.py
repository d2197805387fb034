"""Claimed sandboxes: the provider with real exec servers on TCP and a double of the claims calls."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.claims import EXEC_SERVER_ARGV, Claim, ClaimRequest, shape_of
from rollyard_crds.lease import Lease, LeaseRef, SandboxHandle, StageTimes
from rollyard_crds.names import NODE, PROVIDER
from rollyard_crds.rolloutjob import RolloutJobSpec, SandboxSpec
from rollyard_crds.task import Task
from rollyard_pipeline.control_plane.calls import ControlPlaneUnavailable
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.errors import ControlPlaneRefused, NotThere
from rollyard_pipeline.registry import Registry
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.claims import ClaimProvider, shape_of_key
from rollyard_pipeline.sandboxes.errors import (
    ImageNotUsable,
    SandboxImpossible,
    SandboxLost,
    SandboxProviderError,
    SandboxStartFailed,
)
from rollyard_pipeline.sandboxes.interface import SandboxKey, SandboxRequest
from rollyard_pipeline.stages.stages import Stages

pytestmark = pytest.mark.slow

GIVEN = {"files": {"up": "set\n"}}
OWNER = LeaseRef(rollout="r-1", token=3)


class Cluster:
    """Claims and, in place of a driver with pods, sandboxes of this machine."""

    def __init__(self, pods: Any, bundle: Path, root: Path) -> None:
        self._pods, self._bundle, self._root = pods, bundle, root
        self._ids = itertools.count(1)
        self._changed = asyncio.Condition()
        self._claims: dict[str, Claim] = {}
        self._by_owner: dict[tuple[str, int], str] = {}
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._starts: set[asyncio.Task[None]] = set()
        self.filed: list[ClaimRequest] = []
        self.released: list[str] = []
        self.failures = 0
        """The number of the next calls that find no control plane."""
        self.hold = asyncio.Event()
        """The event keeps claims Pending until it is set."""
        self.hold.set()
        self.outcome: dict[str, Any] | None = None
        """What happens to claims instead of a sandbox."""
        self.secret_shown = pods.SECRET

    async def claim(self, request: ClaimRequest) -> Claim:
        self._answer()
        self.filed.append(request)
        owner = (request.rollout, request.token)
        if owner not in self._by_owner:
            claim_id = self._by_owner[owner] = f"c{next(self._ids)}"
            self._claims[claim_id] = Claim(
                id=claim_id, namespace="default", job="j", job_uid="u", rollout=request.rollout,
                shape=request.shape, state="Pending",
            )  # fmt: skip
            self._starts.add(asyncio.create_task(self._fulfil(claim_id)))
        return await self._waited(self._by_owner[owner], min(request.wait, 0.05))

    async def claim_status(self, claim_id: str, wait: float) -> Claim:
        self._answer()
        return await self._waited(claim_id, min(wait, 0.05))

    async def release_claim(self, claim_id: str) -> None:
        self._answer()
        self.released.append(claim_id)
        await self.end(claim_id)
        if self._claims.pop(claim_id, None) is None:
            raise NotThere(f"no claim {claim_id}")

    async def end(self, claim_id: str, **changes: Any) -> None:
        """Let the sandbox die; the claim then says `changes`."""
        if (process := self._running.pop(claim_id, None)) is not None:
            await self._pods.stop(process)
        if changes:
            await self._set(claim_id, **changes)

    async def close(self) -> None:
        for start in self._starts:
            start.cancel()
        await asyncio.gather(*self._starts, return_exceptions=True)
        for claim_id in list(self._running):
            await self.end(claim_id)

    def _answer(self) -> None:
        if self.failures:
            self.failures -= 1
            raise ControlPlaneUnavailable("no control plane")

    async def _waited(self, claim_id: str, wait: float) -> Claim:
        if claim_id not in self._claims:
            raise NotThere(f"no claim {claim_id}")
        try:
            async with asyncio.timeout(wait), self._changed:
                await self._changed.wait_for(lambda: self._claims[claim_id].state != "Pending")
        except TimeoutError:
            pass
        return self._claims[claim_id]

    async def _fulfil(self, claim_id: str) -> None:
        await self.hold.wait()
        if self.outcome is not None:
            await self._set(claim_id, **self.outcome)
            return
        process, address = await self._pods.start(self._bundle, self._root, "--listen", "tcp://127.0.0.1:0")
        self._running[claim_id] = process
        await self._set(claim_id, state="Bound", address=address, secret=self.secret_shown)

    async def _set(self, claim_id: str, **changes: Any) -> None:
        async with self._changed:
            self._claims[claim_id] = self._claims[claim_id].model_copy(update=changes)
            self._changed.notify_all()


@pytest.fixture
async def cluster(pods: Any, bundle: Path, tmp_path: Path) -> AsyncIterator[Cluster]:
    root = pods.only_bash(tmp_path / "root")
    # This is what a container sees of its own control group.
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/memory.events").write_text("low 0\noom 1\noom_kill 0\n")
    made = Cluster(pods, bundle, root)
    yield made
    await made.close()


@pytest.fixture
def provider(cluster: Cluster) -> ClaimProvider:
    return ClaimProvider(cluster, connect_seconds=3)


async def test_from_claim_to_release(cluster: Cluster, provider: ClaimProvider) -> None:
    cluster.hold.clear()
    request = SandboxRequest(image="docker://python:3.12", env={"A": "1"}, files={"f": "x", "/tmp/g": "y"})
    waiting = asyncio.create_task(provider.acquire(request, OWNER))
    done, _ = await asyncio.wait({waiting}, timeout=0.3)  # This takes several long polls.
    assert not done
    cluster.hold.set()
    sandbox = await waiting
    assert (cluster.filed[0].rollout, cluster.filed[0].token) == ("r-1", 3)
    assert cluster.filed[0].shape.image == "python:3.12"
    handle = sandbox.handle
    assert (handle.provider, handle.node, handle.token) == (PROVIDER, NODE, f"proven.{cluster.secret_shown}")
    async with sandbox:
        result = await sandbox.client.bash("echo $A $(< f) $(< /tmp/g) $PWD")
        assert result.text() == "1 x y /work\n"
    # Another worker uses the handle alone.
    other = ClaimProvider(cluster)
    async with await other.attach(SandboxHandle.model_validate_json(handle.model_dump_json())) as attached:
        assert (await attached.client.bash("echo $A $(< f)")).text() == "1 x\n"
    assert other.claimed() == []
    assert await other.sweep() == []
    await other.release(handle)
    assert cluster.released == [handle.id]
    with pytest.raises(SandboxLost):
        await provider.attach(handle)
    await other.release(handle.id)  # Repeating it is harmless.


async def test_what_all_pods_of_a_node_share_is_limited(cluster: Cluster, provider: ClaimProvider) -> None:
    made = (
        "import ctypes; c = ctypes.CDLL(None); "
        "print(c.shmget(1, 4096, 0o1600) >= 0, c.semget(1, 1, 0o1600) >= 0, c.msgget(1, 0o1600) >= 0)"
    )
    async with await provider.acquire(SandboxRequest(), OWNER) as sandbox:
        limits = await sandbox.client.bash("ulimit -q; ulimit -n")
        assert limits.text() == "0\n4096\n"
        segments = await sandbox.client.run([*EXEC_SERVER_ARGV[:-1], "-c", made])
        assert segments.text() == "True True True\n"
        await sandbox.client.begin_eval()
        # Each of the lists has a line of titles.
        count = "for list in /proc/sysvipc/*; do mapfile -t < $list; echo ${#MAPFILE[@]}; done"
        assert (await sandbox.client.bash(count)).text() == "1\n1\n1\n"


async def test_the_same_lease_gets_the_same_sandbox(cluster: Cluster, provider: ClaimProvider) -> None:
    handles = []
    for owner in (OWNER, OWNER, LeaseRef(rollout="r-1", token=4)):
        async with await provider.acquire(SandboxRequest(), owner) as sandbox:
            handles.append(sandbox.handle)
    assert handles[0] == handles[1]
    assert handles[2].id != handles[0].id


async def test_a_control_plane_that_is_away_is_waited_for(cluster: Cluster, provider: ClaimProvider) -> None:
    cluster.failures = 3
    async with await provider.acquire(SandboxRequest(), OWNER) as sandbox:
        cluster.failures = 2
        assert await provider.oom_killed(sandbox.handle.id) is False
        cluster.failures = 1
    await provider.release(sandbox.handle)
    assert cluster.released == [sandbox.handle.id]


async def test_a_release_that_fails_is_left_to_the_control_plane(
    cluster: Cluster, provider: ClaimProvider, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard_pipeline.sandboxes.claims.RELEASE_SECONDS", 0.2)
    cluster.failures = 1000
    await provider.release("c1")
    assert cluster.failures < 1000


@pytest.mark.parametrize(
    ("outcome", "kind", "said"),
    [
        ({"reason": "ImagePullFailed", "message": "no such tag", "retryable": False}, ImageNotUsable,
         r"sandbox\.image 'a:b': ImagePullFailed: no such tag"),
        ({"reason": "ImagePullFailed", "message": "registry away"}, SandboxStartFailed, "ImagePullFailed"),
        ({"reason": "QuotaExceeded", "message": "pods: 3 of 3"}, SandboxStartFailed, "pods: 3 of 3"),
        ({"reason": "NotIsolated"}, SandboxStartFailed, "^NotIsolated$"),
        ({"reason": "PodInvalid", "message": "x", "retryable": False}, SandboxImpossible, "PodInvalid: x"),
        ({"state": "Released"}, SandboxLost, "released"),
    ],
)  # fmt: skip
async def test_a_claim_that_fails(
    cluster: Cluster,
    provider: ClaimProvider,
    outcome: dict[str, Any],
    kind: type[SandboxProviderError],
    said: str,
) -> None:
    cluster.outcome = {"state": "Failed", **outcome}
    with pytest.raises(kind, match=said) as caught:
        await provider.acquire(SandboxRequest(image="a:b"), OWNER)
    assert caught.value.retryable is outcome.get("retryable", True)
    assert caught.value.return_to == "init"


async def test_a_sandbox_with_another_secret_is_not_ours(cluster: Cluster, provider: ClaimProvider) -> None:
    """The address of a pod may be given to another one."""
    cluster.secret_shown = "another"
    with pytest.raises(SandboxLost, match="does not answer"):
        await provider.acquire(SandboxRequest(), OWNER)
    assert cluster.released == ["c1"]


async def test_a_server_that_proves_no_token_is_refused_and_not_taken_for_sabotage(
    cluster: Cluster, provider: ClaimProvider, tmp_path: Path
) -> None:
    (tmp_path / "token").write_text(cluster.secret_shown)
    ready, write = os.pipe()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-m", "rollyard_sandbox.server", "--listen", "tcp://127.0.0.1:0",
        "--token-file", str(tmp_path / "token"), "--ready-fd", str(write), pass_fds=(write,),
    )  # fmt: skip
    os.close(write)
    try:
        with os.fdopen(ready) as file:
            (address,) = json.loads(await asyncio.to_thread(file.readline))["listen"]
        cluster.outcome = {"state": "Bound", "address": address, "secret": cluster.secret_shown}
        with pytest.raises(SandboxImpossible, match="--token-sha256"):
            await provider.acquire(SandboxRequest(), OWNER)
        assert cluster.released == ["c1"]
    finally:
        process.kill()
        await process.wait()


async def test_nobody_at_the_address(cluster: Cluster, provider: ClaimProvider) -> None:
    cluster.outcome = {"state": "Bound", "address": "tcp://127.0.0.1:1", "secret": "s"}
    with pytest.raises(SandboxLost, match=r"127\.0\.0\.1:1"):
        await provider.acquire(SandboxRequest(), OWNER)
    assert cluster.released == ["c1"]


async def test_a_file_that_cannot_be_written(cluster: Cluster, provider: ClaimProvider) -> None:
    with pytest.raises(SandboxImpossible, match=r"sandbox\.files\['/usr/x'\]") as caught:
        await provider.acquire(SandboxRequest(files={"/usr/x": "text"}), OWNER)
    assert caught.value.reason == "SandboxFileRefused"
    assert cluster.released == ["c1"]


async def test_a_cancelled_wait_ends_at_once(cluster: Cluster, provider: ClaimProvider) -> None:
    cluster.hold.clear()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.2):
            await provider.acquire(SandboxRequest(), OWNER)
    assert cluster.released == []  # It goes with its lease.


async def test_handles_of_others_are_lost(provider: ClaimProvider) -> None:
    for changes in ({"provider": "bubblewrap"}, {"node": "n"}):
        fields = {"provider": PROVIDER, "id": "c1", "node": NODE, "address": "tcp://127.0.0.1:1", **changes}
        with pytest.raises(SandboxLost, match="this worker has kubernetes sandboxes"):
            await provider.attach(SandboxHandle.model_validate(fields))


async def test_out_of_memory_by_the_containers_own_counters(
    cluster: Cluster, provider: ClaimProvider, tmp_path: Path
) -> None:
    counters = tmp_path / "root/sys/fs/cgroup/memory.events"
    async with await provider.acquire(SandboxRequest(), OWNER) as sandbox:
        assert await provider.oom_killed(sandbox.handle) is False
        counters.write_text("low 0\noom 1\noom_kill 2\noom_group_kill 0\n")
        assert await provider.oom_killed(sandbox.handle) is True
        assert await provider.oom_killed(sandbox.handle.id) is True


@pytest.mark.attack(
    "a pod is evicted because the policy filled its disk, so that the rollout begins again",
    boundary="evaluation",
    surface="sabotage in Run",
    stopped_by="the kubelet's message tells this from a node without room; it is scored as for memory",
)
@pytest.mark.parametrize(
    ("reason", "killed"), [("OutOfMemory", True), ("OutOfDisk", True), ("Evicted", False)]
)
async def test_out_of_memory_of_a_whole_sandbox(
    cluster: Cluster, provider: ClaimProvider, reason: str, killed: bool
) -> None:
    async with await provider.acquire(SandboxRequest(), OWNER) as sandbox:
        await cluster.end(sandbox.handle.id)
        asked = asyncio.create_task(provider.oom_killed(sandbox.handle))
        done, _ = await asyncio.wait({asked}, timeout=0.3)
        assert not done  # The driver has not said yet how it ended.
        await cluster.end(sandbox.handle.id, state="Failed", reason=reason)
        assert await asked is killed
    await provider.release(sandbox.handle)
    assert await provider.oom_killed(sandbox.handle) is False  # Nothing is known of it any more.


@pytest.mark.parametrize(
    ("reason", "end"),
    [("SandboxExited", "SandboxCrashed"), ("OutOfDisk", "SandboxOutOfMemory"), ("SandboxLost", "")],
)
async def test_a_container_that_ended_by_itself(
    cluster: Cluster, provider: ClaimProvider, reason: str, end: str
) -> None:
    async with await provider.acquire(SandboxRequest(), OWNER) as sandbox:
        await cluster.end(sandbox.handle.id, state="Failed", reason=reason)
        assert await provider.own_end(sandbox.handle) == end
    await provider.release(sandbox.handle)
    assert await provider.own_end(sandbox.handle) == ""  # Nothing is known of it any more.


@pytest.mark.parametrize("image", ["/some/root", "x.sif", "oras://x/y", "docker://", "./x", "file:///x.tar"])
async def test_images_that_are_no_container_images(
    cluster: Cluster, provider: ClaimProvider, image: str
) -> None:
    with pytest.raises(ImageNotUsable, match=r"sandbox\.image '.*docker://python:3\.12-slim"):
        await provider.acquire(SandboxRequest(image=image), OWNER)
    assert cluster.filed == []


@pytest.mark.parametrize("image", [None, "python:3.12", "docker://ghcr.io/a/b@sha256:1"])
def test_a_claim_has_the_shape_that_is_kept_warm(image: str | None) -> None:
    spec = SandboxSpec.model_validate({"image": image, "resources": {"cpu": "500m", "memory": "1.5Gi"}})
    assert shape_of_key(SandboxRequest.of(spec).key) == shape_of(spec)
    assert isinstance(SandboxRequest.of(spec).key, SandboxKey)


async def test_init_files_its_claim_with_its_own_fencing_token(
    cluster: Cluster, provider: ClaimProvider
) -> None:
    class Plane:
        async def job_spec(self, namespace: str, name: str, uid: str) -> RolloutJobSpec:
            return RolloutJobSpec.model_validate(
                {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}}
            )

    lease = Lease(
        rollout="r-9", token=17, stage="init", job="j", namespace="default", job_uid="u", group_id="g",
        sample_index=0, attempt=0, queued_seconds=0.0, lease_seconds=30.0,
        task=Task.model_validate({"id": "t", "prompt": "q", "test_script": "true", "sandbox": GIVEN}),
    )  # fmt: skip
    stages = Stages(Plane(), None, provider, Registry())
    result = await stages.work(HeldLease(lease), StageTimes())
    await stages.close()
    assert [(filed.rollout, filed.token) for filed in cluster.filed] == [("r-9", 17)]
    async with await provider.attach(result.sandbox) as sandbox:
        assert (await sandbox.client.read_file("up")).data == b"set\n"


def test_opening_it_needs_claims_and_its_node(make_plane: Callable[[], Any]) -> None:
    with pytest.raises(ValueError, match="--sandbox kubernetes: needs a control plane"):
        open_provider("kubernetes", run_dir="/nonexistent", node=NODE)
    with pytest.raises(ValueError, match=r"--node worker-1: .* have --node kubernetes"):
        open_provider("kubernetes", run_dir="/nonexistent", node="worker-1", claims=make_plane())
    assert open_provider("kubernetes", run_dir="/x", node=NODE, claims=make_plane()).name == PROVIDER


@pytest.fixture
def make_plane() -> Callable[[], Any]:
    class Refusing:
        async def claim(self, request: ClaimRequest) -> Claim:
            raise ControlPlaneRefused("no")

        async def claim_status(self, claim_id: str, wait: float) -> Claim:
            raise ControlPlaneRefused("no")

        async def release_claim(self, claim_id: str) -> None:
            raise ControlPlaneRefused("no")

    return Refusing
