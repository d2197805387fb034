"""The bridge on a real Slurm of four nodes, as an ordinary user: what is submitted, and what goes wrong."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_client import Client, RollyardError
from rollyard_crds import BackendPool, RolloutJob
from rollyard_testing.harnesses import asked_once, bash_harness
from rollyard_testing.hub import TOKEN, HubModel, hub_server
from rollyard_testing.invariants import invariant
from rollyard_testing.pace import patience
from rollyard_testing.slurm.bridgelab import ROLLYARD, Bridge, accounted_for, condition, job, until
from rollyard_testing.slurm.fulldisk import fill

TINY = Path(__file__).parents[2] / "engine" / "src" / "rollyard_engine" / "models" / "tiny-policy"
CLOCKS = """
import datetime, os, sys, time
shift = {"cn1": -7, "cn2": 0, "cn3": 11}.get(os.environ.get("SLURMD_NODENAME", ""), 4) * 60.0
real, real_ns, base = time.time, time.time_ns, datetime.datetime
time.time = lambda: real() + shift
time.time_ns = lambda: real_ns() + int(shift * 1e9)
class Shifted(base):
    @classmethod
    def now(cls, tz=None):
        return base.now(tz) + datetime.timedelta(seconds=shift)
datetime.datetime = Shifted
print(f"clock shifted by {shift / 60:.0f} min", file=sys.stderr)
"""

pytestmark = pytest.mark.slurm


@pytest.fixture
def bridge(slurm: Any, shared: Path) -> Iterator[Bridge]:
    made = Bridge(slurm, shared / "h")
    yield made
    made.kill()


def test_a_job_over_nodes_from_submit_to_nothing_left(slurm: Any, bridge: Bridge, shared: Path) -> None:
    # The nodes' clocks are minutes apart, and only the control plane times leases.
    written(shared / "sitecustomize.py", CLOCKS)
    profile = written(shared / "profile.yaml", f"workers: {{env: {{PYTHONPATH: {shared}}}}}\n")
    bridge.options = ["--profile", str(profile), "--lease-seconds", "5"]
    wanted = job("nodes", tasks=6, samples=2, pause=6.0, workers=3, gate=shared / "seen")
    bridge.start()
    with bridge.client() as client:
        client.submit(wanted)
    jobs = bridge.running(count=3)
    seen = bridge.jobs()
    assert len({seen[number]["node"] for number in jobs}) == 3, "one worker for each node"
    assert {one["owner"] for one in seen.values()} == {"rolloutjob/default/nodes"}
    (token,) = (bridge.home / "tokens").iterdir()
    assert (token.stat().st_mode & 0o777, token.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    assert token.read_text().startswith("ry-job.default.nodes."), "for this job only"

    second = slurm.run_as_user(bridge.command("up"), check=False)
    assert second.returncode == 1
    assert "another `rollyard slurm-bridge up`" in second.stderr
    assert "stop it with `rollyard slurm-bridge down`" in second.stderr

    told = slurm.run_as_user(bridge.command("status")).stdout
    assert [number for number in jobs if str(number) not in told] == [], told
    written(shared / "seen", "")

    bridge.ended("nodes")
    accounted_for(bridge, wanted)
    with bridge.client() as client:
        assert {one.attempt for one in client.trajectories("nodes")} == {0}, "no lease has expired"
    logs = " ".join(path.read_text() for path in (bridge.home / "logs").glob("nodes-*.log"))
    shown = {int(minutes) for minutes in re.findall(r"clock shifted by (-?\d+) min", logs)}
    assert len(shown) == 3, f"the clocks were not apart: {shown}"
    until(lambda: not bridge.jobs(), 60, "the end of the workers")
    until(lambda: not list((bridge.home / "tokens").iterdir()), 30, "the end of the token")
    assert bridge.stop() == 0
    assert not (bridge.home / "context.json").exists()
    assert not list((bridge.home / "submissions").iterdir())
    ours = [line for line in slurm.user_processes().values() if str(shared) in line]
    assert ours == []


def test_a_backend_is_a_job_and_comes_back(slurm: Any, bridge: Bridge) -> None:
    bridge.options = ["--engine", "embedded"]
    bridge.start()
    with bridge.client() as client:

        def ready(beside: str = "") -> BackendPool | None:
            pool = client.pool("default")
            urls = {one.url for one in pool.status.backends if one.ready}
            return pool if condition(pool, "Ready") == "True" and urls - {beside} else None

        first = until(ready, 120, "a ready backend").status.backends[0].url
        (number,) = bridge.jobs("backend")
        slurm.run_as_user(["scancel", str(number)])
        until(lambda: number not in bridge.jobs("backend"), 60)
        until(lambda: ready(first), 120, "another backend")
        why = f"was restarted once; the one before ended (Slurm job {number} was cancelled)"
        assert why in condition(client.pool("default"), "Degraded", "message")
        # After a restart of the bridge the backend continues, and is known at once.
        (again,) = bridge.jobs("backend")
        bridge.kill()
    bridge.start()
    with bridge.client() as client:
        until(ready, 30, "the same backend")
        assert why in condition(client.pool("default"), "Degraded", "message"), "a new bridge knows it"
        assert list(bridge.jobs("backend")) == [again]
        client.submit(job("served", 1, 1, backendRef={"name": "default"}, agent=bash_harness()))
        bridge.ended("served")
        # Its sandbox is Apptainer's, and its only way to the backend is the gateway of the Run worker.
        (one,) = client.trajectories("served")
        asked_once(one.model_dump(mode="json"))
    assert bridge.stop() == 0
    assert bridge.jobs() == {}
    queued = subprocess.run(
        ["squeue", "-h"], env=slurm.env, capture_output=True, text=True, timeout=patience(30)
    )
    assert queued.stdout == ""


@pytest.mark.nightly
@pytest.mark.attack(
    "another user of the cluster reads the token of the Hugging Face Hub",
    boundary="slurm",
    surface="models of the hub",
    stopped_by="it stays with the bridge: no batch script, comment, log or environment of a job has it",
)
def test_a_gated_model_of_the_hub_serves_a_job(slurm: Any, bridge: Bridge, shared: Path) -> None:
    with hub_server() as hub:
        hub.models["tiny/tiny-policy"] = HubModel(TINY, gated=True)
        bridge.options = ["--engine", "embedded", "--model", "tiny/tiny-policy"]
        bridge.env = {"HF_ENDPOINT": hub.url, "HF_HOME": str(shared / "hf")}
        bridge.start()
        with bridge.client() as client:
            words = "tiny/tiny-policy is gated: accept its licence"
            until(lambda: words in condition(client.pool("default"), "Ready", "message"), 60, "the reason")
        assert bridge.jobs() == {}, "no node waits for a model that does not come"
        assert bridge.stop() == 0
        bridge.env = {**bridge.env, "HF_TOKEN": TOKEN}
        bridge.start()
        with bridge.client() as client:
            until(lambda: condition(client.pool("default"), "Ready") == "True", 120, "a ready backend")
            hub.requests.clear()
            sums = {
                "tasks": {"inline": [{"id": "a", "prompt": "2 + 2 = ?", "answer": "4"}]},
                "handler": "math",
                "agent": {"type": "single_turn"},
                "sampling": {"maxTokens": 4},
                "backendRef": {"name": "default"},
            }
            client.submit(RolloutJob.model_validate({"metadata": {"name": "sums"}, "spec": sums}))
            bridge.ended("sums")
            (trajectory,) = client.trajectories("sums")
            assert any(any(segment.loss_mask) for segment in trajectory.segments), "the model has sampled"
        assert hub.requests == [], "the workers had the tokenizer"
        (number,) = bridge.jobs("backend")
        shown = slurm.run_as_user(["scontrol", "write", "batch_script", str(number), "-"]).stdout
        shown += slurm.run_as_user(["scontrol", "show", "job", str(number)]).stdout
        logs = "".join(path.read_text() for path in (bridge.home / "logs").glob("*.log"))
        with invariant():
            assert TOKEN not in shown + logs + bridge.log.read_text()
            assert not any(TOKEN in environ for environ in job_environments(slurm, shared))
        assert bridge.stop() == 0


def job_environments(slurm: Any, shared: Path) -> list[str]:
    """Return the environments of the user's processes that belong to a Slurm job of this test."""
    texts = []
    for pid in slurm.user_processes():
        with contextlib.suppress(OSError):
            text = Path(f"/proc/{pid}/environ").read_text(errors="replace")
            texts += [text] if "SLURM_JOB_ID=" in text and str(shared) in text else []
    assert texts, "a backend runs"
    return texts


