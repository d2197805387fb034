"""Extension points of packages and plugins: handlers, agents, harnesses, tools, parsers, reward functions.

An entry point names a class. The class is called without arguments, once per use, so an extension keeps no
state between rollouts unless it arranges for that itself. A plugin is a Python file, whose module has a name
of its own: it is not looked for in `sys.path`, so it hides no other module.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import operator
import site
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any, Final

from rollyard_crds.reading.plugin import (
    KINDS,
    Offers,
    PluginError,
    doubled,
    plugin_files,
    read_plugin,
)

from rollyard_pipeline.errors import PermanentFailure

HANDLERS: Final = "rollyard.handlers"
AGENTS: Final = "rollyard.agents"
HARNESSES: Final = "rollyard.harnesses"
TOOLS: Final = "rollyard.tools"
TOOL_PARSERS: Final = "rollyard.tool_parsers"
REWARD_FUNCTIONS: Final = "rollyard.reward_functions"

_OURS: Final = "rollyard"
"""The distribution that is part of Rollyard itself."""
_WORDS: Final = {
    HANDLERS: ("handler", "UnknownHandler"),
    AGENTS: ("agent", "UnknownAgent"),
    HARNESSES: ("harness", "UnknownHarness"),
    TOOLS: ("tool", "UnknownTool"),
    TOOL_PARSERS: ("tool-call parser", "UnknownToolParser"),
    REWARD_FUNCTIONS: ("reward function", "UnknownRewardFunction"),
}
"""What an extension of each group is called, and the reason of the failure if none has the requested name."""


def installed(group: str) -> list[str]:
    """Return the names that installed packages offer in `group`, sorted."""
    return sorted({entry.name for entry in metadata.entry_points(group=group)})


def _notice_installed() -> None:
    """Let this process import what was installed since it started, as it may have stood ready for long."""
    importlib.invalidate_caches()
    for folder in site.getsitepackages():
        site.addsitedir(folder)  # An installation in development mode adds a folder to the path.


def imported(target: str) -> Any:
    """Return the class or function at `target`: MODULE:NAME, or for one of a plugin /PATH/FILE.py:NAME.

    Raises:
        ImportError, AttributeError: There is no such module, or it has no such name.
        Exception: The module raised this exception when it was run.
    """
    place, _, name = target.rpartition(":")
    module = _plugin_module(Path(place)) if place.startswith("/") else importlib.import_module(place)
    return operator.attrgetter(name)(module)


def _plugin_module(file: Path) -> ModuleType:
    name = f"rollyard_plugin_{hashlib.sha256(bytes(file.absolute())).hexdigest()[:16]}"
    if name in sys.modules:
        return sys.modules[name]
    loader = _PluginLoader(name, str(file))
    spec = importlib.util.spec_from_file_location(name, file, loader=loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # Dataclasses look for the module of their class there.
    try:
        loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


class _PluginLoader(SourceFileLoader):
    """Loads a file without compiled Python beside it, which could be that of an edit in the same second."""

    def get_code(self, fullname: str) -> CodeType:
        """Return the code of the file as it is now."""
        return self.source_to_code(self.get_data(self.path), self.path)


PluginFiles = Sequence[tuple[Path, Offers]]
"""Plugins that lie in files here, each with what it offers."""


def plugin_registry(paths: Sequence[Path]) -> Registry:
    """Return a registry of what is installed and of what plugins offer, for commands without a control plane.

    Args:
        paths: The plugins, or folders of plugins.

    Raises:
        PermanentFailure: One cannot be used, or has a name that is taken.
    """
    try:
        files = [file for path in paths for file in plugin_files(path)]
        plugins = [read_plugin(file) for file in files]
    except PluginError as error:
        raise PermanentFailure(f"--plugin {error}", error.reason) from error
    taken = {kind: frozenset(installed(f"rollyard.{kind}")) for kind in KINDS}
    problems = doubled(plugins, taken)
    if problems:
        raise PermanentFailure(f"--plugin {problems[0]}", PluginError.reason)
    found = [(file.absolute(), plugin.offers) for file, plugin in zip(files, plugins, strict=True)]
    return Registry(plugins=found)


class Registry:
    """Loads extensions by name and caches them. A worker has one, and one for each set of plugins.

    Args:
        overrides: Classes by group and name, which have precedence over installed packages (for example, a
            test's own tool).
        plugins: The plugins. The names of Rollyard's own distribution have precedence over theirs.
    """

    def __init__(
        self, overrides: Mapping[str, Mapping[str, Any]] | None = None, plugins: PluginFiles = ()
    ) -> None:
        self._plugins = {
            (f"rollyard.{kind}", name): f"{file}:{target}"
            for file, offers in plugins
            for kind, targets in offers.items()
            for name, target in targets.items()
        }
        self._overrides = overrides or {}
        self._loaded: dict[tuple[str, str], Any] = {}
        self._own: metadata.EntryPoints | None = None
        self._entries: Any = None
        for group, classes in self._overrides.items():
            for name, cls in classes.items():
                self._loaded[group, name] = cls
        self._overridden = frozenset(self._loaded)

    def with_plugins(self, plugins: PluginFiles) -> Registry:
        """Return a registry of the same overrides and of these plugins."""
        return Registry(self._overrides, plugins)

    @property
    def has_plugins(self) -> bool:
        """Whether it finds what plugins offer."""
        return bool(self._plugins)

    def names(self, group: str) -> list[str]:
        """Return the names that installed packages and plugins offer in `group`, sorted."""
        return sorted({*installed(group), *(name for kind, name in self._plugins if kind == group)})

    def load_own(self) -> None:
        """Load the extensions of Rollyard's own distribution, so that `load` finds them at once."""
        for group in (HANDLERS, AGENTS, HARNESSES, TOOLS, TOOL_PARSERS):
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
            plugin = self._of_plugin(group, name)
            entry = self._entry(group, name) if plugin is None else None
            noun, reason = _WORDS[group]
            try:
                self._loaded[key] = entry.load() if entry is not None else imported(plugin or "")
            except (ImportError, AttributeError) as error:
                place = entry.value if entry is not None else Path(plugin or "").name
                raise PermanentFailure(
                    f"the {noun} '{name}' ({place}) cannot be loaded: {error}", reason
                ) from error
        return self._loaded[key]

    def is_ours(self, group: str, name: str) -> bool:
        """Return whether `name` stands for a class of Rollyard's own distribution, or an override."""
        return (group, name) in self._overridden or bool(self._own_entries().select(group=group, name=name))

    def target(self, group: str, name: str) -> str:
        """Return where the class called `name` is, as `imported` takes it, without importing it.

        Raises:
            PermanentFailure: No extension of that name is installed here.
        """
        plugin = self._of_plugin(group, name)
        if plugin is not None:
            return plugin
        loaded = self._loaded.get((group, name))
        if loaded is not None:
            return f"{loaded.__module__}:{loaded.__qualname__}"
        return self._entry(group, name).value

    def _of_plugin(self, group: str, name: str) -> str | None:
        """Return where a plugin has the class called `name`, or None if it is not a plugin's."""
        return None if self.is_ours(group, name) else self._plugins.get((group, name))

    def _entry(self, group: str, name: str) -> metadata.EntryPoint:
        # Those of Rollyard's own distribution come from one file. Only other names require reading a file of
        # each distribution.
        entries = self._own_entries().select(group=group, name=name)
        if not entries:
            if self._entries is None:
                _notice_installed()
                self._entries = metadata.entry_points()
            entries = self._entries.select(group=group, name=name)
        for entry in entries:
            return entry
        noun, reason = _WORDS[group]
        names = ", ".join(self.names(group)) or "none"
        also = ""
        if group == HANDLERS and name in self.names(REWARD_FUNCTIONS):
            also = f"; '{name}' is a reward function, which a job names in spec.reward.function"
        raise PermanentFailure(
            f"no {noun} '{name}' is installed on this machine; installed: {names}{also}", reason
        )
