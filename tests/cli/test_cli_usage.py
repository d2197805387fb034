"""Wrong use of the command line, bad input and a missing server each end with one helpful line."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rollyard.doctor import check_cluster
from rollyard.local.options import check_model_folder, shipped_model
from rollyard.main import COMMANDS, ELSEWHERE, SECTIONS, main
from rollyard_testing.manifests import job_manifest

JOB: dict[str, Any] = job_manifest(
    "j", {"tasks": {"url": "tasks.jsonl"}, "handler": "shell", "agent": {"type": "oracle"}}
)
TASK: dict[str, Any] = {"id": "a", "prompt": "x", "test_script": "true", "solution": []}


@pytest.fixture(autouse=True)
def nowhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Hide every server of this user."""
    monkeypatch.setenv("ROLLYARD_HOME", str(tmp_path / "nohome"))
    for name in ("ROLLYARD_URL", "ROLLYARD_TOKEN"):
        monkeypatch.delenv(name, raising=False)


def write(folder: Path, job: dict[str, Any], tasks: list[Any] | None = None) -> Path:
    lines = [json.dumps(task) if isinstance(task, dict) else str(task) for task in tasks or [TASK]]
    (folder / "tasks.jsonl").write_text("\n".join(lines) + "\n")
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return path


def changed(**spec: Any) -> dict[str, Any]:
    return {**JOB, "spec": {**JOB["spec"], **spec}}


def test_help_names_every_command_and_loads_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"  {name} " in shown for name in COMMANDS)
    assert all(f"\n{title}:\n" in shown for title in SECTIONS)
    script = (
        "import sys\n"
        "from rollyard.main import main\n"
        "main(['--help'])\n"
        "heavy = {'pydantic', 'httpx', 'rich', 'yaml', 'asyncio', 'rollyard_crds.base'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# The worker has a test of its own.
@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "worker"])
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert "Usage:" in capsys.readouterr().out


def test_wrong_command_and_wrong_flag(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sumbit"]) == 2
    assert "Did you mean 'submit'?" in capsys.readouterr().err
    assert main(["submit", "--fil", "x"]) == 2
    assert "--file" in capsys.readouterr().err


@pytest.mark.parametrize("word", ELSEWHERE)
def test_a_command_of_another_tool_is_named_by_what_does_it_here(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert word not in COMMANDS
    assert main([word, "x", "--flag"]) == 2
    shown = capsys.readouterr().err
    assert f"No such command {word!r}: {ELSEWHERE[word]}." in shown
    named = re.findall(r"`rollyard ([a-z-]+)", ELSEWHERE[word])
    assert all(name in COMMANDS or name.startswith("--") for name in named)


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (
            "submit job.yaml",
            "Missing option '-f' / '--file': `rollyard submit -f job.yaml`",
        ),
        ("validate tasks.jsonl", "'--file': `rollyard validate -f tasks.jsonl`"),
        ("apply job.yaml", "unexpected extra argument (job.yaml): `rollyard apply -f job.yaml`"),
        ("apply --file a.yaml b.yaml", "unexpected extra argument (b.yaml)\n"),
        ("submit", "Missing option '-f' / '--file'.\n"),
        ("submit -w -f job.yaml", "No such option '-w': `--wait` shows"),
        ("apply -f job.yaml --dry-run=client", "'--dry-run': `rollyard validate -f FILE` checks"),
        ("delete --all", "No such option '--all': `rollyard get -o name | xargs rollyard delete`"),
        ("get --sort-by=.a", "`rollyard get -o json` prints JSON, which `jq` sorts"),
        ("get rj a -o jsonpath={.a}", "'name'; `rollyard get -o json` prints the fields"),
        ("get rj a -o xml", "'wide', 'name'.\n"),
        ("wait rj/a --for=jsonpath={.a}=b", "`rollyard get NAME -o json` prints the fields"),
    ],
)
def test_an_option_of_another_tool_is_answered_with_what_does_it_here(
    words: str, answer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words.split()) == 2
    assert answer in capsys.readouterr().err


