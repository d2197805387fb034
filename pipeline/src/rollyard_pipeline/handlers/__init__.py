"""Handlers: how a kind of task is prepared, run and scored. Entry points of `rollyard.handlers`."""

from rollyard_pipeline.handlers.base import Evaluation, Handler, StageContext

__all__ = ["Evaluation", "Handler", "StageContext"]
