"""The benchmark is no installed package; its folder is put on the path, as `python bench/run.py` does."""

import sys
from pathlib import Path

BENCH = Path(__file__).parents[2] / "bench"
sys.path.insert(0, str(BENCH))
