"""The commands about jobs and pools, on a real control plane without a driver."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rollyard.commands import jobs, resources
from rollyard.errors import InvalidInput
from rollyard.jobs.running import apply_manifest
from rollyard.main import main
from rollyard_client import Client, NotFound, ServerUnavailable
from rollyard_client.sse import JobEvent
from rollyard_crds import BackendPool, RolloutJob
from rollyard_crds.fields.annotations import OBJECT_UID
from rollyard_testing.api.control_plane import StartedControlPlane, a_control_plane
from rollyard_testing.manifests import job_manifest, pool_manifest

pytestmark = pytest.mark.slow

TASK = {"id": "t", "prompt": "p"}
ORACLE: dict[str, Any] = {"handler": "shell", "agent": {"type": "oracle"}}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StartedControlPlane]:
    with a_control_plane(tmp_path_factory.mktemp("plane"), ready_seconds=120, end_seconds=60) as started:
        yield started


Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(
    plane: StartedControlPlane, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Return a function that runs a command as the admin, and returns its status and what it prints."""
    monkeypatch.setenv("ROLLYARD_URL", plane.url)
    monkeypatch.setenv("ROLLYARD_TOKEN", plane.tokens["admin"])

    def command(*words: str, role: str = "admin", stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setenv("ROLLYARD_TOKEN", plane.tokens[role])
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode())))
        status = main(list(words))
        shown = capsys.readouterr()
        return status, shown.out, shown.err

    return command


@pytest.fixture
def client(plane: StartedControlPlane) -> Iterator[Client]:
    with Client(plane.url, plane.tokens["admin"]) as opened:
        yield opened


def job(name: str, **spec: Any) -> dict[str, Any]:
    return job_manifest(name, {"tasks": {"inline": [TASK]}, **ORACLE, **spec})


def pool(name: str, **spec: Any) -> dict[str, Any]:
    engine = {"type": "external", "external": {"urls": ["http://127.0.0.1:1"]}}
    return pool_manifest(name, {"model": "m", "engine": engine, **spec})


def documents(*manifests: dict[str, Any]) -> str:
    return "\n---\n".join(map(json.dumps, manifests))


def report(client: Client, name: str, phase: str, **conditions: str) -> None:
    """Report a status as a driver does."""
    from rollyard_client.requests import jobs as calls
    from rollyard_crds.rolloutjob import RolloutJobStatus

    listed = [
        {"type": kind, "status": status, "reason": "Said", "lastTransitionTime": "2026-01-02T03:04:05Z"}
        for kind, status in conditions.items()
    ]
    status = RolloutJobStatus.model_validate({"phase": phase, "conditions": listed, "message": "so it is"})
    client._transport.send(calls.put_job_status(name, "default", status))


def test_apply_creates_and_changes_and_says_so(run: Run, client: Client) -> None:
    both = documents(job("ap"), pool("ap"))
    assert run("apply", "-f", "-", stdin=both)[:2] == (
        0,
        "rolloutjob/ap created\nbackendpool/ap created\n",
    )
    assert run("apply", "-f", "-", stdin=both)[1] == "rolloutjob/ap unchanged\nbackendpool/ap unchanged\n"
    stages = {"stages": {"run": {"timeoutSeconds": 77}}, "priority": 3}
    limits = {"maxActiveRollouts": 5}
    changed = documents(job("ap", **stages), pool("ap", **limits))
    assert (
        run("apply", "-f", "-", stdin=changed)[1] == "rolloutjob/ap configured\nbackendpool/ap configured\n"
    )
    spec = client.job("ap").spec
    assert (spec.stages.run.timeout_seconds, spec.priority) == (77, 3)
    assert client.pool("ap").spec.max_active_rollouts == 5
    # What the file leaves out stays, as with kubectl.
    client.update("ap", suspend=True)
    assert run("apply", "-f", "-", stdin=both)[1] == "rolloutjob/ap unchanged\nbackendpool/ap unchanged\n"
    assert client.job("ap").spec.suspend
    assert (
        run("apply", "-f", "-", stdin=documents(job("ap", suspend=False)))[1] == "rolloutjob/ap configured\n"
    )
    assert not client.job("ap").spec.suspend


