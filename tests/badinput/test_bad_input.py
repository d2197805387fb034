"""Bad input, end to end: the real command line and REST, control plane, workers and bubblewrap.

Every test asks for the message (which field, and what would be right), for the exit status or HTTP status and
reason, and that nothing half-done stays: no job, no sandbox and no process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_testing.manifests import job_manifest, pool_manifest
from rollyard_testing.pace import patience

pytestmark = pytest.mark.slow

TASK: dict[str, Any] = {
    "id": "a",
    "prompt": "x",
    "test_script": "[ -e finished ]",
    "solution": [{"name": "bash", "arguments": {"command": "touch finished"}}],
}
SMALL = {"resources": {"memory": "192Mi", "disk": "16Mi", "processes": 64}, "warm": 0}


def manifest(name: str, **spec: Any) -> dict[str, Any]:
    """Return an oracle's job of one task, with these fields of the spec changed."""
    return job_manifest(
        name,
        {
            "tasks": {"inline": [TASK]},
            "handler": "shell",
            "agent": {"type": "oracle", "tools": ["bash"]},
            "sandbox": SMALL,
            **spec,
        },
    )


def replaying(command: str) -> dict[str, Any]:
    """Return a task source whose oracle runs one command."""
    return {"inline": [{**TASK, "solution": [{"name": "bash", "arguments": {"command": command}}]}]}


def external(name: str, url: str, tokenizer: Path) -> dict[str, Any]:
    engine = {"type": "external", "external": {"urls": [url]}}
    return pool_manifest(name, {"model": "policy", "tokenizer": str(tokenizer), "engine": engine})


def endless() -> dict[str, Any]:
    """Return a job of two rollouts that do not end by themselves."""
    return manifest(
        "endless",
        tasks=replaying("sleep 4000"),
        samplesPerTask=2,
        agent={"type": "oracle", "tools": ["bash"], "toolTimeoutSeconds": 3600},
        stages={"run": {"timeoutSeconds": 3600}},
    )


# These jobs run until they end. They are started together, so the tests wait for them side by side.

BACKENDS = ("error", "hang", "lengths", "garbage", "closes", "busy", "overflow")
TOKENIZER = Path(__file__).resolve().parents[2] / "engine/src/rollyard_engine/models/tiny-policy"


@pytest.fixture(scope="module")
def started(desk: Any) -> Any:
    """Return the desk with every job submitted that gets as far as a worker."""
    with desk.yard.http() as http:
        for kind in BACKENDS:
            pool = external(f"pool-{kind}", f"{desk.backends}/{kind}", TOKENIZER)
            assert http.post("/v1/backendpools", json=pool).status_code == 201
    for kind in BACKENDS:
        # Backends that answer wrongly are asked three times, with the pauses of an open circuit between.
        seconds = 60 if kind in ("lengths", "garbage", "busy", "overflow") else 4
        stages = {"run": {"timeoutSeconds": seconds, "maxAttempts": 3 if kind == "overflow" else 1}}
        desk.submit(
            manifest(
                f"backend-{kind}",
                agent={"type": "tools", "tools": ["bash"]},
                backendRef={"name": f"pool-{kind}"},
                stages=stages,
                samplesPerTask=2,
            )
        )
    desk.submit(manifest("image", sandbox={**SMALL, "image": "docker://python:3.12-slim"}))
    desk.submit(manifest("fills", tasks=replaying("dd if=/dev/zero of=big bs=1M count=64 && touch finished")))
    # tail keeps all that it reads, because there is no line end: that is more than the sandbox may have.
    hungry = "head -c 500M /dev/zero | tail > kept && touch finished"
    desk.submit(manifest("hungry", tasks=replaying(hungry)))
    desk.submit(endless())
    return desk


# These are refused before anything starts.


