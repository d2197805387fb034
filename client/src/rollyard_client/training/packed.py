"""Pages of results whose token lists arrive as raw arrays, which numpy reads without a copy.

The media type is described in docs/trajectories.md. A group that is larger than a page comes as JSON lines,
from which the same arrays are made. numpy and msgpack are imported at first use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

import orjson

from rollyard_client.call import Call, segment
from rollyard_client.errors import AnswerInvalid
from rollyard_client.requests import results
from rollyard_client.requests.jobs import JOBS, NDJSON
from rollyard_client.training.library import library

if TYPE_CHECKING:
    import httpx

ARRAYS: Final = "application/vnd.rollyard.arrays+msgpack"
_ACCEPT: Final = f"{ARRAYS}, {NDJSON};q=0.5"
PAGE_ROLLOUTS: Final = 1000
_DTYPES: Final = ("<u1", "<u2", "<u4", "<f4", "<f8")
_Invalid = Callable[[str], AnswerInvalid]
_INTEGERS: Final = ("prompt_ids", "response_ids", "loss_mask")


@dataclass(frozen=True, slots=True)
class SegmentArrays:
    """One segment of token ids. P is the length of its prompt, and N that of its response.

    The arrays are read-only. Integers have the narrowest type that holds all of them.
    """

    prompt_ids: Any
    """uint8, uint16 or uint32 [P]"""
    response_ids: Any
    """uint8, uint16 or uint32 [N]"""
    loss_mask: Any
    """uint8 [N]: 1 exactly on the tokens that the policy sampled."""
    logprobs: Any
    """float32 [N], or float64 where a number needs it: in nats, and 0.0 where the mask is 0."""
    policy_versions: list[tuple[str, int]]
    """Runs of equal versions: the version, which is empty where the mask is 0, and the number of tokens.
    Together they have N tokens."""


@dataclass(frozen=True, slots=True)
class TrajectoryArrays:
    """One ended rollout."""

    record: Mapping[str, Any]
    """The fields of `Trajectory` except its segments, as JSON has them."""
    segments: list[SegmentArrays]

    @property
    def reward(self) -> float | None:
        """The reward, or None unless an evaluation gave it."""
        reward: float | None = self.record.get("reward")
        return reward


@dataclass(frozen=True, slots=True)
class GroupArrays:
    """The samples of one task that have a reward, as in `Group`."""

    group_id: str
    task_id: str
    delivered: bool
    informative: bool
    reason: str
    trajectories: list[TrajectoryArrays]


@dataclass(frozen=True, slots=True)
class ArrayPage:
    """One page of a job's ended rollouts, oldest first."""

    trajectories: list[TrajectoryArrays]
    cursor: str
    """The cursor after the page, at which the next one begins."""
    finished: bool
    """Whether no further rollouts will follow."""


@dataclass(slots=True)
class ArrayPages:
    """An iteration over a job's pages. It ends with the last rollout that has ended by now."""

    name: str
    namespace: str
    status: str | None
    cursor: str = ""
    done: bool = False

    def next(self) -> Call[ArrayPage]:
        """Return the call that fetches the next page."""
        query = {
            "namespace": self.namespace,
            "cursor": self.cursor,
            "limit": PAGE_ROLLOUTS,
            "status": self.status,
        }
        path = f"{JOBS}/{segment(self.name)}/trajectories"
        return Call("GET", path, _page, query=query, accept=_ACCEPT)

    def take(self, page: ArrayPage) -> list[ArrayPage]:
        """Return the page as the only item, or no item if it is empty."""
        self.done = page.finished or not page.trajectories
        self.cursor = page.cursor
        return [page] if page.trajectories else []


def _page(answer: httpx.Response) -> ArrayPage:
    form = answer.headers.get("content-type", "")
    return ArrayPage(
        trajectories(answer.content, form),
        answer.headers["rollyard-cursor"],
        answer.headers["rollyard-finished"] == "true",
    )


@dataclass(frozen=True, slots=True)
class GroupPage:
    """One page of a job's ended groups."""

    groups: list[GroupArrays]
    cursor: str
    finished: bool


def group_page(
    name: str, namespace: str, *, cursor: str, wait: float, limit: int, informative: bool
) -> Call[GroupPage]:
    """Return the call that reads a page of ended groups, whose arguments are those of `results.groups`."""
    call: Call[Any] = results.groups(
        name, namespace, cursor=cursor, wait=wait, limit=limit, informative=informative, dropped=False
    )
    return replace(call, parse=_groups, accept=_ACCEPT)


def _groups(answer: httpx.Response) -> GroupPage:
    np = library("numpy")
    groups = []
    for document in _documents(answer.content, answer.headers.get("content-type", "")):
        if not isinstance(document, dict) or not isinstance(document.get("trajectories"), list):
            raise AnswerInvalid("a group must be an object with a list 'trajectories'")
        members = [_trajectory(np, record) for record in document.pop("trajectories")]
        try:
            values = {
                attribute.name: document[attribute.name]
                for attribute in fields(GroupArrays)
                if attribute.name != "trajectories"
            }
        except KeyError as error:
            raise AnswerInvalid(f"a group has no field {error}") from error
        groups.append(GroupArrays(**values, trajectories=members))
    return GroupPage(groups, answer.headers["rollyard-cursor"], answer.headers["rollyard-finished"] == "true")