def test_apply_refuses_what_cannot_change_and_goes_through_the_rest(run: Run) -> None:
    run("apply", "-f", "-", stdin=documents(job("fix"), pool("fix")))
    changed = documents(job("fix", samplesPerTask=2), pool("fix", model="n"), job("fix2"))
    status, out, err = run("apply", "-f", "-", stdin=changed)
    assert (status, out) == (1, "rolloutjob/fix2 created\n")
    assert "rolloutjob/fix: spec.samplesPerTask: differs and cannot be changed\n" in err
    assert "backendpool/fix: spec.model: is 'm' and cannot be changed" in err


def test_apply_uploads_task_files_and_knows_them_again(run: Run, tmp_path: Path) -> None:
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps(TASK)}\n")
    path = tmp_path / "job.json"
    path.write_text(json.dumps(job("file", tasks={"url": "tasks.jsonl"})))
    assert run("apply", "-f", str(path))[1] == "rolloutjob/file created\n"
    assert run("apply", "-f", str(path))[1] == "rolloutjob/file unchanged\n"
    (tmp_path / "tasks.jsonl").write_text(f"{json.dumps(TASK | {'id': 'other'})}\n")
    status, _, err = run("apply", "-f", str(path))
    assert (status, err) == (1, "rollyard: rolloutjob/file: spec.tasks: differs and cannot be changed\n")


class Cluster:
    """A client whose objects are those of a cluster, too, and which notes the changes."""

    def __init__(self, *things: RolloutJob | BackendPool) -> None:
        for thing in things:
            thing.metadata.annotations[OBJECT_UID] = "u"
        self._things = {(thing.kind, thing.metadata.name): thing for thing in things}
        self.changes: list[Any] = []

    def job(self, name: str, _namespace: str) -> Any:
        return self._things["RolloutJob", name]

    def pool(self, name: str, _namespace: str) -> Any:
        return self._things["BackendPool", name]

    def update(self, name: str, *, namespace: str, **changes: Any) -> None:
        self.changes.append((name, namespace, changes))

    def patch_pool(self, name: str, changes: Any, namespace: str) -> None:
        self.changes.append((name, namespace, changes))


def test_apply_changes_in_a_cluster_only_what_its_driver_takes_over() -> None:
    cluster = Cluster(RolloutJob.model_validate(job("j")), BackendPool.model_validate(pool("p", replicas=1)))
    client = cast(Client, cluster)
    assert apply_manifest(client, RolloutJob.model_validate(job("j", suspend=True))) == "configured"
    assert apply_manifest(client, BackendPool.model_validate(pool("p", maxActiveRollouts=4))) == "configured"
    assert cluster.changes == [
        ("j", "default", {"suspend": True}),
        ("p", "default", {"maxActiveRollouts": 4}),
    ]
    for spec, field in (
        ({"samplesPerTask": 2}, "spec.samplesPerTask"),
        ({"stages": {"run": {"replicas": 2}}}, "spec.stages"),
    ):
        with pytest.raises(
            InvalidInput, match=f"{field}: RolloutJob 'j' is an object of a cluster: `kubectl"
        ):
            apply_manifest(client, RolloutJob.model_validate(job("j", priority=1, **spec)))
    assert len(cluster.changes) == 2


