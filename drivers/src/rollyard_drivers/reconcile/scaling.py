"""The number of workers that a stage wants: as many as its queue keeps busy, within the bounds of the stage.

The module is pure.
"""

from __future__ import annotations

from rollyard_crds.rolloutjob import StageCounts, StageSpec


def wanted_replicas(stage: StageSpec, counts: StageCounts, current: int = 0) -> int:
    """Return the number of workers that a stage needs, between `replicas` and `maxReplicas`.

    Args:
        stage: The spec of the stage.
        counts: The current counts of the stage.
        current: The number of workers that the stage has. The number is reduced only once fewer rollouts are
            active than the smaller number of workers has places for, because the rollouts of a worker that is
            removed may have to start over.
    """
    most = stage.replicas if stage.max_replicas is None else stage.max_replicas
    load = counts.queued + counts.active
    need = min(most, max(stage.replicas, -(-load // stage.concurrency)))
    if need >= current or not counts.active or counts.active < need * stage.concurrency:
        return need
    return min(current, most)


def scales(stage: StageSpec) -> bool:
    """Return whether the number of the stage's workers follows its queue."""
    return stage.max_replicas is not None and stage.max_replicas > stage.replicas
