"""Task folders in the format of Harbor: what they become, and why a folder is refused."""

from __future__ import annotations

import base64
import gzip
import io
import json
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from rollyard_crds.fields.harbor import MAX_BYTES, MAX_FILES, HarborFolder, HarborOptions
from rollyard_crds.fields.signals import task_warnings
from rollyard_crds.rolloutjob import SandboxSpec, TaskSource
from rollyard_crds.task import Task, TaskSandbox
from rollyard_tasks.file_rows import json_row, line_rows
from rollyard_tasks.formats.harbor import HarborFormat, folder_rows
from rollyard_tasks.formats.interface import Row, RowRefused
from rollyard_tasks.harbor.archive import pack, read_folder, unpack
from rollyard_tasks.harbor.plan import HarborPlan, harbor_plan
from rollyard_tasks.harbor.table import HarborRefused
from rollyard_tasks.row_texts import FileRefused
from rollyard_tasks.task_list import TaskLines, TaskListError

FILES = {"task.toml": "", "instruction.md": "Do it.", "tests/test.sh": "true"}
ALLOWLIST = '[agent]\nnetwork_mode = "allowlist"\nallowed_hosts = ["{}"]\n'
SEPARATE = '[verifier]\nenvironment_mode = "separate"\n'
STEP = '[[steps]]\nname = "a"\n'


def plan(toml: str = "", options: dict[str, str] | None = None, **files: str | None) -> HarborPlan:
    given = {**FILES, "task.toml": toml, **files}
    texts = {path: text for path, text in given.items() if text is not None}
    return harbor_plan(HarborFolder(files=texts, options=HarborOptions.model_validate(options or {})))


def archive(*entries: tuple[tarfile.TarInfo, bytes]) -> str:
    held = io.BytesIO()
    with tarfile.open(fileobj=held, mode="w") as file:
        for entry, data in entries:
            entry.size = len(data)
            file.addfile(entry, io.BytesIO(data))
    return base64.b64encode(held.getvalue()).decode()


def entry(path: str, kind: bytes = tarfile.REGTYPE, target: str = "") -> tarfile.TarInfo:
    made = tarfile.TarInfo(path)
    made.type, made.linkname = kind, target
    return made


def test_a_whole_task() -> None:
    found = plan(
        """
schema_version = "1.4"
source = "somewhere"
[task]
name = "a/b"
[metadata]
when = 2026-01-02
odd = nan
[agent]
timeout_sec = 90
[verifier]
timeout_sec = 30.5
env = { KEY = "${KEY:-none}", WORD = "w" }
[solution]
env = { HINT = "it's" }
[environment]
docker_image = "ghcr.io/a/b:1"
build_timeout_sec = 60
allow_internet = false
cpus = 2
memory_mb = 1024
storage_mb = 2048
gpus = 0
workdir = "/home/user/app"
env = { A = "b" }
[environment.healthcheck]
command = "true"
interval_sec = 1
""",
        **{"solution/solve.sh": "true", "environment/Dockerfile": "FROM x"},
    )
    assert found.sandbox() == TaskSandbox(
        image="docker://ghcr.io/a/b:1",
        env={"A": "b"},
        folders=["/logs", "/tests", "/solution"],
        allowed_hosts=[],
    )
    (step,) = found.steps
    assert (step.agent_seconds, step.verifier_seconds, step.solution) == (90.0, 30.5, "solution")
    assert step.verifier_env == {"KEY": "none", "WORD": "w"}
    assert (found.cpus, found.memory_bytes, found.disk_bytes) == (2.0, 1 << 30, 2 << 30)
    assert found.metadata == {"task": {"name": "a/b"}, "metadata": {"when": "2026-01-02", "odd": None}}
    assert found.healthcheck is not None
    check = found.healthcheck
    assert (check.interval, check.timeout, check.retries) == (1.0, 30.0, 3)


