"""The calls that bring servers to an update, and the rounds of the coordinator that makes them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from rollyard_api.core.bulkhead import Bulkhead
from rollyard_api.storage.schema import pools, weight_updates
from rollyard_api.weights import records
from rollyard_api.weights.checkpoints import Forward
from rollyard_api.weights.coordinator import Coordinator, LoadFailed, UpdateLimits
from rollyard_api.weights.steps import BEHIND, PAUSED, Observation, WeightStep, need
from rollyard_api.weights.updates import EarlierLogprobs
from rollyard_api.weights.verification import fixed_prompt
from rollyard_crds.weights import PauseMode, WeightSource
from rollyard_inference.errors import BackendMismatch, BackendRefused, NoSuchCall, ServerFailed
from rollyard_testing.api.weights import FULL, NEXT, ONE, PUSHED, Pools
from rollyard_testing.waiting import eventually


class Server:
    """The weight calls of a server, each noted in `calls`.

    Args:
        missing: The calls that it does not have.
        gives: The log-probability of each token, by the folder that was loaded last.
    """

    pause_modes: frozenset[PauseMode] = frozenset({"abort", "wait", "keep"})

    def __init__(
        self, label: str = "default", *, missing: Sequence[str] = (), gives: dict[str, float] | None = None
    ) -> None:
        self.calls: list[str] = []
        self.loaded = "/first"
        self.fails: Exception | None = None
        self.paused = False
        self._label, self._missing = label, missing
        self._gives = {"/first": -1.0, "/full": -2.0, "/next": -3.0} if gives is None else gives

    def _has(self, name: str, noted: str = "") -> None:
        if name in self._missing:
            raise NoSuchCall(name)
        if noted:
            self.calls.append(noted)

    async def label(self) -> str:
        self._has("label")
        return self._label

    async def set_label(self, version: str) -> None:
        self._has("set_label", f"label {version}")
        self._label = version

    async def is_paused(self) -> bool:
        return self.paused

    async def pause(self, mode: PauseMode) -> None:
        self._has("pause", f"pause {mode}")
        self.paused = True

    async def resume(self) -> None:
        self._has("resume", "resume")
        self.paused = False

    async def reset_prefix_cache(self) -> None:
        self._has("flush", "flush")

    async def load(self, source: WeightSource) -> None:
        if self.fails is not None:
            raise self.fails
        found = source.checkpoint or source.lora
        assert found is not None
        self._has("load", f"load {found.path}")
        self.loaded = found.path

    async def folder(self) -> str | None:
        return "/first"

    async def dtype(self) -> str | None:
        return None

    async def reports_versions_of_tokens(self, model: str) -> bool:
        return True

    async def prompt_logprobs(self, model: str, ids: Sequence[int]) -> list[float]:
        self._has("measure", "measure")
        return [self._gives[self.loaded]] * (len(ids) - 1)


@pytest.fixture
def loader(two: Pools, disk: Bulkhead) -> Coordinator:
    """Return a coordinator that knows no transformers, and of which a test calls `bring`."""
    transport: Any = None
    return Coordinator(two.served.plane.database, transport, Forward("", disk), UpdateLimits(), name="me")


def reference(value: float) -> dict[str, Any]:
    return {"promptIds": [1, 2, 3], "logprobs": [value] * 2, "tolerance": 0.1}


VERIFIED = ["label unverified:v1", "flush", "resume", "measure"]


@pytest.mark.parametrize(
    ("fields", "missing", "calls", "weights", "part", "state"),
    [
        # Its tokens carry the label of the update only once its weights are verified.
        (
            {"mode": "wait", "reference": reference(-2.0)},
            [],
            ["measure", "pause wait", "load /full", *VERIFIED, "label v1"],
            ("Current", "v1"),
            ("Done", True, ""),
            "Running",
        ),
        (
            {"reference": reference(-2.3)},
            [],
            ["measure", "pause abort", "load /full", *VERIFIED, "pause abort"],
            ("Failed", ""),
            ("Failed", False, "differ by up to 0.3 nats"),
            "Failed",
        ),
        # There is nothing to compare with.
        (
            {},
            [],
            ["measure", "pause abort", "load /full", "label v1", "flush", "resume"],
            ("Current", "v1"),
            ("Done", False, "not verified: no reference was given"),
            "Running",
        ),
        ({"requireVerified": True}, [], [], ("Current", ""), ("Pending", False, ""), "Failed"),
        (
            {"reference": reference(-2.0)},
            ["measure"],
            ["pause abort", "load /full", *VERIFIED[:-1], "label v1"],
            ("Current", "v1"),
            ("Done", False, "not verified: measure"),
            "Running",
        ),
        (
            {"reference": reference(-2.0), "requireVerified": True},
            ["measure"],
            ["pause abort", "load /full", *VERIFIED[:-1], "pause abort"],
            ("Failed", ""),
            ("Failed", False, "measure"),
            "Failed",
        ),
        # No rollout continues over the update, so nothing has to tell its tokens apart.
        (
            {"inFlight": "restart"},
            ["label", "set_label", "flush", "pause", "resume"],
            ["load /full"],
            ("Current", "v1"),
            ("Done", False, "not verified: no reference"),
            "Running",
        ),
    ],
)
async def test_the_calls_that_bring_a_server_to_an_update(
    fields: dict[str, Any],
    missing: list[str],
    calls: list[str],
    weights: tuple[str, str],
    part: tuple[str, bool, str],
    state: str,
    two: Pools,
    loader: Coordinator,
) -> None:
    answer = await two.post("v1", FULL, **({"inFlight": "continue"} | fields))
    number, url = answer.json()["id"], two.urls[1]
    server = Server(missing=missing)
    await loader.bring(await two.target(url), server)
    assert server.calls == calls
    found = (await two.status())["backends"]
    assert (found[1]["weights"], found[1]["policyVersion"], found[1]["restartRequested"]) == (*weights, False)
    assert {b["weights"] for b in (found[0], *found[2:])} == {"Current"}
    update = await two.update(number)
    ended = update["backends"][1]
    assert (ended["step"], ended["verified"]) == part[:2]
    assert part[2] in ended["message"]
    assert {one["step"] for one in (update["backends"][0], *update["backends"][2:])} == {"Pending"}
    assert update["state"] == state
    assert update["verifiedBy"] == ("reference" if "reference" in fields else "")


@pytest.mark.parametrize("lacks", ["pause", "set_label", "flush", "resume"])
async def test_rollouts_continue_only_over_an_update_of_a_server_that_has_all_calls(
    lacks: str, two: Pools, loader: Coordinator
) -> None:
    await two.post("v1", FULL, inFlight="continue")
    with pytest.raises(NoSuchCall, match=lacks):
        await loader.bring(await two.target(two.urls[0]), Server(missing=[lacks]))
    assert (await two.status())["backends"][0]["weights"] == "Updating"


async def test_a_server_that_was_not_ready_for_a_time_loads_only_what_it_lost(
    two: Pools, loader: Coordinator
) -> None:
    a, b, c, d, e = two.urls
    await two.succeed(await two.begin("v1", FULL))
    await two.begin("v2", ONE)
    for url in two.urls:
        await two.set("p", url, weights="Stale", weights_message="it is not ready")

    async def brought(url: str, server: Server) -> list[str]:
        await loader.bring(await two.target(url), server)
        found = next(one for one in (await two.status())["backends"] if one["url"] == url)
        assert (found["weights"], found["message"]) == ("Current", "")
        return server.calls

    ends = ["label v2", "flush", "resume"]
    assert await brought(a, Server("v1")) == ["pause abort", "load /one", *ends]
    assert await brought(b, Server("default")) == ["pause abort", "load /full", "load /one", *ends]
    # The label may be that of an attempt of this update which was not completed.
    assert await brought(c, Server("v2")) == ["pause abort", "load /full", "load /one", *ends]
    for url in (d, e):
        assert await brought(url, Server("v1")) == ["pause abort", "load /one", *ends]
    for url in (a, b):
        await two.set("p", url, weights="Stale", policy_index=BEHIND)
    assert await brought(a, Server("v2")) == ["resume"], "nothing was lost"
    assert await brought(b, Server("unverified:v2")) == ["pause abort", "load /full", "load /one", *ends]


async def test_a_server_that_has_lost_pushed_weights_waits_for_them(two: Pools, loader: Coordinator) -> None:
    number = await two.begin("v1", PUSHED)
    await two.succeed(number)
    await two.set("p", two.urls[2], weights="Stale", policy_index=BEHIND)
    server = Server()
    assert await loader.bring(await two.target(two.urls[2]), server) is WeightStep.WAIT
    assert server.calls == [], "nothing is done to it"
    found = (await two.status())["backends"]
    assert [b["weights"] for b in found] == ["Current", "Current", "Stale", "Current", "Current"]
    assert "push them again" in found[2]["message"]


@pytest.mark.parametrize("error", [ServerFailed("disk"), BackendRefused("disk"), BackendMismatch("disk")])
async def test_a_server_that_fails_to_load_gets_no_label(
    error: Exception, two: Pools, loader: Coordinator
) -> None:
    number = await two.begin("v1", FULL)
    server = Server()
    server.fails = error
    with pytest.raises(LoadFailed, match="disk"):
        await loader.bring(await two.target(two.urls[0]), server)
    assert server.calls == ["measure", "pause abort"]
    assert (await two.status())["backends"][0]["weights"] == "Updating"
    assert (await two.update(number))["backends"][0]["step"] == "Loading"


async def test_servers_go_back_to_what_they_had_before_refused_weights(
    two: Pools, loader: Coordinator
) -> None:
    """They are compared with what they gave themselves, although the reference is wrong."""
    a, b, c, d, _ = two.urls
    servers = {url: Server() for url in (a, b, c, d)}
    number = (await two.post("v1", FULL, reference=reference(-9.0), inFlight="continue")).json()["id"]
    for url, folder in ((a, "/first"), (b, "/first"), (c, None)):
        gave = EarlierLogprobs(
            policy_index=0, label="mine", folder=folder, prompt_ids=(1, 2), logprobs=(-1.0,)
        )
        target = await two.target(url)
        await two.record(records.begin, target, observation=Observation(before=gave))
        await two.step(number, url, step="Verifying")
    await loader.bring(await two.target(d), servers[d])
    assert (await two.update(number))["state"] == "Failed"
    servers[b]._gives = {"/first": -1.7}
    for url, server in servers.items():
        server.calls.clear()
        server._label = "unverified:v1"
        await loader.bring(await two.target(url), server)
    again = ["pause abort", "load /first", "label unverified:mine", "flush", "resume", "measure"]
    refused = ["pause abort", "label unverified:refused"]
    assert servers[a].calls == [*again, "label mine"]
    assert servers[b].calls == [*again, *refused], "it gives something else than before"
    assert servers[c].calls == refused, "nobody knows its folder"
    default = [one.replace("mine", "default") for one in again]
    assert servers[d].calls == [*default, "label default"], "it was measured before it was paused"
    found = (await two.status())["backends"]
    assert [one["weights"] for one in found] == ["Current", "Failed", "Failed", "Current", "Current"]
    assert [one["policyVersion"] for one in found] == ["mine", "", "", "default", ""]
    assert [one["restartRequested"] for one in found] == [False, True, True, False, False]
    assert "is wrong too" in found[1]["message"]
    assert "does not say which folder" in found[2]["message"]


async def test_a_server_whose_first_weights_cannot_be_measured_again_is_restarted(
    two: Pools, loader: Coordinator
) -> None:
    """Nothing shows what it has then, as if it gave something else than before."""
    url, server = two.urls[0], Server()
    number = (await two.post("v1", FULL, reference=reference(-9.0), inFlight="continue")).json()["id"]
    await loader.bring(await two.target(url), server)
    assert (await two.update(number))["state"] == "Failed"
    server._missing = ("measure",)
    await loader.bring(await two.target(url), server)
    assert server.paused
    (found, *_) = (await two.status())["backends"]
    assert (found["weights"], found["restartRequested"]) == ("Failed", True)
    assert "what it had before is wrong too: measure" in found["message"]


async def test_a_server_that_was_to_be_restarted_is_believed_only_after_it(
    two: Pools, loader: Coordinator
) -> None:
    await two.begin("v1", FULL)
    target = await two.target(two.urls[0])
    await two.record(records.restart, target, message="it does not load them")
    found = (await two.status())["backends"]
    assert [(b["weights"], b["restartRequested"]) for b in found] == [
        ("Failed", True),
        *[("Current", False)] * 4,
    ]
    target = await two.target(two.urls[0])
    assert need(target.pool, target.row) == "watch"
    await two.set("p", two.urls[0], restart_requested=False)
    for label, calls in (
        ("unverified:v1", ["pause abort", "label unverified:refused"]),
        ("default", ["pause abort", "load /full", "label v1", "flush", "resume"]),
    ):
        server = Server(label)
        await loader.bring(await two.target(two.urls[0]), server)
        assert server.calls == calls
        now = (await two.status())["backends"][0]
        restart = label != "default"
        assert (now["weights"], now["restartRequested"]) == ("Failed" if restart else "Current", restart)
        if restart:
            await two.set("p", two.urls[0], restart_requested=False)


async def test_a_server_measures_what_it_has_only_while_that_is_certain(
    two: Pools, loader: Coordinator
) -> None:
    """Otherwise refused weights would later be taken for the earlier ones."""
    await two.succeed(await two.begin("v1", FULL))
    number = await two.begin("v2", NEXT)
    a, b, c, d, e = two.urls
    await two.set("p", b, weights="Stale")
    await two.set("p", c, policy_index=0)
    servers = {url: Server("v1") for url in two.urls}
    servers[d]._label = "unverified:v1"
    servers[e]._label = "v2"
    for url, server in servers.items():
        server.loaded = "/full"
        await loader.bring(await two.target(url), server)
    assert [url for url, server in servers.items() if "measure" in server.calls] == [a]
    read = partial(records.earlier, pool_id=1, policy_index=1)
    gave = {url: await two.served.plane.database.read(partial(read, url=url)) for url in two.urls}
    assert {url for url, before in gave.items() if before is not None} == {a}
    assert gave[a].label == "v1"
    assert gave[a].folder is None, "only the first weights are those of a folder"
    assert gave[a].prompt_ids == tuple(fixed_prompt(256))
    assert set(gave[a].logprobs) == {-2.0}
    assert (await two.update(number))["state"] == "Succeeded"


@pytest.mark.parametrize("measures", [True, False])
async def test_earlier_weights_are_served_again_only_if_they_can_be_verified(
    measures: bool, two: Pools, loader: Coordinator
) -> None:
    """The update that is refused may be on the servers still, although the earlier one asks for no proof."""
    first = (await two.post("v1", FULL, reference=reference(-2.0))).json()["id"]
    await two.succeed(first)
    number = await two.begin("v2", NEXT)
    await two.step(number, two.urls[0], step="Verifying")
    await two.refuse(number)
    server = Server("unverified:v2", missing=() if measures else ("measure",))
    server.loaded = "/next"
    await loader.bring(await two.target(two.urls[0]), server)
    found = (await two.status())["backends"][0]
    if measures:
        assert (found["weights"], found["policyVersion"], found["restartRequested"]) == (
            *("Current", "v1"),
            False,
        )
        assert not server.paused
    else:
        assert (found["weights"], found["restartRequested"]) == ("Failed", True)
        assert server.paused, "it gives no more tokens"
        assert server._label.startswith("unverified:")
    assert [b["weights"] for b in (await two.status())["backends"][1:]] == ["Current"] * 4


@pytest.mark.parametrize(
    ("owner", "expires", "taken"),
    [
        (None, None, True),
        ("me", 60.0, True),
        ("me", -60.0, True),
        ("other", 60.0, False),
        ("other", -60.0, True),
        ("other", None, True),
    ],
)
async def test_an_update_is_taken_over_once_its_owner_is_silent(
    owner: str | None, expires: float | None, taken: bool, two: Pools
) -> None:
    """As on PostgreSQL, where several control planes share the tables."""
    numbers = [await two.begin("v1", FULL, pool) for pool in "pq"]
    target = await two.target(two.urls[0])

    def take(tx: Any) -> tuple[str, list[str | None]]:
        until = None if expires is None else tx.now + expires
        tx.conn.execute(sa.update(weight_updates).values(owner=owner, owner_expires=until))
        try:
            records.as_owner(replace(tx, sqlite=False), "me", target, records.advance)
            said = "taken"
        except records.Superseded:
            said = "superseded"
        query = sa.select(weight_updates.c.owner).order_by(weight_updates.c.id)
        owners = list(tx.conn.scalars(query))
        expiry = tx.conn.scalar(sa.select(weight_updates.c.owner_expires).limit(1))
        assert (expiry == tx.now + records.OWNER_SECONDS) == taken
        return said, owners

    said, owners = await two.served.plane.database.write(take)
    assert len(numbers) == 2
    assert (said, owners) == (("taken", ["me", owner]) if taken else ("superseded", [owner, owner]))


@pytest.mark.parametrize("two", ["postgresql"], indirect=True)
async def test_a_refusal_waits_for_an_update_that_is_being_added(two: Pools) -> None:
    """Both lock the pool first, so that neither can wait for the other."""
    number = await two.begin("v1", FULL)
    engine = sa.create_engine(two.served.plane.database.writer.url)
    blocked = sa.text(
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE wait_event_type = 'Lock' AND datname = current_database()"
    )
    try:
        with engine.connect() as adding, engine.connect() as watching:
            watching = watching.execution_options(isolation_level="AUTOCOMMIT")
            adding.execute(sa.select(pools).where(pools.c.name == "p").with_for_update())
            refusal = asyncio.create_task(two.refuse(number))
            await eventually(lambda: watching.scalar(blocked))
            adding.execute(sa.text("SET LOCAL lock_timeout = '500ms'"))
            adding.execute(sa.update(weight_updates).values(state="Superseded"))
            adding.execute(sa.update(pools).where(pools.c.name == "p").values(policy_index=2))
            adding.commit()
        with pytest.raises(records.Superseded):
            await refusal
    finally:
        engine.dispose()
    assert (await two.update(number))["state"] == "Superseded"
    assert {b["weights"] for b in (await two.status())["backends"]} == {"Current"}


async def test_a_control_plane_renews_only_its_own_updates(two: Pools) -> None:
    numbers = [await two.begin("v1", FULL, pool) for pool in "pq"]
    for number, owner in zip(numbers, ("me", "other"), strict=True):
        change = sa.update(weight_updates).where(weight_updates.c.id == number)
        change = change.values(owner=owner, owner_expires=1.0)
        await two.served.plane.database.write(lambda tx, change=change: tx.conn.execute(change) and None)

    async def expires() -> list[bool]:
        query = sa.select(weight_updates.c.owner_expires).order_by(weight_updates.c.id)
        found = await two.served.plane.database.read(lambda conn: list(conn.scalars(query)))
        return [one != 1.0 for one in found]

    await two.write(records.renew, name="me", ids={numbers[1]})
    assert await expires() == [False, False]
    await two.write(records.renew, name="me", ids=set(numbers))
    assert await expires() == [True, False]


class Rounds:
    """A coordinator of its own, over servers that note their calls."""

    def __init__(self, two: Pools, forward: Forward, servers: dict[str, Server]) -> None:
        self._two, self.servers = two, servers
        transport: Any = None
        self.coordinator = Coordinator(
            two.served.plane.database, transport, forward, UpdateLimits(look=0.0), name="me"
        )

    def control(self, _transport: Any, url: str, _limits: Any) -> Any:
        """Return the control of a server, as `weight_control` does."""

        async def found() -> Server:
            return self.servers[url]

        return found()

    async def weights(self) -> list[str]:
        return [b["weights"] for b in (await self._two.status())["backends"]]


@pytest.fixture
async def rounds(two: Pools, disk: Bulkhead, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rounds]:
    made = Rounds(two, Forward("", disk), {url: Server() for url in two.urls})
    monkeypatch.setattr("rollyard_api.weights.coordinator.weight_control", made.control)
    yield made
    await made.coordinator.close()


async def test_a_control_plane_that_reaches_no_server_leaves_the_update_to_others(
    two: Pools, rounds: Rounds, monkeypatch: pytest.MonkeyPatch
) -> None:
    number = await two.begin("v1", FULL)

    async def unreachable(*_args: Any) -> Server:
        raise ServerFailed("no route")

    monkeypatch.setattr("rollyard_api.weights.coordinator.weight_control", unreachable)

    async def reported() -> bool:
        await rounds.coordinator.round()
        return {part["message"] for part in (await two.update(number))["backends"]} == {"no route"}

    await eventually(reported)
    query = sa.select(weight_updates.c.owner)
    assert await two.served.plane.database.read(lambda conn: conn.scalar(query)) is None


async def test_every_server_that_was_restarted_is_noticed(two: Pools, rounds: Rounds) -> None:
    """A server that calls its weights otherwise than they were called gets the weights again."""
    number = await two.begin("v1", FULL)
    for url in two.urls:
        rounds.servers[url]._label = "v1"
    rounds.servers[two.urls[3]]._missing = ("label",)
    await two.succeed(number)
    for _ in range(3):
        await rounds.coordinator.round()
        await asyncio.sleep(0)
    assert await rounds.weights() == ["Current"] * 5
    for url in (two.urls[1], two.urls[4]):
        rounds.servers[url]._label = "default"

    async def loaded() -> bool:
        await rounds.coordinator.round()
        calls = {url: server.calls for url, server in rounds.servers.items() if server.calls}
        ends = ["pause abort", "load /full", "label v1", "flush", "resume"]
        return calls == {two.urls[1]: ends, two.urls[4]: ends}

    await eventually(loaded)

    async def current() -> bool:
        return await rounds.weights() == ["Current"] * 5

    await eventually(current)
    assert (await two.update(number))["state"] == "Succeeded"


async def test_a_paused_pool_pauses_its_servers_in_its_mode_and_resumes_them(
    two: Pools, rounds: Rounds
) -> None:
    await two.write(records.pause, namespace="default", name="p", mode="keep")
    rounds.servers[two.urls[2]]._missing = ("resume",)

    async def paused() -> bool:
        await rounds.coordinator.round()
        found = (await two.status())["backends"]
        return [(b["weights"], b["message"]) for b in found] == [("Updating", PAUSED)] * 5

    await eventually(paused)
    assert [server.calls for server in rounds.servers.values()] == [["pause keep"]] * 5
    assert {b["weights"] for b in (await two.status("q"))["backends"]} == {"Current"}
    await two.write(records.pause, namespace="default", name="p", mode=None)

    async def resumed() -> bool:
        await rounds.coordinator.round()
        return await rounds.weights() == ["Current"] * 5

    await eventually(resumed)
    calls = [server.calls for server in rounds.servers.values()]
    assert calls == [["pause keep", *([] if at == 2 else ["resume"])] for at in range(5)]
    assert {b["message"] for b in (await two.status())["backends"]} == {""}


async def test_a_server_that_refuses_what_it_is_to_load_keeps_what_it_has(two: Pools, rounds: Rounds) -> None:
    """One refusal is enough, since the request is wrong; an error is tried again."""
    first = await two.begin("v1", FULL)
    await two.succeed(first)
    for server in rounds.servers.values():
        server._label, server.loaded = "v1", "/full"
    number = await two.begin("v2", NEXT)
    for server in rounds.servers.values():
        server.fails = BackendRefused("no such layer")

    async def failed() -> bool:
        await rounds.coordinator.round()
        return str((await two.update(number))["state"]) == "Failed"

    await eventually(failed)
    assert "no such layer" in (await two.update(number))["message"]
    assert (await two.status())["policyVersion"] == "v1"
    for server in rounds.servers.values():
        server.fails = None

    async def back() -> bool:
        await rounds.coordinator.round()
        return await rounds.weights() == ["Current"] * 5

    await eventually(back)
    assert {b["policyVersion"] for b in (await two.status())["backends"]} == {"v1"}
    assert {server.loaded for server in rounds.servers.values()} == {"/full"}
    assert not any(b["restartRequested"] for b in (await two.status())["backends"])
    assert {server._label for server in rounds.servers.values()} == {"v1"}


async def test_a_server_that_is_watched_is_believed_once_it_has_a_label_of_its_own(
    two: Pools, rounds: Rounds
) -> None:
    await two.begin("v1", FULL)
    for url in two.urls:
        await two.record(records.restart, await two.target(url), message="it is wrong")
        rounds.servers[url]._label = "unverified:refused"
        await two.set("p", url, ready=False)
    rounds.servers[two.urls[1]]._label = "default"

    async def again() -> bool:
        await rounds.coordinator.round()
        return not (await two.status())["backends"][1]["restartRequested"]

    await eventually(again)
    await rounds.coordinator.round()
    asked = [b["restartRequested"] for b in (await two.status())["backends"]]
    assert asked == [True, False, True, True, True]
    waiting = [server.calls for url, server in rounds.servers.items() if url != two.urls[1]]
    assert waiting == [[]] * 4, "nothing is done to a server that waits for its restart"