def test_get_takes_what_kubectl_takes(run: Run) -> None:
    team = job("gt")
    team["metadata"]["labels"] = {"team": "gt"}
    run("apply", "-f", "-", stdin=documents(team, pool("gt")))
    assert run("get", "rj/gt", "bp/gt", "-o", "name")[1] == (
        "rolloutjob.rollyard.dev/gt\nbackendpool.rollyard.dev/gt\n"
    )
    assert run("get", "-l", "team=gt", "-o", "name")[1] == "rolloutjob.rollyard.dev/gt\n"
    _, out, _ = run("get", "all", "-A")
    assert out.count("NAMESPACE") == 2
    assert json.loads(run("get", "bp", "gt", "-o", "json")[1])["metadata"]["name"] == "gt"
    assert len(json.loads(run("get", "rj,bp", "gt", "-o", "json")[1])["items"]) == 2
    status, out, err = run("get", "-n", "empty")
    assert (status, out, err) == (0, "", "No rolloutjobs in namespace 'empty'\n")
    assert run("get", "events")[0] == 2
    assert run("get", "-w", "-o", "json")[0] == 2
    assert "Name:         gt" in run("describe", "rj/gt")[1]


def test_rows_of_a_watch_stay_below_each_other(
    run: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("apply", "-f", "-", stdin=documents(job("wt"), pool("wt")))

    def steps() -> Iterator[None]:
        yield
        client.update("wt", priority=1)  # No column shows it.
        yield
        report(client, "wt", "Run", Running="True")
        yield
        client.delete("wt")
        yield
        raise KeyboardInterrupt

    further = steps()
    monkeypatch.setattr(resources, "time", SimpleNamespace(sleep=lambda _seconds: next(further)))
    status, out, _ = run("get", "all", "-w", "-l", "!team")
    assert status == 130
    lines = [line for line in out.splitlines() if line.startswith(("NAME", "wt", "rolloutjob/wt"))]
    assert len(lines) == 6, out
    header, before, _, _, after, gone = lines
    assert gone == "rolloutjob/wt deleted"
    place = header.index("PHASE")
    assert (before[place:].split()[0], after[place:].split()[0]) == ("Pending", "Run")


def test_delete_takes_files_and_several_names(run: Run) -> None:
    made = documents(job("d1"), job("d2"), pool("d1"))
    run("apply", "-f", "-", stdin=made)
    status, out, err = run("delete", "rj", "d1", "nobody")
    assert (status, out) == (1, "rolloutjob/d1 deleted\n")
    assert "no RolloutJob 'nobody'" in err
    status, out, err = run("delete", "-f", "-", stdin=made)
    assert (status, out) == (1, "rolloutjob/d2 deleted\nbackendpool/d1 deleted\n")
    assert run("delete", "-f", "-", "--ignore-not-found", stdin=made) == (0, "", "")
    run("apply", "-f", "-", stdin=documents(pool("only")))
    assert run("delete", "only")[0] == 1, "a name alone is that of a job"
    assert run("delete", "bp/only")[1] == "backendpool/only deleted\n"
    assert run("delete")[0] == run("delete", "x", "-f", "y")[0] == 2


def test_suspend_and_resume(run: Run, client: Client) -> None:
    run("apply", "-f", "-", stdin=documents(job("s1"), job("s2")))
    assert run("suspend", "s1", "s2")[1] == "rolloutjob/s1 suspended\nrolloutjob/s2 suspended\n"
    assert client.job("s2").spec.suspend
    assert run("suspend", "rj/s1")[1] == "rolloutjob/s1 unchanged\n"
    assert run("resume", "rj", "s1")[1] == "rolloutjob/s1 resumed\n"
    assert not client.job("s1").spec.suspend
    assert "use `rollyard weights p --resume`" in run("resume", "bp/p")[2]
    report(client, "s2", "Failed", Finished="True")
    assert run("resume", "s2")[::2] == (1, "rollyard: rolloutjob/s2: it has ended already (Failed)\n")


def test_tasks_are_pushed_to_a_stream_until_it_is_closed(
    run: Run, client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "MAX_PUSHED", 2)
    run("apply", "-f", "-", stdin=documents(job("st", tasks={"stream": True}), job("batch")))
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(f"{json.dumps(TASK | {'id': f't{number}'})}\n" for number in range(5)))
    assert run("push", "st", str(path))[1] == "rolloutjob/st: 5 tasks accepted\n"
    more = path.read_text() + json.dumps(TASK)
    assert (
        run("push", "rj/st", "-", stdin=more)[1] == "rolloutjob/st: 1 task accepted, 5 were there already\n"
    )
    status, _, err = run("push", "st", "-", stdin='{"id": "x"}\n')
    assert (status, "standard input: line 1: task: give exactly one of" in err) == (1, True)
    assert run("close", "st")[1] == "rolloutjob/st closed (6 rollouts)\n"
    status, _, err = run("push", "st", "-", stdin=json.dumps(TASK | {"id": "late"}))
    assert (status, "is closed and takes no more tasks" in err) == (1, True)
    assert "rolloutjob/batch is not a stream: `rollyard cancel batch` ends it" in run("close", "batch")[2]


