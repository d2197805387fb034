"""A Dockerfile's author reads no file outside of its folder, writes none, and adds nothing to the build."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rollyard_crds.lease import LeaseRef
from rollyard_pipeline.sandboxes import open_provider
from rollyard_pipeline.sandboxes.allowed_images import AllowedImages
from rollyard_pipeline.sandboxes.apptainer.image_cache import ImageCache
from rollyard_pipeline.sandboxes.apptainer.images import built_image, dockerfile_image
from rollyard_pipeline.sandboxes.apptainer.program import ContainerProgram
from rollyard_pipeline.sandboxes.dockerfiles.context import FolderContext, HeldContext
from rollyard_pipeline.sandboxes.dockerfiles.recipe import make_recipe
from rollyard_pipeline.sandboxes.errors import DockerfileRefused, ImageNotUsable, SandboxImpossible
from rollyard_pipeline.sandboxes.interface import BuildFolder, SandboxRequest

pytestmark = pytest.mark.attack(boundary="node", surface="Dockerfiles")


@pytest.fixture
def context(tmp_path: Path) -> Path:
    """Return a folder beside a file that is none of the author's business."""
    (tmp_path / "secret").write_text("s3cret")
    folder = tmp_path / "task"
    folder.mkdir()
    (folder / "own").write_text("own")
    return folder


PATHS_OUT_OF_THE_FOLDER = pytest.mark.attack(
    "a path, a substitution or a link of COPY leads out of its folder, or a file becomes a link in between",
    stopped_by="files are listed and read through descriptors that follow no link; `..` is refused",
)


@PATHS_OUT_OF_THE_FOLDER
@pytest.mark.parametrize(
    "source", ["../secret", "./../secret", "/../secret", "own/../../secret", "${UP}/secret", "$UP/secret"]
)
def test_no_path_leads_out_of_the_folder(context: Path, source: str) -> None:
    with pytest.raises(DockerfileRefused, match=r"line 3: COPY: .*leads out of the folder"):
        make_recipe(f"FROM a:1\nARG UP=..\nCOPY {source} /x", FolderContext(context))


@PATHS_OUT_OF_THE_FOLDER
def test_an_absolute_source_is_below_the_folder(context: Path) -> None:
    """Docker takes it so, too."""
    with pytest.raises(DockerfileRefused, match="no such file beside the Dockerfile"):
        make_recipe(f"FROM a:1\nCOPY {context.parent}/secret /x", FolderContext(context))
    (copy,) = make_recipe("FROM a:1\nCOPY /own /x", FolderContext(context)).copies
    assert copy.files["own"].path == "own"


@PATHS_OUT_OF_THE_FOLDER
@pytest.mark.parametrize(
    ("source", "name"), [("link", "link"), (".", "link"), ("folder", "no such"), ("folder/secret", "no such")]
)
def test_links_are_not_followed(context: Path, source: str, name: str) -> None:
    if source.startswith("folder"):
        (context / "folder").symlink_to(context.parent)
    else:
        (context / "link").symlink_to(context.parent / "secret")
    with pytest.raises(DockerfileRefused, match=f"line 2: COPY: .*({name}|is a symbolic link)"):
        make_recipe(f"FROM a:1\nCOPY {source} /x", FolderContext(context))


@PATHS_OUT_OF_THE_FOLDER
def test_a_file_that_becomes_a_link_is_not_followed(context: Path, tmp_path: Path) -> None:
    (context / "sub").mkdir()
    (context / "sub/secret").write_text("own")
    recipe = make_recipe("FROM a:1\nCOPY own /x\nCOPY sub /y", FolderContext(context))
    (context / "own").unlink()
    (context / "own").symlink_to(context.parent / "secret")
    (tmp_path / "first").mkdir()
    with pytest.raises(DockerfileRefused, match="own: Too many levels of symbolic links"):
        recipe.write(tmp_path / "first", Path("/base"))
    (context / "own").unlink()
    (context / "own").write_text("own")
    (context / "sub/secret").unlink()
    (context / "sub").rmdir()
    (context / "sub").symlink_to(context.parent)
    (tmp_path / "second").mkdir()
    with pytest.raises(DockerfileRefused, match="sub/secret: Not a directory"):
        recipe.write(tmp_path / "second", Path("/base"))


