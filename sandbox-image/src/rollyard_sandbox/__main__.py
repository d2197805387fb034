"""The entry point of `python -I /path/to/rollyard_sandbox …`: the server without an installed package."""

from __future__ import annotations

import os
import sys

if not __package__:
    # The folder was run by its path, and its parent holds this package and ptyprocess.
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from rollyard_sandbox.server.command_line import main

sys.exit(main())
