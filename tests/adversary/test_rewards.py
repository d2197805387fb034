"""What a policy, an author of a job and a reward service try with the making of rewards."""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpcore
import pytest
from rollyard_api.jobs import source_readers
from rollyard_api.jobs.reward_services import RewardServices, ServiceAllowList, ServiceCall
from rollyard_crds.fields.reward import FormatCheck, RewardServiceSpec
from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_pipeline.rewards.format_checks import FormatChecks, has_tags
from rollyard_testing.adversary.restplane import Yard, control_plane, result
from rollyard_testing.api.reward_service import SECRET, ScriptedRewardService

pytestmark = pytest.mark.attack(boundary="control plane")


SECONDS = 0.5
"""The limit of a search in these tests."""


@pytest.fixture
async def checks() -> AsyncIterator[FormatChecks]:
    made = FormatChecks(SECONDS)
    # The processes start before time counts.
    assert await made.kept(FormatCheck(name="x", pattern="a"), ["a"]) == (True, True)
    yield made
    await made.close()


@pytest.mark.attack(
    "a text makes the search for a pattern run for ever, and the worker with it",
    boundary="evaluation",
    surface="`reward.format`",
    stopped_by="the search has a process of its own and 10 seconds; what is not decided counts as not kept",
)
@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (r"^(a+)+$", "a" * 64 + "!"),
        (r"^(a|aa)+$", "a" * 128 + "!"),
        (r"^(\w+\s?)*$", "word " * 40 + "!"),
        (r"(.*)*\1x", "ab" * 4000),
        (r"(x+x+)+y", "x" * 200),
    ],
)
async def test_a_text_that_makes_a_pattern_run_for_ever_scores_0(
    checks: FormatChecks, pattern: str, text: str
) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await asyncio.sleep(0.01)
            ticks += 1

    beating = asyncio.create_task(tick())
    check = FormatCheck(name="x", pattern=pattern)
    assert await checks.kept(check, [text]) == (False, False)
    beating.cancel()
    assert ticks > 5, "the worker's loop, and with it its heartbeat, was not held up"
    # The next text is judged as usual.
    assert await checks.kept(FormatCheck(name="x", pattern="done"), ["done"]) == (True, True)


@pytest.mark.attack(
    "a text of a megabyte of tags takes the worker long",
    boundary="evaluation",
    surface="`reward.format`",
    stopped_by="tags are counted in linear time",
)
def test_a_text_of_a_megabyte_of_tags_is_judged_at_once() -> None:
    begun = time.process_time()
    assert not has_tags("<think>" * 150_000, ["think"] * 16)
    assert not has_tags("<think></think>" * 70_000, ["think", "answer"])
    assert time.process_time() - begun < 30.0


@pytest.mark.attack(
    "an author's pattern holds the control plane up while it is compiled",
    surface="`reward.format`",
    stopped_by="at most 512 characters and no flags, so it compiles at once or is refused",
)
@pytest.mark.parametrize(
    "pattern",
    ["(?i)[\\x00-\\U0010ffff]" * 20, "(?s:(?i:a))", "(?-i:a)", "(" * 400, "a{99999999999999999999}",
     "(?P<a", "[", "*"],
)  # fmt: skip
def test_a_pattern_of_an_author_holds_up_nobody(pattern: str) -> None:
    """The control plane checks patterns, so it takes only those that compile in no time."""
    spec = {"tasks": {"stream": True}, "handler": "math", "agent": {"type": "oracle"}}
    reward = {"format": [{"name": "x", "pattern": pattern}]}
    with pytest.raises(ValueError, match=r"reward\.format\.0\.pattern"):
        RolloutJobSpec.model_validate({**spec, "reward": reward})


@pytest.fixture
async def service() -> AsyncIterator[ScriptedRewardService]:
    async with ScriptedRewardService() as made:
        yield made


class Free:
    async def __aenter__(self) -> None:
        return None

    async def __aexit__(self, *_error: object) -> None:
        return None


async def ask(services: RewardServices, url: str) -> dict[str, Any]:
    spec = RewardServiceSpec.model_validate({"url": url, "timeoutSeconds": 5.0})
    return await services.ask(ServiceCall(1, "default", spec), {}, Free)


@pytest.mark.attack(
    "a service redirects the control plane",
    surface="`reward.service`",
    stopped_by="redirects are not followed",
)
@pytest.mark.parametrize("where", ["/score", "/redirect", "//evil.example/", "http://169.254.169.254/"])
async def test_a_service_redirects_the_control_plane_nowhere(
    service: ScriptedRewardService, where: str
) -> None:
    services = RewardServices(ServiceAllowList.of([service.url]))
    told = await ask(services, f"{service.url}redirect?{where}")
    assert (told["reward"], told["retryable"]) == (None, False)
    assert service.paths == ["/redirect"]
    services.close()


