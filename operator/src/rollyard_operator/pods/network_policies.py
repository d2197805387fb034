"""What the NetworkPolicies of a namespace together permit a pod. This module is pure.

Policies add up: what one of them permits, no other can forbid. A foreign policy can therefore open the
network of a sandbox towards an address that none of the operator's checks tries.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rollyard_operator.kube.labels import Object

_NAMES = 3
"""The number of policies that one message names."""


def egress_trouble(policies: Iterable[Object], labels: Mapping[str, str], denied: bool) -> str:
    """Return why the policies do not keep a pod from sending, or an empty string if they do.

    Args:
        policies: All NetworkPolicies of the pod's namespace.
        labels: The labels of the pod.
        denied: Whether one of the policies must deny sending. False means that policies of other kinds may do
            so.
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
    # A policy without types applies to egress if it has egress rules.
    return "Egress" in types if types else bool(_spec(policy).get("egress"))


def _selects(selector: Mapping[str, Any] | None, labels: Mapping[str, str]) -> bool:
    """Return whether a label selector selects a pod. For safety, an unknown operator counts as a match."""
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
