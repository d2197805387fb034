"""Batch scripts: what they ask for, and how bash carries signals and exit statuses through them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from pydantic import ValidationError
from rollyard_drivers.reconcile.plan import Owner, Workload
from rollyard_slurm.errors import BridgeError
from rollyard_slurm.node import command_for
from rollyard_slurm.profile import SiteProfile, load
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.scripts.batch import batch_script
from rollyard_slurm.scripts.site import Site
from rollyard_testing.pace import patience

OWNER = Owner("RolloutJob", "default", "qs", "12345678-aaaa")

WORKER = Workload(
    name="qs-12345678-worker-0",
    kind="stage-worker",
    owner=OWNER,
    stages=("init", "run", "eval"),
    concurrency=(("init", 4), ("run", 8), ("eval", 2)),
)


def site(profile: SiteProfile | None = None, **changes: object) -> Site:
    given = {
        "home": Path("/shared/h"),
        "instance": "abcd1234",
        "url": "http://10.0.0.1:9000",
        "profile": profile or SiteProfile(),
        "python": "/env/bin/python",
        **changes,
    }
    return Site(**given)  # type: ignore[arg-type]


def script(workload: Workload, of: Site) -> str:
    return batch_script(workload, of, SlurmJobIdentity.of(workload, of.instance, "ffff00000000", 3)).text()


BACKEND = Workload(
    name="p-12345678-backend-1",
    kind="backend",
    owner=Owner("BackendPool", "default", "p", "12345678-bbbb"),
    index=1,
    engine="vllm",
    model="/models/Qwen 3",
    args=("--max-model-len=4096",),
    env=(("HF_HOME", "/cache it's"),),
    gpus=2,
)


def directives(text: str) -> dict[str, str]:
    found = re.findall(r"^#SBATCH (--[\w-]+)(?:=(.*))?$", text, re.MULTILINE)
    return dict(found)


def test_a_worker_asks_for_what_the_profile_says() -> None:
    profile = SiteProfile.model_validate(
        {
            "partition": "cpu",
            "account": "proj",
            "timeLimit": "4:00:00",
            "sbatch": ["--licenses=x:1"],
            "env": {"A": "1"},
            "prolog": ["module load apptainer"],
            "workers": {"cpus": 8, "memory": "16G", "constraint": "avx2&ib", "env": {"B": "it's"}},
            "backends": {"partition": "gpu"},
        }
    )
    text = script(WORKER, site(profile))
    found = directives(text)
    assert found["--partition"] == "cpu"
    assert found["--account"] == "proj"
    assert found["--time"] == "4:00:00"
    assert (found["--cpus-per-task"], found["--mem"]) == ("8", "16G")
    assert found["--constraint"] == '"avx2&ib"'
    assert found["--signal"] == "B:USR1@90"
    assert found["--licenses"] == "x:1"
    assert "--requeue" in found
    assert "--gres" not in found
    assert "export A=1\nexport B='it'\"'\"'s'\nmodule load apptainer\n" in text
    assert "--token-file /shared/h/tokens/default.qs.12345678" in text
    assert "--stages init,run,eval --concurrency init=4,run=8,eval=2" in text
    assert "--sandbox apptainer" in text
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_a_backend_gets_gpus_and_its_image() -> None:
    profile = SiteProfile.model_validate(
        {"backends": {"partition": "gpu", "image": "/img/vllm.sif", "execOptions": ["--bind=/models"]}}
    )
    text = script(BACKEND, site(profile))
    found = directives(text)
    assert (found["--partition"], found["--gres"]) == ("gpu", "gpu:2")
    assert "--mem" not in found, "a GPU's share of memory is the site's to say"
    assert "apptainer exec --nv --bind=/models /img/vllm.sif vllm serve '/models/Qwen 3'" in text
    assert "export VLLM_SERVER_DEV_MODE=1" in text
    assert "--endpoint /shared/h/endpoints/ffff00000000.json --toward http://10.0.0.1:9000 --" in text
    other = SiteProfile.model_validate({"backends": {"gres": "gpu:a100:{gpus},nvme"}})
    assert directives(script(BACKEND, site(other)))["--gres"] == "gpu:a100:2,nvme"
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_a_profile_may_bound_the_sandboxes_of_a_node() -> None:
    profile = SiteProfile.model_validate({"workers": {"maxSandboxes": 16}})
    assert " --max-sandboxes 16 " in script(WORKER, site(profile))
    assert "--max-sandboxes" not in script(WORKER, site())


def test_workers_are_told_whom_to_trust() -> None:
    given = replace(site(), ca_file=Path("/shared/h/ca.crt"))
    assert "export ROLLYARD_CA_FILE=/shared/h/ca.crt" in script(WORKER, given)
    assert "ROLLYARD_CA_FILE" not in script(BACKEND, given), "it calls nobody"
    assert "ROLLYARD_CA_FILE" not in script(WORKER, site())


def test_workers_are_told_where_traces_go_and_all_how_to_log() -> None:
    variables = (
        ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://c:4318/v1/traces"),
        ("ROLLYARD_LOG_FORMAT", "json"),
    )
    given = replace(site(), telemetry=variables)
    for name, value in variables:
        assert f"export {name}={value}" in script(WORKER, given)
        assert name not in script(WORKER, site())
    assert "export ROLLYARD_LOG_FORMAT=json" in script(BACKEND, given)
    assert "OTEL_" not in script(BACKEND, given), "its pool says whether vLLM sends spans"


def test_strange_folders_are_quoted() -> None:
    text = script(WORKER, site(home=Path('/shared/my "home" 100%')))
    found = directives(text)
    assert found["--chdir"] == '"/shared/my \\"home\\" 100%"'
    assert "100%%/logs/qs-12345678-worker-0-%j.log" in found["--output"]
    assert found["--output"].startswith('"')
    assert found["--output"].endswith('"')
    assert subprocess.run(["bash", "-n"], input=text, text=True).returncode == 0


def test_the_comment_says_whose_it_is() -> None:
    who = SlurmJobIdentity.of(WORKER, "abcd1234", "ffff00000000", 3)
    assert SlurmJobIdentity.parse(who.comment) == who
    assert who.owner == "rolloutjob/default/qs"
    assert not re.search(r"[\s\"']", who.comment)
    for other in ("", "(null)", "rollyard", "rollyard,instance=x", who.comment.replace("ffff", "ff ff")):
        assert SlurmJobIdentity.parse(other) is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("partitions: x", r"partitions: unknown field; did you mean 'partition'\?"),
        ("workers: {memory: lots}", "workers.memory: "),
        ("timeLimit: soon", "timeLimit: must be MINUTES, HOURS:MINUTES:SECONDS or"),
        ("sbatch: [--comment=x]", "sbatch: --comment is set by the bridge"),
        ("sbatch: [gpu]", "sbatch: 'gpu' is not an option"),
        ("workers: {runDir: relative}", "workers.runDir: "),
        (
            "workers: {drainSeconds: 120}",
            r"workers.drainSeconds \(120\) must be less than signalSeconds \(90\)",
        ),
        ("[1, 2]", "must be a mapping"),
        ("a: [", "is not YAML"),
        ("env: {'a b': x}", "env"),
        ("partition: 'a b'", "partition: "),
    ],
)
def test_a_wrong_profile_names_the_field(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text(text)
    with pytest.raises(BridgeError, match=message):
        load(path)


def test_a_profile_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BridgeError, match="cannot be read: No such file"):
        load(tmp_path / "none.yaml")


def test_the_command_line_counts_more_than_the_profile(tmp_path: Path) -> None:
    path = tmp_path / "profile.yaml"
    path.write_text("partition: a\naccount: x\nworkers: {partition: b}\nbackends: {qos: q}\n")
    made = load(path, {"partition": "c", "account": None})
    assert made.of("stage-worker").partition == made.of("backend").partition == "c"
    assert made.of("stage-worker").account == "x"
    assert made.of("backend").qos == "q"
    assert load(path).of("stage-worker").partition == "b"


def test_host_and_port_are_put_in_on_the_node() -> None:
    assert command_for(["e", "--host", "@HOST@", "--port", "@PORT@"], "10.0.0.2", 7) == (
        ["e", "--host", "10.0.0.2", "--port", "7"],
        7,
    )
    assert command_for(["e", "--port=81", "x"], "h", 7)[1] == 81
    assert command_for(["e", "--port", "82"], "h", 7)[1] == 82


def test_beside_a_control_plane_on_a_socket_all_is_one_node(tmp_path: Path) -> None:
    told = tmp_path / "endpoint.json"
    words = ["--endpoint", str(told), "--toward", "http+unix://%2Fh%2Fapi.sock", "--", "echo", "@HOST@"]
    done = subprocess.run(
        [sys.executable, "-m", "rollyard_slurm.node", *words],
        capture_output=True,
        text=True,
        timeout=patience(50),
    )
    assert (done.returncode, done.stdout) == (0, "127.0.0.1\n")
    assert json.loads(told.read_text())["url"].startswith("http://127.0.0.1:")


# How bash runs it.

CHILD = """\
import signal, sys, time
def end(number, frame):
    print("told", flush=True)
    global count
    count += 1
    if count >= {terms}:
        sys.exit({code})
