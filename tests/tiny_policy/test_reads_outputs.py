"""The shipped policy, sampled from the real engine, solves 30 to 70% and lives off what its tools print."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import jinja2.sandbox
import pytest
from rollyard_testing.pace import patience
from tokenizers import Tokenizer

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "engine/src/rollyard_engine/models/tiny-policy"
RECORDS = [json.loads(line) for line in (ROOT / "examples/quickstart/tasks.jsonl").read_text().splitlines()]
SAMPLES = 4
TURNS = 6
CALL = re.compile(r"<tool_call>\n(.*)\n</tool_call>", re.DOTALL)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port_file = tmp_path_factory.mktemp("engine") / "port"
    command = [sys.executable, "-m", "rollyard_engine", "--model", str(MODEL), "--port", "0"]
    process = subprocess.Popen([*command, "--port-file", str(port_file)], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + patience(60)
        while not port_file.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"
    finally:
        process.terminate()
        process.wait(patience(20))


@dataclass(slots=True)
class Rollout:
    record: dict[str, Any]
    folder: Path
    seed: int
    ids: list[int]
    answer: str = ""
    call: dict[str, Any] | None = None
    result: str = "(no output)"
    ended: bool = False


class Policy:
    """A sampler of turns; template and tokenizer are the shipped ones, the agent is this test's own."""

    def __init__(self, url: str) -> None:
        self.client = httpx.Client(base_url=url, timeout=patience(60))
        self.model = self.client.get("/v1/models").json()["data"][0]["id"]
        self.tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self.template = environment.from_string((MODEL / "chat_template.jinja").read_text())

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def prompt(self, record: dict[str, Any]) -> list[int]:
        messages = [{"role": "user", "content": record["prompt"]}]
        return self.encode(self.template.render(messages=messages, add_generation_prompt=True))

    def turn(self, rollout: Rollout) -> None:
        """Sample a turn and run its call in the rollout's own folder."""
        body = {"model": self.model, "prompt": rollout.ids, "max_tokens": 64, "temperature": 1.0,
                "seed": rollout.seed + len(rollout.ids), "return_token_ids": True}  # fmt: skip
        choice = self.client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]
        rollout.ids += choice["token_ids"]
        found = CALL.search(choice["text"])
        try:
            rollout.call = json.loads(found[1]) if found else None
        except ValueError:
            rollout.call = None
        call = rollout.call
        if call is None or call.get("name") == "submit":
            rollout.answer = str(call["arguments"].get("answer", "")) if call else ""
            rollout.ended = True
            return
        rollout.result = act(rollout.folder, call)

    def see(self, rollout: Rollout, result: str) -> None:
        shown = f"\n<|im_start|>user\n<tool_response>\n{result}\n</tool_response><|im_end|>\n"
        rollout.ids += self.encode(f"{shown}<|im_start|>assistant\n")


def act(folder: Path, call: dict[str, Any]) -> str:
    arguments = call.get("arguments") or {}
    if call["name"] == "edit":
        target = folder / str(arguments.get("path"))
        if not target.is_file() or arguments.get("old_str", "") not in target.read_text():
            return "error: no such text"
        target.write_text(target.read_text().replace(arguments["old_str"], arguments["new_str"], 1))
        return f"edited {arguments['path']}"
    done = bash(folder, str(arguments.get("command")))
    output = (done.stdout + done.stderr).rstrip("\n")
    if done.returncode:
        return "\n".join(filter(None, (output, f"[exit code {done.returncode}]")))
    return output or "(no output)"


def bash(folder: Path, script: str, answer: str = "") -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"], "LC_ALL": "C", "ROLLYARD_ANSWER": answer}
    command = ["bash", "-c", script]
    return subprocess.run(
        command, cwd=folder, env=env, capture_output=True, text=True, timeout=patience(30), errors="replace"
    )


def success(policy: Policy, root: Path, swap: bool) -> float:
    """Return the share of solved rollouts; with `swap` each sees the next task's results of the same turn."""
    rollouts = []
    for number, record in enumerate(RECORDS * SAMPLES):
        folder = root / str(number)
        for path, text in record["sandbox"]["files"].items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
        rollouts.append(Rollout(record, folder, 1000 * number, policy.prompt(record)))
    with ThreadPoolExecutor(16) as pool:
        for _ in range(TURNS):
            going = [r for r in rollouts if not r.ended]
            list(pool.map(policy.turn, going))
            for number, rollout in enumerate(rollouts):
                if not rollout.ended:
                    other = rollouts[(number + 1) % len(rollouts)] if swap else rollout
                    policy.see(rollout, other.result)
        tests = pool.map(
            lambda r: bash(r.folder, r.record["test_script"], r.answer).returncode == 0, rollouts
        )
        return sum(tests) / len(rollouts)


@pytest.mark.nightly
def test_it_solves_some_tasks_and_none_to_speak_of_without_its_outputs(url: str, tmp_path: Path) -> None:
    policy = Policy(url)
    with contextlib.closing(policy.client):
        own = success(policy, tmp_path / "own", swap=False)
        swapped = success(policy, tmp_path / "swapped", swap=True)
    assert 0.3 <= own <= 0.7, own
    assert swapped < own / 5, (own, swapped)