@pytest.mark.nightly
def test_a_worker_that_is_preempted_is_slurm_s_to_start_again(slurm: Any, bridge: Bridge) -> None:
    bridge.partition = "scavenge"
    wanted = job("preempted", tasks=8, samples=2, pause=8.0)
    bridge.start()
    with bridge.client() as client:
        client.submit(wanted)
        (number,) = bridge.running()
        until(lambda: client.job("preempted").status.counts.run.active == 4, 60, "rollouts in Run")
        node = bridge.jobs()[number]["node"]
        sleeper = "#!/bin/sh\nexec sleep 300\n"
        urgent = slurm.sbatch(sleeper, f"--nodelist={node}", "--exclusive", "--output=/dev/null")
        until(lambda: bridge.jobs().get(number, {}).get("state") == "PENDING", 60, "the preemption")
        assert slurm.wait_state(urgent, "RUNNING") == "RUNNING"
        until(lambda: bridge.jobs().get(number, {}).get("state") == "RUNNING", 150, "its new start")
        assert bridge.jobs().keys() == {number}, "Slurm's own restart, and no second job beside it"
        assert bridge.jobs()[number]["node"] != node
        assert condition(client.job("preempted"), "Degraded") == "False", "nothing that is wrong"
        slurm.run_as_user(["scancel", str(urgent)])
        bridge.ended("preempted")
        assert {one.attempt for one in client.trajectories("preempted")} == {0}, "handed over, not failed"
    accounted_for(bridge, wanted)
    assert bridge.stop() == 0
    assert bridge.jobs() == {}


