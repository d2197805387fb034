"""Trajectories as Parquet. Kept apart because pyarrow is large and most processes never need it."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rollyard_api.codec import dumps, loads

_SEGMENT = pa.struct(
    [
        ("prompt_ids", pa.list_(pa.int64())),
        ("response_ids", pa.list_(pa.int64())),
        ("loss_mask", pa.list_(pa.int8())),
        ("logprobs", pa.list_(pa.float64())),
        ("policy_versions", pa.list_(pa.string())),
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
        ("status", pa.string()),
        ("reason", pa.string()),
        ("message", pa.string()),
        ("reward", pa.float64()),
        ("segments", pa.list_(_SEGMENT)),
        ("backend", pa.string()),
        ("truncated", pa.bool_()),
        ("truncated_reason", pa.string()),
        ("template_breaks", pa.int32()),
        # Of no fixed shape: JSON text.
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
    "segments": [],
    "backend": "",
    "truncated": False,
    "truncated_reason": "",
    "template_breaks": 0,
    "messages": [],
    "turns": [],
    "sampling": None,
    "metadata": {},
}


def encode(lines: Sequence[bytes]) -> bytes:
    """Trajectories, each as JSON bytes, as one Parquet file; an empty list gives a file with no rows."""
    rows = []
    for line in lines:
        row = _DEFAULTS | loads(line)
        for name in _JSON:
            row[name] = dumps(row[name]).decode()
        rows.append(row)
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    file = io.BytesIO()
    pq.write_table(table, file, compression="zstd")
    return file.getvalue()
