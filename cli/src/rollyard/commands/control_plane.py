"""`rollyard control-plane`, which runs a control plane alone."""

from __future__ import annotations

from rollyard_api.command import command

__all__ = ["command"]