def test_a_dockerfile_without_an_image() -> None:
    """Its name stands for all that can be copied into it, and it is not one of a registry."""
    found = plan("", **{"environment/Dockerfile": "FROM x\nWORKDIR /app\nworkdir sub/"})
    name = found.sandbox().image
    assert name is not None
    assert re.fullmatch("dockerfile:[0-9a-f]{32}", name)
    assert (found.workdir, found.dockerfile(name), found.dockerfile("dockerfile:0")) == (
        "/app/sub", "environment", "",
    )  # fmt: skip
    more = plan("", **{"environment/Dockerfile": "FROM x\nWORKDIR /app\nworkdir sub/", "environment/a": ""})
    assert more.sandbox().image != name
    given = plan('[environment]\nworkdir = "/data"\n', **{"environment/Dockerfile": "FROM x\nWORKDIR $A"})
    assert given.workdir == "/data"
    assert plan("", **{"environment/Dockerfile": "FROM x"}).workdir == "/work"
    separate = plan(
        '[verifier]\nenvironment_mode = "separate"\n',
        **{"environment/Dockerfile": "FROM x", "tests/Dockerfile": "FROM x"},
    )
    of_tests = separate.verifier_sandbox()
    assert separate.dockerfile(of_tests.image or "") == "tests"
    assert of_tests.folders == ["/logs"], "the image brings its tests"


def test_a_task_of_several_steps() -> None:
    steps = f"{STEP}min_reward = 0.5\n"
    steps += STEP.replace('"a"', '"b"') + "min_reward = {x = 1}\n"
    steps += '[steps.verifier]\nenv = {B = "2"}\n'
    files = {f"steps/{name}/instruction.md": name for name in "ab"}
    found = plan('[verifier]\ntimeout_sec = 9\nenv = {A = "1"}\n' + steps, **files)
    assert [step.tests for step in found.steps] == [("tests", "steps/a/tests"), ("tests", "steps/b/tests")]
    assert [step.min_reward for step in found.steps] == [{"reward": 0.5}, {"x": 1.0}]
    assert [step.verifier_env for step in found.steps] == [{"A": "1"}, {"A": "1", "B": "2"}]
    assert [step.verifier_seconds for step in found.steps] == [9.0, 9.0]
    assert found.strategy == "mean"


def test_a_separate_verifier() -> None:
    toml = '[verifier]\nenvironment_mode = "separate"\n[verifier.environment]\ndocker_image = "v"\n'
    artifacts = 'artifacts = ["/app/a", {source = "/app/b", destination = "b"}]\n'
    found = plan(artifacts + toml, **{"tests/test.sh": None})
    assert found.artifacts == ("/app/a", "/app/b")
    assert found.sandbox().folders == ["/logs", "/solution"]
    assert found.verifier_sandbox() == TaskSandbox(image="docker://v", folders=["/logs"], allowed_hosts=[])


@pytest.mark.parametrize(
    ("toml", "hosts"),
    [
        ("", None),
        ('[verifier]\nnetwork_mode = "no-network"', None),
        ('[environment]\nnetwork_mode = "no-network"', []),
        ("[environment]\nallow_internet = false", []),
        (ALLOWLIST.format("*.a.org:8443"), ["*.a.org:8443"]),
        # The agent's table comes before that of its environment, which the tests do not use, either.
        (
            '[environment]\nnetwork_mode = "public"\n[verifier]\nnetwork_mode = "no-network"\n'
            + ALLOWLIST.format("a.org"),
            ["a.org"],
        ),
        (
            ALLOWLIST.format("a.org").replace("agent", "environment")
            + SEPARATE
            + '[verifier.environment]\nnetwork_mode = "no-network"',
            ["a.org"],
        ),
    ],
)
def test_the_network_of_a_task(toml: str, hosts: list[str] | None) -> None:
    assert plan(toml).sandbox().allowed_hosts == hosts
    assert plan(toml).verifier_sandbox().allowed_hosts == []


OF_TESTS = ALLOWLIST.format("a.org").replace("agent", "verifier")
OF_ALL = ALLOWLIST.format("b.org").replace("agent", "environment")


