"""A command whose extra is not installed names the extra, and does nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import rollyard
import rollyard_client
import rollyard_crds
from rollyard import doctor, extras
from rollyard.commands import trajectories
from rollyard.errors import UsageProblem
from rollyard.main import main

UNIMPORTED = {"pydantic", "httpx", "click", "rich", "yaml", "asyncio"}


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Pretend that only the client is installed and that the user has no server."""
    heavy = {module for modules in extras.MODULES.values() for module in modules}
    real = importlib.util.find_spec

    def find(name: str, package: str | None = None) -> ModuleSpec | None:
        return None if name in heavy else real(name, package)

    monkeypatch.setattr(extras, "find_spec", find)
    monkeypatch.setenv("ROLLYARD_HOME", str(tmp_path / "home"))


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        ("up", "local"),
        ("up --backend http://127.0.0.1:1", "local"),
        ("up --detach", "local"),
        ("quickstart", "local"),
        ("worker --help", "worker"),
        ("grade --handler math --key 7 7", "worker"),
        ("rescore j --handler math", "worker"),
        ("slurm-bridge up --home h", "slurm"),
        ("slurm-bridge up --home h --engine embedded --detach", "slurm"),
        ("trajectories j -o t.parquet", "parquet"),
        ("view --from t.parquet", "parquet"),
    ],
)
def test_the_extra_is_named(
    command: str,
    extra: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.endswith(f"pip install 'rollyard[{extra}]'")
    assert list(tmp_path.iterdir()) == []


def test_long_lists_are_cut() -> None:
    with pytest.raises(UsageProblem, match=r"\(aiohttp, alembic, fastapi, fastapi_swagger and \d+ more\)"):
        extras.require("this", "local", "api", "worker")
    with pytest.raises(UsageProblem, match=r"this needs .* \(pyarrow\): pip install 'rollyard\[parquet\]'$"):
        extras.require("this", "parquet")


def test_an_import_that_fails_later_is_explained_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(module: str) -> None:
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)

    monkeypatch.setattr(trajectories.view, "callback", lambda **_: fail("tokenizers.decoders"))
    assert main(["view", "x"]) == 2
    assert "`rollyard view` needs" in (told := capsys.readouterr().err)
    assert "pip install 'rollyard[worker]'" in told
    # The module of somebody else's extension is no extra of Rollyard.
    monkeypatch.setattr(trajectories.view, "callback", lambda **_: fail("mine"))
    with pytest.raises(ModuleNotFoundError, match="mine"):
        main(["view", "x"])


def test_the_doctor_says_what_is_missing() -> None:
    for finding, extra in ((doctor.check_installation(), "local"), (doctor.check_model(), "engine")):
        assert finding.verdict == "missing"
        assert f"pip install 'rollyard[{extra}]'" in finding.advice


@pytest.mark.parametrize("package", [rollyard, rollyard_client, rollyard_crds])
def test_every_offered_name_is_found(package: object) -> None:
    names = vars(package)["__all__"]
    assert sorted(names) == sorted(set(names))
    assert [name for name in names if getattr(package, name, None) is None] == []
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = package.nothing  # type: ignore[attr-defined]


def imported_after(code: str) -> set[str]:
    script = f"import sys\n{code}\nprint(*(name for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_import_of_the_client_loads_no_model_and_no_http_library() -> None:
    assert imported_after("from rollyard import AsyncClient, Client") & (UNIMPORTED - {"asyncio"}) == set()
    assert imported_after("from rollyard import Client") & UNIMPORTED == set()


def test_one_package_has_all_that_a_trainer_imports() -> None:
    names = "AsyncClient, BackendPool, Client, Retry, RolloutJob, Task, Trajectory, errors"
    heavy = {module for modules in extras.MODULES.values() for module in modules}
    assert imported_after(f"from rollyard import {names}; errors.NotFound") & heavy == set()
    assert imported_after("import rollyard; rollyard.errors.Conflict") & UNIMPORTED == set()
    assert "errors" in dir(rollyard)


def test_httpx_is_imported_without_its_command_line() -> None:
    here = imported_after("from rollyard import Client; Client('http://127.0.0.1:1', 'token')")
    assert "httpx" in here
    assert {"httpx._main", "rich", "pygments"} & here == set()


def test_an_httpx_of_somebody_else_stays_as_it_is() -> None:
    code = "import httpx, sys; before = sys.modules.get('httpx._main')\n"
    code += "import rollyard_client._sync.transport\nassert sys.modules.get('httpx._main') is before"
    assert "httpx" in imported_after(code)
