"""The calls of ProRL Agent's server, over HTTP: their shapes, and what a job_id is worth."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from rollyard_api.app import build
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.problems import Invalid
from rollyard_api.prorl import calls
from rollyard_api.prorl.app import ProrlListener
from rollyard_api.prorl.config import ProrlConfig, read_config
from rollyard_api.prorl.process_calls import FORMATS, task_of
from rollyard_api.service import ControlPlane
from rollyard_api.settings import Settings
from rollyard_testing.api.plane import Worker, refused_start, start_api
from rollyard_testing.inference.scripted import VllmShaped
from rollyard_testing.pace import patience
from rollyard_testing.waiting import eventually

MATH = {
    "data_source": "deepscaler",
    "instance_id": "row-7",
    "trajectory_id": 3,
    "prompt": [{"role": "user", "content": "What is 2 + 2?"}],
    "reward_model": {"style": "rule", "ground_truth": "4"},
    "extra_info": {"split": "train", "index": 7},
}
CODE = {
    "data_source": "deepcoder",
    "instance_id": "code-1",
    "prompt": [{"role": "user", "content": "Print the sum of two numbers."}],
    "reward_model": {
        "ground_truth": json.dumps([{"input": "1 2\n", "output": "3\n", "testtype": "stdin", "metadata": {}}])
    },
    "extra_info": {},
}
SWE = {
    "instance_id": "demo__demo-1",
    "problem_statement": "It is broken.",
    "repo": "demo/demo",
    "base_commit": "abc",
    "eval_script": "cd repository && python -m unittest\n",
    "log_parser": "unittest",
    "FAIL_TO_PASS": ["test_a"],
    "PASS_TO_PASS": [],
    "repository": {"path": "repository", "archive": "QUJD"},
    "patch": "",
    "test_patch": "",
}
PARAMS = {"temperature": 1.0, "top_p": 1.0, "max_output_tokens": 64, "max_iterations": 5}
SEGMENT = {
    "prompt_ids": [1, 2, 3],
    "response_ids": [4, 5, 6, 7, 8],
    "loss_mask": [1, 1, 0, 1, 1],
    "logprobs": [-0.5, -0.25, 0.0, -1.5, -0.125],
    "policy_versions": ["v1", "v1", "", "v1", "v1"],
}
TRAJECTORY: dict[str, Any] = {
    "segments": [SEGMENT],
    "messages": [
        {"role": "user", "content": "What is 2 + 2?"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "bash", "arguments": {"command": "echo 4"}}}],
        },
        {"role": "tool", "content": "4"},
        {"role": "assistant", "content": "4"},
    ],
    "turns": [
        {"segment": 0, "start": 0, "end": 2, "finish_reason": "tool_calls"},
        {"segment": 0, "start": 3, "end": 5, "finish_reason": "stop"},
    ],
}


@dataclass(slots=True)
class Prorl:
    """A control plane in this process with the calls, and a client of each."""

    plane: ControlPlane
    client: httpx.AsyncClient
    worker: Any
    http: httpx.AsyncClient
    """A client of the control plane's own calls, with an admin's token."""

    async def ok(self, path: str, body: Any = None) -> dict[str, Any]:
        answer = await self.client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def process(self, instance: dict[str, Any] = MATH, job_id: str | None = "j1", **params: Any) -> Any:
        body = {"instance": instance, "sampling_params": PARAMS | params, "job_id": job_id}
        return asyncio.create_task(self.client.post("/process", json=body))

    async def leases(self, stage: str, count: int = 1) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        async with asyncio.timeout(patience(60)):
            while len(found) < count:
                found += await self.worker.lease(wait=1.0, **{stage: count - len(found)})
        return found

    async def until_eval(self, count: int = 1, **trajectory: Any) -> list[str]:
        """Let so many rollouts pass through Init and Run, and return their ids."""
        for lease in await self.leases("init", count):
            await self.worker.complete(self.worker.result(lease))
        done = []
        for lease in await self.leases("run", count):
            result = self.worker.result(lease)
            result["trajectory"] |= TRAJECTORY | trajectory
            assert await self.worker.complete(result) == ["accepted"]
            done.append(lease["rollout"])
        return done

    async def finish(self, count: int = 1, reward: float = 1.0, **trajectory: Any) -> list[str]:
        """Let so many rollouts pass through all stages, and return their ids."""
        done = await self.until_eval(count, **trajectory)
        for lease in await self.leases("eval", count):
            await self.worker.complete(self.worker.result(lease, reward=reward))
        return done

    async def jobs(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.http.get("/v1/rolloutjobs")).json()["items"]
        return found


@pytest.fixture
def vllm() -> Iterator[VllmShaped]:
    made = VllmShaped()
    yield made
    made.close()


Serve = Callable[..., Any]


@pytest.fixture
def serve(settings: Settings) -> Serve:
    """Return a starter of a control plane with the calls: `async with serve(**settings)`."""

    @asynccontextmanager
    async def make(**given: Any) -> AsyncIterator[Prorl]:
        sock = socket.create_server(("127.0.0.1", 0))
        config = ProrlConfig.model_validate({"tokenizer": "tiny", **given})
        app = build(settings, prorl=ProrlListener(sock, config, "127.0.0.1"))
        async with app.router.lifespan_context(app):
            plane: ControlPlane = app.state.plane
            inner = httpx.ASGITransport(app=app)
            tokens = plane.tokens
            async with (
                httpx.AsyncClient(
                    base_url=f"http://127.0.0.1:{sock.getsockname()[1]}",
                    trust_env=False,
                    timeout=patience(90),
                ) as client,
                httpx.AsyncClient(
                    transport=inner,
                    base_url="http://test",
                    headers={"Authorization": f"Bearer {tokens.current('admin')}"},
                ) as admin,
                httpx.AsyncClient(
                    transport=inner,
                    base_url="http://test",
                    headers={"Authorization": f"Bearer {tokens.current('worker')}"},
                    timeout=patience(70),
                ) as worker,
            ):
                yield Prorl(plane, client, Worker(worker), admin)

    return make


@pytest.fixture
async def prorl(serve: Serve, vllm: VllmShaped) -> AsyncIterator[Prorl]:
    """Yield a control plane whose batch is open, with one server that is ready."""
    async with serve() as made:
        await made.ok("/clear_llm_server")
        await made.ok("/add_llm_server", {"address": vllm.url + "/v1/"})
        await made.plane.check_health(ready=False)
        await made.ok("/start")
        yield made


async def test_a_batch_in_the_shapes_of_the_protocol(serve: Serve, vllm: VllmShaped) -> None:
    async with serve() as prorl:
        assert (await prorl.client.get("/status")).status_code == 503
        assert (await prorl.client.post("/stop")).json() == {"detail": "Server is not running"}
        assert (await prorl.client.post("/cancel", json={"job_id": "x"})).status_code == 503
        refused = await prorl.client.post("/process", json={"instance": MATH, "sampling_params": PARAMS})
        assert refused.status_code == 503
        assert refused.json() == {"detail": "Server is not running"}

        await prorl.ok("/clear_llm_server")
        await prorl.ok("/add_llm_server", {"address": vllm.url})  # It is kept until /start.
        await prorl.plane.check_health(ready=False)
        assert await prorl.ok("/start") == {"status": "Server started successfully"}
        again = await prorl.client.post("/start")
        assert again.status_code == 400
        assert isinstance(again.json()["detail"], str)

        call = prorl.process()
        (lease,) = await prorl.leases("init")
        status = (await prorl.client.get("/status")).json()
        assert status == {
            "status": "running",
            "running": True,
            "pending_jobs": 1,
            "jobs": 1,
            "init": 1,
            "run": 0,
            "eval": 0,
        }
        await prorl.worker.complete(prorl.worker.result(lease))
        (lease,) = await prorl.leases("run")
        assert lease["backend"]["url"] == vllm.url
        assert (lease["backend"]["model"], lease["backend"]["tokenizer"]) == ("tiny", "tiny")
        job = (await prorl.jobs())[0]
        assert (
            job["spec"]["sampling"] | {"temperature": 1.0, "topP": 1.0, "maxTokens": 64}
            == job["spec"]["sampling"]
        )
        assert (job["spec"]["agent"]["maxTurns"], job["spec"]["handler"]) == (5, "mixed")
        result = prorl.worker.result(lease)
        result["trajectory"] |= TRAJECTORY
        await prorl.worker.complete(result)
        (lease,) = await prorl.leases("eval")
        await prorl.worker.complete(prorl.worker.result(lease, reward=1.0))

        answer = await call
        assert answer.status_code == 200, answer.text
        found = answer.json()
        named = (found["instance_id"], found["trajectory_id"], found["success"], found["resolved"])
        assert named == ("row-7", 3, True, True)
        assert (found["error"], found["critical_error"], found["filter"]) == (None, None, False)
        assert (found["finish"], found["end_properly"], found["git_patch"]) == (True, True, None)
        assert set(found["timing"]) == {
            "init_time",
            "run_time",
            "eval_time",
            "others_time",
            "counted_elapsed",
            "timeout_triggered",
        }
        user, first, tool, last = found["messages"]
        assert first["tool_calls"] == [{"name": "bash", "arguments": {"command": "echo 4"}}]
        assert (user["token_ids"], tool["token_ids"]) == ([1, 2, 3], [6])
        assert (first["token_ids"], last["token_ids"]) == ([4, 5], [7, 8])
        assert (first["input_ids"], last["input_ids"]) == ([1, 2, 3], [1, 2, 3, 4, 5, 6])
        assert (first["logprobs"], last["logprobs"]) == ([-0.5, -0.25], [-1.5, -0.125])
        assert {tool["function"]["name"] for tool in found["tools"]} >= {"bash", "submit"}
        assert await prorl.ok("/stop") == {"status": "Server stopped successfully"}
        assert (await prorl.client.get("/status")).status_code == 503


async def test_the_same_job_id_is_the_same_rollout_also_after_a_restart(
    serve: Serve, vllm: VllmShaped
) -> None:
    async with serve() as prorl:
        await prorl.ok("/add_llm_server", {"address": vllm.url})
        await prorl.plane.check_health(ready=False)
        await prorl.ok("/start")
        # With PostgreSQL, a call without a job_id may belong to another replica, so a start leaves it alone.
        lost = [prorl.process(job_id=None)] if prorl.plane.database.sqlite else []
        calls = [prorl.process(), prorl.process(), *lost]
        # The lease shows that the calls have been admitted: one rollout for the two with the same job_id.
        first = await prorl.leases("init", 1 + len(lost))
        assert await prorl.worker.lease(init=1) == []
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        del first
    async with serve() as prorl:
        # The batch and its servers are as they were; the rollout without a job_id was ended.
        assert (await prorl.client.get("/status")).json()["pending_jobs"] == 1
        call = prorl.process()
        (job,) = await prorl.jobs()
        assert job["status"]["counts"]["total"] == 1 + len(lost)
        leased = (await prorl.http.get(f"/v1/rolloutjobs/{job['metadata']['name']}/rollouts")).json()
        held = [one for one in leased["items"] if one["status"] in ("queued", "leased")]
        assert len(held) == 1
        # The lease of the first process is taken back in time; here, the worker simply gives it up.
        await prorl.plane.database.write(_expire_leases)
        await prorl.plane.sweep()
        await prorl.plane.check_health(ready=False)
        assert await prorl.finish() == [held[0]["id"]]
        one = await call
        two = await prorl.process()
        assert one.status_code == two.status_code == 200
        assert one.json() == two.json()
        assert one.json()["rollout"] == held[0]["id"]
        assert (await prorl.jobs())[0]["status"]["counts"]["total"] == 1 + len(lost)


def _expire_leases(tx: Any) -> None:
    import sqlalchemy as sa
    from rollyard_api.storage.schema import rollouts

    leased = rollouts.c.lease_expires.is_not(None)
    tx.conn.execute(sa.update(rollouts).where(leased).values(lease_expires=tx.now - 1))


async def test_a_job_id_belongs_to_one_call_of_one_batch(prorl: Prorl) -> None:
    call = prorl.process()
    await prorl.finish()
    first = (await call).json()
    other = await prorl.process(MATH | {"trajectory_id": 4})
    assert other.status_code == 422
    assert "names another call of this batch" in other.json()["detail"]
    await prorl.ok("/stop")
    await prorl.ok("/start")
    call = prorl.process()
    await prorl.finish()
    second = (await call).json()
    assert second["rollout"] != first["rollout"], "a later batch gets a sample of its own"
    assert len(await prorl.jobs()) == 1, "the job, with its warm workers, outlives the batch"


async def test_a_rollout_without_messages_is_tried_again_and_cancelled_ones_are_not(prorl: Prorl) -> None:
    rollouts = set()
    for number in range(calls.MAX_TRIES + 1):
        call = prorl.process()
        if number < calls.MAX_TRIES:
            (lease,) = await prorl.leases("init")
            rollouts.add(lease["rollout"])
            assert await prorl.worker.fail(lease, "SetupFailed", message="no", retryable=False) == "accepted"
        answer = await call
        assert answer.status_code == 200
        found = answer.json()
        assert (found["success"], found["messages"], found["critical_error"]) == (False, [], "init")
        assert found["error"] == "SetupFailed: no"
        assert (found["filter"], found["resolved"], found["reward"]) == (True, False, None)
    assert len(rollouts) == calls.MAX_TRIES

    call = prorl.process(job_id="j2")
    (lease,) = await prorl.leases("init")
    assert isinstance((await prorl.ok("/cancel", {"job_id": "j2"}))["message"], str)
    found = (await call).json()
    assert (found["success"], found["messages"]) == (False, [])
    assert found["error"].startswith("Cancelled")
    again = (await prorl.process(job_id="j2")).json()
    assert again["rollout"] == found["rollout"]
    assert "unknown" in (await prorl.ok("/cancel", {"job_id": "nobody's"}))["message"]
    assert await prorl.worker.lease(init=4) == []


async def test_a_call_cancelled_in_eval_has_its_messages_and_no_reward(prorl: Prorl) -> None:
    call = prorl.process()
    await prorl.until_eval()
    await prorl.leases("eval")
    await prorl.ok("/cancel", {"job_id": "j1"})
    found = (await call).json()
    assert [message["role"] for message in found["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert (found["success"], found["reward"], found["critical_error"]) == (False, None, "eval")
    assert found["error"].startswith("Cancelled")
    assert found["filter"] is True


async def test_stop_ends_everything_and_answers_who_waits(prorl: Prorl) -> None:
    waiting = [prorl.process(job_id=f"j{number}") for number in range(5)]
    await prorl.leases("init", 5)
    await prorl.ok("/stop")
    for call in waiting:
        answer = await call
        assert answer.status_code == 200
        assert answer.json()["messages"] == []
    (job,) = await prorl.jobs()
    assert job["status"]["counts"]["cancelled"] == 5
    assert not job["status"].get("completionTime"), "the stream stays open for the next batch"


async def test_a_client_without_a_job_id_that_leaves_ends_its_rollout(prorl: Prorl) -> None:
    kept, left = prorl.process(job_id="kept"), prorl.process(job_id=None)
    await prorl.leases("init", 2)
    for call in (kept, left):
        call.cancel()

    async def one_is_left() -> bool:
        return bool((await prorl.client.get("/status")).json()["pending_jobs"] == 1)

    await eventually(one_is_left)
    (job,) = await prorl.jobs()
    assert job["status"]["counts"]["cancelled"] == 1


async def test_the_data_sources_become_tasks_of_our_handlers(prorl: Prorl) -> None:
    waiting = [prorl.process(row, job_id=str(at)) for at, row in enumerate((MATH, CODE, SWE))]
    leases = await prorl.leases("init", 3)
    tasks = {lease["task"]["metadata"]["data_source"]: lease["task"] for lease in leases}
    assert tasks["deepscaler"]["answer"] == "4"
    assert tasks["deepcoder"]["tests"]["cases"] == [{"input": "1 2\n", "output": "3\n"}]
    assert tasks["swebench"]["swe"]["fail_to_pass"] == ["test_a"]
    assert tasks["swebench"]["metadata"]["instance_id"] == "demo__demo-1"
    await prorl.ok("/stop")
    await asyncio.gather(*waiting)


async def test_other_parameters_have_a_job_of_their_own_and_jobs_are_bounded(
    serve: Serve, vllm: VllmShaped
) -> None:
    async with serve(model="tiny", maxJobs=2, spec={"agent": {"tools": ["bash"]}}) as prorl:
        await prorl.ok("/add_llm_server", {"address": vllm.url})
        await prorl.plane.check_health(ready=False)
        await prorl.ok("/start")
        busy = [prorl.process(job_id="a"), prorl.process(job_id="b", temperature=0.0)]
        await prorl.leases("init", 2)
        assert len(await prorl.jobs()) == 2
        full = await prorl.process(job_id="c", temperature=0.5)
        assert full.status_code == 503
        assert "combinations of sampling parameters" in full.json()["detail"]
        await prorl.ok("/cancel", {"job_id": "a"})
        third = prorl.process(job_id="c", temperature=0.5)
        await prorl.leases("init")
        names = {job["metadata"]["name"]: job for job in await prorl.jobs()}
        assert len(names) == 3
        assert {tuple(job["spec"]["agent"]["tools"]) for job in names.values()} == {("bash",)}
        await prorl.ok("/stop")
        await asyncio.gather(*busy, third)


API_KEYS = pytest.mark.attack(
    "it is stored, logged, or quoted in an error",
    boundary="prorl",
    surface="`sampling_params.api_key`",
    stopped_by="it is dropped; errors leave out what was sent",
)


@API_KEYS
async def test_wrong_bodies_name_the_field_and_never_quote_the_request(prorl: Prorl) -> None:
    secret = "sk-" + "1" * 40
    for body, field in (
        ({"sampling_params": {"api_key": secret}}, "instance"),
        ({"instance": MATH, "sampling_params": {"temperature": secret}}, "temperature"),
        ({"instance": MATH, "sampling_params": {"max_iterations": 0, "api_key": secret}}, "max_iterations"),
        ({"instance": MATH, "job_id": 7, "sampling_params": {"api_key": secret}}, "job_id"),
        ({"instance": [secret]}, "instance"),
    ):
        answer = await prorl.client.post("/process", json=body)
        assert answer.status_code == 422
        assert field in {part for item in answer.json()["detail"] for part in item["loc"]}
        assert secret not in answer.text
    for row, field in (
        (
            MATH | {"data_source": "nobody's"},
            "instance.data_source: must be one of deepcoder, deepscaler, swebench",
        ),
        ({"data_source": "deepscaler"}, "instance."),
        (MATH | {"reward_model": {}}, "instance.reward_model.ground_truth"),
        (MATH | {"images": ["a.png"]}, "instance.images: holds pictures"),
        ({"instance_id": "x"}, "instance."),
        (MATH | {"instance_id": [1]}, "instance.instance_id"),
    ):
        answer = await prorl.client.post("/process", json={"instance": row, "sampling_params": PARAMS})
        assert answer.status_code == 422, answer.text
        assert answer.json()["detail"].startswith(field), answer.text
    assert (await prorl.client.post("/process", content=b"{")).status_code == 422
    assert (await prorl.client.post("/add_llm_server", json={})).status_code == 422
    assert (await prorl.client.get("/process")).status_code == 405
    assert (await prorl.client.get("/v1/rolloutjobs")).json() == {"detail": "Not Found"}


@API_KEYS
async def test_a_key_in_the_parameters_is_kept_nowhere(prorl: Prorl, tmp_path: Path) -> None:
    secret = "sk-very-secret-key"
    call = prorl.process(api_key=secret, model="hosted_vllm/tiny", log_completions=False)
    await prorl.leases("init")
    await prorl.ok("/stop")
    assert secret not in (await call).text
    kept = [path for path in tmp_path.rglob("*") if path.is_file() and secret.encode() in path.read_bytes()]
    assert kept == []


async def test_servers_are_those_of_a_pool_of_its_own(prorl: Prorl, vllm: VllmShaped) -> None:
    await prorl.ok("/add_llm_server", {"address": vllm.url.removeprefix("http://")})
    pool = (await prorl.http.get("/v1/backendpools/prorl")).json()
    assert [one["url"] for one in pool["status"]["backends"]] == [vllm.url]
    assert [one["ready"] for one in pool["status"]["backends"]] == [True]
    await prorl.ok("/clear_llm_server")
    pool = (await prorl.http.get("/v1/backendpools/prorl")).json()
    assert pool["status"]["backends"] == []
    await prorl.ok("/add_llm_server", {"address": "http://localhost:1/v1"})
    pool = (await prorl.http.get("/v1/backendpools/prorl")).json()
    assert [one["url"] for one in pool["status"]["backends"]] == ["http://localhost:1"]


@pytest.mark.attack(
    "a pool of somebody else gets other servers, or none",
    boundary="prorl",
    surface="`/add_llm_server`, `/clear_llm_server`",
    stopped_by="the pool's uid must be that of the one that the calls made",
)
async def test_a_pool_of_somebody_else_is_not_touched(serve: Serve, vllm: VllmShaped) -> None:
    async with serve() as prorl:
        spec = {"model": "m", "engine": {"type": "external", "external": {"urls": ["http://127.0.0.1:9"]}}}
        manifest = {
            "apiVersion": "rollyard.dev/v1alpha1",
            "kind": "BackendPool",
            "metadata": {"name": "prorl"},
        }
        assert (await prorl.http.post("/v1/backendpools", json=manifest | {"spec": spec})).status_code == 201
        for path, body in (("/clear_llm_server", None), ("/add_llm_server", {"address": vllm.url})):
            refused = await prorl.client.post(path, json=body)
            assert refused.status_code == 500
            assert "was not made by these calls" in refused.json()["detail"]
        pool = (await prorl.http.get("/v1/backendpools/prorl")).json()
        assert [one["url"] for one in pool["status"]["backends"]] == ["http://127.0.0.1:9"]


async def test_several_segments_are_one_sequence_without_a_repeat(prorl: Prorl) -> None:
    later = {
        "prompt_ids": [9, 8],
        "response_ids": [7],
        "loss_mask": [1],
        "logprobs": [-0.5],
        "policy_versions": ["v1"],
    }
    turns = [
        {"segment": 0, "start": 0, "end": 2, "finish_reason": "tool_calls"},
        {"segment": 1, "start": 0, "end": 1, "finish_reason": "length"},
    ]
    call = prorl.process()
    await prorl.finish(reward=0.5, segments=[SEGMENT, later], turns=turns, truncated=True)
    found = (await call).json()
    assert [message["token_ids"] for message in found["messages"]] == [[], [], [9, 8], [7]]
    assert [message["input_ids"] for message in found["messages"]] == [[], [], [], [9, 8]]
    assert len(found["segments"]) == 2
    assert (found["success"], found["resolved"], found["finish"], found["end_properly"]) == (
        True,
        False,
        False,
        False,
    )


def test_settings_name_the_field_that_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "prorl.yaml"
    for text, problem in (
        ("tokenizer: t\nservers: ['10.0.0.0/99']\n", r"servers\[0\]: .*must be a network"),
        ("tokenizer: t\ncolor: red\n", "color"),
        ("tokenizer: t\nspec: {agent: {maxTurns: 0}}\n", "spec.agent.maxTurns"),
        ("tokenizer: t\nspec: {handler: math}\n", "spec.handler: is decided by the calls"),
        ("{}\n", "tokenizer: is required"),
        ("- 1\n", "must be a mapping"),
        ("a: [\n", "not YAML"),
    ):
        path.write_text(text)
        with pytest.raises(OptionInvalid, match=problem):
            read_config(path)
    path.write_text("servers: [10.0.0.0/8, engine-0.engines]\nhosts: [prorl.example]\n")
    assert read_config(path, "folder").tokenizer == "folder"
    with pytest.raises(OptionInvalid, match="cannot be read"):
        read_config(tmp_path / "none.yaml")


@pytest.mark.attack(
    "it is open although nobody asked for it",
    boundary="prorl",
    surface="the listener",
    stopped_by="it is off by default, and on loopback unless an option says otherwise",
)
def test_the_calls_are_off_unless_asked_for_and_wrong_settings_end_the_start(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    with start_api(tmp_path / "a") as off:
        for path in ("/start", "/status", "/process"):
            assert httpx.post(off.url + path, trust_env=False).status_code in (401, 403, 404, 405)
    port_file = tmp_path / "b" / "prorl-port"
    options = ("--prorl", "--prorl-port", "0", "--prorl-port-file", str(port_file), "--prorl-tokenizer", "t")
    with start_api(tmp_path / "b", *options) as on:
        port = int(port_file.read_text())
        assert port != int(on.url.rpartition(":")[2])
        assert httpx.get(f"http://127.0.0.1:{port}/status", trust_env=False).status_code == 503
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        assert {row[1] for row in rows if row[3] == "0A" and row[1].endswith(f":{port:04X}")} == {
            f"0100007F:{port:04X}"
        }, "it listens on loopback alone"
        for more, problem in (
            (("--prorl",), "tokenizer: is required"),
            (("--prorl-config", "none.yaml"), "--prorl-config goes with --prorl"),
            (("--prorl", "--prorl-config", "none.yaml"), "none.yaml: cannot be read"),
            (
                ("--prorl", "--prorl-tokenizer", "t", "--prorl-port", str(port)),
                f"port {port} on 127.0.0.1 is in use: stop what listens there, or choose another",
            ),
        ):
            assert problem in refused_start(tmp_path / "c", *more)


def test_ground_truths_of_deepcoder_are_tests() -> None:
    def tests_of(truth: Any) -> Any:
        return task_of(CODE | {"reward_model": {"ground_truth": truth}}, FORMATS).tests

    called = {"testtype": "functional", "metadata": {"func_name": "add"}}
    found = tests_of([{"input": "1\n2", "output": "3", **called}, {"input": "2\n2", "output": "4", **called}])
    assert (found.entry_point, len(found.cases), found.compare) == ("add", 2, "numeric")
    found = tests_of(json.dumps({"inputs": ["1\n"], "outputs": ["2\n"]}))
    assert (found.entry_point, found.cases[0].output) == (None, "2\n")
    mixed = [{"input": "1", "output": "3", **called}, {"input": "1", "output": "3", "testtype": "stdin"}]
    for truth, field in (
        (mixed, "must call the same function in all tests"),
        ([{"input": "1", "output": 3}], r"ground_truth\[0\].output"),
        ([{"input": "1", "output": "3", "testtype": "functional"}], r"metadata.func_name"),
    ):
        with pytest.raises(Invalid, match=field):
            tests_of(truth)
