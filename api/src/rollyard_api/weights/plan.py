"""Plan what a server has to load to get to the wanted weights, from the rows of the updates alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollyard_crds.weights import WeightSource

from rollyard_api.storage.rows import WeightUpdateRow
from rollyard_api.weights import update_records


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """The sources that a server has to load to get to the wanted weights."""

    sources: tuple[WeightSource, ...] = ()
    """The sources in the order in which they are to be loaded."""
    problem: str = ""
    """The reason why the server cannot get to the weights, or an empty string if it can."""


def plan(
    row: WeightUpdateRow, chain: Sequence[WeightUpdateRow], label: str | None, *, begun: bool
) -> LoadPlan:
    """Return how a server gets from its weights to those of `row`.

    Args:
        row: The wanted update.
        chain: The updates that every backend had before it, the newest first.
        label: The server's own label of its weights. None means that it is unknown or not to be trusted.
        begun: Whether this update is in progress, which means that pushed weights are in the server.
    """
    sources: list[WeightSource] = []
    for update in (row, *chain):
        if label is not None and update.policy_version == label and update.id != row.id:
            break
        source = update_records.request_of(update).source
        if source.pushed:
            if update.id == row.id and begun:
                # Pushed weights are complete and need no earlier ones.
                break
            return LoadPlan(
                problem=f"weights {update.policy_version!r} were pushed by the trainer: push them again"
            )
        sources.append(source)
        if source.checkpoint is not None:
            break
    return LoadPlan(tuple(reversed(sources)))
