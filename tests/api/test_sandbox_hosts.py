"""Which hosts a job may open to its sandboxes: those that the installer lists, and by default none."""

from __future__ import annotations

from typing import Any

import pytest
from rollyard_testing.api.plane import make_manifest, serving

PYPI = ["pypi.org", "files.pythonhosted.org"]


def _with(manifest: dict[str, Any], hosts: list[str]) -> dict[str, Any]:
    sandbox = {"network": "allowlist", "allowedHosts": hosts}
    return manifest | {"spec": manifest["spec"] | {"sandbox": sandbox}}


HOSTS_OF_AN_AUTHOR = pytest.mark.attack(
    "an author opens the network, or more of it than the installer allows",
    boundary="network",
    surface="`spec.sandbox.allowedHosts`",
    stopped_by="the installer's list, empty at first, must contain each entry; a registered job cannot "
    "change its own",
)


@HOSTS_OF_AN_AUTHOR
async def test_no_host_is_allowed_unless_the_installer_lists_it(served: Any) -> None:
    answer = await served.admin.post("/v1/rolloutjobs", json=_with(make_manifest(), PYPI))
    assert answer.status_code == 422
    problem = answer.json()
    assert problem["reason"] == "HostsNotAllowed"
    assert [error.partition(":")[0] for error in problem["errors"]] == [
        "spec.sandbox.allowedHosts[0]",
        "spec.sandbox.allowedHosts[1]",
    ]
    assert "--allow-sandbox-host" in problem["detail"]
    assert (await served.admin.get("/v1/rolloutjobs")).json()["items"] == []


LISTS = [
    (("pypi.org", "*.pythonhosted.org"), PYPI, []),
    (("*",), [*PYPI, "*.example.org"], []),
    (("*",), ["example.org:22"], [0]),
    (("pypi.org",), ["*.pypi.org", "pypi.org", "pypi.org:8080"], [0, 2]),
    (("*.example.org",), ["example.org", "a.example.org", "a.example.org.evil.net"], [0, 2]),
]


@HOSTS_OF_AN_AUTHOR
@pytest.mark.parametrize(("allowed", "hosts", "refused"), LISTS)
async def test_a_job_names_hosts_of_the_list_only(
    settings: Any, allowed: tuple[str, ...], hosts: list[str], refused: list[int]
) -> None:
    async with serving(settings, allow_sandbox_hosts=allowed) as served:
        manifest = _with(make_manifest(), hosts)
        answer = await served.admin.post("/v1/rolloutjobs", json=manifest)
        assert answer.status_code == (422 if refused else 201), answer.text
        if refused:
            shown = [error.partition(":")[0] for error in answer.json()["errors"]]
            assert shown == [f"spec.sandbox.allowedHosts[{place}]" for place in refused]
            assert all(", ".join(allowed) in error for error in answer.json()["errors"])
        else:
            assert answer.json()["spec"]["sandbox"]["allowedHosts"] == hosts


def _for_eval(manifest: dict[str, Any], hosts: list[str]) -> dict[str, Any]:
    stages = {"eval": {"network": "allowlist", "allowedHosts": hosts}}
    return manifest | {"spec": manifest["spec"] | {"stages": stages}}


HOSTS_OF_EVAL = pytest.mark.attack(
    "an author opens Eval by the list for Run, or adds hosts to a registered job",
    boundary="network",
    surface="`stages.eval.allowedHosts`",
    stopped_by="a list of its own, empty at first; a registered job cannot change its own",
)


@HOSTS_OF_EVAL
async def test_hosts_for_eval_have_a_list_of_their_own(settings: Any) -> None:
    """Who lets policies reach a host has not agreed that hidden tests are sent there."""
    allowed = {"allow_sandbox_hosts": ("*",), "allow_eval_hosts": ("pypi.org",)}
    async with serving(settings, **allowed) as served:
        answer = await served.admin.post("/v1/rolloutjobs", json=_for_eval(make_manifest(), PYPI))
        assert (answer.status_code, answer.json()["reason"]) == (422, "HostsNotAllowed")
        assert answer.json()["errors"] == [
            "spec.stages.eval.allowedHosts[1]: files.pythonhosted.org is not allowed by the installer; "
            "allowed hosts: pypi.org"
        ]
        answer = await served.admin.post("/v1/rolloutjobs", json=_for_eval(make_manifest(), PYPI[:1]))
        assert answer.status_code == 201, answer.text


@pytest.mark.attack(
    "an author gives one, or learns where a mirror is",
    boundary="network",
    surface="pins of hosts",
    stopped_by="the control plane adds them to what workers read, and to nothing else",
)
async def test_only_workers_learn_where_a_host_is_pinned(settings: Any) -> None:
    pins = ("pypi.org=10.1.2.3", "*.pythonhosted.org=10.1.0.0/16")
    allowed = {"allow_sandbox_hosts": ("example.org", pins[0]), "allow_eval_hosts": pins}
    async with serving(settings, **allowed) as served:
        manifest = _for_eval(make_manifest("pinned"), PYPI)
        made = await served.admin.post("/v1/rolloutjobs", json=manifest)
        assert made.status_code == 201, made.text
        assert "10.1" not in made.text
        read = await served.worker.get("/v1/leases/job", params={"name": "pinned", "namespace": "default"})
        assert read.json()["spec"]["pinnedHosts"] == list(pins)
        refused = await served.admin.post("/v1/rolloutjobs", json=_for_eval(make_manifest("b"), ["a.org"]))
        assert "10.1" not in refused.text, "where hosts are is not told to authors"
        manifest["spec"]["pinnedHosts"] = ["a.org=10.0.0.1"]
        manifest["metadata"]["name"] = "own-pins"
        answer = await served.admin.post("/v1/rolloutjobs", json=manifest)
        assert answer.status_code == 422
        assert "pinnedHosts" in answer.text


@HOSTS_OF_AN_AUTHOR
async def test_a_driver_registers_no_other_hosts_either(served: Any) -> None:
    manifest = _with(make_manifest(), PYPI)
    manifest["metadata"]["annotations"] = {"rollyard.dev/object-uid": "u1"}
    answer = await served.driver.put("/v1/rolloutjobs/job", json={"manifest": manifest})
    assert (answer.status_code, answer.json()["reason"]) == (422, "HostsNotAllowed")


@HOSTS_OF_AN_AUTHOR
@HOSTS_OF_EVAL
async def test_a_job_that_is_registered_gets_no_hosts_later(settings: Any) -> None:
    async with serving(settings, allow_sandbox_hosts=("*",)) as served:
        manifest = make_manifest()
        manifest["metadata"]["annotations"] = {"rollyard.dev/object-uid": "u1"}
        assert (
            await served.driver.put("/v1/rolloutjobs/job", json={"manifest": manifest})
        ).status_code == 201
        for other in (_with(manifest, PYPI), _for_eval(manifest, PYPI)):
            changed = await served.driver.put("/v1/rolloutjobs/job", json={"manifest": other})
            assert changed.status_code == 409
        assert changed.json()["errors"] == ["spec.stages.eval.allowedHosts: differs and cannot be changed"]
