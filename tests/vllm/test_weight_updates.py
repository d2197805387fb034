"""Weight updates of real vLLM servers over REST: verified, refused, taken back, and reported per token."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from rollyard.local.external_server import probed
from rollyard_inference.fitness import checks
from rollyard_testing.pace import patience
from rollyard_testing.vllm import random_models
from rollyard_testing.vllm.checker import Pass
from rollyard_testing.vllm.checkpoints import perturbed
from rollyard_testing.vllm.forward import Forward
from rollyard_testing.vllm.product import Product, a_product
from rollyard_testing.vllm.servers import SERVED, VllmServer

SECONDS = patience(180.0)
IDS = list(range(40, 104))
TOLERANCE = 0.01
"""The tolerance in nats; servers and transformers both compute in float32."""


@pytest.fixture(scope="module")
def folders(vllm_model: Path, vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return checkpoints: `a` and `b` with untied embeddings, the others as random_models says."""
    made = tmp_path_factory.mktemp("checkpoints")
    random_models.make(vllm_python, made, vllm_model)
    names = ("first", "second", "adapter", "merged")
    return {"a": vllm_model, "b": perturbed(vllm_model, made / "b"), **{name: made / name for name in names}}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path], forward: Forward) -> Callable[[str], list[float]]:
    """Return a function from a checkpoint's name to what transformers says of IDS[1:]."""
    known: dict[str, list[float]] = {}

    def tell(name: str) -> list[float]:
        if name not in known:
            asked = [Pass("reference", IDS, 1.0, list(range(1, len(IDS))), [])]
            known[name] = forward.logprobs(folders[name], asked)[0]
        return known[name]

    return tell


