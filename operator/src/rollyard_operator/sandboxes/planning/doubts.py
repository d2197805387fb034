"""What is looked at once more before a plan destroys what another operator may just have made.

Claims come from the control plane and pods from the cluster; either may be ahead of the other. That matters
only where somebody else works beside us: an operator that is being replaced, or a second one by mistake.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from rollyard_operator.sandboxes.planning.plan import LOST, ObservedSandbox, SandboxPlan


@dataclass(frozen=True, slots=True)
class Doubts:
    """Parts of a plan that stand on something being missing."""

    lost: frozenset[str] = frozenset()
    """Claims that are bound, and without a pod."""
    orphans: frozenset[str] = frozenset()
    """Uids of pods, to be deleted, of claims that nobody knows."""

    def __bool__(self) -> bool:
        return bool(self.lost or self.orphans)

    def __sub__(self, other: Doubts) -> Doubts:
        return Doubts(self.lost - other.lost, self.orphans - other.orphans)


def doubts_of(plan: SandboxPlan, claims: Collection[str], pods: Iterable[ObservedSandbox]) -> Doubts:
    """What of a plan is to be looked at again. Pure.

    Args:
        claims: ids of those that are known.
        pods: those that the plan was made from.
    """
    strangers = {pod.uid for pod in pods if pod.claim and pod.claim not in claims}
    return Doubts(
        frozenset(fail.claim for fail in plan.fail if fail.trouble.reason == LOST),
        frozenset(delete.uid for delete in plan.delete if delete.uid in strangers),
    )


def without(plan: SandboxPlan, doubts: Doubts) -> SandboxPlan:
    """The plan without what is doubtful, which the next pass plans again. Pure."""
    if not doubts:
        return plan
    return replace(
        plan,
        fail=tuple(fail for fail in plan.fail if fail.claim not in doubts.lost),
        delete=tuple(delete for delete in plan.delete if delete.uid not in doubts.orphans),
    )
