"""The calls about backend pools and the updates of their weights."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

# A model is imported when it is first used, because it takes a third of a second to build all of them.
import rollyard_crds as crds

from rollyard_client.call import Call, as_json, encode, nothing, segment
from rollyard_client.errors import Invalid
from rollyard_client.requests.jobs import placed, registered

if TYPE_CHECKING:
    import httpx
    from rollyard_crds.backendpool import BackendPool, BackendPoolStatus, BackendStatus
    from rollyard_crds.weights import WeightUpdate, WeightUpdateRequest

POOLS: Final = "/v1/backendpools"


def _pool(answer: httpx.Response) -> BackendPool:
    return crds.BackendPool.model_validate_json(answer.content)


def create_pool(manifest: BackendPool | Mapping[str, Any], namespace: str) -> Call[BackendPool]:
    """Return the call that creates a pool, in `namespace` if its manifest names none.

    Creating the same pool twice has no further effect.
    """
    return Call("POST", POOLS, _pool, body=encode(placed(manifest, namespace)))


def pools(namespace: str | None) -> Call[list[BackendPool]]:
    """Return the call that lists the pools of a namespace. None selects all namespaces."""

    def parse(answer: httpx.Response) -> list[BackendPool]:
        return [crds.BackendPool.model_validate(item) for item in as_json(answer)["items"]]

    return Call("GET", POOLS, parse, query={"namespace": namespace})


def pool(name: str, namespace: str) -> Call[BackendPool]:
    """Return the call that reads one pool with its backends."""
    return Call("GET", f"{POOLS}/{segment(name)}", _pool, query={"namespace": namespace})


def register_pool(manifest: BackendPool) -> Call[BackendPool]:
    """Return the call with which a driver registers a pool whose home is elsewhere."""
    meta, body = manifest.metadata, encode(registered(manifest))
    return Call("PUT", f"{POOLS}/{segment(meta.name)}", _pool, query={"namespace": meta.namespace}, body=body)


def patch_pool(name: str, namespace: str, spec: Mapping[str, Any]) -> Call[BackendPool]:
    """Return the call that changes a pool's spec by a merge patch (RFC 7386)."""
    path = f"{POOLS}/{segment(name)}"
    return Call("PATCH", path, _pool, query={"namespace": namespace}, body=encode({"spec": spec}))


def delete_pool(name: str, namespace: str) -> Call[None]:
    """Return the call that removes a pool."""
    path = f"{POOLS}/{segment(name)}"
    return Call("DELETE", path, nothing, query={"namespace": namespace}, idempotent=False)


def put_backends(name: str, namespace: str, backends: Sequence[BackendStatus]) -> Call[BackendPool]:
    """Return the call with which a driver reports all backends of a pool."""
    body = encode({"backends": [backend.to_json() for backend in backends]})
    return Call("PUT", f"{POOLS}/{segment(name)}/backends", _pool, query={"namespace": namespace}, body=body)


def put_pool_status(name: str, namespace: str, status: BackendPoolStatus) -> Call[BackendPool]:
    """Return the call with which a driver reports the status of a pool."""
    path = f"{POOLS}/{segment(name)}/status"
    return Call("PUT", path, _pool, query={"namespace": namespace}, body=encode(status.to_json()))


def pause_pool(name: str, namespace: str, mode: str, wait: float) -> Call[BackendPool]:
    """Return the call that pauses a pool. It waits up to `wait` seconds for the pool's servers."""
    query = {"namespace": namespace, "mode": mode, "wait": wait}
    return Call("POST", f"{POOLS}/{segment(name)}/pause", _pool, query=query, body=b"{}", wait=wait)


def resume_pool(name: str, namespace: str, wait: float) -> Call[BackendPool]:
    """Return the call that resumes a paused pool. It waits up to `wait` seconds for the pool's servers."""
    query = {"namespace": namespace, "wait": wait}
    return Call("POST", f"{POOLS}/{segment(name)}/resume", _pool, query=query, body=b"{}", wait=wait)


def tokenizer(name: str, namespace: str) -> Call[dict[str, Any]]:
    """Return the call that reads the hash of a pool's tokenizer."""
    return Call("GET", f"{POOLS}/{segment(name)}/tokenizer", as_json, query={"namespace": namespace})


def _update(answer: httpx.Response) -> WeightUpdate:
    return crds.WeightUpdate.model_validate_json(answer.content)


def adapter(lora: tuple[str, str] | Mapping[str, str] | None) -> dict[str, str] | None:
    """Return an adapter, given as a pair or with the names of its fields, as the call takes it.

    Raises:
        Invalid: It is neither.
    """
    if lora is None or isinstance(lora, Mapping):
        return None if lora is None else dict(lora)
    if not isinstance(lora, tuple) or len(lora) != 2 or not all(isinstance(part, str) for part in lora):
        raise Invalid(f"lora: must be a pair of the adapter's name and its folder (got {lora!r})")
    return {"name": lora[0], "path": lora[1]}


def update_weights(name: str, namespace: str, request: WeightUpdateRequest) -> Call[WeightUpdate]:
    """Return the call that begins a weight update."""
    # The call is idempotent: the same version from the same source is answered with the existing update.
    path, body = f"{POOLS}/{segment(name)}/weights", encode(request.to_json())
    return Call("POST", path, _update, query={"namespace": namespace}, body=body, wait=30.0)


def weight_updates(name: str, namespace: str) -> Call[list[WeightUpdate]]:
    """Return the call that lists a pool's weight updates, the newest first."""

    def parse(answer: httpx.Response) -> list[WeightUpdate]:
        return [crds.WeightUpdate.model_validate(item) for item in as_json(answer)["items"]]

    return Call("GET", f"{POOLS}/{segment(name)}/weights", parse, query={"namespace": namespace})


def weight_update(name: str, namespace: str, number: int, wait: float = 0.0) -> Call[WeightUpdate]:
    """Return the call that reads one weight update. It waits up to `wait` seconds for the update's end."""
    path = f"{POOLS}/{segment(name)}/weights/{number}"
    return Call("GET", path, _update, query={"namespace": namespace, "wait": wait}, wait=wait)
