"""The commands of the figure `swe_action_time` mend the line, and a line that is not mended is seen."""

from __future__ import annotations

import base64
import subprocess
from pathlib import Path

import pytest
from rollyard_bench.sandboxes import WrongOutput
from rollyard_bench.swe_action_time import Episode, _episode

OLD = "\tif a[0] != '&' and b.c * 2 / 1 == r'\\n^$': # ~"
NEW = "\tif a[0] == '&' or b.c * 2 / 1 == r'\\n^$': # ~"


@pytest.fixture
def episode() -> Episode:
    recipe = {
        "project": "p", "problem": "`name` is wrong.", "tests": ["t.py"],
        "bug": {"path": "a.py", "line": 2, "old": OLD, "new": NEW},
    }  # fmt: skip
    row = {"install_config": {"test_cmd": "true"}, "repository": {"archive": base64.b64encode(b"x").decode()}}
    return _episode(recipe, row)


def test_the_commands_mend_the_line(tmp_path: Path, episode: Episode) -> None:
    (tmp_path / "repo").mkdir()
    path = tmp_path / "repo" / "a.py"
    path.write_text(f"def name():\n{NEW}\n{NEW}\n")
    (tmp_path / "repo" / "t.py").write_text("name()\n")
    with pytest.raises(WrongOutput, match=r"p: line 2 of a\.py is not mended"):
        episode.check(path.read_text())
    script = "set -e\n" + "\n".join(episode.actions)
    ran = subprocess.run(["bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert path.read_text() == f"def name():\n{OLD}\n{NEW}\n"
    episode.check(path.read_text())
    assert "./t.py:1:name()" in ran.stdout
    assert episode.actions.count(episode.test) == 2
