"""Read weight folders: check that nothing is missing or cut short, and compute what the weights give.

A folder is read only if this machine sees it, because servers elsewhere may see other folders.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial, reduce
from operator import getitem
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import urlsplit

import orjson
from rollyard_crds.weights import WeightSource

from rollyard_api.core.bulkhead import Bulkhead
from rollyard_api.core.problems import Invalid, TimedOut, Unavailable
from rollyard_api.weights import forward
from rollyard_api.weights.verification import Reference, Unverifiable, fixed_prompt

T = TypeVar("T")

FORWARD_SECONDS: Final = 900.0
"""The limit for a forward pass, in seconds."""
_CACHED: Final = 8
_MAX_CONFIG: Final = 16 << 20
_INDEX: Final = "model.safetensors.index.json"
_MAX_HEADER: Final = 100 << 20
"""The largest safetensors header in bytes, which is the limit of the safetensors library itself."""
_LOCAL: Final = frozenset({"localhost", "127.0.0.1", "::1"})


def check(source: WeightSource, urls: Iterable[str], engine: str) -> str:
    """Refuse a source that the pool's servers cannot load, and return a note on what could not be checked.

    Args:
        source: The source of the update.
        urls: The pool's backends. A folder must exist here if one of them is on this machine.
        engine: The type of the pool's engine.

    Raises:
        Invalid: The source is refused. The message names the field and the file that is missing or cut short.
    """
    if source.lora is not None and engine == "embedded":
        raise _wrong("source.lora", "the embedded engine loads no adapters; give a checkpoint")
    lora, folder = source.lora is not None, source.checkpoint or source.lora
    if folder is None:
        return ""
    field, path = f"source.{'lora' if lora else 'checkpoint'}.path", Path(folder.path)
    if not path.is_absolute():
        raise _wrong(field, f"{path} must be an absolute path: servers run in folders of their own")
    if not path.exists():
        here = sorted(url for url in urls if urlsplit(url).hostname in _LOCAL)
        if here:
            raise _wrong(field, f"{path} does not exist on this machine, where the servers are")
        return f"{path} does not exist where the control plane runs; the servers themselves check it"
    if not path.is_dir():
        raise _wrong(field, f"{path} is a file; give its folder")
    if lora:
        _require(field, path, "adapter_config.json")
        _safetensors(field, path / _require(field, path, "adapter_model.safetensors"))
    elif engine == "embedded" or (engine == "external" and (path / "genai_config.json").exists()):
        _require(field, path, str(_json(field, path, "genai_config.json", "model", "decoder", "filename")))
    else:
        _hugging_face(field, path)
    return ""


def _wrong(field: str, problem: str) -> Invalid:
    return Invalid(f"{field}: {problem}", errors=[f"{field}: {problem}"], reason="CheckpointInvalid")


def _require(field: str, folder: Path, name: str) -> str:
    if not (folder / name).is_file():
        raise _wrong(field, f"{folder} has no {name}")
    return name


def _json(field: str, folder: Path, name: str, *keys: str) -> Any:
    """Return the content of a JSON file of a folder, or the value at a path of keys in it."""
    file = folder / _require(field, folder, name)
    try:
        document = json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise _wrong(field, f"{file} cannot be read: {error}") from error
    try:
        return reduce(getitem, keys, document)
    except (KeyError, TypeError) as error:
        raise _wrong(field, f"{file} names no {'.'.join(keys)}") from error


def _hugging_face(field: str, folder: Path) -> None:
    _json(field, folder, "config.json")
    if (folder / _INDEX).is_file():
        names = _json(field, folder, _INDEX, "weight_map")
        if not isinstance(names, dict):
            raise _wrong(field, f"{folder / _INDEX} has no weight_map of names")
        shards = sorted({str(name) for name in names.values()})
        missing = [name for name in shards if not (folder / name).is_file()]
        if missing:
            raise _wrong(field, f"{folder} has no {', '.join(missing)}, which {_INDEX} names")
    else:
        shards = sorted(file.name for file in folder.glob("*.safetensors"))
        if not shards:
            raise _wrong(field, f"{folder} has no model.safetensors and no {_INDEX}")
    for name in shards:
        _safetensors(field, folder / name)


def _safetensors(field: str, file: Path) -> None:
    """Check the size of a safetensors file.

    The file has eight bytes with the header's length, a JSON header with every tensor's offsets, then the
    tensors.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > min(_MAX_HEADER, size):
                raise _wrong(field, f"{file} is cut short: its header alone has {length} bytes")
            header = json.loads(opened.read(length))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        expected = 8 + length + max(ends, default=0)
    except (OSError, ValueError, struct.error, KeyError, IndexError, TypeError, AttributeError) as error:
        raise _wrong(field, f"{file} is not a safetensors file: {error}") from error
    if size != expected:
        raise _wrong(
            field, f"{file} has {size} bytes, its header says {expected}: it was not written to the end"
        )


def _config(folder: Path) -> dict[str, Any]:
    """Return the `config.json` of a checkpoint, or an empty object if it holds none."""
    try:
        with (folder / "config.json").open("rb") as file:
            config = json.loads(file.read(_MAX_CONFIG))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def checkpoint_dtype(folder: Path) -> str:
    """Return the data type that a checkpoint's `config.json` names, or an empty string if it names none."""
    config = _config(folder)
    for part in (config, config.get("text_config")):
        for key in ("dtype", "torch_dtype"):
            if isinstance(part, dict) and isinstance(part.get(key), str):
                return str(part[key])
    return ""


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
        self._known: OrderedDict[tuple[Any, ...], Reference] = OrderedDict()

    async def reference(self, folder: Path, tolerance: float) -> Reference:
        """Return what the checkpoint in `folder` gives for the fixed prompt, with the tolerance to apply.

        Raises:
            Unverifiable: transformers is missing, there is no such folder here, or the pass fails.
        """
        if not self._python:
            raise Unverifiable(
                "no reference was given, and no Python with transformers is known (--verify-python)"
            )
        key, ids = await self.look(partial(_identity_and_prompt, folder))
        async with self._place:
            if key not in self._known:
                self._known[key] = await self._run(folder, ids, tolerance)
            self._known.move_to_end(key)
            while len(self._known) > _CACHED:
                self._known.popitem(last=False)
            return replace(self._known[key], tolerance=tolerance)

    async def look(self, function: Callable[[], T]) -> T:
        """Run a function that reads a folder of weights, outside of the event loop and for a limited time.

        Raises:
            Unverifiable: The folder did not answer in time, or too many others are being read.
        """
        try:
            return await self._disk.run(function)
        except (TimedOut, Unavailable) as error:
            raise Unverifiable(error.detail) from error

    async def _run(self, folder: Path, ids: list[int], tolerance: float) -> Reference:
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
        return Reference(tuple(ids), tuple(logprobs), tolerance, "transformers")


def _identity_and_prompt(folder: Path) -> tuple[tuple[Any, ...], list[int]]:
    """Return a value that changes with the content of a transformers folder, and a prompt for its model."""
    weights, file = sorted(folder.glob("*.safetensors")), folder / "config.json"
    if not weights or not file.is_file():
        raise Unverifiable(f"no reference was given, and {folder} is not a Hugging Face folder seen here")
    config = _config(folder)
    text = config.get("text_config") or config
    try:
        room = int(text.get("max_position_embeddings", 2048)) - 1
        ids = fixed_prompt(int(text["vocab_size"]), room)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unverifiable(f"{file} has no vocab_size: {error!r}") from error
    stats = ((path.name, path.stat()) for path in (file, *weights))
    return (str(folder), *((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)), ids
