"""RolloutJob and BackendPool as pydantic models, and the CRD YAML generated from them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rollyard_crds.backendpool import (
        BackendPool,
        BackendPoolSpec,
        BackendPoolStatus,
        BackendStatus,
        EngineSpec,
    )
    from rollyard_crds.base import API_VERSION, GROUP, VERSION, Condition, Model, ObjectMeta
    from rollyard_crds.manifest import Manifest, ManifestError, load, parse
    from rollyard_crds.rolloutjob import (
        STAGES,
        AgentSpec,
        RolloutCounts,
        RolloutJob,
        RolloutJobSpec,
        RolloutJobStatus,
        SamplingSpec,
        SandboxResources,
        SandboxSpec,
        StageCounts,
        StageName,
        StageSpec,
    )
    from rollyard_crds.task import FunctionCall, Message, Task, TaskSandbox, ToolCall
    from rollyard_crds.tasklist import TaskListError, parse_lines
    from rollyard_crds.weights import (
        UNVERIFIED,
        BackendUpdate,
        LogprobReference,
        WeightSource,
        WeightUpdate,
        WeightUpdateRequest,
    )

__all__ = [
    "API_VERSION",
    "GROUP",
    "STAGES",
    "UNVERIFIED",
    "VERSION",
    "AgentSpec",
    "BackendPool",
    "BackendPoolSpec",
    "BackendPoolStatus",
    "BackendStatus",
    "BackendUpdate",
    "Condition",
    "EngineSpec",
    "FunctionCall",
    "LogprobReference",
    "Manifest",
    "ManifestError",
    "Message",
    "Model",
    "ObjectMeta",
    "RolloutCounts",
    "RolloutJob",
    "RolloutJobSpec",
    "RolloutJobStatus",
    "SamplingSpec",
    "SandboxResources",
    "SandboxSpec",
    "StageCounts",
    "StageName",
    "StageSpec",
    "Task",
    "TaskListError",
    "TaskSandbox",
    "ToolCall",
    "WeightSource",
    "WeightUpdate",
    "WeightUpdateRequest",
    "load",
    "parse",
    "parse_lines",
]

_MODULES: Final = ("backendpool", "base", "manifest", "rolloutjob", "task", "tasklist", "weights")


def __getattr__(name: str) -> Any:
    """Imports a name's module when it is first asked for: to build all models takes a third of a second."""
    if name in __all__:
        for module in _MODULES:
            found = getattr(import_module(f"{__name__}.{module}"), name, None)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
