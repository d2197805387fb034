"""Trajectories as Parquet, in a module of its own because pyarrow is large and seldom needed."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel
from rollyard_crds.trajectory import Attempt, Trajectory

from rollyard_api.core.codec import dumps, loads

_SEGMENT: Final = pa.struct(
    [
        ("prompt_ids", pa.list_(pa.int64())),
        ("response_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float64())),
        ("policy_versions", pa.list_(pa.string())),
    ]
)
_TYPES: dict[Any, pa.DataType] = {
    int: pa.int32(),
    float: pa.float64(),
    float | None: pa.float64(),
    bool: pa.bool_(),
}


def _columns(model: type[BaseModel], others: Mapping[str, pa.DataType]) -> list[tuple[str, pa.DataType]]:
    """Return the columns of a model, all of which except these are numbers, truth values or texts."""
    fields = model.model_fields.items()
    return [(name, others.get(name) or _TYPES.get(field.annotation, pa.string())) for name, field in fields]


_OTHERS: Final = {
    "segments": pa.list_(_SEGMENT),
    "attempts": pa.list_(pa.struct(_columns(Attempt, {}))),
    "continues": pa.int32(),
}
SCHEMA: Final = pa.schema(_columns(Trajectory, _OTHERS))
_JSON: Final = (
    "reward_components",
    "messages",
    "turns",
    "sampling",
    "timings",
    "metadata",
    "branches",
    "harness",
)
"""The columns without a fixed shape, which hold JSON text."""
_DEFAULTS: dict[str, Any] = {
    name: field.get_default(call_default_factory=True)
    for name, field in Trajectory.model_fields.items()
    if name in SCHEMA.names and not field.is_required()
}
GROUP_BYTES: Final = 4 << 20
"""The JSON bytes of a row group. As Python objects, its rows take about five times as much memory."""


def encode(lines: Sequence[bytes]) -> bytes:
    """Encode trajectories, each as JSON bytes, as one Parquet file. An empty list gives no rows."""
    file = io.BytesIO()
    with pq.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
        rows: list[dict[str, Any]] = []
        size = 0
        for line in lines:
            rows.append(_row(line))
            size += len(line)
            if size >= GROUP_BYTES:
                writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
                rows, size = [], 0
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema=SCHEMA))
    return file.getvalue()


def _row(line: bytes) -> dict[str, Any]:
    row: dict[str, Any] = _DEFAULTS | loads(line)
    for name in _JSON:
        row[name] = dumps(row[name]).decode()
    return row
