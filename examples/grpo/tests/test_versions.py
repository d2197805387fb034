"""Every sampled token's policy version is checked."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from rollyard import Group

from tinygrpo.errors import PolicyMismatch
from tinygrpo.versions import PolicyVersions

MakeGroup = Callable[..., Group]
RUN = PolicyVersions("run")


def test_a_label_names_its_update() -> None:
    assert RUN.update(RUN.label(12)) == 12


@pytest.mark.parametrize(
    "label", ["other-1", "run-", "run-x", "run", "default", "0", "unverified:run-1", "run--1"]
)
def test_foreign_labels_are_refused(label: str) -> None:
    with pytest.raises(PolicyMismatch, match="never pushed"):
        RUN.update(label)


def test_the_oldest_token_decides_the_lag(group: MakeGroup) -> None:
    mixed = group(labels=["run-2", "run-5"])
    assert RUN.updates_of(mixed) == {2, 5}
    assert RUN.lag(mixed, 6) == 4


def test_a_version_that_was_not_pushed_yet_is_refused(group: MakeGroup) -> None:
    with pytest.raises(PolicyMismatch, match="carries update 3, 2 is the newest"):
        RUN.lag(group(labels=["run-3"]), 2)


def test_the_label_of_another_run_in_a_group_is_refused(group: MakeGroup) -> None:
    with pytest.raises(PolicyMismatch, match="another trainer"):
        RUN.lag(group(labels=["run-1", "grpo-9"]), 2)
