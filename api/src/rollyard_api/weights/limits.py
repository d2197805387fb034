"""The time limits for the steps of a weight update, and the interval between checks of a server."""

from __future__ import annotations

from dataclasses import dataclass

from rollyard_inference.weights.control import WeightCallLimits


@dataclass(frozen=True, slots=True)
class UpdateLimits(WeightCallLimits):
    """The time limits of steps, after which they are tried again, and the check interval, in seconds."""

    look: float = 5.0
    """The seconds between two checks of the label of a server that is up to date or awaits its restart."""
