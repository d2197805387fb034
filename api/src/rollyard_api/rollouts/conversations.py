"""What a worker says of a rollout's conversations, checked against the token lists that come with it.

Trainers train on what the loss masks of the segments say. The mask of a conversation that is not trained on
must therefore be 0 throughout, and a segment belongs to one conversation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rollyard_crds.token_arrays import PackedSegment
from rollyard_crds.trajectory import RunRecord, Turn


def record_problems(record: RunRecord, segments: Sequence[PackedSegment], name: str) -> Iterator[str]:
    """Yield what is wrong with the conversations of a record whose fields have the right types.

    Only the first problem of each kind is described. The time is proportional to the numbers of turns and of
    branches; masks are compared with zero as a whole.

    Args:
        record: What Run recorded.
        segments: Its token lists.
        name: The name of the record in messages.
    """
    lengths = [len(segment.response_ids) for segment in segments]
    if not record.branches:
        if record.continues is not None:
            yield f"{name}.continues: there is no branch {record.continues}"
        yield from _turn_problems(record.turns, lengths, f"{name}.turns")
        return
    yield from _order_problems(record, name)
    owners: dict[int, int] = {}
    conversations = [(record.conversation, True, record.turns, f"{name}.turns")]
    for index, branch in enumerate(record.branches):
        where = f"{name}.branches[{index}]"
        if branch.trained and branch.kind == "policy":
            yield f"{where}.trained: calls that the policy made by itself are never trained on"
            return
        conversations.append((branch.number, branch.trained, branch.turns, f"{where}.turns"))
    for number, trained, turns, where in conversations:
        wrong = next(_turn_problems(turns, lengths, where), None)
        if wrong is not None:
            yield wrong
            return
        for place, turn in enumerate(turns):
            if turn.finish_reason == "replayed" and turn.end == 0:
                continue  # It has no tokens, and names segment 0 for that reason only.
            owner = owners.get(turn.segment)
            if owner is None:
                owners[turn.segment] = number
                if not trained and segments[turn.segment].loss_mask.data.count(1):
                    yield (
                        f"{where}[{place}].segment: the loss mask of segment {turn.segment} must be 0 "
                        "throughout, because its conversation is not trained on"
                    )
                    return
            elif owner != number:
                yield (
                    f"{where}[{place}].segment: segment {turn.segment} belongs to conversation {owner} "
                    "already"
                )
                return


def _turn_problems(turns: Sequence[Turn], lengths: Sequence[int], name: str) -> Iterator[str]:
    """Yield the first turn that does not lie in its segment, of which `lengths` has the responses' tokens."""
    for index, turn in enumerate(turns):
        segment, start, end = turn.segment, turn.start, turn.end
        if turn.finish_reason == "replayed" and (segment, start, end) == (0, 0, 0):
            continue  # No model sampled this turn, and it has no tokens.
        if not 0 <= segment < len(lengths):
            yield f"{name}[{index}].segment: there is no segment {segment}"
            return
        if not 0 <= start <= end <= lengths[segment]:
            yield f"{name}[{index}]: [{start}, {end}) does not lie in segment {segment}"
            return


def _order_problems(record: RunRecord, name: str) -> Iterator[str]:
    """Yield the first branch whose number or parent is wrong, or what is wrong with `continues`."""
    own = record.conversation
    # The messages that precede each conversation and are in it, which is what another may share of it.
    lengths = {own: len(record.messages)}
    before = -1
    for index, branch in enumerate(record.branches):
        where = f"{name}.branches[{index}]"
        if branch.number <= before:
            yield f"{where}.number: must be greater than {before}, that of the branch before it"
            return
        if branch.number == own:
            yield f"{where}.number: {own} is the number of the rollout's own conversation"
            return
        before = branch.number
        if branch.parent is None:
            shared = 0
        elif branch.parent >= branch.number or branch.parent not in lengths:
            yield (
                f"{where}.parent: must be the number of a conversation that began before {branch.number} "
                f"(got {branch.parent})"
            )
            return
        else:
            shared = lengths[branch.parent]
        if branch.shared > shared:
            most = f"at most {shared}, the messages of its parent"
            yield f"{where}.shared: must be {most} (got {branch.shared})"
            return
        lengths[branch.number] = branch.shared + len(branch.messages)
    continues = record.continues
    if continues is not None and (continues >= own or continues not in lengths):
        yield f"{name}.continues: must be the number of a branch that began before {own} (got {continues})"
