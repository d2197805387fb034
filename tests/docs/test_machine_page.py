"""The pages show the states, the failure policy and the options as the code has them."""

from __future__ import annotations

import machine_docs
import option_docs
import pytest

pytestmark = pytest.mark.static


def test_the_states_and_rules_in_the_page_are_current() -> None:
    page = machine_docs.PAGE.read_text()
    assert page == machine_docs.current(page), "run `make docs`, or scripts/machine_docs.py alone"


def test_the_options_in_the_page_are_current() -> None:
    page = option_docs.PAGE.read_text()
    assert page == option_docs.current(page), "run `make docs`, or scripts/option_docs.py alone"
