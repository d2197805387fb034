"""A Dockerfile is translated as Docker reads it, or refused by its line before anything is built."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rollyard_crds.rolloutjob import SandboxSpec
from rollyard_crds.task import TaskSandbox
from rollyard_pipeline.sandboxes.apptainer.images import parse_image
from rollyard_pipeline.sandboxes.claims import shape_of_key
from rollyard_pipeline.sandboxes.dockerfiles.context import FolderContext, HeldContext
from rollyard_pipeline.sandboxes.dockerfiles.recipe import Recipe, dockerfile_folders, make_recipe, translate
from rollyard_pipeline.sandboxes.errors import DockerfileRefused, ImageNotUsable
from rollyard_pipeline.sandboxes.interface import BuildFolder, SandboxRequest
from rollyard_pipeline.sandboxes.starters.root_folders import check_image
from rollyard_testing.pace import patience
from spython.main.parse.parsers import DockerParser
from spython.main.parse.writers import SingularityWriter

FILES = HeldContext(
    {
        "a.txt": (b"a", False),
        "b.txt": (b"b", False),
        "run.sh": (b"#!/bin/sh\n", True),
        "src/main.py": (b"1", False),
        "src/.hidden": (b"2", False),
        "x.tar.gz": (b"\x1f\x8b", False),
        "plain": (b"\x1f\x8b\x08 compressed", False),
    }
)


def recipe(text: str, context: HeldContext = FILES) -> Recipe:
    return make_recipe(text, context)


def alone(folder: Path, text: str) -> str:
    """Return the definition file that spython makes of a Dockerfile as it stands."""
    path = folder / "Dockerfile"
    path.write_text(text)
    definition: str = SingularityWriter(DockerParser(str(path)).recipe).convert()
    return definition


def section(definition: str, name: str) -> list[str]:
    """Return the lines of a section of a definition file."""
    _, found, rest = definition.partition(f"%{name}\n")
    return rest.split("\n%")[0].splitlines() if found else []


HEREDOC = "FROM a:1\nRUN <<EOF\ntouch /made\nEOF\n"


def test_heredocs(tmp_path: Path) -> None:
    with pytest.raises(DockerfileRefused, match=r"^Dockerfile line 2: RUN: a heredoc \(<<\) is not tr"):
        recipe(HEREDOC)
    # The shell that runs this begins a heredoc of its own, and none of its lines is run as a command.
    assert section(alone(tmp_path, HEREDOC), "post")[0] == "<<EOF"
    with pytest.raises(DockerfileRefused, match=r"^Dockerfile line 2: COPY: a heredoc"):
        recipe("FROM a:1\nCOPY <<x /etc/x\n1\nx\n")
    assert "<<< hello" in recipe('FROM a:1\nRUN bash -c "cat <<< hello"').body


# Each is refused by its line; the last column is found in what spython alone makes of it, which is wrong.
REFUSED: dict[str, tuple[str, int, str, str | None]] = {
    "chown": ("FROM a:1\n\nCOPY --chown=1:1 a.txt /x", 3, "the option --chown is not", "--chown=1:1 /x"),
    "chmod": ("FROM a:1\nADD --chmod=755 a.txt /x", 2, "the option --chmod", "--chmod=755 a.txt"),
    "from number": ("FROM a:1\nCOPY --from=0 /x /y", 2, "the option --from", "!/y"),
    "named stage": ("FROM a AS one\nFROM b\nCOPY --from=one /x /y", 2, "second stage", "From: b\nStage: one"),
    "second stage": ("FROM a:1\nRUN one\nFROM b:1\nRUN two", 3, "a second stage", "%post\none\ntwo"),
    "mount": ("FROM a:1\nRUN --mount=type=cache,target=/x ls", 2, "the option --mount", "%post\n--mount="),
    "exec form": ('FROM a:1\nRUN ["ls", "-l"]', 2, "the JSON form", '%post\n["ls", "-l"]'),
    "copy of JSON": ('FROM a:1\nCOPY ["a.txt", "/x"]', 2, "the JSON form", '["a.txt", "/x"]'),
    "platform": ("FROM --platform=linux/amd64 a:1", 1, "--platform=linux/amd64", "From: --platform"),
    "scratch": ("FROM scratch", 1, "scratch is not an image", "From: scratch"),
    "user": ("FROM a:1\nUSER nobody\nRUN id", 2, "another user than root", "%post\nsu -  nobody #"),
    "shell": ('FROM a:1\nSHELL ["/bin/bash", "-c"]', 2, "SHELL: is not translated", '%post\nSHELL ["/bin'),
    "onbuild": ("FROM a:1\nONBUILD RUN x", 2, "ONBUILD: is not translated", "%post\nONBUILD RUN x"),
    "URL": ("FROM a:1\nADD https://x.org/f /f", 2, "a URL is not translated", "curl https://x.org/f -o /f/f"),
    "git": ("FROM a:1\nADD git@github.com:a/b.git /f", 2, "a URL is not", "git@github.com:a/b.git /f"),
    "archive": ("FROM a:1\nADD x.tar.gz /x", 2, "an archive", "tar -zvf x.tar.gz /x"),
    "archive by content": ("FROM a:1\nADD plain /x", 2, "an archive", "%files\nplain /x"),
    "pattern": ("FROM a:1\nCOPY *.txt /x/", 2, "a pattern is not translated", "*.txt /x/"),
    "argument of FROM": ("ARG V\nFROM a:$V", 1, "V has no default", "From: a:$V"),
    "argument": ("FROM a:1\nARG V\nRUN echo $V", 2, "V has no default", "%post\necho $V"),
    "late argument": ("FROM a:$V\nARG V=1", 1, "$V has no value", "From: a:$V"),
    "escape": ("# escape=`\nFROM a:1\nRUN a `\n b", 1, "the directive escape", "a `\n b"),
    "frontend": ("# syntax=example.org/other:1\nFROM a:1", 1, "another language", "From: a:1"),
    "template": ("FROM a:1\nRUN echo '{{ x }}'", 2, "'{{' cannot be written", "{{ x }}"),
    "double quote": ("FROM a:1\nENV A='x\"y'", 2, "a double quote", None),
    "unknown variable": ("FROM a:1\nCOPY a.txt $WHERE/x", 2, "$WHERE has no value", "a.txt $WHERE/x"),
    "substitution": ("FROM a:1\nARG A=b\nENV B=${A#b}", 3, "is not translated", "${A#b}"),
    "relative target": ("FROM a:1\nCOPY a.txt x", 2, "needs a WORKDIR before it", "a.txt x"),
    "relative folder": ("FROM a:1\nWORKDIR x", 2, "needs a WORKDIR before it", "cd x"),
    "spaces": ("FROM a:1\nWORKDIR /a b", 2, "has a character", "mkdir -p /a b"),
    "injection": ("FROM a:1\nWORKDIR /a;reboot", 2, "has a character", "mkdir -p /a;reboot"),
    "several sources": ("FROM a:1\nCOPY a.txt b.txt /x", 2, "must end with /", "a.txt /x\nb.txt /x"),
    "missing file": ("FROM a:1\nCOPY none /x", 2, "none: no such file beside the Dockerfile", "none /x"),
    "hidden target": ("FROM a:1\nCOPY a.txt /work/x", 2, "/work of a sandbox is its own", "a.txt /work/x"),
    "above": ("FROM a:1\nCOPY ../a.txt /x", 2, "leads out of the folder", "../a.txt /x"),
    "unknown": ("FROM a:1\nRNU ls", 2, "RNU: is not an instruction", "%post\nRNU ls"),
    "no FROM": ("RUN ls", 1, "stands before FROM", None),
    "open quote": ("FROM a:1\nENV A=\"b", 2, "a quote \" is not closed", None),
    "same line": ("FROM a:1\nENV PATH=/x:$PATH A=$PATH", 2, "$PATH is set on the same line", None),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_what_spython_would_make_of_it(name: str, tmp_path: Path) -> None:
    text, line, words, wrong = REFUSED[name]
    with pytest.raises(DockerfileRefused) as caught:
        recipe(text)
    assert caught.value.line == line
    assert str(caught.value).startswith(f"Dockerfile line {line}: ")
    assert words in str(caught.value)
    assert not caught.value.retryable
    if wrong is not None and wrong.startswith("!"):
        assert wrong[1:] not in alone(tmp_path, text), "it is left out"
    elif wrong is not None:
        assert wrong in alone(tmp_path, text)


def test_ignore_files_are_refused() -> None:
    held = HeldContext({"a.txt": (b"", False), ".dockerignore": (b"a.txt", False)})
    with pytest.raises(DockerfileRefused, match=r"line 2: COPY: \.dockerignore is not translated"):
        make_recipe("FROM a:1\nCOPY . /x", held)
    assert make_recipe("FROM a:1\nRUN ls", held).copies == ()


def test_a_file_of_one_source_may_not_be_a_folder_of_another_one() -> None:
    held = HeldContext({"a/x": (b"1", False), "b/x/y": (b"2", False)})
    with pytest.raises(DockerfileRefused, match="x: is a file of one source and a folder of another one"):
        make_recipe("FROM a:1\nCOPY a b /x/", held)


def test_what_has_no_effect_is_noted() -> None:
    text = (
        "# syntax=docker/dockerfile:1.7\n"
        'FROM a:1 AS only\nLABEL a=b\nEXPOSE 80\nVOLUME /v\nUSER root\nHEALTHCHECK CMD true\nCMD ["x"]\n'
        "COPY a.txt /tmp/a\n"
    )
    notes = recipe(text).notes
    assert [re.match(r"Dockerfile line (\d+): (\w+)", note).groups() for note in notes] == [
        ("3", "LABEL"), ("4", "EXPOSE"), ("5", "VOLUME"), ("7", "HEALTHCHECK"), ("8", "CMD"), ("9", "COPY"),
    ]  # fmt: skip
    assert "/tmp of a sandbox is empty" in notes[-1]


TRAPS = """ARG V=1
FROM base:$V
RUN cd /etc && export X=1
RUN false; echo went on
RUN echo one \\
    # a comment between the lines

    && echo two
