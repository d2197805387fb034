"""HumanEval, GSM8K and rows of verl as whole jobs: a control plane, a worker and real sandboxes."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from rollyard_crds.trajectory import Trajectory
from rollyard_testing.adversary.attacklab import Lab, a_lab
from rollyard_testing.adversary.policyserver import FAMILY, MODEL, PolicyServer
from rollyard_testing.manifests import pool_manifest

SHARED = Path(os.environ.get("ROLLYARD_SHARED", "")) / "data"
ORACLE = {"type": "oracle", "tools": ["submit"]}
SMALL = {"warm": 0, "resources": {"memory": "512Mi", "disk": "16Mi", "processes": 64}}
ADD = "print(sum(map(int, input().split())))"


@pytest.fixture(scope="module")
def lab(bubblewrap_works: None) -> Iterator[Lab]:
    with a_lab("--sandbox", "bubblewrap") as lab:
        yield lab


def rows(name: str) -> list[dict[str, Any]]:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"ROLLYARD_SHARED names no folder with data/{name}")
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line) for line in lines]


def played(lab: Lab, name: str, path: Path, tasks: dict[str, Any], **spec: Any) -> list[Trajectory]:
    """Return the trajectories of a job whose tasks are in this file, once the job has succeeded."""
    spec = {"sandbox": SMALL, "agent": ORACLE, **spec, "tasks": {"url": lab.client.upload(path), **tasks}}
    manifest = {"apiVersion": "rollyard.dev/v1alpha1", "kind": "RolloutJob", "metadata": {"name": name}}
    lab.client.submit({**manifest, "spec": spec})
    found = list(lab.client.trajectories(name, follow=True))
    failed = [(each.task_id, each.reason, each.message) for each in found if each.reward is None]
    assert not failed, (failed, lab.log())
    assert all(each.attempt == 0 for each in found)
    return found


def humaneval(lab: Lab, folder: Path, wanted: list[dict[str, Any]], name: str) -> None:
    emptied = [{**row, "canonical_solution": "    pass\n"} for row in wanted]
    for reward, its in ((1.0, wanted), (0.0, emptied)):
        path = folder / f"{name}-{reward:g}.jsonl.gz"
        with gzip.open(path, "wt") as file:
            file.writelines(json.dumps(row) + "\n" for row in its)
        found = played(lab, f"{name}-{reward:g}", path, {"format": "humaneval"}, handler="code")
        assert len(found) == len(its)
        assert [(each.task_id, each.reward) for each in found if each.reward != reward] == []


def test_humaneval_in_a_job(lab: Lab, tmp_path: Path) -> None:
    """Among them are tests that call a helper of the prompt, the function itself, and random numbers."""
    every = rows("HumanEval.jsonl.gz")
    humaneval(lab, tmp_path, [every[number] for number in (0, 2, 32, 33, 38, 53, 83, 160)], "few")


@pytest.mark.nightly
def test_all_of_humaneval_in_a_job(lab: Lab, tmp_path: Path) -> None:
    every = rows("HumanEval.jsonl.gz")
    assert len(every) == 164
    humaneval(lab, tmp_path, every, "all")


def gsm8k(lab: Lab, folder: Path, wanted: list[dict[str, Any]], name: str) -> None:
    """Play reference answers, of which every other one is perturbed and must score 0."""
    path = folder / f"{name}.jsonl"
    expected: dict[str, float] = {}
    with path.open("w") as file:
        for number, row in enumerate(wanted):
            gold = row["answer"].rpartition("####")[2].strip()
            right = number % 2 == 0
            said = gold if right else str(float(gold.replace(",", "")) + 1)
            solution = [{"name": "submit", "arguments": {"answer": f"The answer is \\boxed{{{said}}}."}}]
            task = {"id": f"gsm8k-{number}", "prompt": row["question"], "answer": gold, "solution": solution}
            expected[str(task["id"])] = float(right)
            file.write(json.dumps(task) + "\n")
    found = played(lab, name, path, {}, handler="math")
    assert {each.task_id: each.reward for each in found} == expected


def test_gsm8k_in_a_job(lab: Lab, tmp_path: Path) -> None:
    gsm8k(lab, tmp_path, rows("gsm8k_test.jsonl")[::66], "gsm8k-few")


@pytest.mark.nightly
def test_all_of_gsm8k_in_a_job(lab: Lab, tmp_path: Path) -> None:
    every = rows("gsm8k_test.jsonl")
    assert len(every) == 1319
    gsm8k(lab, tmp_path, every, "gsm8k-all")


VERL = [
    ("math", "1/2", "The answer is \\boxed{0.5}.", "The answer is \\boxed{0.6}."),
    ("mcq", "B", "Answer: B", "Answer: C"),
    ("code", json.dumps({"inputs": ["1 2\n"], "outputs": ["3\n"]}), f"```python\n{ADD}\n```", "print(4)"),
]


def test_a_parquet_file_with_math_code_and_choices(lab: Lab, tmp_path: Path) -> None:
    """A scripted model answers each row once rightly and once wrongly."""
    policy = PolicyServer(tmp_path / "model")
    marks = {f"rya-{number:016x}": row for number, row in enumerate(VERL)}
    table = [
        {
            "data_source": f"set-{ability}", "ability": ability,
            "prompt": [{"role": "user", "content": f"Solve {mark}."}],
            "reward_model": {"style": "rule", "ground_truth": truth},
            "extra_info": {"split": "train", "index": number},
        }
        for number, (mark, (ability, truth, _, _)) in enumerate(marks.items())
    ]  # fmt: skip
    path = tmp_path / "rows.parquet"
    parquet.write_table(pa.Table.from_pylist(table), path)
    for mark, (_, _, right, wrong) in marks.items():
        for said in (right, wrong):
            policy.turns(mark).texts.put(FAMILY.turn(said))
    with policy.serving():
        engine = {"type": "external", "external": {"urls": [policy.url]}}
        pool = pool_manifest("verl", {"model": MODEL, "tokenizer": str(policy.folder), "engine": engine})
        lab.client.create_pool(pool)
        found = played(
            lab, "verl", path, {"format": "verl"}, handler="mixed", samplesPerTask=2,
            agent={"type": "single_turn", "maxContextTokens": 60_000}, backendRef={"name": "verl"},
        )  # fmt: skip
    rewards: dict[str, dict[str, float | None]] = {}
    for each in found:
        rewards.setdefault(each.task_id, {})[each.messages[-1].content] = each.reward
    assert rewards == {
        f"set-{ability}/train/{number}": {right: 1.0, wrong: 0.0}
        for number, (ability, _, right, wrong) in enumerate(VERL)
    }
