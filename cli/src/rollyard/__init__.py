"""The SDK of trainers and the command line.

Example::

    from rollyard import Client

    with Client() as client:
        client.submit("job.yaml", tasks="tasks.jsonl")
        client.wait("job", timeout=600)
        rewards = [trajectory.reward for trajectory in client.trajectories("job")]

`rollyard.errors` has the exceptions that calls raise.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rollyard_client import (
        Acknowledged,
        ArrayBatch,
        ArrayPage,
        Arrays,
        AsyncClient,
        AsyncResultIterator,
        Batch,
        Client,
        FleetOverview,
        Group,
        GroupArrays,
        JobEvent,
        JobStatistics,
        OpenedTarget,
        PushedTasks,
        ResultIterator,
        Retry,
        Reward,
        RewardsTaken,
        RolloutQuery,
        RolloutRow,
        RolloutSummary,
        RunningRollout,
        SegmentArrays,
        SignInCode,
        StageTransition,
        TrajectoryArrays,
    )
    from rollyard_crds.backendpool import BackendPool
    from rollyard_crds.rolloutjob import RolloutJob
    from rollyard_crds.task import Message, Task
    from rollyard_crds.trajectory import Segment, Trajectory, UnscoredTrajectory
    from rollyard_crds.weights import LogprobReference, WeightUpdate

    from rollyard import errors
    from rollyard.jobs.evaluation import evaluate

    __version__: str

__all__ = [
    "Acknowledged",
    "ArrayBatch",
    "ArrayPage",
    "Arrays",
    "AsyncClient",
    "AsyncResultIterator",
    "BackendPool",
    "Batch",
    "Client",
    "FleetOverview",
    "Group",
    "GroupArrays",
    "JobEvent",
    "JobStatistics",
    "LogprobReference",
    "Message",
    "OpenedTarget",
    "PushedTasks",
    "ResultIterator",
    "Retry",
    "Reward",
    "RewardsTaken",
    "RolloutJob",
    "RolloutQuery",
    "RolloutRow",
    "RolloutSummary",
    "RunningRollout",
    "Segment",
    "SegmentArrays",
    "SignInCode",
    "StageTransition",
    "Task",
    "Trajectory",
    "TrajectoryArrays",
    "UnscoredTrajectory",
    "WeightUpdate",
    "__version__",
    "errors",
    "evaluate",
]

_MODELS: Final = {
    "BackendPool": "rollyard_crds.backendpool",
    "LogprobReference": "rollyard_crds.weights",
    "Message": "rollyard_crds.task",
    "RolloutJob": "rollyard_crds.rolloutjob",
    "Segment": "rollyard_crds.trajectory",
    "Task": "rollyard_crds.task",
    "Trajectory": "rollyard_crds.trajectory",
    "UnscoredTrajectory": "rollyard_crds.trajectory",
    "WeightUpdate": "rollyard_crds.weights",
    "evaluate": "rollyard.jobs.evaluation",
}
"""The modules of the names that are not those of `rollyard_client`."""


def __getattr__(name: str) -> Any:
    # These are imported at first use, because `rollyard --help` must not import an HTTP client.
    if name == "__version__":
        from rollyard_process.version import installed_version

        return installed_version()
    if name == "errors":
        return import_module("rollyard.errors")
    if name in __all__:
        return getattr(import_module(_MODELS.get(name, "rollyard_client")), name)
    raise AttributeError(f"module 'rollyard' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