ENV OLD the rest of the line
ENV A="b c" B=$OLD
ENV PATH=/opt/x:$PATH
ARG W='it''s'
WORKDIR /app
WORKDIR sub
COPY a.txt .
COPY src lib
"""


def test_the_definition_file_and_what_spython_alone_would_have_made(tmp_path: Path) -> None:
    made = recipe(TRAPS)
    assert made.base == "base:1"
    assert section(made.body, "post") == [
        "umask 022",
        "/bin/sh -c 'cd /etc && export X=1'",
        "/bin/sh -c 'false; echo went on'",
        "/bin/sh -c 'echo one     && echo two'",
        'OLD="the rest of the line"',
        "export OLD",
        'A="b c"',
        "export A",
        'B="the rest of the line"',
        "export B",
        'PATH="/opt/x:${PATH}"',
        "export PATH",
        "export W=its",
        "mkdir -p /app",
        "cd /app",
        "mkdir -p /app/sub",
        "cd /app/sub",
        "mkdir -p /app/sub",
        "for each in /.rollyard-build/0/* /.rollyard-build/0/.[!.]* /.rollyard-build/0/..?*; do "
        'if [ -e "$each" ]; then cp -a "$each" /app/sub/ || exit 1; fi; done',
        "mkdir -p /app/sub/lib",
        "for each in /.rollyard-build/1/* /.rollyard-build/1/.[!.]* /.rollyard-build/1/..?*; do "
        'if [ -e "$each" ]; then cp -a "$each" /app/sub/lib/ || exit 1; fi; done',
        "rm -rf /.rollyard-build",
    ]
    assert section(made.body, "environment") == [
        'export OLD="the rest of the line"', 'export A="b c"', 'export B="the rest of the line"',
        'export PATH="/opt/x:${PATH}"',
    ]  # fmt: skip
    assert section(made.body, "files") == [
        "context/0 /.rollyard-build/0", "context/1 /.rollyard-build/1",
    ]  # fmt: skip
    assert made.definition("localimage", "/x.sif").startswith(
        "Bootstrap: localimage\nFrom: /x.sif\n\n%files\n"
    )
    by_spython = section(
        alone(tmp_path, TRAPS.replace("the rest of the line", "rest").replace("'it''s'", "1")), "post"
    )
    # A folder and a variable would last, a comment would end a command, and no variable would be exported.
    assert "cd /etc && export X=1" in by_spython
    assert not any(line.startswith("export A") for line in by_spython)


def test_a_failure_before_others_fails_the_build() -> None:
    """The shell of a build script overlooks a failure before `&&`, which Docker does not."""
    made = recipe("FROM a:1\nRUN false && true\nRUN echo not reached")
    script = "\n".join(section(made.body, "post"))
    done = subprocess.run(
        ["/bin/sh", "-e"], input=script, capture_output=True, text=True, timeout=patience(20)
    )
    assert done.returncode == 1
    assert done.stdout == ""
    plain = "false && true\necho reached\n"
    assert (
        subprocess.run(["/bin/sh", "-e"], input=plain, capture_output=True, text=True).stdout == "reached\n"
    )


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("plain", "plain"), ("'a  b'", "a  b"), ('"$X `date` $(date)"', " `date` $(date)"),
        (r"a\ b", "a b"), (r'"a\\b"', r"a\b"), (r"\$HOME", "$HOME"), ("'$HOME'", "$HOME"), ("${A:-d}", "1"),
        ("${N:-d}", "d"), ("${A:+yes}", "yes"), ("${A}2", "12"), ("#no", "#no"), ('""', ""), ("a%b", "a%b"),
    ],
)  # fmt: skip
def test_values_are_those_of_docker(value: str, found: str) -> None:
    made = recipe(f"FROM a:1\nARG A=1\nENV N=\nENV V={value}\nRUN x")
    script = "\n".join(section(made.body, "environment")) + '\nprintf %s "$V"\n'
    done = subprocess.run(
        ["/bin/sh", "-e"], input=script, capture_output=True, text=True, env={}, timeout=patience(20)
    )
    assert (done.returncode, done.stdout) == (0, found)


def test_another_spython_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: DockerParser, line: str) -> None:
        self.recipe[self.active_layer].install.append("something else")

    monkeypatch.setattr(DockerParser, "_run", other)
    with pytest.raises(DockerfileRefused, match=r"spython .* translates its install in another way"):
        recipe("FROM a:1\nRUN x")


def test_the_digest_is_that_of_commands_and_files() -> None:
    def digest(text: str, files: dict[str, tuple[bytes, bool]]) -> str:
        return make_recipe(text, HeldContext(files)).digest

    text, files = "FROM a:1\nCOPY x /x", {"x": (b"1", False), "other": (b"1", False)}
    first = digest(text, files)
    assert first == digest(f"# words\n{text}\n\n", {**files, "other": (b"2", False)})
    assert first != digest(text, {**files, "x": (b"2", False)})
    assert first != digest(text, {**files, "x": (b"1", True)})
    assert first != digest("FROM a:1\nCOPY x /y", files)


def test_too_long_a_dockerfile() -> None:
    with pytest.raises(DockerfileRefused, match="longer than"):
        recipe("FROM a:1\n" + "# x\n" * 100_000)


# Folders of this machine.


def test_files_are_staged_with_plain_modes(tmp_path: Path) -> None:
    folder = tmp_path / "task"
    (folder / "src/below").mkdir(parents=True)
    (folder / "src/below/run").write_text("x")
    (folder / "src/below/run").chmod(0o700)
    (folder / "src/it's").write_text("y")
    made = make_recipe("FROM a:1\nCOPY src /x", FolderContext(folder))
    work = tmp_path / "work"
    work.mkdir()
    assert made.write(work, Path("/base.sif")).read_text() == made.definition("localimage", "/base.sif")
    run, other = work / "context/0/below/run", work / "context/0/it's"
    assert (run.read_text(), run.stat().st_mode & 0o777) == ("x", 0o755)
    assert (other.read_text(), other.stat().st_mode & 0o777) == ("y", 0o644)
    (folder / "src/it's").unlink()
    (tmp_path / "again").mkdir()
    with pytest.raises(DockerfileRefused, match="it's: No such file"):
        made.write(tmp_path / "again", Path("/base.sif"))


def _task(top: Path, name: str, toml: str, *dockerfiles: str) -> None:
    for part in dockerfiles:
        (top / name / part).mkdir(parents=True)
        (top / name / part / "Dockerfile").write_text("FROM a:1\n")
    (top / name).mkdir(exist_ok=True)
    (top / name / "task.toml").write_text(toml)


def test_task_folders_that_need_an_image(tmp_path: Path) -> None:
    separate = '[verifier]\nenvironment_mode = "separate"\n'
    _task(tmp_path, "plain", "", "environment", "tests")
    _task(tmp_path, "named", '[environment]\ndocker_image = "a:1"\n', "environment")
    _task(tmp_path, "separate", separate, "environment", "tests")
    _task(tmp_path, "below/deep", "", "environment")
    _task(tmp_path, ".hidden", "", "environment")
    _task(tmp_path, "none", "")
    names = [each.name for each in dockerfile_folders(tmp_path)]
    assert names == ["below/deep/environment", "plain/environment", "separate/environment", "separate/tests"]
    (only,) = dockerfile_folders(tmp_path / "plain/environment")
    assert (only.name, only.recipe().base) == ("environment", "a:1")


@pytest.mark.parametrize("make", [lambda p: p.write_bytes(b"\xff"), lambda p: p.symlink_to("/etc/passwd")])
def test_dockerfiles_that_cannot_be_read(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "Dockerfile")
    with pytest.raises(DockerfileRefused, match="Dockerfile"):
        dockerfile_folders(tmp_path)[0].recipe()


def test_translate_alone_lists_no_files_without_a_copy(tmp_path: Path) -> None:
    assert translate("FROM a:1\nRUN ls", FolderContext(tmp_path / "missing")).copies == []


def test_other_sandboxes_say_what_to_do() -> None:
    name = "dockerfile:0123"
    with pytest.raises(ImageNotUsable, match=r"has a Dockerfile.*sandbox\.images of the job"):
        check_image(name)
    with pytest.raises(ImageNotUsable, match=r"has a Dockerfile.*sandbox\.images of the job"):
        shape_of_key(SandboxRequest(image=name).key)
    with pytest.raises(ImageNotUsable, match="the task brings no Dockerfile of this name"):
        parse_image(name)


def test_a_request_brings_the_folder_where_the_job_has_no_image_for_it() -> None:
    files = {"Dockerfile": (b"FROM a:1", 0o644)}
    task = TaskSandbox(image="dockerfile:0123")
    spec = SandboxSpec(images={"a:1": "/a.sif"})
    request = SandboxRequest.of(spec, task, lambda image: files if image == task.image else None)
    assert request.build == BuildFolder(files, {"a:1": "/a.sif"})
    assert request.key == replace(request, build=None).key
    mapped = SandboxSpec(images={"dockerfile:0123": "/built.sif"})
    given = SandboxRequest.of(mapped, task, lambda image: files)
    assert (given.image, given.build) == ("/built.sif", None)
    assert SandboxRequest.of(spec, task).build is None
