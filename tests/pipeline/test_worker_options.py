"""`python -m rollyard_pipeline`: options that cannot be used are refused in one line, by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rollyard_pipeline.program import main


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--stages", "init,test"], "--stages: test given; expected some of init, run, eval"),
        (["--stages", ","], "--stages: nothing given"),
        (["--concurrency", "run=0"], "--concurrency: 'run=0'; expected for example init=16"),
        (["--concurrency", "walk=3"], "--concurrency: 'walk=3'"),
        (
            ["--default-image", "/x.sif"],
            "--default-image goes with --sandbox apptainer (got --sandbox bubblewrap)",
        ),
        (["--fakeroot"], "--fakeroot goes with --sandbox apptainer"),
        (["--token-file", "/no/such/file"], "--token-file: /no/such/file cannot be read"),
    ],
)
def test_bad_options(
    options: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    token = tmp_path / "token"
    token.write_text("secret")
    code = main(["--url", "http://127.0.0.1:9", "--token-file", str(token), *options])
    assert code == 2
    error = capsys.readouterr().err
    assert "OptionInvalid" in error
    assert says in error
    assert "secret" not in error


def test_a_token_file_without_a_workers_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps({"admin": "secret"}))
    assert main(["--url", "http://127.0.0.1:9", "--token-file", str(file)]) == 2
    assert "no token of the role 'worker'" in capsys.readouterr().err


def test_a_worker_that_starts_imports_no_template_engine_and_collects_garbage() -> None:
    """Agents that use no model begin their first sandbox without Jinja and tokenizers."""
    code = (
        "import gc, sys, rollyard_pipeline.__main__; "
        "print(gc.isenabled(), sorted({'jinja2', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True []\n"