@pytest.mark.parametrize(
    ("toml", "hosts"),
    [
        ("", None),
        (ALLOWLIST.format("a.org"), None),
        (OF_TESTS, ("a.org",)),
        (OF_ALL, ("b.org",)),
        (OF_ALL + OF_TESTS, ("a.org",)),
        (OF_ALL + '[verifier]\nnetwork_mode = "no-network"', ()),
        (SEPARATE + ALLOWLIST.format("a.org").replace("agent", "verifier.environment"), ("a.org",)),
    ],
)
def test_the_network_of_the_tests_of_a_task(toml: str, hosts: tuple[str, ...] | None) -> None:
    assert plan(toml).tests_hosts == hosts


@pytest.mark.attack(
    "a task, or a task folder, reaches a host that its job does not have, or one that it does not state",
    boundary="network",
    surface="`sandbox.allowedHosts` of a task",
    stopped_by="the worker takes from the job's list what the task names, and refuses the task if there "
    "is another host; tests never have a network",
)
def test_a_job_is_narrowed_to_the_hosts_of_a_task() -> None:
    none = SandboxSpec()
    job = SandboxSpec.model_validate({"network": "allowlist", "allowedHosts": ["*.a.org", "b.org:8443"]})
    assert job.narrowed(None) is job
    assert none.narrowed([]).host_rules == job.narrowed([]).host_rules == ()
    assert job.narrowed([]).network == "none"
    assert job.narrowed(["x.a.org", "b.org:8443"]).allowed_hosts == ["x.a.org", "b.org:8443"]
    for spec, host in (
        (none, "a.org"),
        (job, "a.org"),
        (job, "b.org"),
        (job, "*.b.org:8443"),
        (job, "x.c.org"),
    ):
        with pytest.raises(
            ValueError, match=f"^sandbox.allowedHosts: {re.escape(host)} is not among the job's"
        ):
            spec.narrowed([host])


VARIABLES_AND_MESSAGES = pytest.mark.attack(
    "a task folder asks for a variable of the worker, or the message about a row of a listed source shows "
    "what it holds",
    boundary="control plane",
    surface="task files",
    stopped_by="only defaults are used; messages that quote are for those who may read the file",
)


