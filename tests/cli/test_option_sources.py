"""`rollyard up` and `slurm-bridge up` take their options from a file and from variables as well."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from rollyard.commands import slurm_bridge, up
from rollyard.commands.slurm_bridge import BridgeCommandOptions, bridge_options
from rollyard.declared import load_options
from rollyard.detached import arguments_again
from rollyard.errors import UsageProblem
from rollyard.local.options import Options
from rollyard.local.supervisor import default_pool, opens_docs, plane_settings
from rollyard.main import main
from rollyard_api.options.declared import ControlPlaneOptions, DeclaredOptions, keys, option_of
from rollyard_drivers.host.home import Home, read_json
from rollyard_testing.api.control_plane import self_signed

PROGRAMS: dict[type[DeclaredOptions], list[str]] = {
    Options: ["up"],
    BridgeCommandOptions: ["slurm-bridge", "up"],
    ControlPlaneOptions: ["control-plane"],
}
JOINED = ["--home=h", "--join=https://head:8765", "--token-file=t.json", "--port=0"]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Keep this user's home and what the commands add to the environment out of the tests."""
    for name in list(os.environ):
        if name.startswith(("ROLLYARD_", "OTEL_")) and name not in (
            "ROLLYARD_SHARED",
            "ROLLYARD_REQUIRE_REAL",
        ):
            monkeypatch.delenv(name)
    for name in ("ROLLYARD_TRACE_SAMPLE", "ROLLYARD_LOG_FORMAT"):
        # A command that sets one of them for its children is undone by these two.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("ROLLYARD_HOME", str(tmp_path / "nohome"))


@pytest.fixture
def file(tmp_path: Path) -> Callable[[dict[str, Any]], Path]:
    """Return a writer of files with options."""

    def write(document: dict[str, Any]) -> Path:
        path = tmp_path / "rollyard.yaml"
        path.write_text(yaml.safe_dump(document))
        path.chmod(0o600)
        return path

    return write


@pytest.mark.parametrize("model", PROGRAMS, ids=lambda model: " ".join(PROGRAMS[model]))
def test_the_help_lists_every_option_in_groups(
    model: type[DeclaredOptions], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*PROGRAMS[model], "--help"]) == 0
    shown = capsys.readouterr().out
    assert [key for key in keys(model) if f"  --{key}" not in shown] == []
    groups = {option_of(field).group for field in model.model_fields.values()}
    assert [title for title in groups if f"\n{title}:\n" not in shown] == []
    assert "--config FILE" in shown


