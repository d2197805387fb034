"""Models of the Hugging Face Hub: their names, downloads from a local hub, and why there is none."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rollyard_process import hub as models
from rollyard_process.hub import HubError, Use, download, find
from rollyard_process.hub_names import HubName, hub_name
from rollyard_testing.hub import COMMIT, TOKEN, Hub, HubModel, hub_server, use_hub
from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "engine" / "src" / "rollyard_engine" / "models" / "tiny-policy"
HUGGING_FACE = ROOT / "examples" / "tiny-policy" / "hf"
Fetch = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub() -> Iterator[Hub]:
    with hub_server() as server:
        server.models["tiny/onnx"] = HubModel(TINY)
        server.models["tiny/hf"] = HubModel(HUGGING_FACE)
        yield server


@pytest.fixture
def fetch(hub: Hub, tmp_path: Path) -> Fetch:
    """Return a function that downloads a model in a process of its own, with the cache in `tmp_path`."""

    def run(*arguments: str, token: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "rollyard_process.hub", *arguments],
            env={**hub.environment(tmp_path / "cache", token), **env},
            capture_output=True,
            text=True,
            timeout=patience(60),
        )

    return run


@pytest.fixture
def cache(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let this process use the hub, and return the folder of its cache."""
    return use_hub(monkeypatch, hub, tmp_path / "cache")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-8B", HubName("Qwen/Qwen3-8B")),
        ("Qwen/Qwen3-8B@main", HubName("Qwen/Qwen3-8B")),
        ("Qwen/Qwen3-8B@refs/pr/1", HubName("Qwen/Qwen3-8B", "refs/pr/1")),
        (f"a/b_c.d@{COMMIT}", HubName("a/b_c.d", COMMIT)),
        *(
            (text, None)
            for text in (
                "m",
                "/models/m",
                "./a/b",
                "~/b",
                "a/b/c",
                "a/b@",
                "-a/b",
                "a/b@-x",
                "a b/c",
                "s3://b/m",
            )
        ),
    ],
)
def test_names(text: str, name: HubName | None) -> None:
    assert hub_name(text) == name
    if name is not None:
        assert hub_name(str(name)) == name


@pytest.mark.parametrize("use", ["embedded", "vllm"])
def test_a_model_is_downloaded_once_and_then_needs_no_network(
    hub: Hub, fetch: Fetch, tmp_path: Path, use: Use
) -> None:
    name, source = ("tiny/onnx", TINY) if use == "embedded" else ("tiny/hf", HUGGING_FACE)
    link = tmp_path / "link"
    done = fetch(name, "--for", use, "--link", str(link))
    assert done.returncode == 0, done.stderr
    for path in source.iterdir():
        assert (link / path.name).read_bytes() == path.read_bytes()
    assert len(hub.downloads()) == len(set(hub.downloads())), "each file once"
    hub.requests.clear()
    assert fetch(name, "--for", use, "--link", str(link)).returncode == 0
    assert fetch(name, "--for", use, HF_HUB_OFFLINE="1").returncode == 0
    assert fetch(name, "--for", "tokenizer").returncode == 0, "the tokenizer came with the model"
    assert hub.requests == []


def test_a_file_that_is_cut_off_is_continued(hub: Hub, fetch: Fetch) -> None:
    hub.cut_off_after = [1_000_000, 2_000_000]
    done = fetch("tiny/hf", "--for", "vllm")
    assert done.returncode == 0, done.stderr
    assert len([path for path in hub.downloads() if path.startswith("/content/")]) == 3


def test_only_the_tokenizer(hub: Hub, cache: Path) -> None:
    folder = download(HubName("tiny/hf"), "tokenizer")
    assert sorted(path.name for path in folder.iterdir()) == [
        *("config.json", "tokenizer.json", "tokenizer_config.json")
    ]
    assert folder.is_relative_to(cache)
    assert find("tiny/hf") == find(f"tiny/hf@{COMMIT}") == folder / "tokenizer.json"
    assert find("tiny/hf@other") is None
    assert find("tiny/onnx") is None, "looking downloads nothing"


