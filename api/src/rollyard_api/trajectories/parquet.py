"""Trajectories as Parquet, in a module of its own because pyarrow is large and seldom needed."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from rollyard_crds.trajectory import Trajectory

from rollyard_api.core.codec import dumps, loads

_SEGMENT = pa.struct(
    [
        ("prompt_ids", pa.list_(pa.int64())),
        ("response_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float64())),
        ("policy_versions", pa.list_(pa.string())),
    ]
)
_ATTEMPT = pa.struct(
    [
        ("stage", pa.string()),
        ("attempt", pa.int32()),
        ("reason", pa.string()),
        ("message", pa.string()),
        ("worker", pa.string()),
        ("node", pa.string()),
        ("started", pa.float64()),
        ("seconds", pa.float64()),
        ("counted", pa.bool_()),
    ]
)
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("job", pa.string()),
        ("namespace", pa.string()),
        ("task_id", pa.string()),
        ("group_id", pa.string()),
        ("sample_index", pa.int32()),
        ("attempt", pa.int32()),
        ("attempts", pa.list_(_ATTEMPT)),
        ("attempts_dropped", pa.int32()),
        ("status", pa.string()),
        ("reason", pa.string()),
        ("message", pa.string()),
        ("reward", pa.float64()),
        ("reward_reason", pa.string()),
        ("reward_output", pa.string()),
        ("segments", pa.list_(_SEGMENT)),
        ("backend", pa.string()),
        ("tool_parser", pa.string()),
        ("truncated", pa.bool_()),
        ("truncated_reason", pa.string()),
        ("template_breaks", pa.int32()),
        # Columns without a fixed shape hold JSON text.
        ("reward_components", pa.string()),
        ("messages", pa.string()),
        ("turns", pa.string()),
        ("sampling", pa.string()),
        ("timings", pa.string()),
        ("metadata", pa.string()),
    ]
)
_JSON = ("reward_components", "messages", "turns", "sampling", "timings", "metadata")
_DEFAULTS: dict[str, Any] = {
    name: field.get_default(call_default_factory=True)
    for name, field in Trajectory.model_fields.items()
    if name in SCHEMA.names and not field.is_required()
}
GROUP_BYTES = 4 << 20
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