def test_a_push_that_breaks_off_says_how_far_it_came(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "MAX_PUSHED", 1)
    run("apply", "-f", "-", stdin=documents(job("br", tasks={"stream": True})))
    sent: list[str] = []
    push = Client.push_tasks

    def once(self: Client, name: str, *more: Any) -> Any:
        sent.append(name)
        if len(sent) > 1:
            self.delete(name)
        return push(self, name, *more)

    monkeypatch.setattr(Client, "push_tasks", once)
    two = "".join(f"{json.dumps(TASK | {'id': name})}\n" for name in "ab")
    status, _, err = run("push", "br", "-", stdin=two)
    assert (status, "; 1 of 2 tasks were accepted before, and a repeated push skips them" in err) == (1, True)


def test_wait_ends_with_the_condition_or_with_a_reason(run: Run, client: Client) -> None:
    run("apply", "-f", "-", stdin=documents(job("w"), pool("w")))
    wait = ["wait", "rj/w", "--timeout=0"]
    status, _, err = run(*wait, "--for=condition=Finished")
    assert (status, "has no Finished=True in time; its conditions: none yet" in err) == (1, True)
    report(client, "w", "Run", Running="True", Finished="False")
    assert run(*wait, "--for=condition=running")[1] == "rolloutjob.rollyard.dev/w condition met\n"
    assert run(*wait, "--for=condition=Finished=False")[0] == 0
    assert (
        "its conditions: Running=True, Finished=False; it says: so it is"
        in run(*wait, "--for=condition=Succeeded")[2]
    )
    report(client, "w", "Failed", Finished="True", Failed="True", Succeeded="False")
    # It does not wait for what cannot come.
    status, _, err = run("wait", "w", "--for=condition=Succeeded", "--timeout=1d")
    assert (status, err) == (
        1,
        "rollyard: rolloutjob/w has ended as Failed, so its condition Succeeded does not become True; "
        "it says: so it is\n",
    )
    assert run("wait", "rj/w", "bp/w", "--for=delete", "--timeout=0")[0] == 1
    client.delete("w")
    assert run("wait", "rj/w", "--for=delete")[1] == "rolloutjob.rollyard.dev/w deleted\n"
    assert "no RolloutJob 'w'" in run("wait", "rj/w", "--for=condition=Finished")[2]
    assert "did you mean condition=Finished?" in run("wait", "rj/w", "--for=Finished")[2]
    assert run("wait", "rj/w", "--for=jsonpath={.x}=y")[0] == 2


