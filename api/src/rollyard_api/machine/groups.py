"""The result of a group whose members have all ended."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from rollyard_crds.fields.dynamic_sampling import MIN_STD, REWARD, TARGET_MET
from rollyard_crds.fields.signals import has_signal

from rollyard_api.machine.limits import Limits
from rollyard_api.machine.states import RolloutState


class Member(Struct, frozen=True):
    """An ended rollout of a group. The fields have the names of its row's columns, in their order."""

    state: RolloutState
    reward: float | None
    components: bytes | None
    """The reward's components as JSON, or None if there are none."""
    reason: str | None
    sampled_tokens: int | None
    """The tokens that its last complete Run sampled, or None before that."""


class GroupResult(Struct, frozen=True):
    """The result of an ended group."""

    delivered: bool
    informative: bool
    reason: str | None
    """Why the group is not delivered, in CamelCase, or None."""
    discarded_tokens: int
    """The known sampled tokens that are of no use, because the group is not informative."""


class Tally(Struct):
    """What ended groups add to the counters of a job with dynamic sampling."""

    informative: int = 0
    uninformative: int = 0
    dropped: int = 0
    surplus: int = 0
    surplus_rollouts: int = 0
    discarded_tokens: int = 0

    def add(self, group: GroupResult) -> None:
        """Count an ended group."""
        if group.informative:
            self.informative += 1
        elif group.delivered:
            self.uninformative += 1
        elif group.reason == TARGET_MET:
            self.surplus += 1
        else:
            self.dropped += 1
        self.discarded_tokens += group.discarded_tokens


def result_of(members: Sequence[Member], limits: Limits) -> GroupResult:
    """Return the result of a group whose members have all ended."""
    rules = limits.sampling
    metric, min_std = (REWARD, MIN_STD) if rules is None else (rules.metric, rules.min_std)
    tokens = sum(member.sampled_tokens or 0 for member in members)
    if any(member.state == RolloutState.CANCELLED and member.reason == TARGET_MET for member in members):
        # What remains of the group is not what the trainer asked for, however many members have a reward.
        return GroupResult(False, False, TARGET_MET, tokens)
    rewarded = [member for member in members if member.state == RolloutState.SUCCEEDED]
    if len(rewarded) < min(limits.min_group_size, len(members)):
        all_cancelled = all(member.state == RolloutState.CANCELLED for member in members)
        return GroupResult(False, False, "Cancelled" if all_cancelled else "TooFewRewards", tokens)
    signal = has_signal(_values(rewarded, metric), min_std)
    return GroupResult(True, signal, None, 0 if signal else tokens)


def _values(rewarded: Sequence[Member], metric: str) -> list[float]:
    """Return the metric of those members that have it."""
    if metric == REWARD:
        return [member.reward for member in rewarded if member.reward is not None]
    components = [
        msgspec.json.decode(member.components, type=dict[str, float])
        for member in rewarded
        if member.components is not None
    ]
    return [named[metric] for named in components if metric in named]
