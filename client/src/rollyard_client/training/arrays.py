"""Groups as padded arrays of numpy or torch, one row for each segment of tokens.

The libraries are imported at first use, because the client itself does without them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from rollyard_client.training.library import library

if TYPE_CHECKING:
    from rollyard_client.requests.results import Group
    from rollyard_client.training.packed import GroupArrays


@dataclass(frozen=True, slots=True)
class Arrays:
    """The segments of a batch as arrays, padded on the right to the length of the longest row.

    Most trajectories have one segment. Those with several have several rows, which have the same `sample`
    and the same reward. A segment without a token to train on has no row, unless none of its trajectory has
    one: the first then has a row, so that the trajectory's reward counts. R is the number of rows, and L the
    length of the longest one.
    """

    input_ids: Any
    """int64 [R, L]: the prompt, then the response, then `pad_id`."""
    attention_mask: Any
    """int64 [R, L]: 1 on the tokens of the row, 0 on the padding."""
    loss_mask: Any
    """int64 [R, L]: 1 exactly on the tokens that the policy sampled."""
    logprobs: Any
    """float32 [R, L]: the log-probability with which each of them was sampled, in nats, and 0.0 elsewhere."""
    prompt_lengths: Any
    """int64 [R]: the number of tokens before the response."""
    rewards: Any
    """float32 [R]: the reward of the row's trajectory."""
    samples: Any
    """int64 [R]: the index of the row's trajectory in `Batch.trajectories`."""
    groups: Any
    """int64 [R]: the index of the row's group in `Batch.groups`."""


def numpy_arrays(groups: Sequence[Group | GroupArrays], pad_id: int) -> Arrays:
    """Return the segments of these groups as numpy arrays.

    Raises:
        RollyardError: numpy is not installed.
    """
    np = library("numpy")
    rows = [
        (segment, trajectory.reward, sample, number)
        for sample, (number, trajectory) in enumerate(
            (number, trajectory) for number, group in enumerate(groups) for trajectory in group.trajectories
        )
        for segment in _trained(trajectory.segments)
    ]
    count = len(rows)
    length = max((len(s.prompt_ids) + len(s.response_ids) for s, *_ in rows), default=0)
    input_ids = np.full((count, length), pad_id, np.int64)
    attention_mask = np.zeros((count, length), np.int64)
    loss_mask = np.zeros((count, length), np.int64)
    logprobs = np.zeros((count, length), np.float32)
    for row, (segment, *_) in enumerate(rows):
        begin = len(segment.prompt_ids)
        end = begin + len(segment.response_ids)
        input_ids[row, :begin] = segment.prompt_ids
        input_ids[row, begin:end] = segment.response_ids
        attention_mask[row, :end] = 1
        loss_mask[row, begin:end] = segment.loss_mask
        logprobs[row, begin:end] = segment.logprobs
    return Arrays(
        input_ids=input_ids,
        attention_mask=attention_mask,
        loss_mask=loss_mask,
        logprobs=logprobs,
        prompt_lengths=np.array([len(s.prompt_ids) for s, *_ in rows], np.int64),
        rewards=np.array([np.nan if r is None else r for _, r, *_ in rows], np.float32),
        samples=np.array([sample for *_, sample, _ in rows], np.int64),
        groups=np.array([number for *_, number in rows], np.int64),
    )


def _trained(segments: Sequence[Any]) -> Sequence[Any]:
    """Return the segments that have a token to train on, or if there is none, the first one."""
    return [segment for segment in segments if 1 in segment.loss_mask] or segments[:1]


def torch_tensors(groups: Sequence[Group | GroupArrays], pad_id: int, device: Any) -> Arrays:
    """Return the segments of these groups as torch tensors on `device`.

    Raises:
        RollyardError: numpy or torch is not installed.
    """
    torch = library("torch")
    arrays = numpy_arrays(groups, pad_id)
    return Arrays(
        **{
            attribute.name: torch.from_numpy(getattr(arrays, attribute.name)).to(device)
            for attribute in fields(Arrays)
        }
    )
