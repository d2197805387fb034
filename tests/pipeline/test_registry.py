"""Extensions are found by name among the entry points of what is installed."""

from __future__ import annotations

from importlib import metadata

import pytest
from rollyard_pipeline.registry import AGENTS, HANDLERS, Registry


def test_our_own_extensions_are_found_without_reading_all_that_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looked: list[int] = []
    everything = metadata.entry_points

    def counted() -> object:
        looked.append(1)
        return everything()

    monkeypatch.setattr(metadata, "entry_points", counted)
    registry = Registry()
    assert registry.load(HANDLERS, "shell").needs_sandbox
    registry.load(AGENTS, "oracle")
    assert not looked
