"""Transitions of rollouts are written here and nowhere else, with everything that belongs to them.

These are the timings and spans, the attempts that did not end well, the events and metrics, what one stage
leaves for the next, and the wake-ups. Groups and jobs that become complete are ended, too, and a job
with dynamic sampling takes its next step.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final

import msgspec
from rollyard_crds.fields.dynamic_sampling import TARGET_MET
from rollyard_crds.lease import GATEWAY_PROTOCOLS, GatewayStats
from rollyard_crds.rolloutjob import STAGES

from rollyard_api.backends import circuits
from rollyard_api.core.codec import dumps, loads
from rollyard_api.core.wakeups import QUEUE, queue_topic
from rollyard_api.machine import events
from rollyard_api.machine.groups import Tally, result_of
from rollyard_api.machine.jobs import next_step, prefix_of
from rollyard_api.machine.rollout import Rejection, Rollout, Transition, decide
from rollyard_api.machine.states import RolloutState
from rollyard_api.storage import groups as group_rows
from rollyard_api.storage import jobs as job_rows
from rollyard_api.storage import rollouts as rollout_rows
from rollyard_api.storage.database import StageTrouble, Transaction
from rollyard_api.trajectories import attempts, traces

Decided = tuple[Rollout, Transition]

CANCEL_BATCH: Final = 2000
"""The most rollouts that are cancelled in the transaction that meets a target. The sweep ends the rest, which
can no longer be leased."""
_BACKENDS_FAULT: Final = ("BackendMismatch",)
"""The reasons of Run failures that count for a circuit. Calls of `route` report unreachable backends."""
_TIMED: Final = ("queued_seconds", "active_seconds", "attempts")
"""The timings of each stage."""
_MEASURED: Final = ("model_seconds", "tool_seconds", "own_seconds")
"""The timings of all stages together, as workers measure them."""


def happened(tx: Transaction, rows: Iterable[Rollout], event: events.Event) -> None:
    """Apply what follows from an event, other than a report, that has happened to each of these rollouts.

    A rollout that is in none of the event's states is not changed.
    """
    decided = ((row, decide(row, event, None, tx.now)) for row in rows)
    apply(tx, [(row, decision) for row, decision in decided if not isinstance(decision, Rejection)])


def apply(tx: Transaction, decided: Iterable[Decided]) -> None:
    """Write transitions of rollouts, each of which is named once, with all their effects.

    Args:
        tx: The transaction that has read and locked the rollouts' rows.
        decided: What was decided about each of them.
    """
    # Several rows are always changed in the order of their ids, because two replicas could deadlock
    # otherwise.
    ordered = sorted(decided, key=lambda pair: pair[0].id)
    if not ordered:
        return
    batch = _Batch(tx)
    for rollout, transition in ordered:
        batch.add(rollout, transition)
    batch.write()


def start(tx: Transaction, job_id: int, prefix: str, groups: range, samples: int) -> None:
    """Queue `samples` rollouts for each of the groups with these numbers, and add them to the job's total.

    The transaction has locked the job's row.
    """
    if groups:
        rollout_rows.add(tx, job_id, prefix, groups, samples)
        job_rows.add_rollouts(tx, job_id, samples * len(groups))


def advance(tx: Transaction, job_id: int) -> None:
    """Take the next step of a job with dynamic sampling: start groups, hold, or end what is not needed.

    A job that was cancelled, or has been concluded before, is left alone. The transaction has locked the row
    of the job. All decisions about a job are made under this lock, which every ending takes, and replicas
    therefore make them one after the other.
    """
    row = job_rows.sampling_state(tx, job_id)
    if row is None:
        job_rows.finish_concluded(tx, job_id)
        return
    step = next_step(row)
    if step.concludes is not None:
        job_rows.conclude(tx, job_id, step.concludes)
        if step.concludes == TARGET_MET:
            # What another replica has locked is left to the sweep: waiting for it could be a deadlock.
            surplus = rollout_rows.unfinished(tx, job_id, limit=CANCEL_BATCH, skip_locked=True)
            happened(tx, surplus, events.Cancelled(TARGET_MET))
        return
    if step.holds != row.holding:
        job_rows.hold(tx, job_id, holding=step.holds)
    if step.start:
        job_rows.count_started(tx, job_id, len(step.start))
        start(tx, job_id, prefix_of(row.name, row.uid), step.start, row.limits.samples)


class _Ending(msgspec.Struct):
    """A rollout that ends."""

    rollout: Rollout
    transition: Transition
    changes: dict[str, Any]
    timings: dict[str, Any]
    """Its decoded timings."""


class _Batch:
    """The changes of several rollouts, which are gathered and then made with few statements."""

    def __init__(self, tx: Transaction) -> None:
        self.tx = tx
        self.changes: list[dict[str, Any]] = []
        self.kept: list[dict[str, Any]] = []
        self.dropped: list[str] = []
        self.endings: defaultdict[int, list[_Ending]] = defaultdict(list)
        self.unscored: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        self.answering: set[tuple[int, str]] = set()

    def add(self, rollout: Rollout, transition: Transition) -> None:
        """Gather what one transition changes, and note its effects that need no statement."""
        changes = {"b_id": rollout.id, **transition.changes}
        self.changes.append(changes)
        if transition.after != rollout.state:
            self._move(rollout, transition, changes)
        self._note(rollout, transition)

    def _move(self, rollout: Rollout, transition: Transition, changes: dict[str, Any]) -> None:
        """Add the timings, the span and the attempt of the state that a rollout leaves, and its event."""
        tx, stage, after = self.tx, rollout.stage, transition.after
        timings: dict[str, Any] = loads(rollout.timings)
        _add_timings(timings, rollout, transition, tx.now)
        changes["timings"] = dumps(timings).decode()
        leased = rollout.state.is_leased
        if transition.returns or (leased and after == RolloutState.FAILED):
            # Every lease of a stage is one of its attempts, whether it counts or not.
            number: int = timings[stage]["attempts"]
            changes["attempts"] = attempts.added(rollout.attempts, self._attempt(rollout, transition, number))
        traces.left(tx, rollout, reason=transition.reason)
        if after.has_ended:
            ending = _Ending(rollout, transition, changes, timings)
            self.endings[rollout.job_id].append(ending)
            return
        if after == RolloutState.UNSCORED:
            self.unscored[rollout.job_id].append(changes)
        tx.emit(
            rollout.job_id,
            rollout=rollout.id,
            stage=after.stage,
            status=after.status,
            reward=None,
            reason=transition.reason,
        )
        if transition.returns:
            tx.wake(QUEUE)
            if after == RolloutState.QUEUED_INIT:
                # What earlier stages left is of no use, because a rollout at Init starts again.
                self.dropped.append(rollout.id)

    def _attempt(self, rollout: Rollout, transition: Transition, number: int) -> dict[str, Any]:
        """Return the attempt that ends now without having completed its stage."""
        message = getattr(transition.event, "message", "")
        # While a rollout waits in a queue, its row names the worker of the stage before.
        worker = (rollout.worker or "") if rollout.state.is_leased else ""
        if worker:
            self.tx.troubles.append(
                StageTrouble(rollout.job_id, worker, rollout.id, transition.reason, message)
            )
        return attempts.attempt(
            stage=rollout.stage,
            number=number,
            reason=transition.reason,
            message=message,
            worker=worker,
            node=rollout.node,
            started=rollout.since,
            seconds=max(0.0, self.tx.now - rollout.since),
            counted=transition.rule is not None and transition.rule.counted,
        )

    def _note(self, rollout: Rollout, transition: Transition) -> None:
        """Note what belongs to the event itself: metrics, what a stage leaves, and who may continue."""
        tx, event, spent = self.tx, transition.event, max(0.0, self.tx.now - rollout.since)
        match event:
            case events.Leased():
                tx.count("leases_granted", rollout.stage)
                tx.count("queue_seconds", rollout.stage, value=spent)
            case events.InitDone():
                tx.count("stage_seconds", "init", value=spent)
                tx.wake(queue_topic("run"))
                if event.carry is not None:
                    self.kept.append({"rollout_id": rollout.id, "carry": event.carry})
            case events.RunDone():
                self._ran(rollout, event, spent)
            case events.Scored():
                tx.count("stage_seconds", "eval", value=spent)
            case events.Rewarded():
                tx.count("queue_seconds", "eval", value=spent)
            case events.Failed():
                tx.count("stage_failures", event.stage, event.reason)
                if event.stage == "run" and event.reason in _BACKENDS_FAULT and rollout.backend is not None:
                    circuits.failed(tx, rollout.job_id, rollout.backend)
            case events.LeaseLost():
                tx.count("leases_expired", rollout.stage)
            case events.NewWeights():
                tx.count("stale_rollouts", "cancelled" if event.cancel else "restarted")
            case events.Moved():
                tx.count("reroutes")
        if transition.rule is not None and transition.rule.ends_job:
            job_rows.conclude(tx, rollout.job_id, transition.reason)

    def _ran(self, rollout: Rollout, event: events.RunDone, seconds: float) -> None:
        tx, counts = self.tx, event.counts
        tx.count("stage_seconds", "run", value=seconds)
        tx.wake(queue_topic("eval"), queue_topic("run"))  # The backend has room for another rollout.
        values = {
            "rollout_id": rollout.id,
            "trajectory": event.record,
            "segments": event.segments,
            "tokens_in_eval": event.tokens_in_eval,
        }
        if event.carry is not None:
            values["carry"] = event.carry
        self.kept.append(values)
        if counts.template_breaks:
            tx.count("template_breaks", value=counts.template_breaks)
        tx.count("sampled_tokens", value=counts.sampled_tokens)
        if counts.gateway is not None:
            _count_gateway(tx, counts.gateway)
        if rollout.backend is not None:
            self.answering.add((rollout.job_id, rollout.backend))
            if not rollout.was_moved:
                tx.measured.append((rollout.backend, counts.spent_tokens, event.times.model_seconds, seconds))

    def write(self) -> None:
        """Write what was gathered, and end the groups and jobs that are complete."""
        tx = self.tx
        # The rows of backends are locked before those of jobs, because two replicas could deadlock otherwise.
        circuits.completed(tx, self.answering)
        counted = []
        for job_id in sorted({*self.endings, *self.unscored}):
            waiting = self.unscored.get(job_id, [])
            if waiting:
                for seq, changes in enumerate(waiting, job_rows.count_unscored(tx, job_id, len(waiting))):
                    changes["unscored_seq"] = seq
            if job_id in self.endings:
                counted.append((job_id, self._count(job_id)))
        rollout_rows.change(tx, self.changes)
        rollout_rows.keep(tx, self.kept)
        rollout_rows.drop(tx, self.dropped)
        for job_id, job in counted:
            self._complete(job_id, job)

    def _count(self, job_id: int) -> job_rows.EndedCounts:
        """Count the endings of one job, and give each its place in the order of the job's results."""
        tx, endings = self.tx, self.endings[job_id]
        transitions = [ending.transition for ending in endings]
        states = [transition.after for transition in transitions]
        job = job_rows.count_ended(
            tx,
            job_id,
            succeeded=states.count(RolloutState.SUCCEEDED),
            failed=states.count(RolloutState.FAILED),
            cancelled=states.count(RolloutState.CANCELLED),
            rewards=sum(moved.reward for moved in transitions if moved.reward is not None),
        )
        for seq, ending in enumerate(endings, job.ended - len(endings) + 1):
            rollout, reason, reward = ending.rollout, ending.transition.reason, ending.transition.reward
            status = ending.transition.after.status
            ending.changes["end_seq"] = seq
            tx.count("rollouts_ended", job.namespace, job.name, status, reason)
            if reward is not None:
                tx.count("reward", job.namespace, job.name, value=reward)
            tx.emit(
                job_id, rollout=rollout.id, stage=rollout.stage, status=status, reward=reward, reason=reason
            )
            traces.ended(tx, rollout.id, job, ending.transition, _seconds(ending.timings))
        return job

    def _complete(self, job_id: int, job: job_rows.EndedCounts) -> None:
        """End the groups whose members have all ended, and let the job take its next step."""
        tx, endings = self.tx, self.endings[job_id]
        left: defaultdict[int, int] = defaultdict(int)
        for ending in endings:
            left[ending.rollout.group_no] += 1
        tally = Tally(surplus_rollouts=sum(ending.transition.reason == TARGET_MET for ending in endings))
        complete = group_rows.leave(tx, job_id, left)
        signs = job.signs
        for ending in endings:
            if ending.transition.reward is not None:
                signs = signs.with_rollout(ending.transition.reward, traces.counted(ending.timings))
        if complete:
            members = rollout_rows.members(tx, job_id, complete)
            results = {no: result_of(members[no], job.limits) for no in complete}
            first = job_rows.count_ended_groups(tx, job_id, len(complete))
            group_rows.end(tx, job_id, first, results)
            for result in results.values():
                tally.add(result)
                if result.delivered:
                    signs = signs.with_group(informative=result.informative)
        if signs != job.signs:
            job_rows.keep_signs(tx, job_id, signs)
        if job.limits.sampling is not None:
            job_rows.count_groups(tx, job_id, tally)
            advance(tx, job_id)
        elif job.closed and job.ended == job.total:
            job_rows.finish(tx, job_id)
        if any(ending.transition.reward is None for ending in endings):
            # Such a rollout may have had a place on a backend. One that was evaluated no longer had one.
            tx.wake(QUEUE)


