"""Hostile strings in batch scripts: bash and sbatch take each of them as one word, or it is refused."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rollyard_drivers.reconcile.plan import Owner, Workload
from rollyard_slurm.errors import ScriptInvalid
from rollyard_slurm.profile import SiteProfile
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.scripts.batch import batch_script
from rollyard_slurm.scripts.shell import Array, Assign, Code, Comment, Directive, Export, render
from rollyard_slurm.scripts.site import Site


def asked_of_sbatch(script: str) -> list[str]:
    """Return the options of a script, as sbatch reads them: up to the first line that is not a comment."""
    found: list[str] = []
    for line in script.splitlines():
        if not line.startswith("#"):
            break
        if line.startswith("#SBATCH "):
            found += shlex.split(line.removeprefix("#SBATCH "))
    return found


HOSTILE = st.one_of(
    st.text(max_size=40),
    st.text(alphabet="'\"`$(){}[]|&;<>\\!#*?~ \t\n\r\x1b=-%@é\0", max_size=30),
    st.sampled_from(
        [
            "$(touch HACKED)", "`touch HACKED`", "'; touch HACKED; '", "x\n#SBATCH --wrap=touch HACKED\n",
            "\ntouch HACKED\n", "--option", "-", "", "~root", "a b", "*", "$HOME", "\\", "'", "\u2028", "(",
        ]
    ),
)  # fmt: skip
NAMES = st.one_of(st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,20}\Z"), HOSTILE)
OWNED = {"PATH", "BASH_ENV", "LD_PRELOAD", "UID", "EUID", "PPID", "IFS", "_", "SHELLOPTS", "BASHOPTS", "PS4"}
SHOW = "import json, os, sys; json.dump([sys.argv[1:], dict(os.environ)], sys.stdout)"


def bash(tmp_path: Path, lines: list[str]) -> subprocess.CompletedProcess[str]:
    text = "\n".join(lines) + "\n"
    return subprocess.run(
        ["bash", "--noprofile", "--norc"],
        input=text,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
    )


tries = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@tries
@given(words=st.lists(HOSTILE, max_size=4), comment=HOSTILE)
@example(words=["x\ntouch HACKED"], comment="a\ntouch HACKED")
def test_each_word_arrives_as_it_is(tmp_path: Path, words: list[str], comment: str) -> None:
    try:
        lines = render(
            [
                Comment(comment),
                Array("program", (sys.executable, "-c", SHOW, *words, Code('"$last"'))),
                Assign("last", ("", *words)),
                Array("program", (Code('"${program[@]:0:3}"'), *words, Code('"$last"'))),
                Code('"${program[@]}"'),
            ]
        )
    except ScriptInvalid:
        assert any("\0" in word or word.encode(errors="ignore").decode() != word for word in words)
        return
    done = bash(tmp_path, lines)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)[0] == [*words, "".join(words)]
    assert os.listdir(tmp_path) == []


@tries
@given(name=NAMES, value=HOSTILE)
@example(name="A;touch HACKED;B", value="x")
@example(name="A\n", value="x")
@example(name="A[$(touch HACKED)]", value="x")
def test_a_variable_is_set_or_refused(tmp_path: Path, name: str, value: str) -> None:
    plain = name.isascii() and name.isidentifier()
    try:
        lines = render([Export(name, value), Code(shlex.join([sys.executable, "-c", SHOW]))])
    except ScriptInvalid:
        assert not plain or "\0" in value or value.encode(errors="ignore").decode() != value
        return
    assert plain
    if name in OWNED or name.startswith(("PYTHON", "BASH", "LC_")):
        return  # bash or Python itself give these another meaning.
    done = bash(tmp_path, lines)
    assert json.loads(done.stdout)[1][name] == value
    assert os.listdir(tmp_path) == []


@tries
@given(value=HOSTILE)
@example(value="x\n#SBATCH --wrap=id")
@example(value='a"b\\')
def test_an_option_is_one_option_or_refused(value: str) -> None:
    try:
        (line,) = render([Directive("constraint", value)])
    except ScriptInvalid:
        assert not value.isprintable()
        return
    assert asked_of_sbatch(f"#!/bin/bash\n{line}\n") == [f"--constraint={value}"]


@pytest.mark.parametrize("name", ["--wrap", "a b", "x=y", "", "A"])
def test_an_options_name_is_a_name(name: str) -> None:
    with pytest.raises(ScriptInvalid, match="option"):
        render([Directive(name, "x")])


def workload(kind: str, text: str, pairs: tuple[tuple[str, str], ...]) -> Workload:
    return Workload(
        name="p-backend-0" if kind == "backend" else "p-worker-0",
        kind=kind,  # type: ignore[arg-type]
        owner=Owner("BackendPool" if kind == "backend" else "RolloutJob", "default", "p", "12345678"),
        stages=("init",),
        concurrency=(("init", 1),),
        engine="vllm",
        model=text,
        args=(text, f"--x={text}"),
        env=pairs,
    )


@tries
@given(text=HOSTILE, kind=st.sampled_from(["backend", "stage-worker"]), nodes=st.lists(HOSTILE, max_size=2))
@example(text="x\n#SBATCH --uid=0\ntouch HACKED", kind="backend", nodes=[])
def test_whole_scripts(tmp_path: Path, text: str, kind: str, nodes: list[str]) -> None:
    """Whatever pools, jobs, paths and nodes hold, the script does what it does without them, and no more."""
    of = Site(
        home=Path("/shared/h" + text.replace("\0", "")),
        instance="abcd1234",
        url=f"http://head:1/{text}",
        profile=SiteProfile(),
        sandbox_options=("--default-image", text),
        python=text or "python",
    )
    one = workload(kind, text, (("A", text),))
    try:
        made = batch_script(one, of, SlurmJobIdentity.of(one, of.instance, "ffff", 0), nodes).text()
    except ScriptInvalid:
        return
    head = made[: made.index("\numask 077\n")]
    assert all(line.startswith("#") for line in head.splitlines())
    assert made[len(head) :].startswith("\numask 077\n")
    asked = [word.partition("=")[0] for word in asked_of_sbatch(made)]
    plain = workload(kind, "x", ())
    usual = batch_script(
        plain, replace(of, home=Path("/h"), url="u", python="p"), SlurmJobIdentity.of(plain, "a", "f", 0)
    )
    assert set(asked) - {"--exclude"} == {word.partition("=")[0] for word in asked_of_sbatch(usual.text())}
    # Only what the script defines is run, not the program: its words are printed in its place.
    definitions = made[len(head) :].split("\n")
    begin = definitions.index("begin() {")
    start = next(place for place, line in enumerate(definitions) if line.startswith("program=("))
    done = bash(tmp_path, [*definitions[start:begin], 'printf "%s\\0" "${program[@]}"'])
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\0")
    assert (text in words) == (text != "" or "" in words[:-1])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("name", ["A;touch HACKED", "A B", "$(touch HACKED)", "A=B", "1A", "", "A\nB", "A-B"])
def test_a_pools_variable_of_another_name_is_refused_by_name(name: str) -> None:
    one = workload("backend", "m", ((name, "x"),))
    of = Site(home=Path("/h"), instance="a", url="u", profile=SiteProfile())
    with pytest.raises(ScriptInvalid, match="environment variable"):
        batch_script(one, of, SlurmJobIdentity.of(one, "a", "f", 0))


def test_a_pools_variables_are_none_of_the_scripts_own(tmp_path: Path) -> None:
    """An author's `child`, `asked`, `run` or `PATH` cannot change how the script watches the program."""
    pairs = (("child", "1"), ("asked", "1"), ("code", "0"), ("PATH", "/nowhere"), ("IFS", "x"))
    one = replace(workload("backend", "m", pairs), engine="embedded")
    of = Site(home=tmp_path, instance="a", url="u", profile=SiteProfile())
    text = batch_script(one, of, SlurmJobIdentity.of(one, "a", "f", 0)).text()
    show = 'import os; print(os.environ["child"], os.environ["PATH"]); raise SystemExit(7)'
    program = f"program=({shlex.quote(sys.executable)} -c {shlex.quote(show)})\nbegin() {{"
    tail = text[text.index("begin() {") :].replace("begin() {", program)
    done = bash(tmp_path, [tail])
    assert (done.stdout, done.returncode) == ("1 /nowhere\n", 7)


def test_an_identity_that_a_comment_cannot_carry_is_refused() -> None:
    one = workload("backend", "m", ())
    for uid in ("a,instance=other", "a b", 'a"', "a\n"):
        wrong = replace(one, owner=Owner("BackendPool", "default", "p", uid))
        with pytest.raises(ScriptInvalid, match="uid"):
            SlurmJobIdentity.of(wrong, "a", "f", 0)
