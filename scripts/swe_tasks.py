#!/usr/bin/env python3
"""Make tasks for the handler `swe` from source distributions of PyPI, in which a recorded bug is planted.

    scripts/swe_tasks.py write OUT.jsonl --layout v5 | rebench    rows from the recorded recipes
    scripts/swe_tasks.py find PROJECT VERSION --tests PATH …      a new recipe, printed as JSON

A recipe names a project, its version, a change of one line that plants the bug, and the tests that fail with
it. pip fetches the source distribution and pytest, from wherever it is configured to, into a cache outside of
the tree. The visible repository lacks the tests that fail; the hidden tests' diff brings them. The repository
and pytest lie in an archive within each row, so that a sandbox without a network and without an image is
enough: it needs bash, tar, git and Python 3.11 or later.
"""

import argparse
import ast
import base64
import difflib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RECIPES = Path(__file__).resolve().parent.parent / "examples" / "swe" / "recipes.json"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rollyard" / "swe"
PYTEST = ("pytest==7.4.4", "pluggy<2", "iniconfig<3", "packaging")
"""Wheels of pytest that need nothing else. Later versions need pygments, which is large."""
TEST_SECONDS = 120
MOST_FAILURES = 8
MOST_PASSES = 40
TRIES = 60
RESULT = re.compile(r"^(PASSED|FAILED|ERROR) (\S+)", re.MULTILINE)


def fetched(cache: Path, *requirements: str, binary: bool) -> list[Path]:
    """Return what pip downloads for these requirements, without their dependencies. It is cached.

    Where pip cannot download it, this program ends with the exit status EX_UNAVAILABLE.
    """
    folder = cache / re.sub(r"[^\w.-]+", "_", "-".join(requirements))
    if not folder.is_dir():
        with tempfile.TemporaryDirectory(dir=_made(cache)) as partial:
            kind = "--only-binary" if binary else "--no-binary"
            options = ["-q", "--no-deps", kind, ":all:", "-d", partial]
            command = [sys.executable, "-m", "pip", "download", *options, *requirements]
            if subprocess.run(command, timeout=600).returncode != 0:
                print(f"swe_tasks: pip cannot download {', '.join(requirements)}", file=sys.stderr)
                sys.exit(os.EX_UNAVAILABLE)
            shutil.copytree(partial, folder)
    return sorted(folder.iterdir())


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def sources(cache: Path, recipe: dict[str, Any]) -> dict[str, bytes]:
    """Return the regular files of a source distribution, by their path below its top folder."""
    (packed,) = fetched(cache, f"{recipe['project']}=={recipe['version']}", binary=False)
    with tarfile.open(packed) as archive:
        files = {
            member.name.partition("/")[2]: file.read()
            for member in archive
            if member.isfile() and (file := archive.extractfile(member)) is not None
        }
    return {name: data for name, data in files.items() if name and not name.startswith(".git/")}


def site(cache: Path) -> dict[str, bytes]:
    """Return the files of pytest and of what a project's tests import, as an installation has them."""
    files = {}
    for wheel in fetched(cache, *PYTEST, binary=True):
        with zipfile.ZipFile(wheel) as archive:
            files |= {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}
    return files


