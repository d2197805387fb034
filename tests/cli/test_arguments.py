"""Kinds and names, labels and durations on command lines, as kubectl takes them."""

from __future__ import annotations

import click
import pytest
from rollyard.arguments import (
    NamedObject,
    Selection,
    duration,
    job_name,
    label_selector,
    pool_name,
    selection,
    targets,
)

JOB, POOL = NamedObject("rj", "a"), NamedObject("bp", "a")


@pytest.mark.parametrize(
    ("words", "selected"),
    [
        ("", Selection()),
        ("rj", Selection(("rj",))),
        ("RolloutJobs", Selection(("rj",))),
        ("backendpools.rollyard.dev", Selection(("bp",))),
        ("rolloutjob.v1alpha1.rollyard.dev", Selection(("rj",))),
        ("all", Selection(("rj", "bp"))),
        ("rj,bp", Selection(("rj", "bp"))),
        ("bp,pools", Selection(("bp",))),
        ("rj a", Selection(("rj",), (JOB,))),
        ("rj,bp a", Selection(("rj", "bp"), (JOB, POOL))),
        ("rj/a bp/a", Selection(targets=(JOB, POOL))),
        ("jobs/a", Selection(targets=(JOB,))),
        ("a", Selection(targets=(NamedObject(None, "a"),))),
        ("rj events", Selection(("rj",), (NamedObject("rj", "events"),))),
    ],
)
def test_what_words_select(words: str, selected: Selection) -> None:
    assert selection(words.split()) == selected


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("robot a", "KIND must be rj or bp"),
        ("rj,robot", "KIND must be rj or bp"),
        ("robot/a", "KIND must be rj or bp"),
        ("rj/a b", "give KIND/NAME for each object"),
        ("rj/", "give KIND/NAME for each object"),
        ("rj/a/b", "give KIND/NAME for each object"),
        ("events", "`rollyard events JOB`"),
        ("pods", "`rollyard logs`"),
        ("rollouts", "`rollyard view JOB --list`"),
        ("backends", "`rollyard get bp -o wide`"),
    ],
)
def test_other_words_are_refused_with_what_would_be_right(words: str, problem: str) -> None:
    with pytest.raises(click.UsageError, match=problem):
        selection(words.split())


def test_commands_that_need_a_name_say_so() -> None:
    with pytest.raises(click.UsageError, match="give the NAME too: rollyard describe rj NAME"):
        targets("describe", ["rj"])
    with pytest.raises(click.UsageError, match="give a NAME: rollyard describe NAME"):
        targets("describe", [])


def test_a_name_may_have_its_kind() -> None:
    assert job_name("a") == job_name("rj/a") == "a"
    assert pool_name("pool/a") == pool_name("a") == "a"
    with pytest.raises(click.BadParameter, match="takes a rolloutjob"):
        job_name("bp/a")


@pytest.mark.parametrize(
    ("text", "is_selected"),
    [
        ("team=a", True),
        ("team==a,stage", True),
        ("team!=a", False),
        ("!team", False),
        ("!other, stage=dev", True),
        ("other!=x", True),
        ("other", False),
    ],
)
def test_labels_select_as_with_kubectl(text: str, is_selected: bool) -> None:
    assert label_selector(text)({"team": "a", "stage": "dev"}) is is_selected


@pytest.mark.parametrize("text", ["", "a=b=c", "!a=b", "a in (b)", ","])
def test_other_selectors_are_refused(text: str) -> None:
    with pytest.raises(click.UsageError, match="--selector must be such as"):
        label_selector(text)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("1h30m", 5400), ("2d", 172_800), ("500ms", 0.5), ("45", 45), ("-1s", -1), ("0", 0)],
)
def test_durations(text: str, seconds: float) -> None:
    assert duration(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "1w", "1h x", "--5s"])
def test_other_durations_are_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match="must be such as 90s"):
        duration(text)
