"""The CRDs on a real API server agree with the models, and are documented and comfortable."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import yaml
from rollyard_crds import ManifestError, parse, schema
from rollyard_testing.crds.bounds import beyond, rules
from rollyard_testing.crds.patches import merged
from rollyard_testing.kubernetes.podwatch import api_server
from rollyard_testing.pace import patience

if TYPE_CHECKING:
    from rollyard_testing.kubernetes.kubelab import Cluster

pytestmark = pytest.mark.kubernetes

CASES = yaml.safe_load((Path(__file__).parents[1] / "crds" / "cases.yaml").read_text())
GOOD: dict[str, dict[str, Any]] = {
    "RolloutJob": {"tasks": {"url": "file:///t.jsonl"}, "handler": "shell", "backendRef": {"name": "p"}},
    "BackendPool": {"model": "m"},
}


def manifest(kind: str, patch: dict[str, Any], name: str = "x") -> dict[str, Any]:
    return {
        "apiVersion": "rollyard.dev/v1alpha1",
        "kind": kind,
        "metadata": {"name": name},
        "spec": merged(GOOD[kind], copy.deepcopy(patch)),
    }


def dry_run(cluster: Cluster, document: dict[str, Any], namespace: str = "default") -> str:
    """Return why the API server refuses to create it; empty if it does not."""
    done = cluster.run(
        "kubectl", "create", "-n", namespace, "--dry-run=server", "--validate=strict", "-f", "-",
        input=json.dumps(document),
    )  # fmt: skip
    return "" if done.returncode == 0 else done.stderr


def refused_by_models(document: dict[str, Any]) -> bool:
    try:
        parse(document)
    except ManifestError:
        return True
    return False


@pytest.mark.parametrize("case", CASES["good"], ids=str)
def test_good_specs_are_taken_by_both(cluster: Cluster, case: dict[str, Any]) -> None:
    document = manifest(case["kind"], case["patch"])
    assert not refused_by_models(document)
    assert dry_run(cluster, document) == ""


@pytest.mark.parametrize("case", CASES["bad"], ids=str)
def test_bad_specs_are_refused_by_both(cluster: Cluster, case: dict[str, Any]) -> None:
    document = manifest(case["kind"], case["patch"])
    assert refused_by_models(document)
    said = dry_run(cluster, document)
    assert said
    # The API server names the field, too, or a rule whose text does.
    last = case["field"].replace("[0]", "").rsplit(".", 1)[-1]
    assert last in said, said


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with api_server(cluster.kubeconfig) as client:
        yield client


UNKNOWN = (
    *("color", "agent.maxturns", "stages.run.sandbox"),
    *("sandbox.template.initContainers", "sandbox.template.podSecurityContext"),
    *(
        f"template.podSecurityContext.{name}"
        for name in (
            "privileged",
            "runAsNonRoot",
            "seccompProfile",
            "appArmorProfile",
            "seLinuxOptions",
            "sysctls",
        )
    ),
    *(
        f"template.initContainers[0].{name}"
        for name in ("securityContext", "restartPolicy", "envFrom", "volumeDevices", "lifecycle")
    ),
    *("template.hostNetwork", "template.hostPID", "template.shareProcessNamespace"),
    *("template.serviceAccountName", "template.automountServiceAccountToken"),
)
"""The fields that only the models refuse: the API server takes an object without them."""


def told(answer: httpx.Response) -> list[tuple[str, str]]:
    """Return the field and the words of each cause for which the API server refuses something."""
    said = answer.json()
    assert said.get("kind") == "Status", f"taken: {json.dumps(said)[:200]}"
    assert answer.status_code == 422, said
    return [(one.get("field", ""), one["message"]) for one in said["details"]["causes"]]


@pytest.mark.attack(
    "a client that asks for no validation sends a field that would loosen the security of a pod",
    boundary="kubernetes",
    surface="`template` of a job or a pool",
    stopped_by="the API server drops what the schema does not have, at every depth",
)
def test_unknown_fields_are_dropped(http: httpx.Client) -> None:
    cases = [case for case in CASES["bad"] if case["field"] in UNKNOWN]
    assert len(cases) == len(UNKNOWN)
    for case in cases:
        answer = posted(http, manifest(case["kind"], case["patch"]))
        assert answer.status_code == 201, answer.text
        *steps, last = case["field"].replace("[0]", ".0").split(".")
        inside = answer.json()["spec"]
        for step in steps:
            inside = inside.get(step, {}) if isinstance(inside, dict) else inside[int(step)]
        assert last not in inside, case


LARGEST_REQUEST_BYTES = 3 << 20
"""The default size above which an API server refuses a request unread."""


def posted(http: httpx.Client, document: dict[str, Any]) -> httpx.Response:
    """Return the API server's answer to its creation, which is tried only."""
    (plural,) = [one.plural for one in schema.RESOURCES if one.kind == document["kind"]]
    path = f"/apis/rollyard.dev/v1alpha1/namespaces/default/{plural}"
    return http.post(path, params={"dryRun": "All"}, json=document)