@pytest.mark.parametrize("command", PROGRAMS.values(), ids=" ".join)
@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ({"lease-second": 3}, "lease-second: is not an option of `rollyard "),
        ({"max-polls": "many"}, "max-polls: Input should be a valid integer"),
        ({"allow-sandbox-host": ["10.0.0.1"]}, "allow-sandbox-host: '10.0.0.1' is not a host"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_file_starts_nothing(
    command: list[str],
    document: dict[str, Any],
    problem: str,
    file: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = ["--state-dir" if command == ["control-plane"] else "--home", str(tmp_path / "h")]
    assert main([*command, "--config", str(file(document)), *folder]) == 2
    error = capsys.readouterr().err
    assert f"rollyard.yaml: {problem}" in error
    assert len(error.splitlines()) == 1
    assert not (tmp_path / "h").exists()


@pytest.mark.parametrize(
    ("command", "variable"),
    [(["up"], "ROLLYARD_UP_REPLICA"), (["slurm-bridge", "up"], "ROLLYARD_SLURM_BRIDGE_PARTITIONS")],
)
def test_a_wrong_variable_starts_nothing(
    command: list[str],
    variable: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in (variable, "ROLLYARD_CONTROL_PLANE_LEASE_SECOND"):
        monkeypatch.setenv(name, "1")
        assert main([*command, "--home", str(tmp_path / "h")]) == 2
        assert (
            f"rollyard: {name}: is not an option of `rollyard {' '.join(command)}`; did you mean ROLLYARD_"
            in (capsys.readouterr().err)
        )
        monkeypatch.delenv(name)
    assert not (tmp_path / "h").exists()


def test_up_has_its_own_defaults_and_sources(
    file: Callable[[dict[str, Any]], Path], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = file({"replicas": 3, "max-polls": 7, "engine-env": ["A=b=c"], "home": str(tmp_path / "other")})
    monkeypatch.setenv("ROLLYARD_UP_REPLICAS", "2")
    monkeypatch.setenv("ROLLYARD_CONTROL_PLANE_MAX_POLLS", "8")
    options = load_options(Options, {"port": 9, "engine_args": (), "detach": False}, config, "rollyard up")
    assert (options.replicas, options.max_polls, options.port) == (2, 8, 9)
    assert options.home == tmp_path / "nohome", "ROLLYARD_HOME comes before the file"
    given = plane_settings(options).options
    assert (given["lease-seconds"], given["allow-tasks-from"], given["max-polls"]) == (15.0, ["file:///"], 8)
    assert given["open-docs"] is True
    assert not opens_docs(options.model_copy(update={"host": "0.0.0.0"}))
    assert not opens_docs(load_options(Options, {"open_docs": False}, None, "rollyard up"))


@pytest.mark.parametrize("command", [["up"], ["slurm-bridge", "up"]])
@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--engine-env=HF_TOKEN=secret", "--engine-env: 'env' must not hold HF_TOKEN, which all readers"),
        ("--engine-env=1A=secret", "--engine-env: '1A' is not a name of an environment variable"),
        (f"--engine-env=A=secret{'x' * 4096}", "--engine-env: String should have at most 4096 characters"),
        (f"--engine-arg={'x' * 4097}", "--engine-arg: String should have at most 4096 characters"),
    ],
    ids=["token", "name", "value", "argument"],
)
def test_what_a_pool_refuses_of_its_engine_is_one_line(
    command: list[str], argument: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["--engine", "vllm", "--model", str(tmp_path), "--home", str(tmp_path / "h")]
    assert main([*command, *model, argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"rollyard: {message}")
    assert error.count("\n") == 1
    assert "secret" not in error
    assert not (tmp_path / "h").exists()


def test_vllms_python_verifies_weights_if_no_other_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Options(engine="vllm", vllm_python="/v/python")
    assert plane_settings(options).options["verify-python"] == "/v/python"
    monkeypatch.setenv("ROLLYARD_VERIFY_PYTHON", "/w/python")
    options = load_options(Options, {"vllm_python": "/v/python"}, None, "rollyard up")
    assert plane_settings(options).options["verify-python"] == "/w/python"


@pytest.mark.parametrize("engine", ["embedded", "vllm"])
def test_both_engines_get_their_arguments_and_environment(engine: Any) -> None:
    options = Options(engine=engine, model="m/n", engine_args=("--threads=2",), engine_env=("A=b",))
    spec = default_pool(options).spec.engine
    assert (spec.type, spec.args, spec.env) == (engine, ["--threads=2"], {"A": "b"})


def test_a_bridge_passes_options_on_unless_it_joins(
    file: Callable[[dict[str, Any]], Path], tmp_path: Path
) -> None:
    config = file({"max-polls": 7, "partition": "gpu", "max-jobs": 3, "tls-cert": "/c", "ca-file": "/ca"})
    options = bridge_options(load_options(BridgeCommandOptions, {"home": tmp_path}, config, "it"))
    assert (options.plane["max-polls"], options.plane["lease-seconds"]) == (7, 30.0)
    assert (options.profile.workers.partition or options.profile.partition, options.max_jobs) == ("gpu", 3)
    assert options.ca_file == Path("/ca")
    joined = {"join": "https://head:1", "token_file": Path("t"), "all_namespaces": True}
    with pytest.raises(UsageProblem, match="--max-polls is for a control plane of its own"):
        bridge_options(load_options(BridgeCommandOptions, joined, file({"max-polls": 7}), "it"))
    joined |= {"log_format": "text", "trace_sample": 0.5}
    assert bridge_options(load_options(BridgeCommandOptions, joined, None, "it")).join == "https://head:1"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            up.up,
            ["--no-sandbox-templates", "--config=c.yaml", "--port=0", "--engine-arg=--x", "--fakeroot"],
        ),
        (
            slurm_bridge.up,
            ["--no-sandbox-templates", "--config=c.yaml", "--time=1:00", "--prorl", "--no-open-docs"],
        ),
        (slurm_bridge.up, [*JOINED, "--namespace=team-a", "--namespace=team-b"]),
        (slurm_bridge.up, [*JOINED, "--all-namespaces"]),
    ],
    ids=["up", "bridge", "bridge of some namespaces", "bridge of all namespaces"],
)
def test_the_background_gets_the_same_command_line(command: Any, words: list[str]) -> None:
    with command.make_context("up", [*words, "--detach"]) as ctx:
        again = arguments_again(ctx, ("detach", "dry_run", "files"))
    assert sorted(again) == sorted(words)


# The command of a shell ends here; this process lives on, and its object for the running program does not.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_up_from_a_file_and_with_a_certificate(
    file: Callable[[dict[str, Any]], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The control plane is reached by HTTPS, and has the tokens of another file."""
    certificate, key = self_signed(tmp_path)
    tokens = tmp_path / "given.json"
    tokens.write_text(json.dumps({role: f"{role}-{tmp_path.name}" for role in ("admin", "worker", "driver")}))
    tokens.chmod(0o600)
    home = Home(tmp_path / "h")
    config = file(
        {
            "port": 0,
            "sandbox": "process",
            "replicas": 0,
            "tls-cert": str(certificate),
            "tls-key": str(key),
            "tokens": str(tokens),
            "max-unread": 77,
            "log-level": "warning",
        }
    )
    monkeypatch.setenv("ROLLYARD_CA_FILE", str(certificate))
    monkeypatch.setenv("ROLLYARD_UP_READY_WORKERS", "0")
    assert main(["up", "--detach", "--home", str(home.root), "--config", str(config)]) == 0
    try:
        assert "Rollyard runs at https://127.0.0.1:" in capsys.readouterr().out
        written = home.state / "control-plane.json"
        assert stat.S_IMODE(written.stat().st_mode) == 0o600
        assert (read_json(written) or {})["max-unread"] == 77
        assert (read_json(home.context_file) or {})["token_file"] == str(tokens)
        assert main(["get", "--home", str(home.root), "bp", "default"]) == 0
        assert "default" in capsys.readouterr().out
    finally:
        assert main(["down", "--home", str(home.root)]) == 0
