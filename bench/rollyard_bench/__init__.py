"""Rollyard's benchmarks: every figure beside its named baseline, measured in the same run."""
