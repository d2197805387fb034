"""`python -m rollyard_api` runs the control plane as a process, like `rollyard control-plane`."""

from __future__ import annotations

import gc
import sys

# The imports make many objects and hardly any garbage, and searching for it takes a seventh of their time. A
# ready process has switched the searches off for longer.
_collecting = gc.isenabled()
gc.disable()
try:
    from rollyard_api.command import main
    from rollyard_api.program import run  # A ready process has imported all of it.
finally:
    # What the imports made stays until the end, so no collection needs to look at it.
    gc.freeze()
    if _collecting:
        gc.enable()

__all__ = ["main", "run"]

if __name__ == "__main__":
    sys.exit(main())
