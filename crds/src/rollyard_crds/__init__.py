"""RolloutJob and BackendPool as pydantic models, and the CRD YAML generated from them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollyard_crds.lazy import lazily

if TYPE_CHECKING:
    from rollyard_crds.backendpool import (
        BackendPool,
        BackendPoolSpec,
        BackendPoolStatus,
        BackendStatus,
        EngineSpec,
    )
    from rollyard_crds.base import API_VERSION, GROUP, VERSION, Condition, Model, ObjectMeta
    from rollyard_crds.claims import Claim, ClaimList
    from rollyard_crds.reading.manifest import Manifest, ManifestError, load, parse
    from rollyard_crds.rolloutjob import (
        STAGES,
        Advice,
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
        WorkerJobSpec,
    )
    from rollyard_crds.task import FunctionCall, Message, Task, TaskSandbox, ToolCall
    from rollyard_crds.trajectory import Attempt, Trajectory, UnscoredTrajectory
    from rollyard_crds.unfinished import UnfinishedJobs
    from rollyard_crds.weights import (
        UNVERIFIED,
        BackendUpdate,
        LogprobReference,
        WeightSource,
        WeightUpdate,
        WeightUpdateRequest,
    )
    from rollyard_crds.workers import Assignment, AssignmentOffered, WaitingImages, WorkerDeath

__all__ = [
    "API_VERSION",
    "GROUP",
    "STAGES",
    "UNVERIFIED",
    "VERSION",
    "Advice",
    "AgentSpec",
    "Assignment",
    "AssignmentOffered",
    "Attempt",
    "BackendPool",
    "BackendPoolSpec",
    "BackendPoolStatus",
    "BackendStatus",
    "BackendUpdate",
    "Claim",
    "ClaimList",
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
    "TaskSandbox",
    "ToolCall",
    "Trajectory",
    "UnfinishedJobs",
    "UnscoredTrajectory",
    "WaitingImages",
    "WeightSource",
    "WeightUpdate",
    "WeightUpdateRequest",
    "WorkerDeath",
    "WorkerJobSpec",
    "load",
    "parse",
]

__getattr__ = lazily(
    __name__,
    {
        "backendpool": "BackendPool BackendPoolSpec BackendPoolStatus BackendStatus EngineSpec",
        "base": "API_VERSION GROUP VERSION Condition Model ObjectMeta",
        "claims": "Claim ClaimList",
        "reading.manifest": "Manifest ManifestError load parse",
        "rolloutjob": "STAGES Advice AgentSpec RolloutCounts RolloutJob RolloutJobSpec RolloutJobStatus "
        "SamplingSpec SandboxResources SandboxSpec StageCounts StageName StageSpec WorkerJobSpec",
        "task": "FunctionCall Message Task TaskSandbox ToolCall",
        "trajectory": "Attempt Trajectory UnscoredTrajectory",
        "unfinished": "UnfinishedJobs",
        "weights": "UNVERIFIED BackendUpdate LogprobReference WeightSource WeightUpdate WeightUpdateRequest",
        "workers": "Assignment AssignmentOffered WaitingImages WorkerDeath",
    },
)