@pytest.mark.attack(
    "a listed name leads to loopback, a private address or metadata, at once or later",
    surface="`reward.service`",
    stopped_by="each address is checked before it is connected to, and resolved once for each request",
)
async def test_a_name_that_leads_to_a_private_address_is_not_asked(
    service: ScriptedRewardService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name is resolved once. One private address refuses it, and a second answer never counts."""
    port = service.url.rsplit(":", 1)[1].strip("/")
    answers = [["127.0.0.1"], ["93.184.216.34", "10.0.0.1"], ["169.254.169.254"], ["93.184.216.34"]]
    connected: list[str] = []

    async def connect(_self: Any, host: str, *_arguments: Any, **_options: Any) -> Any:
        connected.append(host)
        raise httpcore.ConnectError("refused")

    monkeypatch.setattr(
        source_readers, "_resolve", lambda *_: [ipaddress.ip_address(text) for text in answers.pop(0)]
    )
    monkeypatch.setattr(httpcore.AnyIOBackend, "connect_tcp", connect)
    services = RewardServices(ServiceAllowList.of([f"http://rewards.example:{port}/"]))
    for _ in range(3):
        told = await ask(services, f"http://rewards.example:{port}/score")
        assert "neither public nor in the installer's networks" in told["error"]
        assert (told["reward"], told["retryable"]) == (None, False)
        assert "127.0.0.1" not in told["error"]
        assert "10.0.0.1" not in told["error"]
    assert not connected
    await ask(services, f"http://rewards.example:{port}/score")
    assert connected == ["93.184.216.34"]
    services.close()


@pytest.mark.attack(
    "`..`, encoded slashes and fragments lead out of a listed path",
    surface="`reward.service`",
    stopped_by="such URLs are refused",
)
@pytest.mark.parametrize("path", ["../admin", "..%2fadmin", "./score", "//score", "score#x", "score\\x"])
async def test_a_url_does_not_leave_the_listed_folder(service: ScriptedRewardService, path: str) -> None:
    services = RewardServices(ServiceAllowList.of([f"{service.url}rewards/"]))
    told = await ask(services, f"{service.url}rewards/{path}")
    assert "spec.reward.service.url" in told["error"]
    assert not service.paths
    services.close()


@pytest.fixture
async def yard(tmp_path: Path, service: ScriptedRewardService) -> AsyncIterator[Yard]:
    async with control_plane(tmp_path, allow_rewards_from=(service.url,)) as made:
        for name, kind in (("mine", "score"), ("other", "whole")):
            await made.submit(name, reward={"service": {"url": f"{service.url}{kind}"}})
        yield made


async def eval_lease(yard: Yard, job: str) -> dict[str, Any]:
    http = yard.client(yard.job_token(job))
    for stage in ("init", "run"):
        (lease,) = await yard.lease(http, job, **{stage: 1})
        done = result(lease)
        if stage == "init":
            done["sandbox"]["node"] = f"n-{job}"
        if stage == "run":
            del done["reward"]
            done["trajectory"] = {
                "id": lease["rollout"], "job": job, "task_id": "t0", "group_id": "t0", "sample_index": 0,
            }  # fmt: skip
        answer = await http.post("/v1/leases/complete", json={"worker": f"w-{job}", "results": [done]})
        assert answer.json()["outcomes"][0]["outcome"] == "accepted", answer.text
    (lease,) = await yard.lease(http, job, eval=1)
    return lease


@pytest.mark.attack(
    "a worker asks for another job's rollout",
    boundary="worker",
    surface="`/v1/leases/reward`",
    stopped_by="the job of the worker's token, and the fencing token of its Eval lease",
)
async def test_a_worker_asks_for_its_own_rollouts_only(yard: Yard, service: ScriptedRewardService) -> None:
    lease = await eval_lease(yard, "other")
    body = {"rollout": lease["rollout"], "token": lease["token"], "episode": {}}
    for token, status in ((yard.job_token("mine"), 403), ("forged", 401), (None, 401)):
        refused = await yard.client(token).post("/v1/leases/reward", json=body)
        assert refused.status_code == status
    assert not service.paths
    own = await yard.client(yard.job_token("other")).post("/v1/leases/reward", json=body)
    assert own.json()["reward"] == 1


@pytest.mark.attack(
    "a request names a URL of its own, or is very large",
    boundary="worker",
    surface="`/v1/leases/reward`",
    stopped_by="the URL is the job's; the body has at most 32 MiB",
)
async def test_no_request_names_a_url_or_is_of_any_size(yard: Yard, service: ScriptedRewardService) -> None:
    lease = await eval_lease(yard, "mine")
    http = yard.client(yard.job_token("mine"))
    body = {"rollout": lease["rollout"], "token": lease["token"], "episode": {}}
    named = await http.post("/v1/leases/reward", json=body | {"url": "http://169.254.169.254/"})
    assert named.status_code == 422
    large = await http.post("/v1/leases/reward", json=body | {"episode": {"x": "x" * (33 << 20)}})
    assert large.status_code == 413
    assert not service.paths


@pytest.mark.attack(
    "an answer or an error shows what an internal server holds; it is endless or deep",
    surface="`reward.service`",
    stopped_by="numbers only; 256 KiB; no text of it is quoted",
)
async def test_an_answer_reaches_the_author_as_numbers_only(
    yard: Yard, service: ScriptedRewardService
) -> None:
    for number, kind in enumerate(("garbage", "text", "component", "500", "large", "deep")):
        name = f"reads-{number}"
        await yard.submit(name, reward={"service": {"url": f"{service.url}{kind}"}})
        lease = await eval_lease(yard, name)
        body = {"rollout": lease["rollout"], "token": lease["token"], "episode": {}}
        told = await yard.client(yard.job_token(name)).post("/v1/leases/reward", json=body)
        assert told.status_code == 200
        assert (told.json()["reward"], told.json()["components"]) == (None, {})
        assert SECRET not in told.text