@pytest.mark.attack(
    "pipes, enormous files or very many of them hold the build up",
    stopped_by="they are refused within bounds before anything is built",
)
def test_pipes_and_endless_folders_hold_nobody_up(context: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(context / "pipe")
    with pytest.raises(DockerfileRefused, match="pipe: is not a regular file"):
        make_recipe("FROM a:1\nCOPY . /x", FolderContext(context))
    (context / "pipe").rename(context / "Dockerfile")
    (context / "Dockerfile").unlink()
    with (context / "large").open("wb") as file:
        file.truncate(9 << 30)
    with pytest.raises(DockerfileRefused, match="holds more than"):
        make_recipe("FROM a:1\nCOPY own /x", FolderContext(context))
    (context / "large").unlink()
    monkeypatch.setattr("rollyard_pipeline.sandboxes.dockerfiles.context.MAX_FILES", 3)
    for number in range(4):
        (context / str(number)).touch()
    with pytest.raises(DockerfileRefused, match="holds more than 3 files"):
        make_recipe("FROM a:1\nCOPY own /x", FolderContext(context))


SMUGGLED_SECTIONS = pytest.mark.attack(
    "a section or command is smuggled into the definition file and runs outside of the image",
    stopped_by="odd characters are refused, commands and values are quoted, and what spython makes is "
    "compared",
)


@SMUGGLED_SECTIONS
@pytest.mark.parametrize(
    "text",
    [
        "FROM a:1\nRUN x\r%setup\nFROM a:1",
        "FROM a:1\nENV A=\"x\v%setup\"",
        "FROM a:1\nWORKDIR /x\u2028%setup",
        "FROM a:1\rBootstrap: localimage",
        "FROM a:1\x85%setup",
        "FROM ../../x",
        "FROM /etc/image.sif",
        "FROM a:1\nCOPY own /x\x0b%setup",
        "FROM a:1\nENV A`reboot`=1",
        "FROM a:1\nARG A$(reboot)=1",
        "FROM a:1\nCOPY own $(reboot)",
        "FROM a:1\nCOPY own /etc/../work/x",
        "FROM a:1\nCOPY own /.singularity.d/actions/exec",
    ],
)  # fmt: skip
def test_no_section_command_or_base_is_smuggled_in(text: str) -> None:
    """A section `%setup` would run on the machine, outside of the image."""
    with pytest.raises(DockerfileRefused):
        make_recipe(text, HeldContext({"own": (b"own", False)}))


@SMUGGLED_SECTIONS
def test_values_run_no_commands() -> None:
    recipe = make_recipe("FROM a:1\nENV A='$(reboot)`reboot`'\nARG B='$(reboot)`'\nRUN x", HeldContext({}))
    assert r'A="\$(reboot)\`reboot\`"' in recipe.body
    assert "export B='$(reboot)`'" in recipe.body
    # A section begins with its sign at the beginning of a line.
    assert "\n/bin/sh -c %setup\n" in make_recipe("FROM a:1\nRUN %setup", HeldContext({})).body


@pytest.mark.attack(
    "its commands run on a node as the worker's user",
    stopped_by="workers build none unless the installer says `--build-dockerfiles`; `rollyard images "
    "build` is called by hand. Both run them **as their user**, with a network",
)
async def test_workers_build_none_without_the_installer(tmp_path: Path) -> None:
    base = tmp_path / "base"
    for part in ("bin", "usr/bin", "etc"):
        (base / part).mkdir(parents=True)
    for name in ("bin/bash", "bin/sh"):
        (base / name).touch(mode=0o755)
    image = dockerfile_image(
        "dockerfile:x", make_recipe("FROM a:1\nRUN x", HeldContext({})), {"a:1": str(base)}
    )
    cache = ImageCache(tmp_path / "cache")
    cache.prepare()
    program = ContainerProgram("/bin/false", "apptainer", "1.4.5", (), True)
    for unpacked in (False, True):
        with pytest.raises(ImageNotUsable, match=r"has not been built.*rollyard images build"):
            await cache.ready(image, program, unpacked=unpacked)
    assert list((tmp_path / "cache").iterdir()) == []
    # What somebody who may build them has built is used.
    built = tmp_path / "cache" / f"{image.key()}.sif"
    built.touch()
    assert await cache.ready(image, program, unpacked=False) == built


@pytest.mark.attack(
    "its commands read the environment of the worker",
    stopped_by="the program that builds gets four variables of it",
)
async def test_a_build_sees_nothing_of_the_workers_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first process has the environment of the program that builds, and others may read that."""
    monkeypatch.setenv("ROLLYARD_TOKEN", "s3cret")
    monkeypatch.setenv("APPTAINER_DOCKER_PASSWORD", "s3cret")
    program = tmp_path / "builder"
    program.write_text(
        f'#!/bin/bash\nenv > {tmp_path}/env; echo "$@" > {tmp_path}/argv; touch "${{@:$#-1:1}}"\n'
    )
    program.chmod(0o755)
    archive = tmp_path / "base.sif"
    head = bytearray(128)
    head[32:42] = b"SIF_MAGIC\0"
    head[112:128] = (1).to_bytes(8, "little") * 2
    archive.write_bytes(bytes(head))
    image = dockerfile_image("x", make_recipe("FROM a:1\nRUN x", HeldContext({})), {"a:1": str(archive)})
    cache = ImageCache(tmp_path / "cache", dockerfiles=True)
    cache.prepare()
    built = await cache.ready(
        image, ContainerProgram(str(program), "apptainer", "1.4.5", (), True), unpacked=False
    )
    assert built.exists()
    assert "s3cret" not in (tmp_path / "env").read_text()
    assert ":/tmp " in (tmp_path / "argv").read_text()
    assert ":/var/tmp " in (tmp_path / "argv").read_text()
    assert sorted(path.suffix for path in (tmp_path / "cache").iterdir()) == [".json", ".sif"]


@pytest.mark.attack(
    "its FROM, or what the job has in its place, shows an image that the installer does not list",
    stopped_by="`--allow-image` holds for the base, too",
)
async def test_a_dockerfile_is_built_over_allowed_images_only(tmp_path: Path) -> None:
    """Neither its FROM nor what the job has in its place shows an image that the installer does not list."""

    def request(base: str) -> SandboxRequest:
        files = {"Dockerfile": (f"FROM {base}\nRUN x".encode(), 0o644)}
        build = BuildFolder(files, {"mapped:1": "/home/other/image.sif", "listed:1": "docker://own/listed:1"})
        return SandboxRequest(image="dockerfile:0123", build=build)

    images = AllowedImages(["docker://own/"])
    for base in ("other:1", "mapped:1", "docker.io/own/x:1"):
        sought = request(base)
        assert sought.build is not None
        with pytest.raises(SandboxImpossible, match="--allow-image"):
            built_image("dockerfile:0123", sought.build, images)
    for base in ("own/x:1", "listed:1"):
        sought = request(base)
        assert sought.build is not None
        found = built_image("dockerfile:0123", sought.build, images).base
        assert found is not None
        assert found.text.startswith("docker://own/")
    provider = open_provider("apptainer", run_dir=tmp_path, node="n", images=["docker://own/"])
    with pytest.raises(SandboxImpossible, match="dockerfile:0123"):
        await provider.acquire(SandboxRequest(image="dockerfile:0123"), LeaseRef(rollout="r", token=1))
