"""`python -m rollyard_api` runs the control plane as a process, like `rollyard control-plane`."""

from __future__ import annotations

import gc
import sys

# The imports make many objects and hardly any garbage, and the searches for it take a seventh of their time.
# A process that stands ready has switched them off for longer.
_collecting = gc.isenabled()
gc.disable()
try:
    from rollyard_api.command import main
    from rollyard_api.program import run  # A process that stands ready has imported all of it.
finally:
    # What they made stays until the end, so no collection needs to look at it, not even the first one.
    gc.freeze()
    if _collecting:
        gc.enable()

__all__ = ["main", "run"]

if __name__ == "__main__":
    sys.exit(main())