def test_a_wait_does_not_end_with_another_object(monkeypatch: pytest.MonkeyPatch) -> None:
    states: list[Any] = []
    monkeypatch.setattr(jobs, "time", SimpleNamespace(sleep=lambda _s: None, monotonic=lambda: 0.0))

    class Seen:
        namespace = "default"

        def job(self, _name: str, _namespace: str) -> Any:
            state = states.pop(0)
            if isinstance(state, Exception):
                raise state
            return RolloutJob.model_validate(job("j") | {"metadata": {"name": "j", "uid": state}})

    client, target = cast(Client, Seen()), jobs.NamedObject("rj", "j")
    states[:] = ["a", "a", "b"]
    with pytest.raises(jobs.CliError, match="was deleted, and there is another one of its name"):
        jobs._await(client, target, ("Finished", "True"), 1.0)
    states[:] = ["a", "b"]
    assert jobs._await(client, target, None, 1.0) == "rolloutjob"
    states[:] = ["a", NotFound("no")]
    with pytest.raises(jobs.CliError, match="rolloutjob/j is gone"):
        jobs._await(client, target, ("Finished", "True"), 1.0)


@pytest.mark.parametrize(
    ("suspended", "lines"),
    [
        (("False", 0), ["0 created", "0 Admitted True (Said)"]),
        (("False", 9), ["0 created", "0 Admitted True (Said)", "9 resumed"]),
        (("True", 5), ["0 created", "0 Admitted True (Said)", "5 suspended"]),
    ],
)
def test_events_say_when_a_job_was_suspended_and_resumed(
    suspended: tuple[str, int], lines: list[str]
) -> None:
    states = {"Admitted": ("True", 0), "Degraded": ("False", 0), "Suspended": suspended}
    conditions = [
        {
            "type": kind,
            "status": status,
            "reason": "Said",
            "lastTransitionTime": f"2026-01-02T03:04:0{second}Z",
        }
        for kind, (status, second) in states.items()
    ]
    document = job("j")
    document["metadata"]["creationTimestamp"] = "2026-01-02T03:04:00Z"
    document["status"] = {"conditions": conditions}
    shown = list(jobs._history(RolloutJob.model_validate(document)))
    assert shown == [f"2026-01-02T03:04:0{line[0]}Z {line[1:]}" for line in lines]


def test_events_show_what_was_and_follow_to_the_end(
    run: Run, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    run("apply", "-f", "-", stdin=documents(job("ev")))
    report(client, "ev", "Run", Running="True")
    _, out, _ = run("events", "rj/ev", role="viewer")
    created, running, counts = out.splitlines()
    assert created.endswith("Z  created")
    assert running == "2026-01-02T03:04:05Z  Running True (Said)"
    assert counts.endswith(
        "1 rollouts: init 0 active, 1 queued, run 0 active, 0 queued, eval 0 active, 0 queued; 0 succeeded, "
        "0 failed, 0 cancelled"
    )
    asked: list[str] = []
    follow = Client.events

    def broken(self: Client, name: str, *, last_id: str, **more: Any) -> Iterator[JobEvent]:
        """Yield an event and break off, be cut then, and be served at last."""
        asked.append(last_id)
        if len(asked) == 1:
            yield JobEvent("dropped", {"reason": "SlowConsumer"})
            return
        if len(asked) == 2:
            self.cancel(name)
            raise ServerUnavailable("it restarts")
        yield from follow(self, name, last_id=last_id, **more)

    monkeypatch.setattr(jobs, "POLL_SECONDS", 0.0)

    monkeypatch.setattr(Client, "events", broken)
    status, out, _ = run("events", "ev", "-f")
    assert status == 0
    assert "some events are missing: they were too many" in out
    assert "0 failed, 1 cancelled\n" in out
    assert out.endswith("the job has ended\n")


def test_a_viewer_changes_nothing(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(json.dumps(TASK))
    run("apply", "-f", "-", stdin=documents(job("vw", tasks={"stream": True})))
    for words in (["suspend", "vw"], ["delete", "vw"], ["push", "vw", str(path)], ["close", "vw"]):
        status, out, err = run(*words, role="viewer")
        assert (status, out) == (1, "")
        assert "the role 'viewer' may not" in err
