"""The model of an external server is found by the protocol that workers and the control plane speak, too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rollyard.errors import LookupFailed, StartFailed, UsageProblem
from rollyard.local.external_server import served
from rollyard_testing.inference.scripted import SHAPES, Scripted, SglangShaped


@pytest.fixture(params=sorted(SHAPES))
def server(request: pytest.FixtureRequest) -> Iterator[Scripted]:
    found = SHAPES[request.param]("tiny")
    yield found
    found.close()


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    (tmp_path / "tokenizer.json").write_text("{}")
    return str(tmp_path)


@pytest.mark.parametrize("model", ["", "tiny"])
def test_the_model_is_the_named_one_or_the_first(server: Scripted, tokenizer: str, model: str) -> None:
    assert served(server.url, model, tokenizer) == ("tiny", str(Path(tokenizer).resolve()))


def test_the_tokenizer_is_in_the_folder_that_the_server_names(
    server: Scripted, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"id": "tiny", "root": tokenizer}
    answer = server.answer
    monkeypatch.setattr(
        server,
        "answer",
        lambda path, body: (200, {"data": [entry]}) if "models" in path else answer(path, body),
    )
    assert served(server.url, "", "") == ("tiny", str(Path(tokenizer).resolve()))


def test_sglang_serves_its_model_after_an_update_of_weights_too(tokenizer: str) -> None:
    """SGLang then lists the model under the folder of the new weights. Workers find it, and so must this."""
    server = SglangShaped("tiny")
    try:
        server.served, server.label = "/weights/step-1", "step-1"
        assert served(server.url, "tiny", tokenizer)[0] == "tiny"
        server.label = "default"
        with pytest.raises(LookupFailed, match="does not serve 'tiny'; it serves: /weights/step-1"):
            served(server.url, "tiny", tokenizer)
    finally:
        server.close()


def test_what_cannot_be_used_is_named(server: Scripted, tmp_path: Path, tokenizer: str) -> None:
    with pytest.raises(LookupFailed, match=r"--model 'other': .* it serves: tiny"):
        served(server.url, "other", tokenizer)
    with pytest.raises(UsageProblem, match="give --tokenizer DIR"):
        served(server.url, "", "")
    with pytest.raises(UsageProblem, match=r"holds no tokenizer\.json"):
        served(server.url, "", str(tmp_path / "none"))
    server.failing["/v1/models"] = 1
    with pytest.raises(StartFailed, match="GET /v1/models does not answer as a vLLM-compatible server does"):
        served(server.url, "", tokenizer)