def diff(path: str, old: str | None, new: str | None) -> str:
    """Return the change of a text file in git's form. None stands for a file that does not exist."""
    head = f"diff --git a/{path} b/{path}\n"
    head += "new file mode 100644\n" if old is None else "deleted file mode 100644\n" if new is None else ""
    lines = difflib.unified_diff(
        (old or "").splitlines(keepends=True),
        (new or "").splitlines(keepends=True),
        "/dev/null" if old is None else f"a/{path}",
        "/dev/null" if new is None else f"b/{path}",
    )
    marked = (line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    return head + "".join(marked)


def command(recipe: dict[str, Any]) -> str:
    """Return the test command. The variable begins with what the evaluation puts there."""
    paths = ":".join(f"$PWD/{root}".rstrip("/") for root in [*recipe.get("roots", [""]), "../site"])
    return f'PYTHONPATH="$PYTHONPATH:{paths}" python3 -m pytest -o addopts= -rA -p no:cacheprovider'


def without(text: str, tests: set[str]) -> str:
    """Return a test file without some functions, which are named as `Class::function` or `function`."""
    lines = text.splitlines(keepends=True)
    removed: set[int] = set()

    def look(body: list[ast.stmt], above: str) -> None:
        left = 0
        for node in body:
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{above}{node.name}::")
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and above + node.name in tests:
                first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                removed.update(range(first - 1, node.end_lineno or node.lineno))
                continue
            left += 1
        if not left:  # A class must have a body.
            removed.difference_update(range(body[0].lineno - 1, body[0].end_lineno or body[0].lineno))

    look(ast.parse(text).body, "")
    return "".join(line for index, line in enumerate(lines) if index not in removed)


def planted(files: dict[str, bytes], recipe: dict[str, Any]) -> dict[str, bytes]:
    """Return the files with the recipe's bug: one line of a file has other words."""
    bug = recipe["bug"]
    lines = files[bug["path"]].decode().splitlines(keepends=True)
    line = lines[bug["line"] - 1]
    if bug["old"] != line.rstrip("\n"):
        raise SystemExit(f"{recipe['project']}: line {bug['line']} of {bug['path']} is not the recorded one")
    lines[bug["line"] - 1] = line.replace(bug["old"], bug["new"])
    return {**files, bug["path"]: "".join(lines).encode()}


def row(cache: Path, recipe: dict[str, Any], layout: str) -> dict[str, Any]:
    """Return the row of a recipe, in the layout of SWE-bench 5 or of SWE-rebench."""
    whole = sources(cache, recipe)
    broken = planted(whole, recipe)
    path = recipe["bug"]["path"]
    gold = diff(path, broken[path].decode(), whole[path].decode())
    tests_patch, visible = "", dict(broken)
    for file in sorted({test.split("::")[0] for test in recipe["fail_to_pass"]}):
        names = {
            test.partition("::")[2].split("[")[0] for test in recipe["fail_to_pass"] if test.startswith(file)
        }
        text = whole[file].decode()
        visible[file] = without(text, names).encode()
        tests_patch += diff(file, visible[file].decode(), text)
    files = {f"repo/{name}": data for name, data in visible.items()}
    files |= {f"site/{name}": data for name, data in site(cache).items()}
    common = {
        "instance_id": f"{recipe['project']}-{recipe['version']}",
        "repo": f"pypi/{recipe['project']}",
        "version": recipe["version"],
        "problem_statement": f"{recipe['project']} {recipe['version']}: {recipe['problem']}",
        "patch": gold,
        "FAIL_TO_PASS": json.dumps(recipe["fail_to_pass"]),
        "PASS_TO_PASS": json.dumps(recipe["pass_to_pass"]),
        "repository": {"path": "repo", "archive": packed(files), "unpack": "."},
    }
    if layout == "rebench":
        config = {"log_parser": "parse_log_pytest", "test_cmd": command(recipe)}
        return {**common, "image": "", "test_patch": tests_patch, "install_config": config}
    script = (
        f"git apply -v - <<'END_OF_TESTS'\n{tests_patch}END_OF_TESTS\n"
        f"echo '>>>>> Start Test Output'\n{command(recipe)} {' '.join(recipe['tests'])}\ncode=$?\n"
        "echo '>>>>> End Test Output'\necho \">>>>> Test Exit Code: $code\"\n"
    )
    v5 = {"image": "", "log_parser": "parse_log_pytest", "eval_type": "pass_and_fail", "eval_script": script}
    return {**common, **v5}


def packed(files: dict[str, bytes]) -> str:
    """Return a compressed tar file with these files, in base64. It is the same each time."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:xz", preset=1) as archive:
        for name, data in sorted(files.items()):
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(data), 0o644
            archive.addfile(member, io.BytesIO(data))
    return base64.b64encode(out.getvalue()).decode()


def results(cache: Path, files: dict[str, bytes], recipe: dict[str, Any]) -> dict[str, str]:
    """Return the results of the project's tests, which run on this machine, in a folder of their own."""
    with tempfile.TemporaryDirectory() as folder:
        for name, data in [
            *((f"repo/{name}", data) for name, data in files.items()),
            *((f"site/{name}", data) for name, data in site(cache).items()),
        ]:
            path = Path(folder, name)
            _made(path.parent)
            path.write_bytes(data)
        try:
            ended = subprocess.run(
                ["bash", "-c", f"{command(recipe)} {' '.join(recipe['tests'])}"],
                cwd=Path(folder, "repo"),
                capture_output=True,
                text=True,
                timeout=TEST_SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return {}
    return {test: status for status, test in RESULT.findall(ended.stdout)}


SWAPPED = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
"""The words of an operator, and those that take their place."""


def mutations(path: str, text: str) -> Iterator[dict[str, Any]]:
    """Yield bugs: an operator of one line is replaced by another one."""
    lines = text.splitlines()
    for node in ast.walk(ast.parse(text)):
        pairs: list[tuple[ast.expr, Any, ast.expr]] = []
        if isinstance(node, ast.Compare):
            pairs = [(node.left, node.ops[0], node.comparators[0])]
        elif isinstance(node, ast.BinOp):
            pairs = [(node.left, node.op, node.right)]
        elif isinstance(node, ast.BoolOp):
            pairs = [(node.values[0], node.op, node.values[1])]
        for left, operator, right in pairs:
            if type(operator) not in SWAPPED or left.end_lineno != right.lineno:
                continue
            line = lines[right.lineno - 1]
            old, new = SWAPPED[type(operator)]
            start, end = left.end_col_offset or 0, right.col_offset
            between = line[start:end]
            if line.isascii() and between.count(old) == 1:
                changed = line[:start] + between.replace(old, new) + line[end:]
                yield {"path": path, "line": right.lineno, "old": line, "new": changed}


def _is_code(path: str) -> bool:
    """Return whether a file belongs to what a project installs."""
    if not path.endswith(".py") or "test" in path or path in ("setup.py", "conftest.py"):
        return False
    return not path.startswith(("doc", "example", "script", "bench"))


def find(cache: Path, recipe: dict[str, Any], seed: int) -> dict[str, Any] | None:
    """Return the recipe with a bug that some tests catch and most do not, or None."""
    files = sources(cache, recipe)
    before = results(cache, files, recipe)
    good = {test for test, status in before.items() if status == "PASSED"}
    print(f"{recipe['project']}: {len(good)} of {len(before)} tests pass", file=sys.stderr)
    candidates = [
        bug for path, data in files.items() if _is_code(path) for bug in mutations(path, data.decode())
    ]
    random.Random(seed).shuffle(candidates)
    for bug in candidates[:TRIES]:
        candidate = {**recipe, "bug": bug}
        after = results(cache, planted(files, candidate), recipe)
        fails = sorted(test for test in good if after.get(test) in ("FAILED", "ERROR"))
        # SWE-rebench runs the files that the hidden tests' diff changes, and no others.
        run = {test.split("::")[0] for test in fails}
        passes = sorted(test for test in good if after.get(test) == "PASSED" and test.split("::")[0] in run)
        if 1 <= len(fails) <= MOST_FAILURES and len(passes) >= 5:
            return {
                **candidate,
                "tests": sorted(run),
                "fail_to_pass": fails,
                "pass_to_pass": passes[:MOST_PASSES],
            }
    return None


def main() -> int:
    """Do what the command line asks for, and return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="where downloads are kept (default: %(default)s)"
    )
    commands = parser.add_subparsers(dest="command", required=True)
    write = commands.add_parser("write", help="write rows from recipes")
    write.add_argument("out", type=Path)
    write.add_argument("--layout", choices=("v5", "rebench"), default="v5")
    write.add_argument("--recipes", type=Path, default=RECIPES)
    write.add_argument("--only", action="append", help="a project; default: all")
    look = commands.add_parser("find", help="look for a bug that tests catch, and print the recipe")
    look.add_argument("project")
    look.add_argument("version")
    look.add_argument("--tests", nargs="+", default=["tests"])
    look.add_argument("--roots", nargs="+", default=[""], help="folders from which modules are imported")
    look.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.command == "find":
        project = {"project": options.project, "version": options.version}
        project |= {"roots": options.roots, "tests": options.tests}
        recipe = find(options.cache, project, options.seed)
        if recipe is None:
            print(f"{options.project}: no bug was found that the tests catch", file=sys.stderr)
            return 1
        print(json.dumps({**recipe, "problem": "TODO: describe what goes wrong."}, indent=1))
        return 0
    recipes = json.loads(options.recipes.read_text(encoding="utf-8"))
    chosen = [recipe for recipe in recipes if not options.only or recipe["project"] in options.only]
    with options.out.open("w", encoding="utf-8") as file:
        for recipe in chosen:
            file.write(json.dumps(row(options.cache, recipe, options.layout)) + "\n")
    print(f"{options.out}: {len(chosen)} rows")
    return 0


if __name__ == "__main__":
    sys.exit(main())