def _count_gateway(tx: Transaction, stats: GatewayStats) -> None:
    for protocol, calls in stats.calls.items():
        # A worker names the protocols, and each new label would stay in the metrics.
        tx.count("gateway_calls", protocol if protocol in GATEWAY_PROTOCOLS else "other", value=calls)
    for kind, number in stats.conversations.items():
        tx.count("gateway_conversations", kind, value=number)
    for name in ("refused", "repeats", "segments", "unmatched", "tokenized"):
        tx.count(f"gateway_{name}", value=getattr(stats, name))


def _add_timings(timings: dict[str, Any], rollout: Rollout, transition: Transition, now: float) -> None:
    """Add the time in the state that a rollout leaves to its decoded timings, which its row keeps as JSON.

    The times that the worker measured and what a Run counted are added, too. All of it accumulates over
    stages and attempts. Besides the sums, which become part of its record, the row keeps what only pages
    show: when the rollout entered each state, and what a Run counted. `trajectories.traces` reads it.
    """
    event, before = transition.event, rollout.state
    entry = timings.setdefault(rollout.stage, dict.fromkeys(_TIMED, 0))
    spent = "active_seconds" if before.is_leased else "queued_seconds"
    entry[spent] = round(entry[spent] + max(0.0, now - rollout.since), 6)
    if isinstance(event, events.Leased):
        entry["attempts"] += 1
    elif isinstance(event, events.Report):
        for name in _MEASURED:
            seconds = getattr(event.times, name)
            if seconds:
                timings[name] = round(timings.get(name, 0.0) + seconds, 6)
    if not transition.after.has_ended:
        traces.note(timings, before, rollout.since, transition.after, now)
    if isinstance(event, events.RunDone):
        traces.count(timings, event.counts)


def _seconds(timings: dict[str, Any]) -> float:
    """Return how long a rollout has existed, in seconds; its states follow each other without a gap."""
    stages = (timings[stage] for stage in STAGES if stage in timings)
    seconds: float = sum(stage["queued_seconds"] + stage["active_seconds"] for stage in stages)
    return seconds
