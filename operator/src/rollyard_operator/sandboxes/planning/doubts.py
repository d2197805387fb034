"""The second look before a plan destroys what another operator may just have made.

Claims come from the control plane and pods from the cluster, and either view may be ahead of the other. This
matters only while a second operator is running: one that is being replaced, or one started by mistake.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, replace

from rollyard_operator.pods.observed_sandbox import ObservedSandbox
from rollyard_operator.sandboxes.planning.plan import LOST, SandboxPlan


@dataclass(frozen=True, slots=True)
class Doubts:
    """The parts of a plan that rely on something being missing."""

    lost: frozenset[str] = frozenset()
    """The ids of claims that are bound but have no pod."""
    orphans: frozenset[str] = frozenset()
    """The uids of pods that are to be deleted because their claims are unknown."""

    def __bool__(self) -> bool:
        return bool(self.lost or self.orphans)

    def __sub__(self, other: Doubts) -> Doubts:
        return Doubts(self.lost - other.lost, self.orphans - other.orphans)


def doubts_of(plan: SandboxPlan, claims: Collection[str], pods: Iterable[ObservedSandbox]) -> Doubts:
    """Return the parts of a plan that need a second look. This function is pure.

    Args:
        claims: The ids of the known claims.
        pods: The pods from which the plan was made.
    """
    strangers = {pod.uid for pod in pods if pod.claim and pod.claim not in claims}
    return Doubts(
        frozenset(fail.claim for fail in plan.fail if fail.trouble.reason == LOST),
        frozenset(delete.uid for delete in plan.delete if delete.uid in strangers),
    )


def without(plan: SandboxPlan, doubts: Doubts) -> SandboxPlan:
    """Return the plan without its doubtful parts. The next pass plans them again. This function is pure."""
    if not doubts:
        return plan
    return replace(
        plan,
        fail=tuple(fail for fail in plan.fail if fail.claim not in doubts.lost),
        delete=tuple(delete for delete in plan.delete if delete.uid not in doubts.orphans),
    )
