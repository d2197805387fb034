"""Measure every figure beside its baseline: `python bench/run.py [--only NAME…] [--quick] [--out FILE]`."""

import sys

from rollyard_bench.main import main

if __name__ == "__main__":
    sys.exit(main())
