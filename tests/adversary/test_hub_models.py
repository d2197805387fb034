"""Models of the Hugging Face Hub: a pool's author chooses the name, the owner of the repository its files."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rollyard_crds import BackendPool
from rollyard_drivers.commands import vllm_command
from rollyard_drivers.reconcile.pool import pool_workloads
from rollyard_operator.pods.workloads import backend_pod
from rollyard_operator.settings import OperatorSettings
from rollyard_pipeline.chat.tokenizer import locate
from rollyard_pipeline.errors import TokenizerUnavailable
from rollyard_process.hub import HubError, download, find
from rollyard_process.hub_names import HubName, hub_name
from rollyard_testing.hub import CONTENT_HOST, TOKEN, Hub, HubModel, hub_server, use_hub
from rollyard_testing.pace import patience

HUGGING_FACE = Path(__file__).parents[2] / "examples" / "tiny-policy" / "hf"

pytestmark = pytest.mark.attack(surface="models of the Hugging Face Hub")


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        server.models["tiny/hf"] = HubModel(HUGGING_FACE)
        yield server


@pytest.fixture
def cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return use_hub(monkeypatch, hub, tmp_path / "home")


@pytest.mark.attack(
    "the name of a model or its revision leads out of the cache to another folder of the machine",
    boundary="node",
    stopped_by="no part of a name of the hub is `..` or begins with a dot or a slash; all else is a path",
)
def test_a_name_does_not_lead_out_of_the_cache(hub: Hub, cache: Path, tmp_path: Path) -> None:
    folder = download(HubName("tiny/hf"), "tokenizer")
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "tokenizer.json").write_text("{}")
    # The library reads a revision as the path of a file, and the commit in it as the path of a folder.
    refs, snapshots = folder.parents[1] / "refs", folder.parent
    (tmp_path / "planted").write_text(str(secret))
    up = "/".join([".."] * len(refs.relative_to(tmp_path).parts))
    assert (refs / up / "planted").resolve() == tmp_path / "planted"
    assert (snapshots / secret).is_dir()
    hub.requests.clear()
    for name in (
        f"tiny/hf@{up}/planted",
        f"tiny/hf@x/{up}/../planted",
        f"../{tmp_path.name}",
        "tiny/../../secret",
        "tiny/hf/../../secret",
        f"tiny/hf@{tmp_path}/planted",
        "tiny/hf@.",
        "tiny--hf/x",
        "tiny/hf\n",
        "-tiny/hf",
    ):
        assert hub_name(name) is None, name
        assert find(name) is None, name
        with pytest.raises(TokenizerUnavailable):
            locate(name)
    assert not hub.requests


@pytest.mark.attack(
    "a repository has files whose paths lead out of the cache",
    boundary="node",
    stopped_by="the library refuses such paths, and the download ends with one line that says so",
)
@pytest.mark.parametrize("path", ["../../../../escaped.json", "a/../../../../../escaped.json"])
def test_a_hostile_listing_writes_nothing_outside(hub: Hub, cache: Path, tmp_path: Path, path: str) -> None:
    hub.models["tiny/evil"] = HubModel(HUGGING_FACE, also={path: b"{}"})
    with pytest.raises(HubError, match="describes files of tiny/evil that cannot be used"):
        download(HubName("tiny/evil"), "vllm")
    assert not list(tmp_path.rglob("escaped.json"))
    assert all(one.is_relative_to(cache) or one == cache.parent for one in (tmp_path / "home").rglob("*"))


@pytest.mark.attack(
    "a repository brings Python code that the loading of its model runs",
    boundary="node",
    stopped_by="no Python file is downloaded, and no server is started with --trust-remote-code",
)
def test_no_code_of_a_repository_is_downloaded(hub: Hub, cache: Path) -> None:
    code = b"raise SystemExit('owned')"
    files = {"modeling_evil.py": code, "sub/tokenization_evil.py": code, "setup.py": code}
    hub.models["tiny/evil"] = HubModel(HUGGING_FACE, also=files)
    folder = download(HubName("tiny/evil"), "vllm")
    assert (folder / "model.safetensors").is_file()
    assert not list(cache.rglob("*.py"))
    assert code not in [path.read_bytes() for path in cache.rglob("*") if path.is_file()]
    spec = {"model": "tiny/evil", "engine": {"type": "vllm"}}
    (workload,) = pool_workloads(BackendPool.model_validate({"metadata": {"name": "p"}, "spec": spec}))
    assert not any("trust" in word for word in vllm_command(workload, "h", 1, str(folder)))


@pytest.mark.attack(
    "the token reaches a server that the hub redirects to, a log or a command line",
    boundary="node",
    stopped_by="it is read from the environment or a file, sent to HF_ENDPOINT alone, and never quoted",
)
def test_the_token_goes_to_the_hub_alone(hub: Hub, tmp_path: Path) -> None:
    hub.models["tiny/gated"] = HubModel(HUGGING_FACE, gated=True)
    said = ""
    for name in ("tiny/gated", "tiny/none", "tiny/gated@none"):
        done = subprocess.run(
            [sys.executable, "-m", "rollyard_process.hub", name, "--for", "vllm"],
            env={**hub.environment(tmp_path / "home", TOKEN), "HF_HUB_VERBOSITY": "debug"},
            capture_output=True,
            text=True,
            timeout=patience(60),
        )
        said += done.stdout + done.stderr
    tokens = {request.host.partition(":")[0]: set[str]() for request in hub.requests}
    for request in hub.requests:
        tokens[request.host.partition(":")[0]].add(request.token)
    assert tokens.keys() == {"127.0.0.1", CONTENT_HOST}
    assert TOKEN in tokens["127.0.0.1"]
    assert tokens[CONTENT_HOST] == {""}
    assert TOKEN not in said
    kept = [path for path in (tmp_path / "home").rglob("*") if path.is_file()]
    assert kept
    assert not any(TOKEN.encode() in path.read_bytes() for path in kept)


@pytest.mark.attack(
    "a pool's author has the token sent to their server, or reads it in the pod",
    boundary="kubernetes",
    stopped_by="only an init container has it, with the installation's image, command and environment",
)
def test_nothing_of_a_pool_reaches_the_container_with_the_token() -> None:
    settings = OperatorSettings.model_validate(
        {
            "instance": "test",
            "controlPlaneUrl": "http://api:8765",
            "tokenFile": "/t",
            "workerTokenFile": "/w",
            "releaseNamespace": "rollyard",
            "images": {"worker": "w:1", "engine": "e:1", "sandbox": "s:1", "sandboxDefault": "d:1"},
            "hub": {"claim": "cache", "tokenSecret": "hub-token"},
        }
    )

    def pod(**spec: object) -> dict[str, object]:
        meta = {"name": "p", "namespace": "team", "uid": "u"}
        pool = BackendPool.model_validate({"metadata": meta, "spec": {"model": "org/m", **spec}})
        (workload,) = pool_workloads(pool)
        made: dict[str, object] = backend_pod(workload, pool, settings)["spec"]
        return made

    evil = {"HF_ENDPOINT": "http://evil", "HF_HOME": "/evil", "HTTPS_PROXY": "http://evil", "PATH": "/evil"}
    template = {
        "image": "evil:1",
        "env": [{"name": name, "value": value} for name, value in evil.items()],
        "volumes": [{"name": "v", "emptyDir": {}}],
        "volumeMounts": [{"name": "v", "mountPath": path} for path in ("/tmp", "/var/cache/rollyard/hub")],
    }
    engine = {"type": "vllm", "command": ["sh", "-c", "env"], "args": ["--evil"], "env": evil}
    hostile, plain = pod(template=template, engine=engine), pod(engine={"type": "vllm"})
    assert hostile["initContainers"] == plain["initContainers"]
    assert "evil" not in json.dumps(hostile["initContainers"])
    assert "hub-token" not in json.dumps(hostile["containers"])
