"""`rollyard check-backend` on a real embedded engine, and the tokenizer of a server that runs already."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import rollyard_engine
from rollyard.errors import LookupFailed, UsageProblem
from rollyard.local import external_server
from rollyard.local.external_server import served, tokenizer_folder
from rollyard.main import main
from rollyard_inference.sampling.request import ServedModel
from rollyard_testing.hub import HubModel, hub_server
from rollyard_testing.inference.scripted import VllmShaped
from rollyard_testing.pace import patience
from rollyard_testing.waiting import until

MODEL = Path(rollyard_engine.__file__).parent / "models" / "tiny-policy"
PROGRAM = (sys.executable, "-m", "rollyard")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of an engine that serves the shipped model as `tiny`."""
    folder = tmp_path_factory.mktemp("engine")
    port_file = folder / "port"
    command = [sys.executable, "-m", "rollyard_engine", "--model", str(MODEL), "--served-model-name", "tiny"]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", "0", "--port-file", str(port_file)], stdout=log, stderr=log
        )
    try:
        end = time.monotonic() + patience(90.0)
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError((folder / "log").read_text()[-2000:])
            time.sleep(0.02)
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"
    finally:
        process.kill()
        process.wait(patience(10))


@pytest.fixture
def scripted() -> Iterator[VllmShaped]:
    server = VllmShaped()
    yield server
    server.close()