def test_the_version_is_an_option_too(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == main(["version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second
    assert first.startswith("rollyard ")


def test_up_shows_first_what_matters_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["up", "--help"]) == 0
    _, first, rest = re.split(r"Most used:\n|\nOptions:\n", capsys.readouterr().out)
    assert re.findall(r"^  (--[a-z-]+)", first, re.MULTILINE) == [
        *("--backend", "--model", "--plugin", "--home", "--detach"),
    ]
    titles = re.findall(r"^([A-Z].*):$", rest, re.MULTILINE)
    assert titles[:4] == ["Backends", "Sandboxes", "Workers", "State"]
    assert not re.search(r"^  --(backend|model|plugin|home|detach) ", rest, re.MULTILINE)


def test_no_server_of_a_home(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ROLLYARD_URL", raising=False)
    home = tmp_path / "h"
    assert main(["get", "--home", str(home)]) == 1
    error = capsys.readouterr().err
    assert (
        error.strip()
        == f"rollyard: nothing runs on {home}; start it with `rollyard up --home {home}`, or give --url"
    )
    assert not home.exists()


def test_good_manifest_is_told_valid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["validate", "-f", str(write(tmp_path, JOB))]) == 0
    assert "RolloutJob 'j' is valid (1 tasks, 1 samples each)" in capsys.readouterr().out


def test_what_a_format_leaves_out_of_a_row_is_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {
        "instance_id": "acme__tool-7", "repo": "acme/tool", "problem_statement": "It fails.", "patch": "",
        "install_config": {"test_cmd": "pytest"}, "test_patch": "diff", "FAIL_TO_PASS": ["[100%]", "t.py::a"],
    }  # fmt: skip
    job = write(tmp_path, changed(handler="swe", tasks={"url": "tasks.jsonl", "format": "swebench"}), [row])
    warned = "tests that no test runner reports, which were left out: 1. The first is "
    for file, options in ((tmp_path / "tasks.jsonl", ["--format", "swebench"]), (job, [])):
        assert main(["validate", "-f", str(file), *options]) == 0
        assert warned in capsys.readouterr().out


def test_what_is_hardly_meant_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    agent = {"agent": {"type": "tools"}, "backendRef": {"name": "policy"}}
    job = changed(samplesPerTask=2, sampling={"temperature": 0.0}, **agent)
    assert main(["validate", "-f", str(write(tmp_path, job))]) == 0
    shown = capsys.readouterr().out
    assert "RolloutJob 'j' is valid (1 tasks, 2 samples each)" in shown
    assert "warning: spec.sampling.temperature: at 0 the 2 samples of a task are alike" in shown


@pytest.mark.parametrize(
    ("job", "told"),
    [
        (
            changed(samplesPerTask=2, dynamicSampling={"targetGroups": 2}),
            "spec.dynamicSampling.targetGroups: must be at most 1, ",
        ),
        (changed(color="red"), "spec.color: unknown field"),
        (changed(samplesPerTask="eight"), "spec.samplesPerTask"),
        (
            changed(handler="swedish"),
            "no handler 'swedish' is installed; installed: code, harbor, math, mixed, shell, stem",
        ),
        (changed(agent={"type": "oracle", "tools": ["bash", "hammer"]}), "no tool 'hammer' is installed"),
        (
            changed(reward={"weights": {"exit_zero": 1.0, "style": 1.0}}),
            "spec.reward.weights: there is no component 'style'; there are exit_zero, handler, test_timeout",
        ),
        (changed(reward={"overlong": {"maxTokens": 8, "bufferTokens": -1}}), "reward.overlong.bufferTokens"),
        (changed(reward={"format": [{"name": "a", "pattern": "("}]}), "reward.format[0].pattern"),
        (changed(reward={"function": {"name": "nobodys"}}), "no reward-function 'nobodys' is installed"),
        (changed(agent={"type": "robot"}, backendRef={"name": "p"}), "spec.agent.type: no agent 'robot'"),
        (
            changed(agent={"type": "oracle", "toolParser": "mumbled"}),
            "spec.agent.toolParser: no tool-parser 'mumbled' is installed",
        ),
        (
            changed(tasks={"url": "tasks.jsonl", "format": "scrolls"}),
            "spec.tasks.format: no task-format 'scrolls' is installed",
        ),
        (changed(agent={"type": "oracle", "tools": ["hammer", "saw"]}), "spec.agent.tools[1]: no tool 'saw'"),
        (changed(tasks={"url": "nowhere.jsonl"}), "nowhere.jsonl: No such file"),
        ({**JOB, "kind": "Job"}, "kind: must be one of BackendPool, RolloutJob"),
        ({**JOB, "metadata": {"name": "Under_score"}}, "metadata.name"),
    ],
)
def test_bad_manifests(
    job: dict[str, Any], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["validate", "-f", str(write(tmp_path, job))]) == 1
    assert told in capsys.readouterr().err


def test_tasks_are_checked_as_their_handler_would(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path, JOB, [{"id": "a", "prompt": "x"}])
    assert main(["validate", "-f", str(path)]) == 1
    assert "task 'a'" in (told := capsys.readouterr().err)
    assert "test_script" in told
    assert main(["validate", "-f", str(tmp_path / "tasks.jsonl"), "--handler", "math"]) == 1
    assert "answer" in capsys.readouterr().err


def test_a_network_for_a_handler_that_cannot_have_it_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    network = {"eval": {"network": "allowlist", "allowedHosts": ["pypi.org"]}}
    code = {"id": "c", "prompt": "x", "tests": {"cases": [{"input": "", "output": ""}]}}
    path = write(tmp_path, changed(handler="code", stages=network), [code])
    assert main(["validate", "-f", str(path)]) == 1
    assert "task 'c': stages.eval.network: its handler runs no tests" in capsys.readouterr().err
    assert main(["validate", "-f", str(write(tmp_path, changed(stages=network), [TASK]))]) == 0


def test_each_task_and_each_document_is_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hosts = {"network": "allowlist", "allowedHosts": ["*.example.org"]}
    asked = [["a.example.org"], ["other.org"], None, ["a.example.org", "third.org"]]
    tasks = [
        {**TASK, "id": f"t{place}", "sandbox": {} if names is None else {"allowedHosts": names}}
        for place, names in enumerate(asked)
    ]
    path = write(tmp_path, changed(sandbox=hosts), tasks)
    assert main(["validate", "-f", str(path)]) == 1
    told = capsys.readouterr().err
    assert "task 't1': sandbox.allowedHosts: other.org is not among" in told
    assert "task 't3': sandbox.allowedHosts: third.org is not among" in told
    assert told.count("is not among") == 2
    # A good job beside a bad one does not make the file good, in any order.
    other = {**changed(handler="swedish"), "metadata": {"name": "other"}}
    for documents in ((JOB, other), (other, JOB)):
        path = write(tmp_path, JOB)
        path.write_text("\n---\n".join(json.dumps(one) for one in documents))
        assert main(["validate", "-f", str(path)]) == 1
        said = capsys.readouterr()
        assert "RolloutJob 'other': spec.handler: no handler 'swedish'" in said.err
        assert "RolloutJob 'j': " not in said.err


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"", "holds no document"),
        (b"a: [", "not valid YAML: line "),
        (b"\xff\xfe\x00", "not UTF-8"),
    ],
)
def test_files_that_are_no_manifests(
    content: bytes, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(content)
    assert main(["submit", "-f", str(path)]) == 1
    error = capsys.readouterr().err
    assert told in error
    assert str(path) in error


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("tasks.jsonl", f"{json.dumps(TASK)}\n{json.dumps(TASK)}\n".encode()),
        ("tasks.json", json.dumps(TASK).encode()),
        ("tasks.jsonl.gz", b"\x1f\x8b\x08\x00"),
        ("tasks.parquet", b"PAR1"),
    ],
)
def test_a_list_of_tasks_is_no_manifest(
    name: str, content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["submit", "-f", str(tmp_path / name)]) == 1
    assert f"{name}: a list of tasks, and not a manifest; give a manifest" in capsys.readouterr().err
    (tmp_path / "manifest.json").write_text('{"kind": "RolloutJob"}')
    assert main(["submit", "-f", str(tmp_path / "manifest.json")]) == 1
    assert "apiVersion: must be" in capsys.readouterr().err


