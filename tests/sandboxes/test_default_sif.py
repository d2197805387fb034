"""The default image of Apptainer sandboxes: its recipe beside the Containerfile's, and the real one."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rollyard_pipeline.sandboxes.apptainer.images import parse_image
from rollyard_testing.pace import patience

ROOT = Path(__file__).resolve().parents[2]
RECIPE = (ROOT / "sandbox-image/rollyard.def").read_text()
_ZSTD = 6


def test_recipe_holds_what_the_containerfile_holds() -> None:
    containerfile = (ROOT / "sandbox-image/default/Containerfile").read_text()
    installed = re.search(r"--no-install-recommends (.+?) \\$", containerfile, re.MULTILINE)
    included = re.search(r"^Include: (.+)$", RECIPE, re.MULTILINE)
    assert sorted(included[1].split()) == sorted(installed[1].split())
    for line in ("sandbox:x:1000:1000:sandbox:/work:/bin/bash", "sandbox:x:1000:", "-o 1000 -g 1000 /work"):
        assert line in RECIPE
        assert line in containerfile
    for name, value in re.findall(r"\b(PATH|LANG)=(\S+)", containerfile.partition("ENV ")[2]):
        assert f"export {name}={value}" in RECIPE


def test_recipe_names_no_registry_and_no_mirror() -> None:
    assert re.search(r"^Bootstrap: debootstrap$", RECIPE, re.MULTILINE)
    assert "://" not in RECIPE


def test_bad_options_of_the_script() -> None:
    done = subprocess.run(
        [ROOT / "scripts/sif", "--what"], capture_output=True, text=True, timeout=patience(20)
    )
    assert done.returncode == 2
    assert "unknown option --what (--help)" in done.stderr
    done = subprocess.run(
        [ROOT / "scripts/sif", "--help"], capture_output=True, text=True, timeout=patience(20)
    )
    assert done.returncode == 0
    assert "--default-image FILE" in done.stdout


@pytest.fixture(scope="module")
def default_sif(apptainer_works: None, missing: Any) -> Path:
    """Return the real image, as scripts/sif keeps it; the first build takes minutes."""
    if shutil.which("debootstrap", path=f"{os.environ['PATH']}:/usr/sbin") is None:
        missing("debootstrap is not installed (Debian: apt install debootstrap)")
    done = subprocess.run([ROOT / "scripts/sif"], capture_output=True, text=True, timeout=patience(580))
    assert done.returncode == 0, done.stderr
    return Path(done.stdout.strip())


@pytest.mark.apptainer
@pytest.mark.nightly
async def test_sandboxes_of_the_default_image(kit: Any, default_sif: Path, run_dir: Path) -> None:
    assert parse_image(str(default_sif)).kind == "sif"
    data = default_sif.read_bytes()
    (compression,) = struct.unpack_from("<H", data, data.index(b"hsqs") + 20)
    assert compression == _ZSTD
    provider = kit.open("apptainer", run_dir, str(default_sif))
    await provider.start()
    try:
        async with await kit.acquire(provider, memory_bytes=512 << 20) as sandbox:
            _, output = await kit.sh(
                sandbox, "id -un; pwd; python3 -c 'print(6 * 7)'; git init -q x && ls -A x"
            )
            assert output.splitlines() == ["sandbox", "/work", "42", ".git"]
            cell = await sandbox.client.ipython(
                "import sys; print(sys.version_info >= (3, 11))", timeout=patience(30)
            )
            assert cell.text().strip() == "True"
            # A server of a test, and its client.
            script = (
                "python3 -m http.server 8000 --bind 127.0.0.1 > /dev/null 2>&1 & "
                "for n in $(seq 100); do (exec 3<>/dev/tcp/127.0.0.1/8000) 2> /dev/null && break; "
                "sleep 0.05; done; "
                "python3 -c 'import urllib.request as u; print(u.urlopen(\"http://127.0.0.1:8000/\").status)'"
            )
            assert (await kit.sh(sandbox, script))[1] == "200"
    finally:
        await kit.clean(provider)
