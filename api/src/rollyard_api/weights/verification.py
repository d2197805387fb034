"""Verify that a server has the right weights, by the log-probabilities of a fixed prompt.

A server may answer that it has loaded a checkpoint and still sample with a part of the old one (vLLM
with tied embeddings does). Only the numbers show this.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import orjson
from rollyard_crds.weights import LogprobReference

from rollyard_api.core.bulkhead import Bulkhead
from rollyard_api.core.errors import ControlPlaneError
from rollyard_api.core.problems import TimedOut, Unavailable
from rollyard_api.weights import checkpoints, forward

T = TypeVar("T")

PROMPT_TOKENS: Final = 48
FORWARD_SECONDS: Final = 900.0
_CACHED: Final = 8


_COMPARED: Final = {
    "reference": "the caller's",
    "transformers": "those of a transformers forward pass",
    "earlier": "the server's own before the update",
}


class Unverifiable(ControlPlaneError):
    """There is nothing to compare with. The message says why."""

    reason = "Unverifiable"


@dataclass(frozen=True, slots=True)
class Reference:
    """The expected result of a fixed prompt: `ids` of length n, `logprobs` (nats) of length n - 1."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    tolerance: float
    source: Literal["reference", "transformers", "earlier"]

    @classmethod
    def of(cls, given: LogprobReference, tolerance: float) -> Reference:
        """Return the reference that the caller gave, with the tolerance to apply."""
        return cls(tuple(given.prompt_ids), tuple(given.logprobs), tolerance, "reference")


@dataclass(frozen=True, slots=True)
class Comparison:
    """The largest difference between a server and its reference in nats, and the token where it occurs."""

    max_difference: float
    place: int
    tolerance: float
    source: str

    @property
    def agrees(self) -> bool:
        """Whether the largest difference is within the tolerance."""
        return self.max_difference <= self.tolerance

    def __str__(self) -> str:
        return (
            f"log-probabilities of a fixed prompt were compared with {_COMPARED[self.source]}: "
            f"they differ by up to {self.max_difference:.4g} nats (token {self.place}), "
            f"{self.tolerance:g} is allowed"
        )


def fixed_prompt(vocabulary: int, room: int = PROMPT_TOKENS) -> list[int]:
    """Return ids spread over a vocabulary (a linear congruential sequence), always the same for a size."""
    state, ids = 20_240_229, []
    for _ in range(max(2, min(PROMPT_TOKENS, room))):
        state = (1_103_515_245 * state + 12_345) % 2**31
        ids.append(state * vocabulary >> 31)
    return ids


def compare(reference: Reference, measured: Sequence[float]) -> Comparison:
    """Return the largest difference. A value that is not a number counts as infinitely different."""
    worst, place = 0.0, 1
    for number, (expected, found) in enumerate(zip(reference.logprobs, measured, strict=True), 1):
        difference = abs(expected - found)
        if math.isnan(difference):
            difference = math.inf
        if difference > worst:
            worst, place = difference, number
    return Comparison(worst, place, reference.tolerance, reference.source)


def default_python() -> str:
    """Return this interpreter's path if it has torch and transformers, or an empty string."""
    has = all(importlib.util.find_spec(name) is not None for name in ("torch", "transformers"))
    return sys.executable if has else ""


class Forward:
    """Runs forward passes in a subprocess, one at a time, and keeps the last few results."""

    def __init__(self, python: str, disk: Bulkhead) -> None:
        self._python = python
        self._disk = disk
        self._place = asyncio.Semaphore(1)
        self._known: OrderedDict[tuple[Any, ...], tuple[tuple[int, ...], tuple[float, ...]]] = OrderedDict()

    async def reference(self, folder: Path, tolerance: float) -> Reference:
        """Return what the checkpoint in `folder` gives for the fixed prompt, with the tolerance to apply.

        Raises:
            Unverifiable: transformers is missing, there is no such folder here, or the pass fails.
        """
        if not self._python:
            raise Unverifiable(
                "no reference was given, and no Python with transformers is known (--verify-python)"
            )
        if not await self.look(partial(checkpoints.is_hugging_face, folder)):
            raise Unverifiable(f"no reference was given, and {folder} is no Hugging Face folder seen here")
        async with self._place:
            key = await self.look(partial(_identity, folder))
            if key not in self._known:
                self._known[key] = await self._run(folder)
            self._known.move_to_end(key)
            while len(self._known) > _CACHED:
                self._known.popitem(last=False)
            ids, logprobs = self._known[key]
        return Reference(ids, logprobs, tolerance, "transformers")

    async def look(self, function: Callable[[], T]) -> T:
        """Run a function that reads a folder of weights, apart from the event loop and for a limited time.

        Raises:
            Unverifiable: The folder did not answer in time, or too many others are being read.
        """
        try:
            return await self._disk.run(function)
        except (TimedOut, Unavailable) as error:
            raise Unverifiable(error.detail) from error

    async def _run(self, folder: Path) -> tuple[tuple[int, ...], tuple[float, ...]]:
        ids = fixed_prompt(*await self.look(partial(_vocabulary, folder)))
        command = [self._python, str(Path(forward.__file__)), str(folder)]
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise Unverifiable(f"{self._python} cannot be run: {error}") from error
        try:
            async with asyncio.timeout(FORWARD_SECONDS):
                out, err = await process.communicate(orjson.dumps({"ids": ids}))
        except TimeoutError as error:
            raise Unverifiable(f"the forward pass took more than {FORWARD_SECONDS:g} s") from error
        finally:
            if process.returncode is None:
                process.kill()
                # asyncio sees the end of a process only after the end of its output.
                await process.communicate()
        try:
            logprobs = (
                orjson.loads(out.strip().splitlines()[-1])["logprobs"] if not process.returncode else []
            )
        except (ValueError, KeyError, IndexError) as error:
            raise Unverifiable(f"the forward pass gave no log-probabilities: {error!r}") from error
        if len(logprobs) != len(ids) - 1:
            last = err.decode(errors="replace").strip().splitlines()[-1:]
            raise Unverifiable(f"the forward pass of {folder} failed: {' '.join(last)[:500]}")
        return tuple(ids), tuple(logprobs)


def _identity(folder: Path) -> tuple[Any, ...]:
    files = sorted([folder / "config.json", *folder.glob("*.safetensors")])
    return (str(folder), *((file.name, (stat := file.stat()).st_mtime_ns, stat.st_size) for file in files))


def _vocabulary(folder: Path) -> tuple[int, int]:
    """Return the size of the vocabulary and the number of tokens that a prompt may have."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        text = config.get("text_config") or config
        return int(text["vocab_size"]), int(text.get("max_position_embeddings", 2048)) - 1
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unverifiable(f"{folder / 'config.json'} has no vocab_size: {error!r}") from error
