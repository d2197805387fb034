"""A weight update that nothing can verify restarts no backend, and the pool serves by itself."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import httpx
from rollyard_testing.faults.yard import a_yard
from rollyard_testing.pace import patience

POOL = "/v1/backendpools/default"


def found_when(http: httpx.Client, path: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Return the document at this path once it is as wanted."""
    end = time.monotonic() + patience(60)
    while time.monotonic() < end:
        document: dict[str, Any] = http.get(path).raise_for_status().json()
        if holds(document):
            return document
        time.sleep(0.05)
    raise AssertionError(f"it did not come in time: {document}")


def conditions(pool: dict[str, Any]) -> dict[str, str]:
    return {one["type"]: one["status"] for one in pool["status"]["conditions"]}


def test_an_update_of_an_empty_pool_fails_on_the_first_backend_and_restarts_none() -> None:
    with a_yard("--replicas", "0") as yard:
        yard.start()
        with yard.http() as http:
            pool = found_when(http, POOL, lambda pool: "Ready" in conditions(pool))
            source = {"checkpoint": {"path": pool["spec"]["model"]}}
            body = {"policyVersion": "v1", "source": source, "requireVerified": True}
            begun = http.post(f"{POOL}/weights", json=body).raise_for_status().json()
            update = f"{POOL}/weights/{begun['id']}"
            waiting = http.get(update, params={"wait": 0.5}).json()
            assert (waiting["state"], waiting["message"][:19]) == ("Running", "waits for a backend")
            http.patch(POOL, json={"spec": {"replicas": 1}}).raise_for_status()
            # There is no reference, and transformers cannot read an ONNX folder.
            done = found_when(http, update, lambda update: update["state"] != "Running")
            assert (done["state"], done["verified"]) == ("Failed", False)
            assert "cannot be verified" in done["message"]
            pool = found_when(http, POOL, lambda pool: conditions(pool)["Ready"] == "True")
            assert conditions(pool)["Degraded"] == "False", "nothing was restarted"
            assert (pool["status"]["policyVersion"], pool["status"]["readyReplicas"]) == ("", 1)
