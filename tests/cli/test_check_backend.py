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
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import rollyard_engine
from rollyard.errors import LookupFailed, UsageProblem
from rollyard.local.external_server import served, tokenizer_folder
from rollyard.main import main
from rollyard_inference.sampling.request import ServedModel
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
    assert tokenizer["found"] == f"{MODEL.resolve()}, with a chat template"


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


def test_a_repository_is_looked_up_in_the_cache_and_then_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, asked = ServedModel("policy", folder="org/tiny"), []
    cached = tmp_path / "cached"
    cached.mkdir()

    def download(repository: str, **options: Any) -> str:
        asked.append((repository, "tokenizer.json" in options["allow_patterns"]))
        shutil.copy(MODEL / "tokenizer.json", cached)
        return str(cached)

    def look_up(repository: str, file: str) -> str | None:
        return str(cached / file) if (cached / file).exists() else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", look_up)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert tokenizer_folder(model) == cached
    assert asked == [("org/tiny", True)]
    assert tokenizer_folder(model) == cached
    assert len(asked) == 1, "it is in the cache now"
    (cached / "tokenizer.json").unlink()
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(cached))
    with pytest.raises(LookupFailed, match=r"'org/tiny' has no tokenizer\.json on Hugging Face"):
        tokenizer_folder(model)


def test_a_hub_that_does_not_answer_is_named_with_what_to_give(
    scripted: VllmShaped, tmp_path: Path, free_port: int
) -> None:
    """The library reads its settings when it is imported, so this runs in a process of its own."""
    scripted.model = scripted.served = "org/tiny"
    answer = scripted.answer
    models = {"data": [{"id": "policy", "root": "org/tiny"}]}
    scripted.answer = lambda path, body: (200, models) if path == "/v1/models" else answer(path, body)  # type: ignore[method-assign]
    environment = {
        **os.environ,
        "HF_ENDPOINT": f"http://127.0.0.1:{free_port}",
        "HF_HOME": str(tmp_path / "hub"),
        "HF_HUB_OFFLINE": "",
    }
    done = subprocess.run(
        [*PROGRAM, "up", "--backend", scripted.url, "--home", str(tmp_path / "home")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(120),
    )
    assert done.returncode == 2, done.stderr
    assert (
        f"--backend {scripted.url}: give --tokenizer DIR: 'org/tiny' is not in Hugging Face's" in done.stderr
    )
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("loaded", ["../secrets", "models/../../etc", "~root/x", "policy", "a/b/c", ""])
def test_only_an_absolute_path_or_an_id_with_an_owner_is_looked_for(
    loaded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("nothing may be downloaded")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(LookupFailed, match=r"is no absolute path and no id OWNER/NAME|does not say what it"):
        tokenizer_folder(ServedModel(loaded))


@pytest.mark.parametrize("given", ["/" + "x" * 5000, "~no-such-user/x", "/nothing/here"])
def test_a_folder_that_cannot_be_read_is_one_line(scripted: VllmShaped, given: str) -> None:
    with pytest.raises(
        UsageProblem, match=r"is not a folder that can be read|holds no tokenizer\.json"
    ) as error:
        served(scripted.url, "", given)
    assert len(str(error.value)) < 1000 + len(given)
