"""Names of environment variables are checked, because programs and shells get them as they are."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError
from rollyard_crds import BackendPool, RolloutJob, Task

BAD = ["A;touch x", "A B", "$(id)", "A=B", "1A", "", "A\n", "Ä", "A\0"]
GOOD = ["A", "_a1", "HF_HOME", "a.b", "with-dash"]


def pool(env: dict[str, str]) -> Any:
    return BackendPool.model_validate(
        {"metadata": {"name": "p"}, "spec": {"model": "m", "engine": {"type": "vllm", "env": env}}}
    )


def job(env: dict[str, str]) -> Any:
    spec = {
        "tasks": {"stream": True},
        "handler": "shell",
        "agent": {"type": "oracle"},
        "sandbox": {"env": env},
    }
    return RolloutJob.model_validate({"metadata": {"name": "j"}, "spec": spec})


def task(env: dict[str, str]) -> Any:
    return Task.model_validate({"id": "t", "prompt": "x", "sandbox": {"env": env}})


@pytest.mark.parametrize("make", [pool, job, task])
@pytest.mark.parametrize("name", BAD)
def test_other_names_are_refused(make: Any, name: str) -> None:
    with pytest.raises(ValidationError, match="is not a name of an environment variable"):
        make({name: "x"})


@pytest.mark.parametrize("make", [pool, job, task])
def test_names_as_in_a_container_are_taken(make: Any) -> None:
    make(dict.fromkeys(GOOD, "any\nvalue $(of) 'it'"))
    with pytest.raises(ValidationError, match="null character"):
        make({"A": "x\0y"})
