"""How long a server may take for a step of a weight update, and how often it is looked at."""

from __future__ import annotations

from dataclasses import dataclass

from rollyard_inference.weights.control import WeightCallLimits


@dataclass(frozen=True, slots=True)
class UpdateLimits(WeightCallLimits):
    """Seconds within which a server must have done a step (another try follows), and between looks."""

    look: float = 5.0
    """Between two looks at the label of a server that should be as it is, or that waits for its restart."""
