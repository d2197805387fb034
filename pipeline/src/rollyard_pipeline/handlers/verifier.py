"""Child processes that compare mathematical answers, each one comparison at a time.

math-verify builds on sympy, whose simplification can run for hours on a short hostile input and cannot be
interrupted in a thread. A comparison that exceeds its limit is therefore ended with its process.
`python -m rollyard_pipeline.handlers.verifier` is the child. It reads the JSON line
`{"gold": …, "answer": …}` and writes the JSON line `{"equal": …}`.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Final

from rollyard_pipeline.errors import VerifierFailed
from rollyard_pipeline.handlers.child_processes import ChildProcesses, begin_child

_MEMORY: Final = 2 << 30  # The size of a child's address space in bytes.


class VerifierTimeout(VerifierFailed):
    """A comparison did not end in time, and its process was killed."""

    reason = "VerifierTimeout"


class Verifiers:
    """A bounded set of children, which are started when first needed and kept.

    Args:
        count: The number of children, and therefore of simultaneous comparisons.
    """

    def __init__(self, count: int = 2) -> None:
        self._children = ChildProcesses(
            __name__, what="the verifier", failed=VerifierFailed, timeout=VerifierTimeout, count=count
        )

    async def equal(self, gold: str, answer: str, seconds: float) -> bool:
        """Return whether `answer` is mathematically the same as `gold`.

        Waiting for a free child does not count against `seconds`.

        Raises:
            VerifierTimeout: There is no result within `seconds`.
            VerifierFailed: The child could not be started or died.
        """
        answered = await self._children.ask({"gold": gold, "answer": answer}, seconds)
        return bool(answered.get("equal"))

    async def close(self) -> None:
        """End every child."""
        await self._children.close()


def main() -> None:
    """Answer requests until the input ends. This is the child's main function."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable(logging.WARNING)  # It logs a warning about the missing timeouts at every start.
    begin_child(_MEMORY)
    targets = [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()]
    print("ready", flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        # The parent enforces the timeouts: math-verify's own rely on signals and do not always work.
        gold, answer = (
            parse(f"\\boxed{{{request[key]}}}", targets, parsing_timeout=None) for key in ("gold", "answer")
        )
        equal = bool(gold and answer) and verify(gold, answer, timeout_seconds=None)
        print(json.dumps({"equal": bool(equal)}), flush=True)


if __name__ == "__main__":
    main()
