"""Root folders as images: a real one made of copied programs, and the ones that are refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rollyard_pipeline.sandboxes.errors import ImageNotUsable, NodeUnusable
from rollyard_pipeline.sandboxes.provider import NodeProvider
from rollyard_pipeline.sandboxes.starters.root_folders import check_image, in_root
from rollyard_testing.pace import patience


async def test_root_folder_is_the_system(kit: Any, bubblewrap: NodeProvider, tmp_path: Path) -> None:
    image = kit.make_root(tmp_path / "root")
    async with await kit.acquire(bubblewrap, image=str(image), files={"a": "text"}) as sandbox:
        assert await kit.sh(sandbox, "cat /etc/image-name a") == (0, "made-by-test\ntext")
        assert (await kit.sh(sandbox, "python3 --version"))[0] == 127
        for path in ("/usr/x", "/etc/x", "/opt/tool/x", "/x"):
            assert (await kit.sh(sandbox, f"touch {path}"))[0] != 0
        assert await kit.sh(sandbox, "touch /tmp/x /work/x && ls /work") == (0, "a\nx")
        result = await sandbox.client.bash("cd /opt && echo $PWD", timeout=patience(10))
        assert result.text().strip() == "/opt"
        # The injected Python runs though the image has none, nor its libraries.
        script = "/.rollyard/venv/bin/python -c 'import ssl, zmq, ipykernel; print(6 * 7)'"
        assert await kit.sh(sandbox, script) == (0, "42")
    assert not (image / "usr/x").exists()


async def test_refused_before_anything_starts(kit: Any, bubblewrap: NodeProvider, run_dir: Path) -> None:
    with pytest.raises(ImageNotUsable, match=r"sandbox\.image 'docker://python:3\.12-slim'.*unpacked root"):
        await kit.acquire(bubblewrap, image="docker://python:3.12-slim")
    with pytest.raises(ImageNotUsable, match="run dir"):
        await kit.acquire(bubblewrap, image=str(run_dir))
    assert kit.left_behind(run_dir)["folders"] == []


@pytest.mark.parametrize(
    ("image", "message"),
    [
        ("docker://x", "no container or SIF images"),
        ("/images/x.sif", "no container or SIF images"),
        ("images/x", "not an absolute path"),
        ("/does/not/exist", "no such folder"),
        ("/", "secrets"),
        ("/usr/..", "secrets"),
    ],
)
def test_bad_images(image: str, message: str) -> None:
    with pytest.raises(ImageNotUsable, match=message):
        check_image(image)


def test_image_without_a_shell(tmp_path: Path) -> None:
    with pytest.raises(ImageNotUsable, match="no bash"):
        check_image(str(tmp_path))
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/bash").touch()
    with pytest.raises(ImageNotUsable, match="no bin/sh"):
        check_image(str(tmp_path))


def test_links_are_followed_inside_the_image(tmp_path: Path) -> None:
    (tmp_path / "usr/bin").mkdir(parents=True)
    (tmp_path / "usr/bin/bash").touch()
    (tmp_path / "bin").symlink_to("/usr/bin")
    (tmp_path / "out").symlink_to("../../../../../../etc")
    (tmp_path / "loop").symlink_to("loop")
    assert in_root(tmp_path, "/bin/bash") == tmp_path / "usr/bin/bash"
    assert in_root(tmp_path, "/out/passwd") is None
    assert in_root(tmp_path, "/loop") is None


async def test_process_provider_takes_no_image(kit: Any, run_dir: Path) -> None:
    from rollyard_pipeline.sandboxes import open_provider

    provider = open_provider("process", run_dir=run_dir, node=kit.NODE)
    with pytest.raises(ImageNotUsable, match="--sandbox bubblewrap"):
        await kit.acquire(provider, image="/some/root")


def test_reasons_are_stable() -> None:
    assert (ImageNotUsable.reason, NodeUnusable.reason) == ("ImageNotUsable", "NodeUnusable")
