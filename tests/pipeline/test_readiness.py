"""What a ready worker prepares: it is used where it fits, and nothing of it stays where it does not."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_crds.lease import LeaseRef
from rollyard_crds.rolloutjob import SandboxSpec
from rollyard_pipeline.chat.format import FormatCache
from rollyard_pipeline.errors import TokenizerUnavailable
from rollyard_pipeline.program import Readiness
from rollyard_pipeline.sandboxes.interface import SandboxRequest
from rollyard_pipeline.sandboxes.provider import NodeProvider

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "engine/src/rollyard_engine/models/tiny-policy"


@pytest.fixture
def settings() -> Iterator[dict[str, Any]]:
    # The path is short, because sockets live below it.
    with tempfile.TemporaryDirectory(prefix="ry-") as folder:
        yield {"name": "bubblewrap", "run_dir": Path(folder) / "run", "node": "n", "templates": True}


@pytest.fixture
async def ready(settings: dict[str, Any]) -> AsyncIterator[Readiness]:
    made = Readiness()
    await made.prepare(settings, str(MODEL))
    yield made
    await made.aclose()


def children() -> set[str]:
    return set(Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split())


async def test_a_sandbox_is_forked_from_the_prepared_template(
    ready: Readiness, settings: dict[str, Any]
) -> None:
    templates = children()
    assert templates
    provider = await ready.provider(settings)
    await provider.start()
    try:
        request = SandboxRequest.of(SandboxSpec())
        sandbox = await provider.acquire(request, LeaseRef(rollout="r", token=1))
        async with sandbox:
            assert isinstance(provider, NodeProvider)
            record = provider._folder.load(sandbox.handle.id)
            assert record.monitor is None, "a sandbox that is started alone has a monitor"
        assert templates <= children()
        await provider.release(sandbox.handle)
    finally:
        await provider.aclose()


async def test_a_provider_for_other_settings_is_not_used(
    ready: Readiness, settings: dict[str, Any], tmp_path: Path
) -> None:
    prepared = ready._provider
    other = await ready.provider({**settings, "run_dir": tmp_path / "other"})
    assert other is not prepared
    assert ready._provider is None
    await other.aclose()


async def test_what_cannot_be_prepared_is_left_to_the_worker(settings: dict[str, Any]) -> None:
    ready = Readiness()
    await ready.prepare({**settings, "bwrap": "/no/such/bwrap"}, "/no/such/folder")
    provider = await ready.provider({**settings, "bwrap": "/no/such/bwrap"})
    with pytest.raises(Exception, match="no bubblewrap"):
        await provider.start()
    with pytest.raises(TokenizerUnavailable):
        await ready.formats.get("/no/such/folder")
    await provider.aclose()


async def test_a_tokenizer_is_loaded_again_if_its_files_have_changed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (MODEL / name).exists():
            shutil.copy(MODEL / name, folder)
    formats = FormatCache()
    await formats.load_ahead(str(folder))
    ahead = formats._loaded[str(folder)]
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }} in other words")
    found = await formats.get(str(folder))
    assert found.template is not ahead[1]
    assert found.template.source.endswith("in other words")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }} in the middle of a job")
    assert (await formats.get(str(folder))).template is found.template


async def test_an_unchanged_tokenizer_is_not_loaded_again(ready: Readiness) -> None:
    tokenizer, template = ready.formats._loaded[str(MODEL)]
    found = await ready.formats.get(str(MODEL))
    assert (found.tokenizer, found.template) == (tokenizer, template)
