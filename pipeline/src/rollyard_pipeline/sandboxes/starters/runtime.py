"""The injected Python: the parts of this machine that the exec server needs inside a sandbox.

Everything appears read-only below `/.rollyard`, and nothing appears at its own path, so neither a home
folder nor a checkout is visible:

    /.rollyard/python       the base installation of the Python that runs this worker
    /.rollyard/libs/<n>     folders with the shared libraries of this machine
    /.rollyard/site/<n>     the site-packages folders that hold the exec server's dependencies
    /.rollyard/lib          the exec server and ptyprocess, copied and compiled in advance: sandboxes are
                            read-only, so each would otherwise compile again what has no .pyc file
    /.rollyard/venv         a virtual environment over all of these, whose bin/python is a script
    /.rollyard/tools        a folder of the installer's with programs for all sandboxes, if there is one

Python starts through this machine's own dynamic loader with `--library-path` (ld.so(8)), which lets it run
in a root folder with another libc too. Its children do not inherit that.
"""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import os
import secrets
import shutil
import struct
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType
from typing import Final

from rollyard_crds.names import RUNTIME_PATH

from rollyard_pipeline.sandboxes.errors import SandboxStartFailed

INSIDE: Final = RUNTIME_PATH
PYTHON: Final = f"{INSIDE}/venv/bin/python"
COPIED: Final = ("rollyard_sandbox", "ptyprocess")
"""The exec server's own packages. Only their modules are copied, compiled in advance."""
_PACKAGES: Final = ("jupyter_client", "ipykernel", "IPython", "zmq", "traitlets", "tornado")
_PASSWD: Final = """root:x:0:0:root:/root:/bin/bash
sandbox:x:{uid}:{uid}:sandbox:/work:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUP: Final = "root:x:0:\ntty:x:5:\nsandbox:x:{uid}:\nnogroup:x:65534:\n"
_HOSTS: Final = "127.0.0.1 localhost sandbox\n::1 localhost\n"
TOOLS: Final = f"{INSIDE}/tools"
"""The path of the installer's folder with programs, such as harnesses."""
SANDBOX_UID: Final = 1000
EVAL_FOLDER: Final = f"{INSIDE}/eval"
"""The path at which the private place of an evaluation is mounted."""


@dataclass(frozen=True, slots=True)
class Runtime:
    """Host folders with their paths inside, and the files that were written for the runtime."""

    binds: tuple[tuple[str, str], ...]
    """Pairs of (path on this machine, path inside), mounted read-only."""
    etc: tuple[tuple[str, str], ...]
    """Generated /etc files, for sandboxes that use this machine's system."""
    argv: tuple[str, ...]
    """The command that starts Python inside, without a shell."""
    path: tuple[str, ...]
    """The folders for sys.path if Python is started without `site`."""


def base_python() -> Path:
    """Return the interpreter of the base installation, also if this one is in a virtual environment."""
    return Path(sys._base_executable).resolve()  # type: ignore[attr-defined]


def make_runtime(cache: Path, tools: Path | None = None) -> Runtime:
    """Collect what the running interpreter needs, and write the small files below `cache`.

    The files' folder is named by a hash of their content, which lets several workers share it.

    Args:
        tools: The installer's folder with programs for all sandboxes, or None.

    Raises:
        SandboxStartFailed: The exec server or one of its dependencies is not installed on this machine.
    """
    executable = base_python()
    python = f"{INSIDE}/python/{executable.relative_to(_prefix(executable))}"
    libs = _library_folders()
    site = _package_folders()
    inside_libs = [f"{INSIDE}/libs/{n}" for n in range(len(libs))]
    inside_site = [f"{INSIDE}/site/{n}" for n in range(len(site))]
    loader = program_loader(executable)
    command = [python]
    binds = [(str(_prefix(executable)), f"{INSIDE}/python")]
    binds += zip(map(str, libs), inside_libs, strict=True)
    binds += zip(map(str, site), inside_site, strict=True)
    if tools is not None:
        binds.append((str(tools), TOOLS))
    if loader is not None:
        binds.append((str(Path(loader).resolve()), f"{INSIDE}/loader"))
        paths = ":".join([f"{INSIDE}/python/lib", *inside_libs])
        command = [f"{INSIDE}/loader", "--library-path", paths, "--argv0", PYTHON, python]
    files = {
        **venv_files(python, command, [f"{INSIDE}/lib", *inside_site]),
        "etc/passwd": _PASSWD.format(uid=SANDBOX_UID),
        "etc/group": _GROUP.format(uid=SANDBOX_UID),
        "etc/hosts": _HOSTS,
        "etc/hostname": "sandbox\n",
    }
    origins: dict[str, Path] = {}
    for package in COPIED:
        installed = package_folder(package)
        for source in sorted(installed.rglob("*.py")):
            name = f"lib/{package}/{source.relative_to(installed)}"
            files[name], origins[name] = source.read_text(encoding="utf-8"), source
    folder = _write(cache, files, origins)
    binds += [(str(folder / name), f"{INSIDE}/{name}") for name in ("lib", "venv")]
    etc = tuple((str(folder / "etc" / name), f"/etc/{name}") for name in os.listdir(folder / "etc"))
    return Runtime(tuple(binds), etc, tuple(command), (f"{INSIDE}/lib", *inside_site))


def make_mount_points(runtime: Runtime, folder: Path) -> None:
    """Make a folder for INSIDE with the runtime's mount points, so that none must be made in an image."""
    (folder / Path(EVAL_FOLDER).relative_to(INSIDE)).mkdir(parents=True, exist_ok=True)
    for source, target in runtime.binds:
        point = folder / Path(target).relative_to(INSIDE)
        if Path(source).is_dir():
            point.mkdir(parents=True, exist_ok=True)
        else:
            point.parent.mkdir(parents=True, exist_ok=True)
            point.touch()


