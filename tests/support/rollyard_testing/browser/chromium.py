"""Debian's Chromium, driven by Playwright. Playwright's own browsers are not used."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from playwright.sync_api import Browser, sync_playwright

from rollyard_testing.pace import patience

PATIENCE: Final = patience(60_000.0)
"""The bound on a step in the browser in milliseconds, which only a busy machine comes near."""
_QUIET: Final = (
    # A container's /dev/shm is often too small for a page.
    "--disable-dev-shm-usage",
    # Chromium itself would ask its maker's servers for updates and lists.
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
)


def program() -> str | None:
    """Return the path of Chromium, or None where there is none."""
    return shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def problem() -> str | None:
    """Return why there is no browser here, or None where there is one."""
    return None if program() else "Chromium is not installed (Debian: apt install chromium)"


@contextmanager
def a_browser(options: Sequence[str] = ()) -> Iterator[Browser]:
    """Start a Chromium without a window, and end it with the block.

    Args:
        options: Further options of Chromium's command line.

    Raises:
        playwright.sync_api.Error: Chromium does not start.
    """
    arguments = [*_QUIET, *options]
    if os.geteuid() == 0:
        # Chromium refuses to run as root within its sandbox.
        arguments.append("--no-sandbox")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program(), args=arguments, timeout=2 * PATIENCE)
        try:
            yield browser
        finally:
            browser.close()