def offered(http: httpx.Client, document: dict[str, Any]) -> list[tuple[str, str]]:
    """Return why the API server refuses to create it."""
    return told(posted(http, document))


def changed(http: httpx.Client, kind: str, where: str, patch: dict[str, Any]) -> list[tuple[str, str]]:
    """Return why it refuses to change an existing object: `namespace/name`."""
    (plural,) = [one.plural for one in schema.RESOURCES if one.kind == kind]
    namespace, _, name = where.partition("/")
    path = f"/apis/rollyard.dev/v1alpha1/namespaces/{namespace}/{plural}/{name}"
    head = {"Content-Type": "application/merge-patch+json"}
    body = json.dumps({"spec": patch})
    return told(http.patch(path, params={"dryRun": "All"}, headers=head, content=body))


@pytest.mark.parametrize("kind", sorted(GOOD))
def test_every_bound_is_refused_for_its_field(http: httpx.Client, kind: str) -> None:
    """The models refuse it, too: see tests/crds."""
    seen = 0
    for field, bound, wrong in beyond(kind):
        seen += 1
        if len(json.dumps(wrong)) > LARGEST_REQUEST_BYTES:
            # A text of this size fits into a file of tasks, but into no request to an API server.
            assert bound == "maxLength"
            assert posted(http, wrong).status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE
            continue
        causes = offered(http, wrong)
        assert any(cause.startswith(field) for cause, _ in causes), (field, bound, causes)
    assert seen > 40


@pytest.fixture(scope="module")
def job(cluster: Cluster) -> tuple[str, dict[str, Any]]:
    """Return a job in a namespace in which no operator saw it before it was suspended: specs only."""
    namespace = cluster.namespace()
    sampling = {"samplesPerTask": 4, "dynamicSampling": {"targetGroups": 2}}
    reward = {"overlong": {"maxTokens": 4, "bufferTokens": 4}}
    hosts = {"eval": {"network": "allowlist", "allowedHosts": ["a.example.org"]}}
    steady = {"suspend": True, "placement": "local", "reward": reward, "stages": hosts, **sampling}
    document = manifest("RolloutJob", steady, "steady")
    cluster.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(document))
    return namespace, document


def patched(cluster: Cluster, namespace: str, patch: dict[str, Any]) -> str:
    done = cluster.run(
        "kubectl", "patch", "rj", "steady", "-n", namespace, "--type=merge", "--dry-run=server",
        "-p", json.dumps({"spec": patch}),
    )  # fmt: skip
    return "" if done.returncode == 0 else done.stderr


@pytest.mark.parametrize("case", CASES["immutable"], ids=str)
def test_changes_that_make_another_job_are_refused(
    cluster: Cluster, job: tuple[str, dict[str, Any]], case: dict[str, Any]
) -> None:
    said = patched(cluster, job[0], case["patch"])
    assert "immutable" in said, said
    assert next(iter(case["patch"])) in said


@pytest.fixture(scope="module")
def pool(cluster: Cluster) -> str:
    """Return a pool that has a placement: `namespace/name`."""
    namespace = cluster.namespace()
    document = manifest("BackendPool", {"replicas": 0, "placement": "local"}, "steady")
    cluster.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(document))
    return f"{namespace}/steady"


def test_every_rule_refuses_something(http: httpx.Client, job: tuple[str, dict[str, Any]], pool: str) -> None:
    """Every CEL rule is broken by one of the cases above: each was seen to refuse, at its field."""
    broken: dict[str, list[tuple[str, str]]] = {kind: [] for kind in GOOD}
    for case in CASES["bad"]:
        if case["field"] not in UNKNOWN:
            broken[case["kind"]] += offered(http, manifest(case["kind"], case["patch"]))
    hosts = ({"allowedHosts": ["b.example.org"]}, {"allowedHosts": None, "network": None})
    further = [{"stages": {"eval": change}} for change in hosts]
    for patch in [*(case["patch"] for case in CASES["immutable"]), *further]:
        broken["RolloutJob"] += changed(http, "RolloutJob", f"{job[0]}/steady", patch)
    for placement in ("slurm", None):
        broken["BackendPool"] += changed(http, "BackendPool", pool, {"placement": placement})
    for kind, causes in broken.items():
        refused = {
            (path, message)
            for path, message in rules(kind)
            if any(field == path and message in said for field, said in causes)
        }
        assert rules(kind) - refused == set(), causes


@pytest.mark.parametrize("case", CASES["mutable"], ids=str)
def test_changes_that_a_job_takes(
    cluster: Cluster, job: tuple[str, dict[str, Any]], case: dict[str, Any]
) -> None:
    assert patched(cluster, job[0], case["patch"]) == ""


