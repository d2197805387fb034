"""The injected modules are compiled ahead, and nothing in them says where this checkout is."""

from __future__ import annotations

import marshal
import subprocess
import sys
from pathlib import Path

from rollyard_pipeline.sandboxes.starters.runtime import COPIED, INSIDE, make_runtime, package_folder
from rollyard_testing.pace import patience


def test_modules_are_compiled_ahead_and_name_no_path_of_this_machine(tmp_path: Path) -> None:
    make_runtime(tmp_path)
    (folder,) = tmp_path.glob("runtime-*")
    for package in COPIED:
        sources = sorted((folder / "lib" / package).rglob("*.py"))
        assert {"__init__.py"} < {source.name for source in sources}
        assert len(sources) == len(list(package_folder(package).rglob("*.py")))
        for source in sources:
            tag = sys.implementation.cache_tag
            compiled = (source.parent / "__pycache__" / f"{source.stem}.{tag}.pyc").read_bytes()
            code = marshal.loads(compiled[16:])
            assert code.co_filename == f"{INSIDE}/{source.relative_to(folder)}"
            assert str(package_folder(package)).encode() not in compiled
            # PEP 552: they are compiled by hash and never checked, so what is mounted read-only is not
            # compiled again.
            assert compiled[4:8] == b"\1\0\0\0"


def test_python_takes_them_without_their_source(tmp_path: Path) -> None:
    make_runtime(tmp_path)
    (folder,) = tmp_path.glob("runtime-*")
    source = folder / "lib" / "rollyard_sandbox" / "frames.py"
    source.write_text("raise ImportError('compiled anew')")
    code = f"import sys; sys.path.insert(0, {str(folder / 'lib')!r}); import rollyard_sandbox.frames as f; "
    code += "print(f.FrameReader)"
    said = subprocess.check_output([sys.executable, "-I", "-S", "-c", code], text=True, timeout=patience(60))
    assert "rollyard_sandbox.frames.FrameReader" in said


def test_without_compiled_modules_here_they_are_compiled(tmp_path: Path) -> None:
    code = "import sys; sys.pycache_prefix = sys.argv[2]; sys.dont_write_bytecode = True\n"
    code += "from pathlib import Path\n"
    code += "from rollyard_pipeline.sandboxes.starters.runtime import make_runtime\n"
    code += "make_runtime(Path(sys.argv[1]))"
    (tmp_path / "b").mkdir()
    subprocess.check_call(
        [sys.executable, "-c", code, str(tmp_path / "b"), str(tmp_path / "none")], timeout=patience(60)
    )
    (made,) = (tmp_path / "b").glob("runtime-*")
    modules = list(made.glob("lib/**/*.py"))
    assert len(list(made.glob("lib/**/__pycache__/*.pyc"))) == len(modules) > 0
