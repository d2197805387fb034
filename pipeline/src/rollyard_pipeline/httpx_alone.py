"""Imported before httpx: keeps it from importing its own command line, and with that click and rich.

They are installed beside a worker, which has no use for them, and take a tenth of a second of its start.
"""

import sys

sys.modules.setdefault("httpx._main", None)  # type: ignore[arg-type]
