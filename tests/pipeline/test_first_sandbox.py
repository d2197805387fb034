"""A worker's first sandbox: begun by what the driver says, before the worker knows its job."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path

import pytest
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_drivers.reconcile.first_sandbox import first_sandbox as said_of
from rollyard_pipeline.ahead import WITHOUT, first_sandbox
from rollyard_pipeline.errors import OptionError
from rollyard_pipeline.registry import AGENTS, HANDLERS, Registry
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.host.records import SandboxFolder, SandboxRecord
from rollyard_pipeline.sandboxes.interface import SandboxRequest

LONGEST_SECONDS = 60.0


def spec(handler: str = "shell", **sandbox: object) -> RolloutJobSpec:
    resources = {"cpu": "500m", "memory": "192Mi", "disk": "16Mi", "processes": 64}
    return RolloutJobSpec.model_validate(
        {"tasks": {"stream": True}, "handler": handler, "agent": {"type": "oracle"},
         "sandbox": {"resources": resources, **sandbox}}
    )  # fmt: skip


@pytest.mark.parametrize("image", [None, "/images/with space's.sif"])
def test_what_the_driver_says_is_what_the_job_wants(image: str | None) -> None:
    job = spec(image=image, env={"A": "b"})
    found = first_sandbox(said_of(job))
    assert found is not None
    assert found.key == SandboxRequest.of(job.sandbox).key


def test_nothing_is_begun_for_jobs_that_keep_none_warm_or_need_none() -> None:
    assert said_of(spec(warm=0)) == ""
    assert first_sandbox(said_of(spec("math"))) is None


def test_the_shipped_handlers_without_a_sandbox_are_known() -> None:
    shipped = metadata.distribution("rollyard").entry_points.select(group=HANDLERS)
    assert {one.name for one in shipped if not one.load().needs_sandbox} == WITHOUT


@pytest.mark.parametrize(
    "text", ["{", "[]", "null", '{"handler": "shell"}', said_of(spec()).replace("64", '"x"')]
)
def test_what_no_driver_says_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="--first-sandbox"):
        first_sandbox(text)


def test_what_starts_it_does_not_wait_for_models_and_http() -> None:
    late = {"pydantic", "httpx", "jinja2", "yaml"}
    code = f"import sys, rollyard_pipeline.__main__; print(*{late} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60).strip() == ""


def test_our_own_extensions_are_found_without_reading_all_that_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    everything = metadata.entry_points

    def counted() -> object:
        looked.append(1)
        return everything()

    monkeypatch.setattr(metadata, "entry_points", counted)
    registry = Registry()
    assert registry.load(HANDLERS, "shell").needs_sandbox
    registry.load(AGENTS, "oracle")
    assert not looked


@pytest.fixture
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """One whose control plane nobody answers for, and its run folder."""
    folder = tmp_path_factory.mktemp("w")
    (folder / "token").write_text("secret")
    command = [sys.executable, "-m", "rollyard_pipeline", "--url", "http://127.0.0.1:9", "--token-file"]
    command += [str(folder / "token"), "--job", "j", "--concurrency", "init=1,run=1,eval=1"]
    command += ["--sandbox", "process", "--run-dir", str(folder), "--drain-seconds", "1"]
    process = subprocess.Popen([*command, "--first-sandbox", said_of(spec())])
    try:
        yield process, folder
    finally:
        process.kill()
        process.wait()


async def until(found: Callable[[], SandboxRecord | None]) -> SandboxRecord:
    deadline = time.monotonic() + LONGEST_SECONDS
    while (record := found()) is None:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)
    return record


def warm(folder: Path) -> SandboxRecord | None:
    records = SandboxFolder(folder)
    found = [record for name in records.ids() if (record := records.load(name)) is not None]
    return next((record for record in found if record.state == "warm"), None)


@pytest.mark.real
async def test_it_is_there_before_any_answer_and_goes_with_the_worker(
    worker: tuple[subprocess.Popen[bytes], Path],
) -> None:
    process, folder = worker
    record = await until(lambda: warm(folder))
    assert record.alive()
    process.send_signal(signal.SIGTERM)
    assert await asyncio.to_thread(process.wait, LONGEST_SECONDS) == 0
    assert SandboxFolder(folder).ids() == []
    assert not record.alive()


@pytest.mark.real
@pytest.mark.parametrize("state", ["starting", "warm"])
async def test_a_worker_killed_meanwhile_leaves_it_to_the_next(
    worker: tuple[subprocess.Popen[bytes], Path], state: str
) -> None:
    process, folder = worker
    records = SandboxFolder(folder)

    def begun() -> SandboxRecord | None:
        found = [record for name in records.ids() if (record := records.load(name)) is not None]
        return next((one for one in found if state == "starting" or one.state == state), None)

    record = await until(begun)
    os.kill(process.pid, signal.SIGKILL)
    await asyncio.to_thread(process.wait)
    provider = open_provider("process", run_dir=folder, node="n")
    await provider.start()
    try:
        assert records.load(record.id) is None
        assert record.root is None or not record.alive()
    finally:
        await provider.aclose()


def test_a_driver_says_json_of_plain_numbers() -> None:
    assert json.loads(said_of(spec())) == {
        "handler": "shell",
        "image": None,
        "cpu": 0.5,
        "memory_bytes": 192 << 20,
        "disk_bytes": 16 << 20,
        "processes": 64,
    }