@pytest.mark.parametrize(
    ("spec", "reason", "words"),
    [
        (
            {"color": "red"},
            "InvalidManifest",
            ["spec.color: unknown field; known: tasks, handler, reward, samplesPerTask, "],
        ),
        (
            {"agent": {"type": "oracle", "maxTurn": 3}},
            "InvalidManifest",
            ["spec.agent.maxTurn: unknown field"],
        ),
        (
            {"samplesPerTask": "eight"},
            "InvalidManifest",
            ["spec.samplesPerTask: must be a whole number", "(got 'eight')"],
        ),
        ({"tasks": [TASK]}, "InvalidManifest", ["spec.tasks: "]),
        ({"samplesPerTask": 0}, "InvalidManifest", ["spec.samplesPerTask: ", "must be at least 1"]),
        ({"tasks": {"inline": []}}, "InvalidManifest", ["spec.tasks: 'inline' must hold at least one task"]),
        (
            {"handler": "shel"},
            "NotInstalled",
            ["spec.handler: no handler 'shel' is offered; offered: code, harbor, math, mixed, shell, stem"],
        ),
        (
            {"agent": {"type": "oracle", "tools": ["bash", "hammer"]}},
            "NotInstalled",
            ["spec.agent.tools[1]: no tool 'hammer' is offered; offered: bash, edit, ipython, submit"],
        ),
    ],
)
def test_a_wrong_field(desk: Any, spec: dict[str, Any], reason: str, words: list[str]) -> None:
    desk.refused(manifest("wrong", **spec), reason, *words)


def test_broken_line_7312(desk: Any) -> None:
    lines = [json.dumps({**TASK, "id": f"t{number}"}) for number in range(1, 8001)]
    lines[7311] = '{"id": "t7312", "prompt": '
    path = desk.folder / "broken.jsonl"
    path.write_text("\n".join(lines) + "\n")
    url = path.as_uri()
    desk.refused(
        manifest("broken", tasks={"url": url}),
        "InvalidTasks",
        url,
        "spec.tasks.url",
        "line 7312: not valid JSON",
    )
    lines[7311] = json.dumps({"id": "t7312", "promt": "x"})
    path.write_text("\n".join(lines) + "\n")
    desk.refused(manifest("broken", tasks={"url": url}), "InvalidTasks", "line 7312: ", ": unknown field")
    said = desk.cli("submit", "-f", desk.write(manifest("broken", tasks={"url": url})))
    assert "line 7312: promt: unknown field; did you mean 'prompt'?" in said.err, "it is one's own upload"
    lines[7311] = json.dumps(TASK | {"id": "t1"})
    path.write_text("\n".join(lines) + "\n")
    desk.refused(
        manifest("broken", tasks={"url": url}), "InvalidTasks", "line 7312: id: ", "stands already on line 1"
    )


def test_empty_task_list(desk: Any) -> None:
    path = desk.folder / "empty.jsonl"
    path.write_text("\n\n")
    desk.refused(
        manifest("empty", tasks={"url": path.as_uri()}),
        "InvalidTasks",
        "spec.tasks.url",
        "empty: give at least one task",
    )
    missing = desk.folder / "nowhere.jsonl"
    desk.refused(
        manifest("missing", tasks={"url": missing.as_uri()}),
        "InvalidTasks",
        "spec.tasks.url",
        "nowhere.jsonl",
        "No such file",
    )


def test_two_jobs_of_one_name(desk: Any) -> None:
    desk.submit(manifest("twin", suspend=True))
    before = desk.job("twin")
    said = desk.cli("submit", "-f", desk.write(manifest("twin", suspend=True)))
    assert said.status == 0, "the same manifest twice is the same as once"
    other = manifest("twin", suspend=True, samplesPerTask=2)
    said = desk.cli("submit", "-f", desk.write(other))
    assert said.status == 1
    words = "RolloutJob 'twin' exists in namespace 'default' with another spec; delete it first or choose "
    assert f"{words}another name (--name NEW)" in said.err
    with desk.yard.http() as http:
        answer = http.post("/v1/rolloutjobs", json=other)
        assert (answer.status_code, answer.headers["Content-Type"]) == (409, "application/problem+json")
        assert "another spec" in answer.json()["detail"]
    after = desk.job("twin")
    assert (after["spec"], after["metadata"]["uid"]) == (before["spec"], before["metadata"]["uid"])
    assert after["status"]["counts"]["total"] == 1
    with desk.yard.http() as http:
        assert http.delete("/v1/rolloutjobs/twin").status_code == 202
    desk.cleared("twin")


# These are accepted, and end badly.