def test_ctrl_c_says_that_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollyard.jobs.manifests.check_file", Mock(side_effect=KeyboardInterrupt))
    assert main(["validate", "-f", str(write(tmp_path, JOB)), "--oracle"]) == 130
    assert capsys.readouterr().err == "Interrupted; everything that it started is removed\n\n"


def test_empty_task_list_and_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty.jsonl").write_text("\n\n")
    assert main(["validate", "-f", str(tmp_path / "empty.jsonl")]) == 1
    assert "empty: give at least one task" in capsys.readouterr().err
    assert main(["validate", "-f", str(tmp_path / "none.yaml")]) == 1
    assert "none.yaml" in capsys.readouterr().err


def test_up_refuses_what_it_cannot_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], free_port: int
) -> None:
    assert main(["up", "--backend", "gpu-host:8000"]) == 2
    assert "must be a URL" in capsys.readouterr().err
    assert main(["up", "--model", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["up", "--sandbox", "process", "--no-sandbox-templates"]) == 2
    assert "--no-sandbox-templates goes with --sandbox bubblewrap" in capsys.readouterr().err
    assert main(["up", "--sandbox", "process", "--sandbox-tools", str(tmp_path)]) == 2
    assert "--sandbox-tools goes with --sandbox bubblewrap, apptainer" in capsys.readouterr().err
    assert main(["up", "--allow-sandbox-host", "localhost"]) == 2
    assert "--allow-sandbox-host: 'localhost' is not a host" in capsys.readouterr().err
    assert main(["up", "--allow-eval-host", "localhost"]) == 2
    assert "--allow-eval-host: 'localhost' is not a host" in capsys.readouterr().err
    assert main(["up", "--verify-python", str(tmp_path / "none")]) == 2
    assert "is not a program that can be run" in capsys.readouterr().err
    assert main(["up", "--backend", f"http://127.0.0.1:{free_port}", "--model", "m"]) == 1
    assert "does not answer as a vLLM-compatible server" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("engine", "files", "missing"),
    [
        ("embedded", (), "no genai_config.json, no tokenizer.json, no *.onnx"),
        (
            "embedded",
            ("config.json", "tokenizer.json", "model.safetensors"),
            "no genai_config.json, no *.onnx",
        ),
        ("vllm", (), "no config.json, no tokenizer.json, no *.safetensors, *.bin or *.pt"),
        ("vllm", ("config.json", "model.safetensors"), "no tokenizer.json;"),
        ("vllm", ("config.json", "tokenizer.json", "tokenizer.bin.txt"), "no *.safetensors"),
        ("vllm", ("tokenizer.json", "pytorch_model.bin"), "no config.json;"),
    ],
)
@pytest.mark.parametrize("detach", [(), ("--detach",)])
def test_up_refuses_a_folder_without_a_model(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    engine: str,
    files: tuple[str, ...],
    missing: str,
    detach: tuple[str, ...],
) -> None:
    folder, home = tmp_path / "m", tmp_path / "h"
    folder.mkdir()
    for name in files:
        (folder / name).touch()
    assert main(["up", "--engine", engine, "--model", str(folder), "--home", str(home), *detach]) == 2
    assert f"--model: {folder} has {missing}" in capsys.readouterr().err
    assert not home.exists()