def venv_files(python: str, command: Sequence[str], path: Sequence[str]) -> dict[str, str]:
    """Return the virtual environment of the injected Python, as texts by their paths below INSIDE.

    Args:
        python: The interpreter, as a path inside.
        command: The command that starts it, including its loader.
        path: Folders with packages, as paths inside.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return {
        "venv/pyvenv.cfg": f"home = {Path(python).parent}\ninclude-system-site-packages = false\n",
        "venv/bin/python": f'#!/bin/sh\nexec {" ".join(command)} "$@"\n',
        f"venv/lib/{version}/site-packages/rollyard.pth": "\n".join([*path, ""]),
    }


def _prefix(executable: Path) -> Path:
    base = Path(sys.base_prefix).resolve()
    return base if base in executable.parents else executable.parent.parent


def package_folder(package: str) -> Path:
    """Return the folder of an installed package.

    Raises:
        SandboxStartFailed: The package is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise SandboxStartFailed(
            f"the Python package {package} is not installed beside this worker; the exec server needs it: "
            "install rollyard with its dependencies"
        )
    return Path(next(iter(spec.submodule_search_locations))).resolve()


def _package_folders() -> list[Path]:
    folders: list[Path] = []
    for package in _PACKAGES:
        parent = package_folder(package).parent
        if parent not in folders:
            folders.append(parent)
    return folders


def _library_folders() -> list[Path]:
    triplet = sysconfig.get_config_var("MULTIARCH") or ""
    names = [f"/lib/{triplet}", f"/usr/lib/{triplet}", "/lib64", "/usr/lib64", "/lib", "/usr/lib"]
    prefix = Path(sys.base_prefix).resolve()
    folders: list[Path] = []
    lines = Path("/proc/self/maps").read_text().splitlines()
    for loaded in dict.fromkeys(
        os.path.dirname(line.split(maxsplit=5)[-1]) for line in lines if ".so" in line
    ):
        if loaded.startswith("/") and prefix not in (Path(loaded), *Path(loaded).parents):
            names.append(loaded)
    site = _package_folders()
    for name in names:
        folder = Path(name).resolve()
        if not folder.is_dir() or folder in folders or any(s in folder.parents for s in site):
            continue
        with os.scandir(folder) as entries:
            if any(entry.name.startswith("lib") and ".so" in entry.name for entry in entries):
                folders.append(folder)
    return folders


def program_loader(executable: Path) -> str | None:
    """Return the program interpreter of an ELF file (PT_INTERP, elf(5)), or None for a static one."""
    with executable.open("rb") as file:
        head = file.read(64)
        if head[:4] != b"\x7fELF" or head[4] != 2:
            return None
        order = "<" if head[5] == 1 else ">"
        (offset,) = struct.unpack_from(order + "Q", head, 32)
        size, count = struct.unpack_from(order + "HH", head, 54)
        for n in range(count):
            file.seek(offset + n * size)
            entry = file.read(size)
            (kind,) = struct.unpack_from(order + "I", entry, 0)
            if kind == 3:
                start, _, _, length = struct.unpack_from(order + "QQQQ", entry, 8)
                file.seek(start)
                return file.read(length).rstrip(b"\0").decode()
    return None


def _write(cache: Path, files: dict[str, str], origins: dict[str, Path]) -> Path:
    """Return the folder of `files`, and make it if it does not exist.

    `origins` gives the paths from which modules are copied.
    """
    digest = hashlib.sha256(repr((sys.version, sorted(files.items()))).encode()).hexdigest()[:12]
    folder = cache / f"runtime-{digest}"
    if folder.is_dir():
        return folder
    temporary = cache / f".runtime-{secrets.token_hex(6)}"
    for parent in dict.fromkeys(os.path.dirname(name) for name in files):
        (temporary / parent).mkdir(parents=True, exist_ok=True)
    for package in dict.fromkeys(os.path.dirname(name) for name in origins):
        (temporary / package / "__pycache__").mkdir()
    for name, text in files.items():
        path = temporary / name
        path.write_text(text, encoding="utf-8")
        path.chmod(0o755 if name.endswith("bin/python") else 0o644)
        if name.endswith(".py"):
            _write_compiled(path, origins[name], f"{INSIDE}/{name}")
    try:
        temporary.rename(folder)
    except OSError:
        # Another worker was first, and its content is the same.
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _write_compiled(path: Path, origin: Path, shown: str) -> None:
    """Write the .pyc file beside `path`, a copy of `origin`. Tracebacks name the module's file `shown`.

    The code is read from the .pyc file beside `origin` if there is one, because compiling everything takes a
    third of a second, which would delay the first sandbox.
    """
    code = SourceFileLoader(origin.stem, str(origin)).get_code(origin.stem)
    if code is None:
        raise SandboxStartFailed(f"{origin} is not a Python module")
    # The .pyc file is not checked against the source (PEP 552, flags 0b01), because neither can be changed.
    head = importlib.util.MAGIC_NUMBER + (1).to_bytes(4, "little")
    # `cache_from_source` is not used, because it follows PYTHONPYCACHEPREFIX, which is for this process only.
    target = path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"
    target.write_bytes(
        head + importlib.util.source_hash(path.read_bytes()) + marshal.dumps(_shown_as(code, shown))
    )


def _shown_as(code: CodeType, name: str) -> CodeType:
    """Return the same code with another file name."""
    consts = tuple(_shown_as(each, name) if isinstance(each, CodeType) else each for each in code.co_consts)
    return code.replace(co_filename=name, co_consts=consts)