count = 0
signal.signal(signal.SIGTERM, end)
print("up", flush=True)
while True:
    time.sleep(0.05)
"""


class Ran:
    """The tail of a batch script with another program in it."""

    def __init__(self, tmp_path: Path, program: str) -> None:
        (tmp_path / "child.py").write_text(program)
        text = script(WORKER, site())
        tail = text[text.index("begin() {") :]
        body = f"program=({sys.executable} {tmp_path / 'child.py'})\n{tail}"
        self.out = tmp_path / "out"
        with self.out.open("w") as out:
            self.process = subprocess.Popen(["bash", "-c", body], stdout=out)

    def said(self, *lines: str) -> None:
        deadline = time.monotonic() + patience(20)
        while self.out.read_text().split() != list(lines):
            assert time.monotonic() < deadline, self.out.read_text()
            time.sleep(0.01)

    def end(self) -> int:
        return self.process.wait(patience(20))


@pytest.mark.parametrize("code", [0, 3, 127])
def test_the_programs_exit_status_is_the_jobs(tmp_path: Path, code: int) -> None:
    assert Ran(tmp_path, f"raise SystemExit({code})").end() == code


def test_a_killed_program_shows(tmp_path: Path) -> None:
    ran = Ran(tmp_path, "import os; os.kill(os.getpid(), 9)")
    assert ran.end() == 128 + 9


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR2])
def test_a_signal_drains_and_the_status_is_kept(tmp_path: Path, number: signal.Signals) -> None:
    ran = Ran(tmp_path, CHILD.format(terms=1, code=5))
    ran.said("up")
    os.kill(ran.process.pid, number)
    assert ran.end() == 5


def test_a_second_request_to_drain_changes_nothing_and_a_hurry_does(tmp_path: Path) -> None:
    ran = Ran(tmp_path, CHILD.format(terms=2, code=0))
    ran.said("up")
    os.kill(ran.process.pid, signal.SIGUSR1)
    ran.said("up", "told")
    os.kill(ran.process.pid, signal.SIGUSR1)
    os.kill(ran.process.pid, signal.SIGUSR1)
    # bash takes signals in their order of arrival: had one gone through, the child would say so first.
    os.kill(ran.process.pid, signal.SIGUSR2)
    assert ran.end() == 0
    ran.said("up", "told", "told")


def test_a_node_whose_disk_is_full_is_told_and_keeps_no_empty_name(tmp_path: Path) -> None:
    text = script(WORKER, site()).replace("top=/tmp", f"top={tmp_path}")
    run = tmp_path / f"ry-{os.getuid()}-abcd1234" / "cn1"
    head = text[text.index("node=") : text.index("name=qs")]
    env = {"PATH": os.environ["PATH"], "SLURMD_NODENAME": "cn1", "SLURM_JOB_ID": "7"}
    # No file may grow, which is nearest to a full disk without a disk.
    full = subprocess.run(
        ["bash", "-c", f"trap '' XFSZ; ulimit -f 0\n{head}"], env=env, capture_output=True, text=True
    )
    assert full.returncode == 73
    assert "is the disk of cn1 full?" in full.stderr
    assert not run.exists(), "the last one to leave removes the folder"
    again = subprocess.run(["bash", "-c", f'{head}\necho "$node"'], env=env, capture_output=True, text=True)
    assert again.stdout == "cn1.7\n", again.stderr


def test_workers_find_the_cache_of_the_hub() -> None:
    hub = (("HF_ENDPOINT", "http://mirror"), ("HF_HOME", "/scratch/hf"))
    text = script(WORKER, site(hub=hub))
    assert "export HF_HOME=/scratch/hf" in text
    assert "export HF_ENDPOINT=http://mirror" in text
    assert "HF_ENDPOINT" not in script(BACKEND, site(hub=hub)), "it gets a folder"


def test_a_container_sees_the_files_behind_the_links_of_a_model() -> None:
    profile = SiteProfile.model_validate({"backends": {"image": "/i/vllm.sif"}})
    of = site(profile)
    identity = SlurmJobIdentity.of(BACKEND, of.instance, "ffff00000000", 3)
    cache = "/scratch/hf/hub/models--org--m"
    text = batch_script(BACKEND, of, identity, folder=f"{cache}/snapshots/c0ffee").text()
    assert f"--bind={cache}:{cache}:ro /i/vllm.sif vllm serve {cache}/snapshots/c0ffee" in text
    assert "--bind" not in script(BACKEND, of), "a folder of the site is its own affair"


@pytest.mark.parametrize("where", ["", "workers", "backends"])
def test_a_token_of_the_hub_is_refused_in_a_profile(where: str) -> None:
    env = {"env": {"HF_TOKEN": "hf_x"}}
    with pytest.raises(ValidationError, match="HF_TOKEN would stand in every batch script"):
        SiteProfile.model_validate({where: env} if where else env)
