"""The page about Qwen3-8B at a tiny size: its server on vLLM's CPU build, its job and its trainer."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import pytest
from rollyard.quickstart.vllm_servers import CPU_ENVIRONMENT
from rollyard_testing.faults.yard import ROOT, Yard
from rollyard_testing.integrations.trl_run import PACKAGES, TrlMissing, trl_python
from rollyard_testing.pace import patience
from rollyard_testing.vllm.servers import EnvironmentMissing, vllm_python

pytestmark = [pytest.mark.trainers, pytest.mark.usefixtures("bubblewrap_works")]

PAGE = (ROOT / "docs/qwen3-8b.md").read_text()
EXAMPLE = ROOT / "examples/qwen3"
MODEL = "Qwen/Qwen3-8B"
TINY = str(ROOT / "examples/tiny-policy/hf")
STEPS, PROMPTS, SAMPLES = 3, 2, 4
SECONDS = 900.0
"""The longest run of a command of the page, most of which is the start of vLLM."""
ONLY_WITH_GPU = ("--gpus", "--gpu-memory-utilization")
ON_CPU = ("--dtype=float32", "--enforce-eager", "--block-size=32", "--no-enable-chunked-prefill")


class Followed(NamedTuple):
    """What is left after the page was followed."""

    folder: Path
    baseline: list[dict[str, Any]]
    trained: list[dict[str, Any]]
    updates: list[dict[str, Any]]


def changed(text: str, changes: dict[str, str]) -> str:
    """Return a text of the page in which each of the parts, which must all be there once, is another one."""
    for before, after in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def server_arguments(python: Path) -> list[str]:
    """Return the page's arguments of `rollyard up`, with the tiny model and without a GPU."""
    commands = re.findall(r"^(?:\w+=\S+ )?(rollyard up (?:.*\\\n)*.*)$", PAGE, re.MULTILINE)
    (command,) = [command for command in commands if "\n" in command]
    command = changed(command, {MODEL: TINY, "=8192": "=512", " --detach": ""})
    words = shlex.split(command.replace("\\\n", " "))
    assert words[:2] == ["rollyard", "up"]
    del words[words.index("--gpus") : words.index("--gpus") + 2]
    kept = [word for word in words[2:] if not any(option in word for option in ONLY_WITH_GPU)]
    kept += [f"--engine-arg={argument}" for argument in ON_CPU]
    kept += [f"--engine-env={name}={value}" for name, value in CPU_ENVIRONMENT.items()]
    return [*kept, "--vllm-python", str(python)]


def write_files(folder: Path) -> None:
    """Write the page's job and trainer, at a tiny size, and a few tasks."""
    tasks = [{"id": f"t{n}", "prompt": f"What is {n} + {n}?", "answer": str(2 * n)} for n in range(8)]
    (folder / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in tasks))
    # The tiny policy answers with some twenty tokens, and never with a number: the penalty makes the rewards.
    sizes = {
        "limit: 64": "limit: 2",
        "maxTokens: 8192, bufferTokens: 2048": "maxTokens: 32, bufferTokens: 24",
    }
    (folder / "job.yaml").write_text(changed((EXAMPLE / "job.yaml").read_text(), sizes))
    trainer = {
        f'"{MODEL}"': f'"{TINY}"',
        '"default", 16, 8, 100': f'"default", {PROMPTS}, {SAMPLES}, {STEPS}',
        "max_steps=STEPS,": "max_steps=STEPS, use_cpu=True, bf16=False,",
        '"bfloat16"': '"float32"',
    }
    (folder / "train.py").write_text(changed((EXAMPLE / "train.py").read_text(), trainer))