def test_a_worker_that_slurm_kills_and_starts_again_gives_its_leases_back(
    slurm: Any, bridge: Bridge, shared: Path
) -> None:
    """It is stopped, so that it hands over nothing. Long before its leases expire, the bridge sees it die."""
    bridge.options = ["--lease-seconds", "600"]
    wanted = job("requeued", tasks=4, samples=2, gate=shared / "killed")
    bridge.start()
    with bridge.client() as client:
        client.submit(wanted)
        (number,) = bridge.running()
        # The death of a worker whose node the bridge has never seen is not proven.
        until(lambda: bridge.records()[number]["nodes"], 60, "the bridge's sight of the node")
        until(lambda: client.job("requeued").status.counts.run.active == 4, 60, "rollouts in Run")
        name = re.compile(rf"rollyard_pipeline .*--name (\S+-{number})(?: |$)")
        ((pid, worker),) = [
            (pid, found[1]) for pid, line in slurm.job_processes().items() if (found := name.search(line))
        ]
        os.kill(pid, signal.SIGSTOP)
        slurm.run_as_user(["scontrol", "requeue", str(number)])
        (shared / "killed").touch()
        bridge.ended("requeued")
        attempts = [one for each in client.trajectories("requeued") for one in each.attempts]
        # Slurm's kill also ends sandboxes that wait for Run, which the next worker finds out.
        lost = [one for one in attempts if one.reason != "SandboxLost"]
        assert {(one.reason, one.worker, one.counted) for one in lost} == {("WorkerDied", worker, False)}
        assert len(lost) >= 4
        assert worker not in {one.worker for one in attempts if one.reason == "SandboxLost"}
    assert bridge.jobs().keys() <= {number}, "Slurm's own restart, and no second job beside it"
    accounted_for(bridge, wanted)
    assert bridge.stop() == 0
    assert bridge.jobs() == {}