def test_a_revision(hub: Hub, cache: Path) -> None:
    hub.revisions |= {"v1": "a" * 40, "a" * 40: "a" * 40}
    assert download(HubName("tiny/hf", "v1"), "tokenizer").name == "a" * 40
    assert download(HubName("tiny/hf"), "tokenizer").name == COMMIT


def test_a_cache_of_an_older_library_that_lacks_a_part_is_completed(
    hub: Hub, cache: Path, tmp_path: Path
) -> None:
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = {"weight_map": {"a": parts[0], "b": parts[1]}}
    files = dict.fromkeys(parts, b"weights") | {"model.safetensors.index.json": json.dumps(index).encode()}
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_bytes((HUGGING_FACE / name).read_bytes())
    hub.models["tiny/parts"] = HubModel(tmp_path / "model", also=files)
    folder = download(HubName("tiny/parts"), "vllm")
    (listing,) = (folder.parents[1] / "trees").iterdir()
    listing.unlink()  # An older library writes none, so this one cannot know that a file is missing.
    (folder / parts[1]).unlink()
    assert models.cached(HubName("tiny/parts"), "vllm") is None
    assert (download(HubName("tiny/parts"), "vllm") / parts[1]).read_bytes() == b"weights"


def test_weights_of_the_older_form(hub: Hub, cache: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "model" / name).write_bytes((HUGGING_FACE / name).read_bytes())
    hub.models["tiny/bin"] = HubModel(tmp_path / "model")
    with pytest.raises(HubError, match=r"tiny/bin has no weights \(\*\.safetensors or \*\.bin"):
        download(HubName("tiny/bin"), "vllm")
    hub.revisions |= {"next": "b" * 40, "b" * 40: "b" * 40}
    (tmp_path / "model" / "pytorch_model.bin").write_bytes(b"weights")
    folder = download(HubName("tiny/bin", "next"), "vllm")
    assert (folder / "pytorch_model.bin").read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("name", "token", "reason", "words"),
    [
        ("tiny/gated", "", "ModelGated", "accept its licence at .*/tiny/gated, and set HF_TOKEN"),
        ("tiny/gated", "hf_other", "ModelGated", "the account of the token has no access"),
        ("tiny/private", "", "ModelNotFound", "a private one needs HF_TOKEN"),
        ("tiny/none", TOKEN, "ModelNotFound", r"has no model 'tiny/none': .* Did you mean a folder\?"),
        ("tiny/hf@nope", "", "RevisionNotFound", "tiny/hf has no revision 'nope': name a branch"),
        ("tiny/onnx", "", "ModelUnsuitable", r"tiny/onnx has no config\.json"),
    ],
)
def test_why_there_is_none(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, name: str, token: str, reason: str, words: str
) -> None:
    hub.models["tiny/gated"] = HubModel(HUGGING_FACE, gated=True)
    hub.models["tiny/private"] = HubModel(HUGGING_FACE, private=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    repository = hub_name(name)
    assert repository is not None
    with pytest.raises(HubError, match=words) as caught:
        download(repository, "vllm")
    assert caught.value.reason == reason
    assert caught.value.is_permanent
    assert "\n" not in str(caught.value)


def test_a_token_opens_what_is_gated(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.models["tiny/gated"] = HubModel(HUGGING_FACE, gated=True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (download(HubName("tiny/gated"), "vllm") / "model.safetensors").is_file()


def test_the_embedded_engine_says_what_serves_the_model(hub: Hub, cache: Path) -> None:
    with pytest.raises(
        HubError, match=r"no genai_config\.json: the embedded engine serves ONNX .* with vLLM"
    ):
        download(HubName("tiny/hf"), "embedded")
    assert not any(path.startswith("/content/") for path in hub.downloads()), "before the weights have come"


@pytest.mark.parametrize(("status", "words"), [(503, "with 503: try again"), (429, "too many requests")])
def test_a_hub_that_refuses_is_asked_again_later(hub: Hub, cache: Path, status: int, words: str) -> None:
    hub.status = status
    with pytest.raises(HubError, match=words) as caught:
        download(HubName("tiny/hf"), "vllm")
    assert not caught.value.is_permanent


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ({"HF_ENDPOINT": "http://127.0.0.1:9"}, "http://127.0.0.1:9 cannot be reached"),
        ({"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE forbids the download"),
        ({"HF_HOME": "/proc/nowhere"}, "/proc/nowhere/hub cannot be written"),
    ],
)
def test_without_network_or_folder_one_line_says_so(fetch: Fetch, env: dict[str, str], words: str) -> None:
    done = fetch("tiny/hf", "--for", "vllm", **env)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert words in last
    assert "Traceback" not in done.stderr


@pytest.fixture
def parts(hub: Hub, tmp_path: Path) -> str:
    """Add a model with weights in two files to the hub, and the first of them to the cache."""
    parts = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    index = json.dumps({"weight_map": {"a": parts[0], "b": parts[1]}}).encode()
    files = {parts[0]: b"weights", "model.safetensors.index.json": index, "config.json": b"{}"}
    (tmp_path / "model").mkdir()
    hub.models["tiny/parts"] = HubModel(tmp_path / "model", also=files | {parts[1]: b"weights"})
    snapshot = tmp_path / "cache" / "hub" / "models--tiny--parts" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    for name, content in files.items():
        (snapshot / name).write_bytes(content)
    return "tiny/parts"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        (
            {"HF_ENDPOINT": "http://127.0.0.1:9"},
            "http://127.0.0.1:9 cannot be reached (",
        ),
        ({"HF_HUB_OFFLINE": "1"}, ", and HF_HUB_OFFLINE forbids the download"),
    ],
)
@pytest.mark.parametrize("weights", [True, False])
def test_an_incomplete_copy_counts_as_none_without_network(
    fetch: Fetch, parts: str, tmp_path: Path, env: dict[str, str], words: str, weights: bool
) -> None:
    if not weights:
        for path in tmp_path.glob("cache/hub/*/snapshots/*/model*"):
            path.unlink()
    done = fetch(parts, "--for", "vllm", **env)
    assert (done.returncode, done.stdout) == (1, "")
    (line,) = done.stderr.splitlines()
    assert words in line
    assert f"{tmp_path}/cache/hub has no complete copy of tiny/parts" in line
    assert line.endswith("Did you mean a folder? There is none of that name here; give its absolute path")