def assert_infrastructure_failure(desk: Any, name: str, reason: str, told: str, count: int) -> None:
    """Check that each rollout failed with reward null, this reason and a message; nothing is left."""
    job = desk.ended(name)
    assert job["status"]["phase"] == "Failed"
    assert job["status"]["counts"] | {"failed": count, "total": count} == job["status"]["counts"]
    assert job["status"].get("rewardMean") is None
    conditions = desk.conditions(name)
    assert conditions["Finished"] == ("True", "TooManyFailures")
    assert conditions["Failed"] == ("True", "TooManyFailures")
    found = desk.trajectories(name)
    assert len(found) == count
    for record in found:
        assert (record["status"], record["reason"], record["reward"]) == ("failed", reason, None), record
        assert told in record["message"]
    shown = desk.cli("describe", name)
    assert f"{reason}: " in shown.out
    assert told in shown.out
    watched = desk.cli("watch", name)
    assert watched.status == 1
    assert f"job '{name}' is Failed" in watched.err
    assert f"rollyard view {name} --failed" in watched.err
    desk.cleared(name)


def test_an_image_that_bubblewrap_cannot_use(started: Any) -> None:
    told = "'docker://python:3.12-slim': bubblewrap starts no container or SIF images; name a folder"
    assert_infrastructure_failure(started, "image", "ImageNotUsable", told, 1)
    (record,) = started.trajectories("image")
    assert (record["segments"], record["turns"]) == ([], [])


@pytest.mark.parametrize(
    ("kind", "reason", "words"),
    [
        ("error", "BackendUnavailable", "answered 500"),
        ("hang", "BackendUnavailable", "Run's limit of 4 s"),
        ("lengths", "BackendMismatch", "2 token_ids but 1 logprobs"),
        ("garbage", "BackendMismatch", "the answer is not JSON"),
        ("closes", "BackendUnavailable", "Run's limit of 4 s"),
    ],
)
def test_a_backend_that_answers_wrongly(started: Any, kind: str, reason: str, words: str) -> None:
    assert_infrastructure_failure(started, f"backend-{kind}", reason, words, 2)
    if kind == "closes":  # It closes the connection in the middle of an answer.
        assert "/closes/inference/v1/generate" in started.trajectories("backend-closes")[0]["message"]


def test_a_backend_that_is_busy_is_waited_for(started: Any) -> None:
    job = started.ended("backend-busy")
    assert (job["status"]["phase"], job["status"]["counts"]["failed"]) == ("Succeeded", 0)
    for record in started.trajectories("backend-busy"):
        assert (record["status"], record["reward"], len(record["turns"])) == ("succeeded", 0.0, 1)
    started.cleared("backend-busy")


@pytest.mark.attack(
    "a task gets attempt after attempt, or a reward without a sampled token; a policy fills its context "
    "to fail instead of being scored",
    boundary="control plane",
    surface="prompts longer than the context",
    stopped_by="without a sampled turn a rollout fails once and for all (`PromptTooLong`); after one it "
    "is truncated and scored",
)
def test_a_first_prompt_beyond_the_servers_context_fails_and_gets_no_other_attempt(started: Any) -> None:
    told = "and the server's context is 8: raise the limit, or shorten the prompt"
    assert_infrastructure_failure(started, "backend-overflow", "PromptTooLong", told, 2)
    for record in started.trajectories("backend-overflow"):
        tried = [(one["stage"], one["attempt"], one["reason"]) for one in record["attempts"]]
        assert (tried, record["attempt"]) == ([("run", 1, "PromptTooLong")], 1)
        assert record["timings"]["eval"]["attempts"] == 0


def test_a_server_of_another_model_gets_no_rollouts(desk: Any) -> None:
    """The server is refused by name.

    The pool and its job say so, and the job waits for a server of its model.
    """
    with desk.yard.http() as http:
        pool = external("pool-foreign", f"{desk.backends}/foreign", TOKENIZER)
        assert http.post("/v1/backendpools", json=pool).status_code == 201
    agent = {"type": "tools", "tools": ["bash"]}
    desk.submit(manifest("foreign", agent=agent, backendRef={"name": "pool-foreign"}))
    told = "the server does not serve 'policy'; it serves: another"
    desk.until(lambda: told in desk.cli("describe", "bp", "pool-foreign").out.replace("\n", " "))
    desk.until(lambda: desk.conditions("foreign").get("Running") == ("False", "BackendPoolNotReady"))
    assert desk.job("foreign")["status"]["counts"]["failed"] == 0
    assert desk.cli("cancel", "foreign").status == 0
    desk.ended("foreign")
    desk.cleared("foreign")


