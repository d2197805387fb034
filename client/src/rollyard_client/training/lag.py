"""How many weight updates ago the tokens of a group were sampled."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollyard_crds.weights import WeightUpdate

    from rollyard_client.requests.results import Group


class WeightHistory:
    """The weights that a pool has had, by their policy version.

    Updates that failed do not count, because no token was kept that was sampled with their weights.

    Args:
        updates: The pool's weight updates, the newest first, as `Client.weight_updates` returns them.
    """

    def __init__(self, updates: Sequence[WeightUpdate]) -> None:
        held = [update.policy_version for update in updates if update.state != "Failed"]
        self.newest = held[0] if held else ""
        """The version of the newest weights, or "" before the first update."""
        self._oldest = len(held)
        # Weights that were loaded again have several updates, of which the newest counts.
        self._lags = {version: lag for lag, version in reversed(list(enumerate(held)))}

    def lag(self, versions: Iterable[str]) -> int:
        """Return the number of updates since the oldest of these versions, which is 0 if there are none.

        A version without an update is that of the servers' first weights, or one that is older than all
        updates which the control plane lists. It counts as older than all of them.
        """
        return max((self._lags.get(version, self._oldest) for version in versions), default=0)


def versions_of(group: Group) -> set[str]:
    """Return the policy versions of a group's sampled tokens."""
    found: set[str] = set()
    for trajectory in group.trajectories:
        for segment in trajectory.segments:
            found.update(segment.policy_versions)
    found.discard("")
    return found
