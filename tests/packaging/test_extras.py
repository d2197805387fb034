"""Each extra alone starts its component in an empty environment. Without extras there is a client."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from rollyard.extras import MODULES
from rollyard_api.trajectories.parquet import encode
from rollyard_crds.trajectory import Trajectory
from rollyard_sandbox.client import ExecClient
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[2]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
TRIED = {
    "client",
    "local",
    "parquet",
    "postgresql",
    "slurm",
    "operator",
    "api",
    "worker",
    "sandbox",
    "engine",
}
UNTRIED = {"vllm", "numpy", "torch", "traces", "renderers", "dev", "docs"}
"""vLLM and torch are several gigabytes; two belong to other parts; the others are no parts of Rollyard."""
NOT_IN_A_TRAINER = (
    "aiohttp", "alembic", "fastapi", "ipykernel", "numpy", "onnxruntime", "onnxruntime-genai", "pyarrow",
    "sqlalchemy", "tokenizers", "torch", "uvicorn",
)  # fmt: skip
START_SECONDS = patience(60.0)

Install = Callable[..., Path]


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def requirements(extra: str) -> set[str]:
    """Return the distributions that an extra names, including those of the extras in it."""
    found: set[str] = set()
    for line in EXTRAS[extra]:
        others = re.fullmatch(r"rollyard\[(.+)\]", line)
        if others:
            found.update(*(requirements(name) for name in others[1].split(",")))
        else:
            found.add(normal(re.split(r"[\[<>=!~; ]", line)[0]))
    return found


def environment(**more: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "ROLLYARD"))}
    return {**kept, **more}


def run(command: list[str | Path], folder: Path, **more: str) -> subprocess.CompletedProcess[str]:
    env = environment(HOME=str(folder), ROLLYARD_HOME=str(folder / "home"), **more)
    return subprocess.run(command, env=env, cwd=folder, capture_output=True, text=True, timeout=patience(120))


@contextlib.contextmanager
def running(command: list[str | Path], folder: Path, **more: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a process whose output is in `log`. It is killed at the end if it still runs."""
    with (folder / "log").open("wb") as log:
        env = environment(HOME=str(folder), **more)
        process = subprocess.Popen(command, env=env, cwd=folder, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.kill()
        process.wait(patience(20))


def until(process: subprocess.Popen[bytes], folder: Path, true: Callable[[], Any]) -> Any:
    """Return what `true` returns as soon as that is true. The process must not end before."""
    end = time.monotonic() + START_SECONDS
    while not (found := true()):
        assert process.poll() is None, (folder / "log").read_text()
        assert time.monotonic() < end, (folder / "log").read_text()
        time.sleep(0.02)
    return found


def stopped(process: subprocess.Popen[bytes], folder: Path, number: int = signal.SIGTERM) -> None:
    """Ask the process to end, and check that it ends well."""
    process.send_signal(number)
    assert process.wait(patience(60)) == 0, (folder / "log").read_text()


def text(path: Path) -> str:
    return path.read_text().strip() if path.exists() else ""


def heartbeats(url: str, tokens: Path) -> bool:
    """Return whether the control plane has answered the heartbeat of a worker."""
    headers = {"Authorization": f"Bearer {json.loads(tokens.read_text())['admin']}"}
    metrics = httpx.get(f"{url}/metrics", headers=headers, timeout=patience(20), trust_env=False).text
    return 'route="/v1/leases/heartbeat",status="200"' in metrics


@contextlib.contextmanager
def control_plane(programs: Path, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    folder.mkdir(exist_ok=True)
    command: list[str | Path] = [programs / "python", "-m", "rollyard_api", "--state-dir", folder / "state"]
    command += ["--port", "0", "--port-file", folder / "port"]
    with running(command, folder) as process:
        port = until(process, folder, lambda: text(folder / "port"))
        yield process, f"http://127.0.0.1:{port}"


def test_every_extra_is_tried_or_left_out() -> None:
    assert set(EXTRAS) == TRIED | UNTRIED


def test_the_libraries_of_traces_are_known() -> None:
    """OpenTelemetry's distributions share one namespace, so modules of it name none of them."""
    wanted = {"opentelemetry-exporter-otlp-proto-http", "opentelemetry-sdk", "requests"}
    assert requirements("traces") == wanted
    assert [module for module in MODULES["traces"] if find_spec(module) is None] == []


@pytest.mark.parametrize("extra", sorted(set(MODULES) - {"traces"}))
def test_the_command_line_knows_the_modules_of_each_extra(extra: str) -> None:
    modules = packages_distributions()
    known = {normal(name) for module in MODULES[extra] for name in modules[module]}
    if extra == "postgresql":  # Its control plane is the extra `api`, which is checked as such.
        known |= requirements("api")
    # psycopg's own extra installs its library beside it.
    assert requirements(extra) - known == set()
    assert {name for name in known if not name.startswith("psycopg")} - requirements(extra) == set()


@pytest.fixture(scope="module")
def base(install: Install) -> Path:
    """Return the folder of the programs after `pip install rollyard` alone."""
    return install()


@pytest.fixture(scope="module")
def api(install: Install) -> Path:
    """Return the folder of the programs of an environment that can run a control plane."""
    return install("api")


def installed(programs: Path) -> set[str]:
    code = "from importlib.metadata import distributions as d; print(*(x.name for x in d()))"
    done = subprocess.run(
        [programs / "python", "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    return {normal(name) for name in done.stdout.split()}


@pytest.mark.packaging
@pytest.mark.nightly
class TestWithoutExtras:
    def test_nothing_that_a_trainer_has_opinions_about(self, base: Path) -> None:
        assert installed(base) & set(NOT_IN_A_TRAINER) == set()

    def test_the_client_and_every_module_of_it(self, base: Path, tmp_path: Path) -> None:
        code = (
            "import importlib, pkgutil\n"
            "from rollyard import AsyncClient, Client\n"
            "names = 'rollyard_client', 'rollyard_crds', 'rollyard_process', 'rollyard_tasks'\n"
            "for package in map(importlib.import_module, names):\n"
            "    for found in pkgutil.walk_packages(package.__path__, package.__name__ + '.'):\n"
            "        if not found.name.endswith('__main__'):\n"
            "            importlib.import_module(found.name)\n"
            "Client('http://127.0.0.1:1', 'token').close()\n"
        )
        done = run([base / "python", "-W", "error", "-c", code], tmp_path)
        assert (done.returncode, done.stderr) == (0, "")

    def test_a_control_plane_elsewhere_is_used(self, base: Path, api: Path, tmp_path: Path) -> None:
        tasks = [{"id": "a", "prompt": "x", "test_script": "true", "solution": []}]
        job = {"tasks": {"inline": tasks}, "handler": "shell", "agent": {"type": "oracle"}}
        manifest = job_manifest("j", job)
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(manifest))
        with control_plane(api, tmp_path / "yard") as (plane, url):
            tokens = json.loads((tmp_path / "yard" / "state" / "tokens.json").read_text())
            token = tokens["admin"][0] if isinstance(tokens["admin"], list) else tokens["admin"]

            def rollyard(*arguments: str) -> str:
                done = run([base / "rollyard", *arguments], tmp_path, ROLLYARD_URL=url, ROLLYARD_TOKEN=token)
                assert done.returncode == 0, done.stderr
                return done.stdout

            assert "is valid" in rollyard("validate", "-f", "job.yaml")
            rollyard("submit", "-f", "job.yaml")
            assert "j" in rollyard("get", "rj")
            assert "Pending" in rollyard("describe", "j")
            rollyard("cancel", "j")
            # No driver runs that would finish the job; its only rollout has ended.
            assert "cancelled" in rollyard("view", "j", "--list")
            assert rollyard("trajectories", "j", "-o", "t.jsonl").startswith("1 trajectories")
            stopped(plane, tmp_path / "yard")

    @pytest.mark.parametrize(
        ("command", "extra"),
        [
            ("up", "local"),
            ("up --detach", "local"),
            ("quickstart", "local"),
            ("worker --help", "worker"),
            ("slurm-bridge up", "slurm"),
            ("trajectories j -o t.parquet", "parquet"),
            ("view --from t.parquet", "parquet"),
            ("view --from t.jsonl --tokenizer .", "worker"),
        ],
    )
    def test_a_missing_extra_is_named(self, base: Path, tmp_path: Path, command: str, extra: str) -> None:
        (tmp_path / "t.jsonl").write_text(record().model_dump_json() + "\n")
        (tmp_path / "tokenizer.json").write_text("{}")
        done = run([base / "rollyard", *command.split()], tmp_path)
        assert done.returncode == 2, done.stderr
        assert done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith("rollyard: ")
        assert line.endswith(f"pip install 'rollyard[{extra}]'")
        assert not (tmp_path / "home").exists()

    def test_the_doctor_names_it_too(self, base: Path, tmp_path: Path) -> None:
        done = run([base / "rollyard", "doctor"], tmp_path)
        assert done.returncode == 1, done.stderr
        assert re.search(r"missing +installation .*\n.*pip install 'rollyard\[local\]'", done.stdout)
        assert re.search(r"missing +embedded engine .*\n.*rollyard\[engine\]", done.stdout)


def record() -> Trajectory:
    document = {"id": "j-a-0", "job": "j", "task_id": "a", "group_id": "a", "sample_index": 0}
    return Trajectory.model_validate({**document, "status": "succeeded", "reward": 1.0})


@pytest.fixture
def pythons() -> list[str]:
    """Further interpreters of the supported versions, as pyenv or the system has them."""
    found = {}
    folders = [*sorted(Path.home().glob(".pyenv/versions/3.*/bin")), Path("/usr/local/bin"), Path("/usr/bin")]
    for minor in range(11, 15):
        for folder in folders:
            program = folder / f"python3.{minor}"
            if minor != sys.version_info.minor and program.exists():
                found[minor] = str(program)
    return [found[minor] for minor in sorted(found)]


@pytest.mark.packaging
@pytest.mark.nightly
class TestExtras:
    def test_client_adds_nothing(self) -> None:
        assert EXTRAS["client"] == []

    def test_other_pythons_have_the_client(
        self, pythons: list[str], install: Install, tmp_path: Path, missing: Callable[[str], None]
    ) -> None:
        if not pythons:
            pytest.skip("this machine has no other Python of a supported version")
        for python in pythons:
            programs = install("parquet", python)
            code = "from rollyard import Client; Client('http://127.0.0.1:1', 'x')"
            done = run([programs / "python", "-W", "error", "-c", code], tmp_path)
            assert (done.returncode, done.stderr) == (0, ""), python
            assert run([programs / "rollyard", "--help"], tmp_path).returncode == 0

    def test_parquet(self, install: Install, tmp_path: Path) -> None:
        (tmp_path / "t.parquet").write_bytes(encode([record().model_dump_json().encode()]))
        done = run([install("parquet") / "rollyard", "view", "--from", "t.parquet", "--list"], tmp_path)
        assert done.returncode == 0, done.stderr
        assert "j-a-0" in done.stdout

    def test_postgresql(self, install: Install, tmp_path: Path) -> None:
        """The driver is there and finds no server. Its use is tested with the control plane."""
        command: list[str | Path] = [install("postgresql") / "python", "-m", "rollyard_api", "--port", "0"]
        url = f"postgresql+psycopg://rollyard@/none?host={tmp_path}"
        done = run([*command, "--state-dir", tmp_path / "state", "--db", url], tmp_path)
        assert done.returncode != 0
        assert "connection" in done.stderr
        assert "ModuleNotFoundError" not in done.stderr

    def test_worker(self, api: Path, install: Install, tmp_path: Path) -> None:
        with control_plane(api, tmp_path / "yard") as (_, url):
            command: list[str | Path] = [install("worker") / "rollyard", "worker", "--url", url]
            command += [
                "--token-file",
                tmp_path / "yard" / "state" / "tokens.json",
                "--sandbox",
                "kubernetes",
            ]
            command += ["--run-dir", tmp_path / "run"]
            with running(command, tmp_path) as process:
                until(process, tmp_path, lambda: heartbeats(url, tmp_path / "yard" / "state" / "tokens.json"))
                stopped(process, tmp_path)

    async def test_sandbox(self, install: Install, tmp_path: Path) -> None:
        programs = install("sandbox")
        command: list[str | Path] = [programs / "python", "-m", "rollyard_sandbox"]
        with running(
            [*command, "--listen", f"unix:{tmp_path}/s", "--workdir", tmp_path], tmp_path
        ) as process:
            until(process, tmp_path, (tmp_path / "s").exists)
            async with await ExecClient.connect(f"unix:{tmp_path}/s") as client:
                assert (await client.bash("echo $((6 * 7))")).text() == "42\n"
                assert (await client.ipython("6 * 7")).result == "42"
            stopped(process, tmp_path)

    def test_engine(self, install: Install, tmp_path: Path) -> None:
        programs = install("engine")
        model = "import rollyard_engine as e; print(e.__path__[0] + '/models/tiny-policy')"
        folder = run([programs / "python", "-c", model], tmp_path).stdout.strip()
        command: list[str | Path] = [programs / "python", "-m", "rollyard_engine", "--model", folder]
        with running([*command, "--port", "0", "--port-file", tmp_path / "port"], tmp_path) as process:
            url = f"http://127.0.0.1:{until(process, tmp_path, lambda: text(tmp_path / 'port'))}"
            asked = {"model": "tiny-policy", "prompt": "a", "max_tokens": 1}
            answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=patience(30), trust_env=False)
            assert answer.status_code == 200, answer.text
            assert len(answer.json()["choices"]) == 1
            stopped(process, tmp_path)

    def test_operator(self, install: Install, tmp_path: Path) -> None:
        """It starts and finds no cluster."""
        nowhere = {"name": "x", "cluster": {"server": "http://127.0.0.1:1"}}
        context = {"name": "x", "context": {"cluster": "x", "user": "x"}}
        config = {"apiVersion": "v1", "kind": "Config", "clusters": [nowhere], "contexts": [context]}
        config |= {"users": [{"name": "x", "user": {}}], "current-context": "x"}
        (tmp_path / "kubeconfig").write_text(yaml.safe_dump(config))
        (tmp_path / "token").write_text("t")
        images = dict.fromkeys(("worker", "engine", "sandbox", "sandboxDefault"), "registry.local/none:1")
        settings = {
            "instance": "x",
            "controlPlaneUrl": "http://127.0.0.1:1",
            "tokenFile": str(tmp_path / "token"),
            "workerTokenFile": str(tmp_path / "token"),
            "releaseNamespace": "x",
            "namespaces": ["x"],
            "images": images,
        }
        (tmp_path / "operator.yaml").write_text(yaml.safe_dump(settings))
        command: list[str | Path] = [install("operator") / "python", "-m", "rollyard_operator"]
        config_file = str(tmp_path / "kubeconfig")
        done = run([*command, "--config", tmp_path / "operator.yaml"], tmp_path, KUBECONFIG=config_file)
        assert done.returncode == 1, done.stderr
        assert done.stderr.splitlines()[-1].startswith("rollyard_operator: ")
        assert "127.0.0.1" in done.stderr

    def test_slurm(self, install: Install, tmp_path: Path) -> None:
        """A bridge runs its control plane, and its cluster is empty."""
        slurm = tmp_path / "slurm"
        slurm.mkdir()
        for name in ("sbatch", "squeue", "scancel", "sinfo", "scontrol", "sacct"):
            program = slurm / name
            program.write_text('#!/bin/sh\n[ "$1" != --version ] || echo "slurm 23.02.4"\n')
            program.chmod(0o755)
        command: list[str | Path] = [install("slurm") / "rollyard", "slurm-bridge", "up", "--home", "h"]
        path = f"{slurm}:{os.environ['PATH']}"
        with running([*command, "--listen", "127.0.0.1"], tmp_path, PATH=path) as process:
            until(process, tmp_path, lambda: "Rollyard runs at" in text(tmp_path / "log"))
            stopped(process, tmp_path, signal.SIGINT)

    def test_local(self, install: Install, tmp_path: Path) -> None:
        """The quickstart goes from nothing to trajectories."""
        command = "quickstart --tasks 2 --samples 1 --sandbox process --out out"
        done = run([install("local") / "rollyard", *command.split()], tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert len((tmp_path / "out" / "trajectories.jsonl").read_text().splitlines()) == 2
