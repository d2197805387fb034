"""The process that looks for patterns in what the policy wrote.

A pattern can need more time for some texts than anybody has, and the `re` module cannot be interrupted. The
process reads `{"pattern": …, "texts": […]}` a line, and writes `{"found": …}`: whether every text matches.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Final

from rollyard_pipeline.child_processes import begin_child

_MEMORY: Final = 1 << 30  # The size of the address space in bytes.


def main() -> None:
    """Answer requests until the input ends."""
    begin_child(_MEMORY)
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        pattern = re.compile(request["pattern"], re.DOTALL)
        try:
            matched = all(pattern.search(text) is not None for text in request["texts"])
        except (MemoryError, RecursionError):
            matched = False
        print(json.dumps({"found": matched}), flush=True)


if __name__ == "__main__":
    main()