def trajectories(body: bytes, form: str) -> list[TrajectoryArrays]:
    """Return the rollouts that a page holds.

    Args:
        body: The page.
        form: Its media type: ARRAYS, or JSON lines.

    Raises:
        AnswerInvalid: The page has another form.
        RollyardError: numpy or msgpack is not installed.
    """
    np = library("numpy")
    return [_trajectory(np, record) for record in _documents(body, form)]


def _documents(body: bytes, form: str) -> list[Any]:
    if form.startswith(ARRAYS):
        msgpack = library("msgpack")
        try:
            records = msgpack.unpackb(body)
        except (ValueError, msgpack.UnpackException) as error:
            raise AnswerInvalid(f"a page of results is not msgpack: {error}") from error
    else:
        try:
            records = [orjson.loads(line) for line in body.split(b"\n") if line]
        except ValueError as error:
            raise AnswerInvalid(f"a page of results is not JSON: {error}") from error
    if not isinstance(records, list):
        raise AnswerInvalid(f"a page of results must be a list, and is a {type(records).__name__}")
    return records


def _trajectory(np: Any, record: Any) -> TrajectoryArrays:
    if not isinstance(record, dict) or not isinstance(record.get("segments"), list):
        raise AnswerInvalid("a trajectory must be an object with a list 'segments'")
    segments = [
        _segment(np, segment, partial(_named, record.get("id"), at))
        for at, segment in enumerate(record.pop("segments"))
    ]
    return TrajectoryArrays(record, segments)


def _named(rollout: Any, index: int, text: str) -> AnswerInvalid:
    return AnswerInvalid(f"the trajectory {rollout!r}: segments[{index}].{text}")


def _segment(np: Any, value: Any, invalid: _Invalid) -> SegmentArrays:
    if not isinstance(value, dict):
        raise invalid("must be an object")
    lists = {name: _array(np, value.get(name), name, invalid) for name in (*_INTEGERS, "logprobs")}
    runs = _runs(value.get("policy_versions"), invalid)
    length = len(lists["response_ids"])
    for name, entries in (
        ("loss_mask", len(lists["loss_mask"])),
        ("logprobs", len(lists["logprobs"])),
        ("policy_versions", sum(count for _, count in runs)),
    ):
        if entries != length:
            raise invalid(f"{name} has {entries} entries, response_ids has {length}")
    return SegmentArrays(**lists, policy_versions=runs)


def _array(np: Any, value: Any, name: str, invalid: _Invalid) -> Any:
    if isinstance(value, dict):
        dtype, data = value.get("dtype"), value.get("data")
        if dtype not in _DTYPES or not isinstance(data, bytes) or len(data) % int(dtype[2]):
            raise invalid(f"{name} must have a dtype of {', '.join(_DTYPES)}, and data of whole numbers")
        array = np.frombuffer(data, dtype)
    elif isinstance(value, list):
        try:
            array = _of_list(np, value, name)
        except (TypeError, ValueError, OverflowError) as error:
            raise invalid(f"{name} must be a list of numbers: {error}") from error
    else:
        raise invalid(f"{name} must be a list of numbers")
    if name in _INTEGERS:
        if len(array) and array.dtype.kind not in "ui":
            raise invalid(f"{name} must have integers")
        return array
    # A list without a fraction, such as one of zeros only, travels as integers.
    return array if array.dtype.kind == "f" else array.astype(np.float32)


def _of_list(np: Any, value: Sequence[Any], name: str) -> Any:
    """Return the narrowest array that holds the numbers of a list, as the server would have made it."""
    wide = np.asarray(value)
    if wide.ndim != 1 or (wide.size and wide.dtype.kind not in ("iu" if name in _INTEGERS else "iuf")):
        raise ValueError(f"it is read as {wide.dtype} with {wide.ndim} dimensions")
    if name not in _INTEGERS:
        narrow = wide.astype(np.float32)
        array = narrow if np.array_equal(narrow, wide) else wide.astype(np.float64)
    elif not wide.size or wide.min() >= 0:
        array = wide.astype(np.min_scalar_type(int(wide.max())) if wide.size else np.uint8)
    else:
        array = wide
    array.flags.writeable = False
    return array


def _runs(value: Any, invalid: _Invalid) -> list[tuple[str, int]]:
    if isinstance(value, list):
        runs: Any = [[version, sum(1 for _ in run)] for version, run in groupby(value)]
    else:
        runs = value.get("runs") if isinstance(value, dict) else 0
    try:
        versions, counts = zip(*runs, strict=True) if runs else ((), ())
    except (TypeError, ValueError) as error:
        raise invalid("policy_versions must be a list of texts or of runs of a text and a count") from error
    if set(map(type, versions)) - {str} or set(map(type, counts)) - {int} or min(counts, default=1) < 1:
        raise invalid("policy_versions must have runs of a text and a count greater than 0")
    return list(zip(versions, counts, strict=True))
