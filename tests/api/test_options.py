"""The options of the control plane: one declaration, three sources, and their precedence."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from rollyard_api.command import command, main
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.jobs import blobs, task_reader
from rollyard_api.options.command_line import on_command_line
from rollyard_api.options.declared import (
    TELEMETRY,
    ControlPlaneOptions,
    PlaneOptions,
    document,
    key_of,
    keys,
    option_of,
    variable_of,
)
from rollyard_api.options.sources import drop_variables, load

MINE = "ROLLYARD_CONTROL_PLANE_"


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove what the user's own environment says."""
    for name in ("ROLLYARD_VERIFY_PYTHON", "ROLLYARD_TRACE_SAMPLE", "ROLLYARD_LOG_FORMAT"):
        monkeypatch.delenv(name, raising=False)


def read(file: Path | None = None, *words: str) -> ControlPlaneOptions:
    """Return the options of a command line, the environment and a file."""
    with click.Context(command) as ctx:
        command.parse_args(ctx, ["--state-dir", "s", *words])
    given = {name: value for name, value in ctx.params.items() if name != "config"}
    return load(ControlPlaneOptions, on_command_line(given), file, "rollyard control-plane")


def written(folder: Path, text: str, mode: int = 0o600) -> Path:
    file = folder / "options.yaml"
    file.write_text(text)
    file.chmod(mode)
    return file


def test_every_option_is_declared_whole() -> None:
    for model in (PlaneOptions, ControlPlaneOptions):
        for name, field in model.model_fields.items():
            option = option_of(field)
            assert option.help, name
            assert option.group, name
            assert re.fullmatch(r"[a-z][a-z0-9-]*", key_of(name, field)), name
            assert variable_of(model, name) or option.elsewhere, name
        assert len(keys(model)) == len(model.model_fields)


def test_the_bounds_of_files_and_uploads_are_those_of_their_readers() -> None:
    plain = ControlPlaneOptions(state_dir=Path("s"))
    assert plain.max_task_bytes == task_reader.TaskFileLimits().file_bytes
    usual = blobs.BlobLimits()
    assert plain.max_blob_bytes == usual.blob_bytes
    assert plain.max_namespace_blob_bytes == usual.namespace_bytes
    assert plain.max_namespace_blobs == usual.namespace_count


def test_the_command_line_comes_before_variables_and_these_before_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(
        tmp_path, "lease-seconds: 20\nmax-polls: 7\nport: 1\nallowed-host: [a.example, b.example]\n"
    )
    monkeypatch.setenv(MINE + "LEASE_SECONDS", "21")
    monkeypatch.setenv(MINE + "MAX_POLLS", "8")
    monkeypatch.setenv(MINE + "MAX_STREAMS", "")
    options = read(file, "--lease-seconds", "22")
    assert (options.lease_seconds, options.max_polls, options.port) == (22.0, 8, 1)
    assert options.max_streams == 1024, "an empty variable counts as none"
    assert options.allowed_hosts == ("a.example", "b.example")
    assert read(file, "--allowed-host", "c.example").allowed_hosts == ("c.example",)


@pytest.mark.parametrize("text", ["a.example b.example", '["a.example", "b.example"]'])
def test_a_list_in_a_variable(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MINE + "ALLOWED_HOST", text)
    assert read().allowed_hosts == ("a.example", "b.example")


def test_what_is_switched_on_is_switched_off_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = written(tmp_path, "open-docs: true\nopen-metrics: true\n")
    monkeypatch.setenv(MINE + "OPEN_METRICS", "false")
    options = read(file, "--no-open-docs")
    assert (options.open_docs, options.open_metrics) == (False, False)
    assert read(file).open_docs is True


