"""Extensions are found by name among the entry points of what is installed."""

from __future__ import annotations

import re
import site
import sys
from importlib import metadata
from pathlib import Path

import pytest
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_pipeline.handlers import Handler
from rollyard_pipeline.handlers.mixed import MixedHandler
from rollyard_pipeline.registry import AGENTS, HANDLERS, Registry
from rollyard_pipeline.stages.contexts import agent_of, sandbox_use

DOCS = Path(__file__).parents[2] / "docs" / "handlers.md"


def test_our_own_extensions_are_found_without_reading_all_that_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    everything = metadata.entry_points

    def counted() -> object:
        looked.append(1)
        return everything()

    monkeypatch.setattr(metadata, "entry_points", counted)
    registry = Registry()
    assert registry.load(HANDLERS, "shell").needs_sandbox
    registry.load(AGENTS, "oracle")
    assert not looked


def own_handlers() -> dict[str, type[Handler]]:
    found = metadata.entry_points(group=HANDLERS)
    return {entry.name: entry.load() for entry in found if entry.value.startswith("rollyard_pipeline.")}


def test_each_of_our_handlers_names_the_sandbox_of_its_evaluation() -> None:
    """In code and in its page, so that nobody has to guess what a test meets of what Run left."""
    rows = re.findall(
        r"^\| (`\w+`(?:, `\w+`)*) \| (`shared`|`fresh`|none|that of .*?) \|", DOCS.read_text(), re.M
    )
    said = {name: default for names, default in rows for name in re.findall(r"\w+", names)}
    handlers = own_handlers()
    assert len(handlers) > 5
    assert said.keys() == handlers.keys()
    for name, handler in handlers.items():
        if handler is MixedHandler:
            assert said[name].startswith("that of")
        elif handler.needs_sandbox:
            assert "eval_sandbox" in vars(handler), f"{name} leaves its default to the base class"
            assert said[name] == f"`{handler.eval_sandbox}`"
        else:
            assert said[name] == "none"


def test_the_control_plane_knows_which_of_our_jobs_start_no_sandbox_before_eval() -> None:
    """It loads no extension, so it has a table, which names of ours must agree with."""
    registry = Registry()
    agents = {"single_turn": ["bash"], "tools": ["submit"], "oracle": ["bash", "submit"]}
    service = {"reward": {"service": {"url": "http://a/"}}}
    for name, handler in own_handlers().items():
        for agent, tools in agents.items():
            spec = RolloutJobSpec.model_validate(
                {
                    "tasks": {"stream": True}, "handler": name, "backendRef": {"name": "p"},
                    "agent": {"type": agent, "tools": tools}, **(service if name == "unscored" else {}),
                }
            )  # fmt: skip
            use = sandbox_use(handler(), *agent_of(registry, spec))
            assert spec.needs_early_sandboxes == (use == "run"), (name, agent)


def test_a_process_that_stood_ready_finds_what_was_installed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in development mode, which names the folder of the source in a file of `site-packages`."""
    packages, source = tmp_path / "site-packages", tmp_path / "source"
    packages.mkdir()
    monkeypatch.setattr(sys, "path", [*sys.path, str(packages)])
    monkeypatch.setattr(site, "getsitepackages", lambda: [str(packages)])
    registry = Registry()
    registry.load(HANDLERS, "shell")

    about = packages / "late-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: late\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[rollyard.handlers]\nlate = module_of_late:Late\n")
    (packages / "late.pth").write_text(f"{source}\n")
    source.mkdir()
    (source / "module_of_late.py").write_text("class Late: ...\n")
    assert registry.load(HANDLERS, "late").__name__ == "Late"
    monkeypatch.delitem(sys.modules, "module_of_late")