def test_a_model_folder_is_whole(tmp_path: Path) -> None:
    check_model_folder(shipped_model(), "embedded", ())
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).touch()
    check_model_folder(tmp_path, "vllm", ("--load-format=dummy",))
    (tmp_path / "model-00001-of-00002.safetensors").touch()
    check_model_folder(tmp_path, "vllm", ())


BRIDGE = ["slurm-bridge", "up"]
JOINED = ["--join", "https://head:8765", "--token-file", "t.json", "--namespace", "team-a"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--join", "https://head:8765"], "--join and --token-file belong together"),
        (["--join", "head:8765", *JOINED[2:]], "must be a URL such as http://head:8765"),
        ([*JOINED, "--engine", "embedded"], "submit a BackendPool that says `placement: slurm`"),
        (["--listen", "unix", "--port", "80"], "no meaning with --listen unix"),
        (JOINED[:4], "--join needs --namespace NAME (repeatable) or --all-namespaces"),
        ([*JOINED, "--all-namespaces"], "--join needs --namespace NAME (repeatable) or --all-namespaces"),
        ([*JOINED, "--namespace", "Team B"], "--namespace must be a name such as team-a (got 'Team B')"),
        (["--namespace", "team-a"], "--namespace and --all-namespaces go with --join"),
        ([*JOINED, "--no-backend-seconds", "60"], "--no-backend-seconds is for a control plane of its own"),
        (
            [*JOINED, "--allow-sandbox-host", "pypi.org"],
            "--allow-sandbox-host is for a control plane of its own",
        ),
        ([*JOINED, "--allow-eval-host", "pypi.org"], "--allow-eval-host is for a control plane of"),
        (["--allow-eval-host", "pypi.org=x"], "--allow-eval-host: 'pypi.org=x': an address or a network"),
        (["--allow-sandbox-host", "10.0.0.1"], "--allow-sandbox-host: '10.0.0.1' is not a host"),
        (["--no-sandbox-templates"], "--no-sandbox-templates goes with --sandbox bubblewrap"),
        (["--sandbox", "process", "--sandbox-tools", "/opt"], "--sandbox-tools goes with --sandbox bubblew"),
        (["--allow-image", "any", "--allow-image", "/x"], "--allow-image any stands alone"),
        (["--allow-image", "http://x/"], "give a path, or a reference such as docker://HOST/PREFIX/"),
        (["--build-dockerfiles", "--sandbox", "bubblewrap"], "--build-dockerfiles goes with --sandbox appt"),
        (["--fakeroot", "--sandbox", "bubblewrap"], "--fakeroot goes with --sandbox apptainer"),
        (["--no-backend-seconds", "0"], "'--no-backend-seconds': 0.0 is not in the range"),
    ],
)
def test_a_bridge_refuses_what_it_cannot_use(
    options: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BRIDGE, "--home", str(tmp_path / "h"), *options]) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "h").exists()


