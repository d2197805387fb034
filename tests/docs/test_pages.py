"""The documentation is true: links lead somewhere, commands and make targets exist, manifests are valid."""

from __future__ import annotations

import re
import tomllib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import rollyard_crds
import yaml
from rollyard.main import cli
from rollyard_testing.checkout import ROOT, files

PAGES = [ROOT / name for name in files("*.md")]
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
ANCHOR = re.compile(r"\[[^\]]*\]\(([^)#\s]*)#([^)\s]+)\)")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]*`")
FENCE = re.compile(r"```(\w*)\n(.*?)```", re.DOTALL)
WORDS = re.compile(r"\b(anew|goes\s+on|went\s+on|told|by\s+then)\b", re.IGNORECASE)
"""Words that hide who does what. `tests/house` refuses them in the code."""
QUOTE = re.compile(r"<!-- from: (\S+) -->\n```\w*\n(.*?)```", re.DOTALL)


def pages() -> list[pytest.param]:  # type: ignore[valid-type]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in PAGES]


def test_there_are_pages() -> None:
    names = {page.relative_to(ROOT).as_posix() for page in PAGES}
    assert {
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "docs/index.md",
        "docs/architecture.md",
        "docs/releasing.md",
        "docs/handlers.md",
        "docs/trajectories.md",
        "docs/backends.md",
        "docs/demo-vllm.md",
        "docs/qwen3-8b.md",
        "docs/weights.md",
        "docs/kubernetes.md",
        "docs/slurm.md",
        "docs/slurm-admins.md",
        "docs/slurm-air-gapped.md",
        "docs/slurm-cleaning-up.md",
        "docs/slurm-kubernetes.md",
        "docs/slurm-limits.md",
        "docs/slurm-profile.md",
        "docs/slurm-storage.md",
    } <= names


@pytest.mark.parametrize("page", pages())
def test_links_lead_to_files(page: Path) -> None:
    # Regular expressions look like links.
    text = CODE.sub("``", page.read_text())
    targets = [target for target in LINK.findall(text) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


def anchors(page: Path) -> set[str]:
    """Return the names by which links reach the headings of a page."""
    text = FENCE.sub("", page.read_text())
    # A heading shows the text of its links only.
    shown = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(text))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in shown}


@pytest.mark.parametrize("page", pages())
def test_links_lead_to_headings(page: Path) -> None:
    wrong = [
        f"{target}#{anchor}"
        for target, anchor in ANCHOR.findall(FENCE.sub("", page.read_text()))
        if not re.match(r"[a-z]+:", target)
        and (not target or target.endswith(".md"))
        and anchor not in anchors((page.parent / target).resolve() if target else page)
    ]
    assert not wrong


def entries(text: str) -> Iterator[str]:
    """Yield the paragraphs, entries of lists and rows of tables, each as a line. Fences are left out."""
    for block in re.split(r"\n(?=\s*[-*] |\s*\d+\. |\||#)|\n\s*\n", FENCE.sub("", text)):
        line = " ".join(block.split())
        if not re.fullmatch(r"[|: -]*|#.*|\| (surface|field|value|option) \|.*", line):
            yield line


@pytest.mark.parametrize("page", pages())
def test_nothing_is_there_twice(page: Path) -> None:
    """A merge of two branches easily keeps a paragraph, an entry or a row of both."""
    long = [entry for entry in entries(page.read_text()) if len(entry) > 40]
    assert [entry for entry, count in Counter(long).items() if count > 1] == []


def test_each_entry_of_the_changelog_begins_in_its_own_way() -> None:
    found = [entry for entry in entries((ROOT / "CHANGELOG.md").read_text()) if entry.startswith("- ")]
    assert found
    openings = Counter(" ".join(entry.split()[:6]) for entry in found)
    assert [opening for opening, count in openings.items() if count > 1] == []


@pytest.mark.parametrize("page", pages())
def test_quotations_are_true(page: Path) -> None:
    quoted = QUOTE.findall(page.read_text())
    assert [file for file, text in quoted if text not in (ROOT / file).read_text()] == []


def test_the_page_of_the_installation_names_what_the_client_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {re.split("[^A-Za-z-]", line)[0].lower() for line in project["dependencies"]}
    text = (ROOT / "docs/installation.md").read_text()
    listed = re.search(r"only small packages \(([^)]+)\)", text)
    assert listed is not None
    assert set(re.split(r",\s+|\s+and\s+", listed[1].lower())) == needed
    assert {f"rollyard[{name}]" for name in project["optional-dependencies"]} - {
        "rollyard[dev]",
        "rollyard[docs]",
    } == set(re.findall(r"`(rollyard\[\w+\])`", text))


def test_the_page_of_handlers_quotes_the_example() -> None:
    quoted = {Path(file).name for file, _ in QUOTE.findall((ROOT / "docs/handlers.md").read_text())}
    assert quoted == {"agent.py", "tool.py", "tool_parser.py"}


# The lines of the changelog stay as they were written.
WORDED = [page for page in PAGES if page.name != "CHANGELOG.md"]


@pytest.mark.parametrize("page", WORDED, ids=lambda page: str(page.relative_to(ROOT)))
def test_words(page: Path) -> None:
    prose = FENCE.sub("", page.read_text())
    assert [prose[max(0, word.start() - 60) : word.end()] for word in WORDS.finditer(prose)] == []


@pytest.mark.parametrize("page", pages())
def test_commands_exist(page: Path) -> None:
    known = set(cli.list_commands(None))  # type: ignore[arg-type]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    wrong = []
    for _, block in FENCE.findall(page.read_text()):
        for line in block.splitlines():
            words = line.split("#")[0].removeprefix("$ ").split()
            if not words:
                continue
            if Path(words[0]).name == "rollyard" and len(words) > 1 and not words[1].startswith("-"):
                wrong += [line] if words[1] not in known else []
            if words[0] == "make" and len(words) > 1:
                wrong += [line] if words[1] not in targets else []
    assert wrong == []


def unknown_options(words: list[str]) -> list[str]:
    """Return the options in a command of `rollyard` that the command does not have."""
    if words[0].startswith("--kubernetes"):  # It may stand before the command.
        words = words[1:]
    command: click.Command | None = cli
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        command, words = command.get_command(click.Context(command), words[0]), words[1:]
    if command is None or command.ignore_unknown_options:
        return []
    known = {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]|-[a-zA-Z]$", word)}
    return sorted(given - known - {"--help", "-h"})


@pytest.mark.parametrize("page", pages())
def test_options_exist(page: Path) -> None:
    text = page.read_text()
    lines = [line.removeprefix("$ ") for _, block in FENCE.findall(text) for line in block.splitlines()]
    whole = re.sub(r"\\\n\s*", " ", "\n".join(lines)).splitlines()
    wrong = {}
    for line in whole + re.findall(r"`([^`\n]+)`", FENCE.sub("", text)):
        words = re.split(r"\s[#|>&]|;|\]|\[", line)[0].split()
        if len(words) > 1 and Path(words[0]).name == "rollyard" and (unknown := unknown_options(words[1:])):
            wrong[line] = unknown
    assert wrong == {}


@pytest.mark.parametrize("page", pages())
def test_manifests_are_valid(page: Path) -> None:
    for language, block in FENCE.findall(page.read_text()):
        if language != "yaml":
            continue
        for document in yaml.safe_load_all(block):
            if isinstance(document, dict) and document.get("apiVersion") == rollyard_crds.API_VERSION:
                rollyard_crds.parse(document)
