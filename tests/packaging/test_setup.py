"""What `scripts/setup` prints. The environment's Python is a script that prints what pip would."""

from __future__ import annotations

import os
import pty
import subprocess
from pathlib import Path

import pytest
from rollyard_testing.pace import patience

ROOT = Path(__file__).parents[2]
PIP = r"""#!/bin/sh
case "$*" in
  *"pip install"*)
    echo "  Downloading small-1.0-py3-none-any.whl (9.9 MB)"
    echo "  Downloading large-1.0-cp311-cp311-linux_x86_64.whl (27.8 MB)"
    echo "  Downloading large-1.0-cp311-cp311-linux_x86_64.whl.metadata (28 kB)"
    echo "WARNING: a mirror is ignored" >&2
    echo "ERROR: shown" >&2
    echo "Installing collected packages: large, small"
    exit "$PIP_STATUS" ;;
  *sysconfig*) dirname "$0" ;;
esac
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Return the variables for a set-up with a Python and a bwrap that do nothing else."""
    for name, text in (("python", PIP), ("bwrap", "#!/bin/sh\n")):
        program = tmp_path / "venv" / "bin" / name
        program.parent.mkdir(parents=True, exist_ok=True)
        program.write_text(text)
        program.chmod(0o755)
    variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    path = f"{tmp_path}/venv/bin:{variables['PATH']}"
    return {**variables, "PATH": path, "VENV": f"{tmp_path}/venv", "PIP_STATUS": "0"}


def set_up(environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["scripts/setup", "run"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )


def test_a_log_file_has_a_line_for_each_long_step_and_no_colour(environment: dict[str, str]) -> None:
    done = set_up(environment)
    assert done.returncode == 0, done.stderr
    first, *steps, _took = done.stdout.splitlines()
    assert "about 600 MB" in first
    assert steps == [
        "setup: downloading large-1.0-cp311-cp311-linux_x86_64.whl (27.8 MB)",
        "setup: unpacking all of them",
        "setup: compiling it",
    ]
    assert "\x1b" not in done.stdout
    assert "ERROR: shown" in done.stderr
    assert "WARNING" not in done.stderr


def test_an_installation_that_fails_ends_the_set_up(environment: dict[str, str]) -> None:
    done = set_up({**environment, "PIP_STATUS": "1"})
    assert done.returncode == 1
    assert "compiling" not in done.stdout


@pytest.mark.parametrize(("variables", "coloured"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_colours_are_for_terminals(
    environment: dict[str, str], variables: dict[str, str], coloured: bool
) -> None:
    ours, theirs = pty.openpty()
    with open(ours, "rb", buffering=0) as terminal, open(theirs, "wb", buffering=0) as output:
        done = subprocess.run(
            ["scripts/setup", "run"],
            cwd=ROOT,
            env={**environment, **variables},
            stdout=output,
            stderr=subprocess.DEVNULL,
            timeout=patience(60),
            check=False,
        )
        printed = os.read(terminal.fileno(), 65536)
    assert done.returncode == 0
    assert b"took" in printed
    assert (b"\x1b" in printed) is coloured
