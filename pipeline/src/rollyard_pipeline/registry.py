"""Extension points: handlers, agents, tools and tool-call parsers from installed packages.

An entry point names a class. The class is called without arguments, once per use, so an extension keeps no
state between rollouts unless it arranges for that itself.
"""

from __future__ import annotations

import contextlib
from importlib import metadata
from typing import Any, Final

from rollyard_pipeline.errors import PermanentFailure

HANDLERS: Final = "rollyard.handlers"
AGENTS: Final = "rollyard.agents"
TOOLS: Final = "rollyard.tools"
TOOL_PARSERS: Final = "rollyard.tool_parsers"
REWARD_FUNCTIONS: Final = "rollyard.reward_functions"

_OURS: Final = "rollyard"
"""The distribution that is part of Rollyard itself."""
_WORDS: Final = {
    HANDLERS: ("handler", "UnknownHandler"),
    AGENTS: ("agent", "UnknownAgent"),
    TOOLS: ("tool", "UnknownTool"),
    TOOL_PARSERS: ("tool-call parser", "UnknownToolParser"),
    REWARD_FUNCTIONS: ("reward function", "UnknownRewardFunction"),
}
"""What an extension of each group is called, and the reason of the failure if none has the requested name."""


def installed(group: str) -> list[str]:
    """Return the names that installed packages offer in `group`, sorted."""
    return sorted({entry.name for entry in metadata.entry_points(group=group)})


class Registry:
    """Loads extensions by name and caches them. There is one registry per worker.

    `overrides` maps a group to classes by name and takes precedence over installed packages (for example, for
    a test's own tool).
    """

    def __init__(self, overrides: dict[str, dict[str, Any]] | None = None) -> None:
        self._loaded: dict[tuple[str, str], Any] = {}
        self._own: metadata.EntryPoints | None = None
        self._entries: Any = None
        for group, classes in (overrides or {}).items():
            for name, cls in classes.items():
                self._loaded[group, name] = cls
        self._overridden = frozenset(self._loaded)

    def load_own(self) -> None:
        """Load the extensions of Rollyard's own distribution, so that `load` finds them at once."""
        for group in (HANDLERS, AGENTS, TOOLS, TOOL_PARSERS):
            for entry in self._own_entries().select(group=group):
                with contextlib.suppress(PermanentFailure):
                    self.load(group, entry.name)

    def _own_entries(self) -> metadata.EntryPoints:
        if self._own is None:
            try:
                self._own = metadata.distribution(_OURS).entry_points
            except metadata.PackageNotFoundError:  # The packages are on the path without being installed.
                self._own = metadata.EntryPoints(())
        return self._own

    def load(self, group: str, name: str) -> Any:
        """Return the class called `name`.

        Raises:
            PermanentFailure: No extension of that name is installed here, or it cannot be imported.
        """
        key = (group, name)
        if key not in self._loaded:
            entry = self._entry(group, name)
            try:
                self._loaded[key] = entry.load()
            except (ImportError, AttributeError) as error:
                noun, reason = _WORDS[group]
                raise PermanentFailure(
                    f"the {noun} '{name}' ({entry.value}) cannot be loaded: {error}", reason
                ) from error
        return self._loaded[key]

    def is_ours(self, group: str, name: str) -> bool:
        """Return whether `name` stands for a class of Rollyard's own distribution, or an override."""
        return (group, name) in self._overridden or bool(self._own_entries().select(group=group, name=name))

    def target(self, group: str, name: str) -> str:
        """Return where the class called `name` is, as `module:class`, without importing it.

        Raises:
            PermanentFailure: No extension of that name is installed here.
        """
        loaded = self._loaded.get((group, name))
        if loaded is not None:
            return f"{loaded.__module__}:{loaded.__qualname__}"
        return self._entry(group, name).value

    def _entry(self, group: str, name: str) -> metadata.EntryPoint:
        # Those of Rollyard's own distribution come from one file. Only other names require reading a file of
        # each distribution.
        entries = self._own_entries().select(group=group, name=name)
        if not entries:
            if self._entries is None:
                self._entries = metadata.entry_points()
            entries = self._entries.select(group=group, name=name)
        for entry in entries:
            return entry
        noun, reason = _WORDS[group]
        names = ", ".join(installed(group)) or "none"
        raise PermanentFailure(f"no {noun} '{name}' is installed on this worker; installed: {names}", reason)
