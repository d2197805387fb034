"""The page on the architecture shows the states and the failure policy as the code has them."""

from __future__ import annotations

import machine_docs
import pytest

pytestmark = pytest.mark.static


def test_the_states_and_rules_in_the_page_are_current() -> None:
    page = machine_docs.PAGE.read_text()
    assert page == machine_docs.current(page), "run `make docs`, or scripts/machine_docs.py alone"
