"""The names of repositories of the Hugging Face Hub. This module is pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_WORD: Final = r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,94}[A-Za-z0-9_])?"
_NAME: Final = re.compile(rf"({_WORD}/{_WORD})(?:@({_WORD}(?:/{_WORD}){{0,7}}))?")


@dataclass(frozen=True, slots=True)
class HubName:
    """The name of a repository with a revision."""

    repository: str
    """The id on the hub: `OWNER/NAME`."""
    revision: str = "main"

    def __str__(self) -> str:
        return self.repository if self.revision == "main" else f"{self.repository}@{self.revision}"


def hub_name(text: str) -> HubName | None:
    """Return the repository that a text names, or None if it is a path or any other name.

    No part of a name is `..`, so a name never leads out of the cache. Whether there is a folder of that name
    is for the caller to say.
    """
    match = _NAME.fullmatch(text)
    if match is None or ".." in text or "--" in match[1]:
        return None
    return HubName(match[1], match[2] or "main")
