"""`rollyard weights` and the client's methods behind it, on a real control plane and a real engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import rollyard_engine
from rollyard.main import main
from rollyard_client import AsyncClient, Client, Conflict
from rollyard_testing.manifests import pool_manifest
from rollyard_testing.pace import patience
from rollyard_testing.waiting import until

MODEL = Path(rollyard_engine.__file__).parent / "models" / "tiny-policy"
IDS = list(range(5, 25))
START_SECONDS = patience(90.0)


def started(folder: Path, name: str, *arguments: str) -> tuple[subprocess.Popen[bytes], str]:
    port_file = folder / f"{name}.port"
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments, "--port", "0", "--port-file", str(port_file)],
            stdout=log,
            stderr=log,
        )
    end = time.monotonic() + START_SECONDS
    while not port_file.exists():
        if process.poll() is not None or time.monotonic() > end:
            process.kill()
            raise RuntimeError((folder / f"{name}.log").read_text()[-2000:])
        time.sleep(0.02)
    return process, f"http://127.0.0.1:{port_file.read_text().strip()}"


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """Yield URL and token of a control plane, and the URL of the one engine of its pool `p`."""
    folder = tmp_path_factory.mktemp("yard")
    engine, address = started(
        folder, "engine", "rollyard_engine", "--model", str(MODEL), "--served-model-name", "tiny"
    )
    try:
        api, url = started(folder, "api", "rollyard_api", "--state-dir", str(folder))
        try:
            token = json.loads((folder / "tokens.json").read_text())["admin"]
            with Client(url, token) as client:
                client.create_pool(
                    pool_manifest(
                        "p",
                        {
                            "model": "tiny",
                            "engine": {"type": "external", "external": {"urls": [address]}},
                        },
                    )
                )
                until(lambda: all(one.ready for one in client.pool("p").status.backends), START_SECONDS)
            yield url, token, address
        finally:
            api.kill()
            api.wait(patience(10))
    finally:
        engine.kill()
        engine.wait(patience(10))


@pytest.fixture(autouse=True)
def context(yard: tuple[str, str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ROLLYARD_HOME", str(tmp_path / "nohome"))
    monkeypatch.setenv("ROLLYARD_URL", yard[0])
    monkeypatch.setenv("ROLLYARD_TOKEN", yard[1])


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MODEL, tmp_path / "checkpoint"))


def reference(address: str) -> dict[str, Any]:
    """Return what the engine says of IDS now."""
    body = {"prompt": IDS, "max_tokens": 1, "prompt_logprobs": 0}
    choice = httpx.post(f"{address}/v1/completions", json=body, timeout=patience(30)).json()["choices"][0]
    pairs = zip(IDS[1:], choice["prompt_logprobs"][1:], strict=True)
    return {"promptIds": IDS, "logprobs": [entry[str(token)]["logprob"] for token, entry in pairs]}


def test_command(
    yard: tuple[str, str, str], checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right = tmp_path / "reference.json"
    right.write_text(json.dumps(reference(yard[2])))
    asked = ["weights", "p", "--checkpoint", str(checkpoint), "--reference", str(right), "--wait"]
    assert main([*asked, "--version", "c1", "--timeout", "60"]) == 0
    out = capsys.readouterr().out
    assert "c1 Succeeded, 1 of 1 backends, verified by reference" in out
    wrong = reference(yard[2])
    wrong["logprobs"] = [value - 1 for value in wrong["logprobs"]]
    right.write_text(json.dumps(wrong))
    assert main([*asked, "--version", "c2"]) == 1
    told = capsys.readouterr()
    assert "c2 Failed" in told.out
    assert "nats" in told.err
    assert main(["weights", "p"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0][:4] == ["ID", "VERSION", "STATE", "VERIFIED"]
    states = {row[1]: row[2:4] for row in rows if len(row) > 3}
    assert states["c1"] == ["Succeeded", "reference"]
    assert states["c2"] == ["Failed", "no"]
    assert main(["weights", "p", "--pause", "wait"]) == 0
    assert "pool p is paused" in capsys.readouterr().out
    assert httpx.get(f"{yard[2]}/is_paused").json()["is_paused"]
    assert main(["weights", "p", "--resume"]) == 0
    assert "pool p is not paused" in capsys.readouterr().out
    assert not httpx.get(f"{yard[2]}/is_paused").json()["is_paused"]


def test_what_the_servers_own_metrics_say_is_shown(
    yard: tuple[str, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The metrics are shown over REST, and in each place of the command line that shows pools or backends."""
    url, token, address = yard
    with Client(url, token) as client:

        def backend() -> Any:
            (one,) = client.pool("p").status.backends
            return one

        end = time.monotonic() + START_SECONDS
        # It is asked repeatedly, because requests before its metrics were first read are not counted, and the
        # cache may not hold the first counted prompt.
        while not backend().prefix_cache_hit_rate:
            assert time.monotonic() < end
            reference(address)
            body = {"prompt": IDS * 8, "max_tokens": 1}
            httpx.post(f"{address}/v1/completions", json=body, timeout=patience(30)).raise_for_status()
            time.sleep(0.2)
        # The metrics may have been read while that request ran.
        while (shown := backend()).running_requests:
            assert time.monotonic() < end
            time.sleep(0.05)
    assert 0 < shown.prefix_cache_hit_rate <= 1
    assert (shown.running_requests, shown.waiting_requests) == (0, 0)
    for arguments in (["get", "bp"], ["get", "bp", "-o", "wide"], ["describe", "bp", "p"]):
        assert main(arguments) == 0
        out = capsys.readouterr().out
        heads, row = next(
            (line, after)
            for line, after in itertools.pairwise(out.splitlines())
            if "HIT RATE" in line and "WAITING" in line
        )
        told = dict(zip(re.split(r" {2,}", heads), re.split(r" {2,}", row), strict=False))
        assert told["WAITING"] == "0", out
        # It may have been read once more in between.
        assert 0 < float(told["HIT RATE"].removesuffix("%")) <= 100, out


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (["p", "--version", "v"], 2, "exactly one of --checkpoint DIR, --lora NAME=DIR and --pushed"),
        (["p", "--version", "v", "--pushed", "--checkpoint", "x"], 2, "exactly one of"),
        (["p", "--version", "v", "--lora", "x"], 2, "--lora must be NAME=DIR"),
        (
            ["p", "--version", "v", "--pushed", "--pause", "abort"],
            2,
            "one of --version, --pause and --resume",
        ),
        (["p", "--pushed"], 2, "give --version V"),
        (["p", "--pause", "keep", "--resume"], 2, "one of --version, --pause and --resume"),
        (["p", "--version", "v", "--pushed", "--timeout", "3"], 2, "--timeout goes with --wait"),
        (["p", "--version", "unverified:v", "--pushed"], 2, "--version must be 1 to 100 characters"),
        (["p", "--version", "v", "--pushed", "--reference", "REFERENCE"], 2, "logprobs has 1 entries"),
        (["p", "--version", "v", "--checkpoint", "/nowhere/at/all"], 1, "source.checkpoint.path"),
        (["nope", "--version", "v", "--pushed"], 1, "nope"),
        (["nope"], 1, "nope"),
    ],
)
def test_bad_flags_end_with_one_line(
    arguments: list[str], status: int, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    short = tmp_path / "short.json"
    short.write_text(json.dumps({"promptIds": [1, 2, 3], "logprobs": [-1.0]}))
    given = [str(short) if argument == "REFERENCE" else argument for argument in arguments]
    assert main(["weights", *given]) == status
    said = capsys.readouterr().err
    assert told in said
    assert len(said.strip().splitlines()) == 1, said


def test_client(yard: tuple[str, str, str], checkpoint: Path) -> None:
    url, token, address = yard
    right = reference(address)
    with Client(url, token) as client:
        update = client.update_weights("p", "s1", checkpoint=str(checkpoint), reference=right)
        done = client.wait_weights("p", update.id, timeout=patience(60))
        assert (done.state, done.verified, done.verified_by) == ("Succeeded", True, "reference")
        assert client.weight_updates("p")[0] == done
        assert client.update_weights("p", "s1", checkpoint=str(checkpoint)).id == update.id
        with pytest.raises(Conflict, match="s1"):
            client.update_weights("p", "s1", pushed=True)
        assert client.pause_pool("p", "wait").status.paused
        # This is the trainer's own push, on servers that it has paused.
        pushed = client.update_weights("p", "s2", pushed=True, reference=right)
        assert client.wait_weights("p", pushed.id, timeout=patience(60)).verified
        assert not client.pool("p").status.paused
    asyncio.run(_with_async_client(url, token, checkpoint, right))


async def _with_async_client(url: str, token: str, checkpoint: Path, right: dict[str, Any]) -> None:
    async with AsyncClient(url, token) as client:
        assert (await client.pause_pool("p", "abort")).status.paused
        assert not (await client.resume_pool("p")).status.paused
        update = await client.update_weights(
            "p", "a1", checkpoint=str(checkpoint), in_flight="restart", reference=right
        )
        done = await client.wait_weights("p", update.id, timeout=patience(60))
        assert (done.state, done.in_flight, done.verified) == ("Succeeded", "restart", True)
        assert [one.policy_version for one in await client.weight_updates("p")][:2] == ["a1", "s2"]


def test_an_update_of_a_pool_without_backends_says_that_it_waits_for_one(
    yard: tuple[str, str, str], checkpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = {"model": "m", "engine": {"type": "embedded"}, "replicas": 0}
    head = {"apiVersion": "rollyard.dev/v1alpha1", "kind": "BackendPool", "metadata": {"name": "empty"}}
    with Client(yard[0], yard[1]) as client:
        client.create_pool({**head, "spec": spec})
    asked = ["weights", "empty", "--version", "e1", "--checkpoint", str(checkpoint), "--require-verified"]
    assert main(asked) == 0
    assert "e1 Running, 0 of 0 backends; waits for a backend" in capsys.readouterr().out
    assert main([*asked, "--wait", "--timeout", "0.2"]) != 0
    assert "has not ended within 0.2 s; waits for a backend" in capsys.readouterr().err
