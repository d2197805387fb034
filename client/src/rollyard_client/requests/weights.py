"""The calls on weight updates of a pool."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

# A model is imported when it is first used, because it takes a third of a second to build all of them.
import rollyard_crds as crds

from rollyard_client.call import Call, as_json, encode, segment
from rollyard_client.errors import Invalid
from rollyard_client.requests.pools import POOLS

if TYPE_CHECKING:
    import httpx
    from rollyard_crds.weights import WeightUpdate, WeightUpdateRequest


def _update(answer: httpx.Response) -> WeightUpdate:
    return crds.WeightUpdate.model_validate_json(answer.content)


def adapter(lora: tuple[str, str] | Mapping[str, str] | None) -> dict[str, str] | None:
    """Return an adapter, given as a pair or with the names of its fields, as a weight update has it.

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
