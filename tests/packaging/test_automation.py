"""The GitHub workflow and the pre-commit hooks are valid, and call make targets that exist."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
HOOKS = ROOT / ".pre-commit-config.yaml"
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))

clientlib = pytest.importorskip(
    "pre_commit.clientlib", reason="pre-commit is missing: pip install -e '.[dev]'"
)


def steps(workflow: Path) -> list[dict[str, Any]]:
    """Return every step of every job."""
    document = yaml.safe_load(workflow.read_text())
    return [step for job in document["jobs"].values() for step in job["steps"]]


def called(text: str) -> list[str]:
    """Return the targets of the `make` commands in a piece of shell."""
    return re.findall(r"(?:^|[;&|\s])make ([a-z-]+)", text)


def test_there_is_a_workflow() -> None:
    assert [path.name for path in WORKFLOWS] == ["tests.yml"]


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_fit_their_schema(workflow: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "check_jsonschema",
         "--builtin-schema", "vendor.github-workflows", str(workflow)],
        capture_output=True, text=True, timeout=patience(60),
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_workflows_call_make_targets(workflow: Path) -> None:
    targets = [target for step in steps(workflow) for target in called(step.get("run", ""))]
    assert {"check", "test", "test-all", "docs"} == set(targets)
    assert set(targets) - TARGETS == set()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_each_job_is_bounded(workflow: Path) -> None:
    jobs = yaml.safe_load(workflow.read_text())["jobs"]
    assert [name for name, job in jobs.items() if "timeout-minutes" not in job] == []


def test_the_hermetic_tests_run_on_each_version_that_the_package_names() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    prefix = "Programming Language :: Python :: "
    named = [line.removeprefix(prefix) for line in project["classifiers"] if line.startswith(prefix)]
    assert f">={named[0]}" == project["requires-python"]
    matrix = yaml.safe_load(WORKFLOWS[0].read_text())["jobs"]["check"]["strategy"]["matrix"]
    assert matrix == {"python": named}


def test_hooks_are_valid_and_call_make_targets() -> None:
    config = clientlib.load_config(HOOKS)
    hooks = [hook for repository in config["repos"] for hook in repository["hooks"]]
    targets = {hook["id"]: called(hook["entry"]) for hook in hooks}
    assert targets == {hook["id"]: [hook["id"]] for hook in hooks}
    assert {"lint", "typecheck", "check"} == set(targets)
    assert set(targets) - TARGETS == set()
