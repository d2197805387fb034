"""The HTTP library `httpx`, which is imported here without its command line.

httpx imports its own command line together with the rest, and with it click, rich and the syntax highlighting
of pygments, if they are installed. That takes longer than everything else that a client needs. httpx works
without its command line if that cannot be imported, and this module makes the import fail. Only `httpx.main`,
the entry point of the command `httpx`, is affected. If httpx was imported before, nothing changes.
"""

from __future__ import annotations

import sys
from typing import Any, Final, cast

__all__ = ["httpx"]

_COMMAND_LINE: Final = "httpx._main"

if "httpx" in sys.modules:
    import httpx
else:
    # An entry of None makes the import of this module fail with ImportError, and only of this one.
    sys.modules[_COMMAND_LINE] = cast(Any, None)
    try:
        import httpx
    finally:
        sys.modules.pop(_COMMAND_LINE, None)
