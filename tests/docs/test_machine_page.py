"""The pages show the states, the failure policy, options, fields, reasons and values as the code has them."""

from __future__ import annotations

import re
import tomllib

import machine_docs
import option_docs
import pytest
import reference_pages
from rollyard.main import cli
from rollyard_crds.described_fields import KINDS, FieldUnknown, described
from rollyard_crds.reasons import DOCUMENTATION, all_reasons, link

pytestmark = pytest.mark.static


def test_the_states_and_rules_in_the_page_are_current() -> None:
    page = machine_docs.PAGE.read_text()
    assert page == machine_docs.current(page), "run `make reference`, or scripts/machine_docs.py alone"


def test_the_options_in_the_page_are_current() -> None:
    page = option_docs.PAGE.read_text()
    assert page == option_docs.current(page), "run `make reference`, or scripts/option_docs.py alone"


def test_every_option_has_a_help() -> None:
    commands = option_docs.commands(cli, "rollyard")
    options = {path: option_docs.options_of(path, command) for path, command in commands}
    assert "rollyard worker" in options
    assert [(path, one.names) for path, several in options.items() for one in several if not one.help] == []


def test_the_pages_of_fields_reasons_and_values_are_current() -> None:
    assert reference_pages.stale() == [], "run `make reference`, or scripts/reference_pages.py alone"


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_is_described(kind: str) -> None:
    assert [field.path for field in described(kind).walk() if not field.description] == []


def test_fields_have_type_default_and_bounds() -> None:
    job = described("RolloutJob")
    concurrency = job.find("spec.stages.init.concurrency")
    assert (concurrency.type, concurrency.default, concurrency.bounds) == ("integer", "`16`", ("1 to 4,096",))
    assert job.find("spec.stages.run.concurrency").default.startswith("as many as the pool has places for")
    assert job.find("spec.agent.maxTurns").immutable
    assert not job.find("spec.suspend").immutable
    assert job.find("spec.tasks.inline.id").path == "spec.tasks.inline[].id"
    assert "give exactly one of" in job.find("spec.tasks").rules[0]
    with pytest.raises(FieldUnknown, match=r"did you mean spec\.agent\.maxTurns"):
        job.find("spec.maxTurns")


def test_links_of_problems_begin_with_the_address_of_the_documentation() -> None:
    project = tomllib.loads((option_docs.ROOT / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Documentation"] == DOCUMENTATION
    assert link("LeaseLost") == f"{DOCUMENTATION}reference/reasons.html#leaselost"


def test_links_of_problems_lead_to_headings() -> None:
    headings = re.findall(r"^## (\w+)$", (reference_pages.FOLDER / "reasons.md").read_text(), re.MULTILINE)
    assert headings == list(all_reasons())
    assert [reference_pages.anchor(name) for name in headings] == [name.lower() for name in all_reasons()]


def test_reasons_name_options_that_exist() -> None:
    known = set(re.findall(r"--[a-z][\w-]+", option_docs.PAGE.read_text()))
    texts = [text for several in all_reasons().values() for one in several for text in (one.what, one.remedy)]
    named = {word for text in texts for word in re.findall(r"`(--[a-z][\w-]+)[^`]*`", text)}
    # The other options are those of vLLM and the embedded engine.
    assert named - known - {"--help"} == {"--kv-cache-mib", "--logprobs-mode"}
