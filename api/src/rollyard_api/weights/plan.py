"""What a server has to load to come to the weights that are wanted: pure, of the updates' rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rollyard_crds.weights import WeightSource

from rollyard_api.storage.rows import WeightUpdateRow
from rollyard_api.weights import update_records


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What a server needs to come to the desired weights."""

    sources: tuple[WeightSource, ...] = ()
    """To be loaded, in this order."""
    problem: str = ""
    """Why it cannot be brought there; empty: it can."""


def plan(
    row: WeightUpdateRow, chain: Sequence[WeightUpdateRow], label: str | None, *, begun: bool
) -> LoadPlan:
    """How a server comes from its weights to those of `row`.

    Args:
        row: the desired update.
        chain: the updates that every backend had before it, the newest first.
        label: what the server calls its weights; None: unknown, or not to be trusted.
        begun: this update is being made now, so that pushed weights are in the server.
    """
    sources: list[WeightSource] = []
    for update in (row, *chain):
        if label is not None and update.policy_version == label and update.id != row.id:
            break
        source = update_records.request_of(update).source
        if source.pushed:
            if update.id == row.id and begun:
                # Pushed weights are whole.
                break
            return LoadPlan(
                problem=f"weights {update.policy_version!r} were pushed by the trainer: push them again"
            )
        sources.append(source)
        if source.checkpoint is not None:
            break
    return LoadPlan(tuple(reversed(sources)))
