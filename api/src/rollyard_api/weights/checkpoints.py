"""Check weight folders before any server is asked to load them: no file may be missing or cut short.

A folder is checked only if this machine sees it, because servers elsewhere may see other folders.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rollyard_crds.weights import WeightSource

from rollyard_api.core.problems import Invalid

_INDEX = "model.safetensors.index.json"
_MAX_HEADER = 100 << 20
"""The largest safetensors header in bytes, which is the limit of the safetensors library itself."""
_LOCAL = frozenset({"localhost", "127.0.0.1", "::1"})


def check(source: WeightSource, urls: Iterable[str], engine: str) -> str:
    """Refuse a source that the pool's servers cannot load, and return a note on what could not be checked.

    Args:
        source: The source of the update.
        urls: The pool's backends. A folder must exist here if one of them is on this machine.
        engine: The type of the pool's engine.

    Raises:
        Invalid: The source is refused. The message names the field and the file that is missing or cut short.
    """
    if source.checkpoint is not None:
        return _check("source.checkpoint.path", Path(source.checkpoint.path), urls, engine, lora=False)
    if source.lora is not None:
        if engine == "embedded":
            raise _wrong("source.lora", "the embedded engine loads no adapters; give a checkpoint")
        return _check("source.lora.path", Path(source.lora.path), urls, engine, lora=True)
    return ""


def _check(field: str, path: Path, urls: Iterable[str], engine: str, *, lora: bool) -> str:
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
        _onnx(field, path)
    else:
        _hugging_face(field, path)
    return ""


def is_hugging_face(path: Path) -> bool:
    """Return whether transformers could read the folder."""
    return (path / "config.json").is_file() and bool(list(path.glob("*.safetensors")))


def _wrong(field: str, what: str) -> Invalid:
    return Invalid(f"{field}: {what}", errors=[f"{field}: {what}"], reason="CheckpointInvalid")


def _require(field: str, folder: Path, name: str) -> str:
    if not (folder / name).is_file():
        raise _wrong(field, f"{folder} has no {name}")
    return name


def _json(field: str, file: Path) -> Any:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise _wrong(field, f"{file} cannot be read: {error}") from error


def _onnx(field: str, folder: Path) -> None:
    config = _json(field, folder / _require(field, folder, "genai_config.json"))
    try:
        name = str(config["model"]["decoder"]["filename"])
    except (KeyError, TypeError) as error:
        raise _wrong(field, f"{folder / 'genai_config.json'} names no model.decoder.filename") from error
    _require(field, folder, name)


def _hugging_face(field: str, folder: Path) -> None:
    _json(field, folder / _require(field, folder, "config.json"))
    if (folder / _INDEX).is_file():
        index = _json(field, folder / _INDEX)
        try:
            shards = sorted(set(index["weight_map"].values()))
        except (KeyError, TypeError, AttributeError) as error:
            raise _wrong(field, f"{folder / _INDEX} has no weight_map of names") from error
        missing = [name for name in shards if not (folder / str(name)).is_file()]
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
        raise _wrong(field, f"{file} is no safetensors file: {error}") from error
    if size != expected:
        raise _wrong(
            field, f"{file} has {size} bytes, its header says {expected}: it was not written to the end"
        )
