"""Real vLLM in a pod for demo-kubernetes, from an image or mounted from this machine."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from demos import ROOT, DemoFailed
from vllm_cpu_build import CPU_ARGUMENTS, CPU_ENVIRONMENT

MANIFEST = ROOT / "examples" / "kubernetes" / "vllm.yaml"
LIBRARIES = "/opt/vllm-libraries"
CPU_RESOURCES = {"requests": {"cpu": "200m", "memory": "2Gi"}, "limits": {"memory": "6Gi"}}
_CLOSED = Path("/root")
"""The folder that images close to other users. A mount below it needs a mount in its own place."""
_C_LIBRARY = ("libc.so", "libm.so", "libdl.so", "libpthread.so", "librt.so", "libutil.so", "libresolv.so")
_DESCRIBE = """
import importlib.metadata as m, json, sys
names = {(d.metadata["Name"] or "").lower(): d.version for d in m.distributions()}
print(json.dumps({
    "prefix": sys.prefix, "base": sys.base_prefix,
    "cpu": "vllm-cpu" in names or names.get("torch", "").endswith("+cpu"),
}))
"""


class VllmUnusable(DemoFailed):
    """There is no vLLM for the pod; the text says why."""


@dataclass(frozen=True, slots=True)
class FromImage:
    """The vLLM of an image."""

    image: str
    gpus: int

    def __str__(self) -> str:
        return self.image

    def apply_to(self, spec: dict[str, Any], engine_image: str) -> None:
        """Change the pool's spec so that it runs this vLLM."""
        spec["template"]["image"] = self.image
        if self.gpus:
            spec["engine"]["resources"] = {"gpu": self.gpus}
            return
        spec["engine"].pop("resources")
        spec["engine"]["args"] = list(CPU_ARGUMENTS)
        spec["engine"]["env"] = dict(CPU_ENVIRONMENT)
        spec["template"]["resources"] = CPU_RESOURCES


@dataclass(frozen=True, slots=True)
class Mounted:
    """This machine's environment with vLLM's CPU build, mounted into a pod at the same paths."""

    python: Path
    folders: tuple[Path, ...]
    """The environment, and the folders that its Python consists of."""
    libraries: Path
    """The folder with this machine's libraries that it needs, for an image that may lack them."""

    def __str__(self) -> str:
        return "vLLM of this machine, mounted"

    @property
    def host_paths(self) -> tuple[str, ...]:
        """Return what the installation has to permit to be mounted, in `jobs.allow.hostPath`."""
        return tuple(str(folder) for folder in (*self.folders, self.libraries))

    def apply_to(self, spec: dict[str, Any], engine_image: str) -> None:
        """Change the pool's spec so that it runs this vLLM in an image of Rollyard's."""
        engine, template = spec["engine"], spec["template"]
        engine.pop("resources")
        engine["command"] = [str(self.python), "-m", "vllm.entrypoints.openai.api_server"]
        engine["args"] = list(CPU_ARGUMENTS)
        engine["env"] = {**CPU_ENVIRONMENT, "LD_LIBRARY_PATH": LIBRARIES}
        template["image"] = engine_image
        template["resources"] = CPU_RESOURCES
        if any(folder.is_relative_to(_CLOSED) for folder in self.folders):
            template["volumes"].append({"name": "home", "emptyDir": {}})
            template["volumeMounts"].append({"name": "home", "mountPath": str(_CLOSED)})
        mounts = {str(folder): folder for folder in self.folders} | {LIBRARIES: self.libraries}
        for number, (path, folder) in enumerate(mounts.items()):
            host = {"path": str(folder), "type": "Directory"}
            template["volumes"].append({"name": f"vllm-{number}", "hostPath": host})
            template["volumeMounts"].append({"name": f"vllm-{number}", "mountPath": path, "readOnly": True})


def mounted(python: Path, libraries: Path) -> Mounted:
    """Return what a pod needs of this machine to run the vLLM of `python`. Libraries are copied to a new
    folder.

    Raises:
        VllmUnusable: The vLLM is not a CPU build, or lies where nothing can be mounted.
    """
    if shutil.which("ldd") is None:
        raise VllmUnusable("ldd is not on PATH, which says what libraries vLLM needs")
    python = Path(os.path.abspath(python))
    done = subprocess.run([python, "-c", _DESCRIBE], capture_output=True, text=True)
    if done.returncode != 0:
        raise VllmUnusable(f"{python} does not run: {done.stderr.strip()[-300:]}")
    build = json.loads(done.stdout)
    if not build["cpu"]:
        raise VllmUnusable(f"{python} has vLLM for GPUs, which kube-lab's pods have not")
    folders = {Path(build["prefix"]), Path(build["base"])}
    program = python
    while program.is_symlink():
        program = Path(os.path.normpath(program.parent / os.readlink(program)))
        folders.add(program.parent.parent)
    # A folder within another one is mounted with it.
    outer = tuple(folder for folder in sorted(folders) if folders.isdisjoint(folder.parents))
    if Path("/") in outer:
        raise VllmUnusable(f"the Python of {python} lies in /, which cannot be mounted")
    shutil.rmtree(libraries, ignore_errors=True)
    libraries.mkdir(parents=True)
    for name, path in _needed(program, Path(build["prefix"]), Path(build["base"])).items():
        if not any(path.is_relative_to(folder) for folder in outer):
            shutil.copy(path, libraries / name)
    return Mounted(python, outer, libraries)


def _needed(program: Path, prefix: Path, base: Path) -> dict[str, Path]:
    """Return the libraries that the environment is linked to, by name.

    Every image has the C library itself.
    """
    modules = [path for path in base.glob("lib*/python3*/lib-dynload/*.so") if "tkinter" not in path.name]
    files = [program, *modules, *(path for path in prefix.rglob("*.so*") if path.is_file())]
    # It complains about files that are not programs, and then ends with 1.
    done = subprocess.run(["ldd", *files], capture_output=True, text=True)
    libraries = {}
    for line in done.stdout.splitlines():
        words = line.split()
        if len(words) >= 3 and words[1] == "=>" and words[2].startswith("/"):
            name = words[0]
            if "/" not in name and not name.startswith((*_C_LIBRARY, "ld-linux")):
                libraries[name] = Path(words[2])
    return libraries


def pool_manifest(vllm: FromImage | Mounted, engine_image: str) -> dict[str, Any]:
    """Return the example's pool, as this run has it."""
    document: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    spec = document["spec"]
    spec["template"]["volumes"][0]["image"]["reference"] = engine_image
    vllm.apply_to(spec, engine_image)
    return document
