"""Handlers, which prepare, run and score one kind of task. Entry points of `rollyard.handlers`."""

from rollyard_pipeline.handlers.base import Evaluation, FolderChanges, Handler, StageContext

__all__ = ["Evaluation", "FolderChanges", "Handler", "StageContext"]
