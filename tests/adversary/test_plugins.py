"""Plugins: hostile files cannot stop the control plane or run in it, and no sandbox reaches one."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from rollyard_api.core import entrypoints
from rollyard_api.core.entrypoints import Extensions
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.problems import Invalid, TimedOut, Unavailable
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_testing.adversary.attacklab import Lab
from rollyard_testing.adversary.attacks import Attack

pytestmark = pytest.mark.attack(surface="plugin")

HOSTILE = pytest.mark.attack(
    "the file of a plugin is a pipe, a device, huge, no text, or nested until Python's parser gives up",
    boundary="control plane",
    stopped_by="regular files of at most 1 MiB; a process with limits of memory and time parses them",
)
RUNS = pytest.mark.attack(
    "the text of a plugin runs in the control plane when it is looked at",
    boundary="control plane",
    stopped_by="names are found by parsing; workers run the text",
)
NIGHTLY = pytest.mark.nightly  # They differ in what of the parser gives up.
HANDLER = "from rollyard_pipeline.handlers import Handler\nclass MineHandler(Handler): ...\n"


def spec(handler: str) -> RolloutJobSpec:
    agent = {"type": "oracle", "tools": []}
    return RolloutJobSpec.model_validate({"tasks": {"stream": True}, "handler": handler, "agent": agent})


def linked(target: str) -> Callable[[Path], None]:
    return lambda file: file.symlink_to(target)


def sparse(file: Path) -> None:
    file.touch()
    os.truncate(file, 1 << 40)


def text(content: str) -> Callable[[Path], None]:
    return lambda file: file.write_text(content) and None


@HOSTILE
@pytest.mark.parametrize(
    ("make", "words"),
    [
        pytest.param(os.mkfifo, "is not a file", id="pipe"),
        pytest.param(lambda file: (file / "a.py").mkdir(parents=True), "a.py: is not a file", id="folders"),
        pytest.param(linked("/dev/zero"), "is not a file", id="device"),
        pytest.param(linked("mine.py"), "cannot be read: Too many levels", id="loop"),
        pytest.param(sparse, "has more than 1 MiB", id="sparse"),
        pytest.param(text(HANDLER + "#" * (10 << 20)), "has more than 1 MiB", id="10-MiB"),
        pytest.param(text(HANDLER + "\0"), "null bytes", id="null-byte"),
        pytest.param(lambda file: file.write_bytes(b"\xff\xfe"), "mine.py: ", id="no-text"),
        pytest.param(text("(" * 100_000), "too many nested parentheses", id="parentheses"),
        pytest.param(text("-" * 500_000 + "1"), "nested too deeply", id="signs"),
        pytest.param(text("a" + ".a" * 500_000), "nested too deeply", id="attributes", marks=NIGHTLY),
        pytest.param(text("1+" * 500_000 + "1"), "nested too deeply", id="sums", marks=NIGHTLY),
        pytest.param(text("lambda:" * 140_000 + "1"), "nested too deeply", id="lambdas", marks=NIGHTLY),
    ],
)
async def test_a_hostile_file_is_refused_and_other_jobs_go_through(
    tmp_path: Path, make: Callable[[Path], None], words: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HANDLER)
    extensions = Extensions((file,))
    try:
        extensions.check_plugins()
        assert [plugin.file for plugin in await extensions.used_by(spec("mine"))] == ["mine.py"]
        file.unlink()
        make(file)
        with pytest.raises(Invalid, match=words):
            await extensions.used_by(spec("mine"))
        with pytest.raises(OptionInvalid, match=words):
            extensions.check_plugins()
        assert await extensions.used_by(spec("math")) == ()
    finally:
        extensions.close()


@pytest.mark.attack(
    "the file system of a plugin hangs, and with it every job",
    boundary="control plane",
    stopped_by="a thread of its own reads plugins, for a bounded time, and jobs that need none go through",
)
async def test_a_file_that_hangs_concerns_only_the_jobs_that_need_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = threading.Event()
    monkeypatch.setattr(entrypoints, "READ_SECONDS", 0.05)
    monkeypatch.setattr(entrypoints, "read_plugin", lambda *_: opened.wait())
    (tmp_path / "mine.py").write_text(HANDLER)
    extensions = Extensions((tmp_path,))
    try:
        with pytest.raises(TimedOut):
            await extensions.used_by(spec("mine"))
        assert await extensions.used_by(spec("math")) == ()
        with pytest.raises((TimedOut, Unavailable)):
            await extensions.used_by(spec("mine"))
    finally:
        opened.set()
        extensions.close()


@RUNS
async def test_nothing_of_a_plugin_runs_in_the_control_plane(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    run = f"open({str(ran)!r}, 'w')"
    file = tmp_path / "mine.py"
    file.write_text(
        f"# coding: utf-8\n{HANDLER}{run}\n@{run}\nclass B(Handler, metaclass={run}):\n"
        f"    name: {run} = 'b'\n    def f(self, x={run}): ...\n__import__('os')._exit(1)\n"
    )
    # No module beside it is imported in the place of the standard library's.
    (tmp_path / "ast.py").write_text(run)
    extensions = Extensions((file,))
    try:
        extensions.check_plugins()
        (plugin,) = await extensions.used_by(spec("b"))
    finally:
        extensions.close()
    assert plugin.offers == {"handlers": {"mine": "MineHandler", "b": "B"}}
    assert not ran.exists()


GRADER = Attack(
    name="the_plugin_that_grades_it",
    goal="Know or change the plugin that grades the rollout.",
    steps=(
        "cat @LAB@/plugins/graded.py @RUN@/plugins-*/*/graded.py",
        "find / -name 'graded.py*' 2>/dev/null | sed 's/^/WON /'; echo looked",
        "for p in /proc/[0-9]*; do cat $p/root@LAB@/plugins/graded.py $p/cwd/graded.py; done 2>/dev/null",
        "(echo 'reward = 1' > @LAB@/plugins/graded.py) 2>&1; (echo > @RUN@/plugins-x) 2>&1; echo tried",
    ),
    spec={"handler": "graded"},
    shows=("No such file", "^looked", "^tried"),
    hides=("^WON",),
)


@pytest.mark.attack(
    "read or change the plugin that grades it, where the installer and the worker have it",
    boundary="sandbox",
    stopped_by="no sandbox has these folders",
)
def test_a_policy_does_not_reach_the_plugin_that_grades_it(lab: Lab) -> None:
    lab.attack(GRADER)
