"""Arrow tables and Parquet files of rollouts, with one row for each segment, and back without loss.

`rollyard trajectories -o FILE.parquet` writes one row for each rollout. The rows here are for trainers, which
need sequences.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from rollyard_crds.trajectory import Segment, Trajectory

from rollyard.integrations.errors import TrainerMismatch

if TYPE_CHECKING:
    import pyarrow

COLUMNS: Final[tuple[tuple[str, str], ...]] = (
    ("rollout_id", "string"),
    ("job", "string"),
    ("namespace", "string"),
    ("task_id", "string"),
    ("group_id", "string"),
    ("sample_index", "int32"),
    ("segment", "int32"),
    ("segments", "int32"),
    ("prompt_ids", "list<int32>"),
    ("response_ids", "list<int32>"),
    ("loss_mask", "list<int8>"),
    ("logprobs", "list<double>"),
    ("policy_versions", "list<dictionary<int32, string>>"),
    ("reward", "double"),
    ("status", "string"),
    ("reason", "string"),
    ("reward_reason", "string"),
    ("truncated", "bool"),
    ("truncated_reason", "string"),
    ("record", "string"),
)
"""The columns and their types, in order. docs/integrations/arrow.md describes each of them."""
ROWS: Final = 512
"""The number of rows of a batch, and of a row group in a file."""
_PLAIN: Final = tuple(name for name, _ in COLUMNS if name in Trajectory.model_fields and name != "segments")
"""The columns that are fields of the rollout."""
_TOKENS: Final = tuple(name for name, _ in COLUMNS if name in Segment.model_fields)
"""The columns that are fields of the row's segment."""


def schema() -> pyarrow.Schema:
    """Return the Arrow schema of `COLUMNS`. No column but `reward` and `record` has nulls."""
    import pyarrow as pa

    named = {
        "string": pa.string(),
        "int32": pa.int32(),
        "double": pa.float64(),
        "bool": pa.bool_(),
        "list<int32>": pa.list_(pa.int32()),
        "list<int8>": pa.list_(pa.int8()),
        "list<double>": pa.list_(pa.float64()),
        "list<dictionary<int32, string>>": pa.list_(pa.dictionary(pa.int32(), pa.string())),
    }
    nullable = ("reward", "record")
    return pa.schema([pa.field(name, named[kind], nullable=name in nullable) for name, kind in COLUMNS])


def rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Return the rows of a rollout, one for each segment. One that is not trained on has a mask of 0.

    A rollout without segments has one row with `segment` 0, `segments` 0 and empty lists. The first row's
    `record` is the JSON of all other fields, and the others' is null.
    """
    plain = {name: getattr(trajectory, name) for name in _PLAIN}
    rest = trajectory.model_dump_json(exclude={*_PLAIN, "id", "segments"})
    common = {"rollout_id": trajectory.id, **plain, "segments": len(trajectory.segments)}
    tokens = [{name: getattr(segment, name) for name in _TOKENS} for segment in trajectory.segments]
    return [
        {**common, "segment": index, "record": rest if index == 0 else None, **lists}
        for index, lists in enumerate(tokens or [{name: [] for name in _TOKENS}])
    ]


def table(trajectories: Iterable[Trajectory]) -> pyarrow.Table:
    """Return an Arrow table with the rows of all rollouts, in their order.

    Raises:
        ModuleNotFoundError: pyarrow is not installed (`pip install 'rollyard[parquet]'`).
    """
    import pyarrow as pa

    return pa.Table.from_batches(_batches(trajectories), schema=schema())


def write_parquet(trajectories: Iterable[Trajectory], path: str | Path) -> int:
    """Write the rows of all rollouts to a Parquet file, batch by batch, and return their number.

    Raises:
        OSError: The file cannot be written.
    """
    import pyarrow.parquet

    count = 0
    with pyarrow.parquet.ParquetWriter(path, schema(), compression="zstd") as writer:
        for batch in _batches(trajectories):
            writer.write_batch(batch)
            count += batch.num_rows
    return count


def read(source: pyarrow.Table | str | Path) -> Iterator[Trajectory]:
    """Yield the rollouts of a table of `table`, or of a file of `write_parquet`, as they were.

    Raises:
        TrainerMismatch: It is not such a table, or rows of a rollout are missing, out of order or broken.
        OSError: The file cannot be read.
    """
    rollout: list[dict[str, Any]] = []
    for row in _rows_of(source):
        if rollout and (row["rollout_id"] != rollout[0]["rollout_id"] or row["segment"] == 0):
            yield _joined(rollout)
            rollout = []
        rollout.append(row)
    if rollout:
        yield _joined(rollout)


def _batches(trajectories: Iterable[Trajectory]) -> Iterator[pyarrow.RecordBatch]:
    import pyarrow as pa

    buffer: list[dict[str, Any]] = []
    table_schema = schema()
    for trajectory in trajectories:
        buffer += rows(trajectory)
        if len(buffer) >= ROWS:
            yield pa.RecordBatch.from_pylist(buffer, schema=table_schema)
            buffer = []
    if buffer:
        yield pa.RecordBatch.from_pylist(buffer, schema=table_schema)


def _rows_of(source: pyarrow.Table | str | Path) -> Iterator[dict[str, Any]]:
    import pyarrow.parquet

    if isinstance(source, str | Path):
        try:
            opened = pyarrow.parquet.ParquetFile(source)
        except ValueError as error:
            raise TrainerMismatch(f"{source} is not a Parquet file: {error}") from error
        with opened as file:
            _check(file.schema_arrow.names, str(source))
            for batch in file.iter_batches(batch_size=ROWS):
                yield from batch.to_pylist()
    else:
        _check(source.schema.names, "the table")
        for batch in source.to_batches(max_chunksize=ROWS):
            yield from batch.to_pylist()


def _check(names: list[str], source: str) -> None:
    missing = [name for name, _ in COLUMNS if name not in names]
    if missing:
        raise TrainerMismatch(
            f"{source} has no column {', '.join(missing)}; it was not written by this module"
        )


def _joined(parts: list[dict[str, Any]]) -> Trajectory:
    first = parts[0]
    places = [row["segment"] for row in parts]
    if first["record"] is None or places != list(range(max(1, first["segments"]))):
        raise TrainerMismatch(
            f"rollout {first['rollout_id']} has the rows {places} of {first['segments']}; keep the rows of a "
            f"rollout together and in order"
        )
    try:
        return Trajectory.model_validate(
            {
                **json.loads(first["record"]),
                **{name: first[name] for name in _PLAIN},
                "id": first["rollout_id"],
                "segments": [{name: row[name] for name in _TOKENS} for row in parts][: first["segments"]],
            }
        )
    except (ValueError, TypeError) as error:
        raise TrainerMismatch(f"rollout {first['rollout_id']} cannot be read: {error}") from error
