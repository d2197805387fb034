"""`python -m rollyard_pipeline.sandboxes.bundle OUT`: write the runtime of sandboxes to one folder.

When the folder is mounted read-only at RUNTIME_PATH, it starts the exec server in any Linux root folder
for this machine's processor, whatever its libc and Python, and adds an IPython to images without one:

    exec-server.py, copy-runtime.py   the programs that EXEC_SERVER_ARGV and COPY_ARGV of
                                      `rollyard_crds.claims` run
    loader                            the dynamic loader that this Python was linked for
    libs/                             the shared libraries that anything below needs
    python/                           the interpreter and its standard library
    lib/                              the exec server and ptyprocess
    site/                             ipykernel and jupyter_client with their dependencies
    venv/                             a virtual environment over all of these; bin/python is a script
                                      for /bin/sh

All modules are compiled in advance, because the folder is mounted read-only.
"""

from __future__ import annotations

import argparse
import os
import py_compile
import shutil
import stat
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Final

from packaging.requirements import Requirement
from rollyard_crds.claims import COPY_ARGV, EXEC_SERVER_ARGV
from rollyard_crds.names import RUNTIME_PATH

from rollyard_pipeline.sandboxes.errors import SandboxStartFailed
from rollyard_pipeline.sandboxes.starters.runtime import (
    COPIED,
    base_python,
    package_folder,
    program_loader,
    venv_files,
)

_ROOTS: Final = ("ipykernel", "jupyter-client", "pyzmq")
# ipykernel and IPython work without a debugger, completion and time zones, which make up a third of it.
_LEFT_OUT: Final = frozenset({"debugpy", "jedi", "parso", "tzdata"})
_STDLIB_LEFT_OUT: Final = frozenset(
    {
        "__pycache__",
        "dist-packages",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "site-packages",
        "test",
        "tests",
        "tkinter",
        "turtledemo",
        "turtle.py",
    }
)
_MODULES_LEFT_OUT: Final = ("_ctypes_test", "_test", "_tkinter", "_xx", "nis.", "xx")
_FOR_COMPILERS: Final = frozenset({".pyi", ".pyx", ".pxd", ".pxi", ".h", ".c"})
_RECORDS: Final = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
# These libraries are opened by name at run time and no file lists them. libc needs this one to end threads.
_OPENED_BY_NAME: Final = ("libgcc_s.so.1",)
_START: Final = """import os, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path += [os.path.join(here, "lib"), os.path.join(here, "site")]
from rollyard_sandbox.{module} import main
sys.exit(main({arguments}))
"""


def write_bundle(out: Path) -> None:
    """Write the runtime of the running interpreter to `out`, a new or empty folder.

    Raises:
        FileExistsError: `out` is not empty.
        SandboxStartFailed: A package of the exec server or of IPython is not installed, or a required library
            is not on this machine.
    """
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty")
    executable = base_python()
    loader = program_loader(executable)
    if loader is None:
        raise SandboxStartFailed(
            f"{executable} is no dynamically linked ELF program: there is nothing to move"
        )
    python = out / "python" / "bin" / executable.name
    _copy(executable, python)
    (python.parent / "python3").unlink(missing_ok=True)
    if executable.name != "python3":
        (python.parent / "python3").symlink_to(executable.name)
    _copy(Path(loader).resolve(), out / "loader")
    for source, target in _standard_library(out / "python"):
        _copy(source, target)
    for source, name in _packages():
        _copy(source, out / "site" / name)
    for package in COPIED:
        folder = package_folder(package)
        for source in folder.rglob("*.py"):
            _copy(source, out / "lib" / package / source.relative_to(folder))
    for name, text in _written().items():
        path = out / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755 if name.endswith("bin/python") else 0o644)
    (out / "libs").mkdir()
    native = [path for path in sorted(out.rglob("*.so*")) if path.is_file() and not path.is_symlink()]
    for library in _libraries(Path(loader), out, [executable, *native]):
        _copy(library.resolve(), out / "libs" / library.name)
    _compile(out)


def _written() -> dict[str, str]:
    argv = EXEC_SERVER_ARGV[: EXEC_SERVER_ARGV.index("-I")]
    inside = [f"{RUNTIME_PATH}/lib", f"{RUNTIME_PATH}/site"]
    return {
        **venv_files(argv[-1], argv, inside),
        Path(EXEC_SERVER_ARGV[-1]).name: _START.format(module="server.command_line", arguments=""),
        Path(COPY_ARGV[-1]).name: _START.format(module="copying", arguments="here, sys.argv[1:]"),
    }


