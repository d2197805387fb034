"""The REST client of the control plane, sync and async. Programs of users import it from `rollyard`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rollyard_crds.lazy import lazily

if TYPE_CHECKING:
    from rollyard_client._async.client import AsyncClient, AsyncResultIterator
    from rollyard_client._sync.client import Client, ResultIterator
    from rollyard_client.call import Retry
    from rollyard_client.context import Context, context_path, read_token, resolve
    from rollyard_client.driver import DriverClient
    from rollyard_client.errors import (
        AnswerInvalid,
        Conflict,
        ContextError,
        Invalid,
        JobFailed,
        JobReplaced,
        NotFound,
        RollyardError,
        ServerUnavailable,
        StorageFull,
        TokenizerDiffers,
        TooMany,
        Unauthorized,
        WaitTimeout,
    )
    from rollyard_client.requests.cursors import Acknowledged
    from rollyard_client.requests.jobs import OpenedTarget, PushedTasks, Reward, RewardsTaken
    from rollyard_client.requests.results import Group, RolloutSummary, RunningRollout
    from rollyard_client.requests.sign_in import SignInCode
    from rollyard_client.requests.views import FleetOverview, JobStatistics, RolloutQuery, RolloutRow
    from rollyard_client.sse import JobEvent, StageTransition
    from rollyard_client.training.arrays import Arrays
    from rollyard_client.training.batch import ArrayBatch, Batch
    from rollyard_client.training.packed import ArrayPage, GroupArrays, SegmentArrays, TrajectoryArrays

__all__ = [
    "Acknowledged",
    "AnswerInvalid",
    "ArrayBatch",
    "ArrayPage",
    "Arrays",
    "AsyncClient",
    "AsyncResultIterator",
    "Batch",
    "Client",
    "Conflict",
    "Context",
    "ContextError",
    "DriverClient",
    "FleetOverview",
    "Group",
    "GroupArrays",
    "Invalid",
    "JobEvent",
    "JobFailed",
    "JobReplaced",
    "JobStatistics",
    "NotFound",
    "OpenedTarget",
    "PushedTasks",
    "ResultIterator",
    "Retry",
    "Reward",
    "RewardsTaken",
    "RolloutQuery",
    "RolloutRow",
    "RolloutSummary",
    "RollyardError",
    "RunningRollout",
    "SegmentArrays",
    "ServerUnavailable",
    "SignInCode",
    "StageTransition",
    "StorageFull",
    "TokenizerDiffers",
    "TooMany",
    "TrajectoryArrays",
    "Unauthorized",
    "WaitTimeout",
    "context_path",
    "read_token",
    "resolve",
]

__getattr__ = lazily(
    __name__,
    {
        "_async.client": "AsyncClient AsyncResultIterator",
        "_sync.client": "Client ResultIterator",
        "call": "Retry",
        "context": "Context context_path read_token resolve",
        "driver": "DriverClient",
        "errors": "AnswerInvalid Conflict ContextError Invalid JobFailed JobReplaced NotFound RollyardError "
        "ServerUnavailable StorageFull TokenizerDiffers TooMany Unauthorized WaitTimeout",
        "requests.cursors": "Acknowledged",
        "requests.jobs": "OpenedTarget PushedTasks Reward RewardsTaken",
        "requests.results": "Group RolloutSummary RunningRollout",
        "requests.sign_in": "SignInCode",
        "requests.views": "FleetOverview JobStatistics RolloutQuery RolloutRow",
        "sse": "JobEvent StageTransition",
        "training.arrays": "Arrays",
        "training.batch": "ArrayBatch Batch",
        "training.packed": "ArrayPage GroupArrays SegmentArrays TrajectoryArrays",
    },
)
