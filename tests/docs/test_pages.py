"""The documentation is true: links lead somewhere, commands and make targets exist, manifests are valid."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import rollyard_crds
import yaml
from rollyard.main import cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / line
    for line in subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    ).stdout.splitlines()
]  # fmt: skip
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")
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
    targets = [target for target in LINK.findall(page.read_text()) if "://" not in target]
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", pages())
def test_quotations_are_true(page: Path) -> None:
    quoted = QUOTE.findall(page.read_text())
    assert [file for file, text in quoted if text not in (ROOT / file).read_text()] == []


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


@pytest.mark.parametrize("page", pages())
def test_manifests_are_valid(page: Path) -> None:
    for language, block in FENCE.findall(page.read_text()):
        if language != "yaml":
            continue
        for document in yaml.safe_load_all(block):
            if isinstance(document, dict) and document.get("apiVersion") == rollyard_crds.API_VERSION:
                rollyard_crds.parse(document)