def test_a_variable_of_another_reader_comes_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = written(tmp_path, "trace-sample: 0.25\n")
    assert read(file).trace_sample == 0.25
    monkeypatch.setenv("ROLLYARD_TRACE_SAMPLE", "0.5")
    assert read(file).trace_sample is None
    assert read(file, "--trace-sample", "0.75").trace_sample == 0.75


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "lease_seconds: 3",
            "lease_seconds: is not an option of `rollyard control-plane`; did you mean lease-seconds?",
        ),
        ("leaseSeconds: 3", "did you mean lease-seconds?"),
        (
            "colour: red",
            "colour: is not an option of `rollyard control-plane`; `rollyard control-plane --help`",
        ),
        ("lease-seconds: 0", "lease-seconds: Input should be greater than or equal to 1 (got 0)"),
        ("lease-seconds: soon", "lease-seconds: Input should be a valid number"),
        ("max-polls: true", "max-polls: must not be true or false"),
        ("open-docs: perhaps", "open-docs: must be true or false (got 'perhaps')"),
        ("allowed-host: a.example", "allowed-host: must be a list (got 'a.example')"),
        ("allow-sandbox-host: [10.0.0.1]", "allow-sandbox-host: '10.0.0.1' is not a host"),
        ("path-prefix: x", "path-prefix: must be a path such as /rollyard"),
        ("log-level: loud", "log-level: Input should be 'debug', 'info', 'warning' or 'error' (got 'loud')"),
        ("[lease-seconds]", "must be a mapping of options to values"),
        ("a: [", "is not YAML that is accepted"),
        ("db: 7", "db: must be a text; quote it if it is a number"),
    ],
)
def test_what_a_file_cannot_say(text: str, problem: str, tmp_path: Path) -> None:
    file = written(tmp_path, text)
    with pytest.raises(OptionInvalid) as raised:
        read(file)
    assert str(raised.value).startswith(str(file))
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        (
            "LEASE_SECOND",
            "3",
            "LEASE_SECOND: is not an option of `rollyard control-plane`; did you mean ROLLYARD_",
        ),
        ("LEASE_SECONDS", "0", "LEASE_SECONDS: Input should be greater than or equal to 1 (got '0')"),
        ("PORT", "tcp://10.0.0.1:80", "PORT: Input should be a valid integer"),
        ("OPEN_DOCS", "perhaps", "OPEN_DOCS: must be true or false"),
        ("ALLOWED_HOST", '["a"', "ALLOWED_HOST: must be words with spaces between them, or a JSON list"),
    ],
)
def test_what_a_variable_cannot_say(
    name: str, value: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MINE + name, value)
    with pytest.raises(OptionInvalid) as raised:
        read()
    assert str(raised.value).startswith(MINE)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ([], "--state-dir is required (or ROLLYARD_CONTROL_PLANE_STATE_DIR, or `state-dir` in the file"),
        (["--state-dir", "s", "--lease-second", "3"], "Did you mean one of: '--lease-seconds'"),
        (
            ["--state-dir", "s", "--lease-seconds", "0"],
            "'--lease-seconds': 0.0 is not in the range 1<=x<=3600",
        ),
        (["--state-dir", "s", "--path-prefix", "x"], "--path-prefix: must be a path such as /rollyard"),
        (["--state-dir", "s", "--config", "nowhere"], "--config nowhere: cannot be read: No such file"),
    ],
)
def test_a_wrong_command_line_is_one_line(
    words: list[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    said = capsys.readouterr().err
    assert problem in said
    assert len(said.splitlines()) == 1


def other_value(field: Any) -> Any:
    """Return a value that is not the default of a field."""
    kind = next((part for part in get_args(field.annotation) if part is not type(None)), field.annotation)
    if field.annotation is bool:
        return not field.default
    if isinstance(field.default, int | float):
        return field.default / 2 if isinstance(field.default, float) else field.default + 1
    if isinstance(field.default, tuple):
        return ["pypi.org"]
    return {"info": "error"}.get(field.default, "/some/text") if kind in (str, Path) or field.default else 0.5


def test_each_option_reaches_a_control_plane_that_a_driver_starts(tmp_path: Path) -> None:
    """What a driver writes for its control plane is read there as it was meant."""
    chosen = {
        key: other_value(PlaneOptions.model_fields[name])
        for key, name in keys(PlaneOptions).items()
        if name not in TELEMETRY
    }
    first = load(PlaneOptions, {}, written(tmp_path, json.dumps(chosen)), "rollyard up")
    assert first.model_fields_set >= set(PlaneOptions.model_fields) - set(TELEMETRY)
    again = read(written(tmp_path, json.dumps(document(first))))
    for name, field in PlaneOptions.model_fields.items():
        if name not in TELEMETRY:
            assert getattr(again, name) == getattr(first, name) != field.default, name


def test_no_process_inherits_the_variables() -> None:
    environ = {"HOME": "/", MINE + "DB": "x", "ROLLYARD_VERIFY_PYTHON": "p", "ROLLYARD_TOKEN": "t"}
    drop_variables(ControlPlaneOptions, environ)
    assert environ == {"HOME": "/", "ROLLYARD_TOKEN": "t"}
