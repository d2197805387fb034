"""The words in a backend's command line that `rollyard_slurm.node` replaces on the node.

This module is pure.
"""

from __future__ import annotations

from typing import Final

HOST: Final = "@HOST@"
"""The word that stands for the address from which the node reaches the control plane."""
PORT: Final = "@PORT@"
"""The word that stands for a port of the node that is free when the backend starts."""
