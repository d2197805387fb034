"""`python -m rollyard_pipeline` runs a stage worker."""

from __future__ import annotations

import gc
import os
import sys

# Without this, pydantic reads a file of every installed distribution to find its plugins, and a worker has no
# use for one. An installation that needs them sets the variable to another value.
os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")

# The imports make many objects and hardly any garbage. Searching for garbage takes a sixth of the time that a
# worker needs before its first request. A process that stands ready has switched them off for longer.
_collecting = gc.isenabled()
gc.disable()
try:
    from rollyard_pipeline.program import main, stand_ready
finally:
    # What they made stays until the end, so no collection needs to look at it, not even the first one.
    gc.freeze()
    if _collecting:
        gc.enable()

__all__ = ["main", "stand_ready"]

if __name__ == "__main__":
    sys.exit(main())
