"""The size of the files that a browser loads to show the page."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Final

import rollyard_api

from rollyard_bench.processes import ProgramFailed
from rollyard_bench.registry import Measurement, Settings
from rollyard_bench.results import Baseline

BUNDLE: Final = Path(rollyard_api.__file__).parent / "page"


async def measure(settings: Settings) -> list[Measurement]:
    """Compress each file by itself, as it is sent."""
    files = sorted(path for path in BUNDLE.rglob("*") if path.suffix in (".html", ".js", ".css", ".svg"))
    if not files:
        raise ProgramFailed(f"the page is not built: there is nothing in {BUNDLE}")
    sizes = {path.name: len(gzip.compress(path.read_bytes(), 9)) for path in files}
    plain = sum(path.stat().st_size for path in files)
    how = "gzip -9 of " + ", ".join(f"{name} {size:,} bytes" for name, size in sizes.items())
    return [
        Measurement(
            "page_bundle",
            sum(sizes.values()) / 1e3,
            Baseline("not compressed", plain / 1e3),
            f"{how}; 1 KB is 1,000 bytes",
        )
    ]