def test_a_bridge_passes_on_what_workers_may_do_with_images(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = [*BRIDGE, "--home", str(tmp_path / "h"), "--dry-run"]
    assert main(common) == 0
    shown = capsys.readouterr().out
    assert "--fakeroot" not in shown
    assert "--build-dockerfiles" not in shown
    assert main([*common, "--fakeroot", "--build-dockerfiles"]) == 0
    assert "--fakeroot --build-dockerfiles" in capsys.readouterr().out


def test_a_dry_run_shows_how_workers_reach_the_control_plane(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "h"
    common = [*BRIDGE, "--home", str(home), "--sandbox", "process", "--dry-run"]
    assert main([*common, *JOINED, "--ca-file", "authority.crt"]) == 0
    shown = capsys.readouterr().out
    assert "--url https://head:8765 " in shown
    assert f"export ROLLYARD_CA_FILE={home}/ca.crt" in shown
    assert "--allow-image none" in shown
    assert main([*common, *JOINED, "--allow-image", "images", "--allow-image", "docker://hub/x/"]) == 0
    assert f"--allow-image {Path.cwd()}/images --allow-image docker://hub/x/" in capsys.readouterr().out
    assert main([*common, "--listen", "unix"]) == 0
    shown = capsys.readouterr().out
    assert "--url http+unix://%2F" in shown
    assert "--allow-image" not in shown, "jobs of its own control plane are the user's own"
    bubblewrap = [*BRIDGE, "--home", str(home), "--sandbox", "bubblewrap", "--dry-run", "--listen", "unix"]
    assert main([*bubblewrap, "--no-sandbox-templates"]) == 0
    assert "--sandbox bubblewrap --no-sandbox-templates" in capsys.readouterr().out
    assert main([*bubblewrap, "--sandbox-tools", str(tmp_path)]) == 0
    assert f"--sandbox-tools {tmp_path}" in capsys.readouterr().out


def test_down_with_nothing_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["down", "--home", str(tmp_path / "h")]) == 0
    assert "nothing runs on" in capsys.readouterr().out


def test_a_url_that_is_none_and_a_kind_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get", "--url", "gpu-host:8765"]) == 2
    assert (
        "--url must be a URL such as http://127.0.0.1:8765 (got 'gpu-host:8765')" in capsys.readouterr().err
    )
    assert main(["describe", "rj"]) == 2
    assert "give the NAME too: rollyard describe rj NAME" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    out = tmp_path / "file" / "out"
    assert main(["quickstart", "--out", str(out)]) == 1
    assert f"--out {out} cannot be written: Not a directory" in capsys.readouterr().err


@pytest.mark.parametrize(("context", "told"), [("", "no cluster is configured"), ("far", "does not answer")])
def test_doctor_without_a_cluster(
    context: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """kubectl behaves as it does without a context, and with one whose server is away."""
    kubectl = tmp_path / "kubectl"
    refused = "The connection to the server was refused - did you specify the right host or port?"
    answer = f"echo {context}" if context else "echo 'error: current-context is not set' >&2; exit 1"
    kubectl.write_text(
        f'#!/bin/sh\n[ "$1" = config ] && {{ {answer}; exit; }}\necho "{refused}" >&2; exit 1\n'
    )
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    found = check_cluster()
    assert (found.verdict, told in found.state) == ("optional", True), found
    assert "KUBECONFIG" in found.advice
    assert ("refused" in found.state) == bool(context), "without a context the refusal says nothing"
