"""How many workers a stage wants: as many as its queue keeps busy, within its bounds. Pure."""

from __future__ import annotations

from rollyard_crds.rolloutjob import StageCounts, StageSpec


def wanted_replicas(stage: StageSpec, counts: StageCounts, current: int = 0) -> int:
    """Workers for what waits and works in the stage, between `replicas` and `maxReplicas`.

    Args:
        counts: of the stage, live.
        current: workers that it has. Fewer are wanted only once fewer rollouts are active than the
            fewer workers have places for: what a worker holds when it goes may have to start over.
    """
    most = stage.replicas if stage.max_replicas is None else stage.max_replicas
    load = counts.queued + counts.active
    need = min(most, max(stage.replicas, -(-load // stage.concurrency)))
    if need >= current or not counts.active or counts.active < need * stage.concurrency:
        return need
    return min(current, most)


def scales(stage: StageSpec) -> bool:
    """Whether the number of its workers follows the queue."""
    return stage.max_replicas is not None and stage.max_replicas > stage.replicas