def test_an_incomplete_copy_is_not_taken_for_a_download(hub: Hub, cache: Path, parts: str) -> None:
    hub.lists_files = False
    with pytest.raises(HubError, match=r"did not give all files of tiny/parts, and .* try again") as caught:
        download(HubName(parts), "vllm")
    assert caught.value.reason == "HubUnreachable"
    hub.lists_files = True
    assert len(list(download(HubName(parts), "vllm").glob("*.safetensors"))) == 2


def test_an_index_of_weights_that_the_repository_lacks(hub: Hub, cache: Path, parts: str) -> None:
    del hub.models[parts].also["model-00002-of-00002.safetensors"]
    words = r"tiny/parts lacks weights that its model\.safetensors\.index\.json names"
    with pytest.raises(HubError, match=words) as caught:
        download(HubName(parts), "vllm")
    assert caught.value.reason == "ModelUnsuitable"


@pytest.mark.parametrize(
    ("number", "reason", "words"),
    [
        (errno.ENOSPC, "DiskFull", "is full, .* free some space"),
        (errno.EDQUOT, "DiskFull", "is full"),
        (errno.EACCES, "CacheUnwritable", "cannot be written"),
    ],
)
def test_a_disk_that_takes_nothing(
    hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str, words: str
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, "no")

    monkeypatch.setattr("huggingface_hub.file_download.http_get", fail)
    with pytest.raises(HubError, match=words) as caught:
        download(HubName("tiny/hf"), "tokenizer")
    assert caught.value.reason == reason


def test_progress_is_said_in_lines(hub: Hub, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "_LINE_SECONDS", -1.0)
    lines: list[str] = []
    download(HubName("tiny/hf"), "vllm", lines.append)
    assert lines
    assert all(line.startswith("downloading tiny/hf: ") for line in lines)
    assert any("of 4.31MB" in line for line in lines)


def test_what_is_no_name_is_refused_by_the_program(fetch: Fetch) -> None:
    done = fetch("../models", "--for", "vllm")
    assert done.returncode == 2
    assert "'../models' is not OWNER/NAME" in done.stderr