def test_one_control_plane_for_two_drivers(slurm: Any, bridge: Bridge, shared: Path) -> None:
    home = shared / "local"
    words = [*ROLLYARD, "up", "--home", str(home), "--port", "0", "--sandbox", "process", "--replicas", "0"]
    local = slurm.popen_as_user(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        context = home / "context.json"
        until(context.exists, 90, "the local driver")
        url = json.loads(context.read_text())["url"]
        tokens_file = str(home / "state" / "tokens.json")
        bridge.options = ["--join", url, "--token-file", tokens_file, "--namespace", "default"]
        bridge.start()
        here, there = job("here"), job("there", placement="slurm")
        tokens = json.loads((home / "state" / "tokens.json").read_text())
        with Client(url, tokens["admin"]) as client:
            client.submit(here)
            client.submit(there)
            for name in ("here", "there"):
                until(lambda name=name: condition(client.job(name), "Succeeded") == "True", 90, name)
        logs = {path.name.partition("-")[0] for path in (bridge.home / "logs").glob("*-worker-*.log")}
        assert logs == {"there"}
        assert bridge.stop() == 0
        assert bridge.jobs() == {}
    finally:
        local.terminate()
        local.wait(patience(60))


@pytest.mark.nightly
def test_a_bridge_on_a_socket_of_its_node(slurm: Any, bridge: Bridge, shared: Path) -> None:
    bridge.options = ["--listen", "unix", "--engine", "embedded"]
    bridge.start()
    assert (bridge.home / "state" / "api.sock").stat().st_mode & 0o777 == 0o600
    known = json.loads((bridge.home / "bridge.json").read_text())
    assert (known["url"].partition("%")[0], known["port"]) == ("http+unix://", 0)
    wanted = job("local", backendRef={"name": "default"})
    with bridge.client() as client:
        client.submit(wanted)
    bridge.ended("local")
    accounted_for(bridge, wanted)
    told = slurm.run_as_user([*ROLLYARD, "get", "--home", str(bridge.home)]).stdout
    assert "local" in told
    assert bridge.stop() == 0
    assert bridge.jobs() == {}


def test_a_bridge_ends_its_own_jobs_only_or_leaves_them(slurm: Any, bridge: Bridge, shared: Path) -> None:
    profile = written(shared / "profile.yaml", "workers: {drainSeconds: 2}\n")
    other = Bridge(slurm, shared / "o", ["--profile", str(profile)])
    try:
        for one in (bridge, other):
            one.begin()
        for one in (bridge, other):
            one.wait_ready()
            with one.client() as client:
                client.submit(job("long", tasks=2, samples=1, pause=120.0))
        mine, theirs = bridge.running(), other.running()
        assert bridge.process is not None
        bridge.process.kill()
        assert other.stop(signal.SIGTERM) == 0
        bridge.process.wait(patience(30))
        assert slurm.state(mine[0]) == slurm.state(theirs[0]) == "RUNNING", "neither ends them"
        other.begin()
        told = slurm.run_as_user(bridge.command("down"), timeout=patience(400)).stdout
        assert "Slurm jobs ended: 1" in told
        assert bridge.jobs() == {}
        other.wait_ready()
        assert other.running() == theirs, "the same job continues"
        assert other.stop(signal.SIGINT) == 0
        assert other.jobs() == {}
    finally:
        other.kill()


@pytest.mark.nightly
def test_commands_that_hang_change_nothing(slurm: Any, bridge: Bridge, shared: Path) -> None:
    programs = shared / "bin"
    hang = {name: shared / f"hang-{name}" for name in ("squeue", "sbatch")}
    programs.mkdir(mode=0o755)
    os.chown(programs, slurm.uid, slurm.gid)  # Only its owner could remove what is in it.
    # An sbatch that hangs has handed its job in, so a repeat makes a second one.
    bodies = {
        "squeue": '[ ! -e {hang} ] || sleep 600\nexec /usr/bin/squeue "$@"\n',
        "sbatch": '/usr/bin/sbatch "$@"; code=$?\n[ ! -e {hang} ] || sleep 600\nexit $code\n',
    }
    for name, body in bodies.items():
        path = programs / name
        path.write_text("#!/bin/bash\n" + body.format(hang=hang[name]))
        path.chmod(0o755)
    # This is long enough for an sbatch that a busy machine lets wait.
    bridge.options = ["--command-timeout", "5"]
    bridge.env = {"PATH": f"{programs}:{slurm.env['PATH']}"}
    first = job("hangs", tasks=6, samples=2, gate=shared / "seen")
    # It still exists when squeue answers: of a job that came and went unseen nothing is known for 90 s.
    second = job("later", tasks=2, samples=1, pause=12.0)
    bridge.start()
    with bridge.client() as client:

        def told(text: str, since: int) -> None:
            until(lambda: text in bridge.log.read_text()[since:], 60, "its being told")

        client.submit(first)
        until(lambda: client.job("hangs").status.counts.run.active == 4, 60, "rollouts in Run")
        # A busy machine's squeue may have been too late to say so before.
        until(lambda: condition(client.job("hangs"), "Running") == "True", 60, "its worker being seen")
        (number,) = bridge.running()
        said = len(bridge.log.read_text())
        hang["sbatch"].touch()
        client.submit(second)
        told("sbatch did not answer within 5 s", said)
        hang["sbatch"].unlink()
        said = len(bridge.log.read_text())
        hang["squeue"].touch()
        told("squeue did not answer within 5 s", said)
        seen = client.job("hangs")
        assert condition(seen, "Running") == "True", condition(seen, "Running", "message")
        (shared / "seen").touch()
        hang["squeue"].unlink()
        bridge.ended("later", 150)
        told("Slurm answers again", said)
        bridge.ended("hangs")
    accounted_for(bridge, first)
    accounted_for(bridge, second)
    # Its results come a moment before the worker has put its sandboxes away and ends.
    assert slurm.wait_state(number, "COMPLETED", "FAILED", "CANCELLED") == "COMPLETED", "the same worker"
    assert len(list((bridge.home / "logs").glob("later-*.log"))) == 1, "no job was handed in twice"
    assert bridge.stop() == 0
    assert not [one for one in slurm.user_processes().values() if "sleep 600" in one]


def test_what_slurm_cannot_serve_is_told(slurm: Any, bridge: Bridge, shared: Path) -> None:
    profile = written(
        shared / "profile.yaml",
        "workers: {partition: nosuch}\nbackends: {partition: debug, memory: 900G}\n",
    )
    bridge.partition = None
    bridge.options = ["--profile", str(profile), "--engine", "embedded"]
    bridge.start()
    with bridge.client() as client:
        client.submit(job("nosuch"))
        until(
            lambda: "invalid partition" in condition(client.job("nosuch"), "Running", "message").lower(), 60
        )
        assert condition(client.job("nosuch"), "Degraded", "reason") == "WorkersBlocked"
        said = until(lambda: condition(client.pool("default"), "Degraded", "message"), 60, "the pool's word")
    assert "emory" in said or "configuration" in said, said
    assert bridge.stop() == 0


@pytest.mark.nightly
def test_a_home_that_is_full_is_told_and_waited_out(slurm: Any, bridge: Bridge, shared: Path) -> None:
    # Its jobs stay pending, because the nodes do not see this disk.
    profile = written(shared / "profile.yaml", "sbatch: ['--begin=now+1hour']\n")
    bridge.options = ["--profile", str(profile)]
    with slurm.disk(bridge.home, 32) as see:
        bridge.view = see
        bridge.start()
        with bridge.client() as client:
            client.submit(job("before"))
            (number,) = until(bridge.jobs, 60, "its Slurm job")
            assert bridge.process is not None
            # The bridge must have something to write once the disk is full, so it is halted as a job comes.
            # A job that came later may be refused by the control plane, whose database lies on the same disk.
            os.kill(bridge.process.pid, signal.SIGSTOP)
            client.submit(job("during"))
            filler = see / "filler"
            fill(filler)
            os.kill(bridge.process.pid, signal.SIGCONT)

            def told() -> bool:
                fill(filler)  # It is filled again, because what is written in between may leave some room.
                return "trouble: " in bridge.log.read_text()

            until(told, 60, "its being told")
            assert "no space left" in bridge.log.read_text().lower()
            assert slurm.state(number) == "PENDING", "what was handed in is not touched"
            assert bridge.process.poll() is None
            filler.unlink()
            until(lambda: submitted(client, "during"), 60, "room")
            jobs = until(lambda: len(found := bridge.jobs()) == 2 and found, 60, "the second Slurm job")
            assert number in jobs
            assert {one["owner"] for one in jobs.values()} == {
                "rolloutjob/default/before",
                "rolloutjob/default/during",
            }
        assert bridge.stop() == 0
        assert bridge.jobs() == {}


@pytest.mark.nightly
def test_nodes_without_user_namespaces_or_fuse_and_images_that_are_none(
    slurm: Any, bridge: Bridge, shared: Path, sif: Path
) -> None:
    closed, fuseless = "cn3", "cn4"
    # The kernel itself refuses below a user namespace whose limit is none.
    unshare = "unshare --user --map-root-user sh -c"
    python = written(
        shared / "python",
        f"""#!/bin/bash
if [ "$SLURMD_NODENAME" = {closed} ] && [ -e {shared}/closed ]; then
  exec {unshare} 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$0" "$@"' {sys.executable} "$@"
fi
exec {sys.executable} "$@"
""",
        0o755,
    )
    workers = {"python": str(python), "exclude": "cn1,cn2", "cpus": 3, "drainSeconds": 2}
    profile = written(shared / "profile.yaml", json.dumps({"workers": workers}))
    broken = written(shared / "broken.sif", "no image at all\n")
    (shared / "closed").touch()
    bridge.sandbox = "apptainer"
    bridge.options = ["--profile", str(profile), "--default-image", str(sif)]
    # This is long enough for the other worker's end to be noticed, and for its next submission.
    wanted = job("nodes", samples=4, pause=8.0, workers=2)
    before = set(slurm.job_processes())

    def left() -> list[str]:
        return [f"{pid} {line}" for pid, line in slurm.job_processes().items() if pid not in before]

    with slurm.altered_node(fuseless, "--no-fuse"):
        bridge.start()
        with bridge.client() as client:
            client.submit(wanted)

            def said() -> str:
                return condition(client.job("nodes"), "Degraded", "message")

            words = until(lambda: "no user namespaces" in said() and said(), 60, "the node's being told")
            assert "What to do:" in words

            def avoided() -> bool:
                told = [
                    slurm.run_as_user(["scontrol", "show", "job", str(one)]).stdout for one in bridge.jobs()
                ]
                return any("ExcNodeList=cn[1-3]" in text for text in told)

            until(avoided, 30, "another node's being asked for")
            bridge.ended("nodes", 180)
            accounted_for(bridge, wanted)
            logs = [path.read_text() for path in (bridge.home / "logs").glob("nodes-*.log")]
            (folder,) = [text for text in logs if "/dev/fuse is closed to this user" in text]
            assert "SIF files cannot be mounted here, and are unpacked to folders" in folder
            (shared / "closed").unlink()
            for name, image in (("missing", shared / "missing.sif"), ("broken", broken)):
                client.submit(job(name, tasks=1, samples=1, sandbox={"image": str(image)}))
            for name in ("missing", "broken"):
                done = bridge.ended(name, 120)
                assert condition(done, "Succeeded") == "False"
                (record,) = client.trajectories(name)
                assert (record.status, record.reward, record.reason) == ("failed", None, "ImageNotUsable")
        assert bridge.stop() == 0
        until(lambda: not left(), 30, f"the end of {left()}, {slurm.node_states()}")


def written(path: Path, text: str, mode: int = 0o644) -> Path:
    """Write a file that the lab's user may read."""
    path.write_text(text)
    path.chmod(mode)
    return path


def submitted(client: Client, name: str) -> bool:
    """Return whether a job exists, once it has been submitted again where it does not."""
    try:
        client.submit(job(name))
    except RollyardError:
        return False
    return True
