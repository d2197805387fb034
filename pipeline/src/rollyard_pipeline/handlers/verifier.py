"""Child processes that compare mathematical answers, each one comparison at a time.

math-verify builds on sympy, whose simplification can run for hours on a short hostile input and cannot be
interrupted in a thread. A comparison that exceeds its limit is therefore ended with its process.
`python -m rollyard_pipeline.handlers.verifier` is the child. It reads the JSON line
`{"gold": …, "answer": …}` and writes the JSON line `{"equal": …}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import resource
import sys
from typing import Final

from rollyard_pipeline.errors import VerifierFailed

_MEMORY: Final = 2 << 30  # The size of a child's address space in bytes.
_LINE: Final = 1 << 20  # The limit of a request or an answer in bytes.
_START_SECONDS: Final = 60.0  # Importing sympy takes long on a busy machine.


class VerifierTimeout(VerifierFailed):
    """A comparison did not end in time, and its process was killed."""

    reason = "VerifierTimeout"


class Verifiers:
    """A bounded set of children, which are started when first needed and kept.

    Args:
        count: The number of children, and therefore of simultaneous comparisons.
    """

    def __init__(self, count: int = 2) -> None:
        self._places = asyncio.Semaphore(count)
        self._idle: list[asyncio.subprocess.Process] = []

    async def equal(self, gold: str, answer: str, seconds: float) -> bool:
        """Return whether `answer` is mathematically the same as `gold`.

        Waiting for a free child does not count against `seconds`.

        Raises:
            VerifierTimeout: There is no result within `seconds`.
            VerifierFailed: The child could not be started or died.
        """
        async with self._places:
            child = self._idle.pop() if self._idle else await self._start()
            try:
                equal = await self._ask(child, gold, answer, seconds)
            except BaseException:
                await _kill(child)
                raise
            self._idle.append(child)
            return equal

    async def close(self) -> None:
        """End every child."""
        while self._idle:
            await _kill(self._idle.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        try:
            child = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", __name__,
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, limit=_LINE,
            )  # fmt: skip
        except OSError as error:
            raise VerifierFailed(f"the verifier cannot be started: {error}") from error
        try:
            async with asyncio.timeout(_START_SECONDS):
                ready = await _pipe(child.stdout).readline()
        except TimeoutError as error:
            await _kill(child)
            raise VerifierFailed(f"the verifier was not ready within {_START_SECONDS:g} s") from error
        except BaseException:
            await _kill(child)
            raise
        if ready != b"ready\n":
            await _kill(child)
            raise VerifierFailed("the verifier ended at its start: is math-verify installed?")
        return child

    async def _ask(self, child: asyncio.subprocess.Process, gold: str, answer: str, seconds: float) -> bool:
        request = json.dumps({"gold": gold, "answer": answer}).encode() + b"\n"
        try:
            async with asyncio.timeout(seconds):
                if child.stdin is None:
                    raise VerifierFailed("the verifier has no input")
                child.stdin.write(request)
                await child.stdin.drain()
                line = await _pipe(child.stdout).readline()
        except TimeoutError as error:
            raise VerifierTimeout(f"no verdict within {seconds:g} s") from error
        except OSError as error:
            raise VerifierFailed(f"the verifier ended: {error}") from error
        if not line:
            raise VerifierFailed("the verifier ended without a verdict")
        return bool(json.loads(line)["equal"])


def _pipe(stream: asyncio.StreamReader | None) -> asyncio.StreamReader:
    if stream is None:
        raise VerifierFailed("the verifier has no output")
    return stream


async def _kill(child: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        child.kill()
    if child.stdin is not None:
        child.stdin.close()
    await child.wait()


def main() -> None:
    """Answer requests until the input ends. This is the child's main function."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    logging.disable(logging.WARNING)  # It logs a warning about the missing timeouts at every start.
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
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
