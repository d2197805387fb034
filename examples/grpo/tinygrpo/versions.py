"""Policy versions: which update of the weights sampled each token, and how old it is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollyard import Group

from tinygrpo.errors import PolicyMismatch


@dataclass(frozen=True, slots=True)
class PolicyVersions:
    """The labels of one run: its name, a hyphen, and the number of updates."""

    run: str

    def label(self, update: int) -> str:
        """Return the label of the weights after so many updates; 0 stands for the first weights."""
        return f"{self.run}-{update}"

    def update(self, label: str) -> int:
        """Return the number of the update that a token's label names.

        Raises:
            PolicyMismatch: The label is not one of this run: somebody else updates the pool.
        """
        run, _, number = label.rpartition("-")
        if run != self.run or not number.isdecimal():
            raise PolicyMismatch(
                f"a token was sampled by the weights {label!r}, which this run ({self.run}) never pushed; "
                "does another trainer update the same pool?"
            )
        return int(number)

    def updates_of(self, group: Group) -> set[int]:
        """Return the updates that sampled the tokens of a group."""
        labels: set[str] = set()
        for trajectory in group.trajectories:
            for segment in trajectory.segments:
                labels.update(sampled(segment.policy_versions, segment.loss_mask))
        return {self.update(label) for label in labels}

    def lag(self, group: Group, newest: int) -> int:
        """Return by how many updates the oldest token of a group is behind `newest`.

        Raises:
            PolicyMismatch: A token carries a version that is not of this run, or was not pushed yet.
        """
        updates = self.updates_of(group) or {newest}
        if max(updates) > newest:
            raise PolicyMismatch(
                f"a token of group {group.group_id} carries update {max(updates)}, {newest} is the newest"
            )
        return newest - min(updates)


def sampled(versions: Iterable[str], mask: Iterable[int]) -> Iterable[str]:
    """Return the versions of the sampled tokens."""
    return (version for version, one in zip(versions, mask, strict=True) if one)
