"""The player of a stream hands each task its own trajectories, and never waits without an end."""

from __future__ import annotations

import queue
import shutil
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rollyard.errors import CliError
from rollyard.integrations.errors import RolloutsLate, StreamEnded, TrainerMismatch
from rollyard.integrations.streams import MAX_ID, StreamPlayer
from rollyard.integrations.trl import TASK_KEY, TrlRollouts, TrlWeights
from rollyard_client.errors import JobFailed, ServerUnavailable
from rollyard_crds import RolloutJob, Task
from rollyard_crds.base import Condition
from rollyard_crds.trajectory import Segment, Trajectory
from rollyard_testing.manifests import job_manifest
from rollyard_testing.pace import patience

TASKS = [{"id": "a", "prompt": "A?"}, {"id": "b", "messages": [{"role": "user", "content": "B?"}]}]


def manifest(samples: int = 2, **tasks: Any) -> dict[str, Any]:
    return job_manifest(
        "train",
        {
            "tasks": tasks or {"stream": True},
            "handler": "math",
            "samplesPerTask": samples,
            "backendRef": {"name": "policy"},
        },
    )


class Ended(Iterator[Trajectory]):
    """The ended rollouts that the test scripts, with a cursor that counts them."""

    def __init__(self, ended: queue.Queue[Trajectory | Exception | None], cursor: str) -> None:
        self.ended = ended
        self.cursor = cursor

    def __next__(self) -> Trajectory:
        one = self.ended.get(timeout=patience(30))
        if one is None:
            raise StopIteration
        if isinstance(one, Exception):
            raise one
        self.cursor = str(int(self.cursor or 0) + 1)
        return one


class ScriptedClient:
    """A client whose stream ends rollouts when the test says so."""

    def __init__(self) -> None:
        self.pushed: list[Task] = []
        self.closed = 0
        self.namespaces: set[str] = set()
        """The namespaces that the player has named."""
        self.refuses: Exception | None = None
        """What the next push of tasks is refused with."""
        self.updates: list[tuple[str, str]] = []
        self.loaded: list[tuple[str, str, list[str]]] = []
        """The pool, the mode and the files of the checkpoint, at the time of each update."""
        self.adapters: list[tuple[str | None, str]] = []
        """The name of the adapter, if it was one, and `in_flight`, of each update."""
        self.waits: list[tuple[str, int, float]] = []
        self.update_state = "Succeeded"
        self.ended: queue.Queue[Trajectory | Exception | None] = queue.Queue()
        self.begun: list[str] = []
        """The cursors with which readers have begun."""
        self.at_once = True
        """Whether the rollouts of a task end as soon as it is pushed, those with odd numbers first."""
        self.samples = 2

    def submit(self, job: RolloutJob) -> RolloutJob:
        self.samples = job.spec.samples_per_task
        return job

    def close_stream(self, name: str, namespace: str) -> None:
        self.namespaces.add(namespace)
        self.closed += 1
        self.ended.put(None)

    def push_tasks(self, name: str, tasks: list[Task], namespace: str) -> None:
        self.namespaces.add(namespace)
        if self.refuses is not None:
            refused, self.refuses = self.refuses, None
            raise refused
        self.pushed += tasks
        if self.at_once:
            for number in sorted(range(self.samples), key=lambda n: (n % 2 == 0, n)):
                for task in reversed(tasks):
                    self.ended.put(rollout(task.id, number))

    def trajectories(
        self, name: str, *, follow: bool, timeout: float | None, cursor: str, namespace: str
    ) -> Ended:
        assert timeout is None, "between two steps of a trainer nothing ends"
        self.namespaces.add(namespace)
        self.begun.append(cursor)
        return Ended(self.ended, cursor)

    def update_weights(
        self,
        pool: str,
        version: str,
        *,
        checkpoint: str | None,
        lora: tuple[str, str] | None,
        mode: str,
        in_flight: str,
    ) -> Any:
        name, folder = lora or (None, checkpoint)
        assert folder is not None
        self.updates.append((version, folder))
        self.adapters.append((name, in_flight))
        self.loaded.append((pool, mode, sorted(path.name for path in Path(folder).iterdir())))
        return types.SimpleNamespace(id=len(self.updates))

    def wait_weights(self, pool: str, update: int, timeout: float) -> Any:
        self.waits.append((pool, update, timeout))
        return types.SimpleNamespace(id=update, state=self.update_state, message="a server refused them")


