"""The namespace of a manifest that names none is that of the client."""

from __future__ import annotations

import inspect
import json
import re
from fnmatch import fnmatchcase
from typing import Any

import httpx
import pytest
from rollyard_api.app import build
from rollyard_api.settings import Settings
from rollyard_client import AsyncClient, Client, Invalid, RollyardError
from rollyard_client.requests.jobs import placed
from rollyard_client.requests.views import RolloutQuery
from rollyard_crds import RolloutJob

SPEC = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}}
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


UPDATE = {
    "policyVersion": "v", "source": {"lora": {"name": "a", "path": "/b"}, "pushed": False}, "mode": "keep",
    "inFlight": "restart", "requireVerified": True,
}  # fmt: skip
PAGE = {"cursor": "c", "wait": "0.0"}
CALLS: list[tuple[str, list[Any], dict[str, Any], str, dict[str, str], Any]] = [
    ("jobs", [], {}, "GET /v1/rolloutjobs", {}, None),
    ("job", ["a/b"], {}, "GET /v1/rolloutjobs/a%2Fb", {}, None),
    ("wait", ["j", 1.0], {}, "GET /v1/rolloutjobs/j", {}, None),
    ("cancel", ["j"], {}, "POST /v1/rolloutjobs/j/cancel", {}, {}),
    ("cancel", ["j"], {"group": "g"}, "POST /v1/rolloutjobs/j/cancel", {}, {"group": "g"}),
    ("cancel", ["j"], {"rollout": "r"}, "POST /v1/rolloutjobs/j/cancel", {}, {"rollout": "r"}),
    ("delete", ["j"], {}, "DELETE /v1/rolloutjobs/j", {}, None),
    ("update", ["j"], {"suspend": False}, "PATCH /v1/rolloutjobs/j", {}, {"suspend": False}),
    ("update", ["j"], {"priority": 0}, "PATCH /v1/rolloutjobs/j", {}, {"priority": 0}),
    ("push_tasks", ["j", [{"id": "t"}]], {}, "POST /v1/rolloutjobs/j/tasks", {}, {"id": "t"}),
    ("unscored", ["j"], {"cursor": "c"}, "GET /v1/rolloutjobs/j/unscored", {**PAGE, "limit": "100"}, None),
    ("rewards", ["j", {"r": 1}], {}, "POST /v1/rolloutjobs/j/rewards", {},
     {"rewards": {"r": {"reward": 1.0, "components": {}, "reason": "", "fence": None}}}),
    ("open_target", ["j", "s"], {}, "POST /v1/rolloutjobs/j/targets", {}, {"id": "s"}),
    ("open_target", ["j", "s", 3], {}, "POST /v1/rolloutjobs/j/targets", {}, {"id": "s", "groups": 3}),
    ("close_stream", ["j"], {}, "POST /v1/rolloutjobs/j/close", {}, {}),
    ("tasks", ["j", ["t"]], {}, "GET /v1/rolloutjobs/j/tasks", {"id": "t"}, None),
    ("trajectory", ["j", "r"], {}, "GET /v1/rolloutjobs/j/rollouts/r", {}, None),
    ("running_rollout", ["j", "r"], {}, "GET /v1/rolloutjobs/j/rollouts/r/live", {}, None),
    (
        "rollouts", ["j"], {"stage": "run", "status": "leased", "retried": True},
        "GET /v1/rolloutjobs/j/rollouts", {"stage": "run", "status": "leased", "retried": "true"}, None,
    ),
    (
        "rollout_rows", ["j", RolloutQuery(sort="-reward", reason="r", min_reward=0.0, retried=False)], {},
        "GET /v1/rolloutjobs/j/rollouts",
        {"sort": "-reward", "reason": "r", "min_reward": "0.0", "retried": "false", "slim": "true",
         "limit": "200"}, None,
    ),
    ("statistics", ["j"], {}, "GET /v1/rolloutjobs/j/statistics", {}, None),
    ("parquet", ["j"], {"cursor": "c"}, "GET /v1/rolloutjobs/j/trajectories",
     {"cursor": "c", "limit": "1000"}, None),
    ("events", ["j"], {"last_id": "7"}, "GET /v1/rolloutjobs/j/events", {}, None),
    ("trajectories", ["j"], {"cursor": "c", "status": "failed"}, "GET /v1/rolloutjobs/j/trajectories",
     {**PAGE, "limit": "100", "status": "failed"}, None),
    ("trajectories", ["j"], {"follow": True}, "GET /v1/rolloutjobs/j/trajectories",
     {"cursor": "", "wait": "0.0", "limit": "100"}, None),
    ("trajectories", ["j"], {"consumer": "n"}, "GET /v1/rolloutjobs/j/cursors/n", {}, None),
    ("groups", ["j"], {"cursor": "c", "informative": True}, "GET /v1/rolloutjobs/j/groups",
     {**PAGE, "limit": "16", "informative": "true", "dropped": "false"}, None),
    ("groups", ["j"], {"cursor": "c", "dropped": True}, "GET /v1/rolloutjobs/j/groups",
     {**PAGE, "limit": "16", "informative": "false", "dropped": "true"}, None),
    ("groups", ["j"], {"consumer": "n"}, "GET /v1/rolloutjobs/j/cursors/n", {}, None),
    ("array_pages", ["j"], {"cursor": "c", "status": "failed"}, "GET /v1/rolloutjobs/j/trajectories",
     {"cursor": "c", "limit": "1000", "status": "failed"}, None),
    ("batch", ["j", 2], {"cursor": "c", "informative": True, "timeout": 0}, "GET /v1/rolloutjobs/j/groups",
     {**PAGE, "limit": "2", "informative": "true", "dropped": "false"}, None),
    ("array_batch", ["j", 99], {"cursor": "c", "timeout": 0}, "GET /v1/rolloutjobs/j/groups",
     {**PAGE, "limit": "16", "informative": "false", "dropped": "false"}, None),
    ("batch", ["j", 2], {"max_lag": 1}, "GET /v1/rolloutjobs/j", {}, None),
    ("array_batch", ["j", 2], {"consumer": "n"}, "GET /v1/rolloutjobs/j/cursors/n", {}, None),
    ("acknowledge", ["j", "n", "c"], {"rewind": True, "expected": ""}, "PUT /v1/rolloutjobs/j/cursors/n", {},
     {"cursor": "c", "rewind": True, "expected": ""}),
    ("acknowledge", ["j", "n", "c"], {}, "PUT /v1/rolloutjobs/j/cursors/n", {},
     {"cursor": "c", "rewind": False}),
    ("acknowledged", ["j"], {}, "GET /v1/rolloutjobs/j/cursors", {}, None),
    ("forget", ["j", "n"], {}, "DELETE /v1/rolloutjobs/j/cursors/n", {}, None),
    ("check_tokenizer", ["p", "x"], {}, "GET /v1/backendpools/p/tokenizer", {}, None),
    ("pools", [], {}, "GET /v1/backendpools", {}, None),
    ("pool", ["p"], {}, "GET /v1/backendpools/p", {}, None),
    ("patch_pool", ["p", {"replicas": 3}], {}, "PATCH /v1/backendpools/p", {}, {"spec": {"replicas": 3}}),
    ("delete_pool", ["p"], {}, "DELETE /v1/backendpools/p", {}, None),
    ("update_weights", ["p", "v"],
     {"lora": ("a", "/b"), "mode": "keep", "in_flight": "restart", "require_verified": True},
     "POST /v1/backendpools/p/weights", {}, UPDATE),
    ("update_weights", ["p", "v"],
     {"lora": {"name": "a", "path": "/b"}, "mode": "keep", "in_flight": "restart", "require_verified": True},
     "POST /v1/backendpools/p/weights", {}, UPDATE),
    ("weight_updates", ["p"], {}, "GET /v1/backendpools/p/weights", {}, None),
    ("wait_weights", ["p", 4], {}, "GET /v1/backendpools/p/weights/4", {"wait": "20.0"}, None),
    ("wait_weights", ["p", 4, 0.0], {}, "GET /v1/backendpools/p/weights/4", {"wait": "0.0"}, None),
    ("pause_pool", ["p", "keep"], {"wait": 3.0}, "POST /v1/backendpools/p/pause",
     {"mode": "keep", "wait": "3.0"}, {}),
    ("resume_pool", ["p"], {"wait": 3.0}, "POST /v1/backendpools/p/resume", {"wait": "3.0"}, {}),
]  # fmt: skip


