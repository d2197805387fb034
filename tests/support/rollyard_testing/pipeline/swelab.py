"""A small repository with hidden tests, and rollouts of its task through all three stages."""

from __future__ import annotations

import base64
import copy
import functools
import importlib.util
import io
import py_compile
import tarfile
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from importlib.metadata import distribution
from importlib.util import cache_from_source
from pathlib import Path
from typing import Any

from rollyard_crds.lease import Lease, StageResult, StageTimes
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_crds.task import Task
from rollyard_pipeline import registry
from rollyard_pipeline.backends import BackendClient
from rollyard_pipeline.control_plane.calls import WorkerCall, WorkerCalls
from rollyard_pipeline.control_plane.leases import HeldLease
from rollyard_pipeline.errors import ControlPlaneRefused
from rollyard_pipeline.handlers.mixed import MixedHandler
from rollyard_pipeline.handlers.swe.handler import SweHandler
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_pipeline.stages.stages import Stages

PACKAGES = ("pytest", "_pytest", "pluggy", "iniconfig", "packaging", "py", "pygments")
"""What pytest needs to run under a Python in which it is not installed."""
SOURCE = '''"""Intervals of whole numbers."""


class Interval:
    def __init__(self, low, high):
        self.low, self.high = low, high

    def __len__(self):
        return max(0, self.high - self.low)

    def __contains__(self, number):
        return self.low <= number <= self.high


def total(intervals):
    return sum(len(one) for one in intervals)
'''
FIX = ("self.low <= number <= self.high", "self.low <= number < self.high")
FIX_DIFF = f"""\
diff --git a/interval/__init__.py b/interval/__init__.py
--- a/interval/__init__.py
+++ b/interval/__init__.py
@@ -12,3 +12,3 @@
     def __contains__(self, number):
-        return {FIX[0]}
+        return {FIX[1]}
 
"""
"""The same as a diff."""
HIDDEN = """import unittest

from interval import Interval, total


def test_the_end_is_outside():
    assert 3 not in Interval(1, 3)


class EndTest(unittest.TestCase):
    def test_an_empty_interval(self):
        self.assertNotIn(1, Interval(1, 1))


def test_length():
    assert total([Interval(1, 3), Interval(3, 1)]) == 2
"""
SHOWN = "def test_shown():\n    from interval import Interval\n    assert 2 in Interval(1, 3)\n"
FAILS = [
    "tests/test_interval.py::test_the_end_is_outside",
    "tests/test_interval.py::EndTest::test_an_empty_interval",
]
PASSES = ["tests/test_interval.py::test_length", "tests/test_shown.py::test_shown"]
SCRIPT = 'PYTHONPATH="$PYTHONPATH:$PWD:$PWD/../site" python3 -m pytest -rA -p no:cacheprovider tests\n'
"""The variable begins with what Eval puts there."""
FIXING = f"sed -i 's/{FIX[0]}/{FIX[1]}/' repo/interval/__init__.py"
"""The command that solves the task."""
SMALL = {"warm": 0, "resources": {"memory": "256Mi", "disk": "64Mi", "processes": 64}}