@pytest.fixture(scope="module")
def started(start_vllm: Callable[..., VllmServer], folders: dict[str, Path]) -> Iterator[VllmServer]:
    server = start_vllm(
        folders["first"],
        1,
        arguments=("--no-enable-scale-out", "--enable-lora", "--max-lora-rank", "8"),
        environment={"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},
    )
    yield server
    server.stop()


@pytest.fixture
def tied_vllm(started: VllmServer) -> VllmServer:
    """Return a server with tied embeddings that loads adapters and has no `/inference/v1/generate`."""
    started.heal()
    return started


@pytest.fixture
def product(vllm_python: Path) -> Iterator[Product]:
    """Yield a control plane that verifies with transformers."""
    with a_product("--verify-python", str(vllm_python)) as made:
        yield made


def measured(server: VllmServer, model: str = SERVED) -> list[float]:
    """Return the server's log-probabilities of IDS[1:]."""
    body = {"model": model, "prompt": IDS, "max_tokens": 1, "prompt_logprobs": 0}
    entries = server.call("/v1/completions", body)["choices"][0]["prompt_logprobs"]
    return [entry[str(token)]["logprob"] for token, entry in zip(IDS[1:], entries[1:], strict=True)]


def request(version: str, folder: Path, **fields: Any) -> dict[str, Any]:
    return {"policyVersion": version, "source": {"checkpoint": {"path": str(folder)}}, **fields}


def reference(values: list[float]) -> dict[str, Any]:
    return {"promptIds": IDS, "logprobs": values, "tolerance": TOLERANCE}


class Pool:
    """A pool of given servers, as REST shows it, and a worker that asks for its rollouts."""

    def __init__(self, product: Product, servers: list[VllmServer], tokenizer: Path) -> None:
        self.product = product
        product.pool("p", [server.url for server in servers], tokenizer)

    def status(self) -> dict[str, Any]:
        with self.product.http() as http:
            found: dict[str, Any] = http.get("/v1/backendpools/p").raise_for_status().json()["status"]
        return found

    def backend(self) -> dict[str, Any]:
        found: dict[str, Any] = self.status()["backends"][0]
        return found

    def until(self, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until every backend is as `wanted`, and return the first."""
        deadline = time.monotonic() + SECONDS
        while True:
            found: list[dict[str, Any]] = self.status()["backends"]
            if all(map(wanted, found)):
                return found[0]
            assert time.monotonic() < deadline, (found, self.product.words())
            time.sleep(0.05)

    def update(self, asked: dict[str, Any]) -> dict[str, Any]:
        return self.product.update("p", asked, SECONDS)

    def lease(self, wait: float = 0, **capacity: int) -> list[dict[str, Any]]:
        body = {"worker": "w", "node": "n", "capacity": capacity, "wait": wait}
        with self.product.http("worker") as http:
            found: list[dict[str, Any]] = (
                http.post("/v1/leases", json=body).raise_for_status().json()["leases"]
            )
        return found

    def rollouts_before_run(self, count: int = 1, job: str = "j") -> None:
        """Bring rollouts of a new job to where they wait for a backend.

        They go back to Init after a while, because their node's worker is not heard of any more.
        """
        tasks = [{"id": f"t{number}", "prompt": "p"} for number in range(count)]
        self.product.job(job, "p", tasks, 1, agent="tools", tools=(), sampling={})
        leases = self.lease(init=count)
        assert len(leases) == count
        sandbox = {"provider": "process", "id": "s", "node": "n", "address": "unix:/nowhere"}
        results = [
            {key: one[key] for key in ("rollout", "token", "stage")}
            | {"sandbox": sandbox | {"id": f"s{number}"}}
            for number, one in enumerate(leases)
        ]
        with self.product.http("worker") as http:
            answer = http.post("/v1/leases/complete", json={"worker": "w", "results": results})
        assert {one["outcome"] for one in answer.json()["outcomes"]} == {"accepted"}, answer.text


@pytest.mark.nightly
def test_an_update_that_leaves_old_weights_in_tied_embeddings_is_refused(
    product: Product, tied_vllm: VllmServer, folders: dict[str, Path], expected: Callable[[str], list[float]]
) -> None:
    """vLLM answers 200 and has changed a part only. If a later release changes all, there is no trap."""
    pool = Pool(product, [tied_vllm], folders["first"])
    # One of them may be leased as soon as the first refused weights have been taken back.
    pool.rollouts_before_run(2)
    assert measured(tied_vllm) == pytest.approx(expected("first"), abs=TOLERANCE)

    # Old tokens and new ones in an answer of this server could not be distinguished.
    with product.http() as http:
        answer = http.post("/v1/backendpools/p/weights", json=request("v0", folders["first"], mode="keep"))
    assert (answer.status_code, answer.json()["reason"]) == (409, "VersionsUnknown")
    assert tied_vllm.url in answer.json()["detail"]

    # Before any update it goes back to the folder that the server was started on.
    done = pool.update(request("v1", folders["second"]))
    if pool.backend()["weights"] != "Current":
        leased = pool.lease(run=1)
        assert leased == [] or pool.backend()["weights"] == "Current"
    refused(done, tied_vllm)
    assert pool.status()["policyVersion"] == ""
    back = pool.until(lambda one: bool(one["weights"] == "Current"))
    assert (back["policyVersion"], tied_vllm.version()) == ("default", "default")
    assert measured(tied_vllm) == pytest.approx(expected("first"), abs=TOLERANCE)

    # After one that succeeded it goes back to its weights.
    done = pool.update(request("v2", folders["first"]))
    assert (done["state"], done["verified"], done["verifiedBy"]) == ("Succeeded", True, "transformers"), done
    refused(pool.update(request("v3", folders["second"])), tied_vllm)
    assert pool.status()["policyVersion"] == "v2"
    back = pool.until(lambda one: bool(one["weights"] == "Current"))
    assert (back["policyVersion"], tied_vllm.version()) == ("v2", "v2")
    assert measured(tied_vllm) == pytest.approx(expected("first"), abs=TOLERANCE)

    # Where those cannot be had any more, the server samples nothing and waits for its restart.
    pool.rollouts_before_run(job="waiting")
    hidden = folders["first"].with_name("hidden")
    folders["first"].rename(hidden)
    try:
        refused(pool.update(request("v4", folders["second"])), tied_vllm)
        stopped = pool.until(lambda one: bool(one["restartRequested"]))
    finally:
        hidden.rename(folders["first"])
    assert (stopped["weights"], pool.status()["policyVersion"]) == ("Failed", "v2")
    assert "restart it" in stopped["message"]
    assert tied_vllm.call("/is_paused", method="GET")["is_paused"]
    assert pool.lease(run=1) == []
    tied_vllm.heal()  # A restart would do this.
    pool.until(lambda one: bool(one["weights"] == "Current"))
    assert tied_vllm.version() == "v2"
    # The check that the server is ready again may come after its weights are.
    pool.rollouts_before_run(job="restarted")
    deadline = time.monotonic() + SECONDS
    while not (leases := pool.lease(run=1, wait=20)):
        assert time.monotonic() < deadline, pool.status()
    assert len(leases) == 1, pool.status()
    (leased,) = leases
    assert leased["backend"]["policy_version"] == "v2"


def refused(done: dict[str, Any], server: VllmServer) -> None:
    """Check that the update failed, and says how far off which server was, and from what."""
    assert done["state"] == "Failed", done
    assert not done["verified"]
    assert server.url in done["message"]
    assert "transformers" in done["message"]
    found = re.search(r"up to (\S+) nats", done["message"])
    assert found is not None, done["message"]
    assert float(found[1]) > 0.1


@pytest.mark.nightly
def test_an_adapter_is_loaded_and_replaced(
    product: Product, tied_vllm: VllmServer, folders: dict[str, Path], expected: Callable[[str], list[float]]
) -> None:
    assert {row.name: row.state for row in checks(probed(tied_vllm.url, SERVED))}["adapters"] == "good"
    pool = Pool(product, [tied_vllm], folders["first"])
    pool.rollouts_before_run()
    lora = {"source": {"lora": {"name": "tuned", "path": str(folders["adapter"])}}}
    asked = request("v1", folders["adapter"], reference=reference(expected("merged"))) | lora
    with product.http() as http:
        answer = http.post("/v1/backendpools/p/weights", json=asked)
    assert (answer.status_code, answer.json()["reason"]) == (409, "ModelNameChanges")
    done = pool.update(asked | {"inFlight": "restart"})
    assert (done["state"], done["verified"], done["verifiedBy"]) == ("Succeeded", True, "reference"), done
    assert measured(tied_vllm, "tuned") == pytest.approx(expected("merged"), abs=TOLERANCE)
    assert measured(tied_vllm) == pytest.approx(expected("first"), abs=TOLERANCE)
    (leased,) = pool.lease(run=1)
    assert (leased["backend"]["policy_version"], leased["backend"]["model"]) == ("v1", "tuned")
    # The same name comes again, in place, while rollouts continue.
    done = pool.update(asked | {"policyVersion": "v2"})
    assert (done["state"], done["verified"]) == ("Succeeded", True), done
    # This adapter is not the one that the caller means.
    wrong = asked | {"policyVersion": "v3", "reference": reference(expected("first"))}
    done = pool.update(wrong)
    assert done["state"] == "Failed"
    assert "the caller's" in done["message"]


def test_loaded_weights_are_compared_with_transformers_or_the_caller(
    product: Product,
    vllm_servers: list[VllmServer],
    folders: dict[str, Path],
    expected: Callable[[str], list[float]],
) -> None:
    pool = Pool(product, vllm_servers, folders["a"])
    done = pool.update(request("v1", folders["b"]))
    assert (done["state"], done["verified"], done["verifiedBy"]) == ("Succeeded", True, "transformers"), done
    assert [part["maxDifference"] < TOLERANCE for part in done["backends"]] == [True, True]
    done = pool.update(request("v2", folders["a"], reference=reference(expected("a"))))
    assert (done["state"], done["verified"], done["verifiedBy"]) == ("Succeeded", True, "reference"), done
    # This is not what the caller meant: the weights before are loaded again, and verified as they were then.
    done = pool.update(request("v3", folders["b"], reference=reference(expected("a"))))
    assert done["state"] == "Failed"
    assert "the caller's" in done["message"]
    pool.until(lambda one: bool(one["weights"] == "Current" and one["policyVersion"] == "v2"))
    assert pool.status()["policyVersion"] == "v2"
    for server in vllm_servers:
        assert server.version() == "v2"
        assert measured(server) == pytest.approx(expected("a"), abs=TOLERANCE)


@pytest.mark.parametrize(
    ("mode", "tokens"),
    [
        pytest.param("abort", 3500, marks=pytest.mark.nightly),
        pytest.param("wait", 800, marks=pytest.mark.nightly),
        ("keep", 1500),
    ],
)
def test_a_request_in_flight(
    product: Product,
    vllm_servers: list[VllmServer],
    folders: dict[str, Path],
    expected: Callable[[str], list[float]],
    mode: str,
    tokens: int,
) -> None:
    """A server reports on the tokens of one long answer, in the middle of which its weights changed."""
    server = vllm_servers[0]
    pool = Pool(product, [server], folders["a"])
    # The caller's references are given, so the update begins at once.
    old, new = (
        request(version, folders[name], reference=reference(expected(name)))
        for version, name in (("old", "a"), ("new", "b"))
    )
    assert pool.update(old)["verified"]
    sampling = {"max_tokens": tokens, "temperature": 1.0, "ignore_eos": True, "logprobs": 0}
    body = {"model": SERVED, "token_ids": IDS, "sampling_params": sampling}
    with ThreadPoolExecutor(2) as threads:
        # A quick server would have answered before the update begins.
        with server.slowed(0.25):
            asked = threads.submit(server.call, "/inference/v1/generate", body, seconds=SECONDS)
            deadline = time.monotonic() + SECONDS
            while server.metric("vllm:num_requests_running") < 1:
                assert time.monotonic() < deadline
                time.sleep(0.02)
            updating = threads.submit(pool.update, new | {"mode": mode})
            if mode == "wait":
                # The update has begun, so the rest of the answer, for which it waits, may come at full speed.
                pool.until(lambda one: bool(one["weights"] == "Updating" or one["policyVersion"] == "new"))
            else:
                updating.result(SECONDS)
        done = updating.result(SECONDS)
        choice = asked.result(SECONDS)["choices"][0]
    assert (done["state"], done["verified"]) == ("Succeeded", True), done
    spans = [(one["version"], one["start"], one["end"]) for one in choice["weight_versions"]]
    ends = [0, *(end for _, _, end in spans)]
    assert [start for _, start, _ in spans] == ends[:-1]
    assert ends[-1] == len(choice["token_ids"])
    versions = [version for version, _, _ in spans]
    if mode == "abort":
        assert (choice["finish_reason"], versions) == ("abort", ["old"])
        assert 0 < ends[-1] < tokens
    elif mode == "wait":
        assert (choice["finish_reason"], versions, ends[-1]) == ("length", ["old"], tokens)
    else:
        # Between loading and verification the label is one that no trajectory takes tokens under.
        assert versions in (["old", "unverified:new", "new"], ["old", "new"])
        assert (choice["finish_reason"], ends[-1]) == ("length", tokens)
