"""What a plugin offers is found by parsing it, and each fault of a file is named."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollyard_crds.reading import plugin as module
from rollyard_crds.reading.plugin import PluginError, doubled, offers_of, plugin_files, read_plugin

FILE = """
import logging
import rollyard_pipeline.tools as kit
from rollyard_pipeline.handlers import Handler as H
from rollyard_pipeline.handlers.math import MathHandler
from rollyard_pipeline.agents import Agent
from rollyard_pipeline.rewards import RewardFunction, reward_function
from rollyard_pipeline.tool_parsers import ToolCallParser

class ClosenessHandler(H): ...
class _Base(H): ...
class SWEGrader(_Base): ...
class Exact(MathHandler):
    name = "exact-math"
class WordsTool(kit.Tool):
    name: str = "words"
class PatientAgent(Agent): ...
class AtSignParser(ToolCallParser): ...
class LengthReward(RewardFunction): ...
class ToConsole(logging.Handler): ...
class Handler: ...
class Mine(Handler): ...

@reward_function
def brevity(episode): return 1.0

def helper(episode): return 1.0
"""


def test_names_are_read_from_the_text() -> None:
    assert offers_of(FILE.encode()) == {
        "handlers": {"closeness": "ClosenessHandler", "swe_grader": "SWEGrader", "exact-math": "Exact"},
        "tools": {"words": "WordsTool"},
        "agents": {"patient": "PatientAgent"},
        "tool_parsers": {"at_sign": "AtSignParser"},
        "reward_functions": {"length": "LengthReward", "brevity": "brevity"},
    }


IMPORT = "from rollyard_pipeline.handlers import Handler\n"
REWARD = "from rollyard_pipeline.rewards import reward_function\n"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def f(:\n", "line 1, column 7: invalid syntax"),
        ("x = 1\0", "null bytes"),
        ("", "offers nothing: an extension is a class that derives from Handler, Agent, Harness, Tool"),
        ("class A(Handler): ...", "offers nothing"),
        (IMPORT + "class _A(Handler): ...", "offers nothing"),
        (IMPORT + "class A(Handler):\n    name = NAME", "line 3: A.name must be a text in quotes"),
        (IMPORT + "class A(Handler):\n    name = 'Two words'", "line 2: 'Two words' cannot be the name of"),
        (IMPORT + f"class {'A' * 64}(Handler): ...", "at most 63"),
        (
            IMPORT + "class A(Handler): ...\nclass AHandler(Handler): ...",
            "line 3: A and AHandler have the same name 'a'",
        ),
        (
            REWARD + "@reward_function\nasync def a(episode): ...",
            "line 3: a reward function is called without await",
        ),
        (
            IMPORT + "".join(f"class A{number}(Handler): ...\n" for number in range(257)),
            "offers more than 256 extensions",
        ),
    ],
)
def test_faults_are_named(text: str, words: str) -> None:
    with pytest.raises(PluginError, match=words):
        offers_of(text.encode())


def test_a_file_is_read_and_parsed_once_for_each_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(IMPORT + "class A(Handler): ...\nraise SystemExit\n")
    (tmp_path / "notes.txt").write_text("no plugin")
    (file,) = plugin_files(tmp_path)
    plugin = read_plugin(file)
    assert (plugin.file, plugin.offers) == ("mine.py", {"handlers": {"a": "A"}})

    (tmp_path / "broken.py").write_text("class (")
    with pytest.raises(PluginError, match=r"broken\.py: line 1") as caught:
        read_plugin(tmp_path / "broken.py")

    monkeypatch.setattr(module, "_parsed", None)
    assert read_plugin(file, {plugin.sha256: plugin}) is plugin
    with pytest.raises(PluginError, match=r"broken\.py: line 1"):
        read_plugin(tmp_path / "broken.py", {caught.value.sha256: caught.value})


@pytest.mark.parametrize(
    ("name", "words"),
    [("missing.py", "No such file"), ("notes.txt", "a plugin is a file NAME.py"), ("dir.py", "has 0 files")],
)
def test_a_path_that_is_no_plugin_is_named(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "notes.txt").write_text("no plugin")
    (tmp_path / "dir.py").mkdir()
    with pytest.raises(PluginError, match=words) as caught:
        list(map(read_plugin, plugin_files(tmp_path / name)))
    assert str(tmp_path / name) in str(caught.value)


def test_no_name_is_offered_twice() -> None:
    offers = {"handlers": {"math": "MathHandler", "mine": "Mine"}}
    first = module.Plugin("a.py", b"", "1", offers)
    second = module.Plugin("b.py", b"", "2", {"handlers": {"mine": "Mine"}, "tools": {"mine": "MineTool"}})
    assert doubled([first, second], {"handlers": frozenset({"math"})}) == [
        "a.py: MathHandler has the name 'math', and Rollyard or an installed package has a handler of this "
        "name; choose another",
        "b.py: a.py offers a handler 'mine' as well; choose one",
    ]
