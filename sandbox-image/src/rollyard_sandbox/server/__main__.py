"""The entry point of `python -I -m rollyard_sandbox.server …`, which runs the exec server."""

from __future__ import annotations

import sys

from rollyard_sandbox.server.command_line import main

sys.exit(main())