def test_a_model_without_a_chat_template(desk: Any, tmp_path: Path) -> None:
    folder = tmp_path / "bare"
    folder.mkdir()
    (folder / "tokenizer.json").write_bytes((TOKENIZER / "tokenizer.json").read_bytes())
    with desk.yard.http() as http:
        pool = external("pool-bare", f"{desk.backends}/sound", folder)
        assert http.post("/v1/backendpools", json=pool).status_code == 201
    agent = {"type": "tools", "tools": ["bash"]}
    desk.submit(manifest("bare", agent=agent, backendRef={"name": "pool-bare"}))
    assert_infrastructure_failure(desk, "bare", "TokenizerUnavailable", "chat_template.jinja", 1)


def test_a_weight_folder_that_misses_a_shard(desk: Any, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    folder.mkdir()
    (folder / "config.json").write_text('{"vocab_size": 1068}')
    names = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    shards = {"weight_map": {"a": names[0], "b": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
    (folder / names[0]).write_bytes(b"\2\0\0\0\0\0\0\0{}")
    body = {"policyVersion": "v1", "source": {"checkpoint": {"path": str(folder)}}}
    with desk.yard.http() as http:
        answer = http.post("/v1/backendpools/default/weights", json=body)
        assert (answer.status_code, answer.headers["Content-Type"]) == (422, "application/problem+json")
        assert names[1] in answer.json()["detail"]
        assert http.get("/v1/backendpools/default/weights").json()["items"] == []


def test_a_backend_that_is_none(desk: Any) -> None:
    """A `--backend` that does not speak vLLM's protocol is refused before anything starts."""
    home = desk.folder / "none"
    # The address answers HTTP, and has no model.
    own = json.loads((desk.yard.home / "context.json").read_text())["url"]
    said = desk.cli("up", "--home", str(home), "--backend", own)
    assert said.status == 1
    assert "GET /v1/models does not answer as a vLLM-compatible server does" in said.err
    assert not home.exists()


def test_a_disk_that_the_policy_fills_is_scored(started: Any) -> None:
    job = started.ended("fills")
    assert job["status"]["phase"] == "Succeeded"
    (record,) = started.trajectories("fills")
    assert (record["status"], record["reward"]) == ("succeeded", 0.0), "the policy's own failing"
    (observation,) = [message["content"] for message in record["messages"] if message["role"] == "tool"]
    assert "No space left on device" in observation
    started.cleared("fills")


def test_memory_that_the_policy_exhausts_is_scored(started: Any) -> None:
    if not any(Path("/sys/fs/cgroup").glob("**/rollyard")):
        pytest.skip("no memory control group here: programs get MemoryError instead")
    job = started.ended("hungry")
    assert job["status"]["phase"] == "Succeeded"
    (record,) = started.trajectories("hungry")
    assert (record["truncated"], record["truncated_reason"]) == (True, "SandboxOutOfMemory")
    assert (record["status"], record["reward"]) == ("succeeded", 0.0), "the policy's own failing"
    started.cleared("hungry")


def test_a_cancelled_job(started: Any) -> None:
    def running() -> list[str]:
        return [
            entry.name
            for entry in Path("/proc").iterdir()
            if entry.name.isdigit() and _command(entry) == b"sleep\x004000\x00"
        ]

    def at_work() -> int:
        active: int = started.job("endless")["status"]["counts"]["run"]["active"]
        return active

    started.until(lambda: at_work() == 2 and len(running()) == 2)
    said = started.cli("cancel", "endless")
    assert (said.status, said.err) == (0, "")
    assert "endless" in said.out
    job = started.ended("endless")
    assert (job["status"]["phase"], job["status"]["counts"]["cancelled"]) == ("Cancelled", 2)
    conditions = started.conditions("endless")
    assert (conditions["Finished"][0], conditions["Failed"]) == ("True", ("True", "Cancelled"))
    for record in started.trajectories("endless"):
        assert (record["status"], record["reward"]) == ("cancelled", None)
        assert record["reason"]
    again = started.cli("cancel", "endless")
    assert again.status == 0
    assert "had ended already (Cancelled)" in again.out
    waited = started.cli("submit", "-f", started.write(endless()), "--wait")
    assert waited.status == 1
    assert "job 'endless' is Cancelled" in waited.err
    started.cleared("endless")
    assert running() == [], "no process of a cancelled rollout stays"


def _command(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""


# It is the control plane itself.


@pytest.mark.parametrize(
    "command",
    ["get", "describe x", "watch x", "cancel x", "view x", "trajectories x -o x.jsonl", "submit -f j.yaml"],
)
def test_no_server(command: str, cli: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "j.yaml").write_text(json.dumps(manifest("j")))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
        said = cli(*command.split(), "--url", url, home=tmp_path / "h", cwd=tmp_path)
    assert (said.status, said.out) == (1, "")
    assert said.err == f"rollyard: no server at {url}; start one with `rollyard up`\n"
    assert not (tmp_path / "h").exists()
    assert not (tmp_path / "x.jsonl").exists()


def test_a_port_in_use(cli: Callable[..., Any], tmp_path: Path, backends: str) -> None:
    port = backends.rpartition(":")[2]
    home = tmp_path / "h"
    arguments = ["up", "--home", str(home), "--port", port, "--sandbox", "process"]
    said = cli(*arguments, "--backend", f"{backends}/sound", "--tokenizer", str(TOKENIZER), cwd=tmp_path)
    assert said.status != 0
    assert f"port {port}" in said.err
    assert "--port" in said.err
    assert len(said.err.strip().splitlines()) == 1
    assert not (home / "context.json").exists()
    assert not list((home / "pids").glob("*.json"))
    assert cli("get", home=home).status == 1


@pytest.fixture
def tiny(tmp_path: Path) -> Iterator[Path]:
    """Yield a file system of 16 MiB."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode != 0:
        if os.environ.get("ROLLYARD_REQUIRE_REAL") == "1":
            pytest.fail("a small tmpfs can be mounted by root only")
        pytest.skip("a small tmpfs can be mounted by root only")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_under_the_control_plane(tiny: Path, tmp_path: Path, cli: Callable[..., Any]) -> None:
    """Submitting is refused with 507 and one line, reading still works, and with room everything does."""
    port_file = tmp_path / "port"
    command = [sys.executable, "-m", "rollyard_api", "--state-dir", str(tiny / "state"), "--port", "0"]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen([*command, "--port-file", str(port_file)], stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + patience(40)
        while not port_file.exists():
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        token = json.loads((tiny / "state" / "tokens.json").read_text())["admin"]
        home = tmp_path / "home"
        home.mkdir()
        (home / "context.json").write_text(
            json.dumps({"url": url, "token_file": str(tiny / "state" / "tokens.json")})
        )
        http = httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}, timeout=patience(20))
        with http:
            assert http.post("/v1/rolloutjobs", json=manifest("early")).status_code == 201
            free = os.statvfs(tiny).f_bavail * os.statvfs(tiny).f_frsize
            (tiny / "filler").write_bytes(b"x" * (free - 64 * 1024))
            tasks = {
                "inline": [{**TASK, "id": f"t{i}", "prompt": os.urandom(20_000).hex()} for i in range(40)]
            }
            big = manifest("big", tasks=tasks)
            (tmp_path / "big.yaml").write_text(json.dumps(big))
            answer = http.post("/v1/rolloutjobs", json=big)
            assert (answer.status_code, answer.json()["reason"]) == (507, "StorageFull")
            assert answer.headers["Content-Type"] == "application/problem+json"
            said = cli("submit", "-f", "big.yaml", home=home, cwd=tmp_path)
            assert (said.status, said.out) == (1, "")
            assert (
                "no space left for the database; nothing was kept, try again when there is room" in said.err
            )
            assert http.get("/v1/rolloutjobs/big").status_code == 404
            assert http.get("/v1/rolloutjobs/early").status_code == 200
            assert http.get("/healthz").status_code == 200
            (tiny / "filler").unlink()
            said = cli("submit", "-f", "big.yaml", home=home, cwd=tmp_path)
            assert said.status == 0, said.err
            assert http.get("/v1/rolloutjobs/big").json()["status"]["counts"]["total"] == 40
        process.send_signal(signal.SIGTERM)
        assert process.wait(patience(20)) == 0
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
