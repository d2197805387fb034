"""Correct weights are accepted and wrong ones refused, in float32 and in bfloat16, without a restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rollyard_testing.pace import patience
from rollyard_testing.vllm.checker import Pass
from rollyard_testing.vllm.checkpoints import permuted, perturbed
from rollyard_testing.vllm.forward import Forward
from rollyard_testing.vllm.product import Product, a_product
from rollyard_testing.vllm.servers import VllmServer

pytestmark = pytest.mark.nightly

SECONDS = patience(180.0)
IDS = list(range(40, 104))
ALLOWED = {"float32": 0.1, "bfloat16": 0.5}


@pytest.fixture(scope="module")
def folders(vllm_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the first checkpoint of the servers, a later step, and that step with one layer permuted."""
    made = tmp_path_factory.mktemp("checkpoints")
    later = perturbed(vllm_model, made / "later")
    return {"first": vllm_model, "later": later, "permuted": permuted(later, made / "permuted")}


@pytest.fixture(params=["float32", "bfloat16"])
def served(
    request: pytest.FixtureRequest, start_vllm: Callable[..., VllmServer], folders: dict[str, Path]
) -> Iterator[tuple[str, VllmServer]]:
    """Yield a data type and a server that computes in it. The checkpoints themselves are float32."""
    if request.param == "float32":
        servers: list[VllmServer] = request.getfixturevalue("vllm_servers")
        yield request.param, servers[1]
        return
    server = start_vllm(folders["first"], 1, arguments=("--dtype", request.param))
    yield request.param, server
    server.stop()


@pytest.fixture
def product(vllm_python: Path) -> Iterator[Product]:
    """Yield a control plane that verifies with transformers."""
    with a_product("--verify-python", str(vllm_python)) as made:
        yield made


def status(product: Product) -> dict[str, Any]:
    with product.http() as http:
        found: dict[str, Any] = http.get("/v1/backendpools/p").raise_for_status().json()["status"]
    return found


def taken_back(product: Product, version: str, label: str) -> None:
    """Wait until the server has its earlier weights again, and see that nobody asked for its restart."""
    deadline = time.monotonic() + SECONDS
    while True:
        found = status(product)
        (backend,) = found["backends"]
        assert not backend.get("restartRequested"), found
        if backend["weights"] == "Current" and backend["policyVersion"] == label:
            break
        assert time.monotonic() < deadline, (found, product.words())
        time.sleep(0.05)
    assert found["policyVersion"] == version


def test_correct_weights_are_accepted_and_wrong_ones_are_refused(
    product: Product, served: tuple[str, VllmServer], folders: dict[str, Path], forward: Forward
) -> None:
    dtype, server = served
    pid = server.pid
    # The log of a server of this test alone is read from its start.
    skipped = len(server.log.read_bytes()) if dtype == "float32" else 0
    asked = [Pass("reference", IDS, 1.0, list(range(1, len(IDS))), [])]
    expected = {name: forward.logprobs(folders[name], asked)[0] for name in ("first", "later")}
    product.pool("p", [server.url], folders["first"])

    def update(version: str, folder: str, reference: str = "", **fields: Any) -> dict[str, Any]:
        body: dict[str, Any] = {
            "policyVersion": version,
            "source": {"checkpoint": {"path": str(folders[folder])}},
        }
        if reference:
            body["reference"] = {"promptIds": IDS, "logprobs": expected[reference], **fields}
        return product.update("p", body, SECONDS)

    def refused(done: dict[str, Any], allowed: float) -> None:
        assert done["state"] == "Failed", done
        assert f"{allowed:g} is allowed" in done["message"], done
        assert done["backends"][0]["maxDifference"] > allowed

    # Before any update has succeeded: back to the weights that the server was started with.
    refused(update("v1", "permuted", "later"), ALLOWED[dtype])
    taken_back(product, "", "default")
    refused(update("v1", "first", "later"), ALLOWED[dtype])
    taken_back(product, "", "default")

    for version, reference in (("v2", ""), ("v3", "later")):
        done = update(version, "later", reference)
        assert (done["state"], done["verified"]) == ("Succeeded", True), done
        assert done["backends"][0]["maxDifference"] <= ALLOWED[dtype]

    refused(update("v4", "permuted", "later"), ALLOWED[dtype])
    taken_back(product, "v3", "v3")
    refused(update("v4", "first", "later"), ALLOWED[dtype])
    taken_back(product, "v3", "v3")
    # A tolerance of the request counts, also where nothing can satisfy it; the rollback is not judged by it.
    refused(update("v4", "later", "later", tolerance=1e-9), 1e-9)
    taken_back(product, "v3", "v3")

    assert server.alive()
    assert server.pid == pid
    assert server.version() == "v3"
    # Probes, pauses, reloads and verifications are requests that vLLM has no reason to log as errors.
    log = server.log.read_bytes()[skipped:].decode(errors="replace")
    errors = [line for line in log.splitlines() if " ERROR " in line]
    assert errors == []
