"""The plugins of jobs in a worker: fetched once, loaded under names of their own, and gone at the end."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.rolloutjob import RolloutJobSpec, WorkerJobSpec
from rollyard_pipeline.control_plane.calls import WorkerCall, WorkerCalls
from rollyard_pipeline.errors import ControlPlaneRefused, PermanentFailure
from rollyard_pipeline.handlers.isolated.handler import IsolatedHandler, tried_handler
from rollyard_pipeline.registry import HANDLERS, REWARD_FUNCTIONS, Registry, plugin_registry
from rollyard_pipeline.stages.plugins import JobPlugins

TEXT = """
from rollyard_pipeline.handlers import Evaluation, Handler
from rollyard_pipeline.rewards import reward_function

class VerdictHandler(Handler):
    version = NUMBER

    async def eval(self, ctx):
        return Evaluation(1.0)

@reward_function
def brevity(episode):
    return 1.0
"""
OFFERS = {"handlers": {"verdict": "VerdictHandler"}, "reward_functions": {"brevity": "brevity"}}


class Texts(WorkerCalls):
    """A control plane that has texts, and counts how often each is fetched."""

    def __init__(self, *texts: str) -> None:
        self.texts = {hashlib.sha256(text.encode()).hexdigest(): text.encode() for text in texts}
        self.fetched: list[str] = []

    async def send(self, call: WorkerCall[Any]) -> Any:
        digest = call.path.rpartition("sha256=")[2]
        assert call.path == f"/v1/leases/plugin?namespace=default&name=j&uid=u&sha256={digest}"
        self.fetched.append(digest)
        return call.read(self.texts[digest])


def spec(*digests: str, file: str = "json.py", handler: str = "verdict") -> RolloutJobSpec:
    plugins = [{"file": file, "sha256": digest, "offers": OFFERS} for digest in digests]
    return WorkerJobSpec.model_validate(
        {"tasks": {"stream": True}, "handler": handler, "agent": {"type": "oracle"}, "plugins": plugins}
    )


async def test_each_job_has_the_text_of_its_own(tmp_path: Path) -> None:
    control = Texts(TEXT.replace("NUMBER", "1"), TEXT.replace("NUMBER", "2"))
    first, second = control.texts
    plugins = JobPlugins(control, Registry(), tmp_path)
    import json

    for digest in (first, second, first):
        await plugins.fetch(spec(digest), "default", "j", "u")
    await plugins.fetch(spec(), "default", "j", "u")
    assert control.fetched == [first, second]

    loaded = [plugins.of(spec(digest)).load(HANDLERS, "verdict") for digest in (first, second)]
    assert [handler.version for handler in loaded] == [1, 2]
    assert sys.modules["json"] is json, "a file of this name hides no module"
    with pytest.raises(PermanentFailure, match="no handler 'verdict' is installed on this machine"):
        plugins.of(spec()).load(HANDLERS, "verdict")
    # Rollyard's own name is that of its own class.
    assert plugins.of(spec(first)).load(HANDLERS, "math").__module__ == "rollyard_pipeline.handlers.math"

    handler = await tried_handler(plugins.of(spec(first)), "verdict")
    assert isinstance(handler, IsolatedHandler), "its calls run in a process of their own"
    await handler.close()
    target = plugins.of(spec(first)).target(REWARD_FUNCTIONS, "brevity")
    assert target.endswith(f"/{first}/json.py:brevity")
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700
    plugins.close()
    assert not list(tmp_path.iterdir())


async def test_another_text_is_not_loaded(tmp_path: Path) -> None:
    control = Texts(TEXT)
    (digest,) = control.texts
    control.texts[digest] += b"print('changed on the way')\n"
    plugins = JobPlugins(control, Registry(), tmp_path)
    with pytest.raises(ControlPlaneRefused, match="has another SHA-256"):
        await plugins.fetch(spec(digest), "default", "j", "u")
    plugins.close()


def test_commands_take_plugins_and_name_their_faults(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(TEXT.replace("NUMBER", "3"))
    registry = plugin_registry([tmp_path])
    assert registry.load(HANDLERS, "verdict").version == 3
    assert "verdict" in registry.names(HANDLERS)
    assert not (tmp_path / "__pycache__").exists(), "an edit in the same second is seen"

    file.write_text(TEXT.replace("VerdictHandler", "MathHandler"))
    with pytest.raises(PermanentFailure, match=r"--plugin mine\.py: MathHandler has the name 'math', and"):
        plugin_registry([file])
    file.write_text("class (")
    with pytest.raises(PermanentFailure, match=r"--plugin mine\.py: line 1, column 7"):
        plugin_registry([file])
