"""The plugins that a job uses, as they were when it was submitted."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rollyard_crds.base import EntryPointName, Model

PluginFile = Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*\.py$", max_length=100)]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$", max_length=64)]


class UsedPlugin(Model):
    """A plugin of the installer's from which a job has a handler, a tool or the like."""

    file: PluginFile
    """The name of the file, without its folder."""
    sha256: Sha256
    """The SHA-256 of its text when the job was submitted. The job uses this text until it ends."""
    edited: bool = False
    """Whether the plugin is another text now. Only the answer to a repeated submission says so."""


class OfferingPlugin(UsedPlugin):
    """A plugin as workers know it."""

    offers: dict[str, dict[EntryPointName, str]]
    """What it offers: by kind, such as `handlers`, and name, the class or function."""