def packed(files: Mapping[str, bytes]) -> str:
    """Return a compressed tar file with these files, in base64."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz", compresslevel=1) as archive:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    return base64.b64encode(out.getvalue()).decode()


@functools.cache
def archive() -> str:
    """Return the repository in `repo`, and beside it pytest in `site`."""
    files = {
        "repo/interval/__init__.py": SOURCE.encode(),
        "repo/tests/test_interval.py": b"",
        "repo/tests/test_shown.py": SHOWN.encode(),
        "repo/setup.cfg": b"[tool:pytest]\naddopts =\n",
    }
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        origin = Path(spec.origin)
        top = origin.parent.parent if origin.name == "__init__.py" else origin.parent
        for path in sorted(origin.parent.rglob("*.py")) if top != origin.parent else [origin]:
            name = path.relative_to(top).as_posix()
            if not name.startswith("pygments/") or _needed(name):
                files[f"site/{name}"] = path.read_bytes()
                files[f"site/{cache_from_source(name)}"] = _compiled(path)
    for package in ("pytest", "pluggy"):
        found = distribution(package)
        metadata = found.read_text("METADATA")
        assert metadata is not None
        files[f"site/{package}-{found.version}.dist-info/METADATA"] = metadata.encode()
    return packed(files)


def _compiled(path: Path) -> bytes:
    """Return a module as Python keeps it, so that it is compiled once, and not in every sandbox."""
    with tempfile.NamedTemporaryFile(suffix=".pyc") as file:
        py_compile.compile(
            str(path),
            file.name,
            doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        return Path(file.name).read_bytes()


def _needed(name: str) -> bool:
    """Return whether pytest loads this module of pygments, most of which are languages and colors."""
    folder, _, last = name.removeprefix("pygments/").rpartition("/")
    kept = {
        "lexers": ("__init__", "_mapping", "diff", "python"),
        "styles": ("__init__", "_mapping", "default"),
    }
    return last.removesuffix(".py") in kept.get(folder, (last.removesuffix(".py"),))


def appending(code: str, path: str = "interval/__init__.py") -> str:
    """Return a command that adds Python to a file of the repository."""
    return f"mkdir -p repo/{path.rpartition('/')[0]}; cat >> repo/{path} <<'ENDOFCODE'\n{code}\nENDOFCODE"


def swe_task(commands: Sequence[str], **fields: Any) -> Task:
    """Return the task of the repository, in which the policy plays some commands of bash.

    Args:
        commands: The commands, one a turn.
        fields: The fields of `swe` that differ.
    """
    swe: dict[str, Any] = {
        "repository": {"path": "repo", "archive": archive(), "unpack": "."},
        "script": SCRIPT, "log_parser": "pytest", "verdict": "report", "fail_to_pass": FAILS,
        "pass_to_pass": PASSES, "files": {"tests/test_interval.py": HIDDEN},
    }  # fmt: skip
    calls = [{"name": "bash", "arguments": {"command": command}} for command in commands]
    return Task.model_validate({"id": "t", "prompt": "?", "solution": calls, "swe": swe | fields})


class _Plane(WorkerCalls):
    def __init__(self) -> None:
        self.spec: RolloutJobSpec

    async def send(self, call: WorkerCall[Any]) -> Any:
        raise ControlPlaneRefused(f"{call.method} {call.path} is not played here")

    async def job_spec(self, namespace: str, name: str, uid: str | None = None) -> RolloutJobSpec:
        return self.spec


class SweLab:
    """A worker's stages, which take one task after another through Init, Run and Eval."""

    def __init__(self, provider: NodeProvider, stages: Stages, plane: _Plane) -> None:
        self.provider, self._stages, self._plane = provider, stages, plane

    async def rollout(self, task: Task, handler: str = "swe", **stage: Any) -> StageResult:
        """Return the outcome of Eval.

        Args:
            task: The task, whose solution is played.
            handler: The handler of the job: `swe` or `mixed`.
            stage: Fields of `stages.eval`.
        """
        self._plane.spec = RolloutJobSpec.model_validate(
            {
                "tasks": {"stream": True}, "handler": handler, "agent": {"type": "oracle"}, "sandbox": SMALL,
                "stages": {"eval": {"timeoutSeconds": 60, **stage}},
            }
        )  # fmt: skip
        init = await self._work(task, "init")
        try:
            ran = await self._work(task, "run", sandbox=init.sandbox, carry=init.carry)
            carry = copy.deepcopy(ran.carry)
            return await self._work(
                task, "eval", sandbox=init.sandbox, carry=carry, trajectory=ran.trajectory
            )
        finally:
            assert init.sandbox is not None
            assert self.provider.in_use() == [init.sandbox.id]
            await self.provider.release(init.sandbox)

    async def _work(self, task: Task, stage: str, **fields: Any) -> StageResult:
        lease = Lease(
            rollout="r", token=1, stage=stage, job="j", namespace="default", group_id="g", attempt=0,
            job_uid=str(id(self._plane.spec)), sample_index=0, queued_seconds=0.0, lease_seconds=30.0,
            task=task, **fields,
        )  # fmt: skip
        return await self._stages.work(HeldLease(lease), StageTimes())


@asynccontextmanager
async def swe_lab(kind: str, folder: Path) -> AsyncIterator[SweLab]:
    """Provide stages with sandboxes of a kind, which keep their state in a folder."""
    provider = open_provider(kind, run_dir=folder, node="n")
    assert isinstance(provider, NodeProvider)
    await provider.start()
    plane = _Plane()
    extensions = registry.Registry({registry.HANDLERS: {"swe": SweHandler, "mixed": MixedHandler}})
    try:
        async with BackendClient() as backends:
            stages = Stages(plane, backends, provider, extensions)
            yield SweLab(provider, stages, plane)
            await stages.close()
    finally:
        for sandbox in provider.in_use():
            await provider.release(sandbox)
        await provider.aclose()