@VARIABLES_AND_MESSAGES
@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[environment\n", "task.toml: is not TOML: .*line 1"),
        ('schema_version = "2.0"', "schema_version: is '2.0'"),
        ("[agent]\ntimeout_sec = 0", "agent.timeout_sec: must be larger than 0"),
        ("[agent]\ntimeout_sec = true", "agent.timeout_sec: must be a number"),
        ("[verifier]\ntimeout_sec = nan", "verifier.timeout_sec: must be larger"),
        ('[agent]\nuser = "root"', "agent.user: all programs of a sandbox run as one user"),
        ("[verifier]\nuser = 1000", "verifier.user: all programs"),
        ('[environment]\nnetwork_mode = "public"', "environment.network_mode: asks for every host"),
        ('[agent]\nnetwork_mode = "public"', "agent.network_mode: asks for every host"),
        ("[environment]\nallow_internet = true", "environment.allow_internet: asks for every host"),
        ("[environment]\nallow_internet = 1", "environment.allow_internet: must be true or false"),
        ('[environment]\nnetwork_mode = "host"', "environment.network_mode: is 'host', expected no-network"),
        ('[agent]\nallowed_hosts = ["a.org"]', "agent.allowed_hosts: needs network_mode = 'allowlist'"),
        ('[agent]\nnetwork_mode = "allowlist"', "agent.allowed_hosts: must name from 1 to 64 hosts"),
        (ALLOWLIST.format("reference"), "agent.allowed_hosts: 'reference' is not a host"),
        (ALLOWLIST.format("10.0.0.1"), "agent.allowed_hosts: '10.0.0.1' is not a host"),
        (ALLOWLIST.format("a.org:99999"), "agent.allowed_hosts: 'a.org:99999': a port is"),
        (ALLOWLIST.replace('["{}"]', "[1]"), "agent.allowed_hosts: '1' is not a host"),
        ('[verifier]\nnetwork_mode = "public"', "verifier.network_mode: asks for every host"),
        (ALLOWLIST.format("a.org") + STEP, "steps: need a task without a network"),
        (ALLOWLIST.format("a.org").replace("agent", "verifier") + STEP, "steps: need a task without a"),
        (STEP + '[steps.agent]\nnetwork_mode = "public"', r"steps\[0\].agent.network_mode: a step cannot"),
        (STEP + '[steps.verifier]\nnetwork_mode = "public"', r"steps\[0\].verifier.network_mode: a step"),
        ("[environment]\ngpus = 1", "environment.gpus: sandboxes have no GPU"),
        ('[environment]\nos = "windows"', "environment.os: is 'windows'"),
        ('[[environment.mcp_servers]]\nname = "m"', "environment.mcp_servers: an agent"),
        ('[environment]\nskills_dir = "/s"', "environment.skills_dir: an agent"),
        ('[environment]\nenv = {A = "${HOME}"}', "environment.env.A: names the variable HOME of the machine"),
        ("[environment]\nenv = {A = 1}", "environment.env.A: must be a text"),
        ('[environment]\nworkdir = "app"', "environment.workdir: must be the absolute path"),
        ('[environment]\nworkdir = "/a/../b"', "environment.workdir: must be the absolute path"),
        ('[environment]\nworkdir = "/usr"', "environment.workdir: must not be a folder of the system, where"),
        ('[environment]\nworkdir = "/home/x"', "environment.workdir: must be a folder directly below /"),
        ('[environment]\ndocker_image = "a b"', "environment.docker_image: is not the name"),
        ('[verifier]\nenvironment_mode = "else"', "verifier.environment_mode: is 'else', expected shared or"),
        (
            '[verifier]\nenvironment_mode = "shared"\n[verifier.environment]',
            "verifier.environment: needs environment_mode",
        ),
        ("[verifier.continuous]\nenabled = true", "verifier.continuous: an agent"),
        ('[[artifacts]]\nsource = "/a"\nservice = "db"', "artifacts.service: a sandbox is one container"),
        ('[environment.tpu]\ntype = "v6e"', "environment.tpu: sandboxes have no TPU"),
        ("[agent]\nuser = 0", "agent.user: all programs"),
        ('[environment]\nmemory = "2"', "environment.memory: is '2', expected a number with K, M, G or T"),
        ('[environment]\nmemory = "-1G"', "environment.memory: is '-1G', expected"),
        ("[environment]\nstorage = 10", "environment.storage: must be a text such as '2G'"),
        (
            '[environment]\nmemory = "2G"\nmemory_mb = 4096',
            "environment.memory: is '2G', and memory_mb is 4096: give one of them",
        ),
        ('[environment]\ncpus = "two"', "environment.cpus: must be a number"),
        ('[agent]\ntimeout_sec = "1e3"', "agent.timeout_sec: must be a number of seconds"),
        (
            'multi_step_reward_strategy = "final"\nmulti_step_reward_mode = "mean"',
            "multi_step_reward_mode: says something else than multi_step_reward_strategy",
        ),
        ('multi_step_reward_mode = "max"', "multi_step_reward_mode: is 'max', expected mean or final"),
        ('[[verifier.collect]]\ncommand = "x"', "verifier.collect: commands"),
        ('artifacts = ["a"]', "artifacts: 'a' must be an absolute path"),
        ("artifacts = [1]", "artifacts: must be paths"),
        (STEP + '[verifier]\nenvironment_mode = "separate"', "steps cannot have a separate"),
        (STEP.replace('"a"', '"../a"'), r"steps\[0\].name: must be"),
        (STEP + STEP, "instruction.md: is missing"),
        (STEP * 65, "steps: are 65, and at most 64"),
        (STEP + 'min_reward = "x"', r"steps\[0\].min_reward: must be a number"),
    ],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused(toml: str, words: str) -> None:
    with pytest.raises(HarborRefused, match=words):
        plan(toml)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({"task.toml": None}, "task.toml: is missing"),
        ({"tests/test.sh": None}, "tests/test.sh: is missing, and nothing else gives a reward"),
        ({"instruction.md": " "}, "instruction.md: is missing or empty"),
        (
            {"environment/Dockerfile": "FROM x\nWORKDIR /a\nWORKDIR $B"},
            "environment/Dockerfile: line 3: this WORKDIR is not read; give environment.workdir",
        ),
        ({"environment/Dockerfile": "FROM x\nWORKDIR a"}, "line 2: this WORKDIR is not read"),
        (
            {"environment/docker-compose.yaml": ""},
            "environment/docker-compose.yaml: a sandbox is one container",
        ),
        ({"environment/compose.yml": ""}, "environment/compose.yml: a sandbox is one container"),
    ],
)
def test_folders_that_are_refused(files: dict[str, str | None], words: str) -> None:
    given = {**FILES, **files}
    with pytest.raises(HarborRefused, match=words):
        harbor_plan(HarborFolder(files={path: text for path, text in given.items() if text is not None}))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"files": {"/etc/passwd": ""}}, "must be relative"),
        ({"files": {"a/../../b": ""}}, "must be relative"),
        ({"binary": {"./a": ""}}, "must be relative"),
        ({"files": {"a\n": ""}}, "cannot be printed"),
        ({"files": {"a": "", "a/b": ""}}, "is a file and a folder"),
        ({"files": {"a": ""}, "binary": {"a": ""}}, "both as text and in base64"),
        ({"binary": {"a": "?"}}, "is not base64"),
        ({"files": {"a": "x" * (MAX_BYTES // 2 + 1), "b": "x" * (MAX_BYTES // 2)}}, "a task folder may hold"),
        ({"files": {str(i): "" for i in range(MAX_FILES + 1)}}, "at most"),
    ],
)
def test_paths_stay_in_the_folder(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        HarborFolder.model_validate(fields)


def test_folders_are_packed_and_read_again(tmp_path: Path) -> None:
    (tmp_path / "set/one/tests").mkdir(parents=True)
    for path, text in FILES.items():
        (tmp_path / "set/one" / path).write_bytes(text.encode())
    (tmp_path / "set/one/tests/test.sh").chmod(0o755)
    (tmp_path / "set/one/tests/data.bin").write_bytes(b"\xff\x00")
    (row,) = folder_rows(tmp_path)
    assert row["path"] == "set/one"
    assert row == next(folder_rows(tmp_path))
    task = Task.model_validate(HarborFormat().task(Row(row, 1)))
    assert (task.id, task.prompt) == ("set/one", "Do it.")
    assert task.harbor is not None
    assert task.harbor.executable == ["tests/test.sh"]
    assert task.harbor.below("tests") == {"data.bin": (b"\xff\x00", 0o644), "test.sh": (b"true", 0o755)}
    # Archives of others hold the folder itself, too, and may not be compressed.
    plain = archive(*((entry(f"one/{path}"), text.encode()) for path, text in FILES.items()))
    assert Task.model_validate(HarborFormat().task(Row({"path": "x", "task_binary": plain}, 1))).id == "x"


@VARIABLES_AND_MESSAGES
def test_a_row_of_a_file_that_may_not_be_shown() -> None:
    row = Row(
        {"path": "secret", "task_binary": pack({"task.toml": (b"schema_version = 'secret'", False)})}, 1
    )
    with pytest.raises(RowRefused) as refused:
        HarborFormat().task(row)
    assert str(refused.value) == "task_binary: holds no task folder that can be run here"
    assert refused.value.quoting == "secret: schema_version: is 'secret', and only versions 1 are known"


def link(folder: Path) -> None:
    (folder / "a").symlink_to("/etc/passwd")


def linked_folder(folder: Path) -> None:
    (folder / "a").symlink_to("/etc")


def large(folder: Path) -> None:
    with (folder / "a").open("wb") as file:
        file.truncate(100 << 20)


def many(folder: Path) -> None:
    for number in range(MAX_FILES + 1):
        (folder / str(number)).touch()


def fifo(folder: Path) -> None:
    os.mkfifo(folder / "a")


HOSTILE_FOLDERS = pytest.mark.attack(
    "a task folder or its archive holds links, special files or paths that lead out of it, or is large",
    boundary="control plane",
    surface="task files",
    stopped_by="it is read through descriptors that follow no link, and archives in memory, within bounds",
)


@HOSTILE_FOLDERS
@pytest.mark.parametrize(
    ("make", "words"),
    [
        (link, "a: is a symbolic link"), (linked_folder, "a: is a symbolic link"),
        (fifo, "a: is not a regular file"),
        (large, "a: with this file, the folder holds more than 4194304 bytes; large data belongs"),
        (many, "holds more than 1024 files"),
    ],
)  # fmt: skip
def test_folders_that_are_not_packed(tmp_path: Path, make: Callable[[Path], None], words: str) -> None:
    folder = tmp_path / "t"
    folder.mkdir()
    (folder / "task.toml").touch()
    make(folder)
    with pytest.raises(RowRefused) as refused:
        HarborFormat().task(Row(next(folder_rows(tmp_path)), 1))
    assert re.match(f"t: {words}", refused.value.quoting)


def test_a_folder_that_is_refused_costs_its_own_row_only(tmp_path: Path) -> None:
    for name in "abcd":
        (tmp_path / name).mkdir()
        for path, text in FILES.items():
            (tmp_path / name / path).parent.mkdir(exist_ok=True)
            (tmp_path / name / path).write_text(text)
    link(tmp_path / "b")
    (tmp_path / "c/task.toml").write_text("[environment]\ngpus = 1")
    reader, good = TaskLines(source=TaskSource(url="x", format="harbor")), []
    for row in line_rows(map(json.dumps, folder_rows(tmp_path))):
        task = reader.add(row)
        good += [] if task is None else [task.id]
    assert good == ["a", "d"]
    with pytest.raises(TaskListError) as refused:
        reader.end()
    assert refused.value.problems == [
        "line 2: b: a: is a symbolic link, which a task folder must not hold",
        "line 3: c: environment.gpus: sandboxes have no GPU",
    ]


HOSTILE_KEYS = pytest.mark.attack(
    "keys of a `task.toml`, or what is wrong with a folder, are long, many, or hold control characters "
    "for a terminal",
    boundary="control plane",
    surface="task files",
    stopped_by="64 keys of 100 characters are kept, shown as printable text; a reason is cut",
)


@HOSTILE_KEYS
def test_what_is_wrong_with_a_folder_is_shown_within_bounds() -> None:
    row = Row({"path": "p" * 10_000, "refused": "\x1b[2J" * 10_000}, 1)
    with pytest.raises(RowRefused) as refused:
        HarborFormat().task(row)
    assert len(refused.value.quoting) < 6000
    assert refused.value.quoting.isprintable()


@HOSTILE_FOLDERS
def test_a_link_to_a_task_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/task.toml").touch()
    (tmp_path / "set").mkdir()
    (tmp_path / "set/link").symlink_to(tmp_path / "outside")
    assert list(folder_rows(tmp_path / "set")) == []
    with pytest.raises(FileRefused):
        read_folder(tmp_path / "set/link")


BOMB = base64.b64encode(gzip.compress(bytes(16 << 20), 1)).decode()


@HOSTILE_FOLDERS
@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("?", "is not base64"),
        (base64.b64encode(b"\x1f\x8bx").decode(), "damaged|cut off"),
        (base64.b64encode(b"no archive" * 100).decode(), "cannot be read"),
        (BOMB, "longer than"),
        (archive((entry("../../etc/x"), b"")), "must be relative"),
        (archive((entry("/etc/x"), b"")), "must be relative"),
        (archive((entry("a", tarfile.SYMTYPE, "/etc/passwd"), b"")), "is a link"),
        (archive((entry("a", tarfile.LNKTYPE, "/etc/passwd"), b"")), "is a link"),
        (archive((entry("a", tarfile.CHRTYPE), b"")), "not a regular file"),
        (archive((entry("a", tarfile.FIFOTYPE), b"")), "not a regular file"),
        (archive((entry("a"), b"1"), (entry("a"), b"2")), "stands twice"),
        (archive((entry("a"), b"1" * (MAX_BYTES + 1))), "the folder holds more than"),
    ],
)
def test_hostile_archives(text: str, words: str) -> None:
    with pytest.raises(FileRefused, match=words):
        unpack(text)


@pytest.mark.parametrize("path", ["/usr", "/work", "logs", "/a/b", "/..", "/.rollyard", "/A", "/"])
def test_folders_that_a_sandbox_cannot_have(path: str) -> None:
    with pytest.raises(ValidationError):
        TaskSandbox(folders=[path])


GIB = 1 << 30


@pytest.mark.parametrize(
    ("toml", "cpus", "memory", "disk"),
    [
        ('cpus = 1\nmemory = "2G"\nstorage = "10G"', 1.0, 2 * GIB, 10 * GIB),
        ("cpus = 1\nmemory_mb = 2048\nstorage_mb = 10240", 1.0, 2 * GIB, 10 * GIB),
        ('memory = "2G"\nmemory_mb = 2048\nstorage = "1.5g"', 0.0, 2 * GIB, 3 * GIB // 2),
        ('memory = "512M"\nstorage = "2048K"', 0.0, GIB // 2, 2 << 20),
        ('memory = "2Gi"\nstorage = "1 GB"', 0.0, 2 * GIB, GIB),
        ('cpus = "2"\nmemory_mb = "2048"\nstorage = "1TiB"', 2.0, 2 * GIB, 1024 * GIB),
        ("", 0.0, 0, 0),
    ],
)
def test_sizes_in_the_spellings_of_harbor(toml: str, cpus: float, memory: int, disk: int) -> None:
    found = plan(f"[environment]\n{toml}\n")
    assert (found.cpus, found.memory_bytes, found.disk_bytes) == (cpus, memory, disk)


PUBLISHED = """
version = "2.0"
schema_version = "1.1"
artifacts = []
[task]
name = "a/b"
keywords = ["files"]
[[task.authors]]
name = "N."
[metadata]
author_name = "N."
difficulty = "medium"
tags = []
expert_time_estimate_min = 30.0
[verifier]
timeout_sec = "900.0"
[agent]
timeout_sec = 900.0
[environment]
build_timeout_sec = 600.0
docker_image = "a/b:1"
cpus = 1
memory = "2G"
storage = "10G"
gpus = 0
allow_internet = false
mcp_servers = []
[verifier.env]
[environment.env]
[solution.env]
"""


def test_a_file_as_terminal_bench_publishes_it() -> None:
    found = plan(PUBLISHED, **{"environment/Dockerfile": "FROM x\nWORKDIR /app\n"})
    assert (found.image, found.workdir, found.hosts) == ("a/b:1", "/app", ())
    assert found.steps[0].verifier_seconds == 900.0
    assert found.metadata["metadata"]["expert_time_estimate_min"] == 30.0
    assert set(found.metadata) == {"task", "metadata"}


@HOSTILE_KEYS
@pytest.mark.parametrize(
    ("toml", "unknown"),
    [
        ("x = 1", {"x": None}),
        ("[environment]\nx = 1\n[wild]\na = 1", {"environment.x": None, "wild": None}),
        ("[agent]\ntimeout_secs = 5", {"agent.timeout_secs": "agent.timeout_sec"}),
        ('[environment]\nmemory_gb = 2\ndocker_images = "x"', {
            "environment.memory_gb": "environment.memory_mb",
            "environment.docker_images": "environment.docker_image",
        }),
        ('[[steps]]\nname = "a"\nmin_rewards = 1\n', {"steps[0].min_rewards": "steps[0].min_reward"}),
        ('"\\u001b[2J" = 1', {"'\\x1b[2J'": None}),
        ("a" * 5000 + " = 1", {"a" * 100: None}),
    ],
)  # fmt: skip
def test_unknown_keys_are_kept_and_named(toml: str, unknown: dict[str, str | None]) -> None:
    found = plan(toml, **{"steps/a/instruction.md": "Do it.", "steps/a/tests/test.sh": "true"})
    assert found.metadata == {"harbor_unknown": unknown}
    (warned,) = task_warnings([Task(id="t", prompt="q", metadata=dict(found.metadata))])
    assert warned.isprintable()
    for key, near in unknown.items():
        assert key in warned or ascii(key)[1:-1] in warned
        assert near is None or f"{key} (did you mean {near}?)" in warned


@HOSTILE_KEYS
def test_unknown_keys_are_bounded() -> None:
    found = plan("".join(f"key{number} = 1\n" for number in range(2000)))
    assert len(found.metadata["harbor_unknown"]) == 64


def test_the_other_spelling_of_the_strategy() -> None:
    assert plan('multi_step_reward_mode = "final"').strategy == "final"
    assert plan('multi_step_reward_mode = "mean"\nmulti_step_reward_strategy = "mean"').strategy == "mean"


def test_a_verifiers_environment_means_a_separate_verifier() -> None:
    assert plan('[verifier.environment]\ndocker_image = "v"\n').separate
    assert not plan("[verifier]\n").separate


INTERNET = "[environment]\nallow_internet = true\n"
PUBLIC_TESTS = '[verifier]\nnetwork_mode = "public"\n'
ENVIRONMENT, AGENT, TESTS = "environment.allow_internet", "agent.network_mode", "verifier.network_mode"


@pytest.mark.parametrize(
    ("toml", "network", "hosts", "ignored"),
    [
        (INTERNET, "ignore", [], [ENVIRONMENT]),
        (INTERNET, "allow", None, None),
        (INTERNET + PUBLIC_TESTS, "allow", None, None),
        (INTERNET + PUBLIC_TESTS, "ignore", [], [ENVIRONMENT, TESTS]),
        (INTERNET + PUBLIC_TESTS.replace("public", "no-network"), "allow", None, None),
        (ALLOWLIST.format("a.org"), "ignore", [], [AGENT]),
        (ALLOWLIST.format("a.org"), "allow", ["a.org"], None),
        ('[environment]\nnetwork_mode = "no-network"', "allow", [], None),
        ("", "ignore", None, None),
        ("", "allow", None, None),
    ],
)
def test_a_job_says_what_becomes_of_a_network(
    toml: str, network: str, hosts: list[str] | None, ignored: list[str] | None
) -> None:
    found = plan(toml, {"network": network})
    assert found.sandbox().allowed_hosts == hosts
    assert found.verifier_sandbox().allowed_hosts == []
    assert found.metadata.get("harbor_ignored") == ignored


def test_what_a_jobs_options_do_not_lift() -> None:
    """Several steps are refused where the tests of an earlier one would have a network."""
    steps = {"steps/a/instruction.md": "Do it."}
    with pytest.raises(HarborRefused, match="steps: need a task without a network"):
        plan(INTERNET + STEP, {"network": "allow"}, **steps)
    assert plan(INTERNET + STEP, {"network": "ignore"}, **steps).hosts == ()
    own = STEP + '[steps.agent]\nnetwork_mode = "public"'
    found = plan(own, {"network": "ignore"}, **steps)
    assert found.metadata["harbor_ignored"] == ["steps[0].agent.network_mode"]


def test_a_job_says_what_becomes_of_a_user() -> None:
    found = plan('[agent]\nuser = "root"\n[verifier]\nuser = 0\n', {"user": "ignore"})
    assert found.metadata["harbor_ignored"] == ["agent.user", "verifier.user"]
    (warned,) = task_warnings([Task(id="t", prompt="q", metadata=dict(found.metadata))])
    assert warned.endswith("keys that the job's tasks.harbor leaves out: 1. The first is 't': agent.user, "
                           "verifier.user")  # fmt: skip


def test_the_options_of_a_job_reach_its_tasks() -> None:
    files = {**FILES, "task.toml": INTERNET}
    line = json.dumps(
        {"path": "t", "task_binary": pack({path: (text.encode(), False) for path, text in files.items()})}
    )
    options = {"network": "ignore", "rewardKey": "accuracy"}
    source = TaskSource.model_validate({"url": "x", "format": "harbor", "harbor": options})
    task = TaskLines(source=source).add(json_row(1, line))
    assert task is not None
    assert task.harbor is not None
    assert task.sandbox.allowed_hosts == []
    again = Task.model_validate(task.to_json()).harbor
    assert again is not None
    assert harbor_plan(again).reward_key == "accuracy"
    reader = TaskLines(source=TaskSource(url="x", format="harbor"))
    assert reader.add(json_row(1, line)) is None
    with pytest.raises(TaskListError, match=r"tasks\.harbor\.network: ignore or allow"):
        reader.end()
