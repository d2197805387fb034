"""`rollyard explain` of fields and reasons, without a server."""

from __future__ import annotations

import pytest
from rollyard.main import main


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        (
            "rj.spec.stages.run",
            ("RolloutJob.spec.stages.run  <object>", "timeoutSeconds  <integer> [`1800`]"),
        ),
        ("rolloutjobs.rollyard.dev.spec.handler", ("RolloutJob.spec.handler  <string> (required)",)),
        ("spec.samplesPerTask", ("bound:   1 to 1,024", "change:  not after creation", "default: `1`")),
        ("bp.spec.engine.type", ("BackendPool.spec.engine.type", "values:  embedded, external, vllm")),
        ("task.prompt", ("Task.prompt",)),
        ("rj", ("RolloutJob  <object>", "spec  <object> (required)")),
        ("leaseexpired", ("LeaseExpired\n", "What: ", "Fault: the infrastructure", "Do: ")),
    ],
)
def test_what_is_explained(word: str, shown: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", word]) == 0
    text = capsys.readouterr().out
    assert [part for part in shown if part not in text] == [], text


def test_all_fields_below_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "rj.spec", "--recursive"]) == 0
    assert "\n    run  <object>\n      replicas  <integer> [`1`]\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "problem"),
    [
        (
            "rj.spec.sampling.temprature",
            "RolloutJob: there is no field 'spec.sampling.temprature'; did you",
        ),
        ("LeaseExpire", "did you mean LeaseExpired?"),
        ("pod.spec", "a field begins with rj, bp or task"),
        ("\x1b[2J", "gives no reason '\\x1b[2J'"),
    ],
)
def test_other_words(word: str, problem: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", word]) == 1
    assert problem in capsys.readouterr().err
