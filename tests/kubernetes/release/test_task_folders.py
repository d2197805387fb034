"""The example's task folders of Harbor in pods: solved, left alone, and with rewards planted."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from rollyard.jobs.manifests import packed
from rollyard_testing.kubernetes.installedchart import in_namespace, job

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.installedchart import Installation

pytestmark = [pytest.mark.kubernetes, pytest.mark.nightly]

TASKS = Path(__file__).resolve().parents[3] / "examples/harbor/tasks"
NAMES = ("planted", "separate", "single", "steps")
SCRIPTS = {
    "idle": "true\n",
    "forged": "cd /logs/verifier; echo '{\"reward\": 1}' > reward.json; echo 1 > reward.txt\n",
}
"""What the agent runs in place of the reference solutions. It must gain nothing by it."""


def test_rewards_are_those_of_one_machine(installation: Installation, tmp_path: Path) -> None:
    """They are the same as in tests/pipeline/test_harbor.py, where the same folders run under bubblewrap."""
    shutil.copytree(TASKS, tmp_path / "solved")
    for kind, script in SCRIPTS.items():
        shutil.copytree(TASKS, tmp_path / kind)
        for solution in (tmp_path / kind).glob("**/solve.sh"):
            solution.write_text(script)
    with installation.client() as client, packed(tmp_path) as file:
        url = client.upload(file, installation.jobs)
        folders = job(
            "folders",
            tasks={"url": url, "format": "harbor"},
            handler="harbor",
            sandbox={
                "warm": 0,
                "resources": {"cpu": "1", "memory": "128Mi", "disk": "16Mi", "processes": 64},
            },
        )
        with installation.made(in_namespace(folders, installation.jobs)):
            installation.wait("rj", "folders", "Succeeded")
            found = {
                one.task_id: (one.status, one.reward, one.reward_reason)
                for one in client.trajectories("folders")
            }
    wanted = {"solved": 1.0, "idle": 0.0, "forged": 0.0}
    expected = {
        f"{kind}/{name}": ("succeeded", reward, "") for kind, reward in wanted.items() for name in NAMES
    }
    assert found == expected
