"""The browser of the user's desktop."""

from __future__ import annotations

import html
import os
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path

FILE_NAME = "open.html"
_DOCUMENT = """<!doctype html>
<meta charset="utf-8">
<meta name="referrer" content="no-referrer">
<meta http-equiv="refresh" content="0; url={link}">
<title>Rollyard</title>
<a href="{link}">Rollyard</a>
"""


def has_desktop(env: Mapping[str, str] = os.environ) -> bool:
    """Return whether programs with windows can be started here."""
    if env.get("SSH_CONNECTION"):
        return False
    return sys.platform == "darwin" or bool(env.get("DISPLAY") or env.get("WAYLAND_DISPLAY"))


def open_in_browser(link: str, folder: Path) -> bool:
    """Open a link in the user's browser, and return whether one was started.

    The command line of a process is visible to all users of a machine, so the browser is given a file that
    only this user can read, and the file leads to the link. The next call replaces the file, whose code has
    expired long before.

    Args:
        link: The link, with its one-time code.
        folder: The folder for the file, which is made if it is missing.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / FILE_NAME
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(_DOCUMENT.format(link=html.escape(link, quote=True)))
    try:
        return webbrowser.open(path.as_uri())
    except webbrowser.Error:
        return False