@pytest.fixture(scope="module")
def followed(missing: Callable[[str], NoReturn]) -> Iterator[Followed]:
    """Follow the page once, and yield what it left."""
    try:
        trainer, server = trl_python(), vllm_python()
    except (TrlMissing, EnvironmentMissing) as error:
        missing(str(error))
    # Paths of sockets are short, so this is not a folder of pytest's.
    with tempfile.TemporaryDirectory(prefix="ry-qwen-") as name:
        folder = Path(name)
        yard = Yard(folder, *server_arguments(server))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLYARD_")}
        environment |= {"ROLLYARD_HOME": str(yard.home)}
        write_files(folder)

        def run(*command: str, **variables: str) -> str:
            done = subprocess.run(
                command, cwd=folder, env={**environment, **variables}, stdin=subprocess.DEVNULL,
                capture_output=True, text=True, timeout=patience(SECONDS),
            )  # fmt: skip
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:] + yard.words()
            return done.stdout

        def rollouts(job: str) -> list[dict[str, Any]]:
            run(sys.executable, "-m", "rollyard", "trajectories", job, "-o", f"{job}.jsonl")
            return [json.loads(line) for line in (folder / f"{job}.jsonl").read_text().splitlines()]

        try:
            yard.start()
            run(sys.executable, "-m", "rollyard", "validate", "-f", "job.yaml")
            run(sys.executable, "-m", "rollyard", "submit", "-f", "job.yaml", "--wait")
            packages = os.pathsep.join(str(ROOT / package) for package in PACKAGES)
            run(str(trainer), "train.py", "run-1", PYTHONPATH=packages)
            with yard.http() as http:
                updates = http.get("/v1/backendpools/default/weights").json()["items"]
            yield Followed(folder, rollouts("baseline"), rollouts("run-1"), updates)
        finally:
            if yard.running():
                yard.stop()


def versions(trajectory: dict[str, Any]) -> set[str]:
    """Return the policy versions of a trajectory's sampled tokens."""
    return {
        version for segment in trajectory["segments"] for version in segment["policy_versions"] if version
    }


def test_the_baseline_has_a_reward_for_each_rollout(followed: Followed) -> None:
    assert len(followed.baseline) == 2 * 8
    assert all(one["reward"] is not None for one in followed.baseline)
    assert {version for one in followed.baseline for version in versions(one)} == {"default"}


def test_each_step_samples_with_the_adapter_of_the_step_before(followed: Followed) -> None:
    assert len(followed.trained) == STEPS * PROMPTS * SAMPLES
    steps = [version.partition("-")[2] for one in followed.trained for version in sorted(versions(one))]
    size = PROMPTS * SAMPLES
    assert steps == [f"step-{step}" for step in range(STEPS) for _ in range(size)]
    assert {one["sampling"]["logprobs_mode"] for one in followed.trained} == {"processed_logprobs"}
    assert {update["state"] for update in followed.updates} == {"Succeeded"}
    assert len(followed.updates) == STEPS


def test_the_adapter_has_learnt_something(followed: Followed) -> None:
    """The one at the end differs from those before, the first of which changes nothing."""
    files = sorted(followed.folder.glob("runs/run-1/weights/*/adapter_model.safetensors"))
    files.append(followed.folder / "runs/run-1/model/adapter_model.safetensors")
    assert len({file.read_bytes() for file in files}) == len(files) == 3


def test_the_sizes_are_those_of_the_model() -> None:
    vocabulary, hidden, layers, heads, kv_heads, head, inner = 151_936, 4096, 36, 32, 8, 128, 12_288
    attention = 2 * hidden * heads * head + 2 * hidden * kv_heads * head
    layer = attention + 3 * hidden * inner + 2 * head + 2 * hidden
    weights = layers * layer + 2 * vocabulary * hidden + hidden
    of_token = 2 * layers * kv_heads * head * 2
    rank = 32
    inputs_and_outputs = (
        [(hidden, heads * head)] * 2 + [(hidden, kv_heads * head)] * 2 + [(hidden, inner)] * 3
    )
    adapter = layers * rank * sum(map(sum, inputs_and_outputs))
    for number in (weights, of_token, adapter):
        assert f"{number:,}" in PAGE
    for share, context, places in ((0.45, 8192, 59), (0.9, 24_576, 62), (0.9, 16_384, 93), (0.9, 40_960, 37)):
        cache = share * 85.5e9 - 2 * weights - 4e9
        tokens = int(cache / of_token / 1000) * 1000
        assert f"{share} × 85.5 − 16.4 − 4 = {cache / 1e9:.1f} GB" in PAGE
        assert f"{tokens:,} / {context // 4:,} = {tokens // (context // 4)} |" in PAGE
        assert places == tokens // (context // 4)
