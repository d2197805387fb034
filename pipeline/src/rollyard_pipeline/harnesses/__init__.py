"""Harnesses: how programs are started that play rollouts. Entry points of `rollyard.harnesses`."""

from rollyard_pipeline.harnesses.base import Harness, HarnessPlace, HarnessProgram

__all__ = ["Harness", "HarnessPlace", "HarnessProgram"]
