"""Starting and ending the process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_testing.pace import patience


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rollyard_engine", *arguments],
        capture_output=True,
        text=True,
        timeout=patience(30),
        check=False,
    )


def test_a_port_in_use_is_named_in_one_line(model_dir: Path, free_port: int) -> None:
    ended = run("--model", str(model_dir), "--port", str(free_port))
    assert ended.returncode == 2
    assert ended.stderr.count("\n") == 1
    assert f"port {free_port}" in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--port", "70000"), "from 0 to 65535"),
        (("--max-num-seqs", "0"), "from 1 to"),
        (("--max-model-len", "99999999"), "longer than the model's context"),
        (("--max-model-len", "2048", "--kv-cache-mib", "1"), "raise it or lower --max-model-len"),
    ],
)
def test_arguments_that_cannot_be_served_are_refused(
    model_dir: Path, arguments: tuple[str, ...], said: str
) -> None:
    ended = run(
        "--model", str(model_dir), *(("--port", "0") if "--port" not in arguments else ()), *arguments
    )
    assert ended.returncode == 2
    assert said in ended.stderr


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    for folder, said in ((tmp_path / "none", "does not exist"), (tmp_path, "has no genai_config.json")):
        ended = run("--model", str(folder), "--port", "0")
        assert ended.returncode == 2
        assert said in ended.stderr
        assert ended.stderr.count("\n") == 1


def test_it_leaves_no_telemetry_of_its_runtime(
    start_server_process: Any, model_dir: Path, tmp_path: Path
) -> None:
    """Neither a device id and events in the user's cache nor a session file among the temporary ones."""
    unset = ("ORT_DISABLE_TELEMETRY", "XDG_CACHE_HOME")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    places = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path)}
    server = start_server_process(model_dir, env={**inherited, **places})
    server.complete([5, 6], max_tokens=1)
    assert server.stop() == 0
    assert not [path for path in tmp_path.rglob("*") if path.name == ".ses" or "Microsoft" in path.parts]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_it_with_partial_answers(own_server: Any, number: signal.Signals) -> None:
    async with own_server.client() as client:
        body = {"token_ids": [5, 6], "sampling_params": {"ignore_eos": True}, "stream": True}
        async with client.stream("POST", "/inference/v1/generate", json=body) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            own_server.process.send_signal(number)
            rest = [line async for line in lines]
    assert [line for line in rest if line][-1] == "data: [DONE]"
    assert any('"finish_reason":"abort"' in line for line in rest)
    assert own_server.process.wait(patience(10)) == 0
    with pytest.raises(httpx.ConnectError):
        own_server.get("/health")
