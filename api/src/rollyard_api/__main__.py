"""`python -m rollyard_api` runs the control plane as a process."""

from __future__ import annotations

import gc
import sys

# The imports make many objects and hardly any garbage, and the searches for it take a seventh of their time.
# A process that stands ready has switched them off for longer.
_collecting = gc.isenabled()
gc.disable()
try:
    from rollyard_api.program import main
finally:
    # What they made stays until the end, so no collection needs to look at it, not even the first one.
    gc.freeze()
    if _collecting:
        gc.enable()

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
