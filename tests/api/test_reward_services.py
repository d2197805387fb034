"""Reward services: what the control plane sends, how many requests at once, and what their failures are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from rollyard_api.core.entrypoints import WAYS
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.problems import LimitReached
from rollyard_api.jobs import reward_services as module
from rollyard_api.jobs.reward_services import RewardServices, ServiceAllowList, ServiceCall
from rollyard_crds.fields.reward import RewardServiceSpec
from rollyard_testing.api.plane import Worker, make_manifest, serving
from rollyard_testing.api.reward_service import SECRET, ScriptedRewardService


@pytest.fixture
async def service() -> AsyncIterator[ScriptedRewardService]:
    async with ScriptedRewardService() as made:
        yield made


@pytest.fixture
async def plane(settings: Any, service: ScriptedRewardService) -> AsyncIterator[Any]:
    """Yield a control plane whose installer allows the service."""
    async with serving(settings, allow_rewards_from=(service.url,)) as made:
        yield made


def with_service(url: str, **more: Any) -> dict[str, Any]:
    return {"reward": {"service": {"url": url, **more}}}


async def in_eval(served: Any, worker: Any, count: int = 2) -> list[dict[str, Any]]:
    for stage in ("init", "run"):
        leases = await worker.lease(**{stage: count})
        await worker.complete(*[worker.result(lease) for lease in leases])
    leases = await worker.lease(eval=count)
    assert len(leases) == count
    return list(leases)


async def ask(served: Any, lease: dict[str, Any], episode: Any = None) -> Any:
    body = {"rollout": lease["rollout"], "token": lease["token"], "episode": episode or {}}
    return await served.worker.post("/v1/leases/reward", json=body)


async def test_the_service_gets_the_episode_and_its_score_comes_back(
    plane: Any, service: ScriptedRewardService
) -> None:
    await plane.submit(**with_service(f"{service.url}score"))
    worker = Worker(plane.worker)
    lease, other = await in_eval(plane, worker)
    told = await ask(plane, lease, {"final_text": "ü", "components": {"a": 1.5}})
    assert (told.status_code, told.json()) == (
        200, {"reward": 0.5, "components": {"style": 0.25}, "error": "", "retryable": True},
    )  # fmt: skip
    assert service.episodes == [{"final_text": "ü", "components": {"a": 1.5}}]
    # A lease that is not held asks nothing.
    stale = await ask(plane, {**lease, "token": lease["token"] + 1})
    assert (stale.status_code, stale.json()["reason"]) == (409, "LeaseLost")
    await worker.complete(worker.result(lease))
    assert (await ask(plane, lease)).json()["reason"] == "LeaseLost"
    unknown = await ask(plane, {"rollout": "r-none", "token": 1})
    assert (unknown.status_code, unknown.json()["reason"]) == (404, "RolloutNotFound")
    assert len(service.episodes) == 1
    assert (await ask(plane, other)).status_code == 200


async def test_a_job_without_a_service_asks_none(plane: Any) -> None:
    assert (await plane.admin.post("/v1/rolloutjobs", json=make_manifest())).status_code == 201
    lease, _ = await in_eval(plane, Worker(plane.worker))
    refused = await ask(plane, lease)
    assert (refused.status_code, refused.json()["reason"]) == (409, "NoRewardService")


@pytest.mark.parametrize(
    ("kind", "words", "retryable"),
    [
        ("nan", "its answer is not a score: JSON is malformed", True),
        ("infinite", "out of range - at `$.reward`", True),
        ("huge", "its answer is not a score: Expected `float` <= 1000000.0 - at `$.reward`", True),
        ("bool", "Expected `float`, got `bool` - at `$.reward`", True),
        ("text", "Expected `float`, got `str` - at `$.reward`", True),
        ("none", "missing required field `reward`", True),
        ("list", "Expected `object`, got `array`", True),
        ("garbage", "its answer is not a score: JSON is malformed", True),
        ("component", "Expected `float`, got `str` - at `$.components[...]`", True),
        ("many", "Expected `object` of length <= 64 - at `$.components`", True),
        ("deep", "its answer is not a score: ", True),
        ("large", "its answer has more than 262144 bytes", True),
        ("500", "the service answered 500", True),
        ("503", "the service answered 503", True),
        ("429", "the service answered 429", True),
        ("404", "the service answered 404", False),
        ("redirect?http://127.0.0.1:1/", "the service answered 307; redirects are not followed", False),
        ("hang", "the service did not answer within 0.3 s", True),
        ("drip", "the service did not answer within 0.3 s", True),
        ("break", "the service does not speak HTTP", True),
    ],
)
async def test_what_is_no_score_is_an_error_and_never_a_number(
    service: ScriptedRewardService, kind: str, words: str, retryable: bool
) -> None:
    services = RewardServices(ServiceAllowList.of([service.url]))
    try:
        told = await asked(services, f"{service.url}{kind}", timeoutSeconds=0.3)
    finally:
        services.close()
    assert (told["reward"], told["components"], told["retryable"]) == (None, {}, retryable)
    assert words in told["error"]
    assert told["error"]
    assert SECRET not in str(told), "nothing of the answer reaches the author"


class NoLimit:
    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_error: object) -> None:
        return None


async def asked(services: RewardServices, url: str, job: int = 1, **fields: Any) -> dict[str, Any]:
    spec = RewardServiceSpec.model_validate({"url": url, **fields})
    return await services.ask(ServiceCall(job, "default", spec), {"a": 1}, NoLimit)


async def test_a_service_that_is_not_there_can_be_asked_again() -> None:
    async with ScriptedRewardService() as gone:
        url = gone.url
    services = RewardServices(ServiceAllowList.of([url]))
    told = await asked(services, f"{url}score")
    assert (told["error"], told["retryable"]) == ("the service cannot be reached (ConnectError)", True)
    services.close()


async def test_requests_of_a_job_are_as_many_at_once_as_it_says(
    service: ScriptedRewardService, monkeypatch: pytest.MonkeyPatch
) -> None:
    services = RewardServices(ServiceAllowList.of([service.url]))
    told = await asyncio.gather(*[asked(services, f"{service.url}wait", concurrency=2) for _ in range(8)])
    assert [one["reward"] for one in told] == [0.5] * 8
    assert service.most_open == 2
    assert not services._jobs._lines, "nothing is kept of a job that asks nothing"
    services.close()
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.05)
    services = RewardServices(ServiceAllowList.of([service.url]))
    hanging = asyncio.create_task(asked(services, f"{service.url}hang", concurrency=1))
    await service.hangs.wait()
    with pytest.raises(LimitReached, match="1 requests to the reward service are under way"):
        await asked(services, f"{service.url}score", concurrency=1)
    # Another job does not wait for this one.
    assert (await asked(services, f"{service.url}score", job=2, concurrency=1))["reward"] == 0.5
    hanging.cancel()
    await asyncio.gather(hanging, return_exceptions=True)
    assert (await asked(services, f"{service.url}score", concurrency=1))["reward"] == 0.5
    services.close()


@pytest.mark.parametrize("prefix", ["file:///data/", "s3://bucket/x/", "ftp://host/", "http://a@b/"])
def test_only_web_servers_can_be_listed(prefix: str) -> None:
    with pytest.raises(OptionInvalid):
        ServiceAllowList.of([prefix])


@pytest.mark.attack(
    "it names an internal address",
    boundary="control plane",
    surface="`reward.service`",
    stopped_by="none is asked unless the installer lists it",
)
async def test_a_job_names_what_the_installer_allows(plane: Any, service: ScriptedRewardService) -> None:
    elsewhere = make_manifest(**with_service("http://127.0.0.1:9/score"))
    refused = await plane.admin.post("/v1/rolloutjobs", json=elsewhere)
    assert (refused.status_code, refused.json()["reason"]) == (422, "RewardServiceNotAllowed")
    assert refused.json()["errors"][0].startswith("spec.reward.service.url: http://127.0.0.1:9/score cannot")
    # A driver that registers a job is refused alike.
    body = {"manifest": elsewhere}
    registered = await plane.driver.put("/v1/rolloutjobs/job", json=body)
    assert (registered.status_code, registered.json()["reason"]) == (422, "RewardServiceNotAllowed")
    assert not service.paths


async def test_an_installer_who_lists_nothing_allows_nothing(
    served: Any, service: ScriptedRewardService
) -> None:
    manifest = make_manifest(**with_service(f"{service.url}score"))
    unlisted = await served.admin.post("/v1/rolloutjobs", json=manifest)
    assert unlisted.status_code == 422
    assert "allowed are no URLs at all" in unlisted.json()["detail"]
    assert not service.paths


async def test_a_function_must_be_installed(served: Any) -> None:
    manifest = make_manifest(reward={"function": {"name": "nobodys"}})
    refused = await served.admin.post("/v1/rolloutjobs", json=manifest)
    assert (refused.status_code, refused.json()["reason"]) == (422, "NotInstalled")
    assert refused.json()["errors"] == [
        "spec.reward.function.name: no reward function 'nobodys' is offered; offered: none",
        WAYS,
    ]