def test_the_embedded_engine_trains(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-backend", engine]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0].startswith(f"{engine} serves tiny (embedded engine ")
    assert shown[-1] == "trains: yes"
    assert [line for line in shown[3:-2] if not line.startswith("good ")] == [
        *(line for line in shown if "size not reported" in line),
        *(line for line in shown if "maxActiveRollouts" in line),
    ]
    assert main(["check-backend", engine + "/v1/", "--model", "tiny", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["trains"], document["model"]) == ("yes", "tiny")
    tokenizer = next(row for row in document["checks"] if row["name"] == "tokenizer")
    assert tokenizer["finding"] == f"{MODEL.resolve()}, with a chat template"


def test_up_and_check_backend_find_the_tokenizer_of_what_is_served(engine: str) -> None:
    assert served(engine, "", "") == ("tiny", str(MODEL.resolve()))


def test_up_and_get_bp_say_in_a_line_whether_it_trains(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ("--home", str(tmp_path / "home"))
    options = ("--port", "0", "--ready-workers", "0", "--sandbox", "process", "--detach")
    up = [*PROGRAM, "up", "--backend", engine, *home, *options]
    done = subprocess.run(up, capture_output=True, text=True, timeout=patience(120))
    try:
        assert done.returncode == 0, done.stderr
        assert f"{engine} serves tiny, trains: yes\ntokenizer: {MODEL.resolve()}\n" in done.stdout

        def shown() -> str:
            assert main(["get", "bp", *home]) == 0
            return capsys.readouterr().out.splitlines()[1]

        assert shown().split()[1] == "1/1", "it returns when the server is ready for rollouts"
        until(lambda: shown().endswith("   yes"), patience(60))
    finally:
        subprocess.run([*PROGRAM, "down", *home], check=True, timeout=patience(120))


def test_what_is_missing_is_shown_with_what_to_add(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder has a tokenizer, but no chat template, as base models have it."""
    shutil.copy(MODEL / "tokenizer.json", tmp_path)
    assert main(["check-backend", engine, "--tokenizer", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "lacks     tokenizer           no tokenizer with a chat template\n" in shown
    assert f"why: {tmp_path} has no chat_template.jinja" in shown
    assert shown.endswith(
        "\ntrains: no: no tokenizer with a chat template (--tokenizer DIR of `rollyard up`)\n"
    )


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("127.0.0.1:8000", "URL must be a URL such as http://127.0.0.1:8000"),
        ("http://127.0.0.1:1", "http://127.0.0.1:1/health cannot be reached"),
        ("http://[", "cannot be reached"),
        ("http://", "cannot be reached"),
    ],
)
def test_a_wrong_url_is_one_line(url: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-backend", url]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


def test_another_model_is_named(engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-backend", engine, "--model", "other"]) == 2
    assert "--model 'other': at" in (error := capsys.readouterr().err)
    assert "it serves: tiny" in error


def test_ctrl_c_ends_it_while_a_server_hangs(scripted: VllmShaped) -> None:
    scripted.gates["/health"] = threading.Event()
    process = subprocess.Popen([*PROGRAM, "check-backend", scripted.url], stderr=subprocess.PIPE, text=True)
    try:
        end = time.monotonic() + patience(60)
        while "/health" not in scripted.seen and time.monotonic() < end:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=patience(60))
    finally:
        process.kill()
    assert (process.returncode, error.strip()) == (130, "")


# The tokenizer of a served model.


@pytest.fixture
def check(scripted: VllmShaped) -> Callable[..., dict[str, str]]:
    """Return a function that checks a server with a model of the hub, and returns the row of its tokenizer.

    The library reads its settings when it is imported, so each check has a process of its own.
    """
    answer = scripted.answer

    def run(loaded: str, environment: Mapping[str, str]) -> dict[str, str]:
        models = {"data": [{"id": "policy", "root": loaded}]}
        scripted.answer = lambda path, body: (200, models) if path == "/v1/models" else answer(path, body)  # type: ignore[method-assign]
        done = subprocess.run(
            [*PROGRAM, "check-backend", scripted.url, "--json"],
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=patience(120),
        )
        assert "Traceback" not in done.stderr
        (row,) = (row for row in json.loads(done.stdout)["checks"] if row["name"] == "tokenizer")
        return row

    return run


def test_a_model_of_the_hub_is_looked_up_in_the_cache_and_then_downloaded(
    check: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    with hub_server() as hub:
        hub.models["tiny/tiny-policy"] = HubModel(MODEL)
        hub.models["tiny/bare"] = HubModel(tmp_path)
        (tmp_path / "config.json").write_text("{}")
        environment = hub.environment(tmp_path / "cache")
        row = check("tiny/tiny-policy", environment)
        assert (row["state"], "models--tiny--tiny-policy" in row["finding"]) == ("good", True)
        assert not any(path.endswith(".onnx") for path in hub.downloads()), "the tokenizer alone"
        hub.requests.clear()
        assert check("tiny/tiny-policy", environment)["state"] == "good"
        assert hub.requests == [], "it is in the cache now"
        assert "tiny/bare has no tokenizer.json" in check("tiny/bare", environment)["detail"]
        assert "has no model 'tiny/none'" in check("tiny/none", environment)["detail"]


def test_a_hub_that_does_not_answer_is_named(
    check: Callable[..., dict[str, str]], tmp_path: Path, free_port: int
) -> None:
    endpoint = f"http://127.0.0.1:{free_port}"
    row = check("org/tiny", {"HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hub"), "HF_HUB_OFFLINE": ""})
    assert (row["state"], row["remedy"]) == ("lacks", "--tokenizer DIR of `rollyard up`")
    assert row["detail"].startswith(f"{endpoint} cannot be reached")


@pytest.mark.parametrize("loaded", ["../secrets", "models/../../etc", "~root/x", "policy", "a/b/c", ""])
def test_only_an_absolute_path_or_an_id_with_an_owner_is_looked_for(
    loaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setattr(external_server, "download", refuse)
    with pytest.raises(LookupFailed, match=r"is no absolute path and no id OWNER/NAME|does not say what it"):
        tokenizer_folder(ServedModel(loaded))


@pytest.mark.parametrize("given", ["/" + "x" * 5000, "~no-such-user/x", "/nothing/here"])
def test_a_folder_that_cannot_be_read_is_one_line(scripted: VllmShaped, given: str) -> None:
    with pytest.raises(
        UsageProblem, match=r"is not a folder that can be read|holds no tokenizer\.json"
    ) as error:
        served(scripted.url, "", given)
    assert len(str(error.value)) < 1000 + len(given)
