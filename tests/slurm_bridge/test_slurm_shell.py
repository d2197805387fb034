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
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rollyard_drivers.reconcile.plan import Owner, Workload
from rollyard_slurm.errors import BridgeError, SlurmError
from rollyard_slurm.profile import SiteProfile, load
from rollyard_slurm.readers.job_identity import SlurmJobIdentity
from rollyard_slurm.scripts.batch import batch_script
from rollyard_slurm.scripts.shell import Array, Assign, Code, Comment, Directive, Export, render
from rollyard_slurm.scripts.site import Site
from rollyard_testing.pace import patience


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
    """Run lines of bash. Its output is decoded as it is, while text mode would change carriage returns."""
    done = subprocess.run(
        ["bash", "--noprofile", "--norc"],
        input=("\n".join(lines) + "\n").encode(),
        cwd=tmp_path,
        capture_output=True,
        timeout=patience(60),
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


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
    except SlurmError:
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
    except SlurmError:
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
    except SlurmError:
        assert not value.isprintable()
        return
    assert asked_of_sbatch(f"#!/bin/bash\n{line}\n") == [f"--constraint={value}"]


@pytest.mark.parametrize("name", ["--wrap", "a b", "x=y", "", "A"])
def test_an_options_name_is_a_name(name: str) -> None:
    with pytest.raises(SlurmError, match="option"):
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


WORDS = HOSTILE.map(lambda text: "".join(c for c in text if c.isprintable() and not c.isspace()) or "x")
LINES = HOSTILE.map(lambda text: "".join(c if c.isprintable() else " " for c in text))
OPTIONS = ("partition", "account", "qos", "reservation", "wckey", "constraint", "exclude", "gres")
"""The text fields of the profile that are the options of sbatch of the same names."""
COMMON = {
    **{name: LINES if name in ("constraint", "gres") else WORDS for name in OPTIONS},
    "python": WORDS,
    "env": LINES.map(lambda text: {"FROM_PROFILE": text}),
    "sbatch": WORDS.map(lambda text: [f"--licenses={text}"]),
}
PROFILES = st.fixed_dictionaries(
    {},
    optional={
        **COMMON,
        "workers": st.fixed_dictionaries(
            {}, optional={**COMMON, "runDir": WORDS.map(lambda text: "/" + text[:39])}
        ),
        "backends": st.fixed_dictionaries(
            {},
            optional={
                **COMMON,
                "image": HOSTILE.filter(bool),
                "apptainer": st.lists(WORDS, min_size=1, max_size=2),
                "execOptions": st.lists(WORDS, max_size=2),
            },
        ),
    },
).map(SiteProfile.model_validate)
"""Profiles that hold hostile strings in each text field, as far as the field takes them.

The lines of `prolog` are left out, because they are code.
"""
OBJECTS = st.tuples(
    st.sampled_from(["workload", "namespace", "name", "uid"]),
    st.one_of(st.from_regex(r"\A[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?\Z"), HOSTILE),
)
"""A name of a job, a pool or one of their workloads, and whose name it is."""


def named(one: Workload, whose: str, name: str) -> Workload:
    """Return the workload with one of its names replaced."""
    if whose == "workload":
        return replace(one, name=name)
    return replace(one, owner=replace(one.owner, **{whose: name}))


def defined(made: str) -> list[str]:
    """Return the lines of a script that define variables, without those that make the run folder."""
    lines = made[made.index("\numask 077\n") + 1 :].split("\n")
    begin = lines.index("begin() {")
    prepared = next((at for at, line in enumerate(lines) if line.startswith("node=")), None)
    if prepared is None:
        return lines[:begin]
    top, base, name = (
        next(at for at, line in enumerate(lines) if at > prepared and line.startswith(start))
        for start in ("top=", "base=", "name=")
    )
    return [*lines[:prepared], *lines[top:base], *lines[name:begin]]


@pytest.mark.attack(
    "names, models, arguments, variables and paths hold shell code or `#SBATCH` lines",
    boundary="slurm",
    surface="batch scripts",
    stopped_by="one function makes scripts of data, and is tested with hostile strings",
)
@settings(tries, max_examples=100)
@given(
    text=HOSTILE,
    kind=st.sampled_from(["backend", "stage-worker"]),
    nodes=st.lists(HOSTILE, max_size=2),
    profile=PROFILES,
    called=OBJECTS,
)
@example(
    text="x\n#SBATCH --uid=0\ntouch HACKED",
    kind="backend",
    nodes=[],
    profile=SiteProfile(),
    called=("uid", "u"),
)
@example(
    text="x", kind="stage-worker", nodes=[], profile=SiteProfile(), called=("workload", "$(touch HACKED)")
)
@example(text="x", kind="backend", nodes=[], profile=SiteProfile(), called=("name", "p\ntouch HACKED"))
@example(
    text="x",
    kind="backend",
    nodes=[],
    profile=SiteProfile.model_validate({"backends": {"image": "\r"}}),
    called=("workload", "g"),
)
def test_whole_scripts(
    tmp_path: Path, text: str, kind: str, nodes: list[str], profile: SiteProfile, called: tuple[str, str]
) -> None:
    """Whatever pools, jobs, profiles, paths and nodes hold, the script does what it does without them, and no
    more. Names that are not plain are refused.
    """
    of = Site(
        home=Path("/shared/h" + text.replace("\0", "")),
        instance="abcd1234",
        url=f"http://head:1/{text}",
        profile=profile,
        sandbox_options=("--default-image", text),
        python=text or "python",
    )
    one = named(workload(kind, text, (("A", text),)), *called)
    wanted = profile.of(kind)
    try:
        identity = SlurmJobIdentity.of(one, of.instance, "ffff", 0)
        made = batch_script(one, of, identity, nodes).text()
    except SlurmError:
        return
    assert all(character.isalnum() or character in "._/-" for character in called[1])
    assert SlurmJobIdentity.parse(identity.comment) == identity
    assert subprocess.run(["bash", "-n"], input=made, text=True, timeout=patience(60)).returncode == 0
    head = made[: made.index("\numask 077\n")]
    assert all(line.startswith("#") for line in head.split("\n"))
    assert made[len(head) :].startswith("\numask 077\n")
    for option in {*wanted.sbatch}:  # The site's own options stand in the script as they are.
        assert f"#SBATCH {option}\n" in made
        made = made.replace(f"#SBATCH {option}\n", "")
    asked = dict(word.partition("=")[::2] for word in asked_of_sbatch(made))
    set_here = {name: getattr(wanted, name) for name in OPTIONS if getattr(wanted, name) is not None}
    if "gres" in set_here:
        set_here["gres"] = set_here["gres"].replace("{gpus}", "0")
    if excluded := ",".join([*([wanted.exclude] if wanted.exclude else []), *nodes]):
        set_here["exclude"] = excluded
    plain = workload(kind, "x", ())
    usual = batch_script(
        plain,
        replace(of, home=Path("/h"), url="u", python="p", profile=SiteProfile()),
        SlurmJobIdentity.of(plain, "a", "f", 0),
    )
    default = {word.partition("=")[0] for word in asked_of_sbatch(usual.text())}
    assert asked.keys() - {f"--{name}" for name in set_here} == default - {f"--{name}" for name in set_here}
    assert {name: asked[f"--{name}"] for name in set_here} == set_here
    assert asked["--job-name"] == f"rollyard-{one.name}"
    # Only what the script defines is run, not the program: its words are printed in its place.
    show = 'printf "%s\\0" "${program[@]}" "$FROM_PROFILE" "$top" "$name"'
    done = bash(tmp_path, ["SLURM_JOB_ID=7 FROM_PROFILE= top= name=", *defined(made), show])
    assert done.returncode == 0, done.stderr
    words = done.stdout.split("\0")
    assert words[0] == (wanted.python or of.python)
    assert words[-4] == wanted.env.get("FROM_PROFILE", "")
    if kind == "stage-worker":
        assert words[-3:-1] == [profile.workers.run_dir, f"{one.name}-7"]
    elif profile.backends.image is not None:
        assert profile.backends.image in words
        assert {*profile.backends.apptainer, *profile.backends.exec_options} <= {*words}
    assert text in words or text == ""
    assert os.listdir(tmp_path) == []


TEXT_FIELDS = (
    *(f"{part}{name}" for part in ("", "workers.", "backends.") for name in (*OPTIONS, "python", "env.A")),
    "memory",
    "timeLimit", "sbatch.0", "passEnv.0", "workers.runDir", "backends.image", "backends.apptainer.0",
    "backends.execOptions.0",
)  # fmt: skip


def nested(field: str, value: object) -> object:
    """Return the document of a profile with one field, whose name may lead into mappings and lists."""
    for name in reversed(field.split(".")):
        value = [value] if name.isdigit() else {name: value}
    return value


@tries
@given(text=HOSTILE, field=st.sampled_from(TEXT_FIELDS))
@example(text="a\ntouch HACKED", field="partition")
@example(text="a\0b", field="workers.env.A")
@example(text="a\x1fb", field="sbatch.0")
@example(text="--licenses=x\u2028#SBATCH --uid=0", field="sbatch.0")
def test_a_profiles_text_is_kept_or_refused_by_the_name_of_its_field(
    tmp_path: Path, text: str, field: str
) -> None:
    path = tmp_path.parent / f"{tmp_path.name}.yaml"
    path.write_text(yaml.safe_dump(nested(field, text)))
    refused, found = "", None
    try:
        found = load(path).model_dump(by_alias=True)
    except BridgeError as error:
        refused = str(error).removeprefix(f"--profile {path}: ")
    if refused:
        assert refused.startswith(field.split(".")[0])
        return
    for name in field.split("."):
        found = found[int(name) if name.isdigit() else name]  # type: ignore[index]
    assert found == text
    assert not {"\n", "\0"} & {*text} or field == "backends.image"


@tries
@given(name=NAMES)
@example(name="é")
@example(name="A\n")
@example(name="A;touch HACKED")
def test_a_profiles_variable_has_a_plain_name(name: str) -> None:
    if name.isascii() and name.isidentifier():
        assert SiteProfile.model_validate({"env": {name: "x"}}).env == {name: "x"}
    else:
        with pytest.raises(ValidationError, match="env"):
            SiteProfile.model_validate({"env": {name: "x"}})


@pytest.mark.attack(
    "a name is shell code",
    boundary="slurm",
    surface="`engine.env` of a pool",
    stopped_by="names are checked in the model, and again in the script",
)
@pytest.mark.parametrize("name", ["A;touch HACKED", "A B", "$(touch HACKED)", "A=B", "1A", "", "A\nB", "A-B"])
def test_a_pools_variable_of_another_name_is_refused_by_name(name: str) -> None:
    one = workload("backend", "m", ((name, "x"),))
    of = Site(home=Path("/h"), instance="a", url="u", profile=SiteProfile())
    with pytest.raises(SlurmError, match="environment variable"):
        batch_script(one, of, SlurmJobIdentity.of(one, "a", "f", 0))


@pytest.mark.attack(
    "a variable of the script itself is overwritten",
    boundary="slurm",
    surface="`engine.env` of a pool",
    stopped_by="they are set in the server's own shell alone",
)
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


@pytest.mark.attack(
    "a name in it makes the job another bridge's",
    boundary="slurm",
    surface="comment of a job",
    stopped_by="other characters than those of names are refused",
)
def test_an_identity_that_a_comment_cannot_carry_is_refused() -> None:
    one = workload("backend", "m", ())
    for uid in ("a,instance=other", "a b", 'a"', "a\n"):
        wrong = replace(one, owner=Owner("BackendPool", "default", "p", uid))
        with pytest.raises(SlurmError, match="uid"):
            SlurmJobIdentity.of(wrong, "a", "f", 0)