def rollout(task: str, sample: int, **more: Any) -> Trajectory:
    segment = Segment(
        prompt_ids=[1, 2], response_ids=[sample, 7], loss_mask=[1, 0], logprobs=[-0.5, 0.0],
        policy_versions=["0", ""],
    )  # fmt: skip
    return Trajectory.model_validate(
        {"id": f"{task}.{sample}", "job": "train", "task_id": task, "group_id": task, "sample_index": sample,
         "reward": float(sample), "segments": [segment], **more}
    )  # fmt: skip


def trainer(step: int = 0, *, peft: bool = False, **arguments: Any) -> Any:
    """Return a trainer after so many steps, of an adapter or of a whole model."""
    return types.SimpleNamespace(
        args=types.SimpleNamespace(**{"temperature": 1.0, **arguments}),
        processing_class=types.SimpleNamespace(pad_token_id=0, save_pretrained=lambda folder: None),
        state=types.SimpleNamespace(global_step=step),
        model=None,
        accelerator=types.SimpleNamespace(
            is_main_process=True,
            wait_for_everyone=lambda: None,
            get_state_dict=lambda model: {"w": step},
            unwrap_model=lambda model: types.SimpleNamespace(
                save_pretrained=lambda folder, state_dict: (
                    folder.mkdir(parents=True),
                    (folder / "weights").write_text(str(state_dict["w"])),
                ),
                **({"peft_config": {}} if peft else {}),
            ),
        ),
    )


def streamed(samples: int = 2, *, at_once: bool = True) -> tuple[ScriptedClient, StreamPlayer]:
    client = ScriptedClient()
    client.at_once = at_once
    return client, StreamPlayer(client, manifest(samples))  # type: ignore[arg-type]


def trl_rollouts(client: ScriptedClient, weights: TrlWeights | None = None) -> TrlRollouts:
    return TrlRollouts(client, manifest(2), TASKS, weights=weights)  # type: ignore[arg-type]


def test_each_task_gets_its_own_rollouts_in_order() -> None:
    client, player = streamed(3)
    client.ended.put(rollout("somebody-elses", 0))
    for _ in range(2):
        played = player.play([*TASKS, TASKS[0]], timeout=patience(30))
        assert [[one.sample_index for one in group] for group in played] == [[0, 1, 2]] * 3
    ids = [task.id for task in client.pushed]
    assert len(set(ids)) == len(ids) == 6
    assert [name.partition(":")[0] for name in ids] == ["a", "b", "a"] * 2
    for _ in range(2):
        player.close()
    assert client.closed == 1
    with pytest.raises(StreamEnded, match="closed"):
        player.play(TASKS)
    assert len(client.pushed) == 6
    assert client.namespaces == {"default"}