@pytest.fixture(scope="module")
def accepted(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], set[str]]:
    """Return the query parameters that the control plane accepts, by method and path."""
    described = build(Settings(state_dir=tmp_path_factory.mktemp("state"))).openapi()
    return {
        (method.upper(), re.sub(r"{\w+}", "*", path)): {one["name"] for one in call.get("parameters", ())}
        for path, calls in described["paths"].items()
        for method, call in calls.items()
    }


@pytest.mark.parametrize("given", [None, "theirs"])
@pytest.mark.parametrize(
    ("name", "args", "options", "expected", "query", "body"),
    CALLS,
    ids=[f"{name} {number}" for number, (name, *_) in enumerate(CALLS)],
)
async def test_both_clients_ask_the_same_in_the_namespace_that_they_are_given(
    given: str | None,
    name: str,
    args: list[Any],
    options: dict[str, Any],
    expected: str,
    query: dict[str, str],
    body: Any,
    accepted: dict[tuple[str, str], set[str]],
) -> None:
    asked: list[httpx.Request] = []

    def refuse(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(418, json={"detail": "a teapot"})

    if given is not None:
        options = {**options, "namespace": given}
    transport = httpx.MockTransport(refuse)
    with Client("http://x", "t", namespace="mine") as client:
        client._transport.client = httpx.Client(transport=transport, base_url="http://x")
        with pytest.raises(RollyardError, match="teapot"):
            next(getattr(client, name)(*args, **options))
    async with AsyncClient("http://x", "t", namespace="mine") as other:
        other._transport.client = httpx.AsyncClient(transport=transport, base_url="http://x")
        found = getattr(other, name)(*args, **options)
        with pytest.raises(RollyardError, match="teapot"):
            await (anext(found) if hasattr(found, "__anext__") else found)
    first, second = asked
    method, path = expected.split()
    (known,) = [
        names for (verb, form), names in accepted.items() if verb == method and fnmatchcase(path, form)
        and path.count("/") == form.count("/")
    ]  # fmt: skip
    where = given or "mine"
    for request in asked:
        assert f"{request.method} {request.url.raw_path.decode().partition('?')[0]}" == expected
        assert dict(request.url.params) == {**query, **({} if where is None else {"namespace": where})}
        sent = json.loads(request.content) if request.content else None
        assert sent == body
        assert set(request.url.params) <= known
    assert first.headers["accept"] == second.headers["accept"]
    assert first.headers.get("last-event-id") == second.headers.get("last-event-id") == options.get("last_id")


@pytest.mark.parametrize("name", ["jobs", "pools"])
def test_a_list_of_all_namespaces_is_asked_for(name: str) -> None:
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json={"items": [], "metadata": {}})

    with Client("http://x", "t", namespace="mine") as client:
        client._transport.client = httpx.Client(transport=httpx.MockTransport(answer), base_url="http://x")
        assert getattr(client, name)() == getattr(client, name)("*") == []
    assert [dict(request.url.params) for request in asked] == [{"namespace": "mine"}, {}]


def test_every_call_of_both_clients_with_a_namespace_is_in_the_table() -> None:
    for kind in (Client, AsyncClient):
        named = {
            name
            for name, value in inspect.getmembers(kind, inspect.isfunction)
            if "namespace" in inspect.signature(value).parameters and not name.startswith("_")
        }
        assert named - {name for name, *_ in CALLS} == {"upload"}


@pytest.mark.parametrize("wrong", [("a",), ("a", "/b", "c"), ("a", 1), "ab", ["a", "/b"], 5])
def test_an_adapter_is_a_pair_or_has_names(wrong: Any) -> None:
    with (
        Client("http://x", "t") as client,
        pytest.raises(Invalid, match=r"^lora: must be a pair of the adapter's name"),
    ):
        client.update_weights("p", "v", lora=wrong)