def _standard_library(prefix: Path) -> Iterator[tuple[Path, Path]]:
    """Yield the modules of the standard library with their targets.

    The interpreter finds the modules relative to its own path.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    target = prefix / sys.platlibdir / version
    for name in dict.fromkeys((sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"))):
        source = _base(Path(name))
        for folder, folders, files in os.walk(source):
            folders[:] = [f for f in folders if f not in _STDLIB_LEFT_OUT and not f.startswith("config-")]
            relative = Path(folder).relative_to(source)
            for file in files:
                if file in _STDLIB_LEFT_OUT or file.endswith((".a", ".o", ".pyc", ".exe")):
                    continue
                if relative.name == "lib-dynload" and file.startswith(_MODULES_LEFT_OUT):
                    continue
                yield Path(folder, file), target / relative / file


def _base(path: Path) -> Path:
    """Return the same path below the base installation, as a virtual environment has no standard library."""
    if path.is_relative_to(sys.prefix):
        return Path(sys.base_prefix) / path.relative_to(sys.prefix)
    return path


def _packages() -> Iterator[tuple[Path, str]]:
    for package in _distributions(_ROOTS):
        for file in package.files or ():
            parts = file.parts
            if parts[0] in ("..", "/") or {"tests", "test", "__pycache__"} & set(parts):
                continue
            if file.name in _RECORDS or file.suffix in _FOR_COMPILERS or file.name == "py.typed":
                continue
            yield Path(str(package.locate_file(file))), str(file)


def _distributions(roots: Iterable[str]) -> list[Distribution]:
    """Return the installed distributions `roots` and everything that they require on this machine."""
    pending, distributions = list(roots), dict[str, Distribution]()
    while pending:
        name = pending.pop().lower().replace("_", "-")
        if name in distributions or name in _LEFT_OUT:
            continue
        try:
            distributions[name] = distribution(name)
        except PackageNotFoundError:
            raise SandboxStartFailed(
                f"the Python package {name} is not installed; IPython in sandboxes needs it"
            ) from None
        for line in distributions[name].requires or ():
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pending.append(requirement.name)
    return [distributions[name] for name in sorted(distributions)]


def _libraries(loader: Path, bundle: Path, files: Iterable[Path]) -> list[Path]:
    """Return the libraries that `files` need, as the loader finds them, except those inside the bundle."""
    libraries: dict[str, Path] = {}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LD_")}
    for file in files:
        done = subprocess.run(
            [loader, "--list", file], capture_output=True, text=True, env=environment, timeout=30
        )
        for line in done.stdout.splitlines():
            name, arrow, rest = line.strip().partition(" => ")
            path = Path(rest.rpartition(" (")[0])
            if arrow and not path.is_absolute():
                raise SandboxStartFailed(f"{file} needs {name}, which is not on this machine")
            if arrow and bundle not in path.parents and path.resolve() != loader.resolve():
                libraries.setdefault(name, path)
        if done.returncode != 0:
            raise SandboxStartFailed(f"{loader} cannot list what {file} needs: {done.stderr.strip()}")
    for name in _OPENED_BY_NAME:
        beside = {path.parent for path in libraries.values()}
        for path in (folder / name for folder in sorted(beside)):
            if name not in libraries and path.exists():
                libraries[name] = path
    return [path.parent / name for name, path in sorted(libraries.items())]


def _compile(out: Path) -> None:
    for source in sorted(out.rglob("*.py")):
        if source.parent == out:
            continue
        try:
            # The .pyc files are not checked against the source, because neither can be changed.
            py_compile.compile(
                str(source),
                dfile=f"{RUNTIME_PATH}/{source.relative_to(out)}",
                doraise=True,
                quiet=2,
                invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
            )
        except py_compile.PyCompileError:
            continue  # This file is for another Python, such as a template. It is never imported here.


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755 if source.stat().st_mode & stat.S_IXUSR else 0o644)


def main(arguments: list[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m rollyard_pipeline.sandboxes.bundle",
        description="Write the runtime that is mounted into sandboxes of foreign images.",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="a new or empty folder")
    out: Path = parser.parse_args(arguments).out
    try:
        write_bundle(out)
    except (SandboxStartFailed, OSError) as error:
        print(f"bundle: {error}", file=sys.stderr)
        return 1
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file() and not path.is_symlink())
    print(f"{out}: {size / 1e6:.0f} MB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