@pytest.mark.parametrize("kind", sorted(GOOD))
def test_status_on_the_main_endpoint_is_ignored(cluster: Cluster, kind: str) -> None:
    namespace = cluster.namespace()
    document = manifest(kind, {"placement": "local"} if kind == "RolloutJob" else {"replicas": 0}, "told")
    document["status"] = {"observedGeneration": 7}
    cluster.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(document))
    assert cluster.get(kind, "told", namespace).get("status", {}).get("observedGeneration") != 7
    forged = json.dumps({"status": {"observedGeneration": 8}})
    cluster.kubectl("patch", kind, "told", "-n", namespace, "--type=merge", "-p", forged)
    assert cluster.get(kind, "told", namespace).get("status", {}).get("observedGeneration") != 8
    cluster.kubectl(
        "patch", kind, "told", "-n", namespace, "--type=merge", "--subresource=status",
        "-p", json.dumps({"status": {"observedGeneration": 9}}),
    )  # fmt: skip
    assert cluster.get(kind, "told", namespace)["status"]["observedGeneration"] == 9


def fields(node: dict[str, Any], path: str = "") -> list[str]:
    found = [path] if path else []
    for name, child in node.get("properties", {}).items():
        if path or name in ("spec", "status"):
            found += fields(child, f"{path}.{name}")
    if isinstance(node.get("items"), dict):
        found += [inner for inner in fields(node["items"], path) if inner != path]
    return found


@pytest.mark.parametrize("resource", schema.RESOURCES, ids=lambda resource: resource.kind)
def test_every_field_is_explained(cluster: Cluster, resource: schema.Resource) -> None:
    """`kubectl explain` has a description of each field, and knows no field without one."""
    (version,) = schema.crd(resource)["spec"]["versions"]
    root = version["schema"]["openAPIV3Schema"]
    paths = fields(root)
    assert len(paths) > 30
    # There is one call for each level that holds fields, instead of one for each field.
    parents = {path.rsplit(".", 1)[0] for path in paths}
    seen: set[str] = set()
    for parent in sorted(parents):
        text = cluster.kubectl("explain", f"{resource.plural}{parent}")
        lines = text.split("FIELDS:\n", 1)[1].splitlines()
        for number, line in enumerate(lines):
            if line.startswith("  ") and not line.startswith("   ") and "<" in line:
                name = line.split()[0]
                seen.add(f"{parent}.{name}")
                below = next((text for text in lines[number + 1 :] if text.strip()), "")
                enum = [text for text in lines[number + 1 : number + 3] if text.startswith("  enum:")]
                following = lines[number + 2] if enum else below
                if parent:
                    assert following.startswith("    "), f"{parent}.{name}: {line}"
                    assert "<no description>" not in following, f"{parent}.{name}"
    assert set(paths) <= seen


def test_names_and_columns(cluster: Cluster, job: tuple[str, dict[str, Any]]) -> None:
    namespace, _ = job
    pool = manifest("BackendPool", {"replicas": 0}, "pool")
    cluster.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(pool))
    for words, header in (
        (["rj"], "NAME FINISHED PHASE REASON SUCCEEDED FAILED TOTAL REWARD AGE"),
        (["rolloutjob", "-o", "wide"], "HANDLER POOL PLACEMENT INIT RUN EVAL MESSAGE"),
        (["bp"], "NAME READY REASON AGE"),
        (["backendpools", "-o", "wide"], "ENGINE MODEL"),
    ):
        shown = cluster.kubectl("get", *words, "-n", namespace).splitlines()[0]
        assert header in " ".join(shown.split())
    both = cluster.kubectl("get", "rollyard", "-n", namespace, "-o", "name").split()
    assert both == ["backendpool.rollyard.dev/pool", "rolloutjob.rollyard.dev/steady"]


def test_a_pool_is_scaled_by_kubectl(cluster: Cluster) -> None:
    namespace = cluster.namespace()
    pool = manifest("BackendPool", {"replicas": 0}, "pool")
    cluster.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(pool))
    assert cluster.kubectl("scale", "bp/pool", "--replicas=3", "-n", namespace, "--dry-run=server")
    done = cluster.run("kubectl", "scale", "bp/pool", "--replicas=-1", "-n", namespace)
    assert done.returncode != 0


def test_both_outcomes_can_be_waited_for(cluster: Cluster) -> None:
    namespace = cluster.namespace()
    for outcome in ("Succeeded", "Failed"):
        name = outcome.lower()
        document = manifest("RolloutJob", {"placement": "local"}, name)
        cluster.kubectl("create", "-n", namespace, "-f", "-", input=json.dumps(document))
        now = "2030-01-01T00:00:00Z"
        told = {"status": "True", "reason": "Done", "message": "", "lastTransitionTime": now}
        # kubectl does not accept a condition of an older generation.
        kinds = ["Finished", outcome, *(["Complete"] if outcome == "Succeeded" else [])]
        conditions = [{"type": kind, "observedGeneration": 1, **told} for kind in kinds]
        cluster.kubectl(
            "patch", "rj", name, "-n", namespace, "--type=merge", "--subresource=status",
            "-p", json.dumps({"status": {"conditions": conditions}}),
        )  # fmt: skip
        for condition in kinds:
            cluster.kubectl(
                "wait", f"--for=condition={condition}", f"rj/{name}", "-n", namespace,
                f"--timeout={patience(120):.0f}s",
            )  # fmt: skip
    done = cluster.run(
        "kubectl", "wait", "--for=condition=Succeeded", "rj/failed", "-n", namespace, "--timeout=1s"
    )
    assert "timed out" in done.stderr