def test_calls_from_several_threads_do_not_mix() -> None:
    _, player = streamed()
    found: dict[int, list[str]] = {}

    def play(number: int) -> None:
        groups = player.play([{"id": f"t{number}", "prompt": "?"}] * 5, timeout=patience(30))
        found[number] = [one.task_id for group in groups for one in group]

    threads = [threading.Thread(target=play, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(30))
    for number in range(4):
        assert len(found[number]) == 10
        assert {name.partition(":")[0] for name in found[number]} == {f"t{number}"}


def test_a_wait_is_bounded_and_can_be_followed_by_another() -> None:
    client, player = streamed(at_once=False)
    with pytest.raises(RolloutsLate, match="2 of 2 tasks of job train"):
        player.play(TASKS, timeout=0.05)
    late = client.pushed[0].id
    client.at_once = True
    client.ended.put(rollout(late, 0))
    assert len(player.play(TASKS, timeout=patience(30))) == 2


@pytest.mark.parametrize(
    "end",
    [None, JobFailed("has failed"), ServerUnavailable("nobody answers"), RuntimeError("a broken page")],
)
def test_whoever_waits_hears_why_nothing_comes(end: Exception | None) -> None:
    client, player = streamed(at_once=False)
    future = player.start(TASKS[:1])[0]
    client.ended.put(rollout("somebody-elses", 0))
    client.ended.put(end)
    with pytest.raises(ServerUnavailable if isinstance(end, ServerUnavailable) else StreamEnded) as caught:
        future.result(patience(30))
    assert ("job train has ended" if end is None else str(end)) in str(caught.value)
    client.at_once = True
    # The player reads on for the next call, and nothing twice.
    assert len(player.play(TASKS, timeout=patience(30))) == 2
    assert client.begun == ["", "1"]


def test_the_stream_that_exists_says_how_many_samples_a_task_has(monkeypatch: pytest.MonkeyPatch) -> None:
    client = ScriptedClient()
    client.samples = 3
    there = RolloutJob.model_validate({**manifest(3), "metadata": {"name": "train", "namespace": "team"}})
    monkeypatch.setattr(client, "submit", lambda job: there)
    with StreamPlayer(client, manifest(2)) as player:  # type: ignore[arg-type]
        (group,) = player.play(TASKS[:1], timeout=patience(30))
    assert [one.sample_index for one in group] == [0, 1, 2]
    assert (client.closed, client.namespaces) == (1, {"team"})


def test_only_the_tasks_that_are_late_are_given_up() -> None:
    client, player = streamed(at_once=False)
    other = player.start(TASKS[:1])[0]
    client.ended.put(rollout("somebody-elses", 0))
    done, late = player.start(TASKS)
    for number in (1, 0):
        client.ended.put(rollout(client.pushed[1].id, number))
    assert [one.sample_index for one in done.result(patience(30))] == [0, 1]
    with pytest.raises(RolloutsLate, match="1 of 1 tasks"):
        player.play(TASKS[1:], timeout=0.01)
    # Those of other calls still come.
    for future, task in ((other, client.pushed[0]), (late, client.pushed[2])):
        for number in range(2):
            client.ended.put(rollout(task.id, number))
        assert len(future.result(patience(30))) == 2
    waiting = player.start(TASKS)
    player.close()
    assert all(future.cancelled() for future in waiting)


def test_tasks_that_are_refused_are_forgotten() -> None:
    client = ScriptedClient()
    client.refuses = ServerUnavailable("too many")
    player = StreamPlayer(client, manifest())  # type: ignore[arg-type]
    with pytest.raises(ServerUnavailable, match="too many"):
        player.start(TASKS)
    assert (client.begun, client.pushed) == ([], [])
    assert len(player.play(TASKS, timeout=patience(30))) == 2
    assert not player._pending


def test_long_names_of_tasks_stay_apart() -> None:
    client, player = streamed()
    played = player.play([{"id": "x" * MAX_ID, "prompt": "?"}] * 11, timeout=patience(30))
    names = [task.id for task in client.pushed]
    assert len(set(names)) == 11
    assert max(map(len, names)) <= MAX_ID
    assert [{one.task_id for one in group} for group in played] == [{name} for name in names]
    # Another life of the trainer meets the tasks of this one in the same stream.
    again = ScriptedClient()
    StreamPlayer(again, manifest()).play([{"id": "x" * MAX_ID, "prompt": "?"}], timeout=patience(30))  # type: ignore[arg-type]
    assert again.pushed[0].id not in names


def test_a_job_that_is_no_stream_is_refused() -> None:
    with pytest.raises(TrainerMismatch, match="stream: true"):
        StreamPlayer(ScriptedClient(), manifest(inline=TASKS))  # type: ignore[arg-type]


@pytest.mark.parametrize("note", ["rollyard.dev/closed", "rollyard.dev/cancel-reason", ""])
def test_a_job_that_takes_no_more_tasks_is_refused_before_any_weights_change(
    note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = ScriptedClient()
    there = RolloutJob.model_validate(manifest())
    there.status.phase = "Succeeded"
    if note:
        there.metadata.annotations = {note: "true"}
    else:
        ended = {"type": "Finished", "status": "True", "reason": "Done"}
        there.status.conditions = [
            Condition.model_validate({**ended, "lastTransitionTime": "2026-01-02T03:04:05Z"})
        ]
    monkeypatch.setattr(client, "submit", lambda job: there)
    weights = TrlWeights(client, "policy", tmp_path, at_once=True)  # type: ignore[arg-type]
    with pytest.raises(StreamEnded, match=r"a job 'train' .* \(it is Succeeded\): choose another name"):
        trl_rollouts(client, weights)
    assert client.updates == []


def test_trl_gets_a_row_for_each_prompt_in_order() -> None:
    client = ScriptedClient()
    rollouts = trl_rollouts(client)
    prompts = {row["task"]: row["prompt"] for row in rollouts.dataset()}
    assert prompts["b"] == [{"role": "user", "content": "B?", TASK_KEY: "b"}]
    order = ["b", "b", "a", "a", "b", "b"]
    output = rollouts([prompts[name] for name in order], trainer())
    assert [name.partition(":")[0] for name in output["rollout_id"]] == order
    assert output["completion_ids"] == [[0, 7], [1, 7]] * 3
    assert output["env_mask"] == [[1, 0]] * 6
    assert output["reward"] == [0.0, 1.0] * 3
    assert len(client.pushed) == 3


def test_trl_is_refused_what_does_not_fit() -> None:
    client = ScriptedClient()
    rollouts = trl_rollouts(client)
    prompt = rollouts.dataset()[0]["prompt"]
    with pytest.raises(TrainerMismatch, match=r"task a stands 3 times in .* samplesPerTask is 2"):
        rollouts([prompt] * 3, trainer())
    with pytest.raises(TrainerMismatch, match=r"temperature 0\.7, and the job samples at 1\.0"):
        rollouts([prompt] * 2, trainer(temperature=0.7))
    for stranger in ("A?", [{"role": "user", "content": "A?"}], [{"role": "user", TASK_KEY: "c"}], []):
        with pytest.raises(TrainerMismatch, match=r"make the trainer's dataset of dataset\(\)"):
            rollouts([stranger] * 2, trainer())
    assert client.pushed == []
    with pytest.raises(TrainerMismatch, match="two tasks have the id 'a'"):
        TrlRollouts(client, manifest(2), [TASKS[0], TASKS[0]])  # type: ignore[arg-type]


def test_weights_are_brought_once_a_step(tmp_path: Any) -> None:
    client = ScriptedClient()
    weights = TrlWeights(client, "policy", tmp_path, keep=2)  # type: ignore[arg-type]
    rollouts = trl_rollouts(client, weights)
    prompt = rollouts.dataset()[0]["prompt"]
    for step in (0, 1, 1, 2, 3):
        rollouts([prompt] * 2, trainer(step))
    assert [version.partition("-")[2] for version, _ in client.updates] == ["step-1", "step-2", "step-3"]
    assert weights.version == client.updates[-1][0]
    folders = sorted(path.name for path in tmp_path.iterdir())
    assert [name.partition("-")[2] for name in folders] == ["step-2", "step-3"]
    assert (tmp_path / folders[-1] / "weights").read_text() == "3"
    assert client.loaded == [("policy", "abort", ["weights"])] * 3, "a pool hears of whole checkpoints only"
    assert client.waits == [("policy", number, 600.0) for number in (1, 2, 3)]


def test_one_process_brings_the_weights_for_all(tmp_path: Any) -> None:
    """The others take part in collecting them, and wait until the pool has them."""
    client = ScriptedClient()
    options: dict[str, Any] = {"keep": 1, "mode": "keep", "timeout": 5.0}
    weights = TrlWeights(client, "policy", tmp_path, **options)  # type: ignore[arg-type]
    steps: list[str] = []

    def collect(model: Any) -> dict[str, Any]:
        steps.append("collect")
        return {"w": 1}

    for main, updates in ((False, [0, 0]), (True, [1, 2])):
        steps.clear()
        for step in (1, 2):
            process = trainer(step)
            process.accelerator.is_main_process = main
            process.accelerator.get_state_dict = collect
            process.accelerator.wait_for_everyone = lambda: steps.append(f"after {len(client.updates)}")
            weights.bring(process)
            weights.bring(process)
        assert steps == ["collect", f"after {updates[0]}", "collect", f"after {updates[1]}"]
        weights = TrlWeights(client, "policy", tmp_path, **options)  # type: ignore[arg-type]
    assert [path.name.partition("-")[2] for path in tmp_path.iterdir()] == ["step-2"]
    assert client.loaded == [("policy", "keep", ["weights"])] * 2
    assert client.waits == [("policy", 1, 5.0), ("policy", 2, 5.0)]
    other = TrlWeights(client, "policy", tmp_path)  # type: ignore[arg-type]
    other.bring(trainer(2))
    assert len({version for version, _ in client.updates}) == 3, "a version never names other weights"


def test_weights_that_a_server_refuses_stop_the_trainer(tmp_path: Any) -> None:
    client = ScriptedClient()
    client.update_state = "Failed"
    weights = TrlWeights(client, "policy", tmp_path, at_once=True)  # type: ignore[arg-type]
    rollouts = trl_rollouts(client, weights)
    with pytest.raises(CliError, match="a server refused them") as refused:
        rollouts([rollouts.dataset()[0]["prompt"]] * 2, trainer())
    assert refused.value.reason == "WeightsRefused"
    assert client.pushed == []
    assert weights.version == ""
    # The pool still lacks them, so they are brought again before anything is played.
    client.update_state = "Succeeded"
    for path in tmp_path.iterdir():
        shutil.rmtree(path)
    rollouts([rollouts.dataset()[0]["prompt"]] * 2, trainer())
    assert [version.partition("-")[2] for version, _ in client.updates] == ["step-0", "step-0"]
    assert weights.version == client.updates[-1][0]
    with pytest.raises(ValueError, match="keep is 0"):
        TrlWeights(client, "policy", tmp_path, keep=0)  # type: ignore[arg-type]


def test_an_adapter_has_one_name_for_the_servers(tmp_path: Any) -> None:
    client = ScriptedClient()
    weights = TrlWeights(client, "policy", tmp_path, adapter="trained")  # type: ignore[arg-type]
    for step in (1, 2):
        weights.bring(trainer(step, peft=True))
    # Rollouts that began without the adapter cannot continue with it.
    assert client.adapters == [("trained", "restart"), ("trained", "continue")]
    assert [Path(folder).name for _, folder in client.updates] == [version for version, _ in client.updates]
    plain = TrlWeights(client, "policy", tmp_path)  # type: ignore[arg-type]
    plain.bring(trainer(1))
    assert client.adapters[2:] == [(None, "continue")]


@pytest.mark.parametrize(
    ("adapter", "peft", "why"),
    [("", True, "give TrlWeights adapter='NAME'"), ("a", False, "give the trainer a peft_config")],
)
def test_an_adapter_is_not_mistaken_for_a_model(tmp_path: Any, adapter: str, peft: bool, why: str) -> None:
    client = ScriptedClient()
    weights = TrlWeights(client, "policy", tmp_path, adapter=adapter)  # type: ignore[arg-type]
    with pytest.raises(TrainerMismatch, match=why) as refused:
        weights.bring(trainer(1, peft=peft))
    assert refused.value.reason == "AdapterMismatch"
    assert (client.updates, list(tmp_path.iterdir())) == ([], [])


def test_weights_are_converted_for_the_servers(tmp_path: Any) -> None:
    client = ScriptedClient()

    def convert(source: Any, target: Any) -> None:
        target.mkdir()
        (target / "model.onnx").write_text((source / "weights").read_text())

    TrlWeights(client, "policy", tmp_path, convert=convert).bring(trainer(4))  # type: ignore[arg-type]
    (folder,) = tmp_path.iterdir()
    assert [path.name for path in folder.iterdir()] == ["model.onnx"]
    assert client.updates[0][1] == str(folder)
