"""What the NetworkPolicies of a namespace say together about a pod. Pure.

Policies add up: what one of them permits no other takes back. So a policy of somebody else can open the
network of a sandbox, towards an address that no check of ours tries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollyard_operator.kube.labels import Object

_NAMES = 3
"""Policies that are named at once."""


def egress_trouble(policies: Iterable[Object], labels: Mapping[str, str], denied: bool) -> str:
    """Why a pod is not kept from sending; empty where it is, as far as policies tell.

    Args:
        policies: all NetworkPolicies of its namespace.
        labels: the pod's.
        denied: whether one of them has to deny it; False where other kinds of policies may do so.
    """
    about = [one for one in policies if _of_egress(one) and _selects(_spec(one).get("podSelector"), labels)]
    opening = sorted(one["metadata"]["name"] for one in about if _spec(one).get("egress"))
    if opening:
        shown = ", ".join(opening[:_NAMES]) + (", …" if len(opening) > _NAMES else "")
        return (
            f"NetworkPolicy {shown} permits sandboxes to send: policies add up; keep it from selecting pods "
            "with the label app.kubernetes.io/component=sandbox"
        )
    if denied and not about:
        return "no NetworkPolicy of this namespace keeps sandboxes from sending; it was deleted or changed"
    return ""


def _spec(policy: Object) -> Mapping[str, Any]:
    return policy.get("spec") or {}


def _of_egress(policy: Object) -> bool:
    types = _spec(policy).get("policyTypes")
    # Without types a policy is about egress where it has rules for it.
    return "Egress" in types if types else bool(_spec(policy).get("egress"))


def _selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Whether a label selector selects a pod. One that is not understood does, to be on the safe side."""
    selector = selector or {}
    wanted = selector.get("matchLabels") or {}
    if any(labels.get(key) != value for key, value in wanted.items()):
        return False
    return all(_matches(one, labels) for one in selector.get("matchExpressions") or ())


def _matches(expression: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    key, values = expression.get("key"), expression.get("values") or ()
    match expression.get("operator"):
        case "In":
            return key in labels and labels[str(key)] in values
        case "NotIn":
            return key not in labels or labels[str(key)] not in values
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
        case _:
            return True
