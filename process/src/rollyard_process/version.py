"""The version of Rollyard: `version` in pyproject.toml, as the installed distribution states it."""

from __future__ import annotations

from importlib import metadata
from typing import Final

DISTRIBUTION: Final = "rollyard"
UNKNOWN: Final = "0+unknown"
"""The version of a source tree that is on the path without being installed."""


def installed_version() -> str:
    """Return the version of the installed distribution, such as `0.1.0`, or `UNKNOWN` if there is none."""
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return UNKNOWN
