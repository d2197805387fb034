"""Targets of dynamic sampling that are provably out of reach, and what in a spec is hardly meant."""

from __future__ import annotations

from typing import Any

import pytest
from rollyard_crds.fields.signals import problems, warnings_of
from rollyard_crds.rolloutjob import RolloutJobSpec

OVERLONG = {"overlong": {"maxTokens": 8, "bufferTokens": 4, "factor": 0.5}}
FORM = {"format": [{"name": "form", "pattern": "x"}]}
FUNCTION = {"function": {"name": "mine"}}


def spec(handler: str = "math", reward: Any = None, **fields: Any) -> RolloutJobSpec:
    body = {"tasks": {"stream": True}, "agent": {"type": "oracle"}, "samplesPerTask": 4}
    return RolloutJobSpec.model_validate({**body, "handler": handler, "reward": reward, **fields})


def sampled(handler: str, reward: Any, **sampling: Any) -> RolloutJobSpec:
    return spec(handler, reward, dynamicSampling={"targetGroups": 2, **sampling})


@pytest.mark.parametrize(
    ("handler", "reward", "most"),
    [
        ("math", None, 0.5),
        ("math", {}, 0.5),
        ("swe", {"weights": {"handler": 2.0}}, 1.0),
        ("math", {"weights": {"handler": -1.0}}, 0.5),
        ("math", {"weights": {"handler": 1.0, "form": 0.5}, **FORM}, 0.75),
        ("math", {"weights": {"handler": 1.0, "form": -0.5}, **FORM}, 0.75),
        ("math", OVERLONG, 0.75),
        ("math", {"weights": {"answered": 1.0}}, 0.5),
        ("math", {"weights": {"test_timeout": 1.0}}, 0.5),
        # The reward is at most 10⁶ in size, however large the weights are.
        ("math", {"weights": {"handler": 1e6, "form": -1e6}, **FORM}, 1e6),
        ("math", FUNCTION, 1e6),
        ("harbor", None, 1e6),
        ("mine", {}, 1e6),
    ],
)
def test_a_standard_deviation_that_no_rewards_have(handler: str, reward: Any, most: float) -> None:
    (found,) = problems(sampled(handler, reward, minStd=most), None)
    assert found.startswith(f"spec.dynamicSampling.minStd: must be less than {most:g}, ")
    assert problems(sampled(handler, reward, minStd=most * 0.999), None) == []


@pytest.mark.parametrize(
    ("metric", "reward", "most"),
    [
        ("handler", {**OVERLONG, "weights": {"handler": 9.0}}, 0.5),
        ("overlong", OVERLONG, 0.25),
        ("form", FORM, 0.5),
        ("answered", None, 0.5),
        ("test_timeout", None, 0.5),
        ("function", FUNCTION, 1e6),
        ("undeclared", FUNCTION, 1e6),
        ("helpful", {"service": {"url": "http://a/", "components": ["helpful"]}}, 1e6),
    ],
)
def test_a_standard_deviation_that_no_component_has(metric: str, reward: Any, most: float) -> None:
    (found,) = problems(sampled("math", reward, metric=metric, minStd=most), None)
    assert f"minStd: must be less than {most:g}, because {metric!r} is from " in found
    assert problems(sampled("math", reward, metric=metric, minStd=most * 0.999), None) == []


@pytest.mark.parametrize(
    ("handler", "metric", "reward", "there"),
    [
        ("math", "answerd", None, "answered, reward, test_timeout, verify_timeout"),
        ("code", "handler", None, "reward, test_timeout, tests_passed"),
        ("math", "overlong", FORM, "answered, form, handler, reward, test_timeout, verify_timeout"),
        # A function may return more than it declares, but nothing with a name that is reserved.
        ("shell", "service", FUNCTION, "exit_zero, function, handler, reward, test_timeout"),
    ],
)
def test_a_metric_that_nothing_returns(handler: str, metric: str, reward: Any, there: str) -> None:
    (found,) = problems(sampled(handler, reward, metric=metric), None)
    assert found == f"spec.dynamicSampling.metric: there is no component {metric!r}; there are {there}"


@pytest.mark.parametrize("handler", ["harbor", "mixed", "mine"])
def test_any_metric_of_a_handler_whose_components_are_not_known(handler: str) -> None:
    assert problems(sampled(handler, None, metric="anything"), None) == []


@pytest.mark.parametrize("reward", [None, {"trainer": {}}])
def test_a_trainer_gives_any_reward_and_component_but_the_reserved_ones(reward: Any) -> None:
    def stream(metric: str) -> RolloutJobSpec:
        sampling = {"targetGroups": 2, "metric": metric, "minStd": 1e3}
        return spec("unscored", reward, tasks={"stream": True}, dynamicSampling=sampling)

    assert [problems(stream(metric), None) for metric in ("reward", "style")] == [[], []]
    (found,) = problems(stream("overlong"), None)
    assert "there is no component 'overlong'" in found


@pytest.mark.parametrize(
    ("metric", "handler", "reward"),
    [("handler", "unscored", FUNCTION), ("reward", "math", {"weights": {"handler": 0.0}})],
)
def test_a_metric_that_is_always_the_same(metric: str, handler: str, reward: Any) -> None:
    (found,) = problems(sampled(handler, reward, metric=metric), None)
    assert found.startswith(f"spec.dynamicSampling.metric: {metric!r} is 0 in every rollout")


def test_fewer_tasks_than_groups_are_wanted() -> None:
    wanted = sampled("math", None)
    assert problems(wanted, 2) == problems(wanted, None) == problems(spec(), 0) == []
    (found,) = problems(wanted, 1)
    assert found.startswith("spec.dynamicSampling.targetGroups: must be at most 1, ")
    assert len(problems(sampled("math", None, minStd=0.5, metric="reward"), 1)) == 2, "all faults are named"


def test_samples_that_are_alike() -> None:
    model = {"agent": {"type": "tools"}, "backendRef": {"name": "policy"}}
    (warned,) = warnings_of(spec(sampling={"temperature": 0.0}, **model))
    assert warned.startswith("spec.sampling.temperature: at 0 the 4 samples of a task are alike")
    for other in (
        spec(sampling={"temperature": 0.01}, **model),
        spec(sampling={"temperature": 0.0}, samplesPerTask=1, **model),
        spec(sampling={"temperature": 0.0}),  # The agent `oracle` samples nothing.
    ):
        assert warnings_of(other) == []


def test_a_job_is_warned_of_verdicts_that_believe_what_tests_print() -> None:
    swe = {"script": "pytest", "fail_to_pass": ["t.py::a"]}
    verdicts = ({}, {"verdict": "log"}, {"log_parser": "go"})
    tasks = [{"id": str(n), "prompt": "?", "swe": swe | more} for n, more in enumerate(verdicts)]
    (warned,) = warnings_of(spec(handler="swe", tasks={"inline": tasks}))
    assert warned.startswith("spec.tasks.inline: tasks whose swe.verdict is 'log': 2. It believes")
