"""A checkpoint's `config.json`, which is read for its data type, is made to cost as much as it can."""

from __future__ import annotations

from pathlib import Path

import pytest
from rollyard_api.weights import checkpoints, verification

pytestmark = pytest.mark.attack(boundary="trainers", surface="weight updates")


@pytest.mark.attack(
    "a checkpoint's `config.json` without end or depth is read for its data type",
    stopped_by="at most 16 MiB are read, by a thread of its own with a time-out; what cannot be read "
    "means bfloat16",
)
@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        b'{"text_config": ' * 200_000,
        b'{"dtype": "float32", "x": "' + b"x" * (17 << 20) + b'"}',
        b'{"dtype": ' + b"9" * 100_000 + b"}",
        b"\xff\xfe{}",
    ],
    ids=["deep list", "deep object", "17 MiB", "long number", "no text"],
)
def test_a_config_without_end_or_depth_names_no_data_type(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    assert checkpoints.checkpoint_dtype(tmp_path) == ""
    assert verification.tolerance("") == verification.REDUCED
