"""What the operator may do, as the API server sees it: the chart's rules, and nothing beyond."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.installedchart import Installation

pytestmark = pytest.mark.kubernetes

MAY = [
    ("list", "rolloutjobs.rollyard.dev"),
    ("patch", "rolloutjobs.rollyard.dev/status"),
    ("patch", "backendpools.rollyard.dev/status"),
    ("create", "pods"),
    ("delete", "pods"),
    ("watch", "pods"),
    ("create", "services"),
    ("get", "configmaps"),
    ("create", "secrets"),
    ("create", "networkpolicies.networking.k8s.io"),
    ("list", "networkpolicies.networking.k8s.io"),
    ("create", "events"),
]
MAY_NOT = [
    ("list", "secrets"),
    ("watch", "secrets"),
    ("get", "secrets"),
    ("delete", "secrets"),
    ("patch", "secrets"),
    ("update", "secrets"),
    ("list", "configmaps"),
    ("delete", "configmaps"),
    ("create", "pods/exec"),
    ("create", "pods/attach"),
    ("create", "pods/portforward"),
    ("get", "pods/log"),
    ("patch", "pods/ephemeralcontainers"),
    ("create", "pods/eviction"),
    ("delete", "services"),
    ("delete", "networkpolicies.networking.k8s.io"),
    ("create", "serviceaccounts"),
    ("create", "serviceaccounts/token"),
    ("impersonate", "serviceaccounts"),
    ("create", "roles.rbac.authorization.k8s.io"),
    ("patch", "rolebindings.rbac.authorization.k8s.io"),
    ("escalate", "roles.rbac.authorization.k8s.io"),
    ("bind", "roles.rbac.authorization.k8s.io"),
    ("create", "deployments.apps"),
    ("create", "daemonsets.apps"),
    ("create", "jobs.batch"),
    ("create", "persistentvolumeclaims"),
    ("patch", "resourcequotas"),
    ("deletecollection", "pods"),
]
CLUSTER_MAY_NOT = [
    ("get", "nodes"),
    ("patch", "nodes"),
    ("get", "nodes/proxy"),
    ("list", "namespaces"),
    ("create", "namespaces"),
    ("delete", "namespaces"),
    ("create", "persistentvolumes"),
    ("patch", "customresourcedefinitions.apiextensions.k8s.io"),
    ("create", "clusterroles.rbac.authorization.k8s.io"),
    ("create", "clusterrolebindings.rbac.authorization.k8s.io"),
    ("create", "mutatingwebhookconfigurations.admissionregistration.k8s.io"),
    ("list", "pods"),
    ("list", "rolloutjobs.rollyard.dev"),
]


def may(installation: Installation, verb: str, what: str, namespace: str = "", name: str = "") -> bool:
    """Ask `kubectl auth can-i` as the operator's service account; without a namespace, in all of them."""
    where = ["-n", namespace] if namespace else ["--all-namespaces"]
    resource, _, subresource = what.partition("/")
    words = [f"{resource}/{name}" if name else resource]
    words += [f"--subresource={subresource}"] if subresource else []
    done = installation.cluster.run(
        "kubectl", "auth", "can-i", verb, *words, *where, f"--as={installation.service_account}"
    )
    answer = done.stdout.strip()
    assert answer in ("yes", "no"), done.stdout + done.stderr
    return answer == "yes"


def test_what_it_may(installation: Installation) -> None:
    assert [one for one in MAY if not may(installation, *one, installation.jobs)] == []


@pytest.mark.attack(
    "a stolen operator token reads Secrets",
    boundary="kubernetes",
    surface="operator's rights",
    stopped_by="it may create Secrets and read none; no verb that answers with one",
)
def test_what_it_may_not_in_the_namespaces_of_jobs(installation: Installation) -> None:
    assert [one for one in MAY_NOT if may(installation, *one, installation.jobs)] == []
    assert not may(installation, "get", "secrets", installation.jobs, "somebody-elses")


def test_what_it_may_not_elsewhere(installation: Installation) -> None:
    assert [one for one in CLUSTER_MAY_NOT if may(installation, *one)] == []
    for namespace in (installation.release, "default", "kube-system"):
        for one in (("get", "secrets"), ("create", "pods"), ("list", "rolloutjobs.rollyard.dev")):
            assert not may(installation, *one, namespace), (namespace, *one)


def test_no_rule_that_it_has_holds_a_wildcard(installation: Installation) -> None:
    """The check covers all rules that the cluster binds to its account."""
    cluster = installation.cluster
    account = installation.service_account.rsplit(":", 1)[1]
    bound = []
    for kind in ("rolebindings", "clusterrolebindings"):
        where = ["-A"] if kind == "rolebindings" else []
        columns = ("{.metadata.namespace}", "{.roleRef.kind}", "{.roleRef.name}")
        subjects = "{range .subjects[*]}{.kind}/{.namespace}/{.name} {end}"
        line = "{'\\t'}".join((*columns, subjects))
        form = f"jsonpath={{range .items[*]}}{line}{{'\\n'}}{{end}}"
        text = cluster.kubectl("get", kind, *where, "-o", form)
        for one in text.splitlines():
            namespace, role, name, whom = one.split("\t")
            if f"ServiceAccount/{installation.release}/{account}" in whom.split():
                bound.append((namespace, role, name))
    assert sorted(namespace for namespace, _, _ in bound) == sorted(installation.namespaces)
    for namespace, role, name in bound:
        rules = cluster.get(role, name, namespace)["rules"]
        assert rules
        for rule in rules:
            assert not any("*" in word for words in rule.values() for word in words), rule
            if "secrets" in rule["resources"]:
                assert rule["verbs"] == ["create"]
