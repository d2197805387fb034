"""The operator's settings: what is wrong is named, field by field."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollyard_operator.settings import SettingsError, load_settings, parse_settings

LEAST = """
instance: rollyard
controlPlaneUrl: https://rollyard-api.rollyard.svc:8765
tokenFile: /etc/rollyard/tokens/driver
workerTokenFile: /etc/rollyard/tokens/worker
releaseNamespace: rollyard
images: {worker: w:1, engine: e:1, sandbox: s:1, sandboxDefault: d:1}
"""


def test_the_least_that_is_needed() -> None:
    settings = parse_settings(LEAST)
    assert settings.isolation.required
    assert (settings.sandbox_creation.per_second, settings.sandbox_creation.burst) == (10.0, 20)
    assert settings.looks_after("anything")
    assert settings.model_copy(update={"namespaces": ["a"]}).looks_after("a")
    assert not settings.model_copy(update={"namespaces": ["a"]}).looks_after("b")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "expected a mapping"),
        ("{", "not YAML"),
        (LEAST + "bogus: 1", "bogus: Extra inputs"),
        (LEAST.replace("instance: rollyard", "instance: Not A Label"), "instance: String should match"),
        (LEAST.replace("engine: e:1, ", ""), "images.engine: Field required"),
        (LEAST + "isolation: {checks: [nothing]}", "isolation.checks.0: 'nothing' is not HOST:PORT"),
        (LEAST + "isolation: {checks: ['a:70000']}", "isolation.checks.0: 'a:70000' is not HOST:PORT"),
        (
            LEAST + "isolation: {required: false, checks: ['10.0.0.1:443']}",
            "'isolation.checks' have no effect with 'isolation.required: false'; remove them",
        ),
        (
            LEAST + "sandboxCreation: {perSecond: 0}",
            "sandboxCreation.perSecond: Input should be greater than 0",
        ),
        (LEAST + "imageVolume: maybe", "imageVolume: Input should be 'auto', 'always' or 'never'"),
        (LEAST + "worker: {resources: {requests: {cpu: lots}}}", "worker.resources.requests.cpu"),
    ],
)
def test_what_is_wrong_is_named(text: str, words: str) -> None:
    with pytest.raises(SettingsError, match=r"operator\.yaml: ") as caught:
        parse_settings(text, "operator.yaml")
    assert words in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"none\.yaml: cannot be read: No such file"):
        load_settings(tmp_path / "none.yaml")
    (tmp_path / "some.yaml").write_text(LEAST)
    assert load_settings(tmp_path / "some.yaml") == parse_settings(LEAST)


@pytest.mark.parametrize(
    ("choice", "version", "volumes"),
    [
        ("auto", "", False),
        ("auto", "1.34", False),
        ("auto", "1.35", True),
        ("auto", "2.0", True),
        ("always", "", True),
        ("never", "1.36", False),
    ],
)
def test_image_volumes_where_the_cluster_has_them(choice: str, version: str, volumes: bool) -> None:
    settings = parse_settings(LEAST + f"imageVolume: {choice}\napiServerVersion: '{version}'")
    assert settings.image_volumes == volumes
