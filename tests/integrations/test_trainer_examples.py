"""The files of examples/trainers fit together, and the pages about the trainers show all of them."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import sys
import tomllib
import types
from pathlib import Path
from typing import Any

import pytest
import yaml
from rollyard_crds import RolloutJob, Task
from rollyard_testing.checkout import ROOT
from rollyard_testing.integrations.scripts import TRAINERS, commands

NAMES = ("verl", "skyrl", "slime", "prime-rl", "nemo")
TASKS = [
    {"id": "a", "prompt": "A?", "answer": "1"},
    {"id": "b", "messages": [{"role": "system", "content": "S"}, {"role": "user", "content": "B?"}]},
]
QUOTE = re.compile(r"<!-- from: (\S+) -->\n```\w*\n(.*?)```", re.DOTALL)


def settings(arguments: list[str]) -> dict[str, str]:
    """Return the `name=value` and `--name value` of a command line."""
    pairs = dict(one.split("=", 1) for one in arguments if re.match(r"\+?[a-z_.0-9]+=", one))
    for name, value in itertools.pairwise(arguments):
        if name.startswith("--") and not value.startswith("--"):
            pairs[name] = value
    return pairs


def loaded(path: Path, monkeypatch: pytest.MonkeyPatch, **modules: dict[str, Any]) -> Any:
    """Import a file, for which modules that are not installed here have the content that is given."""
    for name, content in modules.items():
        parts = name.split("__")
        for end in range(1, len(parts) + 1):
            made = types.ModuleType(".".join(parts[:end]))
            made.__path__ = []
            monkeypatch.setitem(sys.modules, made.__name__, made)
        vars(made).update(content)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", NAMES)
def test_the_job_is_a_stream(name: str) -> None:
    job = RolloutJob.model_validate(yaml.safe_load((TRAINERS / name / "job.yaml").read_text()))
    assert job.spec.tasks.stream
    assert (job.spec.backend_ref.name, job.spec.sampling.temperature) == ("default", 1.0)  # type: ignore[union-attr]
    assert job.spec.samples_per_task == (1 if name in ("verl", "nemo") else 8)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_every_file(name: str) -> None:
    page = (ROOT / "docs" / "integrations" / f"{name}.md").read_text()
    quoted: dict[str, str] = {}
    for file, text in QUOTE.findall(page):
        quoted[file] = quoted.get(file, "") + text
    files = filter(Path.is_file, (TRAINERS / name).iterdir())
    expected = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    assert {file: text for file, text in quoted.items() if file in expected} == expected


def test_the_data_sets_have_the_tasks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = loaded(TRAINERS / "rows.py", monkeypatch)
    source = tmp_path / "tasks.jsonl"
    source.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    expected = [Task.model_validate(task) for task in TASKS]
    made = {
        trainer: [rows.row(trainer, number, task) for number, task in enumerate(expected)]
        for trainer in ("verl", "skyrl", "slime", "nemo")
    }
    texts = {
        "verl": [row["extra_info"]["task"] for row in made["verl"]],
        "skyrl": [row["task"] for row in made["skyrl"]],
        "slime": [row["metadata"]["task"] for row in made["slime"]],
        "nemo": [row["task"] for row in made["nemo"]],
    }
    for trainer, tasks in texts.items():
        assert [Task.model_validate_json(text) for text in tasks] == expected, trainer
    assert made["verl"][0]["prompt"] == [{"role": "user", "content": "A?"}]
    assert made["skyrl"][1]["prompt"] == TASKS[1]["messages"]
    monkeypatch.setattr(sys, "argv", ["rows.py", "slime", str(source), str(tmp_path / "train.jsonl")])
    rows.main()
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == made["slime"]
    with pytest.raises(SystemExit, match="give verl, skyrl, slime or nemo"):
        rows.row("trl", 0, expected[0])


@pytest.mark.parametrize(("adapter", "contents"), [("", "hf_model"), ("trained", "extra")])
def test_verl_saves_what_the_callback_brings(tmp_path: Path, adapter: str, contents: str) -> None:
    (command,) = commands("verl", tmp_path, ROLLYARD_ADAPTER=adapter)
    given = settings(command)
    assert given["trainer.save_freq"] == "1"
    assert given["actor_rollout_ref.actor.checkpoint.save_contents"].rstrip("]").endswith(contents)
    assert ("actor_rollout_ref.model.lora_rank" in given) == bool(adapter)
    assert ("+actor_rollout_ref.actor.checkpoint.save_lora_only" in given) == bool(adapter)
    module, _, name = given["trainer.checkpoint_callback_class"].rpartition(".")
    assert f"class {name}(" in (TRAINERS / "verl" / f"{module}.py").read_text()
    (loop,) = yaml.safe_load(
        Path(given["actor_rollout_ref.rollout.agent.agent_loop_config_path"]).read_text()
    )
    assert loop["name"] == given["actor_rollout_ref.rollout.agent.default_agent_loop"] == "rollyard"
    module, _, name = loop["_target_"].rpartition(".")
    assert f"class {name}(" in (TRAINERS / "verl" / f"{module}.py").read_text()


def test_skyrl_and_slime_ask_for_as_many_samples_as_the_job_plays(tmp_path: Path) -> None:
    skyrl, slime = tmp_path / "skyrl", tmp_path / "slime"
    skyrl.mkdir()
    (command,) = commands("skyrl", skyrl, ROLLYARD_ADAPTER="trained")
    given = settings(command)
    assert given["generator.n_samples_per_prompt"] == "8"
    assert given["trainer.policy.model.lora.rank"] == "32"
    (slime / "scripts" / "models").mkdir(parents=True)
    (slime / "scripts" / "models" / "qwen3-8B.sh").write_text("MODEL_ARGS=(--num-layers 36)\n")
    ray, command = commands("slime", slime, SLIME=str(slime))
    assert ray[:3] == ["ray", "start", "--head"]
    given = settings(command)
    assert (given["--n-samples-per-prompt"], given["--num-layers"]) == ("8", "36")
    assert (given["--save-interval"], given["--save-hf"]) == ("1", "/checkpoints/slime-1/hf/{rollout_id}")
    samples = int(given["--rollout-batch-size"]) * int(given["--n-samples-per-prompt"])
    assert int(given["--global-batch-size"]) == samples
    module, _, name = given["--rollout-function-path"].rpartition(".")
    assert f"def {name}(" in (TRAINERS / "slime" / f"{module}.py").read_text()


def test_nemo_rl_saves_what_servers_load(tmp_path: Path) -> None:
    folder = tmp_path / "nemo"
    folder.mkdir()
    (command,) = commands("nemo", folder, NEMO_RL=str(tmp_path), ROLLYARD_ADAPTER="trained")
    assert settings(command)["policy.dtensor_cfg.lora_cfg.enabled"] == "true"
    config = yaml.safe_load((TRAINERS / "nemo" / "config.yaml").read_text())
    assert config["checkpointing"]["save_consolidated"]
    assert config["checkpointing"]["model_save_format"] == "safetensors"
    assert config["policy"]["dtensor_cfg"]["_v2"]
    agent = yaml.safe_load((TRAINERS / "nemo" / "rollyard.yaml").read_text())
    assert list(agent) == ["rollyard"] == list(agent["rollyard"]["responses_api_agents"])


def test_prime_rls_trainer_begins_after_the_orchestrator(tmp_path: Path) -> None:
    (tmp_path / "run_default").mkdir()
    (tmp_path / "run_default" / "ready").touch()
    folder = tmp_path / "programs"
    folder.mkdir()
    run = str(tmp_path)
    noted = commands("prime-rl", folder, RUN=run, RESUME="20", ROLLYARD_ADAPTER="trained")
    (orchestrator,) = [command for command in noted if "python" in command]
    (trainer,) = [command for command in noted if "torchrun" in command]
    assert [one for one in trainer if one.endswith(".toml")] == [
        str(TRAINERS / "prime-rl" / name) for name in ("trainer.toml", "lora.toml")
    ]
    assert settings(trainer)["--ckpt.resume-step"] == settings(orchestrator)["--resume"] == "20"
    assert (settings(trainer)["--output-dir"], orchestrator[4]) == (run, run)
    assert settings(orchestrator)["--adapter"] == "trained"


def test_prime_rl_trains_on_what_is_played(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The orchestrator brings the weights before each batch, and begins at the step from which it resumes."""
    done: list[Any] = []

    class Player:
        def __init__(self, client: Any, job: dict[str, Any]) -> None:
            assert job["spec"]["samplesPerTask"] == 8

        def __enter__(self) -> Player:
            return self

        def __exit__(self, *_: object) -> None:
            done.append("closed")

        def play(self, tasks: list[Task]) -> list[list[str]]:
            return [[task.id] for task in tasks]

    class Sender:
        async def send(self, batch: Any) -> None:
            done.append((batch.step, batch.examples))

    class Client:
        def __enter__(self) -> Client:
            return self

        def __exit__(self, *_: object) -> None:
            return None

    def bring(run: Path, step: int) -> None:
        assert (run / "ready").exists()
        done.append(f"weights {step}")

    module = loaded(
        TRAINERS / "prime-rl" / "orchestrate.py",
        monkeypatch,
        prime_rl={},
        prime_rl__configs__shared={"FileSystemTransportConfig": object},
        prime_rl__utils__pathing={"clean_future_steps": lambda output, step: done.append((output, step))},
        prime_rl__transport={
            "TrainingBatch": types.SimpleNamespace,
            "setup_training_batch_sender": lambda run, config: Sender(),
        },
    )
    for name, value in {
        "Client": Client,
        "StreamPlayer": Player,
        "GROUPS": 1,
        "PrimeRlWeights": lambda *_, **options: types.SimpleNamespace(bring=bring),
        "training_samples": lambda rollouts, env_name: rollouts,
    }.items():
        monkeypatch.setattr(module, name, value)
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    arguments = [str(tmp_path), "/model", str(tasks), "5", "--resume", "3", "--adapter", "trained"]
    monkeypatch.setattr(sys, "argv", ["orchestrate.py", *arguments])
    module.main()
    assert done == [(tmp_path, 3), "weights 3", (4, ["b"]), "weights 4", (5, ["a"]), "closed"]
    run = tomllib.loads((tmp_path / "run_default" / "control" / "orch.toml").read_text())
    assert (run["ckpt"]["resume_step"], run["model"]["lora"]["rank"]) == (3, 32)
    trainer = tomllib.loads((TRAINERS / "prime-rl" / "trainer.toml").read_text())
    lora = tomllib.loads((TRAINERS / "prime-rl" / "lora.toml").read_text())
    assert lora["model"]["lora"] == run["model"]["lora"]
    assert trainer["weight_broadcast"]["type"] == trainer["rollout_transport"]["type"] == "filesystem"
    assert (trainer["model"]["seq_len"], trainer["max_steps"]) == (run["seq_len"], run["max_steps"])
