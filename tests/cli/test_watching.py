"""`rollyard watch` while its job is deleted, or another one gets its name."""

from __future__ import annotations

import io
from typing import cast

import httpx
import pytest
from rich.console import Console
from rollyard.errors import CliError
from rollyard.jobs import watching
from rollyard_client import AsyncClient, Client, JobReplaced, NotFound, finish
from rollyard_crds import RolloutJob
from rollyard_testing.pace import patience


def job(uid: str) -> RolloutJob:
    spec = {"tasks": {"stream": True}, "handler": "shell", "agent": {"type": "oracle"}}
    return RolloutJob.model_validate({"metadata": {"name": "job", "uid": uid}, "spec": spec})


class Seen:
    """A client that returns the states of a job in turn."""

    def __init__(self, *states: RolloutJob | Exception) -> None:
        self._states = list(states)

    def job(self, _name: str, _namespace: str | None = None) -> RolloutJob:
        state = self._states.pop(0)
        if isinstance(state, Exception):
            raise state
        return state


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "POLL_SECONDS", 0.0)
    monkeypatch.setattr("rollyard_client.sync_client.POLL_SECONDS", 0.0)
    monkeypatch.setattr("rollyard_client.async_client.POLL_SECONDS", 0.0)


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (job("second"), "was deleted while it was watched, and another one was submitted"),
        (NotFound("no such job"), "was deleted while it was watched"),
    ],
)
def test_watch_says_what_became_of_its_job(then: RolloutJob | Exception, said: str) -> None:
    client = cast(Client, Seen(job("first"), job("first"), job("first"), then))
    with pytest.raises(CliError, match=said):
        watching.watch(client, "job", "default", console=Console(file=io.StringIO()))


def test_waiting_for_a_job_does_not_end_with_another_one() -> None:
    uids = ["first", "first", "second"]

    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=job(uids.pop(0)).model_dump_json(by_alias=True))

    with Client("http://x", "t") as client:
        client._transport.client.close()
        client._transport.client = httpx.Client(base_url="http://x", transport=httpx.MockTransport(answer))
        with pytest.raises(JobReplaced, match="another one was submitted"):
            client.wait("job", timeout=patience(60))


async def test_nor_does_the_async_client() -> None:
    uids = ["first", "second"]

    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, content=job(uids.pop(0)).model_dump_json(by_alias=True))

    async with AsyncClient("http://x", "t") as client:
        await client._transport.client.aclose()
        client._transport.client = httpx.AsyncClient(
            base_url="http://x", transport=httpx.MockTransport(answer)
        )
        with pytest.raises(JobReplaced):
            await client.wait("job", timeout=patience(60))


def test_the_first_look_knows_no_job() -> None:
    finish.check_same(job("any"), None)
    finish.check_same(job("any"), "any")
