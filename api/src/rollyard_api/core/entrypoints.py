"""What jobs may name: installed handlers, agents, tools and parsers, and those of the installer's plugins.

The installed ones are found by their metadata without importing them, and those of plugins by parsing their
files. The control plane runs none of them.
"""

from __future__ import annotations

import asyncio
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Final

from rollyard_crds.reading.plugin import Plugin, PluginError, doubled, plugin_files, read_plugin
from rollyard_crds.rolloutjob import RolloutJobSpec

from rollyard_api.core.bulkhead import Bulkhead
from rollyard_api.core.errors import OptionInvalid
from rollyard_api.core.problems import Invalid, TimedOut, Unavailable

NOUNS: Final = {
    "handlers": "handler",
    "agents": "agent",
    "harnesses": "harness",
    "tools": "tool",
    "tool_parsers": "tool parser",
    "task_formats": "task format",
    "reward_functions": "reward function",
}
"""What an extension of each kind is called. With the prefix `rollyard.`, a kind is a group of entry points.
"""
RELOOK_SECONDS: Final = 1.0
"""The shortest time between two looks at the metadata of all that is installed, in seconds."""
READ_SECONDS: Final = 30.0
"""How long a job waits for the plugins to be read, in seconds."""
WAYS: Final = (
    "an extension comes in an installed package, on a cluster in the worker's image, or in a plugin that the "
    "installer gives the control plane (`rollyard up --plugin FILE`; chart value plugins.configMap)"
)

Names = Mapping[str, frozenset[str]]
"""The names of extensions, by kind."""


def installed() -> Names:
    """Return the names of all installed entry points, by kind, such as `handlers` or `tool_parsers`."""
    # Each call reads the metadata of every installed distribution. Without this, a package that was installed
    # in the same moment as another could be missed.
    importlib.invalidate_caches()
    points = metadata.entry_points()
    return {
        kind: frozenset(point.name for point in points.select(group=f"rollyard.{kind}")) for kind in NOUNS
    }


def problems(spec: RolloutJobSpec, available: Names) -> list[str]:
    """Return a line for each name in the spec that is not available."""
    return [
        f"{field}: no {NOUNS[kind]} {name!r} is offered; offered: "
        f"{', '.join(sorted(available.get(kind, ()))) or 'none'}"
        for field, kind, name in spec.extensions()
        if name not in available.get(kind, ())
    ]


@dataclass(frozen=True, slots=True)
class PluginListing:
    """What the plugins offer at a time."""

    plugins: tuple[Plugin, ...] = ()
    troubles: tuple[str, ...] = ()
    """Why files offer nothing, one line for each."""

    def with_names(self, names: Names) -> Names:
        """Return names together with those of the plugins."""
        return {
            kind: names.get(kind, frozenset()).union(
                *(plugin.offers.get(kind, ()) for plugin in self.plugins)
            )
            for kind in NOUNS
        }


class Extensions:
    """The names that jobs may use.

    Args:
        paths: The plugins, and folders of plugins, that the installer gives.
        look: Returns the names of all that is installed.
        clock: Returns the time in seconds, from any beginning.
    """

    def __init__(
        self,
        paths: Sequence[Path] = (),
        look: Callable[[], Names] = installed,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._paths = tuple(paths)
        self._look = look
        self._clock = clock
        self._installed = look()
        self._looked_at = clock()
        self._looking = asyncio.Lock()
        self._known: dict[str, Plugin | PluginError] = {}
        self._threads = Bulkhead("reading of plugins", threads=1, waiting=256, seconds=READ_SECONDS)

    def close(self) -> None:
        """Stop the thread, without waiting for a file that hangs."""
        self._threads.close()

    def check_plugins(self) -> None:
        """Check that every plugin can be used.

        Raises:
            OptionInvalid: One cannot be used, or has a name that is taken.
        """
        listing = self._listed()
        wrong = [*listing.troubles, *doubled(listing.plugins, self._installed)]
        if wrong:
            raise OptionInvalid(f"--plugin {wrong[0]}")

    async def used_by(self, spec: RolloutJobSpec) -> tuple[Plugin, ...]:
        """Return the plugins that a new job uses, as they are now.

        Raises:
            Invalid: Nothing offers a name of the spec, or two offer it; `errors` names each field, and why a
                plugin is of no use now.
            ApiError: The plugins cannot be read in time.
        """
        if problems(spec, self._installed):
            await self._look_again()
        listing = PluginListing()
        if self._paths:
            try:
                listing = await self._threads.run(self._listed)
            except (TimedOut, Unavailable):
                # A file that hangs concerns only the jobs that need it.
                if problems(spec, self._installed):
                    raise
        missing = problems(spec, listing.with_names(self._installed))
        if missing:
            broken = [f"a plugin cannot be used now: {trouble}" for trouble in listing.troubles]
            lines = [*missing, *(broken or [WAYS])]
            raise Invalid("; ".join(lines), errors=lines, reason="NotInstalled")
        wanted = {(kind, name) for _, kind, name in spec.extensions()}
        used = tuple(
            plugin
            for plugin in listing.plugins
            if any((kind, name) in wanted for kind, names in plugin.offers.items() for name in names)
        )
        taken = {
            kind: frozenset(name for name in names if (kind, name) in wanted)
            for kind, names in self._installed.items()
        }
        twice = doubled(used, taken)
        if twice:
            raise Invalid.of(*twice, reason=PluginError.reason)
        return used

    async def _look_again(self) -> None:
        """Look at what is installed, unless that was done just now."""
        async with self._looking:
            if self._clock() - self._looked_at >= RELOOK_SECONDS:
                self._installed = await self._threads.run(self._look)
                self._looked_at = self._clock()

    def _listed(self) -> PluginListing:
        """Read the plugins. This may take long, or hang where a file system does."""
        plugins: list[Plugin] = []
        troubles: list[str] = []
        known: dict[str, Plugin | PluginError] = {}
        for path in self._paths:
            try:
                files = plugin_files(path)
            except PluginError as error:
                troubles.append(str(error))
                continue
            for file in files:
                try:
                    plugin = read_plugin(file, self._known)
                except PluginError as error:
                    troubles.append(str(error))
                    known[error.sha256] = error
                else:
                    plugins.append(plugin)
                    known[plugin.sha256] = plugin
        self._known = known
        return PluginListing(tuple(plugins), tuple(troubles))
