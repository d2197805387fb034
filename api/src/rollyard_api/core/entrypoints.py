"""The installed handlers, agents, tools and parsers, found by their metadata without importing them."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Final

from rollyard_crds.rolloutjob import RolloutJobSpec
from rollyard_tasks.formats import registry

GROUPS: Final = {
    "handler": "rollyard.handlers",
    "agent": "rollyard.agents",
    "tool": "rollyard.tools",
    "tool parser": "rollyard.tool_parsers",
    "task format": registry.GROUP,
    "reward function": "rollyard.reward_functions",
}

Installed = Mapping[str, frozenset[str]]


def installed() -> Installed:
    """Return the names of all installed entry points, by kind, such as `handler` or `tool parser`."""
    # Each call reads the metadata of every installed distribution.
    points = metadata.entry_points()
    return {
        kind: frozenset(point.name for point in points.select(group=group)) for kind, group in GROUPS.items()
    }


def problems(spec: RolloutJobSpec, available: Installed) -> list[str]:
    """Return a line for each name in the spec that no installed distribution provides."""
    function = None if spec.reward is None else spec.reward.function
    named = [
        ("spec.tasks.format", "task format", spec.tasks.format),
        ("spec.handler", "handler", spec.handler),
        ("spec.agent.type", "agent", spec.agent.type),
        ("spec.agent.toolParser", "tool parser", spec.agent.tool_parser),
        ("spec.reward.function.name", "reward function", None if function is None else function.name),
        *((f"spec.agent.tools[{i}]", "tool", tool) for i, tool in enumerate(spec.agent.tools)),
    ]
    return [
        f"{field}: no {kind} {name!r} is installed; installed: {', '.join(sorted(available[kind])) or 'none'}"
        for field, kind, name in named
        if name is not None and name not in available[kind]
    ]
