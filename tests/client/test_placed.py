"""The namespace of a manifest that names none is that of the client."""

from __future__ import annotations

import pytest
from rollyard_client.requests.jobs import placed
from rollyard_crds import RolloutJob

SPEC = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}}
NAMED = {"name": "a", "namespace": "default"}
DOCUMENT = {"kind": "RolloutJob", "metadata": {"name": "a"}}


@pytest.mark.parametrize(
    ("manifest", "namespace"),
    [
        (RolloutJob.model_validate({"metadata": {"name": "a"}, "spec": SPEC}), "mine"),
        (
            RolloutJob.model_validate({"metadata": {"name": "a", "namespace": "default"}, "spec": SPEC}),
            "default",
        ),
        (DOCUMENT, "mine"),
        ({**DOCUMENT, "metadata": {"name": "a", "namespace": "theirs"}}, "theirs"),
    ],
)
def test_a_manifest_without_a_namespace_gets_that_of_the_client(manifest: RolloutJob, namespace: str) -> None:
    assert placed(manifest, "mine")["metadata"]["namespace"] == namespace
    assert DOCUMENT["metadata"] == {"name": "a"}


@pytest.mark.parametrize("manifest", [{}, {"metadata": None}, {"metadata": "a"}])
def test_a_document_without_metadata_is_left_to_the_server(manifest: dict[str, object]) -> None:
    assert placed(manifest, "mine") == manifest
